"""State dicts through files that take plain tensors only."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxquant
from fxquant import ConfigError, QuantizedTensor
from fxquant.kernels.formats import WEIGHT_FORMATS
from tests.kernels.weights import READ_ONLY_FORMATS, quantised, same_bytes


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("assign", [False, True])
def test_round_trip_of_a_tied_llama_through_safetensors(weight_format, assign, llama, tmp_path):
    model, other = llama(tie_word_embeddings=True), llama(seed=1, tie_word_embeddings=True)
    ids = torch.arange(8).reshape(1, 8)
    fxquant.quantize_(model, "online", {"linear": weight_format})
    fxquant.quantize_(other, "online", {"linear": weight_format})
    flat = fxquant.flatten_state_dict(model.state_dict())
    assert all(type(value) is torch.Tensor for value in flat.values())
    save_file(flat, tmp_path / "model.safetensors")
    other.load_state_dict(fxquant.unflatten_state_dict(load_file(tmp_path / "model.safetensors")), assign=assign)
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_transposed_and_tied_quantised_weights(tmp_path):
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"conv": Conv1D(8, 4), "a": nn.Linear(4, 8), "b": nn.Linear(4, 8)})
    model["b"].weight = model["a"].weight
    fxquant.quantize_(model, "fp8_per_channel")
    flat = fxquant.flatten_state_dict(model.state_dict())
    assert "b.weight.fxquant_tied_to" in flat
    save_file(flat, tmp_path / "model.safetensors")
    state = fxquant.unflatten_state_dict(load_file(tmp_path / "model.safetensors"))
    assert state["a.weight"] is state["b.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value)
        assert type(state[name]) is type(value)
        if isinstance(value, QuantizedTensor):
            assert state[name].spec == value.spec


def assert_round_trip(state: dict[str, QuantizedTensor], path) -> None:
    flat = fxquant.flatten_state_dict(state)
    assert all(type(value) is torch.Tensor for value in flat.values())
    save_file(flat, path)
    back = fxquant.unflatten_state_dict(load_file(path))
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert isinstance(back[name], QuantizedTensor)
        assert back[name].spec == value.spec
        assert back[name].shape == value.shape
        assert same_bytes(back[name].components, value.components)
        assert torch.equal(back[name].dequantize(), value.dequantize())


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_component_of_every_kind_of_weight(weight_format, dtype, tmp_path):
    """Matrices and experts, either order of dimensions, shards that are stacked or take turns, odd numbers of columns."""
    names, turns = (weight_format, None), {"shards": (7, 7), "interleaved": True}
    w, experts = torch.randn(14, 37).to(dtype), torch.randn(3, 14, 37).to(dtype)
    state = {
        "matrix": quantised(w, names),
        "conv1d": quantised(w, names, contraction=-2),
        "fused": quantised(w, names, shards=(5, 9)),
        "experts.down_proj": quantised(experts, names),
        "experts.gate_up_proj": quantised(experts, names, shards=(7, 7)),
        "experts.turns": quantised(experts, names, **turns),
        "experts.transposed": quantised(experts.mT.contiguous(), names, contraction=-2, **turns),
    }
    assert_round_trip(state, tmp_path / "state.safetensors")
    stored = sum(value.spec.nbytes for value in state.values())
    assert stored < (tmp_path / "state.safetensors").stat().st_size < stored + 8192


@pytest.mark.parametrize("weight_format", READ_ONLY_FORMATS)
def test_every_component_of_4_bit_integers(weight_format, tmp_path):
    names = (weight_format, "int8_per_token")
    w, experts = torch.randn(14, 37), torch.randn(3, 14, 37)
    state = {
        "matrix": quantised(w, names),
        "fused": quantised(w, names, shards=(5, 9)),
        "experts": quantised(experts, names, shards=(7, 7)),
    }
    assert_round_trip(state, tmp_path / "state.safetensors")


def test_experts_of_one_stack_are_written_one_by_one(tmp_path):
    stack = quantised(torch.randn(3, 14, 37), ("nvfp4", None), shards=(7, 7))
    assert_round_trip({f"experts.{index}": stack[index] for index in range(3)}, tmp_path / "state.safetensors")


@pytest.mark.parametrize("part", ["qdata", "scale", "global_scale"])
def test_a_missing_component_is_named(part):
    flat = fxquant.flatten_state_dict({"w": quantised(torch.randn(8, 16), ("nvfp4", None))})
    del flat[f"w.{part}"]
    with pytest.raises(ConfigError, match=rf"w: w\.{part} is missing .* it needs w\.qdata, w\.scale, w\.global_scale"):
        fxquant.unflatten_state_dict(flat)


def test_what_is_missing_is_named():
    model = nn.Linear(8, 8)
    fxquant.quantize_(model, "fp8_per_channel")
    flat = fxquant.flatten_state_dict(model.state_dict())
    del flat["weight.scale"]
    with pytest.raises(ConfigError, match=r"weight: weight\.scale is missing"):
        fxquant.unflatten_state_dict(flat)
    with pytest.raises(ConfigError, match="tied to gone"):
        fxquant.unflatten_state_dict({"x.fxquant_tied_to": torch.tensor(list(b'"gone"'), dtype=torch.uint8)})


def test_plain_state_dicts_pass_through():
    state = nn.Linear(4, 4).state_dict()
    back = fxquant.unflatten_state_dict(fxquant.flatten_state_dict(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
