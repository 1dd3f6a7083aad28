"""The shorthands stand for what the grammar says, in each slot."""

from __future__ import annotations

import dataclasses

import pytest

from fxquant.kernels.formats import FORMATS, WEIGHT_FORMATS
from fxquant.schemes import DEFAULT, NAMES, ONLINE, SHORTHANDS, SLOTS, SchemeRequest, request_named

EXPECTED = {
    "fp8_per_tensor": ("fp8_per_tensor_static", DEFAULT, True),
    "fp8_per_block": ("fp8_per_block_static", DEFAULT, True),
    "fp8_per_channel": ("fp8_per_channel_static", DEFAULT, True),
    "mxfp8": ("mxfp8", DEFAULT, True),
    "mxfp4": ("mxfp4", DEFAULT, True),
    "int8_per_channel_weight_only": ("int8_per_channel_static", None, False),
    "nvfp4_per_token": ("nvfp4", DEFAULT, False),
}


def test_the_table_is_complete() -> None:
    assert set(SHORTHANDS) == set(EXPECTED)
    assert ONLINE not in SHORTHANDS


@pytest.mark.parametrize("name", EXPECTED)
def test_each_shorthand(name: str) -> None:
    weight, activation, serves_linear = EXPECTED[name]
    shorthand = SHORTHANDS[name]
    request = SchemeRequest(weight=FORMATS[weight], activation=activation)
    assert shorthand.name == name
    assert weight in WEIGHT_FORMATS
    assert shorthand.request("moe") == shorthand.moe == request
    assert shorthand.request("linear") == shorthand.linear == (request if serves_linear else None)


def test_a_request_is_a_value() -> None:
    request = SchemeRequest(weight=FORMATS["mxfp4"])
    assert request.activation is DEFAULT
    assert hash(request) == hash(SchemeRequest(weight=FORMATS["mxfp4"], activation=DEFAULT))
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.activation = None  # type: ignore[misc]


def test_a_request_says_what_it_asks_for() -> None:
    mxfp4 = FORMATS["mxfp4"]
    assert str(SchemeRequest(weight=mxfp4)) == "mxfp4 x default"
    assert str(SchemeRequest(weight=mxfp4, activation=None)) == "mxfp4 x none"
    assert str(SchemeRequest(weight=mxfp4, activation=FORMATS["int8_per_token"])) == "mxfp4 x int8_per_token"


@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
def test_a_search_reaches_weights_of_4_bits_alone(weight: str) -> None:
    request = SchemeRequest(weight=FORMATS[weight], activation=None)
    assert request.searching("mse").scale_search == ("mse" if weight in ("mxfp4", "nvfp4") else "amax")
    assert request.searching("mse").searching("amax") == request.searching("amax") == request


def test_every_name_asks_for_something_or_says_what_to_write_instead() -> None:
    assert set(NAMES) == {*SHORTHANDS, *WEIGHT_FORMATS}
    for name in NAMES:
        for slot in SLOTS:
            if name not in SHORTHANDS:
                assert request_named(name, slot) == SchemeRequest(weight=FORMATS[name])
                continue
            assert request_named(name, slot) == SHORTHANDS[name].request(slot)
    assert SHORTHANDS["nvfp4_per_token"].lack("linear") == "defines no linear method; write the weight format 'nvfp4'"
