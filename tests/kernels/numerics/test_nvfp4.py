"""nvfp4 bytes and both levels of scale against a scalar reference, and what the search for the least error may do.

The reference computes every float32 step of the formula with numpy scalars, one rounding each: 1 / G, amax / 6, / g, sf * g,
x / (sf * g). Codes come from a search in the tables of all e4m3 and e2m1 magnitudes.
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
from fxquant.kernels.numerics import dequantize, nvfp4, quantize
from fxquant.kernels.ops import dequantize_activation, quantize_activation

NVFP4 = FORMATS["nvfp4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F = np.float32
LARGEST, SMALLEST = np.finfo(F).max, np.finfo(F).tiny

# -- the scalar reference -------------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [math.ldexp(byte & 7, -9) if byte < 8 else math.ldexp(8 + (byte & 7), (byte >> 3) - 10) for byte in range(0x7F)]


def nearest(table: list[float], value: float) -> int:
    """Place of the entry nearest to a magnitude, the even one of two as near; the last beyond the end."""
    above = min(bisect_left(table, value), len(table) - 1)
    return min((max(above - 1, 0), above), key=lambda place: (abs(table[place] - value), place % 2))


def packed(codes: list[int]) -> list[int]:
    return [low | high << 4 for low, high in zip(codes[::2], [*codes, 0][1::2], strict=True)]


def code_of(value: np.float32, step: np.float32) -> int:
    with np.errstate(over="ignore"):
        place = nearest(E2M1, abs(float(value / step)))
    return place | (8 if np.signbit(value) else 0)


def reference(matrix: np.ndarray) -> tuple[list[list[int]], list[list[int]], np.float32, np.ndarray]:
    """Packed codes, block scale bytes, G and dequantised values (float32) of a finite float32 matrix."""
    with np.errstate(over="ignore", under="ignore"):
        amax = max(np.abs(matrix).max(initial=F(0)), SMALLEST)
        global_scale = min(F(2688) / amax, LARGEST / F(2))
        inverse = F(1) / global_scale
        stored, scales, values = [], [], np.zeros(matrix.shape, F)
        for i, row in enumerate(matrix):
            codes, scale_row = [], []
            for start in range(0, len(row), 16):
                block = row[start : start + 16]
                scale_row.append(nearest(E4M3, float(min(np.abs(block).max() / F(6) / inverse, F(448)))))
                step = F(E4M3[scale_row[-1]]) * inverse
                for value in block:
                    code = code_of(value, step) if step else 0
                    values[i, len(codes)] = F(E2M1[code & 7]) * step * F(-1 if code & 8 else 1)
                    codes.append(code)
            stored.append(packed(codes))
            scales.append(scale_row)
    return stored, scales, global_scale, values


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


def assert_equals_reference(x: torch.Tensor) -> None:
    stored, scales, expected_global, values = reference(x.float().numpy())
    qdata, scale, global_scale = quantize(x, NVFP4)
    assert scale.dtype == torch.float8_e4m3fn
    assert global_scale.dtype == torch.float32
    assert global_scale.shape == ()
    assert global_scale.item() == expected_global
    assert raw(scale).tolist() == scales
    assert qdata.tolist() == stored
    got = dequantize([qdata, scale, global_scale], NVFP4, torch.float32, columns=x.shape[1])
    assert np.array_equal(got.numpy(), values)


def test_the_reference_decodes_e4m3_as_torch_does():
    assert torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() == E4M3


def test_a_matrix_worked_out_by_hand():
    """amax 2688: G is 1; blocks of 2688 and 6 have the scales 448 and 1."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([2688.0, -448.0, 112.0, 1792.0])
    x[0, 16:22] = torch.tensor([6.0, -5.0, 0.25, 0.75, 2.5, -3.4])
    qdata, scale, global_scale = quantize(x, NVFP4)
    assert global_scale.item() == 1
    assert scale.tolist() == [[448.0, 1.0]]
    assert qdata[0, :2].tolist() == [0x7 | 0xA << 4, 0x0 | 0x6 << 4]  # 6, -1, 0.25 (a tie, to 0), 4
    assert qdata[0, 8:11].tolist() == [0x7 | 0xE << 4, 0x0 | 0x2 << 4, 0x4 | 0xD << 4]  # 6, -4, 0, 1, 2, -3


