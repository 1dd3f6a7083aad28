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

QDATA_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int8": torch.int8, "uint4": torch.uint8}
"""Storage dtype of each element type; e2m1 and uint4 are packed two to a byte, low nibble first."""

PACKED = frozenset({"e2m1", "uint4"})
INTEGERS = frozenset({"int8", "uint4"})


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix of shape (rows, columns) is stored; the columns are the contraction dimension.

    Args:
        name: the format's name in the grammar, e.g. ``fp8_per_channel_static``.
        element: ``e4m3``, ``int8``, ``e2m1`` or ``uint4`` (the last two packed two to a byte).
        scale_dtype: dtype of the stored block scale: float32, uint8 (the e8m0 exponent byte) or float8_e4m3fn.
        block: (rows, columns) that share one scale; ``WHOLE`` (-1) stands for the whole dimension.
        weight: weights can be converted to it (scales computed once, static).
        activation: may hold activations (scales computed in every forward, dynamic).
        second_scale: whether a float32 scale of the whole matrix stands above the block scales (nvfp4). Of activations each
            row is a matrix by itself.
        zero_point: whether every block has a zero point (uint8) too.
        reordered: whether the block of a column is looked up in a list, not its position (gptq's act-order).
    """

    name: str
    element: str
    scale_dtype: torch.dtype
    block: tuple[int, int]
    weight: bool = False
    activation: bool = False
    second_scale: bool = False
    zero_point: bool = False
    reordered: bool = False

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte: the even column has the low nibble."""
        return self.element in PACKED

    @property
    def qdata_dtype(self) -> torch.dtype:
        return QDATA_DTYPES[self.element]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the stored tensors, in the order in which every function takes and returns them."""
        optional = {"global_scale": self.second_scale, "zero_point": self.zero_point, "group_index": self.reordered}
        return ("qdata", "scale", *(name for name, held in optional.items() if held))

    def stored_columns(self, columns: int) -> int:
        """Columns of qdata for a matrix of this many columns."""
        return ceil(columns / 2) if self.packed else columns

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
        data = rows * self.stored_columns(columns) * self.qdata_dtype.itemsize
        blocks = prod(self.scale_shape(rows, columns))
        per_block = self.scale_dtype.itemsize + (1 if self.zero_point else 0)
        return data + blocks * per_block + (4 if self.second_scale else 0) + (4 * columns if self.reordered else 0)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one layer computes.

    Args:
        weight: the weight's format.
        activation: the activation's; None is weight-only: activations stay as they are.
        scale_search: how block scales are found where the weight is converted: ``amax``, or ``mse`` (4-bit formats only).
    """

    weight: Format
    activation: Format | None = None
    scale_search: str = "amax"

    @property
    def defined(self) -> bool:
        """Whether the product is: floats are multiplied with floats and integers with integers."""
        activation = self.activation
        return activation is None or (self.weight.element in INTEGERS) == (activation.element in INTEGERS)

    @property
    def has_joint_activation_scale(self) -> bool:
        """Whether one scale serves all tokens."""
        return self.activation is not None and self.activation.block == (WHOLE, WHOLE)

    def __str__(self) -> str:
        search = "" if self.scale_search == "amax" else f" ({self.scale_search})"
        return f"{self.weight.name}{search} x {self.activation.name if self.activation else 'none'}"


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


def _int4(group: int, *, reordered: bool = False) -> Format:
    size = "channel" if group == WHOLE else f"group{group}"
    return Format(
        name=f"int4_{size}{'_reordered' if reordered else ''}",
        element="uint4",
        scale_dtype=torch.float32,
        block=(1, group),
        zero_point=True,
        reordered=reordered,
    )


STORED_FORMATS: dict[str, Format] = {
    format.name: format
    for group in (16, 32, 64, 128, 256, 512, 1024, WHOLE)
    for format in (_int4(group), _int4(group, reordered=True))
}
"""Weight formats that only checkpoints come in: unsigned 4-bit integers with a scale and a zero point for each group."""

SCALE_SEARCHES = ("amax", "mse")

WEIGHT_FORMATS = tuple(name for name, format in FORMATS.items() if format.weight)
ACTIVATION_FORMATS = tuple(name for name, format in FORMATS.items() if format.activation)


def weight_format_named(name: str) -> Format:
    """The weight format of this name, one of a checkpoint included.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    return STORED_FORMATS[name] if name in STORED_FORMATS else _named(name, "weight", WEIGHT_FORMATS)


def activation_format_named(name: str) -> Format:
    """The activation format of this name.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    return _named(name, "activation", ACTIVATION_FORMATS)


def defined_activations(weight: Format) -> tuple[str, ...]:
    """Names of the activation formats whose product with ``weight`` is defined."""
    return tuple(name for name in ACTIVATION_FORMATS if Scheme(weight=weight, activation=FORMATS[name]).defined)


def _named(name: str, role: str, accepted: tuple[str, ...]) -> Format:
    if name not in accepted:
        found = "is not one" if name in FORMATS else "does not exist"
        raise UnsupportedError(f"the {role} format {name!r} {found}; use one of: {', '.join(accepted)}")
    return FORMATS[name]
