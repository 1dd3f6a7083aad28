"""A stack of experts' matrices as one parameter: read, picked apart, moved, saved, multiplied, written - in every format."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import WEIGHT_FORMATS, defined_activations
from fxquant.kernels.quantized_tensor import QuantizedTensor
from fxquant.kernels.read_only import ReadOnlyView
from tests.kernels.weights import ALL_FORMATS, READ_ONLY_FORMATS, Names, quantised, same_bytes, scheme_of

EXPERTS, ROWS, COLUMNS = 3, 14, 37
SHARDS = (5, 9)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"contraction": -2},
    "shards": {"shards": SHARDS},
    "interleaved": {"shards": (7, 7), "interleaved": True},
    "gpt-oss": {"shards": (7, 7), "interleaved": True, "contraction": -2},
}
FORMAT_AND_KIND = [pytest.param(name, kind, id=f"{name}-{kind}") for name in WEIGHT_FORMATS for kind in KINDS]
every_format_and_kind = pytest.mark.parametrize(("name", "kind"), FORMAT_AND_KIND)
MODES = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]


def floats(kind: str, experts: int = EXPERTS, dtype: torch.dtype = torch.float32) -> Tensor:
    """A stack whose experts, and the shards in them, differ in magnitude."""
    w = torch.randn(experts, ROWS, COLUMNS) * torch.logspace(0, 2, experts)[:, None, None]
    turns = slice(1, None, 2) if "interleaved" in KINDS[kind] else slice(SHARDS[0], None)
    w[:, turns] *= 10
    return (w if KINDS[kind].get("contraction", -1) == -1 else w.mT.contiguous()).to(dtype)


def stack(name: str, kind: str, activation: str | None = None, **keywords: Any) -> QuantizedTensor:
    return QuantizedTensor.from_float(floats(kind, **keywords), scheme_of((name, activation)), **KINDS[kind])


def activation_of(name: str) -> str:
    """An activation format that is quantised row by row."""
    return "int8_per_token" if name.startswith("int") else name if ALL_FORMATS[name].activation else "fp8_per_token"


def same(a: Tensor, b: Tensor) -> bool:
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    return a.spec == b.spec and same_bytes(a.components, b.components)


def close(a: Tensor, b: Tensor) -> bool:
    """To within the order of a float32 sum."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5 * max(float(b.abs().max()), 1.0))


# -- what it is -----------------------------------------------------------------------------------------------------------


@every_format_and_kind
def test_each_expert_is_quantised_by_itself(name, kind):
    w = floats(kind)
    weight = QuantizedTensor.from_float(w, scheme_of((name, None)), **KINDS[kind])
    assert weight.shape == w.shape
    assert weight.stride() == w.stride()
    assert weight.stored_nbytes == weight.spec.nbytes
    assert all(component.shape[0] == EXPERTS and component.is_contiguous() for component in weight.components)
    alone = [QuantizedTensor.from_float(matrix, scheme_of((name, None)), **KINDS[kind]) for matrix in w]
    values = weight.dequantize()
    assert values.stride() == weight.stride()
    assert torch.equal(values, torch.stack([matrix.dequantize() for matrix in alone]))
    for index, matrix in enumerate(alone):
        assert same(weight[index], matrix)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_logical_dtype(name, dtype):
    weight = stack(name, "shards", dtype=dtype)
    assert weight.dtype == weight.dequantize().dtype == weight[0].dtype == dtype
    assert torch.equal(weight.dequantize(), weight.dequantize(torch.float32).to(dtype))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_interleaved_rows_have_the_bytes_of_stacked_ones(name):
    w = floats("interleaved")
    stacked = torch.cat([w[:, 0::2], w[:, 1::2]], 1)
    weight = QuantizedTensor.from_float(w, scheme_of((name, None)), **KINDS["interleaved"])
    turned = QuantizedTensor.from_float(w.mT.contiguous(), scheme_of((name, None)), **KINDS["gpt-oss"])
    plain = QuantizedTensor.from_float(stacked, scheme_of((name, None)), shards=(7, 7))
    assert same_bytes(weight.components, plain.components)
    assert same_bytes(turned.components, plain.components)
    assert torch.equal(turned.dequantize(), weight.dequantize().mT)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_expert_that_is_not_finite_is_refused(name, bad):
    w = floats("shards")
    w[2, 13, 36] = bad
    with pytest.raises(UnsupportedError, match=rf"shape \(3, 14, 37\) to {name}: it holds NaN or infinity"):
        QuantizedTensor.from_float(w, scheme_of((name, None)), shards=SHARDS)


