"""INT8 with a float32 scale a row: per channel (weights) or per token (activations).

Formula: scale = max(amax / 127, T), q = round(clamp(x / scale, -127, 127)), to nearest even; w ~= q * scale. -128 is not used,
so that the grid is symmetric. A row that is not finite has a scale that is not, and so dequantises to no finite value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from .blocks import block_amax, spread
from .fp8 import SMALLEST_SCALE

INT8_MAX = 127


def amax(x: Tensor, format: Format) -> Tensor:
    """Magnitude of each row of ``x``, float32, (..., rows, 1)."""
    return block_amax(x.float(), format.block)


def quantize(x: Tensor, format: Format, magnitude: Tensor) -> list[Tensor]:
    """[qdata, scale] of ``x`` for magnitudes ``magnitude`` (from ``amax``)."""
    # float64 for the reason given in fp8.scale_of: a quotient by 127 is no nearer to a tie than 1/254 of a unit.
    scale = (magnitude.double() / INT8_MAX).float().clamp(min=SMALLEST_SCALE)
    scaled = x.float() / spread(scale, format.block, x.shape)
    return [scaled.clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).round().to(torch.int8), scale]


def dequantize(components: list[Tensor], format: Format) -> Tensor:
    """The float32 values that [qdata, scale] stand for."""
    qdata, scale = components
    values = qdata.float()
    return values * spread(scale, format.block, values.shape)
