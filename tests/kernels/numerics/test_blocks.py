"""Block maxima and their spreading, against loops over the elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxquant.kernels.formats import FORMATS, WHOLE
from fxquant.kernels.numerics.blocks import block_amax, spread, sum_of_squares

BLOCKS = [(WHOLE, WHOLE), (1, WHOLE), (1, 4), (2, 4), (128, 128), (1, 128), (1, 1)]


def loop_amax(x: torch.Tensor, block: tuple[int, int]) -> dict[tuple[int, int], float]:
    """Largest magnitude by (row block, column block), NaN where one is in the block."""
    height, width = (size if extent == WHOLE else extent for extent, size in zip(block, x.shape, strict=True))
    result: dict[tuple[int, int], float] = {}
    for i, row in enumerate(x.tolist()):
        for j, value in enumerate(row):
            key = (i // height, j // width)
            seen = result.get(key, 0.0)
            result[key] = math.nan if math.isnan(seen) or math.isnan(value) else max(seen, abs(value))
    return result


def assert_matches_loop(x: torch.Tensor, block: tuple[int, int]) -> None:
    amax = block_amax(x, block)
    spreaded = spread(amax, block, x.shape).expand(x.shape)
    expected = loop_amax(x, block)
    grid = amax if amax.dim() == 2 else amax.reshape(1, 1)
    assert grid.numel() == len(expected)
    for (i, j), value in expected.items():
        assert torch.equal(grid[i, j].nan_to_num(nan=-1), torch.tensor(value).nan_to_num(nan=-1))
    height, width = (size if extent == WHOLE else extent for extent, size in zip(block, x.shape, strict=True))
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            assert spreaded[i, j].item() == grid[i // height, j // width].item() or math.isnan(spreaded[i, j])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 99), bad=st.sampled_from([None, math.nan, math.inf])
)
def test_amax_and_spread_equal_the_loop(block, rows, columns, seed, bad):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if bad is not None:
        x[seed % rows, seed % columns] = bad
    assert_matches_loop(x, block)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (129, 127), (130, 257), (1, 129)])
def test_real_block_sizes(rows, columns):
    for block in ((128, 128), (1, 128)):
        assert_matches_loop(torch.randn(rows, columns), block)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_leading_dimensions(block):
    x = torch.randn(2, 3, 5, 10)
    amax = block_amax(x, block)
    for i in range(2):
        for j in range(3):
            assert torch.equal(amax[i, j], block_amax(x[i, j], block))
            assert torch.equal(
                spread(amax, block, x.shape).expand(x.shape)[i, j], spread(amax[i, j], block, x[i, j].shape).expand(5, 10)
            )


@pytest.mark.parametrize("block", [(1, WHOLE), (1, 4), (1, 128)], ids=str)
def test_blocks_of_one_row_take_a_vector(block):
    x = torch.randn(10)
    assert torch.equal(block_amax(x, block), block_amax(x[None], block)[0])
    assert torch.equal(
        spread(block_amax(x, block), block, x.shape).expand(10),
        spread(block_amax(x[None], block), block, (1, 10)).expand(1, 10)[0],
    )


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if not format.second_scale])
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 7), (7, 0), (1, 1), (7, 100), (200, 129)])
def test_the_shape_is_that_of_the_scale(name, rows, columns):
    amax = block_amax(torch.zeros(rows, columns), FORMATS[name].block)
    assert tuple(amax.shape) == FORMATS[name].scale_shape(rows, columns)
    assert not amax.any()


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_sums_of_squares_equal_the_loop(width, size):
    """Also of values whose squares no float32 holds."""
    x = torch.randn(3, 37) * size
    sums = sum_of_squares(x, (1, width))
    assert sums.dtype == torch.float64
    for row, values in zip(sums.tolist(), x.tolist(), strict=True):
        expected = [sum(value**2 for value in values[start : start + width]) for start in range(0, 37, width)]
        assert row == pytest.approx(expected, rel=1e-12, abs=0)


def test_infinities_and_nan_in_a_sum_of_squares():
    assert sum_of_squares(torch.tensor([[1.0, -torch.inf, 2.0, torch.nan]]), (1, 2))[0].isfinite().tolist() == [False, False]
