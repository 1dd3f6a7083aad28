"""The capability table: every family's answer on every kind of device, and the errors that list the alternatives."""

from __future__ import annotations

import pytest
import torch

from fxquant.kernels.capability import (
    FAMILIES,
    INT8_PACK,
    Kernel,
    Problem,
    choose,
    default_activation,
    device_key,
    kernels_for,
)
from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, STORED_FORMATS, WEIGHT_FORMATS, Scheme

COARSE = ("fp8_per_tensor_static", "fp8_per_channel_static")
DYNAMIC = ("fp8_per_token", "fp8_per_tensor_dynamic")


INT8 = ("int8_per_channel_static", None)
INTEGERS = ("int8_per_channel_static", "int4_group32", "int8_per_token")
UNDEFINED = [
    (weight, activation)
    for weight in (*WEIGHT_FORMATS, "int4_group32")
    for activation in ACTIVATION_FORMATS
    if (weight in INTEGERS) != (activation in INTEGERS)
]


def problem(weight="fp8_per_channel_static", activation="fp8_per_token", rows=64, columns=128, **more) -> Problem:
    formats = {**FORMATS, **STORED_FORMATS}
    scheme = Scheme(weight=formats[weight], activation=formats[activation] if activation else None)
    return Problem(scheme=scheme, rows=rows, columns=columns, **more)


@pytest.mark.parametrize("weight", [*WEIGHT_FORMATS, "int4_group128", "int4_channel_reordered"])
@pytest.mark.parametrize("activation", [*ACTIVATION_FORMATS, None])
@pytest.mark.parametrize("experts", [0, 8])
def test_every_family_answers_for_every_scheme(weight, activation, experts):
    """A kernel, or a reason that names the scheme or what is missing. The reference serves every product that is defined."""
    asked = problem(weight, activation, experts=experts)
    answers = kernels_for(asked)
    assert set(answers) == set(FAMILIES) - {"auto"}
    for family, answer in answers.items():
        if isinstance(answer, Kernel):
            assert answer.family == family
            assert str(answer) == f"{family} {answer.widths} ({answer.runs})"
        else:
            assert str(asked.scheme) in answer or weight in answer or "no library kernel for experts" in answer
    library = (weight in COARSE and activation in DYNAMIC) or (weight, activation) == INT8
    assert isinstance(answers["torch"], Kernel) == (library and not experts)
    assert isinstance(answers["reference"], Kernel) == asked.scheme.defined
    assert isinstance(answers["triton"], str)


@pytest.mark.parametrize(("weight", "activation"), UNDEFINED)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_that_are_not_defined_are_refused_with_those_that_are(weight, activation, family):
    able = (
        "int8_per_token" if weight in INTEGERS else ", ".join(name for name in ACTIVATION_FORMATS if name != "int8_per_token")
    )
    for experts in (0, 4):
        with pytest.raises(UnsupportedError) as caught:
            choose(problem(weight, activation, experts=experts), family)
        assert str(caught.value) == (
            f"no product of {weight} x {activation} is defined; {weight} takes 'none' (weight-only) or {able}"
        )


@pytest.mark.parametrize(
    ("weight", "activation", "widths"),
    [
        ("fp8_per_channel_static", "fp8_per_token", "W8A8"),
        ("fp8_per_tensor_static", "fp8_per_tensor_dynamic", "W8A8"),
        ("fp8_per_block_static", "fp8_per_block_dynamic", "W8A8"),
        ("fp8_per_block_static", None, "W8A16"),
        ("mxfp8", "mxfp8", "W8A8"),
        ("mxfp8", "mxfp4", "W8A4"),
        ("mxfp4", "mxfp4", "W4A4"),
        ("mxfp4", "mxfp8", "W4A8"),
        ("nvfp4", "nvfp4", "W4A4"),
        ("nvfp4", None, "W4A16"),
        ("int8_per_channel_static", None, "W8A16"),
        ("int8_per_channel_static", "int8_per_token", "W8A8"),
        ("int4_group128", None, "W4A16"),
        ("int4_group128", "int8_per_token", "W4A8"),
    ],
)
def test_widths(weight, activation, widths):
    assert choose(problem(weight, activation)).widths == widths
    assert choose(problem(weight, activation, experts=2)).widths == widths


