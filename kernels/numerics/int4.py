"""INT4 by groups, as gptq, awq and pack-quantized checkpoints hold it: w = (q - zero) * scale. Read only.

q is unsigned, packed two to a byte along the columns; scale (float32) and zero point (uint8, up to 16) belong to a group of
columns in a row. With act-order the group of column k is ``group_index[k]``; else it is k // group.
"""

from __future__ import annotations

from torch import Tensor

from ..formats import Format
from . import e2m1
from .blocks import spread


def dequantize(components: list[Tensor], format: Format) -> Tensor:
    """The float32 values that [qdata, scale, zero_point] (and group_index) stand for; an even number of columns."""
    qdata, scale, zero_point, *group_index = components
    quantized = e2m1.unpack(qdata).float()
    zero = zero_point.float()
    if not group_index:
        return (quantized - spread(zero, format.block, quantized.shape)) * spread(scale, format.block, quantized.shape)
    groups = group_index[0].unsqueeze(-2)
    quantized = quantized[..., : groups.shape[-1]]
    groups = groups.long().expand(quantized.shape)
    return (quantized - zero.gather(-1, groups)) * scale.gather(-1, groups)
