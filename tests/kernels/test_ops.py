"""The two ops: what they compute for every shape, dtype and scheme, what they refuse, and how they compile."""

from __future__ import annotations

import contextlib
import itertools
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from fxquant.kernels.capability import Problem, choose
from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, STORED_FORMATS, WEIGHT_FORMATS
from fxquant.kernels.ops import NO_ACTIVATION
from fxquant.kernels.quantized_tensor import QuantizedTensor
from tests.kernels.weights import (
    PAIRS,
    Names,
    activation_components,
    assert_within_roundings,
    quantised,
    scheme_of,
    seen_activation,
)

quantize_activation = torch.ops.fxquant.quantize_activation
scaled_mm = torch.ops.fxquant.scaled_mm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 15, 17, 60, 64, 100, 128, 192]
SCHEMES: list[Names] = [
    ("fp8_per_tensor_static", "fp8_per_token"),
    ("fp8_per_tensor_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_channel_static", "fp8_per_token"),
    ("fp8_per_channel_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_channel_static", "fp8_per_block_dynamic"),
    ("fp8_per_block_static", "fp8_per_block_dynamic"),
    ("fp8_per_block_static", "fp8_per_token"),
    ("fp8_per_block_static", None),
    ("fp8_per_channel_static", None),
    ("mxfp8", "mxfp8"),
    ("mxfp8", None),
    ("mxfp4", "mxfp4"),
    ("mxfp4", "fp8_per_token"),
    ("mxfp4", None),
    ("nvfp4", "nvfp4"),
    ("nvfp4", None),
    ("int8_per_channel_static", "int8_per_token"),
    ("int8_per_channel_static", None),
    ("int4_group32", None),
    ("int4_group16_reordered", "int8_per_token"),
]
"""Every format and every kind of product; PAIRS are all."""

LIBRARY = SCHEMES[:4]
"""What torch._scaled_mm serves."""

BY_TOKEN = [scheme for scheme in SCHEMES if scheme[1] != "fp8_per_tensor_dynamic"]
MODES = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]


def product(x: Tensor, w: QuantizedTensor, bias: Tensor | None, names: Names, dtype: torch.dtype, **more) -> Tensor:
    """The op itself."""
    components = activation_components(x, names[1])
    return scaled_mm(components, w.components, bias, names[1] or NO_ACTIVATION, names[0], dtype, list(w.spec.shards), **more)


def assert_product(y: Tensor, x: Tensor, w: QuantizedTensor, bias: Tensor | None = None) -> None:
    """``y`` is the product of the dequantised operands, computed in float64, to within the roundings that it may have."""
    activation = w.spec.scheme.activation
    names = (w.spec.scheme.weight.name, activation.name if activation else None)
    assert y.dtype == x.dtype
    assert_within_roundings(y, seen_activation(x, names[1]), w.dequantize(torch.float32).double(), names, bias)


# -- shapes ---------------------------------------------------------------------------------------------------------------


def activations(k: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    """x of 1 to 4 dimensions with 0, 1, 2 or 17 rows, in one of several layouts."""
    dimensions, m = choose.choice([1, 2, 3, 4]), choose.choice([0, 1, 2, 17])
    shape = {1: (k,), 2: (m, k), 3: (2, m, k), 4: (2, 3, m, k)}[dimensions]
    layout = choose.choice(["contiguous", "strided", "transposed", "expanded"])
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * k).to(dtype)[..., ::2]
    if layout == "transposed" and dimensions > 1:
        return torch.randn(*shape[:-2], k, m).to(dtype).mT
    if layout == "expanded" and dimensions > 2:
        return torch.randn(1, *shape[1:]).to(dtype).expand(shape)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_in_every_layout(names, dtype):
    """All pairs of K and N; dimensions, rows, layout, bias and grad mode drawn for each of them."""
    choose = random.Random(str((names, dtype)))
    for k, n in itertools.product(SIZES, SIZES):
        x, w = activations(k, dtype, choose), quantised(torch.randn(n, k).to(dtype), names)
        bias = choose.choice([None, torch.randn(n).to(dtype)])
        with choose.choice(MODES)():
            y = F.linear(x, w, bias)
        assert_product(y, x, w, bias)


