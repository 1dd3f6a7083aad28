"""The MX formats (mxfp8, mxfp4): blocks of 32 along the columns share a power of two, stored as its exponent byte (e8m0).

The exponent comes from the float32 bits of the block's magnitude by integer arithmetic. mxfp8 takes the least power of two
under which nothing exceeds 448: ceil(log2(amax / 448)). mxfp4 rounds amax to a power of two, up from a mantissa of 1.75 on,
and takes its exponent less 2. Both depart from the floor of the OCP specification, which clips more. Byte = exponent + 127,
in [0, 254]; 255 stands for NaN and is what a block that is not finite gets. A zero block has byte 0 and zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from . import e2m1
from .blocks import block_amax, spread, sum_of_squares
from .fp8 import E4M3_MAX

_INFINITY = 0x7F800000
_SMALLEST = 0x00400000
"""Bits of 2^-127, the value of byte 0; it is subnormal."""
_MSE_STEPS = (0, -1, 1)


def amax(x: Tensor, format: Format) -> Tensor:
    """Magnitude of each block of ``x``, float32, in the shape of the scale."""
    return block_amax(x.float(), format.block)


def scale_of(amax: Tensor, format: Format) -> Tensor:
    """Exponent bytes (uint8) for blocks of these magnitudes (float32)."""
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # the maximum of a block with NaN may carry a sign
    # 448 = 1.75 * 2^8: the next exponent where the mantissa is beyond 1.75; mxfp4 goes up at 1.75 itself.
    byte = ((bits + 0x1FFFFF) >> 23) - 8 if format.element == "e4m3" else ((bits + 0x200000) >> 23) - 2
    return torch.where(bits >= _INFINITY, 255, byte.clamp(0, 254)).to(torch.uint8)


def value_of(scale: Tensor) -> Tensor:
    """The float32 powers of two (or NaN) that exponent bytes stand for."""
    byte = scale.to(torch.int32)
    bits = torch.where(byte == 0, _SMALLEST, byte << 23)
    return torch.where(byte == 255, _INFINITY | _SMALLEST, bits).view(torch.float32)


def cast(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """``x`` (any float dtype) as e4m3, or as packed e2m1, under exponent bytes ``scale``."""
    scaled = x.float() / spread(value_of(scale), format.block, x.shape)
    if format.element == "e4m3":
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return e2m1.pack(e2m1.encode(scaled))


def quantize(x: Tensor, format: Format, magnitude: Tensor, scale_search: str = "amax") -> list[Tensor]:
    """[qdata, scale] of ``x`` for block magnitudes ``magnitude`` (from ``amax``)."""
    scale = scale_of(magnitude, format)
    if scale_search == "mse":
        scale = _least_error(x, scale, format)
    return [cast(x, scale, format), scale]


def _least_error(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Of the exponents around ``scale``, each block's with the least squared error; the first of equals."""
    best, least = scale, torch.full_like(scale, torch.inf, dtype=torch.float64)
    for step in _MSE_STEPS:
        candidate = torch.where(scale == 255, 255, (scale.to(torch.int32) + step).clamp(0, 254)).to(torch.uint8)
        values = dequantize([cast(x, candidate, format), candidate], format)[..., : x.shape[-1]]
        error = sum_of_squares(values - x.float(), format.block)
        best = torch.where(error < least, candidate, best)
        least = torch.minimum(error, least)
    return best


def dequantize(components: list[Tensor], format: Format) -> Tensor:
    """The float32 values that [qdata, scale] stand for; an even number of columns where they are packed."""
    qdata, scale = components
    values = qdata.float() if format.element == "e4m3" else e2m1.decode(e2m1.unpack(qdata))
    return values * spread(value_of(scale), format.block, values.shape)
