"""The one table that says which kernel serves a scheme on a device, or why none can.

Decided before any weight moves; everything that prints or picks a kernel asks here. A kernel is described by name; the ops
(``ops.py``) hold the code. Adding a kernel is a function here and an entry in ``_LINEAR``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import UnsupportedError
from .formats import FORMATS, Format, Scheme
from .numerics import has_numerics

FAMILIES = ("auto", "torch", "triton", "reference")
"""What ``linear_backend`` and ``moe_backend`` accept."""

NATIVE_MX_CAPABILITY = (10, 0)
FP8_GEMM_CAPABILITY = (8, 9)
ROW_WISE_ON_CPU = "2.13"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One weight's matrix product: y = x @ w.T with w of shape (rows, columns).

    Args:
        scheme: formats of the weight and of the activation.
        rows, columns: out features N and in features K.
        device: ``cpu``, ``cuda`` or ``meta`` (answered as for the CPU).
        capability: the CUDA compute capability, else None.
    """

    scheme: Scheme
    rows: int
    columns: int
    device: str = "cpu"
    capability: tuple[int, int] | None = None

    @classmethod
    def on(cls, device: torch.device, scheme: Scheme, rows: int, columns: int) -> Problem:
        """The problem on this device."""
        kind, capability = device_key(device)
        return cls(scheme=scheme, rows=rows, columns=columns, device=kind, capability=capability)


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
    weight = 4 if scheme.weight.element == "e2m1" else 8
    activation = 16 if scheme.activation is None else 4 if scheme.activation.element == "e2m1" else 8
    return f"W{weight}A{activation}"


def _missing_numerics(scheme: Scheme) -> str | None:
    for format in (scheme.weight, scheme.activation):
        if format is not None and not has_numerics(format):
            return f"this version of fxquant has no numerics for {format.name}"
    return None


def _torch(problem: Problem) -> Kernel | str:
    weight, activation = problem.scheme.weight, problem.scheme.activation
    coarse = {"fp8_per_tensor_static", "fp8_per_channel_static"}
    dynamic = {"fp8_per_token", "fp8_per_tensor_dynamic"}
    if weight.name not in coarse or activation is None or activation.name not in dynamic:
        return f"torch._scaled_mm takes FP8 with tensor, channel or token scales, not {problem.scheme}"
    if problem.device == "cuda":
        if problem.capability is None or problem.capability < FP8_GEMM_CAPABILITY:
            return f"torch._scaled_mm needs compute capability 8.9 or higher, this device has {problem.capability}"
        if problem.rows % 16 or problem.columns % 16 or not problem.columns:
            return f"torch._scaled_mm on CUDA needs N and K to be multiples of 16, got N={problem.rows}, K={problem.columns}"
    elif problem.device in ("cpu", "meta"):
        if torch.__version__ < ROW_WISE_ON_CPU:
            return (
                f"torch._scaled_mm on the CPU takes scales per row from torch {ROW_WISE_ON_CPU} on, this is {torch.__version__}"
            )
    else:
        return f"torch._scaled_mm is used on cpu and cuda, not on {problem.device}"
    return Kernel(family="torch", widths=_widths(problem.scheme), runs="torch._scaled_mm")


def _reference(problem: Problem) -> Kernel | str:
    if missing := _missing_numerics(problem.scheme):
        return missing
    runs = "dequantise, then matmul" if problem.scheme.activation is None else "quantise, dequantise, float32 matmul"
    return Kernel(family="reference", widths=_widths(problem.scheme), runs=runs)


def _triton(problem: Problem) -> Kernel | str:
    return f"this version of fxquant has no Triton kernel for {problem.scheme}"


_LINEAR: tuple[tuple[str, Callable[[Problem], Kernel | str]], ...] = (
    ("triton", _triton),
    ("torch", _torch),
    ("reference", _reference),
)
"""(family, does it serve the problem?) in the order of preference."""


def linear_kernels(problem: Problem) -> dict[str, Kernel | str]:
    """Every family's answer for a problem: its kernel, or the reason it has none."""
    return {family: answer(problem) for family, answer in _LINEAR}


def choose_linear(problem: Problem, family: str = "auto") -> Kernel:
    """The kernel of a family (``auto``: the first that serves).

    Raises:
        UnsupportedError: no kernel serves the problem, or the pinned family does not (or is none); lists those that do and why
            not the rest.
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"there is no kernel family {family!r}; use one of: {', '.join(FAMILIES)}")
    answers = linear_kernels(problem)
    pinned = answers.values() if family == "auto" else [answers[family]]
    for answer in pinned:
        if isinstance(answer, Kernel):
            return answer
    able = [name for name, answer in answers.items() if isinstance(answer, Kernel)]
    reasons = "; ".join(f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str))
    remedy = f"use one of {able} or 'auto'" if able else "choose another scheme or leave the layer out (ignore)"
    raise UnsupportedError(
        f"no {'kernel' if family == 'auto' else repr(family) + ' kernel'} for {problem.scheme} with N={problem.rows}, "
        f"K={problem.columns} on {problem.device}: {reasons}; {remedy}"
    )