def test_a_stack_prints_its_shape():
    text = "QuantizedTensor(mxfp4 x none, shape=(3, 37, 14), dtype=torch.float32, device=cpu)"
    assert repr(stack("mxfp4", "gpt-oss")) == text


def test_specs_differ_by_what_a_graph_depends_on():
    specs = {stack("mxfp4", kind).spec for kind in KINDS}
    specs |= {stack("mxfp4", "plain", experts=2).spec, stack("mxfp4", "plain")[0].spec, stack("nvfp4", "plain").spec}
    assert len(specs) == len(KINDS) + 3


# -- experts out of the stack ---------------------------------------------------------------------------------------------


@every_format_and_kind
@pytest.mark.parametrize("mode", MODES)
def test_experts_are_picked_quantised(name, kind, mode):
    weight = stack(name, kind)
    values = weight.dequantize()
    with mode():
        picked = [weight[1], weight[-2], weight.select(0, 1), weight.unbind()[1], list(weight)[1], weight[torch.tensor(1)]]
        for matrix in picked:
            assert isinstance(matrix, QuantizedTensor)
            assert matrix.spec == replace(weight.spec, experts=0)
            assert matrix.stride() == weight.stride()[1:]
            assert torch.equal(matrix.dequantize(), values[1])
        for index in ([2, 0, 0, 1], [1], [-1, 0]):
            for kind_of_index in (torch.int64, torch.int32):
                rows = weight[torch.tensor(index, dtype=kind_of_index)]
                assert isinstance(rows, QuantizedTensor)
                assert rows.spec == replace(weight.spec, experts=len(index))
                assert torch.equal(rows.dequantize(), values[index])


@pytest.mark.parametrize("name", ["fp8_per_tensor_static", "nvfp4"])
def test_a_picked_expert_shares_the_bytes_and_a_list_of_them_does_not(name):
    weight = stack(name, "shards")
    assert [part.untyped_storage().data_ptr() for part in weight[1].components] == [
        part.untyped_storage().data_ptr() for part in weight.components
    ]
    before = weight.clone()
    weight[torch.tensor([0, 1])].zero_()
    assert same(weight, before)


@every_format_and_kind
def test_other_reads_dequantise(name, kind):
    weight = stack(name, kind)
    values = weight.dequantize()
    for read in (
        lambda w: w[1:],
        lambda w: w[:, 2],
        lambda w: w[1, 2],
        lambda w: w[..., 3],
        lambda w: w[torch.tensor([True, False, True])],
        lambda w: w[torch.tensor([[0, 1], [2, 0]])],
        lambda w: w[torch.tensor([0, 1]), torch.tensor([2, 3])],
        lambda w: w[torch.tensor([], dtype=torch.int64)],
        lambda w: w.select(1, 0),
        lambda w: w.unbind(-1)[2],
        lambda w: w.transpose(0, 1),
        lambda w: w.permute(2, 0, 1),
        lambda w: w.reshape(EXPERTS, -1),
        lambda w: w.chunk(2, -1)[1],
        lambda w: w.sum(0),
        lambda w: w.index_select(0, torch.tensor([2, 0])),
        lambda w: torch.cat([w, w]),
        lambda w: torch.einsum("enk,ek->en", w, values[:, 0]),
        lambda w: w.abs().amax((-2, -1)),
    ):
        result = read(weight)
        assert not isinstance(result, QuantizedTensor)
        assert torch.equal(result, read(values))


