"""FP8 bytes and scales against a scalar reference in exact rational arithmetic, and properties that hold for any input.

The reference knows nothing of torch: e4m3fn values are built from their bits, and every FP32 step of the formula is an exact
fraction that is rounded once, to nearest even.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fxquant.kernels.formats import FORMATS
from fxquant.kernels.numerics import dequantize, fp8, quantize

WEIGHTS = ["fp8_per_tensor_static", "fp8_per_channel_static", "fp8_per_block_static"]
ACTIVATIONS = ["fp8_per_tensor_dynamic", "fp8_per_token", "fp8_per_block_dynamic"]
BY_ROW = ["fp8_per_token", "fp8_per_block_dynamic"]
BLOCKS = {
    "tensor": (None, None),
    "channel": (1, None),
    "token": (1, None),
    "block_static": (128, 128),
    "block_dynamic": (1, 128),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# -- the scalar reference -------------------------------------------------------------------------------------------------

T = Fraction(2) ** -126


def rounded(value: Fraction, precision: int, smallest: int) -> Fraction:
    """The nearest number with ``precision`` significant bits and no bit below 2**smallest, ties to even."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - precision + 1, smallest)
    return round(value / quantum) * quantum


def float32(value: Fraction) -> Fraction:
    return rounded(value, 24, -149)


def e4m3_value(byte: int) -> Fraction:
    """The magnitude of the e4m3fn number with these low seven bits: 4 exponent bits with bias 7, 3 mantissa bits."""
    exponent, mantissa = byte >> 3, byte & 7
    return (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )


BYTES = {e4m3_value(byte): byte for byte in range(0x7F)}  # 0x7F is NaN
SORTED = sorted(BYTES)


def e4m3_byte(value: Fraction, negative: bool) -> int:
    magnitude = rounded(min(abs(value), Fraction(448)), 4, -9)
    return BYTES[magnitude] | (0x80 if negative else 0)


def block_slices(name: str, rows: int, columns: int):
    height, width = next(block for key, block in BLOCKS.items() if key in name)
    height, width = height or max(rows, 1), width or max(columns, 1)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, left + width)


