"""What a machine computes: for each name that a slot takes the kernel that it gets, or why it gets none.

A view of ``kernels/capability.py``, which holds the one table; ``fxquant schemes`` prints it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import markdown
from .kernels.capability import Kernel, Problem, device_key, kernels_for
from .kernels.formats import FORMATS, WEIGHT_FORMATS, Scheme, defined_activations
from .planner import resolve_activation, usable_device
from .schemes import NAMES, SHORTHANDS, SLOTS, WEIGHT_ONLY, Slot, request_named

SHAPES: Mapping[Slot, Mapping[str, int]] = {
    "linear": {"rows": 4096, "columns": 4096, "experts": 0},
    "moe": {"rows": 2048, "columns": 4096, "experts": 8},
}
"""The product that stands for each slot; its sizes are multiples of 128, which every kernel takes."""

DTYPE = torch.bfloat16
HEADINGS = ("scheme", "weight x activation", "kernel", "what runs")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What asking for one name in one slot comes to.

    Args:
        name: a shorthand or a weight format.
        slot: the slot that it stands in.
        scheme: what the name means on the device; None where it is a shorthand without a method for the slot.
        answers: every kernel family's kernel, or why it has none.
        lack: why there is no scheme, and what to write instead; empty where there is one.
    """

    name: str
    slot: Slot
    scheme: Scheme | None
    answers: Mapping[str, Kernel | str]
    lack: str = ""

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that ``auto`` takes: the first family's that has one."""
        return next((answer for answer in self.answers.values() if isinstance(answer, Kernel)), None)

    @property
    def reason(self) -> str:
        """Why there is no kernel; empty where there is one."""
        return "" if self.kernel else self.lack or "; ".join(f"{family}: {why}" for family, why in self.answers.items())

    def cells(self) -> tuple[str, ...]:
        """The row under ``HEADINGS``."""
        scheme, kernel = str(self.scheme or "-"), self.kernel
        if kernel is None:
            return self.name, scheme, "-", self.reason
        return self.name, scheme, f"{kernel.family} {kernel.widths}", kernel.runs

    def to_dict(self) -> dict[str, Any]:
        kernel, activation = self.kernel, self.scheme and self.scheme.activation
        return {
            "name": self.name,
            "slot": self.slot,
            "weight": self.scheme.weight.name if self.scheme else None,
            "activation": (activation.name if activation else WEIGHT_ONLY) if self.scheme else None,
            "family": kernel.family if kernel else None,
            "widths": kernel.widths if kernel else None,
            "runs": kernel.runs if kernel else None,
            "reason": self.reason or None,
            "families": {family: str(answer) for family, answer in self.answers.items()},
        }


@dataclass(frozen=True, kw_only=True)
class SchemeTable:
    """Every name in every slot on one device. ``str(table)`` is for reading; ``to_dict()`` is for machines.

    Args:
        device: the device type that was asked about.
        capability: its CUDA compute capability, else None.
        rows: shorthands first, then the weight formats of other names; each in the linear and in the moe slot.
    """

    device: str
    capability: tuple[int, int] | None
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        capability = f", compute capability {'.'.join(map(str, self.capability))}" if self.capability else ""
        lines = [f"On {self.device}{capability}, with torch {torch.__version__}, for {str(DTYPE).removeprefix('torch.')}"]
        for slot in SLOTS:
            cells = [row.cells() for row in self.rows if row.slot == slot]
            lines += [f"\nSlot {slot}, asked for {_shown(slot)}:\n", markdown.table(HEADINGS, cells)]
        # Weight formats that take the same activations share a row.
        weights: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in WEIGHT_FORMATS:
            weights[_activations(name)].append(name)
        cells = [(", ".join(names), ", ".join(activations)) for activations, names in weights.items()]
        example = '{"linear": {"weight": "mxfp4", "activation": "mxfp8"}}'
        lines += [f"\nOther activations can be asked for, such as {example}:\n"]
        return "\n".join([*lines, markdown.table(("weight formats", "activations"), cells)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "capability": self.capability and list(self.capability),
            "torch": torch.__version__,
            "dtype": str(DTYPE).removeprefix("torch."),
            "shapes": {slot: dict(shape) for slot, shape in SHAPES.items()},
            "schemes": [row.to_dict() for row in self.rows],
            "activations": {name: list(_activations(name)) for name in WEIGHT_FORMATS},
        }


def scheme_table(device: torch.device | str) -> SchemeTable:
    """The table for a device of this machine.

    Raises:
        ConfigError: no such kind of device exists.
        UnsupportedError: this machine has none of it.
    """
    kind, capability = device_key(usable_device(device))
    rows = (_row(name, slot, kind, capability) for name in NAMES for slot in SLOTS)
    return SchemeTable(device=kind, capability=capability, rows=tuple(rows))


def _activations(weight: str) -> tuple[str, ...]:
    return (*defined_activations(FORMATS[weight]), WEIGHT_ONLY)


def _shown(slot: Slot) -> str:
    shape = SHAPES[slot]
    matrix = f"N={shape['rows']}, K={shape['columns']}"
    return f"{shape['experts']} experts of {matrix}" if shape["experts"] else matrix


def _row(name: str, slot: Slot, device: str, capability: tuple[int, int] | None) -> Row:
    request = request_named(name, slot)
    if request is None:
        return Row(name=name, slot=slot, scheme=None, answers={}, lack=SHORTHANDS[name].lack(slot))
    scheme = resolve_activation(request, capability)
    problem = Problem(scheme=scheme, dtype=DTYPE, device=device, capability=capability, **SHAPES[slot])
    return Row(name=name, slot=slot, scheme=scheme, answers=kernels_for(problem))
