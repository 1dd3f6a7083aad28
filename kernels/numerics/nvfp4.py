"""NVFP4: packed e2m1, a scale in e4m3 for each block of 16 columns, and a float32 scale for the whole matrix above them.

G = min(2688 / max(amax, T), FLT_MAX / 2) with the matrix's amax, 2688 = 6 * 448 and T the smallest normal float32; g = 1 / G.
Block scale sf = e4m3(min(amax16 / 6 / g, 448)); q = e2m1(x / (sf * g)), 0 where sf = 0; x ~= q * (sf * g). Stored is G, which
divides, as files have it. A magnitude that is not finite makes G 0 or NaN, so that the whole matrix is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import WHOLE, Format
from . import e2m1
from .blocks import block_amax, spread, sum_of_squares
from .fp8 import E4M3_MAX, SMALLEST_SCALE

_FULL_SCALE = e2m1.E2M1_MAX * E4M3_MAX
_LARGEST_GLOBAL_SCALE = torch.finfo(torch.float32).max / 2
_LARGEST_CODE = 0x7E
"""Byte of 448 in e4m3."""
_MSE_STEPS = (0, -1, 1, -2, 2, -3, 3, 4, 5)
"""In units of the e4m3 code, of which 8 make a factor of two: from clipping at 0.75 amax to amax at 4 instead of 6."""


def amax(x: Tensor, format: Format) -> Tensor:
    """Magnitude of each matrix (..., rows, columns), float32 (...); the blocks' own need no other rank."""
    return block_amax(x.float(), (WHOLE, WHOLE))


def global_scale_of(amax: Tensor) -> Tensor:
    """G (float32, shape of ``amax``) for matrices of these magnitudes."""
    # In float64, as Inductor and CUDA turn a division of a constant into a multiplication by the reciprocal.
    return (_FULL_SCALE / amax.clamp(min=SMALLEST_SCALE).double()).float().clamp(max=_LARGEST_GLOBAL_SCALE)


def scale_of(amax: Tensor, global_scale: Tensor) -> Tensor:
    """Block scales (e4m3) for blocks of magnitudes ``amax`` (..., rows, blocks) under ``global_scale`` (...)."""
    sixth = (amax.double() / e2m1.E2M1_MAX).float()
    return (sixth / _inverse(global_scale)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def _inverse(global_scale: Tensor) -> Tensor:
    """g (float32), broadcastable to the matrices' blocks."""
    return (1 / global_scale.double()).float()[..., None, None]


def _step(scale: Tensor, global_scale: Tensor, format: Format, shape: torch.Size) -> Tensor:
    """What one unit of e2m1 stands for at each element of ``shape``."""
    return spread(scale.float() * _inverse(global_scale), format.block, shape)


def cast(x: Tensor, scale: Tensor, global_scale: Tensor, format: Format) -> Tensor:
    """``x`` (any float dtype) as packed e2m1 under a block scale and a global one."""
    step = _step(scale, global_scale, format, x.shape)
    return e2m1.pack(torch.where(step == 0, 0, e2m1.encode(x.float() / step)))


def quantize(x: Tensor, format: Format, magnitude: Tensor, scale_search: str = "amax") -> list[Tensor]:
    """[qdata, scale, global_scale] of matrices ``x`` of magnitudes ``magnitude`` (from ``amax``)."""
    global_scale = global_scale_of(magnitude)
    scale = scale_of(block_amax(x.float(), format.block), global_scale)
    if scale_search == "mse":
        scale = _least_error(x, scale, global_scale, format)
    return [cast(x, scale, global_scale, format), scale, global_scale]


def _least_error(x: Tensor, scale: Tensor, global_scale: Tensor, format: Format) -> Tensor:
    """Of the e4m3 codes around ``scale``, each block's with the least squared error; the first of equals."""
    codes = scale.view(torch.uint8)
    best, least = codes, torch.full_like(codes, torch.inf, dtype=torch.float64)
    for step in _MSE_STEPS:
        candidate = torch.where(codes > _LARGEST_CODE, codes, (codes.to(torch.int16) + step).clamp(0, _LARGEST_CODE))
        candidate = candidate.to(torch.uint8)
        components = [cast(x, candidate.view(scale.dtype), global_scale, format), candidate.view(scale.dtype), global_scale]
        error = sum_of_squares(dequantize(components, format)[..., : x.shape[-1]] - x.float(), format.block)
        best = torch.where(error < least, candidate, best)
        least = torch.minimum(error, least)
    return best.view(scale.dtype)


def dequantize(components: list[Tensor], format: Format) -> Tensor:
    """The float32 values that [qdata, scale, global_scale] stand for; an even number of columns."""
    qdata, scale, global_scale = components
    values = e2m1.decode(e2m1.unpack(qdata))
    return values * _step(scale, global_scale, format, values.shape)
