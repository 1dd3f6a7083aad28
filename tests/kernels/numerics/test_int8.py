"""INT8 bytes and scales against a scalar reference in exact arithmetic, per channel and per token."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fxquant.kernels.formats import FORMATS
from fxquant.kernels.numerics import dequantize, quantize

NAMES = ["int8_per_channel_static", "int8_per_token"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F = np.float32
LARGEST, SMALLEST = np.finfo(F).max, np.finfo(F).tiny

# -- the scalar reference -------------------------------------------------------------------------------------------------


def code_of(value: np.float32, scale: np.float32) -> int:
    """``round`` of a Fraction goes to nearest even; the quotient is a float32 before."""
    return max(-127, min(127, round(Fraction(float(value / scale)))))


def reference(matrix: np.ndarray) -> tuple[list[list[int]], list[float], np.ndarray]:
    """Codes, scale of each row and dequantised values (float32) of a finite float32 matrix."""
    codes, scales, values = [], [], np.zeros(matrix.shape, F)
    with np.errstate(over="ignore", under="ignore"):
        for i, row in enumerate(matrix):
            scale = max(np.abs(row).max(initial=F(0)) / F(127), SMALLEST)
            codes.append([code_of(value, scale) for value in row])
            scales.append(float(scale))
            values[i] = np.array(codes[-1], F) * scale
    return codes, scales, values


def assert_equals_reference(x: torch.Tensor, name: str) -> None:
    codes, scales, values = reference(x.float().numpy())
    qdata, scale = quantize(x, FORMATS[name])
    assert (qdata.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert scale.tolist() == [[value] for value in scales]
    assert qdata.tolist() == codes
    assert np.array_equal(dequantize([qdata, scale], FORMATS[name], torch.float32).numpy(), values)


def test_a_row_worked_out_by_hand():
    qdata, scale = quantize(torch.tensor([[254.0, -254.0, 1.0, 3.0, 5.0, 2.9, -1.0, -3.0, 0.0]]), FORMATS[NAMES[0]])
    assert scale.tolist() == [[2.0]]
    assert qdata.tolist() == [[127, -127, 0, 2, 2, 1, 0, -2, 0]]  # halves go to the even number


# -- bytes and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 33), (9, 128)], ids=str)
def test_random_values(name, shape, dtype):
    assert_equals_reference(torch.randn(shape).to(dtype), name)
    assert_equals_reference((torch.randn(shape) * torch.logspace(-4, 4, shape[1])).to(dtype), name)


@pytest.mark.parametrize("power", [-110, -3, 0, 5, 110])
def test_ties_and_their_neighbours(power):
    halves = torch.arange(-126.5, 127)
    values = torch.cat([halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)])
    x = torch.cat([torch.tensor([127.0]), values])[None] * 2.0**power
    assert quantize(x, FORMATS[NAMES[0]])[1].item() == 2.0**power
    assert_equals_reference(x, NAMES[0])


def test_magnitudes_around_powers_of_two():
    """The division by 127 is rounded once, also where Inductor would multiply by a reciprocal."""
    base = torch.tensor([2.0**power for power in (-149, -127, -126, -120, -119, -10, 0, 8, 127)] + [127.0, 127 * 2.0**-126])
    amax = torch.cat([base, torch.nextafter(base, base * 2), torch.nextafter(base, base * 0), torch.rand(200) + 1])
    assert_equals_reference(amax[:, None] * torch.tensor([1.0, -0.3, 0.999, 2**-8, 0.0, 0.5]), NAMES[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [2.0**-149, 1e-42, 1.2e-38, 6e-38, 1e-36, 1e30, 3e38, float(LARGEST)])
def test_tiny_and_huge_values(name, magnitude):
    x = torch.cat([torch.randn(3, 70).clamp(-1, 1), torch.ones(1, 70), torch.zeros(1, 70)]) * torch.tensor(magnitude)
    assert_equals_reference(x, name)
    finite = dequantize(quantize(x, FORMATS[name]), FORMATS[name], torch.float32).isfinite().all()
    assert finite or magnitude == LARGEST  # there 127 * float32(amax / 127) may round up to 2**128


@pytest.mark.parametrize("name", NAMES)
def test_small_halves(name):
    assert_equals_reference((torch.randn(4, 70) * 1e-7).half(), name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_give_zeros(name):
    x = torch.randn(4, 50)
    x[1], x[3] = 0, -0.0
    assert_equals_reference(x, name)
    qdata, scale = quantize(x, FORMATS[name])
    assert scale[1] == scale[3] == float(SMALLEST)
    assert not qdata[1].any()
    assert not qdata[3].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 33), (5, 0), (0, 0)], ids=str)
def test_empty_matrices(name, shape):
    qdata, scale = quantize(torch.zeros(shape), FORMATS[name])
    assert qdata.shape == shape
    assert scale.shape == (shape[0], 1)
    assert scale.isfinite().all()
    assert dequantize([qdata, scale], FORMATS[name], torch.bfloat16).shape == shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(name, bad, dtype):
    """Its scale is not finite; its bytes, for which an integer has no NaN, are the same in every run: zeros."""
    x = torch.randn(4, 50).to(dtype)
    clean, clean_scale = quantize(x, FORMATS[name])
    x[2, 40] = bad
    qdata, scale = quantize(x, FORMATS[name])
    assert not scale[2].isfinite()
    assert not qdata[2].any()
    assert not dequantize([qdata, scale], FORMATS[name], torch.float32)[2].isfinite().any()
    for row in (0, 1, 3):
        assert torch.equal(qdata[row], clean[row])
        assert torch.equal(scale[row], clean_scale[row])


finite_matrices = hnp.arrays(
    F,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 33])),
    elements=st.floats(-(2.0**127), 2.0**127, width=32),
    fill=st.sampled_from([F(0), F(1), F(-3e-39)]),
)


@settings(max_examples=150, deadline=None)
@given(matrix=finite_matrices)
def test_any_finite_matrix_has_the_bytes_of_the_reference(matrix):
    assert_equals_reference(torch.from_numpy(matrix), NAMES[0])


@settings(max_examples=100, deadline=None)
@given(matrix=finite_matrices)
def test_any_finite_matrix_stays_finite_within_half_a_step(matrix):
    x = torch.from_numpy(matrix)
    qdata, scale = quantize(x, FORMATS[NAMES[0]])
    values = dequantize([qdata, scale], FORMATS[NAMES[0]], torch.float32)
    assert values.isfinite().all()
    bound = scale.double() / 2 * (1 + 2.0**-15) + 2.0**-149
    assert ((values.double() - x.double()).abs() <= bound).all()
    assert qdata.min() >= -127
