"""What a conversion did: the plan it followed, how well each weight survived, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .planner import Plan, PlannedLayer, format_table, megabytes, outcome


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Sum of squares of a weight, and of what quantisation changed in it."""

    signal: float
    noise: float

    def __add__(self, other: Energy) -> Energy:
        return Energy(signal=self.signal + other.signal, noise=self.noise + other.noise)


def sqnr_db(energies: Sequence[Energy]) -> float:
    """Signal to quantisation noise in dB over some weights; inf where nothing changed, nan without weights."""
    signal, noise = sum(e.signal for e in energies), sum(e.noise for e in energies)
    if noise == 0:
        return math.inf if energies else math.nan
    return 10 * math.log10(signal / noise) if signal else -math.inf


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``quantize_`` returns. ``str(report)`` is a table by group; ``to_dict()`` is for machines.

    Args:
        plan: the plan that was carried out.
        energies: signal and noise of each layer that this call converted, by name.
        bytes_before, bytes_after: bytes of the whole model, measured.
        seconds: wall-clock time of the conversion.
    """

    plan: Plan
    energies: dict[str, Energy]
    bytes_before: int
    bytes_after: int
    seconds: float

    def _measured(self, layers: Sequence[PlannedLayer]) -> list[Energy]:
        return [self.energies[layer.name] for layer in layers if layer.name in self.energies]

    def __str__(self) -> str:
        rows = [("layers", "count", "weight x activation", "rule", "MB before", "after", "SQNR dB")]
        stays: list[str] = []
        for (group, text), layers in self.plan.groups().items():
            if layers[0].scheme is None:
                stays.append(f"{group}: {len(layers)} ({text})")
                continue
            measured = self._measured(layers)
            rows.append(
                (
                    group,
                    str(len(layers)),
                    str(layers[0].scheme),
                    text,
                    megabytes(sum(layer.bytes_before for layer in layers)),
                    megabytes(sum(layer.bytes_after for layer in layers)),
                    f"{sqnr_db(measured):.1f}" if measured else "-",
                )
            )
        chosen = self.plan.chosen
        before, after = sum(x.bytes_before for x in chosen), sum(x.bytes_after for x in chosen)
        return "\n".join(
            [
                *format_table(rows),
                *stays,
                f"quantised layers: {len(chosen)} of {len(self.plan.layers)}, {megabytes(before)} -> {megabytes(after)} MB",
                *self.plan.experts_left(),
                f"whole model: {megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)} MB in {self.seconds:.1f} s",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        groups = []
        for (group, _), layers in self.plan.groups().items():
            first, measured = layers[0], self._measured(layers)
            groups.append(
                {
                    "group": group,
                    "count": len(layers),
                    "scheme": str(first.scheme) if first.scheme else None,
                    "scale_search": first.scheme.scale_search if first.scheme else None,
                    "rule": first.rule,
                    "outcome": outcome(first),
                    "reason": first.reason or None,
                    "bytes_before": sum(layer.bytes_before for layer in layers),
                    "bytes_after": sum(layer.bytes_after for layer in layers),
                    "sqnr_db": sqnr_db(measured) if measured else None,
                }
            )
        return {
            "groups": groups,
            "model_bytes_before": self.bytes_before,
            "model_bytes_after": self.bytes_after,
            "quantised_bytes_before": sum(layer.bytes_before for layer in self.plan.chosen),
            "quantised_bytes_after": sum(layer.bytes_after for layer in self.plan.chosen),
            "expert_bytes_left": self.plan.expert_bytes_left,
            "seconds": self.seconds,
            "layers": self.plan.to_dict()["layers"],
        }
