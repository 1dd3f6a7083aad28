"""Specs: logical shapes, transposition, identity; a weight given as components."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS, Scheme
from fxquant.kernels.weight_spec import WeightSpec, dequantized, linear, quantized_components

SCHEME = Scheme(weight=FORMATS["fp8_per_channel_static"], activation=FORMATS["fp8_per_token"])
SPEC = WeightSpec(scheme=SCHEME, rows=6, columns=10, dtype=torch.float32)


def test_shapes():
    assert SPEC.shape == (6, 10)
    assert SPEC.transposed().shape == (10, 6)
    assert SPEC.transposed().transposed() == SPEC
    assert replace(SPEC, leading=(2, 3)).shape == (2, 3, 6, 10)


def test_a_deep_copy_is_the_spec_itself():
    assert copy.deepcopy(SPEC) is SPEC


@pytest.mark.parametrize("spec", [SPEC, SPEC.transposed(), replace(SPEC, leading=(2,))])
def test_components_follow_the_contraction(spec, relative_error):
    weight = torch.randn(spec.shape[-2:])
    components = quantized_components(weight, replace(spec, leading=()))
    assert components[0].shape == (6, 10)
    assert components[1].shape == (6, 1)
    values = dequantized(components, spec, torch.float32)
    assert values.shape == spec.shape
    assert relative_error(values, weight.expand(spec.shape)) < 0.04


def test_linear_uses_the_scheme(relative_error):
    weight, bias, x = torch.randn(6, 10), torch.randn(6), torch.randn(2, 3, 10)
    components = quantized_components(weight, SPEC)
    got = linear(x, components, SPEC, bias, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert 1e-3 < relative_error(got, F.linear(x, weight, bias)) < 0.08


def test_magnitudes_can_be_reduced_over_ranks():
    weight = torch.randn(6, 10)
    doubled = quantized_components(weight, SPEC, lambda magnitude: magnitude * 2)
    assert torch.equal(doubled[1], quantized_components(weight, SPEC)[1] * 2)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(UnsupportedError, match=r"\(6, 10\).*fp8_per_channel_static.*NaN or infinity.*ignore"):
        quantized_components(torch.full((6, 10), float("nan")), SPEC)
