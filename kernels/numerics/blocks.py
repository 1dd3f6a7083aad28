"""Blocks of a matrix: the maximum of each, and one value per block spread over its elements.

Shapes: ``x`` is (..., rows, columns), or (..., columns) for blocks of one row. Partial blocks at the edges are blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import WHOLE


def _tiled(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View (..., rows, columns) as (..., row blocks, block rows, column blocks, block columns), zero-padded at the edges."""
    rows, columns = x.shape[-2:]
    padding = (-columns % block[1], -rows % block[0])
    if any(padding):
        x = F.pad(x, (0, padding[0], 0, padding[1]))
    return torch.unflatten(torch.unflatten(x, -1, (-1, block[1])), -3, (-1, block[0]))


def _row_tiled(x: Tensor, width: int) -> Tensor:
    """View (..., columns) as (..., column blocks, width), zero-padded at the edge."""
    padding = -x.shape[-1] % width
    if padding:
        x = F.pad(x, (0, padding))
    return torch.unflatten(x, -1, (-1, width))


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, NaN where the block holds one; the shape is that of the format's scale.

    A block without elements has magnitude 0. Per tensor means over the last two dimensions.
    """
    magnitude = x.abs()
    if block == (WHOLE, WHOLE):
        if 0 in x.shape[-2:]:
            return x.new_zeros(x.shape[:-2])
        return magnitude.amax((-2, -1))
    if block == (1, WHOLE):
        if x.shape[-1] == 0:
            return x.new_zeros((*x.shape[:-1], 1))
        return magnitude.amax(-1, keepdim=True)
    if block[0] == 1:
        return _row_tiled(magnitude, block[1]).amax(-1)
    return _tiled(magnitude, block).amax((-3, -1))


def sum_of_squares(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum of the squares of each block of one row, float64 (..., rows, column blocks).

    In float32 the squares of values below 1e-19 or above 1e19 would leave the range, and the order of summation would show.
    """
    return _row_tiled(x.double().square(), block[1]).sum(-1)


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Broadcastable to ``shape``: the block's value at each element."""
    if block == (WHOLE, WHOLE):
        return scale[..., None, None] if scale.dim() else scale
    if block == (1, WHOLE):
        return scale
    scale = _repeat(scale, -1, block[1], shape[-1])
    return scale if block[0] == 1 else _repeat(scale, -2, block[0], shape[-2])


def _repeat(scale: Tensor, dim: int, times: int, size: int) -> Tensor:
    """Each entry along ``dim`` repeated ``times`` (a power of two), cut to ``size``."""
    if size == scale.shape[dim] * times:
        return scale.repeat_interleave(times, dim=dim)
    # Not by repeating and slicing: Inductor for the CPU (torch 2.13) splits the loop over ``size`` at the division by ``times``
    # that this becomes, and leaves the last, partial block out. A shift is no division to it.
    blocks = torch.arange(size, device=scale.device) >> (times.bit_length() - 1)
    return scale.index_select(dim, blocks)
