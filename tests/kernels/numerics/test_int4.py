"""Reading 4-bit integers in groups, against the formula element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS, STORED_FORMATS, WHOLE, Format, Scheme, weight_format_named
from fxquant.kernels.numerics import dequantize, split_shards, stack_shards
from fxquant.kernels.quantized_tensor import QuantizedTensor

GROUPS = {"int4_channel": None, **{f"int4_group{group}": group for group in (16, 32, 64, 128, 256, 512, 1024)}}


def components_of(format: Format, codes: torch.Tensor) -> list[torch.Tensor]:
    """Components with these codes (rows, columns) and random scales, zero points (16 too, as gptq has them) and order."""
    rows, columns = codes.shape
    scales = format.scale_shape(rows, columns)
    padded = torch.nn.functional.pad(codes, (0, columns % 2))
    packed = (padded[:, 0::2] + 16 * padded[:, 1::2]).to(torch.uint8)
    parts = [packed, torch.randn(scales), torch.randint(0, 17, scales, dtype=torch.uint8)]
    return [*parts, torch.randint(0, max(scales[1], 1), (columns,), dtype=torch.int32)] if format.reordered else parts


def loop(format: Format, codes: torch.Tensor, parts: list[torch.Tensor], group: int | None) -> np.ndarray:
    """(q - zero) * scale for each element, one float32 product."""
    values = np.zeros(tuple(codes.shape), np.float32)
    scale, zero = parts[1].numpy(), parts[2].tolist()
    for i, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            place = parts[3][k].item() if format.reordered else k // group if group else 0
            values[i, k] = np.float32(code - zero[i][place]) * scale[i, place]
    return values


def random_codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns))


def test_the_formats():
    """For every group size, in order or not: all unsigned, with a zero point, and nothing that floats can be converted to."""
    assert set(STORED_FORMATS) == {name + order for name in GROUPS for order in ("", "_reordered")}
    for name, format in STORED_FORMATS.items():
        assert weight_format_named(name) is format
        assert format.block == (1, GROUPS[name.removesuffix("_reordered")] or WHOLE)
        assert (format.element, format.packed, format.weight, format.activation) == ("uint4", True, False, False)
        order = ("group_index",) if name.endswith("reordered") else ()
        assert format.components == ("qdata", "scale", "zero_point", *order)


def test_a_row_worked_out_by_hand():
    parts = [torch.tensor([[0x30, 0xF8]], dtype=torch.uint8), torch.tensor([[0.5]]), torch.tensor([[8]], dtype=torch.uint8)]
    assert dequantize(parts, STORED_FORMATS["int4_channel"], torch.float32).tolist() == [[-4.0, -2.5, 0.0, 3.5]]


@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.parametrize("shape", [(3, 64), (2, 100), (5, 33), (1, 1), (2, 1024), (2, 1030), (0, 8), (4, 0)], ids=str)
def test_every_format_equals_the_loop(name, shape):
    """Short last groups, odd numbers of columns, fewer columns than a group has."""
    format, codes = STORED_FORMATS[name], random_codes(*shape)
    parts = components_of(format, codes)
    assert sum(part.numel() * part.itemsize for part in parts) == format.nbytes(*shape)
    values = dequantize(parts, format, torch.float32, columns=shape[1])
    assert np.array_equal(values.numpy(), loop(format, codes, parts, GROUPS[name.removesuffix("_reordered")]))


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["int4_group16", "int4_group32", "int4_channel", "int4_group16_reordered"]),
    rows=st.integers(1, 4),
    columns=st.integers(1, 70),
    seed=st.integers(0, 999),
)
def test_any_matrix_equals_the_loop(name, rows, columns, seed):
    torch.manual_seed(seed)
    format, codes = STORED_FORMATS[name], random_codes(rows, columns)
    parts = components_of(format, codes)
    values = dequantize(parts, format, torch.float32, columns=columns)
    assert np.array_equal(values.numpy(), loop(format, codes, parts, GROUPS[name.removesuffix("_reordered")]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dequantising_rounds_once(dtype):
    format, codes = STORED_FORMATS["int4_group32"], random_codes(4, 64)
    parts = components_of(format, codes)
    expected = torch.from_numpy(loop(format, codes, parts, 32)).to(dtype)
    assert torch.equal(dequantize(parts, format, dtype), expected)


@pytest.mark.parametrize("name", ["int4_group32", "int4_channel", "int4_group32_reordered"])
def test_a_stack_of_experts_and_a_stack_of_shards(name):
    format, codes = STORED_FORMATS[name], [random_codes(rows, 70) for rows in (3, 3, 5)]
    parts = [components_of(format, matrix) for matrix in codes]
    values = [dequantize(part, format, torch.float32) for part in parts]
    experts = [torch.stack(pair) for pair in zip(*parts[:2], strict=True)]
    assert torch.equal(dequantize(experts, format, torch.float32), torch.stack(values[:2]))
    shards = stack_shards(parts, format)
    assert torch.equal(dequantize(shards, format, torch.float32, shards=(3, 3, 5)), torch.cat(values))
    for split, part in zip(split_shards(shards, format, (3, 3, 5)), parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(split, part, strict=True))
    assert sum(part.numel() * part.itemsize for part in shards) == sum(format.nbytes(rows, 70) for rows in (3, 3, 5))


def test_floats_are_not_converted():
    with pytest.raises(
        UnsupportedError, match=r"cannot be converted to int4_group128.*checkpoints only.*fp8_per_channel_static"
    ):
        QuantizedTensor.from_float(torch.ones(4, 128), Scheme(weight=STORED_FORMATS["int4_group128"]))
    assert "int4_group128" not in FORMATS