def reference(matrix: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of a finite float32 matrix, the scale of each element's block, and the dequantised values (float32)."""
    codes = np.zeros(matrix.shape, np.uint8)
    scales, values = np.zeros(matrix.shape, np.float32), np.zeros(matrix.shape, np.float32)
    for block in block_slices(name, *matrix.shape):
        elements = [[Fraction(float(v)) for v in row] for row in matrix[block]]
        amax = max(abs(v) for row in elements for v in row)
        scale = max(float32(amax / 448), T)
        scales[block] = float(scale)
        for codes_row, values_row, row, signs in zip(
            codes[block], values[block], elements, np.signbit(matrix[block]), strict=True
        ):
            for j, value in enumerate(row):
                code = e4m3_byte(float32(value / scale), bool(signs[j]))
                codes_row[j] = code
                values_row[j] = float(float32(e4m3_value(code & 0x7F) * scale)) * (-1.0 if code & 0x80 else 1.0)
    return codes, scales, values


def assert_equals_reference(x: torch.Tensor, name: str) -> None:
    format = FORMATS[name]
    codes, scales, values = reference(x.float().numpy(), name)
    matrix = x.reshape(1, -1) if name == "fp8_per_tensor_dynamic" and x.dim() != 2 else x
    qdata, scale = quantize(matrix, format)
    assert qdata.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert tuple(scale.shape) == format.scale_shape(*x.shape)
    assert np.array_equal(qdata.view(torch.uint8).numpy(), codes)
    for block in block_slices(name, *x.shape):
        row, column = block[0].start // format.block_shape(*x.shape)[0], block[1].start // format.block_shape(*x.shape)[1]
        got = scale if scale.dim() == 0 else scale[row, column]
        assert got.item() == scales[block].flat[0]
    assert np.array_equal(dequantize([qdata, scale], format, torch.float32).numpy(), values)


def test_the_reference_decodes_every_byte_as_torch_does():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert [byte for byte in range(256) if values[byte].isnan()] == [0x7F, 0xFF]
    for byte in set(range(256)) - {0x7F, 0xFF}:
        assert abs(values[byte].item()) == e4m3_value(byte & 0x7F)
        assert bool(values[byte].signbit()) == (byte >= 0x80)


def test_the_reference_rounds_to_nearest_even():
    assert rounded(Fraction(2**24 + 1), 24, -149) == 2**24
    assert rounded(Fraction(2**24 + 3), 24, -149) == 2**24 + 4
    assert rounded(Fraction(-3, 2**150), 24, -149) == Fraction(-2, 2**149)
    assert rounded(Fraction(1, 3), 24, -149) == Fraction(float(np.float32(1) / np.float32(3)))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# -- bytes and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128), (2, 300), (130, 17)], ids=str)
def test_random_values(name, shape, dtype):
    assert_equals_reference(torch.randn(shape).to(dtype), name)


def test_partial_edge_blocks_have_their_own_scale():
    x = torch.randn(130, 140) * torch.logspace(-6, 6, 140)
    assert_equals_reference(x, "fp8_per_block_static")
    assert_equals_reference(x[:9], "fp8_per_block_dynamic")


@pytest.mark.parametrize("power", [-100, -3, 0, 5, 100])
@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
def test_ties_and_their_neighbours(name, power):
    """Midpoints between e4m3 numbers, the floats next to each, and the numbers themselves, under a scale of 2**power."""
    middles = torch.tensor([float((a + b) / 2) for a, b in pairwise(SORTED)])
    numbers = torch.tensor([float(value) for value in SORTED])
    infinity = torch.full_like(middles, math.inf)
    values = torch.cat([middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity), numbers, -middles])
    values = torch.cat([values, values.new_full((-len(values) % 127,), 1.0)]).reshape(-1, 127)
    x = torch.cat([torch.full((len(values), 1), 448.0), values], 1) * 2.0**power  # 448 fixes the scale of every block
    assert_equals_reference(x, name)
    assert_equals_reference(-x, name)


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
def test_magnitudes_at_powers_of_two(name):
    """amax at, just below and just above powers of two and 448 times them, where scales change their exponent."""
    base = torch.tensor([2.0**power for power in (-140, -126, -118, -117, -10, 0, 8, 120)] + [448.0, 448 * 2.0**-120])
    amax = torch.cat([base, torch.nextafter(base, base * 2), torch.nextafter(base, base * 0)])
    x = amax[:, None] * torch.tensor([1.0, -0.3, 0.999, 2**-9, 0.0, 0.5])
    assert_equals_reference(x, name)
    for row in x.split(1):
        assert_equals_reference(row, name)


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-42, 1.2e-38, 6e-38, 5e-36, 1e30, 3e38, torch.finfo(torch.float32).max])
def test_tiny_and_huge_values(name, magnitude):
    x = torch.cat([torch.randn(3, 140).clamp(-1, 1), torch.ones(1, 140), torch.zeros(1, 140)]) * torch.tensor(magnitude)
    assert_equals_reference(x, name)
    qdata, scale = quantize(x, FORMATS[name])
    assert dequantize([qdata, scale], FORMATS[name], torch.float32).isfinite().all()


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
def test_small_halves(name):
    """fp16 around 1e-7: the scale is float32, so it does not underflow."""
    x = (torch.randn(4, 140) * 1e-7).half()
    assert x.any()
    assert_equals_reference(x, name)
    values = dequantize(quantize(x, FORMATS[name]), FORMATS[name], torch.float32)
    assert (values - x.float()).abs().max() <= x.float().abs().max() / 16


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
def test_zero_blocks_give_zeros(name):
    x = torch.randn(140, 260)
    x[3], x[:, :128], x[128:] = 0, 0, 0
    assert_equals_reference(x[126:], name)
    for zeros in (torch.zeros(2, 5), x):
        values = dequantize(quantize(zeros, FORMATS[name]), FORMATS[name], torch.float32)
        assert values.isfinite().all()
        assert not values[zeros == 0].any()


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
def test_negative_zero_keeps_its_sign(name):
    assert_equals_reference(torch.tensor([[-0.0, 0.0, 448.0, -1e-9]]), name)