def test_auto_prefers_the_library_and_falls_back_to_the_reference():
    assert choose(problem()).family == "torch"
    assert choose(problem(device="meta")).family == "torch"
    for other in (
        problem("fp8_per_block_static", "fp8_per_block_dynamic"),
        problem("fp8_per_channel_static", "fp8_per_block_dynamic"),
        problem("fp8_per_channel_static", None),
        problem(device="mps"),
        problem(experts=4),
    ):
        assert choose(other).family == "reference"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"device": "meta"}, None),
        ({"rows": 1, "columns": 16}, None),
        ({"dtype": torch.float16}, "is used on the CPU for bfloat16, not on cpu for torch.float16"),
        ({"dtype": torch.float32}, "is used on the CPU for bfloat16, not on cpu for torch.float32"),
        ({"device": "cuda", "capability": (9, 0)}, "is used on the CPU for bfloat16, not on cuda"),
        ({"columns": 40}, "needs K to be a multiple of 16, got K=40"),
        ({"columns": 0}, "needs K to be a multiple of 16, got K=0"),
        ({"experts": 2}, "no library kernel for experts"),
    ],
)
def test_what_the_int8_kernel_needs(more, reason):
    asked = problem(*INT8, **more)
    if reason is None:
        assert choose(asked) == choose(asked, "torch") == Kernel(family="torch", widths="W8A16", runs=INT8_PACK)
        return
    assert choose(asked).family == "reference"
    with pytest.raises(UnsupportedError, match=reason):
        choose(asked, "torch")


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "reason"),
    [
        ((9, 0), 64, 128, None),
        ((8, 9), 64, 128, None),
        ((10, 0), 64, 128, None),
        ((8, 0), 64, 128, r"needs compute capability 8\.9 or higher, this device has \(8, 0\)"),
        (None, 64, 128, "needs compute capability 8.9"),
        ((9, 0), 60, 128, "multiples of 16, got N=60, K=128"),
        ((9, 0), 64, 100, "multiples of 16, got N=64, K=100"),
        ((9, 0), 64, 0, "multiples of 16, got N=64, K=0"),
    ],
)
def test_what_cuda_needs(capability, rows, columns, reason):
    asked = problem(rows=rows, columns=columns, device="cuda", capability=capability)
    if reason is None:
        assert choose(asked).family == choose(asked, "torch").family == "torch"
        return
    assert choose(asked).family == "reference"
    with pytest.raises(UnsupportedError, match=reason):
        choose(asked, "torch")


@pytest.mark.parametrize("family", ["torch", "triton"])
def test_a_pinned_family_that_cannot_serve_lists_those_that_can(family):
    asked = problem("fp8_per_block_static", "fp8_per_block_dynamic", rows=60, columns=100)
    with pytest.raises(UnsupportedError) as caught:
        choose(asked, family)
    message = str(caught.value)
    assert message.startswith(f"no {family!r} kernel for fp8_per_block_static x fp8_per_block_dynamic with N=60, K=100 on cpu")
    reasons = {
        "torch": "torch: torch._scaled_mm takes FP8 with tensor, channel or token scales",
        "triton": "triton: this version of fxquant has no Triton kernel",
    }
    assert {name for name, reason in reasons.items() if reason in message} == {family}
    assert message.endswith("use 'reference', or 'auto'")
    with pytest.raises(UnsupportedError, match=rf"no {family!r} kernel for .* with N=60, K=100 for 8 experts on cpu"):
        choose(problem("fp8_per_block_static", "fp8_per_block_dynamic", rows=60, columns=100, experts=8), family)


def test_an_unknown_family():
    with pytest.raises(UnsupportedError, match="no kernel family 'cutlass'; use one of: auto, torch, triton, reference"):
        choose(problem(), "cutlass")


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_default_activations(capability):
    native = capability is not None and capability >= (10, 0)
    expected = {
        "fp8_per_tensor_static": "fp8_per_token",
        "fp8_per_channel_static": "fp8_per_token",
        "fp8_per_block_static": "fp8_per_block_dynamic",
        "mxfp8": "mxfp8" if native else None,
        "mxfp4": "mxfp4" if native else None,
        "nvfp4": "nvfp4" if native else None,
        "int8_per_channel_static": None,
    }
    found = {name: default_activation(FORMATS[name], capability) for name in WEIGHT_FORMATS}
    assert {name: format and format.name for name, format in found.items()} == expected
    assert {default_activation(format, capability) for format in STORED_FORMATS.values()} == {None}


def test_device_keys(monkeypatch):
    assert device_key(torch.device("cpu")) == ("cpu", None)
    assert device_key(torch.device("meta")) == ("meta", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert device_key(torch.device("cuda", 0)) == ("cuda", (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_key(torch.device("cuda", 0)) == ("cuda", None)
