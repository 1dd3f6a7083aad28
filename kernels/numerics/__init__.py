"""Reference numerics in plain torch, one file a family of formats, and the dispatch from a format to its family.

A tensor in a format is a list of components, [qdata, scale] (and what else ``Format.components`` says). Conversion is
amax -> scale -> cast with a seam after amax: tensor and expert parallel reduce the magnitudes over ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..formats import WHOLE, Format
from . import fp8, int4, int8, mx, nvfp4

_FAMILIES: dict[tuple[str, torch.dtype], ModuleType] = {
    ("e4m3", torch.float32): fp8,
    ("e4m3", torch.uint8): mx,
    ("e2m1", torch.uint8): mx,
    ("e2m1", torch.float8_e4m3fn): nvfp4,
    ("int8", torch.float32): int8,
    ("uint4", torch.float32): int4,
}


def _family(format: Format) -> ModuleType:
    return _FAMILIES[format.element, format.scale_dtype]


def quantize(
    x: Tensor,
    format: Format,
    reduce_amax: Callable[[Tensor], Tensor] | None = None,
    *,
    scale_search: str = "amax",
    shards: Sequence[int] = (),
) -> list[Tensor]:
    """Quantise matrices along their last dimension.

    Args:
        x: (..., rows, columns), float16, bfloat16 or float32; activations in a format of one-row blocks may be (..., columns).
        format: the target format.
        reduce_amax: applied to the magnitudes before the scales are made, e.g. a MAX all-reduce over ranks: those of the
            blocks, or of the matrix where a second scale stands above the blocks.
        scale_search: ``mse`` gives each block of a 4-bit format the scale of least squared error among its neighbours.
        shards: rows of each of the matrices that x is stacked of along the rows; empty: x is one. Scales and blocks start anew
            with each shard.

    Returns:
        The format's components, e.g. [qdata (..., rows, stored columns), scale]; see ``stack_shards`` for several shards.
    """
    if len(shards) > 1:
        parts = [quantize(part, format, reduce_amax, scale_search=scale_search) for part in torch.split(x, list(shards), -2)]
        return stack_shards(parts, format)
    family = _family(format)
    magnitude = family.amax(x, format)
    if reduce_amax is not None:
        magnitude = reduce_amax(magnitude)
    searched = (scale_search,) if format.element == "e2m1" else ()
    components: list[Tensor] = family.quantize(x, format, magnitude, *searched)
    return components


def dequantize(
    components: list[Tensor], format: Format, dtype: torch.dtype, *, shards: Sequence[int] = (), columns: int | None = None
) -> Tensor:
    """The values that ``components`` stand for, computed in float32 and rounded once to ``dtype``.

    ``columns`` cuts off the padding of a packed format whose number of columns is odd.
    """
    if len(shards) > 1:
        parts = split_shards(components, format, shards)
        return torch.cat([dequantize(part, format, dtype, columns=columns) for part in parts], -2)
    values: Tensor = _family(format).dequantize(components, format)
    return values[..., :columns].to(dtype)


def _shard_dimension(format: Format, component: str) -> int | None:
    """The dimension in which a component that has no rows holds one entry a shard; None: shards are stacked by rows."""
    if component == "group_index":
        return -2
    return -1 if component == "global_scale" or (component == "scale" and format.block == (WHOLE, WHOLE)) else None


def stack_shards(parts: Sequence[Sequence[Tensor]], format: Format) -> list[Tensor]:
    """Components of several matrices as those of one stack: what has no rows in a new dimension, the rest by rows.

    Numbers of a matrix take the last dimension, (..., shards); its column order the one before, (..., shards, columns).
    """
    stacked = []
    for component, column in zip(format.components, zip(*parts, strict=True), strict=True):
        dim, dtype = _shard_dimension(format, component), column[0].dtype
        raw = [part.view(torch.uint8) if dtype.itemsize == 1 else part for part in column]  # autocast joins no 8-bit floats
        stacked.append((torch.cat(raw, -2) if dim is None else torch.stack(raw, dim)).view(dtype))
    return stacked


def split_shards(components: Sequence[Tensor], format: Format, shards: Sequence[int]) -> list[list[Tensor]]:
    """The inverse of ``stack_shards``: views of the stack's components for each shard."""
    parts: list[list[Tensor]] = [[] for _ in shards]
    for component, stacked in zip(format.components, components, strict=True):
        dim = _shard_dimension(format, component)
        if dim is not None:
            pieces: Sequence[Tensor] = stacked.unbind(dim)
        else:
            block_rows = 1 if component == "qdata" else format.block[0]
            pieces = torch.split(stacked, [-(-rows // block_rows) for rows in shards], -2)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return parts
