"""The one table that says which kernel serves a scheme on a device, or why none can.

Decided before any weight moves; everything that prints or picks a kernel asks here. A kernel is described by name; the ops
(``ops.py``) hold the code. Adding a kernel is a function here and an entry in ``_TABLE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedError
from .formats import FORMATS, Format, Scheme, defined_activations

FAMILIES = ("auto", "torch", "triton", "reference")
"""What ``linear_backend`` and ``moe_backend`` accept."""

NATIVE_MX_CAPABILITY = (10, 0)
FP8_GEMM_CAPABILITY = (8, 9)
ROW_WISE_ON_CPU = "2.13"
SCALED_MM = "torch._scaled_mm"
INT8_PACK = "torch._weight_int8pack_mm"
"""What a kernel of the torch family runs."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One weight's matrix product: y = x @ w.T with w of shape (rows, columns), or grouped over ``experts`` such matrices.

    Args:
        scheme: formats of the weight and of the activation.
        rows, columns: out features N and in features K.
        dtype: dtype of the unquantised activation and of the result.
        experts: number of matrices of a grouped product; 0: a single one.
        device: ``cpu``, ``cuda`` or ``meta`` (answered as for the CPU).
        capability: the CUDA compute capability, else None.
    """

    scheme: Scheme
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    experts: int = 0
    device: str = "cpu"
    capability: tuple[int, int] | None = None

    @classmethod
    def on(cls, device: torch.device, scheme: Scheme, rows: int, columns: int, **more: Any) -> Problem:
        """The problem on this device."""
        kind, capability = device_key(device)
        return cls(scheme=scheme, rows=rows, columns=columns, device=kind, capability=capability, **more)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute a ``Problem``: its family, the operand widths (W8A8, ...) and what runs."""

    family: str
    widths: str
    runs: str

    def __str__(self) -> str:
        return f"{self.family} {self.widths} ({self.runs})"


def device_key(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """(device type, CUDA capability or None) of a device."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_capability(device)
    return device.type, None


def default_activation(weight: Format, capability: tuple[int, int] | None) -> Format | None:
    """The activation format where none was asked for; it depends on the device, never on the batch.

    FP8 weights take FP8 activations (per token; 1x128 for block weights). The 4-bit, MX and INT8 formats stay weight-only
    below compute capability 10.0 and take their own format from there on.
    """
    if weight.element == "e4m3" and weight.scale_dtype == torch.float32:
        return FORMATS["fp8_per_block_dynamic" if weight.block == (128, 128) else "fp8_per_token"]
    native = capability is not None and capability >= NATIVE_MX_CAPABILITY
    return weight if native and weight.activation else None


def _widths(scheme: Scheme) -> str:
    activation = 16 if scheme.activation is None else 4 if scheme.activation.packed else 8
    return f"W{4 if scheme.weight.packed else 8}A{activation}"


def _undefined(scheme: Scheme) -> str | None:
    if scheme.defined:
        return None
    able = ", ".join(defined_activations(scheme.weight)) or "no other"
    return f"no product of {scheme} is defined; {scheme.weight.name} takes 'none' (weight-only) or {able}"


def _torch(problem: Problem) -> Kernel | str:
    if problem.experts:
        return "this version of fxquant uses no library kernel for experts"
    if problem.scheme.weight.element == "int8" and problem.scheme.activation is None:
        if problem.device not in ("cpu", "meta") or problem.dtype != torch.bfloat16:
            return f"{INT8_PACK} is used on the CPU for bfloat16, not on {problem.device} for {problem.dtype}"
        if problem.columns % 16 or not problem.columns:  # it reads beyond the end
            return f"{INT8_PACK} needs K to be a multiple of 16, got K={problem.columns}"
        return Kernel(family="torch", widths=_widths(problem.scheme), runs=INT8_PACK)
    weight, activation = problem.scheme.weight, problem.scheme.activation
    coarse = {"fp8_per_tensor_static", "fp8_per_channel_static"}
    dynamic = {"fp8_per_token", "fp8_per_tensor_dynamic"}
    if weight.name not in coarse or activation is None or activation.name not in dynamic:
        return f"{SCALED_MM} takes FP8 with tensor, channel or token scales, not {problem.scheme}"
    if problem.device == "cuda":
        if problem.capability is None or problem.capability < FP8_GEMM_CAPABILITY:
            return f"{SCALED_MM} needs compute capability 8.9 or higher, this device has {problem.capability}"
        if problem.rows % 16 or problem.columns % 16 or not problem.columns:
            return f"{SCALED_MM} on CUDA needs N and K to be multiples of 16, got N={problem.rows}, K={problem.columns}"
    elif problem.device in ("cpu", "meta"):
        if torch.__version__ < ROW_WISE_ON_CPU:
            return f"{SCALED_MM} on the CPU takes scales per row from torch {ROW_WISE_ON_CPU} on, this is {torch.__version__}"
    else:
        return f"{SCALED_MM} is used on cpu and cuda, not on {problem.device}"
    return Kernel(family="torch", widths=_widths(problem.scheme), runs=SCALED_MM)


def _reference(problem: Problem) -> Kernel | str:
    runs = "dequantise, then matmul" if problem.scheme.activation is None else "quantise, dequantise, float32 matmul"
    return Kernel(family="reference", widths=_widths(problem.scheme), runs=runs)


def _triton(problem: Problem) -> Kernel | str:
    return f"this version of fxquant has no Triton kernel for {problem.scheme}"


_TABLE: tuple[tuple[str, Callable[[Problem], Kernel | str]], ...] = (
    ("triton", _triton),
    ("torch", _torch),
    ("reference", _reference),
)
"""(family, does it serve the problem?) in the order of preference."""


def kernels_for(problem: Problem) -> dict[str, Kernel | str]:
    """Every family's answer for a problem: its kernel, or the reason it has none."""
    undefined = _undefined(problem.scheme)
    return {family: undefined or answer(problem) for family, answer in _TABLE}


def choose(problem: Problem, family: str = "auto") -> Kernel:
    """The kernel of a family (``auto``: the first that serves).

    Raises:
        UnsupportedError: no kernel serves the problem, or the pinned family does not (or is none); lists those that do and why
            not the rest.
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"there is no kernel family {family!r}; use one of: {', '.join(FAMILIES)}")
    if undefined := _undefined(problem.scheme):
        raise UnsupportedError(undefined)
    answers = kernels_for(problem)
    pinned = answers.values() if family == "auto" else [answers[family]]
    for answer in pinned:
        if isinstance(answer, Kernel):
            return answer
    able = [name for name, answer in answers.items() if isinstance(answer, Kernel)]
    asked = answers if family == "auto" else {family: answers[family]}
    reasons = "; ".join(f"{name}: {answer}" for name, answer in asked.items() if isinstance(answer, str))
    remedy = (
        f"use {' or '.join(map(repr, able))}, or 'auto'" if able else "choose another scheme or leave the layer out (ignore)"
    )
    experts = f" for {problem.experts} experts" if problem.experts else ""
    raise UnsupportedError(
        f"no {'kernel' if family == 'auto' else repr(family) + ' kernel'} for {problem.scheme} with N={problem.rows}, "
        f"K={problem.columns}{experts} on {problem.device}: {reasons}; {remedy}"
    )
