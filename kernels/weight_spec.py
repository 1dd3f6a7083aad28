"""What a quantised weight is but its bytes, and the functions of such a weight given as its components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import numerics, ops
from .errors import UnsupportedError
from .formats import Scheme, activation_format_named, weight_format_named


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """Everything about a quantised weight but its bytes; equal specs can share one compiled graph.

    Args:
        scheme: formats of the weight and of the activation it is multiplied with.
        rows, columns: out features N and in features K of the stored matrix (columns are the contraction dimension).
        dtype: the logical dtype: what dequantising gives.
        contraction: logical dimension that is contracted: -1 for [N, K] (nn.Linear), -2 for [K, N] (Conv1D, ``weight.t()``).
        leading: logical leading dimensions over which the one matrix is broadcast (``expand``).
        backend: kernel family that products use.
    """

    scheme: Scheme
    rows: int
    columns: int
    dtype: torch.dtype
    contraction: int = -1
    leading: tuple[int, ...] = ()
    backend: str = "auto"

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = (self.rows, self.columns) if self.contraction == -1 else (self.columns, self.rows)
        return (*self.leading, *matrix)

    def to_dict(self) -> dict[str, Any]:
        """The spec as strings, numbers and lists, for files; ``from_dict`` is the inverse."""
        activation = self.scheme.activation
        return {
            "weight": self.scheme.weight.name,
            "activation": activation.name if activation else None,
            "rows": self.rows,
            "columns": self.columns,
            "dtype": str(self.dtype).removeprefix("torch."),
            "contraction": self.contraction,
            "leading": list(self.leading),
            "backend": self.backend,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> WeightSpec:
        """The spec that ``to_dict`` described.

        Raises:
            UnsupportedError: a format that this version does not know.
        """
        given = dict(fields)
        weight, activation = weight_format_named(given.pop("weight")), given.pop("activation")
        given["dtype"], given["leading"] = getattr(torch, given["dtype"]), tuple(given["leading"])
        return cls(
            scheme=Scheme(weight=weight, activation=activation_format_named(activation) if activation else None), **given
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSpec:
        return self

    def transposed(self) -> WeightSpec:
        return replace(self, contraction=-3 - self.contraction)


def dequantized(components: list[Tensor], spec: WeightSpec, dtype: torch.dtype) -> Tensor:
    """Float values of a weight given as components, in its logical shape."""
    values = numerics.dequantize(components, spec.scheme.weight, dtype)
    if spec.contraction == -2:
        values = values.mT
    return values.expand(spec.shape) if spec.leading else values


def linear(x: Tensor, components: list[Tensor], spec: WeightSpec, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ w.T + bias`` under the weight's scheme, x (..., K) -> (..., N), through the two ops of ``ops``."""
    activation = spec.scheme.activation
    x_components = [x] if activation is None else torch.ops.fxquant.quantize_activation(x, activation.name)
    name = ops.NO_ACTIVATION if activation is None else activation.name
    result: Tensor = torch.ops.fxquant.scaled_mm(
        x_components, components, bias, name, spec.scheme.weight.name, out_dtype, spec.backend
    )
    return result


def quantized_components(
    values: Tensor, spec: WeightSpec, reduce_amax: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Components for float values of the spec's logical shape; refuses values that are not finite."""

    def checked(magnitude: Tensor) -> Tensor:
        if reduce_amax is not None:
            magnitude = reduce_amax(magnitude)
        if magnitude.device.type != "meta" and not bool(magnitude.isfinite().all()):
            raise UnsupportedError(
                f"cannot quantise a weight of shape {tuple(values.shape)} to {spec.scheme.weight.name}: it holds NaN or "
                "infinity; check the checkpoint, or leave the layer as it is (ignore)"
            )
        return magnitude

    matrix = values if spec.contraction == -1 else values.mT
    return [c.contiguous() for c in numerics.quantize(matrix, spec.scheme.weight, checked)]
