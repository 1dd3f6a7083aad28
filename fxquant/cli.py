"""The ``fxquant`` command: plan, generate, schemes, demo. transformers and pydantic are loaded when a command runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .errors import ConfigError, FxQuantError

CONFIG_OPTION = "--quantization-config"


class _Command(TyperCommand):
    """A command that takes the config in vLLM's dotted style too, and reports fxquant's errors in one message."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(fold_dotted(args)))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FxQuantError as error:
            typer.echo(f"fxquant: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    help="Online quantisation for PyTorch, done by the compiler.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, a hub id, or demo.")]
Quantization = Annotated[
    str | None, typer.Option("--quantization", "-q", help="A shorthand such as fp8_per_channel, or online.")
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        CONFIG_OPTION,
        metavar="JSON",
        help=(
            "What the shorthand does not say, as JSON; or part by part: "
            f"{CONFIG_OPTION}.linear NAME, .moe NAME, .linear.weight NAME, .linear.activation NAME (.moe the same), "
            ".ignore PATTERN (again for each), .scale_search mse."
        ),
    ),
]
LinearBackend = Annotated[str, typer.Option(help="Kernel family of linear layers: auto, torch, triton or reference.")]
MoeBackend = Annotated[str, typer.Option(help="Kernel family of expert layers.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: cuda where there is one, else cpu.")]
Dtype = Annotated[str, typer.Option(help="dtype of the unquantised model: auto, bfloat16, float16 or float32.")]
AllowUnmatched = Annotated[bool, typer.Option("--allow-unmatched", help="Warn of a pattern that matches nothing, not fail.")]


@app.command(cls=_Command)
def plan(
    model: Model,
    quantization: Quantization = None,
    quantization_config: Config = None,
    linear_backend: LinearBackend = "auto",
    moe_backend: MoeBackend = "auto",
    device: Device = None,
    dtype: Dtype = "auto",
    allow_unmatched: AllowUnmatched = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, layer by layer.")] = False,
) -> None:
    """Print what would happen to each layer, without reading a weight."""
    from . import models
    from .config import resolve
    from .planner import plan as make_plan

    config = merge_configs(quantization_config or ())
    resolve(quantization, config)  # refuses a wrong config before the model is looked for
    made = make_plan(
        models.skeleton(model, dtype),
        quantization,
        config,
        device=_device(device),
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        strict=not allow_unmatched,
    )
    typer.echo(json.dumps(made.to_dict(), indent=1) if as_json else str(made))


@app.command(cls=_Command)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    quantization: Quantization = None,
    quantization_config: Config = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 32,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the model first.")] = False,
    linear_backend: LinearBackend = "auto",
    moe_backend: MoeBackend = "auto",
    device: Device = None,
    dtype: Dtype = "auto",
    allow_unmatched: AllowUnmatched = False,
) -> None:
    """Load a model, quantise it, print the report, and continue a text greedily."""
    from . import evaluate, models
    from .compiler import compile as compile_model
    from .config import resolve
    from .quantize import quantize_

    if not prompt:
        raise ConfigError("--prompt: got an empty text; give at least one word to continue")
    config = merge_configs(quantization_config or ())
    resolve(quantization, config)
    loaded, tokenizer = models.load(model, dtype)
    if not getattr(loaded, "can_generate", bool)():
        raise models.ModelError(f"{model}: {type(loaded).__name__} does not generate text; needed is a causal language model")
    report = quantize_(
        loaded,
        quantization,
        config,
        device=_device(device),
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        strict=not allow_unmatched,
    )
    typer.echo(f"{report}\n")
    if compiled:
        typer.echo("compiling; the first tokens take minutes on a CPU", err=True)
        compile_model(loaded, dynamic=True)
    typer.echo(prompt + evaluate.continue_greedily(loaded, tokenizer, prompt, max_new_tokens))


@app.command(cls=_Command)
def schemes(
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, with the answer of every kernel family.")] = False,
) -> None:
    """Print what runs for each scheme on this machine, or why nothing does."""
    from .scheme_table import scheme_table

    table = scheme_table(_device(device))
    typer.echo(json.dumps(table.to_dict(), indent=1) if as_json else str(table))


@app.command(cls=_Command)
def demo(
    output: Annotated[Path, typer.Option(help="Where to write every number as JSON.")] = Path("demo.json"),
    device: Annotated[str, typer.Option(help="Where to run the model.")] = "cpu",
    readme: Annotated[Path | None, typer.Option(help="A Markdown file to write the table into, between its marks.")] = None,
) -> None:
    """Quantise a real model in every scheme; print plan, bytes, perplexity, agreement and a continuation."""
    from .demo import run

    run(output, device, readme=readme)


def fold_dotted(args: Sequence[str]) -> Iterator[str]:
    """Words of a command line with ``--quantization-config.a.b VALUE`` as ``--quantization-config {"a": {"b": VALUE}}``.

    VALUE is JSON where that gives null, an object or, for ``ignore``, a list; otherwise text. ``ignore`` may be given again
    and again; a trailing ``+`` (vLLM's mark for it) is accepted.
    """
    words = iter(args)
    for word in words:
        if word == "--":
            yield word
            yield from words
            return
        option, equals, value = word.partition("=")
        if not option.startswith(f"{CONFIG_OPTION}."):
            yield word
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise typer.BadParameter(f"Option '{option}' requires an argument.")
        # At most two names: what follows targets. is a pattern and may hold dots.
        first, *rest = option.removeprefix(f"{CONFIG_OPTION}.").removesuffix("+").split(".", 1)
        content = _value(value, listed=first == "ignore" and not rest)
        yield from (CONFIG_OPTION, json.dumps({first: {rest[0]: content} if rest else content}))


def _value(text: str, *, listed: bool) -> Any:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = text
    if listed:
        return parsed if isinstance(parsed, list) and all(isinstance(entry, str) for entry in parsed) else [text]
    return parsed if parsed is None or isinstance(parsed, dict) else text


def merge_configs(parts: Sequence[str]) -> str | dict[str, Any] | None:
    """One config from the JSON texts of the command line: objects are merged, lists joined.

    Raises:
        ConfigError: a part breaks the grammar, or two parts say different things of one field.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    from .config import QuantizationConfig

    merged: dict[str, Any] = {}
    for part in parts:
        QuantizationConfig.model_validate_json(part)
        _merge(merged, json.loads(part), "quantization_config")
    return merged


def _merge(into: dict[str, Any], part: Mapping[str, Any], at: str) -> None:
    for key, value in part.items():
        known = into.get(key, value)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(into.setdefault(key, {}), value, f"{at}.{key}")
        elif isinstance(known, list) and isinstance(value, list):
            into[key] = [*into.get(key, ()), *value]
        elif known != value:
            raise ConfigError(f"{at}.{key}: got both {json.dumps(known)} and {json.dumps(value)}; give it once.")
        else:
            into[key] = value


def _device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """The console script."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the progress bars of the libraries that load models
    app()


if __name__ == "__main__":
    main()
