"""What a quantisation format is: a value type, and the table of the formats that fxquant knows.

A format says how one matrix (rows x columns, the columns being the contraction dimension) is stored: the element type,
and the block of elements that shares a scale. Everything else - shapes of the scales, bytes, names of the parts - follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch

from .errors import UnsupportedError

WHOLE = -1
"""Block extent meaning 'the whole dimension'."""

QDATA_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int8": torch.int8}
"""Storage dtype of each element type; e2m1 is packed two to a byte, low nibble first."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix of shape (rows, columns) is stored; the columns are the contraction dimension.

    Args:
        name: the format's name in the grammar, e.g. ``fp8_per_channel_static``.
        element: ``e4m3``, ``e2m1`` (packed two to a byte) or ``int8``.
        scale_dtype: dtype of the stored block scale: float32, uint8 (the e8m0 exponent byte) or float8_e4m3fn.
        block: (rows, columns) that share one scale; ``WHOLE`` (-1) stands for the whole dimension.
        weight: may hold weights (scales computed once, static).
        activation: may hold activations (scales computed in every forward, dynamic).
        second_scale: whether a float32 scale stands above the block scales (nvfp4).
    """

    name: str
    element: str
    scale_dtype: torch.dtype
    block: tuple[int, int]
    weight: bool = False
    activation: bool = False
    second_scale: bool = False

    @property
    def qdata_dtype(self) -> torch.dtype:
        return QDATA_DTYPES[self.element]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the stored tensors, in the order in which every function takes and returns them."""
        return ("qdata", "scale", "global_scale") if self.second_scale else ("qdata", "scale")

    def block_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The block in elements, for a matrix of this size."""
        extents = zip(self.block, (rows, columns), strict=True)
        block_rows, block_columns = (size if extent == WHOLE else extent for extent, size in extents)
        return block_rows, block_columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scale of one (rows, columns) matrix: () per tensor, else one entry a block (edge blocks count)."""
        if self.block == (WHOLE, WHOLE):
            return ()
        block_rows, block_columns = self.block_shape(rows, columns)
        return (ceil(rows / max(block_rows, 1)), 1 if self.block[1] == WHOLE else ceil(columns / block_columns))

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes that one (rows, columns) matrix takes in this format, scales included."""
        packing = 2 if self.element == "e2m1" else 1
        data = rows * ceil(columns / packing) * self.qdata_dtype.itemsize
        scales = prod(self.scale_shape(rows, columns)) * self.scale_dtype.itemsize
        return data + scales + (4 if self.second_scale else 0)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one layer computes: its weight's format and its activation's (None = weight-only: activations stay as they are)."""

    weight: Format
    activation: Format | None = None

    def __str__(self) -> str:
        return f"{self.weight.name} x {self.activation.name if self.activation else 'none'}"


def _fp8(name: str, block: tuple[int, int], **role: bool) -> Format:
    return Format(name=name, element="e4m3", scale_dtype=torch.float32, block=block, **role)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        _fp8("fp8_per_tensor_static", (WHOLE, WHOLE), weight=True),
        _fp8("fp8_per_channel_static", (1, WHOLE), weight=True),
        _fp8("fp8_per_block_static", (128, 128), weight=True),
        _fp8("fp8_per_tensor_dynamic", (WHOLE, WHOLE), activation=True),
        _fp8("fp8_per_token", (1, WHOLE), activation=True),
        _fp8("fp8_per_block_dynamic", (1, 128), activation=True),
        Format(name="mxfp8", element="e4m3", scale_dtype=torch.uint8, block=(1, 32), weight=True, activation=True),
        Format(name="mxfp4", element="e2m1", scale_dtype=torch.uint8, block=(1, 32), weight=True, activation=True),
        Format(
            name="nvfp4",
            element="e2m1",
            scale_dtype=torch.float8_e4m3fn,
            block=(1, 16),
            weight=True,
            activation=True,
            second_scale=True,
        ),
        Format(name="int8_per_channel_static", element="int8", scale_dtype=torch.float32, block=(1, WHOLE), weight=True),
        Format(name="int8_per_token", element="int8", scale_dtype=torch.float32, block=(1, WHOLE), activation=True),
    )
}
"""Every format of the grammar by name."""

WEIGHT_FORMATS = tuple(name for name, format in FORMATS.items() if format.weight)
ACTIVATION_FORMATS = tuple(name for name, format in FORMATS.items() if format.activation)


def weight_format_named(name: str) -> Format:
    """The weight format of this name.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    return _named(name, "weight", WEIGHT_FORMATS)


def activation_format_named(name: str) -> Format:
    """The activation format of this name.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    return _named(name, "activation", ACTIVATION_FORMATS)


def _named(name: str, role: str, accepted: tuple[str, ...]) -> Format:
    if name not in accepted:
        found = "is not one" if name in FORMATS else "does not exist"
        raise UnsupportedError(f"the {role} format {name!r} {found}; use one of: {', '.join(accepted)}")
    return FORMATS[name]
