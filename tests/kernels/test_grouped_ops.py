"""scaled_grouped_mm: every row with its own expert's weight, however the rows are spread over the experts."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import ACTIVATION_FORMATS, WEIGHT_FORMATS
from fxquant.kernels.ops import NO_ACTIVATION
from fxquant.kernels.quantized_tensor import QuantizedTensor
from tests.kernels.weights import (
    PAIRS,
    Names,
    activation_components,
    assert_within_roundings,
    quantised,
    seen_activation,
)

scaled_grouped_mm = torch.ops.fxquant.scaled_grouped_mm

SOME: list[Names] = [
    ("fp8_per_tensor_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_channel_static", "fp8_per_token"),
    ("fp8_per_block_static", "fp8_per_block_dynamic"),
    ("mxfp8", None),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("int8_per_channel_static", None),
    ("int4_group16_reordered", "int8_per_token"),
]
"""Each format of a weight once; PAIRS are all."""

BY_TOKEN = [names for names in PAIRS if names[1] != "fp8_per_tensor_dynamic"]


def grouped(
    x: Tensor, w: QuantizedTensor, names: Names, *, offs: Tensor | None = None, expert_ids: Tensor | None = None
) -> Tensor:
    """The op itself, in x's dtype."""
    components, shards = activation_components(x, names[1]), list(w.spec.shards)
    activation = names[1] or NO_ACTIVATION
    return scaled_grouped_mm(components, w.components, offs, expert_ids, activation, names[0], x.dtype, shards)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)


def assert_rows(y: Tensor, x: Tensor, w: QuantizedTensor, names: Names, owners: list[int]) -> None:
    """Row i is x[i] times the matrix of owners[i], in float64 and to within roundings; rows behind the owners are zero."""
    assert y.dtype == x.dtype
    left, right = seen_activation(x, names[1]), w.dequantize(torch.float32).double()
    assert y.shape == (len(x), w.spec.rows)
    for row, owner in enumerate(owners):
        assert_within_roundings(y[row : row + 1], left[row : row + 1], right[owner], names)
    assert not y[len(owners) :].any()


def owners_of(counts: list[int]) -> list[int]:
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


# -- every product --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", PAIRS, ids=str)
@pytest.mark.parametrize("shards", [False, True])
def test_every_product_that_is_defined(names, shards):
    """In all three forms, with an empty expert and rows behind the last; K odd, 1 and a multiple of 32, N = 1."""
    counts = [3, 0, 2]
    for (k, rows), dtype in zip(
        ((33, (5, 14)), (1, (1, 2)), (64, (131, 9)), (45, (1, 0))),
        (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16),
        strict=True,
    ):
        w = torch.cat([torch.randn(3, count, k) * 10.0**power for power, count in enumerate(rows)], 1)
        weight = quantised(w.to(dtype), names, shards=rows if shards else ())
        x, ids = torch.randn(7, k).to(dtype), [2, 0, 2, 2, 1, 0, 2]
        assert_rows(grouped(x, weight, names, offs=offsets(counts)), x, weight, names, owners_of(counts))
        assert_rows(grouped(x, weight, names, expert_ids=torch.tensor(ids)), x, weight, names, ids)
        batch = torch.randn(3, 2, k).to(dtype)
        y = grouped(batch, weight, names)
        assert y.dtype == dtype
        right = weight.dequantize(torch.float32).double()
        assert_within_roundings(y, seen_activation(batch, names[1]), right, names)


def test_a_token_costs_no_more_than_half_a_percent():
    """In bfloat16, measured over the whole result."""
    names: Names = ("fp8_per_channel_static", "fp8_per_token")
    weight, x = quantised(torch.randn(4, 64, 96).bfloat16(), names), torch.randn(50, 96).bfloat16()
    ids = torch.randint(0, 4, (50,))
    exact = torch.einsum("tk,tnk->tn", seen_activation(x, names[1]), weight.dequantize(torch.float32).double()[ids])
    y = grouped(x, weight, names, expert_ids=ids).double()
    assert (y - exact).norm() / exact.norm() < 0.005


