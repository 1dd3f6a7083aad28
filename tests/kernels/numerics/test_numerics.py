"""The dispatch from a format to its family of numerics, stacks of shards, and what holds in every format alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, SCALE_SEARCHES, WEIGHT_FORMATS, Format
from fxquant.kernels.numerics import dequantize, quantize, split_shards, stack_shards
from fxquant.kernels.ops import dequantize_activation, quantize_activation

BY_ROW = [name for name in ACTIVATION_FORMATS if name != "fp8_per_tensor_dynamic"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, so that NaN equals NaN."""
    return x.view(torch.uint8 if x.itemsize == 1 else torch.int32)


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Equal dtypes, shapes and bytes of each component."""
    return all(a.dtype == b.dtype and torch.equal(raw(a), raw(b)) for a, b in zip(first, second, strict=True))


# -- components -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_components_come_in_the_order_of_the_format(name, dtype):
    components = quantize(torch.randn(4, 9).to(dtype), FORMATS[name])
    assert len(components) == len(FORMATS[name].components)
    assert components[0].dtype == FORMATS[name].qdata_dtype
    assert components[1].dtype == FORMATS[name].scale_dtype
    for result in DTYPES:
        values = dequantize(components, FORMATS[name], result, columns=9)
        assert values.dtype == result
        assert values.shape == (4, 9)
        assert torch.equal(values, dequantize(components, FORMATS[name], torch.float32, columns=9).to(result))


def magnitude_shape(format: Format, rows: int, columns: int) -> tuple[int, ...]:
    return () if format.second_scale else format.scale_shape(rows, columns)


@pytest.mark.parametrize("name", FORMATS)
def test_the_seam_sees_magnitudes_and_takes_others(name):
    """Those of the blocks, or of the matrix under a second scale; doubled they double what the scales stand for."""
    x, seen = torch.randn(200, 300), []

    def record(amax):
        seen.append(amax)
        return amax * 2

    format = FORMATS[name]
    doubled, plain = quantize(x, format, record), quantize(x, format)
    assert [tuple(amax.shape) for amax in seen] == [magnitude_shape(format, 200, 300)]
    assert seen[0].max() == x.abs().max()
    if format.second_scale:
        assert doubled[2] == plain[2] / 2
    elif format.scale_dtype == torch.uint8:
        assert torch.equal(doubled[1], plain[1] + 1)
    else:
        assert torch.equal(doubled[1], plain[1] * 2)
    exact = dequantize(plain, format, torch.float32), dequantize(quantize(x * 2, format), format, torch.float32)
    assert torch.equal(exact[0] * 2, exact[1])


# -- shards ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shards", [(5, 9), (128, 72), (130, 1, 7), (0, 4)], ids=str)
@pytest.mark.parametrize("search", SCALE_SEARCHES)
def test_each_shard_has_the_bytes_it_has_by_itself(name, shards, search):
    """Also where it is no multiple of 128: blocks restart at the border."""
    format = FORMATS[name]
    matrices = [torch.randn(rows, 140) * 10.0**power for power, rows in enumerate(shards)]
    components = quantize(torch.cat(matrices), format, scale_search=search, shards=shards)
    alone = [quantize(matrix, format, scale_search=search) for matrix in matrices]
    assert same(components, stack_shards(alone, format))
    for part, expected in zip(split_shards(components, format, shards), alone, strict=True):
        assert same([piece.contiguous() for piece in part], expected)
    values = dequantize(components, format, torch.float32, shards=shards)
    assert torch.equal(values, torch.cat([dequantize(part, format, torch.float32) for part in alone]))
    assert sum(part.numel() * part.itemsize for part in components) == sum(format.nbytes(rows, 140) for rows in shards)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_shards_of_every_expert(name):
    """(E, rows, columns): numbers of a matrix become (E, shards)."""
    format, x = FORMATS[name], torch.randn(3, 14, 40) * torch.tensor([1.0, 10.0, 0.0])[:, None, None]
    stack = quantize(x, format, shards=(5, 9))
    numbers = {"scale": format.scale_shape(5, 40) == (), "global_scale": True}
    for component, part in zip(format.components, stack, strict=True):
        if numbers.get(component):
            assert part.shape == (3, 2)
    for expert in range(3):
        assert same([part[expert] for part in stack], quantize(x[expert], format, shards=(5, 9)))
    values = dequantize(stack, format, torch.float32, shards=(5, 9))
    assert torch.equal(values[1], dequantize([part[1] for part in stack], format, torch.float32, shards=(5, 9)))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_one_shard_is_no_shard(name):
    x = torch.randn(6, 40)
    plain = quantize(x, FORMATS[name])
    assert same(quantize(x, FORMATS[name], shards=(6,)), plain)
    assert torch.equal(
        dequantize(plain, FORMATS[name], torch.float32, shards=(6,)), dequantize(plain, FORMATS[name], torch.float32)
    )


def test_the_seam_sees_each_shard():
    seen = []
    x = torch.tensor([[1.0], [-2.0], [3.0]])
    quantize(x, FORMATS["fp8_per_tensor_static"], lambda amax: seen.append(amax.item()) or amax, shards=(2, 1))
    assert seen == [2, 3]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].element != "e2m1"])
def test_the_search_changes_no_format_of_8_bits(name):
    x = torch.randn(9, 70)
    assert same(quantize(x, FORMATS[name], scale_search="mse"), quantize(x, FORMATS[name]))


# -- rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(0, 20), min_size=1, max_size=21),
    columns=st.sampled_from([1, 16, 33, 200]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_token_is_the_same_alone_and_in_any_batch(name, rows, columns, dtype):
    """Zeros and infinities among its batch mates, in any order, change no bit of it."""
    x = torch.randn(21, columns) * torch.logspace(-3, 3, 21)[:, None]
    x[7], x[8, 0] = 0, math.inf
    whole = [raw(part) for part in quantize_activation(x.to(dtype), name)]
    for part, of_whole in zip(quantize_activation(x.to(dtype)[rows], name), whole, strict=True):
        assert torch.equal(raw(part), of_whole[rows])


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_token_spoils_its_own_row_only(name, bad):
    x = torch.randn(2, 3, 70)
    clean = dequantize_activation(quantize_activation(x, name), FORMATS[name], torch.float32)[..., :70]
    x[1, 0, 40] = bad
    values = dequantize_activation(quantize_activation(x, name), FORMATS[name], torch.float32)[..., :70]
    assert not values[1, 0, 40].isfinite()
    values[1, 0], clean[1, 0] = 0, 0
    assert torch.equal(values, clean)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_leading_dimensions_do_not_matter(name):
    x = torch.randn(2, 3, 4, 70)
    rows = quantize_activation(x.view(-1, 70), name)
    for shaped in (x, x.view(6, 4, 70), x.transpose(0, 1).contiguous().transpose(0, 1)):
        for part, expected in zip(quantize_activation(shaped, name), rows, strict=True):
            assert part.dim() == 0 or part.shape[:-1] == shaped.shape[:-1]
            assert torch.equal(raw(part).reshape(raw(expected).shape), raw(expected))


# -- compiled -------------------------------------------------------------------------------------------------------------


def extreme(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, and rows of very small and very large values, zeros of either sign."""
    x = torch.randn(rows, columns)
    x[::2] *= torch.logspace(-44, 37, rows)[::2, None]
    x[1 % rows, : columns // 2], x[3 % rows, : columns // 3], x[2 % rows, 5] = -0.0, 0, 1e4
    return x.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "int8_per_token"])
@pytest.mark.parametrize(("columns", "dtype"), [(256, torch.bfloat16), (133, torch.float32)], ids=str)
def test_compiled_bytes_equal_eager_ones(name, columns, dtype):
    """Under Inductor, alone (no producer in front): one graph for many tokens, one for a single token."""

    def quantise(x):
        torch._check(x.shape[-1] == columns)  # as of a layer: the number of tokens varies
        return torch.ops.fxquant.quantize_activation(x, name)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(quantise, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (5, 7, 2, 130, 33, 64, *([1] if name == "mxfp4" else [])):
        x = extreme(tokens, columns, dtype)
        assert same(compiled(x), quantize_activation(x, name))
    assert counter.frame_count == (2 if name == "mxfp4" else 1)
    x[0, 5], x[-1, 70] = math.nan, math.inf  # NaN may carry either sign
    components = compiled(x), quantize_activation(x, name)
    assert torch.equal(components[0][1].float().nan_to_num(-1), components[1][1].float().nan_to_num(-1))
    values = [dequantize_activation(parts, FORMATS[name], torch.float32) for parts in components]
    assert values[0].isnan().any()
    assert torch.equal(values[0].nan_to_num(), values[1].nan_to_num())
