"""QuantizedTensor as the parameter of ordinary PyTorch code: moved, copied, saved, loaded, multiplied, written.

``test_every_write.py`` walks the ops that write; ``test_ops.py`` checks the products for every shape;
``test_quantized_experts.py`` has stacks of matrices.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS, STORED_FORMATS, Scheme
from fxquant.kernels.quantized_tensor import QuantizedTensor, rebuild_quantized_tensor
from fxquant.kernels.read_only import ReadOnlyView
from fxquant.kernels.weight_spec import WeightSpec, dequantized, linear
from tests.kernels.weights import READ_ONLY_FORMATS, quantised

CHANNEL = Scheme(weight=FORMATS["fp8_per_channel_static"], activation=FORMATS["fp8_per_token"])
TENSOR = Scheme(weight=FORMATS["fp8_per_tensor_static"], activation=FORMATS["fp8_per_token"])
BLOCK = Scheme(weight=FORMATS["fp8_per_block_static"], activation=FORMATS["fp8_per_block_dynamic"])
WEIGHT_ONLY = Scheme(weight=FORMATS["fp8_per_channel_static"])
SCHEMES = [
    *(CHANNEL, TENSOR, BLOCK, WEIGHT_ONLY),
    Scheme(weight=FORMATS["mxfp8"], activation=FORMATS["mxfp8"]),
    Scheme(weight=FORMATS["mxfp4"], scale_search="mse"),
    Scheme(weight=FORMATS["nvfp4"], activation=FORMATS["nvfp4"]),
    Scheme(weight=FORMATS["int8_per_channel_static"], activation=FORMATS["int8_per_token"]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = torch.finfo(torch.float32).max
ERRORS = {"e4m3": (2.0**-4, 2.0**-17), "e2m1": (0.5, 0.125), "int8": (0.0, 1 / 250)}
"""Bounds on the error of an element: a share of its magnitude, or of the largest one around."""


def make(rows=24, columns=40, dtype=torch.bfloat16, scheme=CHANNEL, contraction=-1) -> QuantizedTensor:
    """A quantised weight of N=rows, K=columns; (K, N) with contraction -2."""
    shape = (rows, columns) if contraction == -1 else (columns, rows)
    return QuantizedTensor.from_float(torch.randn(shape).to(dtype), scheme, contraction=contraction)


def layer(rows=24, columns=40, dtype=torch.float32, scheme=CHANNEL) -> nn.Linear:
    module = nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)
    module.weight = nn.Parameter(QuantizedTensor.from_float(module.weight, scheme), requires_grad=False)
    return module


def same(a: Tensor, b: Tensor) -> bool:
    """Equal kinds of tensor with equal bytes."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        pairs = zip(a.components, b.components, strict=True)
        return a.spec == b.spec and all(same(x, y) for x, y in pairs)
    return type(a) is type(b) and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# -- what it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_looks_like_the_original(scheme, contraction, dtype):
    original = torch.randn(24, 40).to(dtype)
    weight = QuantizedTensor.from_float(original, scheme, contraction=contraction)
    assert weight.shape == original.shape
    assert weight.dtype == weight.dequantize().dtype == dtype
    assert weight.stride() == original.stride()
    assert weight.device == original.device
    assert weight.is_floating_point()
    assert not weight.requires_grad
    rows, columns = (24, 40) if contraction == -1 else (40, 24)
    assert (weight.spec.rows, weight.spec.columns) == (rows, columns)
    assert weight.stored_nbytes == scheme.weight.nbytes(rows, columns)
    assert all(component.is_contiguous() for component in weight.components)
    error, magnitude = (weight.dequantize().double() - original.double()).abs(), original.double().abs()
    relative, absolute = ERRORS[scheme.weight.element]
    assert (error <= magnitude * (relative + torch.finfo(dtype).eps) + magnitude.max() * absolute).all()
    values = weight.dequantize()
    assert values.stride() == weight.stride()
    assert torch.equal(values, dequantized(weight.components, weight.spec, dtype))


def test_both_storage_orders_hold_the_same_bytes():
    w = torch.randn(24, 40)
    rows, columns = QuantizedTensor.from_float(w, BLOCK), QuantizedTensor.from_float(w.t(), BLOCK, contraction=-2)
    assert all(same(a, b) for a, b in zip(rows.components, columns.components, strict=True))
    assert torch.equal(rows.dequantize(), columns.dequantize().t())


def test_the_original_is_not_touched_nor_kept():
    w = nn.Parameter(torch.randn(8, 8))
    before = w.detach().clone()
    weight = QuantizedTensor.from_float(w, CHANNEL)
    weight.zero_()
    assert torch.equal(w, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_not_finite_are_refused(bad, scheme, dtype):
    w = torch.randn(140, 150).to(dtype)
    w[139, 149] = bad
    with pytest.raises(UnsupportedError, match=rf"\(140, 150\) to {scheme.weight.name}: it holds NaN or infinity"):
        QuantizedTensor.from_float(w, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_at_the_edges_of_the_range_are_kept(scheme):
    """The last sixteenth below infinity rounds to it in the MX formats, and the last float32 in int8."""
    largest = LARGEST if scheme.weight.name.startswith(("fp8", "nvfp4")) else 2.0**127
    for value in (2.0**127, 1e-45, 0.0, largest):
        assert QuantizedTensor.from_float(torch.full((3, 5), value), scheme).dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4), r"\(4,\)"),
        (torch.ones(1, 2, 2, 2), r"\(1, 2, 2, 2\)"),
        (torch.ones(0, 2, 2), r"\(0, 2, 2\)"),
        (torch.ones(2, 2).int(), "int32"),
    ],
)
def test_what_is_no_float_matrix_is_refused(weight, message):
    with pytest.raises(UnsupportedError, match=f"a quantised weight is a float matrix or a stack of them, got .*{message}"):
        QuantizedTensor.from_float(weight, CHANNEL)


