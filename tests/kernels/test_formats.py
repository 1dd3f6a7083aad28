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
    STORED_FORMATS,
    WEIGHT_FORMATS,
    WHOLE,
    Scheme,
    activation_format_named,
    defined_activations,
    weight_format_named,
)
from fxquant.kernels.numerics import quantize

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
    assert {name for name, format in FORMATS.items() if format.packed} == {"mxfp4", "nvfp4"}


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


def test_floats_are_multiplied_with_floats_and_integers_with_integers():
    floats = ("fp8_per_tensor_dynamic", "fp8_per_token", "fp8_per_block_dynamic", "mxfp8", "mxfp4", "nvfp4")
    for weight in [FORMATS[name] for name in WEIGHT_FORMATS] + list(STORED_FORMATS.values()):
        integers = weight.name.startswith("int")
        assert defined_activations(weight) == (("int8_per_token",) if integers else floats)
        assert Scheme(weight=weight).defined
        for name in ACTIVATION_FORMATS:
            scheme = Scheme(weight=weight, activation=FORMATS[name])
            assert scheme.defined == (name in defined_activations(weight)) == (integers == name.startswith("int"))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 300), columns=st.integers(0, 300))
def test_shapes_and_bytes_are_those_of_the_components(name, rows, columns):
    """Packed storage is packed: two columns are one byte."""
    format = FORMATS[name]
    qdata, scale, *others = quantize(torch.zeros(rows, columns), format)
    assert tuple(qdata.shape) == (rows, format.stored_columns(columns))
    assert format.stored_columns(columns) == ((columns + 1) // 2 if name in ("mxfp4", "nvfp4") else columns)
    assert tuple(scale.shape) == format.scale_shape(rows, columns)
    assert [tuple(part.shape) for part in others] == [()] * format.second_scale
    assert format.nbytes(rows, columns) == sum(part.numel() * part.itemsize for part in (qdata, scale, *others))


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
        ("int4_group32", (100, 5), 100 * 65 + 500 * 5),
        ("int4_channel", (100, 1), 100 * 65 + 100 * 5),
        ("int4_group32_reordered", (100, 5), 100 * 65 + 500 * 5 + 129 * 4),
    ],
)
def test_shapes_and_bytes_of_a_ragged_matrix(name, scale_shape, nbytes):
    format = {**FORMATS, **STORED_FORMATS}[name]
    assert format.scale_shape(100, 129) == scale_shape
    assert format.nbytes(100, 129) == nbytes


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
