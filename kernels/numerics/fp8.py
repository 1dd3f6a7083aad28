"""FP8 (e4m3fn) with float32 scales: per tensor, per channel or token, per block.

Formula: scale = max(amax / 448, T), q = e4m3(clamp(x / scale, -448, 448)), w ~= q * scale, with T the smallest normal
float32. All in float32 with true divisions: no reciprocal of a small amax is formed, so none can overflow. The clamp comes
before the cast because torch 2.11 casts an overflowing value to NaN where 2.13 saturates. Rounding is to nearest even.
A zero block gets scale T and zeros; a NaN or an infinity makes its block's scale non-finite, so the block can only
dequantise to non-finite values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from .blocks import block_amax, spread

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def amax(x: Tensor, format: Format) -> Tensor:
    """Magnitude of each block of ``x``, float32, in the shape of the scale; tensor-parallel code takes the MAX over ranks."""
    return block_amax(x.float(), format.block)


def scale_of(amax: Tensor) -> Tensor:
    """Scale (float32) for blocks of these magnitudes."""
    # Inductor and CUDA multiply by the reciprocal where a divisor is constant. In float64 that rounds to the same float32: amax
    # is 24 bits and 448 = 7 * 64, so a quotient lies at least a fourteenth of a unit in the last place from a rounding tie.
    return (amax.double() / E4M3_MAX).float().clamp(min=SMALLEST_SCALE)


def cast(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """``x`` (any float dtype) as e4m3 bytes under ``scale``."""
    scaled = x.float() / spread(scale, format.block, x.shape)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize(x: Tensor, format: Format, magnitude: Tensor) -> list[Tensor]:
    """[qdata, scale] of ``x`` for block magnitudes ``magnitude`` (from ``amax``)."""
    scale = scale_of(magnitude)
    return [cast(x, scale, format), scale]


def dequantize(components: list[Tensor], format: Format) -> Tensor:
    """The float32 values that [qdata, scale] stand for."""
    qdata, scale = components
    values = qdata.float()
    return values * spread(scale, format.block, values.shape)
