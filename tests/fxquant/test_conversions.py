"""Quantised copies of plain parameters: made once, made again when the parameter changes, dropped with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxquant
from fxquant import UnsupportedError
from fxquant.conversions import Conversions
from fxquant.kernels.formats import FORMATS, Scheme
from fxquant.kernels.weight_spec import WeightSpec

SPEC = WeightSpec(
    scheme=Scheme(weight=FORMATS["fp8_per_channel_static"], activation=FORMATS["fp8_per_token"]),
    rows=8,
    columns=16,
    dtype=torch.float32,
)


def test_a_copy_is_made_once_and_again_after_a_visible_change():
    copies, parameter = Conversions(), nn.Parameter(torch.randn(8, 16))
    first = copies.get(parameter, SPEC, "layer")
    assert copies.get(parameter, SPEC, "layer") is first
    with torch.no_grad():
        parameter.mul_(2)
    second = copies.get(parameter, SPEC, "layer")
    assert torch.equal(second.scale, first.scale * 2)
    parameter.data = torch.randn(8, 16)
    assert copies.get(parameter, SPEC, "layer") is not second


def test_copies_die_with_their_parameter():
    copies, parameter = Conversions(), nn.Parameter(torch.randn(8, 16))
    copy = weakref.ref(copies.get(parameter, SPEC, "layer").qdata)
    del parameter
    gc.collect()
    assert copy() is None


def test_forget_and_names_in_errors():
    copies, parameter = Conversions(), nn.Parameter(torch.randn(8, 16))
    assert not copies.forget(parameter)
    copies.get(parameter, SPEC, "layer")
    assert parameter in copies
    assert copies.forget(parameter)
    with pytest.raises(UnsupportedError, match=r"mlp\.up_proj: .*NaN"):
        copies.get(nn.Parameter(torch.full((8, 16), float("nan"))), SPEC, "mlp.up_proj")


def test_inference_tensors_have_no_version():
    copies = Conversions()
    with torch.inference_mode():
        parameter = nn.Parameter(torch.randn(8, 16), requires_grad=False)
    assert copies.get(parameter, SPEC, "layer") is copies.get(parameter, SPEC, "layer")


def test_refresh_of_a_converted_model_has_nothing_to_do():
    model = nn.Linear(16, 16)
    fxquant.quantize_(model, "fp8_per_tensor")
    assert fxquant.refresh(model) == 0
