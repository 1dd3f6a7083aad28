"""Every shape, dtype and awkward value through whole models, eager and compiled, against the dequantised reference."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant.kernels import numerics

SIZES = (1, 7, 15, 17, 60, 64, 100, 128, 192)
SCHEMES = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Rounding of the result to its dtype, and of sums in another order."""


class AllSizes(nn.Module):
    """A linear for every pair of sizes, with and without bias in turn; x comes as one tensor per K."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.sizes = sizes
        pairs = enumerate(itertools.product(sizes, sizes))
        self.layers = nn.ModuleDict({f"{k}x{n}": nn.Linear(k, n, bias=bool(i % 2), dtype=dtype) for i, (k, n) in pairs})

    def forward(self, xs: list[Tensor]) -> dict[str, Tensor]:
        by_size = dict(zip(self.sizes, xs, strict=True))
        return {name: layer(by_size[layer.in_features]) for name, layer in self.layers.items()}


def reference(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's formulas on dequantised operands in float32."""
    activation = layer.weight.spec.scheme.activation
    rows = x.reshape(-1, x.shape[-1])
    values = numerics.dequantize(numerics.quantize(rows, activation), activation, torch.float32).reshape(x.shape)
    return F.linear(values, layer.weight.dequantize(torch.float32), None if layer.bias is None else layer.bias.float())


def check(model: AllSizes, got: dict[str, Tensor], xs: list[Tensor], limit: float) -> None:
    by_size = dict(zip(model.sizes, xs, strict=True))
    for name, layer in model.layers.items():
        x, y = by_size[layer.in_features], got[name]
        expected = reference(layer, x)
        assert y.shape == expected.shape, name
        assert y.dtype == x.dtype, name
        # where a sum cancels, rounding is relative to the terms, not to the sum
        scale = (x.float().norm() * layer.weight.dequantize(torch.float32).norm() / max(layer.out_features, 1) ** 0.5).item()
        error = (y.float() - expected).norm().item()
        assert error <= limit * max(expected.norm().item(), scale), (name, error, expected.norm().item())


LEADING = [(0,), (1,), (2,), (17,), (), (2, 3), (2, 0, 3), (2, 1, 2)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_eager(scheme, dtype):
    model = AllSizes(dtype)
    fxquant.quantize_(model, scheme)
    for leading in LEADING:
        xs = [torch.randn(*leading, k).to(dtype) for k in SIZES]
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                check(model, model(xs), xs, LIMITS[dtype])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_eager_non_contiguous(scheme):
    model = AllSizes(torch.float32)
    fxquant.quantize_(model, scheme)
    for shape in [(5, 3), (2, 4, 3), (3, 2, 2, 2)]:
        swapped = [torch.randn(shape[0], k, *shape[1:]).transpose(1, -1) for k in SIZES]
        check(model, model(swapped), swapped, LIMITS[torch.float32])
        permuted = [torch.randn(*shape, k).transpose(0, 1) for k in SIZES]
        check(model, model(permuted), permuted, LIMITS[torch.float32])
        xs = [torch.randn(*shape, 2 * k)[..., ::2] for k in SIZES]
        check(model, model(xs), xs, LIMITS[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype", "leading"),
    [
        ("fp8_per_channel", torch.bfloat16, (0,)),
        ("fp8_per_channel", torch.float32, (17,)),
        ("fp8_per_tensor", torch.float16, (2, 3)),
        ("fp8_per_tensor", torch.bfloat16, ()),
        ("fp8_per_block", torch.bfloat16, (2,)),
        ("fp8_per_block", torch.float32, (2, 1, 2)),
    ],
)
def test_compiled(scheme, dtype, leading):
    model = AllSizes(dtype, (1, 7, 60, 128, 192))
    fxquant.quantize_(model, scheme)
    xs = [torch.randn(*leading, k).to(dtype) for k in model.sizes]
    with torch.no_grad():
        check(model, fxquant.compile(model, fullgraph=True)(xs), xs, LIMITS[dtype])


class TwoLayers(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.fixture(params=["eager", "compiled"])
def call(request):
    """A model as it is, or compiled."""
    return (lambda model: model) if request.param == "eager" else fxquant.compile


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_give_the_bias(scheme, call):
    model = TwoLayers()
    nn.init.zeros_(model.first.bias)
    fxquant.quantize_(model, scheme)
    with torch.no_grad():
        assert torch.equal(call(model)(torch.zeros(3, 128)), model.second.bias.expand(3, 128))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_that_is_not_finite_spoils_its_row_alone(scheme, bad, call):
    model = TwoLayers()
    fxquant.quantize_(model, scheme)
    x = torch.randn(5, 128)
    with torch.no_grad():
        run = call(model)
        clean = run(x)
        x[2, 77] = bad
        spoilt = run(x)
    assert not spoilt[2].isfinite().any()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(spoilt[others], clean[others])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-30, 1e-7, 1.0, 1e4, 1e30])
def test_magnitudes(scheme, magnitude, call):
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    fxquant.quantize_(model, scheme)
    x = torch.randn(4, 128) * magnitude
    with torch.no_grad():
        got = call(model)(x)
        expected = reference(model[0], x)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outliers_and_sparse_weights(scheme, call, relative_error):
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(128, 128) > 0.999)
    exact = model[0].weight.detach().clone()
    fxquant.quantize_(model, scheme)
    x = torch.randn(4, 128)
    x[1, 5] = 1e4
    with torch.no_grad():
        got = call(model)(x)
    assert got.isfinite().all()
    assert relative_error(got, F.linear(x, exact)) < 0.08


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_with_inputs_that_are_not_row_major(scheme, relative_error):
    model = nn.Sequential(nn.Linear(60, 40))
    fxquant.quantize_(model, scheme)
    compiled = fxquant.compile(model)
    with torch.no_grad():
        for x in (torch.randn(60, 9).t(), torch.randn(9, 120)[:, ::2], torch.randn(300).as_strided((9, 60), (7, 1))):
            assert relative_error(compiled(x), reference(model[0], x)) < 1e-5