# -- bytes and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 16), (2, 100), (9, 33), (4, 96)], ids=str)
def test_random_values(shape, dtype):
    """K need not be a multiple of 16, nor even: the last block is short, and the padding of a pair is zero."""
    assert_equals_reference(torch.randn(shape).to(dtype))
    assert_equals_reference((torch.randn(shape) * torch.logspace(-4, 4, shape[1])).to(dtype))


@pytest.mark.parametrize("power", [-100, -7, 0, 13, 100])
@pytest.mark.parametrize("scale", [2.0**-9, 0.5, 1.0, 1.125, 448.0])
def test_ties_and_their_neighbours(power, scale):
    """Midpoints between e2m1 numbers and the floats next to each, under G = 2**-power and a block scale that is exact."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)]) * scale * 2.0**power
    near = torch.cat([middles, torch.nextafter(middles, 2 * middles), torch.nextafter(middles, 0 * middles), -middles])
    blocks = torch.cat([torch.full((4, 1), 6.0 * scale * 2.0**power), near.reshape(4, 7)], 1)
    x = torch.cat([blocks, torch.full((1, 8), 2688.0 * 2.0**power)])
    _, scales, global_scale = quantize(x, NVFP4)
    assert global_scale == 2.0**-power
    assert scales[:4, 0].tolist() == [scale] * 4
    assert_equals_reference(x)


def test_block_scales_at_their_own_ties():
    """Blocks whose amax / 6 lies halfway between two e4m3 numbers, and next to that, subnormal numbers included."""
    middles = torch.tensor([6 * (a + b) / 2 for a, b in pairwise(E4M3)])
    amax = torch.cat([middles, torch.nextafter(middles, 2 * middles), torch.nextafter(middles, 0 * middles)])
    x = torch.cat([torch.tensor([2688.0]), amax])[:, None] * torch.tensor([1.0, -0.7, 0.1])
    assert quantize(x, NVFP4)[2] == 1
    assert_equals_reference(x)


def test_block_scales_are_divided_by_the_inverse_of_the_global_scale():
    """Blocks at ties of their scale under a G that is no power of two, where amax / 6 * G would round the other way."""
    for amax in (1.1, 3.3, 1000.7):
        inverse = 1 / quantize(torch.tensor([[amax]]), NVFP4)[2]
        middles = torch.tensor([6 * (a + b) / 2 for a, b in pairwise(E4M3)]) * inverse
        near = [middles]
        for _ in range(3):
            near = [torch.nextafter(near[0], 0 * middles), *near, torch.nextafter(near[-1], 2 * middles)]
        blocks = torch.cat(near)
        assert_equals_reference(torch.cat([torch.tensor([amax]), blocks[blocks < amax]])[:, None])


def test_matrix_magnitudes_around_powers_of_two():
    base = torch.tensor([2.0**power for power in (-149, -127, -126, -117, -116, -115, -10, 0, 11, 127)] + [2688.0, 1344.0])
    for amax in torch.cat([base, torch.nextafter(base, base * 2), torch.nextafter(base, base * 0)]).tolist():
        assert_equals_reference(torch.tensor([[1.0, -0.3, 0.999, 2**-9, 0.0, 0.5, 2**-23]]) * torch.tensor(amax))


@pytest.mark.parametrize("magnitude", [2.0**-149, 1e-42, 2.0**-127, 2.0**-126, 1.2e-38, 6e-38, 1e30, 3e38, float(LARGEST)])
def test_tiny_and_huge_values(magnitude):
    x = torch.cat([torch.randn(3, 70).clamp(-1, 1), torch.ones(1, 70), torch.zeros(1, 70)]) * torch.tensor(magnitude)
    assert_equals_reference(x)
    assert dequantize(quantize(x, NVFP4), NVFP4, torch.float32).isfinite().all()


def test_one_block_far_above_the_rest():
    """Blocks below 2**-10 of the smallest e4m3 scale have scale 0 and give zeros; the rest keeps what it can."""
    x = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1.0), torch.full((1, 16), 1e-3)], 1)
    assert_equals_reference(x)
    qdata, scale, global_scale = quantize(x, NVFP4)
    assert raw(scale)[0, 2] == 0
    assert not dequantize([qdata, scale, global_scale], NVFP4, torch.float32)[0, 32:].any()


def test_small_halves():
    assert_equals_reference((torch.randn(4, 70) * 1e-7).half())


def test_zeros():
    """A zero block has scale 0; a matrix of zeros has the largest G. Neither gives NaN."""
    x = torch.randn(4, 100)
    x[1], x[2, :16], x[3, 96:] = 0, 0, -0.0
    assert_equals_reference(x)
    for values in (x, torch.zeros(3, 33), -torch.zeros(2, 16)):
        qdata, scale, global_scale = quantize(values, NVFP4)
        restored = dequantize([qdata, scale, global_scale], NVFP4, torch.float32, columns=values.shape[1])
        assert restored.isfinite().all()
        assert not restored[values == 0].any()
    assert raw(quantize(torch.zeros(1, 16), NVFP4)[1]).tolist() == [[0]]
    assert quantize(torch.zeros(1, 16), NVFP4)[2] == float(LARGEST) / 2


@pytest.mark.parametrize("shape", [(0, 33), (5, 0), (0, 0)], ids=str)
def test_empty_matrices(shape):
    qdata, scale, global_scale = quantize(torch.zeros(shape), NVFP4)
    assert qdata.shape == (shape[0], math.ceil(shape[1] / 2))
    assert scale.shape == (shape[0], math.ceil(shape[1] / 16))
    assert global_scale.isfinite()
    assert dequantize([qdata, scale, global_scale], NVFP4, torch.bfloat16, columns=shape[1]).shape == shape


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("search", ["amax", "mse"])
def test_a_matrix_that_is_not_finite_is_nan(bad, search):
    """All of it, and no other: its G is 0 or NaN."""
    x = torch.randn(3, 4, 100)
    clean = dequantize(quantize(x, NVFP4, scale_search=search), NVFP4, torch.float32)
    x[1, 2, 40] = bad
    components = quantize(x, NVFP4, scale_search=search)
    assert components[2][1] == 0 or components[2][1].isnan()
    values = dequantize(components, NVFP4, torch.float32)
    assert values[1].isnan().all()
    assert torch.equal(values[::2], clean[::2])


@pytest.mark.parametrize("search", ["amax", "mse"])
def test_matrices_of_a_stack_have_their_own_scales(search):
    x = torch.randn(3, 5, 35) * torch.tensor([1.0, 1e6, 0.0])[:, None, None]
    stack = quantize(x, NVFP4, scale_search=search)
    assert stack[2].shape == (3,)
    for index in range(3):
        for part, alone in zip(stack, quantize(x[index], NVFP4, scale_search=search), strict=True):
            assert torch.equal(raw(part[index]), raw(alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_of_an_activation_is_a_matrix_of_one_row(dtype):
    x = (torch.randn(2, 3, 35) * torch.logspace(-2, 2, 6).view(2, 3, 1)).to(dtype)
    qdata, scale, global_scale = quantize_activation(x, "nvfp4")
    assert (qdata.shape, scale.shape, global_scale.shape) == ((2, 3, 18), (2, 3, 3), (2, 3, 1))
    restored = dequantize_activation([qdata, scale, global_scale], NVFP4, torch.float32)
    for i in range(2):
        for j in range(3):
            stored, scales, expected_global, values = reference(x[i, j : j + 1].float().numpy())
            assert qdata[i, j].tolist() == stored[0]
            assert raw(scale)[i, j].tolist() == scales[0]
            assert global_scale[i, j].item() == expected_global
            assert np.array_equal(restored[i, j, :35].numpy(), values[0])


def test_matrices_may_share_the_magnitude_of_all():
    """The seam after amax is that of the matrix: shards of one matrix on several ranks get its G, and so its bytes."""
    x = torch.randn(8, 32) * torch.logspace(-2, 2, 8)[:, None]
    whole = quantize(x, NVFP4)
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        part = quantize(x[rows], NVFP4, lambda amax: torch.maximum(amax, x.abs().max()))
        assert torch.equal(part[0], whole[0][rows])
        assert torch.equal(raw(part[1]), raw(whole[1][rows]))
        assert part[2] == whole[2]


finite_matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 16, 35])),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    fill=st.sampled_from([F(0), F(1.75), F(-3e-39)]),
)


def ordinary(matrix: np.ndarray, power: int) -> np.ndarray:
    """Values of like magnitudes around a power of two."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.sign(matrix) * (np.abs(matrix) % 8), power)


