"""The two ops: what they compute for every shape, dtype and scheme, what they refuse, and how they compile."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxquant.kernels import numerics
from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, WEIGHT_FORMATS, Scheme
from fxquant.kernels.ops import NO_ACTIVATION
from fxquant.kernels.quantized_tensor import QuantizedTensor

quantize_activation = torch.ops.fxquant.quantize_activation
scaled_mm = torch.ops.fxquant.scaled_mm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 15, 17, 60, 64, 100, 128, 192]
SCHEMES = [
    ("fp8_per_tensor_static", "fp8_per_token"),
    ("fp8_per_tensor_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_channel_static", "fp8_per_token"),
    ("fp8_per_channel_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_channel_static", "fp8_per_block_dynamic"),
    ("fp8_per_block_static", "fp8_per_block_dynamic"),
    ("fp8_per_block_static", "fp8_per_token"),
    ("fp8_per_block_static", None),
    ("fp8_per_channel_static", None),
]
BY_TOKEN = [scheme for scheme in SCHEMES if scheme[1] != "fp8_per_tensor_dynamic"]
MODES = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]


def scheme_of(names: tuple[str, str | None]) -> Scheme:
    return Scheme(weight=FORMATS[names[0]], activation=FORMATS[names[1]] if names[1] else None)


def quantised(w: Tensor, names: tuple[str, str | None], **keywords) -> QuantizedTensor:
    return QuantizedTensor.from_float(w, scheme_of(names), **keywords)


def seen_activation(x: Tensor, activation: str | None) -> Tensor:
    """The activation as the product sees it: quantised and dequantised, in float64."""
    if activation is None:
        return x.double()
    components = quantize_activation(x, activation)
    if activation == "fp8_per_tensor_dynamic":
        return components[0].double() * components[1].double()
    return numerics.dequantize(components, FORMATS[activation], torch.float32).double()


def assert_product(y: Tensor, x: Tensor, w: QuantizedTensor, bias: Tensor | None = None) -> None:
    """``y`` is the product of the dequantised operands, computed in float64, to within the roundings that it may have.

    Those are the accumulation in float32 (2**-18 of the sum of magnitudes), and in the result's dtype the weight (weight-only),
    the product and the sum with the bias.
    """
    activation = w.spec.scheme.activation
    left = seen_activation(x, activation.name if activation else None)
    right = w.dequantize(torch.float32).double()
    product = left @ right.t()
    expected = product if bias is None else product + bias.double()
    magnitude = left.abs() @ right.abs().t()
    finfo = torch.finfo(y.dtype)
    tolerance = magnitude * (2.0**-18 + (finfo.eps if activation is None else 0)) + finfo.smallest_normal * finfo.eps
    tolerance = tolerance + (product.abs() + expected.abs()) * finfo.eps
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= tolerance).all()


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
    activation = names[1] or NO_ACTIVATION
    components = [x] if names[1] is None else quantize_activation(x, names[1])
    y = scaled_mm(components, w.components, bias, activation, names[0], out_dtype)
    assert_product(y, x, w, bias.to(out_dtype))


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_every_family_that_serves_agrees(names):
    x, w, bias = torch.randn(5, 100), torch.randn(60, 100), torch.randn(60)
    for backend in ("auto", "reference", *(["torch"] if names in SCHEMES[:4] else [])):
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
    assert (y.double() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("x_size", "w_size"),
    [(3e38, 1e-3), (1e-3, 3e38), (3e38, 1e-38), (1e-38, 3e38), (1e30, 1e-30), (1e-20, 1e-16), (1e-37, 1.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_magnitudes_that_a_float_can_hold(names, x_size, w_size, dtype):
    """Where the result is a normal number, no product of a sum with one scale overflows or vanishes on the way."""
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
    components = [x.clone()] if names[1] is None else quantize_activation(x, names[1])
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
    shapes = {"fp8_per_tensor_dynamic": (), "fp8_per_token": (2, 3, 1), "fp8_per_block_dynamic": (2, 3, 2)}
    for name, shape in shapes.items():
        qdata, scale = quantize_activation(x, name)
        assert qdata.shape == x.shape
        assert tuple(scale.shape) == shape
    for name in shapes:
        for empty in (torch.zeros(0, 200), torch.zeros(3, 0), torch.zeros(2, 0, 5)):
            qdata, scale = quantize_activation(empty, name)
            assert qdata.shape == empty.shape
            assert scale.isfinite().all()


def test_a_per_tensor_scale_spans_every_dimension():
    x = torch.randn(2, 3, 64) * torch.tensor([1.0, 10.0])[:, None, None]
    qdata, scale = quantize_activation(x, "fp8_per_tensor_dynamic")
    flat, flat_scale = quantize_activation(x.view(-1), "fp8_per_tensor_dynamic")
    assert scale == flat_scale == x.abs().max() / 448
    assert torch.equal(qdata.view(-1).view(torch.uint8), flat.view(torch.uint8))


# -- which kernel runs ----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records the arguments of every torch._scaled_mm."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm.default:
            self.scales.append((args[2], args[3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_the_library_is_called_where_it_serves(names):
    """Once, and with one scale a row: with two scalar ones, the CPU takes a loop hundreds of times slower that overflows."""
    x, weight = torch.randn(2, 3, 64), quantised(torch.randn(32, 64), names)
    components = [x] if names[1] is None else quantize_activation(x, names[1])
    with Calls() as calls:
        scaled_mm(components, weight.components, None, names[1] or NO_ACTIVATION, names[0], torch.float32)
    assert len(calls.scales) == (names in SCHEMES[:4])
    for x_scale, w_scale in calls.scales:
        assert x_scale.shape == (6, 1)
        assert w_scale.shape == (1, 32)
        assert x_scale.stride(0) == w_scale.stride(1) == 1


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
    with pytest.raises(UnsupportedError, match="no numerics for mxfp8"):
        quantize_activation(x, "mxfp8")


def test_a_family_that_cannot_serve_is_refused():
    x, weight = torch.randn(2, 32), quantised(torch.randn(16, 32), SCHEMES[5])
    components = quantize_activation(x, "fp8_per_block_dynamic")
    names = ("fp8_per_block_dynamic", "fp8_per_block_static", torch.float32)
    with pytest.raises(UnsupportedError, match="no kernel family 'cutlass'; use one of: auto, torch, triton, reference"):
        scaled_mm(components, weight.components, None, *names, "cutlass")
    for family in ("torch", "triton"):
        with pytest.raises(UnsupportedError, match=rf"no '{family}' kernel .*N=16, K=32 on cpu.*\['reference'\] or 'auto'"):
            scaled_mm(components, weight.components, None, *names, family)


def test_activations_that_are_no_activations():
    for x in (torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="a float tensor of one dimension or more, got"):
            quantize_activation(x, "fp8_per_token")


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [0, 31, 33])
def test_operands_that_do_not_fit(names, columns):
    x, weight = torch.randn(2, columns), quantised(torch.randn(16, 32), names)
    components = [x] if names[1] is None else quantize_activation(x, names[1])
    with pytest.raises(UnsupportedError, match=f"the activation has K={columns}, the weight N=16, K=32"):
        scaled_mm(components, weight.components, None, names[1] or NO_ACTIVATION, names[0], torch.float32)


# -- compilers ------------------------------------------------------------------------------------------------------------


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""All but test_schema, which compares tensors by arithmetic that float8 has not: ``test_operands_are_left_as_they_are``."""