@pytest.mark.parametrize("kind", KINDS)
def test_transposes_stay_quantised_and_share_the_bytes(kind):
    weight = stack("nvfp4", kind)
    for turned in (weight.mT, weight.transpose(-2, -1), weight.transpose(1, 2), weight.permute(0, 2, 1), weight.swapaxes(2, 1)):
        assert isinstance(turned, QuantizedTensor)
        assert turned.shape == weight.mT.shape
        assert turned.stride() == tuple(weight.stride()[i] for i in (0, 2, 1))
        assert turned.qdata.data_ptr() == weight.qdata.data_ptr()
        assert torch.equal(turned.dequantize(), weight.dequantize().mT)
        assert turned.dequantize().stride() == turned.stride()
        assert same(turned.mT, weight)
        assert torch.equal(turned[1].dequantize(), weight.dequantize()[1].t())


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w[3],
        lambda w: w[-4],
        lambda w: w.select(3, 0),
        lambda w: w.select(-4, 0),
        lambda w: w.unbind(3),
        lambda w: w.transpose(1, 3),
        lambda w: w.transpose(4, 5),
        lambda w: w.permute(3, 2, 1),
        lambda w: w.permute(0, 5, 4),
        lambda w: w[torch.tensor([0, 3])],
    ],
)
def test_what_does_not_exist(read):
    with torch.no_grad(), pytest.raises(IndexError, match="out of"):
        read(stack("mxfp4", "plain"))


# -- moves ----------------------------------------------------------------------------------------------------------------


@every_format_and_kind
def test_copies_keep_the_bytes_and_are_independent(name, kind):
    weight = nn.Parameter(stack(name, kind), requires_grad=False)
    before = weight.dequantize()
    buffer = io.BytesIO()
    torch.save({"w": weight}, buffer)
    buffer.seek(0)
    for duplicate in (
        weight.clone(),
        copy.deepcopy(weight),
        weight.to(weight.dtype, copy=True),
        pickle.loads(pickle.dumps(weight)),
        torch.load(buffer, weights_only=True)["w"],
        torch.empty_like(weight).copy_(weight),
    ):
        assert same(duplicate.data, weight.data)
        assert duplicate.stride() == weight.stride()
        duplicate.zero_()
        assert torch.equal(weight.dequantize(), before)
    half = weight.half()
    assert half.dtype == half.dequantize().dtype == torch.float16
    assert same(half.float(), weight.data)
    meta = weight.to("meta")
    assert meta.spec == weight.spec
    assert {part.device.type for part in meta.components} == {"meta"}
    rebuilt = QuantizedTensor.__tensor_unflatten__(
        {part: getattr(weight, part) for part in weight.__tensor_flatten__()[0]}, weight.spec, weight.shape, weight.stride()
    )
    assert same(rebuilt, weight.data)


def test_an_expert_is_saved_alone():
    """With its own bytes and not the stack's."""
    weight = QuantizedTensor.from_float(torch.randn(64, 32, 64), scheme_of(("nvfp4", None)), shards=(16, 16))
    buffer = io.BytesIO()
    torch.save(weight[5], buffer)
    assert buffer.tell() < weight.stored_nbytes / 8 + 4096
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True), weight[5])
    assert same(copy.deepcopy(weight[5]), weight[5])


