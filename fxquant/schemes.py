"""What a person may ask for by name: the request, and the shorthands that stand for one request a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from .kernels.formats import FORMATS, WEIGHT_FORMATS, Format

Slot = Literal["linear", "moe"]
"""The two sorts of layer that have a scheme of their own."""

SLOTS: tuple[Slot, ...] = ("linear", "moe")

ONLINE = "online"
"""The value of ``quantization`` that leaves everything to ``quantization_config``."""

WEIGHT_ONLY = "none"
"""The activation name that leaves activations as they are."""


class DefaultActivation(Enum):
    """Type of ``DEFAULT``: the activation format is chosen when the device is known."""

    DEFAULT = "default"


DEFAULT = DefaultActivation.DEFAULT


@dataclass(frozen=True, kw_only=True)
class SchemeRequest:
    """What was asked of a layer before its device is known.

    Args:
        weight: the format that the weight is stored in.
        activation: a format (always executed), None (weight-only), or ``DEFAULT`` (the device's default for this weight).
        scale_search: how block scales are found: ``amax``, or ``mse`` (4-bit weights only).
    """

    weight: Format
    activation: Format | DefaultActivation | None = DEFAULT
    scale_search: str = "amax"

    def __str__(self) -> str:
        if self.activation is None:
            return f"{self.weight.name} x {WEIGHT_ONLY}"
        name = self.activation.value if isinstance(self.activation, DefaultActivation) else self.activation.name
        return f"{self.weight.name} x {name}"

    def searching(self, scale_search: str) -> SchemeRequest:
        """The request with this search for block scales; itself where the weight's format has no use for one."""
        return replace(self, scale_search=scale_search) if self.weight.element == "e2m1" else self


@dataclass(frozen=True, kw_only=True)
class Shorthand:
    """A name that stands for one request in each slot; a slot that it has no method for holds None."""

    name: str
    linear: SchemeRequest | None
    moe: SchemeRequest | None

    def request(self, slot: Slot) -> SchemeRequest | None:
        """The request for this slot, or None where the shorthand defines no method."""
        return self.linear if slot == "linear" else self.moe

    def lack(self, slot: Slot) -> str:
        """That the shorthand defines no method for this slot, and what to write instead."""
        weights = [request.weight.name for request in (self.linear, self.moe) if request]
        return f"defines no {slot} method; write the weight format {' or '.join(map(repr, weights))}"


def _both(name: str, weight: str) -> Shorthand:
    request = SchemeRequest(weight=FORMATS[weight])
    return Shorthand(name=name, linear=request, moe=request)


def _moe_only(name: str, weight: str, activation: DefaultActivation | None) -> Shorthand:
    return Shorthand(name=name, linear=None, moe=SchemeRequest(weight=FORMATS[weight], activation=activation))


SHORTHANDS: dict[str, Shorthand] = {
    shorthand.name: shorthand
    for shorthand in (
        _both("fp8_per_tensor", "fp8_per_tensor_static"),
        _both("fp8_per_block", "fp8_per_block_static"),
        _both("fp8_per_channel", "fp8_per_channel_static"),
        _both("mxfp8", "mxfp8"),
        _both("mxfp4", "mxfp4"),
        _moe_only("int8_per_channel_weight_only", "int8_per_channel_static", None),
        _moe_only("nvfp4_per_token", "nvfp4", DEFAULT),
    )
}
"""Every shorthand by name: the values of ``quantization`` (beside ``online``), of ``targets``, and of a bare slot."""

NAMES = tuple(dict.fromkeys((*SHORTHANDS, *WEIGHT_FORMATS)))
"""Every name that a slot takes as a bare string."""


def request_named(name: str, slot: Slot) -> SchemeRequest | None:
    """What one of ``NAMES`` asks of a slot: as a shorthand, else as a weight format with the default activation.

    None where the shorthand defines no method for the slot.
    """
    shorthand = SHORTHANDS.get(name)
    return shorthand.request(slot) if shorthand else SchemeRequest(weight=FORMATS[name])