def test_overflowing_values_saturate():
    """Torch 2.11 casts them to NaN, 2.13 to 448: the clamp in front makes both write 0x7E."""
    x = torch.cat([torch.tensor([448.0, 449.0, 463.9, 464.0, 480.0, 1e9, 3e38]), torch.linspace(449, 1e9, 200)])
    x = torch.cat([x, -x])
    codes = fp8.cast(x[None], torch.ones(1, 1), FORMATS["fp8_per_token"]).view(torch.uint8)
    assert set(codes[x[None] > 0].tolist()) == {0x7E}
    assert set(codes[x[None] < 0].tolist()) == {0xFE}


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (0, 0), (200, 0), (0, 200)])
def test_empty_matrices(name, rows, columns):
    qdata, scale = quantize(torch.zeros(rows, columns), FORMATS[name])
    assert qdata.shape == (rows, columns)
    assert tuple(scale.shape) == FORMATS[name].scale_shape(rows, columns)
    assert scale.isfinite().all()
    assert dequantize([qdata, scale], FORMATS[name], torch.bfloat16).shape == (rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantising_rounds_once(dtype):
    x = torch.randn(9, 70)
    components = quantize(x, FORMATS["fp8_per_channel_static"])
    values = dequantize(components, FORMATS["fp8_per_channel_static"], dtype)
    assert values.dtype == dtype
    assert torch.equal(values, torch.from_numpy(reference(x.numpy(), "fp8_per_channel_static")[2]).to(dtype))


def test_tensor_parallel_shards_agree_with_the_whole():
    """The seam after amax: a MAX over shards gives every shard the bytes it has in the whole matrix."""
    w = torch.randn(48, 64)
    whole, scale = quantize(w, FORMATS["fp8_per_tensor_static"])
    for shard, expected in zip(w.chunk(4), whole.chunk(4), strict=True):
        codes, shard_scale = quantize(shard, FORMATS["fp8_per_tensor_static"], lambda amax: torch.maximum(amax, w.abs().max()))
        assert same_bytes(codes, expected)
        assert torch.equal(shard_scale, scale)


# -- values that are not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_bad_token_spoils_its_own_row_only(name, bad):
    x = torch.randn(5, 300)
    clean = quantize(x, FORMATS[name])
    x[2, 170] = bad
    qdata, scale = quantize(x, FORMATS[name])
    values = dequantize([qdata, scale], FORMATS[name], torch.float32)
    block = slice(None) if name == "fp8_per_token" else slice(128, 256)
    assert not values[2, block].isfinite().any()
    for row in (0, 1, 3, 4):
        assert same_bytes(qdata[row], clean[0][row])
        assert torch.equal(scale[row], clean[1][row])


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_never_becomes_a_finite_one(name, bad):
    x = torch.randn(130, 140)
    x[1, 2] = bad
    qdata, scale = quantize(x, FORMATS[name])
    assert not dequantize([qdata, scale], FORMATS[name], torch.float32)[1, :128].isfinite().any()
    assert not scale.isfinite().all()


# -- shapes and batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_ROW)
def test_leading_dimensions_do_not_matter(name):
    x = torch.randn(2, 3, 4, 200)
    rows = quantize(x.view(-1, 200), FORMATS[name])
    for shaped in (x, x.view(6, 4, 200), x.transpose(0, 1).contiguous().transpose(0, 1)):
        for got, expected in zip(quantize(shaped, FORMATS[name]), rows, strict=True):
            assert got.shape[:-1] == shaped.shape[:-1]
            assert same_bytes(got, expected)
    for got, expected in zip(quantize(x[1, 2, 3], FORMATS[name]), rows, strict=True):
        assert same_bytes(got, expected[-1])


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_stack_of_matrices_is_quantised_one_by_one(name):
    x = torch.randn(3, 130, 140) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
    qdata, scale = quantize(x, FORMATS[name])
    for index in range(3):
        one, one_scale = quantize(x[index], FORMATS[name])
        assert same_bytes(qdata[index], one)
        assert torch.equal(scale[index], one_scale)


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_in_any_batch(name, dtype):
    x = (torch.randn(67, 200) * torch.logspace(-3, 3, 67)[:, None]).to(dtype)
    qdata, scale = quantize(x, FORMATS[name])
    for rows in ([5], [5, 66], [66, 5, 0, 13], list(range(1, 66))):
        part, part_scale = quantize(x[rows], FORMATS[name])
        assert same_bytes(part, qdata[rows])
        assert torch.equal(part_scale, scale[rows])


# -- compiled -------------------------------------------------------------------------------------------------------------


def test_compiled_bytes_equal_eager_ones():
    """Every format under Inductor, alone (no producer in front), for ordinary and extreme inputs of every dtype."""

    def every_format(x):
        return [part for name in WEIGHTS + ACTIVATIONS for part in quantize(x, FORMATS[name])]

    x = torch.randn(140, 260)
    x[:100] *= torch.logspace(-44, 37, 100)[:, None]
    x[100], x[101, :128], x[102, 3], x[103] = 0, 0, 1e4, 1e-45
    compiled = torch.compile(every_format, dynamic=False)
    for dtype in DTYPES:
        values = x.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        for got, expected in zip(compiled(values), every_format(values), strict=True):
            assert same_bytes(got, expected)
    values[3, 5], values[7, 200] = math.nan, math.inf
    for got, expected in zip(compiled(values), every_format(values), strict=True):  # NaN may carry either sign
        assert torch.equal(got.float().nan_to_num(nan=1.25), expected.float().nan_to_num(nan=1.25))


@pytest.mark.parametrize("shape", [(3, 130), (130, 7), (2, 192), (1, 15), (129, 257)], ids=str)
def test_compiled_values_equal_eager_ones_for_partial_blocks(shape):
    def every_format(x):
        return [dequantize(quantize(x, FORMATS[name]), FORMATS[name], torch.float32) for name in WEIGHTS + ACTIVATIONS]

    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    for got, expected in zip(torch.compile(every_format, dynamic=False)(x), every_format(x), strict=True):
        assert torch.equal(got, expected)


# -- any input ------------------------------------------------------------------------------------------------------------

finite_matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 128, 131])),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    fill=st.sampled_from([np.float32(0), np.float32(1), np.float32(-3e-39)]),
)


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@settings(max_examples=100, deadline=None)
@given(matrix=finite_matrices)
def test_any_finite_matrix_has_the_bytes_of_the_reference(name, matrix):
    assert_equals_reference(torch.from_numpy(matrix), name)


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices)
def test_the_error_is_bounded(name, matrix):
    """Half a step: 2**-4 of the value, or half of the smallest step of the block; in float64, as the product may be rounded."""
    x = torch.from_numpy(matrix)
    qdata, scale = quantize(x, FORMATS[name])
    values = dequantize([qdata, scale], FORMATS[name], torch.float32).double()
    steps = fp8.spread(scale, FORMATS[name].block, x.shape).double() * 2.0**-10
    bound = torch.maximum(x.double().abs() * 2.0**-4, steps) * (1 + 2.0**-20) + 2.0**-149
    assert ((values - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices)
def test_quantising_again_changes_nothing(name, matrix):
    format = FORMATS[name]
    qdata, scale = quantize(torch.from_numpy(matrix), format)
    values = dequantize([qdata, scale], format, torch.float32)
    again, scale_again = quantize(values, format)
    assert same_bytes(again, qdata)
    assert torch.allclose(scale_again, scale, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", WEIGHTS + ACTIVATIONS)
@settings(max_examples=100, deadline=None)
@given(matrix=finite_matrices, power=st.integers(-60, 60))
def test_powers_of_two_move_to_the_scale(name, matrix, power):
    """Scaling a matrix by a power of two changes no byte where nothing under- or overflows."""
    x = torch.from_numpy(matrix)
    ordinary = torch.where((x.abs() > 1e-15) & (x.abs() < 1e15), x, 0)
    qdata, scale = quantize(ordinary, FORMATS[name])
    moved, moved_scale = quantize(ordinary * 2.0**power, FORMATS[name])
    assert same_bytes(moved, qdata)
    zero_block = scale <= float(T)
    assert torch.equal(moved_scale[~zero_block], scale[~zero_block] * 2.0**power)
