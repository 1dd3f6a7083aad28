"""The table of formats, and that what a format says about shapes and bytes is what the numerics make."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import (
    ACTIVATION_FORMATS,
    FORMATS,
    WEIGHT_FORMATS,
    WHOLE,
    Scheme,
    activation_format_named,
    weight_format_named,
)
from fxquant.kernels.numerics import has_numerics, quantize

COMPUTED = [name for name, format in FORMATS.items() if has_numerics(format)]
EXPECTED = {
    "fp8_per_tensor_static": ("e4m3", torch.float32, (WHOLE, WHOLE), True, False),
    "fp8_per_channel_static": ("e4m3", torch.float32, (1, WHOLE), True, False),
    "fp8_per_block_static": ("e4m3", torch.float32, (128, 128), True, False),
    "fp8_per_tensor_dynamic": ("e4m3", torch.float32, (WHOLE, WHOLE), False, True),
    "fp8_per_token": ("e4m3", torch.float32, (1, WHOLE), False, True),
    "fp8_per_block_dynamic": ("e4m3", torch.float32, (1, 128), False, True),
    "mxfp8": ("e4m3", torch.uint8, (1, 32), True, True),
    "mxfp4": ("e2m1", torch.uint8, (1, 32), True, True),
    "nvfp4": ("e2m1", torch.float8_e4m3fn, (1, 16), True, True),
    "int8_per_channel_static": ("int8", torch.float32, (1, WHOLE), True, False),
    "int8_per_token": ("int8", torch.float32, (1, WHOLE), False, True),
}


def test_the_table():
    found = {name: (f.element, f.scale_dtype, f.block, f.weight, f.activation) for name, f in FORMATS.items()}
    assert found == EXPECTED
    assert all(format.name == name for name, format in FORMATS.items())
    assert list(WEIGHT_FORMATS) == [name for name in EXPECTED if EXPECTED[name][3]]
    assert list(ACTIVATION_FORMATS) == [name for name in EXPECTED if EXPECTED[name][4]]
    assert [name for name, format in FORMATS.items() if format.second_scale] == ["nvfp4"]
    assert FORMATS["nvfp4"].components == ("qdata", "scale", "global_scale")


def test_formats_and_schemes_are_values():
    format = FORMATS["fp8_per_token"]
    assert dataclasses.replace(format) == format
    assert hash(Scheme(weight=format)) == hash(Scheme(weight=dataclasses.replace(format)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Scheme(weight=format).weight = format


def test_a_scheme_names_both_formats():
    assert str(Scheme(weight=FORMATS["mxfp4"])) == "mxfp4 x none"
    scheme = Scheme(weight=FORMATS["fp8_per_channel_static"], activation=FORMATS["fp8_per_token"])
    assert str(scheme) == "fp8_per_channel_static x fp8_per_token"


@pytest.mark.parametrize("name", COMPUTED)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 300), columns=st.integers(0, 300))
def test_shapes_and_bytes_are_those_of_the_components(name, rows, columns):
    format = FORMATS[name]
    components = quantize(torch.zeros(rows, columns), format)
    assert tuple(components[0].shape) == (rows, columns)
    assert tuple(components[1].shape) == format.scale_shape(rows, columns)
    assert format.nbytes(rows, columns) == sum(part.numel() * part.itemsize for part in components)


@pytest.mark.parametrize(
    ("name", "scale_shape", "nbytes"),
    [
        ("fp8_per_tensor_static", (), 100 * 129 + 4),
        ("fp8_per_channel_static", (100, 1), 100 * 129 + 400),
        ("fp8_per_block_static", (1, 2), 100 * 129 + 8),
        ("fp8_per_block_dynamic", (100, 2), 100 * 129 + 800),
        ("mxfp8", (100, 5), 100 * 129 + 500),
        ("mxfp4", (100, 5), 100 * 65 + 500),
        ("nvfp4", (100, 9), 100 * 65 + 900 + 4),
        ("int8_per_channel_static", (100, 1), 100 * 129 + 400),
    ],
)
def test_shapes_and_bytes_of_a_ragged_matrix(name, scale_shape, nbytes):
    assert FORMATS[name].scale_shape(100, 129) == scale_shape
    assert FORMATS[name].nbytes(100, 129) == nbytes


def test_the_block_in_elements():
    assert FORMATS["fp8_per_tensor_static"].block_shape(3, 5) == (3, 5)
    assert FORMATS["fp8_per_token"].block_shape(3, 5) == (1, 5)
    assert FORMATS["fp8_per_block_static"].block_shape(3, 5) == (128, 128)


@pytest.mark.parametrize(
    ("lookup", "role", "wrong_role", "accepted"),
    [
        (weight_format_named, "weight", "fp8_per_token", WEIGHT_FORMATS),
        (activation_format_named, "activation", "fp8_per_tensor_static", ACTIVATION_FORMATS),
    ],
)
def test_names_are_looked_up_by_role(lookup, role, wrong_role, accepted):
    for name in accepted:
        assert lookup(name) is FORMATS[name]
    with pytest.raises(UnsupportedError, match=f"the {role} format 'fp9' does not exist; use one of: {', '.join(accepted)}"):
        lookup("fp9")
    with pytest.raises(UnsupportedError, match=f"the {role} format {wrong_role!r} is not one; use one of: "):
        lookup(wrong_role)
