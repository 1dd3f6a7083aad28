"""Reference numerics in plain torch, one file a family of formats, and the dispatch from a format to its family.

A tensor in a format is a list of components, [qdata, scale] (and a second scale where the format has one). Conversion is
amax -> scale -> cast with a seam after amax: tensor and expert parallel reduce the magnitudes over ranks there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..formats import FORMATS, Format
from . import fp8

_FAMILIES: dict[tuple[str, torch.dtype], ModuleType] = {("e4m3", torch.float32): fp8}


def has_numerics(format: Format) -> bool:
    """Whether fxquant can compute this format."""
    return (format.element, format.scale_dtype) in _FAMILIES


def _family(format: Format) -> ModuleType:
    if not has_numerics(format):
        able = ", ".join(name for name, known in FORMATS.items() if has_numerics(known))
        raise UnsupportedError(f"this version of fxquant has no numerics for {format.name}; it has: {able}")
    return _FAMILIES[format.element, format.scale_dtype]


def quantize(x: Tensor, format: Format, reduce_amax: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Quantise matrices along their last dimension.

    Args:
        x: (..., rows, columns), float16, bfloat16 or float32; activations in a format of one-row blocks may be (..., columns).
        format: the target format.
        reduce_amax: applied to the block magnitudes before the scales are made, e.g. a MAX all-reduce over ranks.

    Returns:
        The format's components, e.g. [qdata (..., rows, columns), scale].
    """
    magnitude = _family(format).amax(x, format)
    if reduce_amax is not None:
        magnitude = reduce_amax(magnitude)
    components: list[Tensor] = _family(format).quantize(x, format, magnitude)
    return components


def dequantize(components: list[Tensor], format: Format, dtype: torch.dtype) -> Tensor:
    """The values that ``components`` stand for, computed in float32 and rounded once to ``dtype``."""
    values: Tensor = _family(format).dequantize(components, format)
    return values.to(dtype)
