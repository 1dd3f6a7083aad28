"""Quantised weights in every format, and operands as a product sees them: what tests of products and of tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.kernels.formats import (
    FORMATS,
    STORED_FORMATS,
    WEIGHT_FORMATS,
    WHOLE,
    Format,
    Scheme,
    defined_activations,
)
from fxquant.kernels.numerics import stack_shards
from fxquant.kernels.ops import dequantize_activation, quantize_activation
from fxquant.kernels.quantized_tensor import QuantizedTensor
from fxquant.kernels.weight_spec import WeightSpec

Names = tuple[str, str | None]
ALL_FORMATS = {**FORMATS, **STORED_FORMATS}
READ_ONLY_FORMATS = ("int4_group32", "int4_channel", "int4_group16_reordered")
"""Of the formats that only checkpoints come in, one of each kind."""

PAIRS: list[Names] = [
    (weight, activation)
    for weight in (*WEIGHT_FORMATS, *READ_ONLY_FORMATS)
    for activation in (*defined_activations(ALL_FORMATS[weight]), None)
]
"""Every (weight, activation) whose product is defined."""


def scheme_of(names: Names) -> Scheme:
    return Scheme(weight=ALL_FORMATS[names[0]], activation=FORMATS[names[1]] if names[1] else None)


def quantised(w: Tensor, names: Names, shards: Sequence[int] = (), **keywords: Any) -> QuantizedTensor:
    """A float weight (..., N, K) under a scheme; in a format to read only, as a checkpoint would hold it."""
    scheme = scheme_of(names)
    if scheme.weight.weight:
        return QuantizedTensor.from_float(w, scheme, shards=shards, **keywords)
    spec = WeightSpec(
        scheme=scheme,
        rows=w.shape[-2],
        columns=w.shape[-1],
        dtype=w.dtype,
        experts=w.shape[0] if w.dim() == 3 else 0,
        shards=tuple(shards),
        **keywords,
    )
    parts = [int4_components(part, scheme.weight) for part in w.float().split(list(shards) or w.shape[-2], -2)]
    return QuantizedTensor(stack_shards(parts, scheme.weight) if shards else parts[0], spec)


def int4_components(w: Tensor, format: Format) -> list[Tensor]:
    """Codes, scales and zero points that span each group's values and zero; the groups of a reordered format are shuffled."""
    rows, columns = w.shape[-2:]
    group = columns if format.block[1] == WHOLE else format.block[1]
    index = torch.arange(columns) // max(group, 1)
    if format.reordered:
        index = index[torch.randperm(columns)]
    place = index.expand(w.shape)
    empty = w.new_zeros(*w.shape[:-1], format.scale_shape(rows, columns)[1])
    low, high = empty.scatter_reduce(-1, place, w, "amin"), empty.scatter_reduce(-1, place, w, "amax")
    scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (w / scale.gather(-1, place) + zero.gather(-1, place)).round().clamp(0, 15).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, columns % 2))
    components = [codes[..., 0::2] | codes[..., 1::2] << 4, scale, zero.to(torch.uint8)]
    if not format.reordered:
        return components
    return [*components, index.to(torch.int32).expand(*w.shape[:-2], columns).contiguous()]


def activation_components(x: Tensor, activation: str | None) -> list[Tensor]:
    """What a product takes for x."""
    return [x] if activation is None else torch.ops.fxquant.quantize_activation(x, activation)


def seen_activation(x: Tensor, activation: str | None) -> Tensor:
    """The activation as the product sees it: quantised and dequantised, in float64."""
    if activation is None:
        return x.double()
    values = dequantize_activation(quantize_activation(x, activation), FORMATS[activation], torch.float32)
    return values[..., : x.shape[-1]].double()


def assert_within_roundings(y: Tensor, left: Tensor, right: Tensor, names: Names, bias: Tensor | None = None) -> None:
    """``y`` (..., M, N) is left @ right.T + bias, float64 (..., M, K) and (..., N, K), to within the roundings it may have.

    Those are the accumulation in float32 (2**-18 of the sum of magnitudes), and in the result's dtype the weight (weight-only),
    the product and the sum with the bias.
    """
    product = left @ right.mT
    expected = product if bias is None else product + bias.double()
    magnitude = left.abs() @ right.abs().mT
    finfo = torch.finfo(y.dtype)
    tolerance = magnitude * (2.0**-18 + (finfo.eps if names[1] is None else 0)) + finfo.smallest_normal * finfo.eps
    tolerance = tolerance + (product.abs() + expected.abs()) * finfo.eps
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= tolerance).all()


def same_bytes(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two lists of components have equal dtypes, shapes and bits."""
    kinds = {1: torch.uint8, 4: torch.int32}
    return all(
        a.dtype == b.dtype and torch.equal(a.view(kinds[a.itemsize]), b.view(kinds[b.itemsize]))
        for a, b in zip(first, second, strict=True)
    )
