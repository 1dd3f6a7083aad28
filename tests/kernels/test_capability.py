"""The capability table: every family's answer on every kind of device, and the errors that list the alternatives."""

from __future__ import annotations

import pytest
import torch

from fxquant.kernels.capability import (
    FAMILIES,
    Kernel,
    Problem,
    choose,
    default_activation,
    device_key,
    kernels_for,
)
from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, WEIGHT_FORMATS, Scheme
from fxquant.kernels.numerics import has_numerics

COARSE = ("fp8_per_tensor_static", "fp8_per_channel_static")
DYNAMIC = ("fp8_per_token", "fp8_per_tensor_dynamic")


def problem(weight="fp8_per_channel_static", activation="fp8_per_token", rows=64, columns=128, **device) -> Problem:
    scheme = Scheme(weight=FORMATS[weight], activation=FORMATS[activation] if activation else None)
    return Problem(scheme=scheme, rows=rows, columns=columns, **device)


@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
@pytest.mark.parametrize("activation", [*ACTIVATION_FORMATS, None])
def test_every_family_answers_for_every_scheme(weight, activation):
    """A kernel, or a reason that names the scheme or what is missing."""
    asked = problem(weight, activation)
    answers = kernels_for(asked)
    assert set(answers) == set(FAMILIES) - {"auto"}
    for family, answer in answers.items():
        if isinstance(answer, Kernel):
            assert answer.family == family
            assert str(answer) == f"{family} {answer.widths} ({answer.runs})"
        else:
            assert str(asked.scheme) in answer or weight in answer or activation in answer
    assert isinstance(answers["torch"], Kernel) == (weight in COARSE and activation in DYNAMIC)
    computed = has_numerics(FORMATS[weight]) and (activation is None or has_numerics(FORMATS[activation]))
    assert isinstance(answers["reference"], Kernel) == computed
    assert isinstance(answers["triton"], str)


@pytest.mark.parametrize(
    ("weight", "activation", "widths"),
    [
        ("fp8_per_channel_static", "fp8_per_token", "W8A8"),
        ("fp8_per_tensor_static", "fp8_per_tensor_dynamic", "W8A8"),
        ("fp8_per_block_static", "fp8_per_block_dynamic", "W8A8"),
        ("fp8_per_block_static", None, "W8A16"),
    ],
)
def test_widths(weight, activation, widths):
    assert choose(problem(weight, activation)).widths == widths


def test_auto_prefers_the_library_and_falls_back_to_the_reference():
    assert choose(problem()).family == "torch"
    assert choose(problem(device="meta")).family == "torch"
    for other in (
        problem("fp8_per_block_static", "fp8_per_block_dynamic"),
        problem("fp8_per_channel_static", "fp8_per_block_dynamic"),
        problem("fp8_per_channel_static", None),
        problem(device="mps"),
    ):
        assert choose(other).family == "reference"


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
    assert "torch: torch._scaled_mm takes FP8 with tensor, channel or token scales" in message
    assert "triton: this version of fxquant has no Triton kernel" in message
    assert message.endswith("use one of ['reference'] or 'auto'")


def test_a_scheme_that_nothing_serves():
    with pytest.raises(UnsupportedError, match=r"no kernel for mxfp4 x none .*no numerics for mxfp4.*leave the layer out"):
        choose(problem("mxfp4", None))


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


def test_device_keys(monkeypatch):
    assert device_key(torch.device("cpu")) == ("cpu", None)
    assert device_key(torch.device("meta")) == ("meta", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert device_key(torch.device("cuda", 0)) == ("cuda", (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_key(torch.device("cuda", 0)) == ("cuda", None)
