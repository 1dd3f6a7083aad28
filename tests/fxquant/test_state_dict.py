"""State dicts through files that take plain tensors only."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxquant
from fxquant import ConfigError, QuantizedTensor


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
@pytest.mark.parametrize("assign", [False, True])
def test_round_trip_of_a_tied_llama_through_safetensors(scheme, assign, llama, tmp_path):
    model, other = llama(tie_word_embeddings=True), llama(seed=1, tie_word_embeddings=True)
    ids = torch.arange(8).reshape(1, 8)
    fxquant.quantize_(model, scheme)
    fxquant.quantize_(other, scheme)
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
