"""Specs: logical shapes, transposition, identity, files; a weight given as components."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS, STORED_FORMATS, WEIGHT_FORMATS, Scheme
from fxquant.kernels.weight_spec import (
    WeightSpec,
    dequantized,
    grouped,
    linear,
    quantized_components,
    stack_turns,
    take_turns,
)
from tests.kernels.weights import same_bytes

SCHEME = Scheme(weight=FORMATS["fp8_per_channel_static"], activation=FORMATS["fp8_per_token"])
SPEC = WeightSpec(scheme=SCHEME, rows=6, columns=10, dtype=torch.float32)
TURNS = replace(SPEC, shards=(3, 3), interleaved=True)


def test_shapes():
    assert SPEC.shape == (6, 10)
    assert SPEC.transposed().shape == (10, 6)
    assert SPEC.transposed().transposed() == SPEC
    assert replace(SPEC, leading=(2, 3)).shape == (2, 3, 6, 10)
    assert replace(SPEC, experts=4).shape == (4, 6, 10)
    assert replace(SPEC, experts=4, shards=(2, 4)).transposed().shape == (4, 10, 6)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shards", [(), (3, 3), (1, 5)], ids=str)
@pytest.mark.parametrize("experts", [0, 4])
def test_bytes_are_those_of_the_components(name, shards, experts):
    spec = replace(SPEC, scheme=Scheme(weight=FORMATS[name]), shards=shards, experts=experts)
    components = quantized_components(torch.randn(spec.shape), spec)
    assert spec.nbytes == sum(component.numel() * component.itemsize for component in components)


def test_a_deep_copy_is_the_spec_itself():
    assert copy.deepcopy(SPEC) is SPEC


# -- files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"contraction": -2, "leading": (2, 3)},
        {"experts": 4, "shards": (3, 3), "interleaved": True, "backend": "reference", "dtype": torch.bfloat16},
        {"scheme": Scheme(weight=FORMATS["nvfp4"], scale_search="mse")},
        {"scheme": Scheme(weight=STORED_FORMATS["int4_group128_reordered"], activation=FORMATS["int8_per_token"])},
    ],
    ids=str,
)
def test_a_spec_survives_a_file(changes):
    spec = replace(SPEC, **changes)
    assert WeightSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_files_of_before_have_no_stacks():
    fields = SPEC.to_dict()
    for name in ("scale_search", "experts", "shards", "interleaved"):
        del fields[name]
    assert WeightSpec.from_dict(fields) == SPEC


def test_reading_leaves_the_fields_as_they_are():
    fields = TURNS.to_dict()
    before = copy.deepcopy(fields)
    WeightSpec.from_dict(fields)
    assert fields == before


@pytest.mark.parametrize("field", ["weight", "activation"])
def test_a_format_of_another_version_is_refused(field):
    with pytest.raises(UnsupportedError, match=f"{field} format 'fp9' does not exist"):
        WeightSpec.from_dict({**SPEC.to_dict(), field: "fp9"})


# -- turns ----------------------------------------------------------------------------------------------------------------


def test_turns_worked_out_by_hand():
    assert take_turns(torch.tensor([1, 2, 3, 10, 20, 30]), -1, 2).tolist() == [1, 10, 2, 20, 3, 30]
    assert stack_turns(torch.tensor([1, 10, 2, 20, 3, 30]), -1, 2).tolist() == [1, 2, 3, 10, 20, 30]
    assert take_turns(torch.tensor([[1], [2], [3], [4], [5], [6]]), -2, 3).tolist() == [[1], [3], [5], [2], [4], [6]]


@given(shards=st.integers(2, 4), size=st.integers(1, 5), dim=st.sampled_from([-1, -2]), rows=st.integers(0, 3))
def test_stacking_undoes_turns(shards, size, dim, rows):
    shape = (2, rows, shards * size) if dim == -1 else (2, shards * size, rows)
    values = torch.randn(shape)
    assert torch.equal(stack_turns(take_turns(values, dim, shards), dim, shards), values)
    assert torch.equal(take_turns(stack_turns(values, dim, shards), dim, shards), values)


# -- components -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, SPEC.transposed(), replace(SPEC, leading=(2,)), TURNS, TURNS.transposed()])
def test_components_follow_the_contraction(spec, relative_error):
    weight = torch.randn(spec.shape[-2:])
    components = quantized_components(weight, replace(spec, leading=()))
    assert components[0].shape == (6, 10)
    assert components[1].shape == (6, 1)
    values = dequantized(components, spec, torch.float32)
    assert values.shape == spec.shape
    assert relative_error(values, weight.expand(spec.shape)) < 0.04


@pytest.mark.parametrize("spec", [SPEC, SPEC.transposed(), TURNS, replace(TURNS, contraction=-2), replace(SPEC, shards=(2, 4))])
def test_components_of_experts_are_those_of_each(spec):
    weight = torch.randn(3, *spec.shape)
    stack = replace(spec, experts=3)
    components = quantized_components(weight, stack)
    values = dequantized(components, stack, torch.float32)
    for expert in range(3):
        alone = quantized_components(weight[expert], spec)
        assert same_bytes([component[expert] for component in components], alone)
        assert torch.equal(values[expert], dequantized(alone, spec, torch.float32))


def test_linear_uses_the_scheme(relative_error):
    weight, bias, x = torch.randn(6, 10), torch.randn(6), torch.randn(2, 3, 10)
    for spec in (SPEC, TURNS, replace(SPEC, shards=(2, 4))):
        components = quantized_components(weight, spec)
        got = linear(x, components, spec, bias, torch.bfloat16)
        assert got.dtype == torch.bfloat16
        assert 1e-3 < relative_error(got, F.linear(x, weight, bias)) < 0.08
        assert linear(x[:0], components, spec, bias, torch.bfloat16).shape == (0, 3, 6)


@pytest.mark.parametrize("spec", [SPEC, TURNS, replace(SPEC, shards=(2, 4))])
@pytest.mark.parametrize("activation", ["fp8_per_token", None])
def test_grouped_products_are_linears_of_each_expert(spec, activation):
    scheme = replace(SCHEME, activation=activation and FORMATS[activation])
    spec = replace(spec, scheme=scheme)
    stack, x = replace(spec, experts=3), torch.randn(3, 2, 10)
    components = quantized_components(torch.randn(3, 6, 10), stack)
    each = [linear(x[e], [c[e] for c in components], spec, None, torch.float32) for e in range(3)]
    expected = torch.stack(each)
    rows, order = x.reshape(6, 10), torch.tensor([5, 0, 3, 1, 4, 2])
    by_offs = grouped(rows, components, stack, torch.float32, offs=torch.tensor([2, 4, 6]))
    by_ids = grouped(rows[order], components, stack, torch.float32, expert_ids=order // 2)
    assert torch.allclose(grouped(x, components, stack, torch.float32), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(by_offs, expected.reshape(6, 6), rtol=1e-5, atol=1e-5)
    assert torch.allclose(by_ids, expected.reshape(6, 6)[order], rtol=1e-5, atol=1e-5)
    none = grouped(rows[:0], components, stack, torch.bfloat16, offs=torch.zeros(3, dtype=torch.int32))
    assert (none.shape, none.dtype) == ((0, 6), torch.bfloat16)


def test_magnitudes_can_be_reduced_over_ranks():
    weight = torch.randn(6, 10)
    doubled = quantized_components(weight, SPEC, lambda magnitude: magnitude * 2)
    assert torch.equal(doubled[1], quantized_components(weight, SPEC)[1] * 2)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_search_is_that_of_the_scheme(name):
    weight = torch.randn(64, 64)
    spec = replace(SPEC, rows=64, columns=64, scheme=Scheme(weight=FORMATS[name]))
    searched = quantized_components(weight, replace(spec, scheme=Scheme(weight=FORMATS[name], scale_search="mse")))
    assert same_bytes(searched, quantized_components(weight, spec)) == (name not in ("mxfp4", "nvfp4"))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shards", [(), (3, 3)], ids=str)
def test_a_weight_that_is_not_finite_is_refused(name, shards):
    weight, spec = torch.ones(6, 10), replace(SPEC, scheme=Scheme(weight=FORMATS[name]), shards=shards)
    for bad in (float("nan"), float("inf")):
        weight[5, 9] = bad
        with pytest.raises(UnsupportedError, match=rf"\(6, 10\) to {name}: it holds NaN or infinity.*ignore"):
            quantized_components(weight, spec)
    assert quantized_components(weight.to("meta"), spec)[0].is_meta


def test_formats_to_read_only_are_refused():
    spec = replace(SPEC, scheme=Scheme(weight=STORED_FORMATS["int4_group32"]))
    with pytest.raises(
        UnsupportedError, match="cannot be converted to int4_group32, which comes from checkpoints only; use one"
    ):
        quantized_components(torch.ones(6, 10), spec)
