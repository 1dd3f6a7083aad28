"""Rules tried out on names alone: which layer would get which weight format, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .rules import decide

if TYPE_CHECKING:
    from .config import QuantizationConfig


def plan_names(
    layers: Mapping[str, str],
    quantization: str | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    strict: bool = False,
) -> dict[str, str | None]:
    """Layer name -> the name of the weight format it would get, or None where it stays as it is.

    Args:
        layers: layer name -> kind: ``linear``, ``moe``, ``head``, ``router`` or ``embedding``; any other kind stays as it is.
        quantization: a shorthand, or ``online`` (also None beside a config).
        quantization_config: a dict, a QuantizationConfig, or JSON text.
        packed_modules_mapping: fused name -> shard names, added to the default table; an empty mapping fuses nothing.
        strict: also refuse a pattern that matches nothing.

    Raises:
        ConfigError: the configuration cannot be parsed or merged.
        RuleError: rules contradict each other on a layer or, if strict, a pattern matches nothing.
    """
    from .config import resolve  # here, because it brings in pydantic

    decisions = decide(layers, resolve(quantization, quantization_config), packed_modules_mapping, strict)
    return {name: decision.request.weight.name if decision.request else None for name, decision in decisions.items()}