def test_schemes_that_cannot_hold_weights_are_refused():
    with pytest.raises(UnsupportedError, match="weight format 'fp8_per_token' is not one; use one of: fp8_per_tensor_static"):
        QuantizedTensor.from_float(torch.ones(4, 4), Scheme(weight=FORMATS["fp8_per_token"]))
    with pytest.raises(UnsupportedError, match=r"cannot be converted to int4_group32.*checkpoints only; use one of: fp8_per"):
        QuantizedTensor.from_float(torch.ones(4, 4), Scheme(weight=STORED_FORMATS["int4_group32"]))
    undefined = Scheme(weight=FORMATS["mxfp4"], activation=FORMATS["int8_per_token"])
    with pytest.raises(UnsupportedError, match="no product of mxfp4 x int8_per_token is defined; mxfp4 takes none or fp8_per"):
        QuantizedTensor.from_float(torch.ones(4, 4), undefined)


def test_components_must_be_those_of_the_format():
    weight = make()
    with pytest.raises(ValueError, match=r"fp8_per_channel_static has the components \('qdata', 'scale'\), got 3 tensors"):
        QuantizedTensor([*weight.components, torch.ones(())], weight.spec)


@pytest.mark.parametrize("shards", [(3, 4), (8, 1), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
def test_shards_must_make_up_the_rows(shards, contraction):
    shape = (8, 5) if contraction == -1 else (5, 8)
    with pytest.raises(UnsupportedError, match=re.escape(f"shards {shards} do not make up the 8 rows of a weight of {shape}")):
        QuantizedTensor.from_float(torch.ones(shape), CHANNEL, contraction=contraction, shards=shards)


def test_shards_of_unequal_size_do_not_take_turns():
    with pytest.raises(UnsupportedError, match=r"shards \(3, 5\) do not make up"):
        QuantizedTensor.from_float(torch.ones(8, 5), CHANNEL, shards=(3, 5), interleaved=True)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
def test_shards_are_quantised_one_by_one(scheme, contraction):
    """In one weight that multiplies as one, with their own scales; written, each is scaled anew."""
    parts = [torch.randn(rows, 40) * 10.0**power for power, rows in enumerate((10, 14))]
    w, x, bias = torch.cat(parts), torch.randn(3, 40), torch.randn(24)
    kind = {"scheme": scheme, "contraction": contraction, "shards": (10, 14)}
    weight = QuantizedTensor.from_float(w if contraction == -1 else w.t(), **kind)
    assert weight.spec.shards == (10, 14)
    assert weight.stored_nbytes == weight.spec.nbytes == sum(scheme.weight.nbytes(rows, 40) for rows in (10, 14))
    alone = [QuantizedTensor.from_float(part, scheme) for part in parts]
    rows = weight if contraction == -1 else weight.t()
    assert torch.equal(rows.dequantize(), torch.cat([part.dequantize() for part in alone]))
    y = F.linear(x, rows, bias)
    assert torch.allclose(y, torch.cat([F.linear(x, part) for part in alone], -1) + bias, rtol=1e-5, atol=1e-4)
    for duplicate in (weight.clone(), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert same(duplicate, weight)
    twin = weight.dequantize() * 3
    weight.mul_(3)
    assert same(weight, QuantizedTensor.from_float(twin, **kind))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
def test_interleaved_shards_are_stored_stacked(scheme, contraction):
    """Rows g0, u0, g1, u1, ... have the bytes of g0, g1, ..., u0, u1, ...; everything outside sees them take turns."""
    gate, up, x, bias = torch.randn(12, 40), 10 * torch.randn(12, 40), torch.randn(3, 40), torch.randn(24)
    taking_turns = torch.stack([gate, up], 1).reshape(24, 40)
    stacked = QuantizedTensor.from_float(torch.cat([gate, up]), scheme, shards=(12, 12))
    kind = {"scheme": scheme, "contraction": contraction, "shards": (12, 12), "interleaved": True}
    weight = QuantizedTensor.from_float(taking_turns if contraction == -1 else taking_turns.t(), **kind)
    assert all(same(a, b) for a, b in zip(weight.components, stacked.components, strict=True))
    order = torch.arange(24).reshape(2, 12).t().reshape(24)
    rows = weight if contraction == -1 else weight.t()
    assert torch.equal(rows.dequantize(), stacked.dequantize()[order])
    assert torch.allclose(F.linear(x, rows, bias), F.linear(x, stacked)[:, order] + bias, rtol=1e-5, atol=1e-4)
    assert torch.allclose(x @ rows.t(), F.linear(x, stacked)[:, order], rtol=1e-5, atol=1e-4)
    twin = weight.dequantize() * 3
    weight.mul_(3)
    assert same(weight, QuantizedTensor.from_float(twin, **kind))


@pytest.mark.parametrize("shards", [(), (24,)], ids=str)
def test_one_shard_is_no_shard(shards):
    weight = QuantizedTensor.from_float(torch.ones(24, 40), CHANNEL, shards=shards, interleaved=True)
    assert (weight.spec.shards, weight.spec.interleaved) == ((), False)


@pytest.mark.parametrize("name", READ_ONLY_FORMATS)
def test_weights_of_a_checkpoint_in_4_bit_integers(name, tmp_path):
    """Read, moved, saved, multiplied; not written."""
    weight, x = quantised(torch.randn(24, 41), (name, "int8_per_token")), torch.randn(3, 41)
    values = weight.dequantize()
    assert values.shape == (24, 41)
    assert weight.stored_nbytes == weight.spec.nbytes
    parts = {part: getattr(weight, part) for part in weight.__tensor_flatten__()[0]}
    assert same(QuantizedTensor.__tensor_unflatten__(parts, weight.spec, weight.shape, weight.stride()), weight)
    for duplicate in (
        weight.clone(),
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.load(saved(weight), weights_only=True),
        torch.empty_like(weight).copy_(weight),
        weight.half().float(),
    ):
        assert same(duplicate, weight)
    assert torch.equal(weight.t().dequantize(), values.t())
    assert torch.allclose(F.linear(x, weight), F.linear(x, values), rtol=0.1, atol=0.3)
    for write in (lambda w: w.zero_(), lambda w: w.copy_(torch.ones(24, 41)), lambda w: w.t().mul_(2)):
        with pytest.raises(UnsupportedError, match=f"floats cannot be converted to {name}, which comes from checkpoints only"):
            write(weight)
        assert torch.equal(weight.dequantize(), values)


def test_it_prints_without_dequantising():
    text = "QuantizedTensor(fp8_per_channel_static x fp8_per_token, shape=(24, 40), dtype=torch.bfloat16, device=cpu)"
    assert repr(make()) == str(make()) == f"{make()}" == repr(nn.Parameter(make(), requires_grad=False)) == text
    assert text in repr({"weight": make()})
    assert "Linear(in_features=40, out_features=24" in repr(layer())


def test_it_can_be_flattened_and_rebuilt():
    weight = make(contraction=-2)
    names, spec = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    again = QuantizedTensor.__tensor_unflatten__(parts, spec, weight.shape, weight.stride())
    assert same(again, weight)
    assert again.stride() == weight.stride()


def test_specs_are_values():
    assert make().spec == make().spec
    assert hash(make().spec) == hash(make().spec)
    for other in (make(dtype=torch.float16), make(rows=25), make(scheme=TENSOR), make(contraction=-2)):
        assert make().spec != other.spec
    spec = WeightSpec(scheme=CHANNEL, rows=3, columns=5, dtype=torch.float32)
    assert spec.shape == (3, 5)
    assert spec.transposed().shape == (5, 3)
    assert spec.transposed().transposed() == spec


# -- reads ----------------------------------------------------------------------------------------------------------------


def test_unknown_ops_see_the_dequantised_values():
    weight = make(dtype=torch.float32)
    values = weight.dequantize()
    for function in (
        torch.abs,
        torch.sum,
        torch.linalg.norm,
        lambda w: w + 1,
        lambda w: w @ values.t(),
        lambda w: torch.cat([w, w]),
        lambda w: torch.stack([w, values]),
        lambda w: w[3],
        lambda w: w[:, 2:5],
        lambda w: w[values > 0],
        lambda w: w.view(-1),
        lambda w: w.unsqueeze(0),
        lambda w: w.sum(0, keepdim=True).expand(3, -1),
        lambda w: F.embedding(torch.tensor([1, 3]), w),
        lambda w: torch.einsum("nk,mk->nm", w, values),
        lambda w: torch.where(w > 0, w, -w),
        lambda w: w.to(torch.int32),
        lambda w: w.transpose(0, 0),
        lambda w: torch.isfinite(w),
        lambda w: nn.utils.parameters_to_vector([w]),
    ):
        result = function(weight)
        assert not isinstance(result, QuantizedTensor)
        assert torch.equal(result, function(values))


def test_comparisons():
    weight = make()
    assert torch.equal(weight, weight.clone())
    assert torch.equal(weight, weight.dequantize())
    assert torch.equal(weight.dequantize(), weight)
    assert not torch.equal(weight, weight * 2)
    assert torch.allclose(weight, weight.clone())
    assert bool((weight == weight.dequantize()).all())
    assert {weight: 1}[weight] == 1


def test_reads_that_leave_torch():
    """A wrapper has no memory of its own: numpy, lists and DLPack get a copy of the values."""
    weight = make(dtype=torch.float32)
    values = weight.dequantize()
    assert np.array_equal(weight.numpy(), values.numpy())
    assert np.array_equal(np.asarray(weight), values.numpy())
    assert np.array_equal(np.from_dlpack(weight), values.numpy())
    assert torch.equal(torch.from_dlpack(weight), values)
    assert weight.tolist() == values.tolist()
    one = make(1, 1)
    assert one.item() == one.dequantize().item()
    assert len(weight) == 24
    assert torch.equal(torch.stack(list(weight)), values)
    weight.numpy()[:] = 0
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize("contraction", [-1, -2])
def test_transposes_stay_quantised_and_share_the_bytes(contraction):
    weight = make(contraction=contraction)
    for turned in (
        weight.t(),
        weight.T,
        weight.mT,
        weight.transpose(0, 1),
        weight.transpose(-1, -2),
        weight.permute(1, 0),
        weight.swapaxes(1, 0),
    ):
        assert isinstance(turned, QuantizedTensor)
        assert turned.shape == weight.shape[::-1]
        assert turned.stride() == weight.stride()[::-1]
        assert turned.qdata.data_ptr() == weight.qdata.data_ptr()
        assert torch.equal(turned.dequantize(), weight.dequantize().t())
        assert turned.dequantize().stride() == turned.stride()
        assert same(turned.t(), weight)
    compact = weight.t().contiguous()
    assert compact.is_contiguous()
    assert torch.equal(compact.dequantize(), weight.dequantize().t())
    assert torch.equal(compact.view(-1), weight.dequantize().t().reshape(-1))


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.transpose(0, 2),
        lambda w: w.transpose(-3, 0),
        lambda w: w.transpose(0, 5),
        lambda w: w.permute(0, 5),
        lambda w: w.permute(3, 2),
        lambda w: w.select(2, 0),
        lambda w: w.select(-3, 0),
        lambda w: w.select(0, 24),
        lambda w: w.unbind(3),
    ],
)
def test_dimensions_that_do_not_exist(read):
    with torch.no_grad(), pytest.raises(IndexError, match="out of range"):
        read(make())


def test_contiguous_returns_itself():
    weight = make()
    assert weight.contiguous() is weight
    assert weight.view(-1).shape == (960,)
    assert make(contraction=-2).view(-1).shape == (960,)
    assert make(contraction=-2).flatten().shape == (960,)


# -- products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_every_way_to_write_the_product_runs_on_the_quantised_operands(scheme, mode, relative_error):
    weight, x, bias = make(scheme=scheme, dtype=torch.float32), torch.randn(6, 40), torch.randn(24)
    turned = QuantizedTensor([c.clone() for c in weight.components], weight.spec.transposed())  # Conv1D: (K, N), contiguous
    plain = linear(x, weight.components, weight.spec, None, torch.float32)
    assert relative_error(plain, F.linear(x, weight.dequantize())) < (
        1e-5 if scheme.activation is None else 0.2 if scheme.weight.packed else 0.06
    )
    with mode():
        for y in (
            F.linear(x, weight),
            x @ weight.t(),
            torch.mm(x, weight.T),
            torch.matmul(x, weight.mT),
            torch.mm(x, turned),
            x @ turned,
            torch.addmm(torch.zeros(24), x, turned),
            F.linear(x.view(2, 3, 40), weight).view(6, 24),
            (x.view(1, 2, 3, 40) @ turned).view(6, 24),
            F.linear(x.view(3, 2, 40).transpose(0, 1), weight).transpose(0, 1).reshape(6, 24),
            torch.bmm(x.view(2, 3, 40), turned.expand(2, -1, -1)).view(6, 24),
            torch.stack([F.linear(row, weight) for row in x]),
        ):
            assert torch.allclose(y, plain, rtol=1e-5, atol=1e-4)
        for y in (F.linear(x, weight, bias), torch.addmm(bias, x, turned), x.view(2, 3, 40) @ turned + bias):
            assert torch.allclose(y.reshape(6, 24), plain + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_that_the_format_does_not_contract_dequantise(scheme):
    weight, x = make(scheme=scheme, dtype=torch.float32), torch.randn(6, 24)
    values = weight.dequantize()
    for function in (
        lambda w: x @ w,
        lambda w: F.linear(x, w.t()),
        lambda w: w @ torch.ones(40),
        lambda w: w @ w.t(),
        lambda w: torch.addmm(torch.ones(6, 40), x, w, beta=2),
        lambda w: torch.addmm(torch.ones(6, 24), torch.ones(6, 40), w.t(), alpha=2),
    ):
        assert torch.allclose(function(weight), function(values), rtol=1e-5, atol=1e-4)


def test_operands_that_do_not_fit_raise_torchs_own_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(torch.randn(2, 41).bfloat16(), make())
    with pytest.raises(RuntimeError, match="same dtype"):
        F.linear(torch.randn(2, 40), make())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gpt2s_conv1d(scheme):
    """y = addmm(bias, x, W) with W (K, N)."""
    from transformers.pytorch_utils import Conv1D

    conv1d, x = Conv1D(24, 40).requires_grad_(False), torch.randn(2, 3, 40)
    weight = QuantizedTensor.from_float(conv1d.weight, scheme, contraction=-2)
    conv1d.weight = nn.Parameter(weight, requires_grad=False)
    expected = linear(x, weight.components, weight.spec, conv1d.bias, torch.float32)
    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with mode():
            assert torch.allclose(conv1d(x), expected, rtol=1e-5, atol=1e-5)
    conv1d.load_state_dict({"weight": torch.ones(40, 24), "bias": torch.zeros(24)})
    assert torch.allclose(conv1d(torch.ones(1, 40)), torch.full((1, 24), 40.0))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_autocast(scheme, relative_error):
    """bf16 autocast over a float32 layer: the product of the weight as it is, in bf16; the bias is cast as well."""
    module = layer(scheme=scheme)
    x = torch.randn(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
        assert torch.equal(module(x.bfloat16()), y)
    assert y.dtype == torch.bfloat16
    expected = linear(
        x.bfloat16(), module.weight.components, module.weight.to(torch.bfloat16).spec, module.bias, torch.bfloat16
    )
    assert relative_error(y, expected) < 1e-2
    assert module.weight.dtype == torch.float32


@pytest.mark.parametrize("frozen", [True, False])
def test_grad_mode(frozen):
    """Products work as in inference with frozen and unfrozen layers around, and gradients flow through to the input."""
    module, x = layer(scheme=WEIGHT_ONLY), torch.randn(3, 40, requires_grad=not frozen)
    hidden = x * 2
    y = module(hidden)
    with torch.no_grad():
        assert torch.equal(y, module(hidden))
    if not frozen:
        y.sum().backward()
        assert torch.allclose(x.grad, 2 * module.weight.dequantize().sum(0).expand(3, 40), rtol=1e-5, atol=1e-5)


def test_under_vmap():
    weight, x = make(dtype=torch.float32), torch.randn(5, 3, 40)
    assert torch.allclose(torch.vmap(lambda row: F.linear(row, weight))(x), F.linear(x, weight), atol=1e-4)


def test_functional_call():
    module, x = nn.Linear(40, 24).requires_grad_(False), torch.randn(2, 40)
    weight = QuantizedTensor.from_float(module.weight, CHANNEL)
    y = torch.func.functional_call(module, {"weight": weight, "bias": module.bias}, (x,))
    assert torch.equal(y, F.linear(x, weight, module.bias))


# -- inference mode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_quantised_inside_inference_mode_and_used_outside_and_the_reverse(scheme, inside):
    w, x, bias = torch.randn(24, 40), torch.randn(2, 3, 40), torch.randn(24)
    with torch.inference_mode(inside):
        weight = nn.Parameter(QuantizedTensor.from_float(w, scheme), requires_grad=False)
    expected = linear(x, weight.components, weight.spec, bias, torch.float32)
    for mode in (torch.inference_mode, torch.no_grad, contextlib.nullcontext):
        with mode():
            assert torch.allclose(F.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
            assert torch.allclose(x @ weight.t() + bias, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(weight[3], weight.dequantize()[3])
            assert isinstance(weight.to(torch.bfloat16), QuantizedTensor)
            assert same(copy.deepcopy(weight).data, weight.data)
            fresh = weight.clone()
            assert same(fresh.detach(), weight.detach())
            fresh.mul_(2)
            assert torch.equal(fresh.dequantize(), weight.dequantize() * 2)
    if not inside:
        with torch.inference_mode():
            weight.zero_()
        assert not weight.dequantize().any()


# -- moves ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
def test_to_dtype_changes_the_logical_dtype_alone(dtype, contraction):
    weight = make(dtype=torch.float32, contraction=contraction)
    for moved in (weight.to(dtype), weight.type(dtype), weight.to(dtype=dtype, copy=True)):
        assert isinstance(moved, QuantizedTensor)
        assert moved.dtype == moved.dequantize().dtype == dtype
        assert all(same(a, b) for a, b in zip(moved.components, weight.components, strict=True))
        assert moved.stride() == weight.stride()
    assert weight.to(torch.float32) is weight
    assert weight.dtype == torch.float32


def test_to_dtype_and_back_loses_nothing():
    weight = make(dtype=torch.float32)
    assert same(weight.half().bfloat16().double().float(), weight)
    assert weight.half().dtype == torch.float16


def test_to_a_dtype_that_is_no_logical_one_dequantises():
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64):
        moved = make(dtype=torch.float32).to(dtype)
        assert type(moved) is torch.Tensor
        assert moved.dtype == dtype


def test_to_meta_and_back_to_empty():
    weight = make()
    meta = weight.to("meta")
    assert isinstance(meta, QuantizedTensor)
    assert {c.device.type for c in (meta, *meta.components)} == {"meta"}
    assert meta.spec == weight.spec
    empty = torch.empty_like(meta, device="cpu")
    assert isinstance(empty, QuantizedTensor)
    assert empty.spec == weight.spec
    assert not empty.dequantize().any()  # zeros, never stray bytes that may stand for NaN
    empty.copy_(weight)
    assert same(empty, weight)


def test_modules_move():
    module, x = layer(), torch.randn(2, 40)
    y = module(x)
    weight = module.weight
    assert module.to("cpu").weight is weight
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        moved = module.to(dtype)
        assert isinstance(moved.weight, QuantizedTensor)
        assert isinstance(moved.weight, nn.Parameter)
        assert moved.weight.dtype == moved.bias.dtype == dtype
        assert moved(x.to(dtype)).dtype == dtype
    assert torch.allclose(module(x), y, rtol=2e-2, atol=2e-2)  # the bias went through bf16
    values = module.weight.dequantize()
    module.to("meta").to_empty(device="cpu")
    assert not module.weight.dequantize().any()
    module.load_state_dict({"weight": values, "bias": module.bias})
    assert torch.allclose(module.weight.dequantize(), values, rtol=1e-6)


@pytest.mark.parametrize("contraction", [-1, -2])
def test_copies_are_independent(contraction):
    weight = make(contraction=contraction)
    before = weight.dequantize()
    for duplicate in (
        weight.clone(),
        copy.deepcopy(weight),
        weight.to(weight.dtype, copy=True),
        pickle.loads(pickle.dumps(weight)),
    ):
        assert same(duplicate, weight)
        assert duplicate.stride() == weight.stride()
        duplicate.zero_()
        assert torch.equal(weight.dequantize(), before)


def test_detached_and_data_share_the_bytes():
    weight = nn.Parameter(make(), requires_grad=False)
    for alias in (weight.detach(), weight.data, torch.ops.aten.alias(weight)):
        assert isinstance(alias, QuantizedTensor)
        assert alias.qdata.data_ptr() == weight.qdata.data_ptr()
    weight.data.fill_(2.0)
    assert (weight.dequantize() == 2).all()


def test_deepcopy_of_a_model_keeps_ties():
    model = nn.Sequential(layer(40, 40), nn.Linear(40, 40, bias=False))
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[1].weight is twin[0].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert same(twin[0].weight.data, model[0].weight.data)
    twin[0].weight.zero_()
    assert not twin[1].weight.dequantize().any()
    assert model[0].weight.dequantize().any()
    assert len(list(twin.parameters())) == 2


# -- saving and loading ---------------------------------------------------------------------------------------------------


def saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
@pytest.mark.parametrize("as_parameter", [True, False])
def test_torch_save_and_load(scheme, contraction, as_parameter):
    weight = make(scheme=scheme, contraction=contraction)
    value = nn.Parameter(weight, requires_grad=False) if as_parameter else weight.t()
    loaded = torch.load(saved({"weight": value}), weights_only=True)["weight"]
    assert isinstance(loaded, nn.Parameter) == as_parameter
    assert same(loaded.data, value.data)
    assert loaded.stride() == value.stride()
    assert not loaded.requires_grad
    on_meta = torch.load(saved(value), weights_only=True, map_location="meta")
    assert {c.device.type for c in (on_meta, *on_meta.components)} == {"meta"}


def test_a_file_has_the_size_of_the_stored_bytes():
    weight = make(512, 1024)
    assert saved(weight).getbuffer().nbytes < weight.stored_nbytes + 4096


def test_a_tied_parameter_is_saved_once():
    model = nn.Sequential(layer(256, 256), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    for value in (model.state_dict(), list(model.parameters())):
        assert saved(value).getbuffer().nbytes < 1.2 * model[0].weight.stored_nbytes + 8192


def test_loading_in_a_process_that_only_imports_the_package(tmp_path):
    module, x = layer(), torch.randn(2, 40)
    path = tmp_path / "weights.pt"
    torch.save({"state": module.state_dict(), "x": x, "y": module(x)}, path)
    program = (
        "import sys, torch, fxquant.kernels.quantized_tensor as q\n"
        "saved = torch.load(sys.argv[1], weights_only=True)\n"
        "weight = saved['state']['weight']\n"
        "assert type(weight) is q.QuantizedTensor, type(weight)\n"
        "module = torch.nn.Linear(40, 24)\n"
        "module.load_state_dict(saved['state'], assign=True)\n"
        "assert torch.equal(module(saved['x']), saved['y'])\n"
        "print('equal')\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert result.stdout == "equal\n", result.stderr


def test_a_forged_format_name_is_refused():
    weight = make()
    function, (raw, fields, stride, is_parameter) = weight.__reduce_ex__(2)
    assert function is rebuild_quantized_tensor
    with pytest.raises(UnsupportedError, match="weight format 'fp9' does not exist"):
        rebuild_quantized_tensor(raw, {**fields, "weight": "fp9"}, stride, is_parameter)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_load_state_dict_between_quantised_layers(assign, scheme):
    source, target, x = layer(scheme=scheme), layer(scheme=scheme), torch.randn(2, 40)
    parameter = target.weight
    state = torch.load(saved(source.state_dict()), weights_only=True)
    assert set(state) == {"weight", "bias"}
    assert target.load_state_dict(state, strict=True, assign=assign).missing_keys == []
    assert isinstance(target.weight, nn.Parameter)
    assert same(target.weight.data, source.weight.data)
    assert (target.weight is parameter) == (not assign)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_load_state_dict_of_floats_quantises_them(dtype):
    target, values = layer(), torch.randn(24, 40).to(dtype)
    target.load_state_dict({"weight": values, "bias": torch.zeros(24)})
    assert same(target.weight.data, QuantizedTensor.from_float(values.float(), CHANNEL))


def test_load_state_dict_with_assign_of_floats_takes_them_as_they_are():
    target, values = layer(), torch.randn(24, 40)
    target.load_state_dict({"weight": values, "bias": torch.zeros(24)}, assign=True)
    assert not isinstance(target.weight, QuantizedTensor)
    assert torch.equal(target.weight, values)


def test_load_state_dict_into_a_float_layer_dequantises():
    target, source = nn.Linear(40, 24), layer()
    target.load_state_dict(source.state_dict())
    assert not isinstance(target.weight, QuantizedTensor)
    assert torch.equal(target.weight, source.weight.dequantize())


def test_load_state_dict_of_another_shape_is_refused():
    target = layer()
    before = target.weight.dequantize()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        target.load_state_dict({"weight": torch.randn(24, 41), "bias": torch.zeros(24)})
    assert torch.equal(target.weight.dequantize(), before)


def test_load_state_dict_of_bad_values_is_refused_and_changes_nothing():
    target = layer()
    before = target.weight.dequantize()
    with pytest.raises(RuntimeError, match="it holds NaN or infinity"):
        target.load_state_dict({"weight": torch.full((24, 40), float("nan")), "bias": torch.zeros(24)})
    assert torch.equal(target.weight.dequantize(), before)


# -- other processes ------------------------------------------------------------------------------------------------------


def test_another_process_reads_and_writes_a_shared_weight():
    module = layer(dtype=torch.float32)
    weight, x = module.weight, torch.randn(2, 40)
    assert not weight.is_shared()
    assert module.share_memory() is module
    assert weight.is_shared()
    assert weight.share_memory_() is weight
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.apply(F.linear, (x, weight, module.bias)), module(x))
        pool.apply(QuantizedTensor.zero_, (weight,))
    assert not weight.dequantize().any()


# -- writes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("contraction", [-1, -2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_ops_requantise(scheme, contraction, dtype):
    for write in (
        lambda w: w.zero_(),
        lambda w: w.fill_(3),
        lambda w: w.mul_(0.5),
        lambda w: w.add_(torch.ones_like(w), alpha=2),
        lambda w: w.div_(3),
        lambda w: w.sub_(1),
        lambda w: w.clamp_(-0.5, 0.5),
        lambda w: w.copy_(torch.arange(w.numel()).view(w.shape)),
        lambda w: w.copy_(torch.ones(())),
        lambda w: w.t().copy_(torch.full((w.shape[1], w.shape[0]), 2.0)),
        lambda w: w.masked_fill_(torch.eye(*w.shape, dtype=torch.bool), 5.0),
        lambda w: w.index_fill_(0, torch.tensor([1]), 2.0),
        lambda w: w.__setitem__(slice(None), 2.0),
        lambda w: w.__setitem__(torch.eye(*w.shape, dtype=torch.bool), 9.0),
        lambda w: torch.add(torch.ones(w.shape).to(w.dtype), 1, out=w),
        lambda w: torch.nn.init.constant_(w, 0.25),
        lambda w: w.lerp_(torch.zeros(w.shape).to(w.dtype), 0.5),
        lambda w: w.view(w.shape).fill_(3),
    ):
        weight = make(scheme=scheme, contraction=contraction, dtype=dtype)
        twin = weight.dequantize().clone()
        write(weight)
        write(twin)
        assert isinstance(weight, QuantizedTensor)
        # through .t() the twin is one write, as the weight is
        assert torch.equal(weight.dequantize(), QuantizedTensor.from_float(twin, scheme, contraction=contraction).dequantize())


def test_in_place_ops_return_the_weight_itself():
    weight = make()
    assert weight.mul_(2) is weight
    assert weight.zero_() is weight
    assert weight.copy_(torch.ones(24, 40)) is weight
    assert torch.add(torch.ones(24, 40).bfloat16(), 1, out=weight) is weight
    assert weight.requires_grad_(False) is weight


def test_optimiser_like_writes_to_lists():
    first, second, plain = make(), make(8, 8), torch.ones(3).bfloat16()
    twins = [first.dequantize(), second.dequantize(), plain.clone()]
    for weights in ([first, second, plain], twins):
        torch._foreach_mul_(weights, 0.5)
        torch._foreach_add_(weights, [torch.ones_like(w) for w in twins], alpha=2)
        torch._foreach_lerp_(weights, [torch.zeros_like(w) for w in twins], 0.25)
    for weight, twin in zip((first, second), twins, strict=False):
        assert (weight.dequantize() - twin).abs().max() < twin.abs().max() / 8
        assert not torch.equal(weight, make(*weight.shape))
    assert torch.equal(plain, twins[2])
    torch._foreach_zero_([first, second])
    assert not first.dequantize().any()


def test_an_sgd_step_moves_the_weight():
    weight = nn.Parameter(make(dtype=torch.float32), requires_grad=True)
    before = weight.dequantize()
    weight.grad = torch.ones(24, 40)
    torch.optim.SGD([weight], lr=0.5).step()
    expected = QuantizedTensor.from_float(before - 0.5, CHANNEL).dequantize()
    assert torch.equal(weight.dequantize(), expected)


def test_init_functions():
    weight = make(64, 64, torch.float32)
    nn.init.xavier_uniform_(weight)
    assert 0.1 < weight.float().std() < 0.3
    nn.init.zeros_(weight)
    assert not weight.dequantize().any()
    nn.utils.vector_to_parameters(torch.arange(64.0 * 64), [weight])
    assert torch.allclose(weight.dequantize()[1], torch.arange(64.0, 128), rtol=2**-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.copy_(torch.full((24, 40), float("nan"))),
        lambda w: w.copy_(torch.eye(24, 40) * float("inf")),
        lambda w: w.copy_(torch.full((24, 40), 1e39, dtype=torch.float64)),
        lambda w: w.fill_(float("inf")),
        lambda w: w.div_(0),
        lambda w: w.mul_(float("nan")),
        lambda w: w.t().fill_(float("nan")),
        lambda w: w.__setitem__(torch.eye(24, 40, dtype=torch.bool), float("nan")),
        lambda w: torch._foreach_div_([w], 0.0),
        lambda w: torch.div(torch.ones(24, 40), 0, out=w),
        lambda w: setattr(w, "data", torch.full((24, 40), float("nan"))),
    ],
)
def test_writes_of_bad_values_are_refused_and_change_nothing(scheme, write):
    weight = make(dtype=torch.float32, scheme=scheme)
    before = weight.clone()
    with pytest.raises(UnsupportedError, match="it holds NaN or infinity"):
        write(weight)
    assert same(weight, before)


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda w: w.add_(torch.ones(3, 3)), RuntimeError),
        (lambda w: w.copy_(torch.ones(3, 3)), RuntimeError),
        (lambda w: w.copy_(torch.ones(1, 24, 40)[:, :3]), RuntimeError),
        (lambda w: w.add_(1j), RuntimeError),
        (lambda w: w.index_fill_(0, torch.tensor([99]), 1.0), IndexError),
        (lambda w: w.resize_(2, 2), UnsupportedError),
        (lambda w: w.set_(torch.ones(24, 40)), UnsupportedError),
        (lambda w: w.t_(), UnsupportedError),
        (lambda w: w.unsqueeze_(0), UnsupportedError),
        (lambda w: w.squeeze_().unsqueeze_(0), UnsupportedError),
        (lambda w: w.as_strided_((2, 2), (1, 1)), UnsupportedError),
        (lambda w: torch.add(torch.ones(3, 3), 1, out=w), UnsupportedError),
        (lambda w: w[0].zero_(), UnsupportedError),
        (lambda w: w.view(-1).zero_(), UnsupportedError),
        (lambda w: w.chunk(2)[1].zero_(), UnsupportedError),
        (lambda w: w.__setitem__(3, 0.0), UnsupportedError),
        (lambda w: w.__setitem__((slice(None), 3), 0.0), UnsupportedError),
        (lambda w: w.expand(2, 24, 40).zero_(), UnsupportedError),
        (lambda w: w.diagonal().fill_(0), UnsupportedError),
        (lambda w: w.view(torch.uint8).zero_(), UnsupportedError),
        (lambda w: setattr(w, "data", torch.ones(3, 3)), UnsupportedError),
        (lambda w: setattr(w, "data", torch.ones(40)), UnsupportedError),
        (lambda w: setattr(w, "data", torch.ones(24, 40).int()), UnsupportedError),
        (lambda w: setattr(w.expand(2, 24, 40), "data", torch.ones(2, 24, 40)), UnsupportedError),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_failed_writes_change_nothing(write, error):
    weight = make(dtype=torch.float32)
    before = weight.clone()
    with pytest.raises(error):
        write(weight)
    assert same(weight, before)
    assert weight.stride() == before.stride()


def test_refusals_name_the_op_and_the_way_out():
    weight = make()
    for write, message in (
        (lambda: weight.resize_(2, 2), r"aten.resize_.default would change the storage .*QuantizedTensor.*w.dequantize\(\)"),
        (lambda: weight.t_(), r"aten.t_.default would turn a quantised weight of shape \(24, 40\) into \(40, 24\)"),
        (lambda: weight.expand(2, 24, 40).zero_(), r"aten.zero_.default .* through an expanded view of shape \(2, 24, 40\)"),
        (lambda: weight[0].mul_(2), r"aten.mul_.Tensor would write to a view of a quantised weight.*w.dequantize\(\)"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            write()


def test_copies_between_quantised_weights_keep_the_bytes():
    source = make(dtype=torch.float32)
    for target in (make(), make(dtype=torch.float32, scheme=WEIGHT_ONLY)):
        spec = target.spec
        assert target.copy_(source) is target
        assert all(same(a, b) for a, b in zip(target.components, source.components, strict=True))
        assert target.spec == spec
    other = make(dtype=torch.float32, scheme=BLOCK)
    other.copy_(source)
    assert same(other, QuantizedTensor.from_float(source.dequantize(), BLOCK))
    turned = make(40, 24, torch.float32)
    turned.copy_(source.t())
    assert same(turned, QuantizedTensor.from_float(source.dequantize().t(), CHANNEL))
    plain = torch.zeros(24, 40)
    plain.copy_(source)
    assert torch.equal(plain, source.dequantize())


def test_assigning_data_replaces_what_was_there():
    """As for any tensor: dtype and all, in this object; aliases keep what they had. Floats are quantised first."""
    weight = nn.Parameter(make(dtype=torch.float32), requires_grad=False)
    alias, before = weight.detach(), weight.dequantize()
    weight.data = torch.full((24, 40), 3.0)
    assert isinstance(weight, nn.Parameter)
    assert (weight.dequantize() == 3).all()
    assert torch.equal(alias.dequantize(), before)
    weight.data = weight.data.half()
    assert weight.dtype == weight.dequantize().dtype == weight.spec.dtype == torch.float16
    weight.data = torch.full((24, 40), 2.0, dtype=torch.bfloat16)
    assert weight.dtype == weight.spec.dtype == torch.bfloat16
    assert torch.allclose(F.linear(torch.ones(1, 40).bfloat16(), weight), torch.full((1, 24), 80.0).bfloat16())
    other = make(dtype=torch.float32)
    weight.data = other
    assert same(weight.data, other)
    assert weight.qdata.data_ptr() == other.qdata.data_ptr()
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # as for a plain tensor
        weight.data = weight.data.to("meta")
    assert same(weight.data, other)


def test_views_are_read_only():
    weight = make(dtype=torch.float32)
    row = weight[0]
    assert isinstance(row, ReadOnlyView)
    assert torch.equal(row + 0, weight.dequantize()[0])
    assert row.clone().zero_().sum() == 0


def test_new_tensors_like_a_weight():
    weight = make()
    for values, expected in ((torch.zeros_like(weight), 0), (torch.ones_like(weight), 1), (torch.full_like(weight, 2.5), 2.5)):
        assert values.shape == weight.shape
        assert values.dtype == weight.dtype
        assert (values == expected).all()
    assert type(torch.empty_like(weight, dtype=torch.float32)) is torch.Tensor
    assert torch.randn_like(weight).isfinite().all()
    assert weight.new_zeros(3).dtype == weight.dtype


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_empty_weight_is_one_of_zeros(scheme):
    """In every format: bytes of the memory, or an nvfp4 global scale of 0, would stand for NaN, and spoil the next write."""
    weight = make(scheme=scheme, dtype=torch.float32)
    for empty in (torch.empty_like(weight), torch.empty_like(weight.to("meta"), device="cpu")):
        assert isinstance(empty, QuantizedTensor)
        assert torch.equal(empty.dequantize(), torch.zeros(24, 40))
        empty.add_(1)
        assert same(empty, QuantizedTensor.from_float(torch.ones(24, 40), scheme))