# -- how the rows are spread ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [SOME[1], SOME[4], SOME[7]], ids=str)
@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9) | st.sampled_from([0, 40]), min_size=1, max_size=9),
    behind=st.integers(0, 5),
    shuffle=st.randoms(use_true_random=False),
    kind=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_spread(names, counts, behind, shuffle, kind):
    weight, owners = quantised(torch.randn(len(counts), 5, 21), names), owners_of(counts)
    x = torch.randn(len(owners) + behind, 21)
    assert_rows(grouped(x, weight, names, offs=offsets(counts).to(kind)), x, weight, names, owners)
    shuffle.shuffle(owners)
    x = x[: len(owners)]
    assert_rows(grouped(x, weight, names, expert_ids=torch.tensor(owners, dtype=kind)), x, weight, names, owners)


@pytest.mark.parametrize("names", SOME, ids=str)
@pytest.mark.parametrize("experts", [1, 2, 7, 64])
def test_all_rows_to_one_expert(names, experts):
    weight = quantised(torch.randn(experts, 6, 33), names)
    for tokens in (1, 2, 33):
        x = torch.randn(tokens, 33)
        for expert in {0, experts // 2, experts - 1}:
            counts = [tokens if other == expert else 0 for other in range(experts)]
            assert_rows(grouped(x, weight, names, offs=offsets(counts)), x, weight, names, [expert] * tokens)
            ids = torch.full((tokens,), expert)
            assert_rows(grouped(x, weight, names, expert_ids=ids), x, weight, names, [expert] * tokens)


@pytest.mark.parametrize("names", SOME, ids=str)
def test_one_expert_is_a_plain_product(names):
    weight, x = quantised(torch.randn(40, 70), names), torch.randn(9, 70)
    stack = weight.with_components([component[None] for component in weight.components], experts=1)
    activation = names[1] or NO_ACTIVATION
    components = activation_components(x, names[1])
    plain = torch.ops.fxquant.scaled_mm(components, weight.components, None, activation, names[0], torch.float32)
    for y in (
        grouped(x, stack, names, offs=torch.tensor([9])),
        grouped(x, stack, names, expert_ids=torch.zeros(9, dtype=torch.int64)),
        grouped(x[None], stack, names)[0],
    ):
        assert torch.allclose(y, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("names", SOME, ids=str)
def test_the_three_forms_agree(names):
    weight, x = quantised(torch.randn(4, 10, 40), names), torch.randn(4, 3, 40)
    rows = x.reshape(12, 40)
    batch = grouped(x, weight, names).reshape(12, 10)
    order = torch.randperm(12)
    ids = torch.arange(4).repeat_interleave(3)
    assert torch.allclose(grouped(rows, weight, names, offs=torch.tensor([3, 6, 9, 12])), batch, rtol=1e-5, atol=1e-5)
    assert torch.allclose(grouped(rows[order], weight, names, expert_ids=ids[order]), batch[order], rtol=1e-5, atol=1e-5)


# -- values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", SOME, ids=str)
def test_no_rows_and_no_columns(names):
    for n, k, tokens in ((5, 8, 0), (0, 8, 3), (5, 0, 3), (0, 0, 0)):
        weight = quantised(torch.randn(3, n, k), names)
        for y in (
            grouped(torch.randn(tokens, k), weight, names, offs=torch.tensor([0, tokens, tokens])),
            grouped(torch.randn(tokens, k), weight, names, expert_ids=torch.zeros(tokens, dtype=torch.int64)),
            grouped(torch.randn(3, tokens, k), weight, names)[0],
        ):
            assert torch.equal(y, torch.zeros(tokens, n))


@pytest.mark.parametrize("names", SOME, ids=str)
def test_no_row_belongs_to_any_expert(names):
    weight = quantised(torch.randn(3, 5, 8), names)
    assert torch.equal(grouped(torch.randn(4, 8), weight, names, offs=torch.zeros(3, dtype=torch.int32)), torch.zeros(4, 5))


@pytest.mark.parametrize("names", BY_TOKEN, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_its_own_row_only(names, bad):
    """Also where it is behind the last expert: there it is zero as the rest, and where tiles are filled up with it."""
    weight, x = quantised(torch.randn(3, 6, 33), names), torch.randn(9, 33)
    offs, ids = torch.tensor([2, 2, 7]), torch.tensor([2, 0, 2, 2, 1, 0, 2, 1, 1])
    clean = grouped(x, weight, names, offs=offs), grouped(x, weight, names, expert_ids=ids)
    x[[1, 8], [32, 0]] = bad
    by_offs, by_ids = grouped(x, weight, names, offs=offs), grouped(x, weight, names, expert_ids=ids)
    assert not by_offs[1].isfinite().any()
    assert not by_ids[[1, 8]].isfinite().any()
    assert not by_offs[7:].any()
    by_offs[1], by_ids[[1, 8]] = clean[0][1], clean[1][[1, 8]]
    assert torch.equal(by_offs, clean[0])
    assert torch.equal(by_ids, clean[1])


@pytest.mark.parametrize("names", SOME, ids=str)
def test_zero_experts_and_zero_rows_give_zeros(names):
    w, x = torch.randn(3, 6, 33), torch.randn(9, 33)
    w[1], x[0] = 0, 0
    y = grouped(x, quantised(w, names), names, offs=torch.tensor([3, 6, 9]))
    assert y.isfinite().all()
    assert not y[3:6].any()
    assert not y[0].any()


@pytest.mark.parametrize("names", SOME, ids=str)
def test_operands_are_left_as_they_are(names):
    x, weight = torch.randn(5, 33), quantised(torch.randn(3, 6, 33), names)
    offs, ids = torch.tensor([2, 2, 5]), torch.tensor([2, 0, 1, 1, 0])
    operands = [x, offs, ids, *weight.components]
    before = [part.clone().reshape(-1).view(torch.uint8) for part in operands]
    grouped(x, weight, names, offs=offs)
    grouped(x, weight, names, expert_ids=ids)
    for part, old in zip(operands, before, strict=True):
        assert torch.equal(part.reshape(-1).view(torch.uint8), old)


@pytest.mark.parametrize("names", SOME, ids=str)
def test_layouts(names):
    """x and its like in other strides; a weight that is a part of a larger stack."""
    weight, offs = quantised(torch.randn(6, 7, 40), names), torch.tensor([1, 1, 5])
    part = weight.with_components([component[1:4] for component in weight.components], experts=3)
    for x in (torch.randn(40, 5).t(), torch.randn(5, 80)[:, ::2], torch.randn(1, 40).expand(5, 40)):
        assert_rows(grouped(x, part, names, offs=offs), x, part, names, [0, 2, 2, 2, 2])


# -- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", [*WEIGHT_FORMATS, "int4_group32"])
def test_products_that_are_not_defined_are_refused_with_those_that_are(weight_format):
    weight, able = quantised(torch.randn(2, 16, 32), (weight_format, None)), [a for w, a in PAIRS if w == weight_format and a]
    message = f"is defined; {weight_format} takes 'none' (weight-only) or {', '.join(able)}"
    for activation in set(ACTIVATION_FORMATS) - set(able):
        with pytest.raises(UnsupportedError, match=re.escape(f"no product of {weight_format} x {activation} {message}") + "$"):
            grouped(torch.randn(2, 32), weight, (weight_format, activation), offs=torch.tensor([1, 2]))


def test_rows_must_be_told_their_expert_in_one_way():
    names: Names = ("mxfp4", None)
    weight, offs, ids = quantised(torch.randn(2, 16, 32), names), torch.tensor([1, 3]), torch.tensor([1, 0, 1])
    message = r"takes one of offs and expert_ids with x \(T, K\), none with \(E, T, K\); got {} with {} dimensions"
    for shape, keywords, count in (
        ((3, 32), {}, 0),
        ((3, 32), {"offs": offs, "expert_ids": ids}, 2),
        ((2, 3, 32), {"offs": offs}, 1),
        ((2, 3, 32), {"expert_ids": ids}, 1),
        ((32,), {"offs": offs}, 1),
    ):
        with pytest.raises(UnsupportedError, match=message.format(count, len(shape))):
            grouped(torch.randn(shape), weight, names, **keywords)


@pytest.mark.parametrize("names", SOME, ids=str)
@pytest.mark.parametrize("columns", [0, 30, 34])
def test_operands_that_do_not_fit(names, columns):
    weight = quantised(torch.randn(2, 16, 32), names)
    with pytest.raises(UnsupportedError, match=f"the activation has K={columns}, the weight N=16, K=32"):
        grouped(torch.randn(3, columns), weight, names, offs=torch.tensor([1, 3]))


@pytest.mark.parametrize("family", ["torch", "triton"])
def test_a_family_that_cannot_serve_is_refused(family):
    weight, x = quantised(torch.randn(2, 16, 32), ("mxfp4", None)), torch.randn(3, 32)
    with pytest.raises(UnsupportedError, match=rf"no '{family}' kernel .*N=16, K=32 for 2 experts on cpu.*use 'reference'"):
        scaled_grouped_mm([x], weight.components, torch.tensor([1, 3]), None, NO_ACTIVATION, "mxfp4", x.dtype, backend=family)


# -- compilers ------------------------------------------------------------------------------------------------------------


class Grouped(torch.nn.Module):
    """Quantise and multiply, with offs or with expert_ids, or one block of rows an expert."""

    def __init__(self, names: Names, shape: tuple[int, int, int], shards: tuple[int, ...], form: str | None) -> None:
        super().__init__()
        weight = quantised(torch.randn(shape), names, shards=shards)
        self.names, self.shards, self.form = names, shards, form
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(c, requires_grad=False) for c in weight.components)

    def forward(self, x: Tensor, which: Tensor | None) -> Tensor:
        components = activation_components(x, self.names[1])
        offs, ids = (which if self.form == form else None for form in ("offs", "expert_ids"))
        activation = self.names[1] or NO_ACTIVATION
        return scaled_grouped_mm(components, list(self.parts), offs, ids, activation, self.names[0], x.dtype, list(self.shards))


def arguments(form: str | None, tokens: int, experts: int, columns: int) -> tuple[Tensor, Tensor | None]:
    if form is None:
        return torch.randn(experts, tokens, columns), None
    ids = torch.randint(0, experts, (tokens,))
    counts = torch.bincount(ids, minlength=experts)
    return torch.randn(tokens, columns), ids if form == "expert_ids" else counts.cumsum(0).int()


@pytest.mark.parametrize(
    ("names", "shards", "form"),
    [
        (("fp8_per_channel_static", "fp8_per_token"), (12, 20), "offs"),
        (("mxfp4", None), (12, 20), "expert_ids"),
        (("int8_per_channel_static", "int8_per_token"), (), None),
    ],
    ids=str,
)
def test_compiled_equals_eager(names, shards, form):
    """With Inductor: one graph serves any number of tokens from 2 on, fewer than experts or more."""
    module = Grouped(names, (4, 32, 65), shards, form)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (7, 2, 33, 100, 3):
        x, which = arguments(form, tokens, 4, 65)
        y, eager = compiled(x, which), module(x, which)
        assert y.shape == eager.shape
        assert torch.allclose(y, eager, rtol=1e-5, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("names", [SOME[0], SOME[5], SOME[7]], ids=str)
@pytest.mark.parametrize("form", ["offs", "expert_ids", None])
def test_traced_with_fake_tensors(names, form):
    """What opcheck asks of an op: as a graph with dynamic shapes it gives what eager gives."""
    x, which = arguments(form, 6, 3, 33)
    weight = quantised(torch.randn(3, 8, 33), names, shards=(3, 5))
    offs, ids = (which if form == other else None for other in ("offs", "expert_ids"))
    args = (activation_components(x, names[1]), weight.components, offs, ids, names[1] or NO_ACTIVATION, names[0], x.dtype)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(scaled_grouped_mm.default, (*args, [3, 5]), test_utils=utilities)


@pytest.mark.parametrize("form", ["offs", "expert_ids", None])
def test_an_exported_graph_shows_the_op_and_decomposes(form):
    """The number of tokens is dynamic; the graph is exported with more tokens than experts, and runs with fewer."""
    module = Grouped(("mxfp4", "mxfp4"), (4, 8, 33), (), form)
    tokens = torch.export.Dim("tokens", min=2)
    shapes = {"x": {1 if form is None else 0: tokens}, "which": {0: tokens} if form == "expert_ids" else None}
    program = torch.export.export(module, arguments(form, 10, 4, 33), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if "fxquant" in str(node.target)]
    assert targets == ["fxquant.quantize_activation.default", "fxquant.scaled_grouped_mm.default"]
    decomposed = program.run_decompositions()
    assert not [node for node in decomposed.graph.nodes if "fxquant" in str(node.target)]
    for count in (10, 3, 2, 50):
        inputs = arguments(form, count, 4, 33)
        assert torch.allclose(decomposed.module()(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", SOME, ids=str)
def test_on_the_meta_device(names):
    weight = quantised(torch.randn(3, 8, 32), names).to("meta")
    x = torch.empty(5, 32, device="meta")
    for keywords in ({"offs": torch.empty(3, dtype=torch.int32)}, {"expert_ids": torch.empty(5, dtype=torch.int64)}):
        y = grouped(x, weight, names, **{name: value.to("meta") for name, value in keywords.items()})
        assert (y.shape, y.device.type) == ((5, 8), "meta")
    assert grouped(x.expand(3, 5, 32), weight, names).shape == (3, 5, 8)