@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices, power=st.integers(-110, 110))
def test_any_finite_matrix_has_the_bytes_of_the_reference(matrix, power):
    assert_equals_reference(torch.from_numpy(matrix))
    assert_equals_reference(torch.from_numpy(ordinary(matrix, power)))


@settings(max_examples=100, deadline=None)
@given(matrix=finite_matrices)
def test_finite_matrices_stay_finite(matrix):
    x = torch.from_numpy(matrix)
    for search in ("amax", "mse"):
        assert dequantize(quantize(x, NVFP4, scale_search=search), NVFP4, torch.float32).isfinite().all()


# -- the search for the least error ---------------------------------------------------------------------------------------

STEPS = range(-3, 6)


def block_errors(x: torch.Tensor, components: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squared errors of each block of 16, float64."""
    values = dequantize(components, NVFP4, torch.float64, columns=x.shape[-1])
    squares = torch.nn.functional.pad((values - x.double()).square(), (0, -x.shape[-1] % 16))
    return squares.unflatten(-1, (-1, 16)).sum(-1)


@settings(max_examples=100, deadline=None)
@given(matrix=finite_matrices, power=st.integers(-110, 110))
def test_the_search_never_makes_a_block_worse(matrix, power):
    for values in (matrix, ordinary(matrix, power)):
        x = torch.from_numpy(values)
        plain, searched = (quantize(x, NVFP4, scale_search=search) for search in ("amax", "mse"))
        before, after = (block_errors(x, components) for components in (plain, searched))
        assert (after <= before * (1 + 1e-5)).all()
        assert torch.equal(raw(searched[1])[before == 0], raw(plain[1])[before == 0])
        assert searched[2] == plain[2]


def test_the_search_finds_the_best_of_the_scales_around():
    """Against the error of every e4m3 code from 3 below to 5 above, of codes that the reference makes."""
    x = torch.randn(12, 48) * torch.logspace(-1, 1, 12)[:, None]
    plain, searched = (quantize(x, NVFP4, scale_search=search) for search in ("amax", "mse"))
    inverse = F(1) / F(plain[2].item())
    for i in range(12):
        for j in range(3):
            block = x[i, 16 * j : 16 * j + 16].numpy()
            errors = {}
            for step in STEPS:
                byte = min(max(raw(plain[1])[i, j].item() + step, 0), 0x7E)
                unit = F(E4M3[byte]) * inverse
                codes = [code_of(value, unit) if unit else 0 for value in block]
                values = [F(E2M1[code & 7]) * unit * F(-1 if code & 8 else 1) for code in codes]
                error = sum((float(a) - float(b)) ** 2 for a, b in zip(values, block, strict=True))
                errors[byte] = (error, packed(codes))
            found = raw(searched[1])[i, j].item()
            assert errors[found][0] <= min(error for error, _ in errors.values()) * (1 + 1e-9)
            assert searched[0][i, 8 * j : 8 * j + 8].tolist() == errors[found][1]
    assert block_errors(x, searched).sum() < 0.9 * block_errors(x, plain).sum()


@pytest.mark.parametrize("power", [-110, -72, 62, 100])
def test_the_search_works_where_the_square_of_an_error_is_no_float32(power):
    x = torch.randn(200, 64)
    ordinary, moved = (quantize(values, NVFP4, scale_search="mse") for values in (x, x * 2.0**power))
    assert torch.equal(moved[0], ordinary[0])
    assert torch.equal(raw(moved[1]), raw(ordinary[1]))


def test_the_largest_code_is_not_left():
    """Beyond 448 there is only NaN in e4m3."""
    assert nvfp4.scale_of(torch.tensor([[1e30]]), torch.tensor(1.0)).tolist() == [[448.0]]
    x = torch.full((1, 16), 6.0 * 448)
    x[0, 1:] *= 0.6  # more of the block would fit a larger scale
    qdata, scale, global_scale = quantize(x, NVFP4, scale_search="mse")
    assert raw(scale).max() <= 0x7E
    assert dequantize([qdata, scale, global_scale], NVFP4, torch.float32).isfinite().all()