@pytest.mark.parametrize("activation", ["fp8_per_tensor_dynamic", "fp8_per_token", "fp8_per_block_dynamic"])
@pytest.mark.parametrize("shape", [(3, 130), (2, 2, 5), (7,), (0, 4)], ids=str)
def test_opcheck_of_quantize_activation(activation, shape):
    torch.library.opcheck(quantize_activation.default, (torch.randn(shape), activation), test_utils=OPCHECKS)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
@pytest.mark.parametrize(("shape", "rows"), [((3, 130), 16), ((2, 2, 5), 1), ((7,), 3), ((0, 4), 2)], ids=str)
def test_opcheck_of_scaled_mm(names, shape, rows):
    x, weight = torch.randn(shape), quantised(torch.randn(rows, shape[-1]), names)
    components = [x] if names[1] is None else quantize_activation(x, names[1])
    args = (components, weight.components, torch.randn(rows), names[1] or NO_ACTIVATION, names[0], torch.bfloat16)
    torch.library.opcheck(scaled_mm.default, args, test_utils=OPCHECKS)


@pytest.mark.parametrize("names", SCHEMES, ids=str)
def test_on_the_meta_device(names):
    weight = quantised(torch.randn(16, 32).bfloat16(), names).to("meta")
    y = F.linear(torch.empty(2, 3, 32, dtype=torch.bfloat16, device="meta"), weight, torch.empty(16, device="meta").bfloat16())
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 16), torch.bfloat16, "meta")


class TwoOps(torch.nn.Module):
    def __init__(self, names: tuple[str, str], rows: int, columns: int) -> None:
        super().__init__()
        self.names, self.weight = names, quantised(torch.randn(rows, columns), names)
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(c, requires_grad=False) for c in self.weight.components)
        self.bias = torch.nn.Parameter(torch.randn(rows), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        components = quantize_activation(x, self.names[1])
        return scaled_mm(components, list(self.parts), self.bias, self.names[1], self.names[0], x.dtype)


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


@pytest.mark.parametrize("names", [SCHEMES[1], SCHEMES[2], SCHEMES[5]], ids=str)
def test_compiled_equals_eager(names):
    """With Inductor, for several M, 1 and 0 among them."""
    module = TwoOps(names, 64, 130)
    compiled = torch.compile(module, fullgraph=True)
    for m in (5, 6, 17, 1, 0):
        x = torch.randn(m, 130)
        y, eager = compiled(x), module(x)
        assert y.shape == eager.shape
        assert torch.allclose(y, eager, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(8, 0), (0, 8)])
def test_compiled_with_an_empty_weight(rows, columns):
    module = TwoOps(SCHEMES[2], rows, columns)
    x = torch.randn(3, columns)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))