@pytest.mark.parametrize("assign", [True, False])
@every_format_and_kind
def test_state_dicts(name, kind, assign):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(stack(name, kind), requires_grad=False)

    source, target = Experts(), Experts()
    target.load_state_dict(source.state_dict(), assign=assign)
    assert same(target.gate_up_proj.data, source.gate_up_proj.data)
    values = floats(kind)
    target.load_state_dict({"gate_up_proj": values})
    assert same(target.gate_up_proj.data, QuantizedTensor.from_float(values, scheme_of((name, None)), **KINDS[kind]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict({"gate_up_proj": values[:2]})


# -- products -------------------------------------------------------------------------------------------------------------


def as_rows(weight: QuantizedTensor, kind: str) -> QuantizedTensor:
    """The stack as (E, N, K)."""
    return weight if KINDS[kind].get("contraction", -1) == -1 else weight.mT


@pytest.mark.parametrize("activated", [False, True])
@every_format_and_kind
def test_every_way_to_multiply_runs_on_the_quantised_operands(name, kind, activated):
    """The same as one linear an expert. With quantised activations a product of dequantised values would differ."""
    weight = as_rows(stack(name, kind, activation_of(name) if activated else None), kind)
    x, bias = torch.randn(EXPERTS, 4, COLUMNS), torch.randn(EXPERTS, 1, ROWS)
    expected = torch.stack([F.linear(x[expert], weight[expert]) for expert in range(EXPERTS)])
    rows, offs = x.reshape(-1, COLUMNS), torch.tensor([4, 8, 12], dtype=torch.int32)
    some = torch.tensor([2, 0])
    for mode in MODES:
        with mode():
            for y in (
                torch.bmm(x, weight.mT),
                torch.matmul(x, weight.mT),
                x @ weight.transpose(-2, -1),
                torch.bmm(weight, x.mT).mT,
                (weight @ x.mT).mT,
                torch.baddbmm(bias, x, weight.mT) - bias,
                F.grouped_mm(x, weight.mT),
                F.grouped_mm(rows, weight.mT, offs=offs).view_as(expected),
            ):
                assert close(y, expected)
            assert close(torch.bmm(x[some], weight[some].mT), expected[some])
            assert close(torch.bmm(weight[some], x[some].mT).mT, expected[some])
            assert close(torch.bmm(weight[torch.tensor([1, 1])], x[1, :2, :, None]).squeeze(-1), expected[1, :2])
    if activated:
        assert not close(expected, torch.bmm(x, weight.dequantize().mT))
    else:
        assert close(expected, torch.bmm(x, weight.dequantize().mT))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", ["shards", "gpt-oss"])
def test_grouped_products(name, kind):
    """Empty experts, no rows, an output in another dtype; in bfloat16 as models have it."""
    weight = as_rows(stack(name, kind, activation_of(name), dtype=torch.bfloat16), kind)
    for counts in ([2, 0, 5], [0, 0, 7], [7, 0, 0], [0, 0, 0]):
        x = torch.randn(sum(counts), COLUMNS).bfloat16()
        y = F.grouped_mm(x, weight.mT, offs=torch.tensor(counts).cumsum(0).int())
        assert y.dtype == torch.bfloat16
        parts = [F.linear(part, weight[expert]) for expert, part in enumerate(x.split(counts))]
        assert torch.allclose(y, torch.cat(parts), rtol=2**-6, atol=2.0)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_products_that_the_format_does_not_contract_dequantise(name):
    weight, x = stack(name, "shards", activation_of(name)), torch.randn(EXPERTS, 4, ROWS)
    values = weight.dequantize()
    for function in (
        lambda w: torch.bmm(x, w),
        lambda w: torch.bmm(w.mT, x.mT),
        lambda w: torch.bmm(w, w.mT),
        lambda w: x @ w,
        lambda w: torch.baddbmm(torch.ones(EXPERTS, 1, ROWS), torch.ones(EXPERTS, 2, COLUMNS), w.mT, beta=2),
        lambda w: torch.baddbmm(torch.ones(EXPERTS, 1, ROWS), torch.ones(EXPERTS, 2, COLUMNS), w.mT, alpha=0.5),
        lambda w: torch.ones(2, 1, 4, COLUMNS) @ w.mT,
    ):
        assert close(function(weight), function(values))
    square, offs = QuantizedTensor.from_float(torch.randn(2, 16, 16), weight.spec.scheme), torch.tensor([3, 5]).int()
    y = F.grouped_mm(torch.ones(5, 16), square, offs=offs)
    assert close(y, F.grouped_mm(torch.ones(5, 16), square.dequantize(), offs=offs))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_matrix_that_all_experts_multiply(name):
    """torch spreads one x over the stack; the result is as for each expert."""
    weight, x = stack(name, "plain", activation_of(name)), torch.randn(4, COLUMNS)
    y = torch.matmul(x, weight.mT)
    assert close(y, torch.stack([F.linear(x, weight[expert]) for expert in range(EXPERTS)]))


@pytest.mark.parametrize("name", ["fp8_per_channel_static", "mxfp4"])
@pytest.mark.parametrize(
    "multiply",
    [
        lambda w: torch.bmm(torch.randn(2, 4, COLUMNS), w.mT),
        lambda w: torch.bmm(torch.randn(EXPERTS, 4, COLUMNS + 1), w.mT),
        lambda w: torch.bmm(torch.randn(EXPERTS, 4, COLUMNS).half(), w.mT),
        lambda w: torch.bmm(w, torch.randn(2, COLUMNS, 4)),
        lambda w: torch.bmm(w, torch.randn(EXPERTS, COLUMNS - 1, 4)),
        lambda w: F.grouped_mm(torch.randn(4, COLUMNS), w.mT),
        lambda w: F.grouped_mm(torch.randn(4, COLUMNS + 1), w.mT, offs=torch.tensor([1, 2, 4], dtype=torch.int32)),
        lambda w: torch.mm(torch.randn(4, COLUMNS), w.mT),
    ],
)
def test_operands_that_do_not_fit_raise_torchs_own_error(name, multiply):
    weight = stack(name, "plain")
    with pytest.raises(RuntimeError) as caught:
        multiply(weight)
    assert type(caught.value) is RuntimeError
    with pytest.raises(RuntimeError, match=re.escape(str(caught.value).splitlines()[0])):
        multiply(weight.dequantize())


@pytest.mark.parametrize("name", READ_ONLY_FORMATS)
def test_experts_of_a_checkpoint_in_4_bit_integers(name):
    names: Names = (name, "int8_per_token")
    weight, x = quantised(torch.randn(EXPERTS, ROWS, COLUMNS), names, shards=SHARDS), torch.randn(EXPERTS, 4, COLUMNS)
    values = weight.dequantize()
    assert values.shape == (EXPERTS, ROWS, COLUMNS)
    assert weight.stored_nbytes == weight.spec.nbytes
    assert torch.equal(weight[1].dequantize(), values[1])
    assert torch.equal(weight[torch.tensor([2, 0])].dequantize(), values[[2, 0]])
    expected = torch.stack([F.linear(x[expert], weight[expert]) for expert in range(EXPERTS)])
    assert close(torch.bmm(x, weight.mT), expected)
    assert close(torch.bmm(weight, x.mT).mT, expected)
    assert same(copy.deepcopy(weight), weight)
    assert same(pickle.loads(pickle.dumps(weight)), weight)


# -- writes ---------------------------------------------------------------------------------------------------------------


@every_format_and_kind
def test_in_place_ops_requantise(name, kind):
    scheme = scheme_of((name, None))
    for write in (
        lambda w: w.zero_(),
        lambda w: w.mul_(0.3),
        lambda w: w.add_(torch.ones_like(w), alpha=2),
        lambda w: w.clamp_(-0.5, 0.5),
        lambda w: w.copy_(torch.arange(w.numel()).view(w.shape)),
        lambda w: w.mT.copy_(torch.full(w.mT.shape, 2.0)),
        lambda w: w.__setitem__(slice(None), 2.0),
        lambda w: torch.add(torch.ones(w.shape), 1, out=w),
        lambda w: w.index_fill_(0, torch.tensor([1]), 2.0),
    ):
        weight = stack(name, kind)
        twin = weight.dequantize().clone()
        write(weight)
        write(twin)
        assert same(weight, QuantizedTensor.from_float(twin, scheme, **KINDS[kind]))


@every_format_and_kind
@pytest.mark.parametrize("mode", MODES)
def test_a_write_to_one_expert_arrives_in_the_stack_and_leaves_the_others(name, kind, mode):
    """As loaders fill a stack, expert by expert."""
    with mode():
        weight, source = stack(name, kind), floats(kind)[1]
        before = weight.clone()
        expected = QuantizedTensor.from_float(source, scheme_of((name, None)), **KINDS[kind])
        for write in (
            lambda w: w[1].copy_(source),
            lambda w: w.data[1].copy_(source),
            lambda w: w[1].copy_(expected),
            lambda w: w.unbind()[1].copy_(source.double()),
            lambda w: w.mT[1].copy_(source.t()),
            lambda w: w[1].t().copy_(source.t()),
            lambda w: w.__setitem__(1, source),
            lambda w: [matrix.copy_(source) for matrix in list(w)[1:2]],
        ):
            weight = before.clone()
            write(weight)
            assert same(weight[1], expected)
            for other in (0, 2):
                assert same(weight[other], before[other])
        weight[2].zero_()
        assert not weight.dequantize()[2].any()
        assert same(weight[0], before[0])


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.fill_(float("nan")),
        lambda w: w[1].fill_(float("inf")),
        lambda w: w[1].copy_(torch.full((ROWS, COLUMNS), float("nan"))),
        lambda w: w.copy_(torch.full((EXPERTS, ROWS, COLUMNS), float("inf"))),
        lambda w: w.div_(0),
    ],
)
def test_writes_of_bad_values_are_refused_and_change_nothing(name, write):
    weight = stack(name, "shards")
    before = weight.clone()
    with pytest.raises(UnsupportedError, match="it holds NaN or infinity"):
        write(weight)
    assert same(weight, before)


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda w: w[1:].zero_(), UnsupportedError),
        (lambda w: w[0, 1].zero_(), UnsupportedError),
        (lambda w: w[:, 1].zero_(), UnsupportedError),
        (lambda w: w.__setitem__((0, 1), 0.0), UnsupportedError),
        (lambda w: w.view(-1).zero_(), UnsupportedError),
        (lambda w: w.chunk(3)[1].zero_(), UnsupportedError),
        (lambda w: w.transpose(0, 1).zero_(), UnsupportedError),
        (lambda w: w.transpose_(1, 2), UnsupportedError),
        (lambda w: w.squeeze_().unsqueeze_(0), UnsupportedError),
        (lambda w: w.resize_(2, 2), UnsupportedError),
        (lambda w: w.copy_(torch.ones(2, ROWS, COLUMNS)), RuntimeError),
        (lambda w: w[0].copy_(torch.ones(3, 3)), RuntimeError),
        (lambda w: setattr(w, "data", torch.ones(2, ROWS, COLUMNS)), UnsupportedError),
    ],
)
def test_failed_writes_change_nothing(write, error):
    weight = stack("mxfp4", "shards")
    before = weight.clone()
    with pytest.raises(error):
        write(weight)
    assert same(weight, before)


