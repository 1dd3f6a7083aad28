"""The 4-bit float e2m1 (codes 0 to 7: 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8 more is the sign) and nibbles, two to a byte.

Both directions are sums of comparisons and ramps: plain element-wise arithmetic that fuses and vectorises, no table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1_MAX = 6.0


def encode(x: Tensor) -> Tensor:
    """Codes (uint8, shape of ``x``) of float32 values, to nearest even, saturating at 6; NaN has code 0 or 8."""
    magnitude = x.abs()
    # Between codes c and c + 1 the midpoint goes to the even one: up where c is odd.
    code = (magnitude > 0.25).to(torch.uint8)
    for midpoint in (1.25, 2.5, 5.0):
        code = code + (magnitude > midpoint)
    for midpoint in (0.75, 1.75, 3.5):
        code = code + (magnitude >= midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Float32 values of codes."""
    magnitude = (codes & 7).float()
    doubled = magnitude + (magnitude - 4).clamp(min=0) + 2 * (magnitude - 6).clamp(min=0)
    return (0.5 - (codes >> 3).float()) * doubled


def pack(codes: Tensor) -> Tensor:
    """(..., columns) nibbles as (..., ceil(columns / 2)) bytes: the even column low, zero where there is no odd one."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(qdata: Tensor) -> Tensor:
    """The inverse of ``pack``: (..., bytes) as (..., 2 * bytes) nibbles."""
    return torch.stack((qdata & 0xF, qdata >> 4), -1).flatten(-2)
