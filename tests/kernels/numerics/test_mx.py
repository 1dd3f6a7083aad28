"""mxfp8 and mxfp4 bytes against a scalar reference, and what the search for the least error may and may not do.

The reference works on Python floats, which hold every float32, every power of two in question and their quotients exactly:
exponents come from ``frexp``, codes from a search in the table of all magnitudes. No bit of a float32 is looked at.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fxquant.kernels.formats import FORMATS
from fxquant.kernels.numerics import dequantize, mx, quantize

NAMES = ["mxfp8", "mxfp4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = torch.finfo(torch.float32).max

# -- the scalar reference -------------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [math.ldexp(byte & 7, -9) if byte < 8 else math.ldexp(8 + (byte & 7), (byte >> 3) - 10) for byte in range(0x7F)]
TABLE = {"mxfp8": E4M3, "mxfp4": E2M1}
SIGN = {"mxfp8": 0x80, "mxfp4": 8}


def nearest(table: list[float], value: float) -> int:
    """Place of the entry nearest to a magnitude, the even one of two as near; the last beyond the end."""
    above = min(bisect_left(table, value), len(table) - 1)
    return min((max(above - 1, 0), above), key=lambda place: (abs(table[place] - value), place % 2))


def exponent_of(name: str, amax: float) -> int:
    mantissa, exponent = math.frexp(amax)  # in [0.5, 1): 448 is 0.875 * 2**9, and 1.75 is 0.875 * 2
    wanted = {
        "mxfp8": exponent - 9 + (mantissa > 0.875),  # the least power of two that amax / 448 does not exceed
        "mxfp4": exponent - 1 + (mantissa >= 0.875) - 2,
    }
    return min(max(wanted[name], -127), 127) if amax else -127


def reference(matrix: np.ndarray, name: str) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Stored bytes, scale bytes and dequantised values (float32) of a finite float32 matrix."""
    table, sign = TABLE[name], SIGN[name]
    stored, scales, values = [], [], np.zeros(matrix.shape, np.float32)
    for i, row in enumerate(matrix.tolist()):
        codes, scale_row = [], []
        for start in range(0, len(row), 32):
            exponent = exponent_of(name, max(abs(value) for value in row[start : start + 32]))
            scale_row.append(exponent + 127)
            for value in row[start : start + 32]:
                place = nearest(table, abs(float(np.float32(math.ldexp(value, -exponent)))))
                with np.errstate(over="ignore"):
                    values[i, len(codes)] = math.copysign(np.float32(math.ldexp(table[place], exponent)), value)
                codes.append(place | (sign if math.copysign(1, value) < 0 else 0))
        if name == "mxfp4":
            codes = [low | high << 4 for low, high in zip(codes[::2], [*codes, 0][1::2], strict=True)]
        stored.append(codes)
        scales.append(scale_row)
    return stored, scales, values


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def assert_equals_reference(x: torch.Tensor, name: str) -> None:
    stored, scales, values = reference(x.float().numpy(), name)
    qdata, scale = quantize(x, FORMATS[name])
    assert scale.dtype == torch.uint8
    assert scale.tolist() == scales
    assert raw(qdata).tolist() == stored
    got = dequantize([qdata, scale], FORMATS[name], torch.float32, columns=x.shape[1])
    assert np.array_equal(got.numpy(), values)


def test_the_reference_decodes_e4m3_as_torch_does():
    assert torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() == E4M3