@pytest.mark.parametrize("names", PAIRS, ids=str)
@pytest.mark.parametrize("shards", [False, True])
def test_every_product_that_is_defined(names, shards):
    """With and without shards, whose borders are no multiple of anything; K odd, 1 and a multiple of 32, N = 1."""
    for k, n, rows in ((33, 19, (5, 14)), (1, 3, (1, 2)), (64, 140, (131, 9)), (45, 1, (1, 0)), (160, 6, (2, 2, 2))):
        w = torch.cat([torch.randn(count, k) * 10.0**power for power, count in enumerate(rows)])
        for dtype, m in ((torch.bfloat16, 5), (torch.float32, 1), (torch.float16, 3)):
            weight = quantised(w.to(dtype), names, shards=rows if shards else ())
            x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
            assert_product(product(x, weight, bias, names, dtype), x, weight, bias)
            assert_product(product(x, weight, None, names, dtype), x, weight)
            assert product(x[:0], weight, None, names, dtype).shape == (0, n)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_number_of_rows(names, mode):
    w, bias = quantised(torch.randn(17, 60).bfloat16(), names), torch.randn(17).bfloat16()
    for m in (0, 1, 2, 3, 15, 16, 17, 33):
        x = torch.randn(m, 60).bfloat16()
        with mode():
            assert_product(F.linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 5), (3, 0, 5), (3, 8, 0), (0, 0, 5), (0, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_operands_give_the_bias(names, m, k, n, dtype):
    x, w = torch.randn(m, k).to(dtype), quantised(torch.randn(n, k).to(dtype), names)
    for bias in (None, torch.randn(n).to(dtype)):
        y = F.linear(x, w, bias)
        assert y.dtype == dtype
        assert torch.equal(y, torch.zeros(m, n, dtype=dtype) + (0 if bias is None else bias))


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_shape_of_x_changes_nothing(names):
    """f(x[B, S, K]) == f(x.view(-1, K)) to the bit, and 1-D and 4-D too."""
    w, x = quantised(torch.randn(64, 96).bfloat16(), names), torch.randn(6, 96).bfloat16()
    rows = F.linear(x, w)
    assert torch.equal(F.linear(x.view(2, 3, 96), w).view(6, 64), rows)
    assert torch.equal(F.linear(x.view(1, 2, 3, 96), w).view(6, 64), rows)
    assert torch.equal(F.linear(x[:1].view(96), w), F.linear(x[:1], w)[0])


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [*DTYPES, torch.float64], ids=str)
def test_bias_of_another_dtype(names, out_dtype, bias_dtype):
    x, w, bias = torch.randn(3, 32).to(out_dtype), quantised(torch.randn(16, 32), names), torch.randn(16).to(bias_dtype)
    assert_product(product(x, w, bias, names, out_dtype), x, w, bias.to(out_dtype))


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_every_family_that_serves_agrees(names):
    x, w, bias = torch.randn(5, 100), torch.randn(60, 100), torch.randn(60)
    for backend in ("auto", "reference", *(["torch"] if names in LIBRARY else [])):
        weight = quantised(w, names, backend=backend)
        assert_product(F.linear(x, weight, bias), x, weight, bias)


