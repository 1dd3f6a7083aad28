"""E2M1 codes and nibbles against a table of the eight magnitudes and a search for the nearest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxquant.kernels.numerics import e2m1

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def nearest(value: float) -> int:
    """Code of the magnitude nearest to a value's, the even one of two as near; the sign is bit 3."""
    code = min(range(8), key=lambda code: (abs(VALUES[code] - min(abs(value), 6.0)), code % 2))
    return code | (8 if math.copysign(1, value) < 0 else 0)


def encoded(values: list[float]) -> list[int]:
    return e2m1.encode(torch.tensor(values, dtype=torch.float32)).tolist()


def test_the_table_is_that_of_the_bits():
    """Two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    for code, value in enumerate(VALUES):
        exponent, mantissa = code >> 1, code & 1
        assert value == (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_code_decodes():
    values = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == VALUES + [-value for value in VALUES]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8


def test_codes_survive_decoding():
    codes = torch.tensor([*range(8), *range(9, 16)], dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)
    assert encoded([0.0, -0.0]) == [0, 8]


def test_ties_go_to_the_even_code():
    assert encoded(MIDPOINTS) == [0, 2, 2, 4, 4, 6, 6]
    assert encoded([-value for value in MIDPOINTS]) == [8, 10, 10, 12, 12, 14, 14]


def test_a_tie_s_neighbours_go_to_theirs():
    middles = torch.tensor(MIDPOINTS)
    assert e2m1.encode(torch.nextafter(middles, middles - 1)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1.encode(torch.nextafter(middles, middles + 1)).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_beyond_the_largest():
    assert encoded([6.0, 6.5, 8.0, 1e9, 3.4e38, math.inf]) == [7] * 6
    assert encoded([-6.5, -3.4e38, -math.inf]) == [15] * 3
    assert set(encoded([math.nan, -math.nan])) <= {0, 8}


@given(st.lists(st.floats(width=32, allow_nan=False) | st.floats(-7, 7, width=32), min_size=1))
def test_any_value(values):
    assert encoded(values) == [nearest(value) for value in values]


@given(st.lists(st.integers(0, 15), min_size=1, max_size=9), st.integers(1, 3))
def test_packing(codes, rows):
    """The even column is the low nibble; an odd number of columns leaves the last high nibble zero."""
    packed = e2m1.pack(torch.tensor([codes] * rows, dtype=torch.uint8))
    padded = [*codes, 0][: len(codes) + len(codes) % 2]
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[low + 16 * high for low, high in zip(padded[::2], padded[1::2], strict=True)]] * rows
    assert e2m1.unpack(packed).tolist() == [padded] * rows


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 3), (2, 3, 5)], ids=str)
def test_shapes(shape):
    packed = e2m1.pack(torch.zeros(shape, dtype=torch.uint8))
    assert packed.shape == (*shape[:-1], math.ceil(shape[-1] / 2))
    assert e2m1.unpack(packed).shape == (*shape[:-1], 2 * math.ceil(shape[-1] / 2))