def test_blocks_worked_out_by_hand():
    """amax 7 = 1.75 * 2**2: mxfp4 goes up to 8 = 2**3, exponent 1; mxfp8 needs 7 / 448 = 2**-6 exactly."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([7.0, -3.0, 1.0, 0.5, 0.49, -6.0])
    qdata, scale = quantize(x, FORMATS["mxfp4"])  # in units of 2: 3.5 (a tie, to 4), -1.5, 0.5, 0.25 (a tie, to 0), 0, -3
    assert scale.tolist() == [[128]]
    assert qdata[0, :3].tolist() == [0x6 | 0xB << 4, 0x1 | 0x0 << 4, 0x0 | 0xD << 4]
    qdata, scale = quantize(x, FORMATS["mxfp8"])  # in units of 2**-6: 448, -192, 64, 32, 31.36 (to 32), -384
    assert scale.tolist() == [[121]]
    assert raw(qdata)[0, :6].tolist() == [0x7E, 0xF4, 0x68, 0x60, 0x60, 0xFC]


# -- bytes and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 32), (2, 100), (9, 33), (4, 96)], ids=str)
def test_random_values(name, shape, dtype):
    """K need not be a multiple of 32, nor even: the last block is short, and the padding of a pair is zero."""
    assert_equals_reference(torch.randn(shape).to(dtype), name)
    assert_equals_reference((torch.randn(shape) * torch.logspace(-4, 4, shape[1])).to(dtype), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mantissa", [1.0, 1.5, 1.75, 1.875])
def test_magnitudes_where_the_exponent_changes(name, mantissa):
    """amax at, just below and just above a mantissa, at every exponent of a float32."""
    exponents = torch.arange(-149.0, 128.0, dtype=torch.float64)
    amax = (mantissa * torch.exp2(exponents)).float()
    amax = torch.cat([amax, torch.nextafter(amax, amax * 2), torch.nextafter(amax, amax * 0)])
    x = amax[amax.isfinite(), None] * torch.tensor([1.0, -0.3, 0.999, 2**-9, 0.0, 0.5, 2**-23])
    assert_equals_reference(x, name)
    assert_equals_reference(-x, name)


@pytest.mark.parametrize("power", [-120, -3, 0, 5, 100])
@pytest.mark.parametrize("name", NAMES)
def test_ties_and_their_neighbours(name, power):
    """Midpoints between the element type's numbers, the floats next to each, and the numbers, under a scale of 2**power."""
    numbers = torch.tensor(TABLE[name])
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(TABLE[name])])
    infinity = torch.full_like(middles, math.inf)
    values = torch.cat([middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity), numbers, -middles])
    values = torch.cat([values, values.new_zeros(-len(values) % 31)]).reshape(-1, 31)
    x = torch.cat([torch.full((len(values), 1), TABLE[name][-1]), values], 1) * 2.0**power
    assert set(quantize(x, FORMATS[name])[1].flatten().tolist()) == {127 + power}
    assert_equals_reference(x, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [2.0**-149, 1e-42, 2.0**-127, 2.0**-126, 2.0**-118, 1.2e-38, 6e-38, 1e30, 3e38, LARGEST])
def test_tiny_and_huge_values(name, magnitude):
    x = torch.cat([torch.randn(3, 70).clamp(-1, 1), torch.ones(1, 70), torch.zeros(1, 70)]) * torch.tensor(magnitude)
    assert_equals_reference(x, name)


@pytest.mark.parametrize("name", NAMES)
def test_byte_zero_stands_for_a_subnormal_power_of_two(name):
    """2**-127: as a float it is subnormal, and flushed to zero it would make NaN of 0 / 0."""
    qdata, scale = quantize(torch.full((1, 32), 2.0**-127), FORMATS[name])
    assert scale.tolist() == [[0]]
    assert (dequantize([qdata, scale], FORMATS[name], torch.float32) == 2.0**-127).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_the_last_sixteenth_below_infinity_rounds_to_it(name):
    """Of the format, whose numbers go on to 448 * 2**127: 2**128 is the nearest, which no float32 can hold."""
    qdata, scale = quantize(torch.tensor([[LARGEST, 2.0**127]]), FORMATS[name])
    assert dequantize([qdata, scale], FORMATS[name], torch.float64).tolist() == [[math.inf, 2.0**127]]
    assert scale.tolist() == [[{"mxfp8": 127 + 120, "mxfp4": 127 + 126}[name]]]


@pytest.mark.parametrize("name", NAMES)
def test_small_halves(name):
    assert_equals_reference((torch.randn(4, 70) * 1e-7).half(), name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_blocks_have_byte_zero_and_give_zeros(name):
    x = torch.randn(4, 100)
    x[1], x[2, :32], x[3, 96:] = 0, 0, -0.0
    assert_equals_reference(x, name)
    qdata, scale = quantize(x, FORMATS[name])
    assert scale[1].tolist() == [0] * 4
    assert scale[2, 0] == scale[3, 3] == 0
    values = dequantize([qdata, scale], FORMATS[name], torch.float32, columns=100)
    assert values.isfinite().all()
    assert not values[x == 0].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 33), (5, 0), (0, 0)], ids=str)
def test_empty_matrices(name, shape):
    qdata, scale = quantize(torch.zeros(shape), FORMATS[name])
    assert qdata.shape == (shape[0], FORMATS[name].stored_columns(shape[1]))
    assert scale.shape == (shape[0], math.ceil(shape[1] / 32))
    assert dequantize([qdata, scale], FORMATS[name], torch.bfloat16, columns=shape[1]).shape == shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("search", ["amax", "mse"])