# -- values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_zeros_give_exactly_the_bias(names):
    x, w, bias = torch.randn(4, 300), torch.randn(140, 300), torch.randn(140)
    x[1], x[2, :128], w[3], w[128:, :128] = 0, 0, 0, 0
    weight = quantised(w, names)
    y = F.linear(x, weight, bias)
    assert_product(y, x, weight, bias)
    assert torch.equal(y[1], bias)
    assert torch.equal(y[:, 3], bias[3].expand(4))
    for zeros in (F.linear(torch.zeros(2, 300), weight, bias), F.linear(x[:2], quantised(torch.zeros(140, 300), names), bias)):
        assert torch.equal(zeros, bias.expand(2, 140))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("names", BY_TOKEN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_token_spoils_its_own_row_only(names, bad, dtype):
    weight, x = quantised(torch.randn(40, 300).to(dtype), names), torch.randn(2, 3, 300).to(dtype)
    clean = F.linear(x, weight)
    x[1, 0, 170] = bad
    y = F.linear(x, weight)
    assert not y[1, 0].isfinite().any()
    y[1, 0], clean[1, 0] = 0, 0
    assert torch.equal(y, clean)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers(names, dtype):
    x, w = torch.randn(4, 256).to(dtype), torch.randn(64, 256).to(dtype)
    x[0, 3], x[1, 200], w[5, 7] = 1e4, -1e4, 50
    weight = quantised(w, names)
    y = F.linear(x, weight)
    assert_product(y, x, weight)
    exact = x.double() @ w.double().t()
    bound = 0.3 if FORMATS.get(names[0], STORED_FORMATS["int4_group32"]).packed else 0.05
    assert (y.double() - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("x_size", "w_size"),
    [(3e38, 1e-3), (1e-3, 3e38), (3e38, 1e-38), (1e-38, 3e38), (1e30, 1e-30), (1e-20, 1e-16), (1e-37, 1.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_magnitudes_that_a_float_can_hold(names, x_size, w_size, dtype):
    """Where the result is a normal number, no product of a sum with one scale overflows or vanishes on the way."""
    if "mxfp4" in names:  # its numbers around 3e38 are 2**127 and 2**128
        x_size, w_size = min(x_size, 2e38), min(w_size, 2e38)
    x, w = (torch.rand(3, 40) + 0.5).clamp(max=1) * x_size, (torch.rand(20, 40) + 0.5).clamp(max=1) * w_size
    weight = quantised(w.to(dtype), names)
    assert_product(F.linear(x.to(dtype), weight), x.to(dtype), weight)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_the_smallest_magnitudes_vanish(names):
    y = F.linear(torch.full((2, 40), 1e-45), quantised(torch.full((20, 40), 1e-45), names))
    assert not y.any()


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_small_halves(names):
    x, weight = (torch.randn(4, 64) * 1e-7).half(), quantised(torch.randn(32, 64).half(), names)
    assert_product(F.linear(x, weight), x, weight)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_sparse_weights(names):
    w = torch.where(torch.rand(200, 300) < 0.999, 0.0, torch.randn(200, 300) * 1e-4)
    weight, x = quantised(w, names), torch.randn(3, 300)
    y = F.linear(x, weight)
    assert_product(y, x, weight)
    assert y.isfinite().all()


@pytest.mark.parametrize("names", BY_TOKEN, ids=str)
def test_a_row_agrees_alone_and_in_any_batch(names):
    """The quantised row is the same; the sums may be accumulated in another order."""
    weight, x = quantised(torch.randn(64, 200), names), torch.randn(33, 200)
    y = F.linear(x, weight)
    for rows in ([7], [7, 32], list(range(20))):
        magnitude = x[rows].abs() @ weight.dequantize().abs().t()
        assert ((F.linear(x[rows], weight) - y[rows]).abs() <= magnitude * 2.0**-18).all()


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_operands_are_left_as_they_are(names):
    """Neither op writes to what it is given, and no result shares memory with it."""
    x, weight, bias = torch.randn(3, 64), quantised(torch.randn(32, 64), names), torch.randn(32)
    components = [part.clone() for part in activation_components(x, names[1])]
    operands = [x, bias, *components, *weight.components]
    before = [part.clone().reshape(-1).view(torch.uint8) for part in operands]
    y = scaled_mm(components, weight.components, bias, names[1] or NO_ACTIVATION, names[0], torch.float32)
    for part, old in zip(operands, before, strict=True):
        assert torch.equal(part.reshape(-1).view(torch.uint8), old)
    storages = [part.untyped_storage().data_ptr() for part in (*operands, y)]
    assert len(set(storages)) == len(storages)


# -- the quantised activation ---------------------------------------------------------------------------------------------


def test_shapes_of_a_quantised_activation():
    x = torch.randn(2, 3, 200)
    shapes = {
        "fp8_per_tensor_dynamic": [(2, 3, 200), ()],
        "fp8_per_token": [(2, 3, 200), (2, 3, 1)],
        "fp8_per_block_dynamic": [(2, 3, 200), (2, 3, 2)],
        "mxfp8": [(2, 3, 200), (2, 3, 7)],
        "mxfp4": [(2, 3, 100), (2, 3, 7)],
        "nvfp4": [(2, 3, 100), (2, 3, 13), (2, 3, 1)],
        "int8_per_token": [(2, 3, 200), (2, 3, 1)],
    }
    assert list(shapes) == list(ACTIVATION_FORMATS)
    for name, expected in shapes.items():
        assert [tuple(part.shape) for part in quantize_activation(x, name)] == expected
        for empty in (torch.zeros(0, 200), torch.zeros(3, 0), torch.zeros(2, 0, 5), torch.zeros(0)):
            qdata, scale, *above = quantize_activation(empty, name)
            assert qdata.shape == (*empty.shape[:-1], FORMATS[name].stored_columns(empty.shape[-1]))
            assert all(part.float().isfinite().all() for part in (scale, *above))


def test_a_per_tensor_scale_spans_every_dimension():
    x = torch.randn(2, 3, 64) * torch.tensor([1.0, 10.0])[:, None, None]
    qdata, scale = quantize_activation(x, "fp8_per_tensor_dynamic")
    flat, flat_scale = quantize_activation(x.view(-1), "fp8_per_tensor_dynamic")
    assert scale == flat_scale == x.abs().max() / 448
    assert torch.equal(qdata.view(-1).view(torch.uint8), flat.view(torch.uint8))


# -- which kernel runs ----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records the arguments of every call of a library kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[tuple[Tensor, Tensor]] = []
        self.int8_activations: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm.default:
            self.scales.append((args[2], args[3]))
        if func is torch.ops.aten._weight_int8pack_mm.default:
            self.int8_activations.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("shards", [(), (12, 20)], ids=str)
def test_the_library_is_called_where_it_serves(names, shards):
    """Once, and with one scale a row: with two scalar ones, the CPU takes a loop hundreds of times slower that overflows."""
    x, weight = torch.randn(2, 3, 64), quantised(torch.randn(32, 64), names, shards=shards)
    with Calls() as calls:
        product(x, weight, None, names, torch.float32)
    assert len(calls.scales) == (names in LIBRARY)
    assert not calls.int8_activations  # for bfloat16 only
    for x_scale, w_scale in calls.scales:
        assert x_scale.shape == (6, 1)
        assert w_scale.shape == (1, 32)
        assert x_scale.stride(0) == w_scale.stride(1) == 1


INT8: Names = ("int8_per_channel_static", None)


@pytest.mark.parametrize("bfloat16_units", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (64,), (1, 1, 16), (5, 64), (2, 3, 32), (1, 40), (1, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 32])
def test_the_int8_kernel_of_torch(bfloat16_units, shape, rows, monkeypatch):
    """Called for one token always, for more where the CPU has no bfloat16 units; as exact as dequantising."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16_units)
    x = torch.randn(shape).bfloat16()
    weight = quantised((torch.randn(rows, shape[-1]) * torch.logspace(-3, 3, rows)[:, None]).bfloat16(), INT8)
    bias = torch.randn(rows).bfloat16()
    one_token = x.numel() == shape[-1]
    with Calls() as calls:
        y, with_bias = product(x, weight, None, INT8, torch.bfloat16), product(x, weight, bias, INT8, torch.bfloat16)
    called = shape[-1] % 16 == 0 and (one_token or not bfloat16_units)
    assert len(calls.int8_activations) == 2 * called
    assert_product(y, x, weight)
    assert_product(with_bias, x, weight, bias)
    assert_product(product(x, weight, None, INT8, torch.bfloat16, backend="reference"), x, weight)
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight), y)


def test_the_int8_kernel_takes_any_layout_and_any_magnitude():
    for size in (1e-30, 1e30):
        weight = quantised((torch.randn(8, 32) * size).bfloat16(), INT8)
        for x in (torch.randn(32, 1).bfloat16().t(), torch.randn(1, 64).bfloat16()[:, ::2], torch.randn(1, 32).bfloat16()):
            assert_product(product(x, weight, None, INT8, torch.bfloat16), x, weight)
    weight, bad = quantised(torch.randn(8, 32).bfloat16(), INT8), torch.randn(1, 32).bfloat16()
    bad[0, 3] = float("nan")
    assert product(bad, weight, None, INT8, torch.bfloat16).isnan().all()


# -- refusals -------------------------------------------------------------------------------------------------------------


def test_unknown_formats_are_refused_with_the_known_ones():
    x, weight = torch.randn(2, 32), quantised(torch.randn(16, 32), SCHEMES[2])
    quantised_x = quantize_activation(x, "fp8_per_token")
    with pytest.raises(UnsupportedError, match=f"activation format 'fp9' does not exist.*{', '.join(ACTIVATION_FORMATS)}"):
        quantize_activation(x, "fp9")
    with pytest.raises(UnsupportedError, match="activation format 'fp8_per_block_static' is not one"):
        quantize_activation(x, "fp8_per_block_static")
    with pytest.raises(UnsupportedError, match=f"weight format 'fp9' does not exist.*{', '.join(WEIGHT_FORMATS)}"):
        scaled_mm(quantised_x, weight.components, None, "fp8_per_token", "fp9", torch.float32)
    with pytest.raises(UnsupportedError, match="activation format 'fp9' does not exist"):
        scaled_mm(quantised_x, weight.components, None, "fp9", "fp8_per_channel_static", torch.float32)
    with pytest.raises(UnsupportedError, match="activation format 'int4_group32' does not exist"):
        quantize_activation(x, "int4_group32")


@pytest.mark.parametrize("weight_format", [*WEIGHT_FORMATS, "int4_group32"])
@pytest.mark.parametrize("activation", ACTIVATION_FORMATS)
def test_products_that_are_not_defined_are_refused_with_those_that_are(weight_format, activation):
    able = [other for weight, other in PAIRS if weight == weight_format and other]
    if activation not in able:
        weight = quantised(torch.randn(16, 32), (weight_format, None))
        message = f"no product of {weight_format} x {activation} is defined; {weight_format} takes 'none' (weight-only) or "
        with pytest.raises(UnsupportedError, match=re.escape(message + ", ".join(able)) + "$"):
            product(torch.randn(2, 32), weight, None, (weight_format, activation), torch.float32)
    else:
        assert choose(Problem(scheme=scheme_of((weight_format, activation)), rows=16, columns=32))


def test_a_family_that_cannot_serve_is_refused():
    x, weight = torch.randn(2, 32), quantised(torch.randn(16, 32), SCHEMES[5])
    components = quantize_activation(x, "fp8_per_block_dynamic")
    names = ("fp8_per_block_dynamic", "fp8_per_block_static", torch.float32)
    with pytest.raises(UnsupportedError, match="no kernel family 'cutlass'; use one of: auto, torch, triton, reference"):
        scaled_mm(components, weight.components, None, *names, backend="cutlass")
    for family in ("torch", "triton"):
        with pytest.raises(UnsupportedError, match=rf"no '{family}' kernel .*N=16, K=32 on cpu.*use 'reference', or 'auto'"):
            scaled_mm(components, weight.components, None, *names, backend=family)


def test_activations_that_are_no_activations():
    for x in (torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="a float tensor of one dimension or more, got"):
            quantize_activation(x, "fp8_per_token")


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [0, 30, 34])
def test_operands_that_do_not_fit(names, columns):
    x, weight = torch.randn(2, columns), quantised(torch.randn(16, 32), names)
    with pytest.raises(UnsupportedError, match=f"the activation has K={columns}, the weight N=16, K=32"):
        product(x, weight, None, names, torch.float32)
    if not weight.spec.scheme.weight.packed:  # a packed one does not tell 31 columns from 32
        with pytest.raises(UnsupportedError, match="the activation has K=31, the weight N=16, K=32"):
            product(torch.randn(2, 31), weight, None, names, torch.float32)


@pytest.mark.parametrize("names", [names for names in PAIRS if scheme_of(names).weight.packed], ids=str)
def test_the_padding_of_a_packed_weight_is_not_read(names):
    """What stands in the last high nibble, behind an odd K, is multiplied with nothing but zeros."""
    x, weight = torch.randn(3, 33), quantised(torch.randn(5, 33), names)
    y = product(x, weight, None, names, torch.float32)
    weight.qdata[:, -1] |= 0x70
    assert torch.equal(product(x, weight, None, names, torch.float32), y)
    x[1, 32] = float("inf")
    assert not product(x, weight, None, names, torch.float32)[1].isfinite().any()
    assert torch.equal(product(x, weight, None, names, torch.float32)[::2], y[::2]) or names[1] == "fp8_per_tensor_dynamic"


# -- compilers ------------------------------------------------------------------------------------------------------------


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""All but test_schema, which compares tensors by arithmetic that float8 has not: ``test_operands_are_left_as_they_are``."""


@pytest.mark.parametrize("activation", ACTIVATION_FORMATS)
@pytest.mark.parametrize("shape", [(3, 130), (0, 4)], ids=str)
def test_opcheck_of_quantize_activation(activation, shape):
    torch.library.opcheck(quantize_activation.default, (torch.randn(shape), activation), test_utils=OPCHECKS)


@pytest.mark.parametrize("names", [SCHEMES[index] for index in (1, 2, 5, 10, 11, 14, 16, 17, 19)], ids=str)
@pytest.mark.parametrize(("shape", "rows", "shards"), [((3, 130), 16, [6, 10]), ((2, 2, 5), 1, None)], ids=str)
def test_opcheck_of_scaled_mm(names, shape, rows, shards):
    x, weight = torch.randn(shape), quantised(torch.randn(rows, shape[-1]), names, shards=shards or ())
    components = activation_components(x, names[1])
    args = (components, weight.components, torch.randn(rows), names[1] or NO_ACTIVATION, names[0], torch.bfloat16, shards)
    torch.library.opcheck(scaled_mm.default, args, test_utils=OPCHECKS)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_on_the_meta_device(names):
    weight = quantised(torch.randn(16, 32).bfloat16(), names).to("meta")
    y = F.linear(torch.empty(2, 3, 32, dtype=torch.bfloat16, device="meta"), weight, torch.empty(16, device="meta").bfloat16())
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 16), torch.bfloat16, "meta")


class TwoOps(torch.nn.Module):
    def __init__(self, names: Names, rows: int, columns: int, shards: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.names, self.shards = names, shards
        weight = quantised(torch.randn(rows, columns), names, shards=shards)
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(c, requires_grad=False) for c in weight.components)
        self.bias = torch.nn.Parameter(torch.randn(rows), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        components, activation = activation_components(x, self.names[1]), self.names[1] or NO_ACTIVATION
        return scaled_mm(components, list(self.parts), self.bias, activation, self.names[0], x.dtype, list(self.shards))


def test_an_exported_graph_shows_the_ops_and_decomposes():
    module = TwoOps(SCHEMES[2], 16, 32)
    program = torch.export.export(module, (torch.randn(4, 32),), dynamic_shapes=({0: torch.export.Dim("m")},))
    targets = [str(node.target) for node in program.graph.nodes if "fxquant" in str(node.target)]
    assert targets == ["fxquant.quantize_activation.default", "fxquant.scaled_mm.default"]
    decomposed = program.run_decompositions()
    assert not [node for node in decomposed.graph.nodes if "fxquant" in str(node.target)]
    assert torch.ops.aten._scaled_mm.default in [node.target for node in decomposed.graph.nodes]
    for m in (2, 4, 33):
        x = torch.randn(m, 32)
        assert torch.equal(decomposed.module()(x), module(x))


@pytest.mark.parametrize(
    ("names", "columns", "shards"),
    [
        (SCHEMES[1], 130, ()),
        (SCHEMES[2], 130, (30, 34)),
        (SCHEMES[5], 130, (30, 34)),
        (("mxfp4", None), 133, (30, 34)),
        (("nvfp4", "nvfp4"), 133, ()),
        (("int8_per_channel_static", "int8_per_token"), 133, ()),
        (("int4_group16_reordered", None), 133, ()),
    ],
    ids=str,
)
def test_compiled_equals_eager(names, columns, shards):
    """With Inductor: one graph serves any number of tokens but 1 and 0."""
    module = TwoOps(names, 64, columns, shards)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for m in (5, 6, 17, 64, 200):
        x = torch.randn(m, columns)
        y, eager = compiled(x), module(x)
        assert y.shape == eager.shape
        assert torch.allclose(y, eager, rtol=1e-5, atol=1e-4)
    assert counter.frame_count == 1
    for m in (1, 0) if names == SCHEMES[2] else ():
        x = torch.randn(m, columns)
        assert torch.allclose(compiled(x), module(x), rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_int8_kernel_compiles(monkeypatch):
    """Inductor fails on its scales where it has not written them to memory."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    module = TwoOps(INT8, 32, 64).bfloat16()
    with torch.compiler.config.patch(force_disable_caches=True):  # they do not know of the CPU's units
        compiled = torch.compile(module, fullgraph=True, dynamic=True)
        for m in (5, 6, 1):
            x = torch.randn(m, 64).bfloat16()
            assert torch.allclose(compiled(x), module(x), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(("rows", "columns"), [(8, 0), (0, 8)])
def test_compiled_with_an_empty_weight(rows, columns):
    module = TwoOps(SCHEMES[2], rows, columns)
    x = torch.randn(3, columns)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))