def test_a_part_of_an_expert_is_read_only():
    weight = stack("mxfp4", "shards")
    for view in (weight[1:], weight[0, 1], weight[0][1], weight[..., 2]):
        assert isinstance(view, ReadOnlyView)


@pytest.mark.parametrize("name", ["fp8_per_block_static", "nvfp4"])
def test_copies_between_stacks(name):
    """Bytes where the storage is of one kind - also between orders of dimensions -, else values."""
    plain, shards = stack(name, "plain"), stack(name, "shards")
    target = torch.empty_like(plain)
    assert same(target.copy_(plain), plain)
    assert same(plain.clone().copy_(shards), QuantizedTensor.from_float(shards.dequantize(), scheme_of((name, None))))
    turned = QuantizedTensor.from_float(plain.dequantize().mT.contiguous(), scheme_of((name, None)), contraction=-2)
    assert same_bytes(turned.copy_(plain.mT).components, plain.components)
    with pytest.raises(RuntimeError):
        plain.copy_(stack(name, "plain", experts=2))


def test_assigning_data_replaces_the_stack():
    weight = nn.Parameter(stack("nvfp4", "gpt-oss"), requires_grad=False)
    values = floats("gpt-oss")
    weight.data = values
    assert isinstance(weight, nn.Parameter)
    assert same(weight.data, QuantizedTensor.from_float(values, scheme_of(("nvfp4", None)), **KINDS["gpt-oss"]))
    other = stack("nvfp4", "gpt-oss")
    weight.data = other
    assert weight.qdata.data_ptr() == other.qdata.data_ptr()


def test_every_activation_multiplies_a_stack():
    for name in WEIGHT_FORMATS:
        for activation in defined_activations(ALL_FORMATS[name]):
            weight = stack(name, "plain", activation)
            x = torch.randn(EXPERTS, 4, COLUMNS)
            y, exact = torch.bmm(x, weight.mT), torch.bmm(x, weight.dequantize().mT)
            assert 0 < (y - exact).norm() / exact.norm() < 0.2