def test_a_block_that_is_not_finite_has_byte_255_and_spoils_no_other(name, bad, dtype, search):
    x = torch.randn(4, 100).to(dtype)
    clean_qdata, clean_scale = quantize(x, FORMATS[name], scale_search=search)
    x[2, 40] = bad
    qdata, scale = quantize(x, FORMATS[name], scale_search=search)
    assert [index.tolist() for index in (scale != clean_scale).nonzero()] == [[2, 1]]
    assert scale[2, 1] == 255
    values = dequantize([qdata, scale], FORMATS[name], torch.float32)
    assert values[2, 32:64].isnan().all()
    values[2, 32:64] = dequantize([clean_qdata, clean_scale], FORMATS[name], torch.float32)[2, 32:64]
    assert torch.equal(values, dequantize([clean_qdata, clean_scale], FORMATS[name], torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_of_every_nan_have_byte_255(name):
    """A compiled maximum gives NaN of either sign; taken for a negative integer it would be the smallest of all."""
    bits = torch.tensor([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -0x7FFFFF, -1], dtype=torch.int32)
    assert mx.scale_of(bits.view(torch.float32), FORMATS[name]).tolist() == [255] * 7


def test_every_scale_byte_stands_for_its_power_of_two():
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    ones = torch.full((256, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantize([ones, scale], FORMATS["mxfp8"], torch.float64)[:, 0].tolist()
    assert values[:255] == [math.ldexp(1, byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


finite_matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 32, 35])),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    fill=st.sampled_from([np.float32(0), np.float32(1.75), np.float32(-3e-39)]),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices, power=st.integers(-100, 100))
def test_any_finite_matrix_has_the_bytes_of_the_reference(name, matrix, power):
    assert_equals_reference(torch.from_numpy(matrix), name)
    with np.errstate(over="ignore"):
        moved = torch.from_numpy(np.ldexp(np.sign(matrix) * (np.abs(matrix) % 8), power))
    assert_equals_reference(moved, name)


# -- the search for the least error ---------------------------------------------------------------------------------------


def block_errors(x: torch.Tensor, components: list[torch.Tensor], name: str) -> torch.Tensor:
    """Exact sum of squared errors of each block of 32, float64."""
    values = dequantize(components, FORMATS[name], torch.float64, columns=x.shape[-1])
    squares = torch.nn.functional.pad((values - x.double()).square(), (0, -x.shape[-1] % 32))
    return squares.unflatten(-1, (-1, 32)).sum(-1)


@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices, power=st.integers(-100, 100))
def test_the_search_never_makes_a_block_worse(matrix, power):
    with np.errstate(over="ignore"):
        moved = np.ldexp(np.sign(matrix) * (np.abs(matrix) % 8), power)
    for values in (matrix, moved):
        x = torch.from_numpy(values)
        plain, searched = (quantize(x, FORMATS["mxfp4"], scale_search=search) for search in ("amax", "mse"))
        before, after = (block_errors(x, components, "mxfp4") for components in (plain, searched))
        finite = before.isfinite()
        assert (after[finite] <= before[finite] * (1 + 1e-5)).all()
        assert torch.equal(searched[1][before == 0], plain[1][before == 0])


def test_the_search_finds_the_best_of_three_exponents():
    x = torch.randn(64, 96) * torch.logspace(-2, 2, 64)[:, None]
    plain, searched = (quantize(x, FORMATS["mxfp4"], scale_search=search) for search in ("amax", "mse"))
    candidates = []
    for step in (0, -1, 1):
        scale = (plain[1].int() + step).to(torch.uint8)
        stored = []
        for row, scale_row in zip(x.tolist(), scale.tolist(), strict=True):
            units = [math.ldexp(value, 127 - scale_row[i // 32]) for i, value in enumerate(row)]
            codes = [nearest(E2M1, abs(unit)) | (8 if unit < 0 else 0) for unit in units]
            stored.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        candidates.append(
            ([torch.tensor(stored, dtype=torch.uint8), scale], block_errors(x, [torch.tensor(stored), scale], "mxfp4"))
        )
    errors = torch.stack([error for _, error in candidates])
    assert torch.allclose(block_errors(x, searched, "mxfp4"), errors.amin(0), rtol=1e-5)
    changed = searched[1] != plain[1]
    assert 0.05 < changed.float().mean() < 0.9
    assert (errors.amin(0)[changed] < errors[0][changed]).all()
    for stored, scale in (candidate for candidate, _ in candidates):
        same = (searched[1] == scale).repeat_interleave(16, -1)
        assert torch.equal(searched[0][same], stored[same])


@pytest.mark.parametrize("power", [-110, -72, 62, 100])
def test_the_search_works_where_the_square_of_an_error_is_no_float32(power):
    x = torch.randn(200, 64)
    ordinary, moved = (quantize(values, FORMATS["mxfp4"], scale_search="mse") for values in (x, x * 2.0**power))
    assert torch.equal(moved[0], ordinary[0])
    assert torch.equal(moved[1].int(), ordinary[1].int() + power)


def test_the_search_leaves_mxfp8_alone():
    x = torch.randn(9, 70)
    for plain, searched in zip(quantize(x, FORMATS["mxfp8"]), quantize(x, FORMATS["mxfp8"], scale_search="mse"), strict=True):
        assert torch.equal(raw(plain), raw(searched))
