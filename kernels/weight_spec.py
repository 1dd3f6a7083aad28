"""What a quantised weight is but its bytes, and the functions of such a weight given as its components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import numerics, ops
from .errors import UnsupportedError
from .formats import WEIGHT_FORMATS, Scheme, activation_format_named, weight_format_named


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """Everything about a quantised weight but its bytes; equal specs can share one compiled graph.

    Args:
        scheme: formats of the weight and of the activation it is multiplied with.
        rows, columns: out features N and in features K of the stored matrix (columns are the contraction dimension).
        dtype: the logical dtype: what dequantising gives.
        contraction: logical dimension that is contracted: -1 for [N, K] (nn.Linear), -2 for [K, N] (Conv1D, ``weight.t()``).
        leading: logical leading dimensions over which the one matrix is broadcast (``expand``).
        experts: number of such matrices in a 3-D weight; 0: the weight is one matrix.
        shards: rows of the matrices that a matrix is stacked of (gate and up), each with scales of its own; empty: it is one.
        interleaved: whether the logical rows take turns between the shards (gpt-oss); stored they are stacked.
        backend: kernel family that products use.
    """

    scheme: Scheme
    rows: int
    columns: int
    dtype: torch.dtype
    contraction: int = -1
    leading: tuple[int, ...] = ()
    experts: int = 0
    shards: tuple[int, ...] = ()
    interleaved: bool = False
    backend: str = "auto"

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = (self.rows, self.columns) if self.contraction == -1 else (self.columns, self.rows)
        return (*self.leading, *((self.experts,) if self.experts else ()), *matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of the components."""
        return max(self.experts, 1) * sum(self.scheme.weight.nbytes(rows, self.columns) for rows in self.shards or (self.rows,))

    def to_dict(self) -> dict[str, Any]:
        """The spec as strings, numbers and lists, for files; ``from_dict`` is the inverse."""
        activation = self.scheme.activation
        return {
            "weight": self.scheme.weight.name,
            "activation": activation.name if activation else None,
            "scale_search": self.scheme.scale_search,
            "rows": self.rows,
            "columns": self.columns,
            "dtype": str(self.dtype).removeprefix("torch."),
            "contraction": self.contraction,
            "leading": list(self.leading),
            "experts": self.experts,
            "shards": list(self.shards),
            "interleaved": self.interleaved,
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
        scheme = Scheme(
            weight=weight,
            activation=activation_format_named(activation) if activation else None,
            scale_search=given.pop("scale_search", "amax"),
        )
        given["dtype"] = getattr(torch, given["dtype"])
        for name in ("leading", "shards"):
            given[name] = tuple(given.get(name, ()))
        return cls(scheme=scheme, **given)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSpec:
        return self

    def transposed(self) -> WeightSpec:
        return replace(self, contraction=-3 - self.contraction)


def take_turns(values: Tensor, dim: int, shards: int) -> Tensor:
    """Stacked shards of equal size along ``dim`` (negative) as interleaved ones."""
    return torch.unflatten(values, dim, (shards, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def stack_turns(values: Tensor, dim: int, shards: int) -> Tensor:
    """The inverse of ``take_turns``."""
    return torch.unflatten(values, dim, (-1, shards)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def dequantized(components: list[Tensor], spec: WeightSpec, dtype: torch.dtype) -> Tensor:
    """Float values of a weight given as components, in its logical shape."""
    values = numerics.dequantize(components, spec.scheme.weight, dtype, shards=spec.shards, columns=spec.columns)
    if spec.interleaved:
        values = take_turns(values, -2, len(spec.shards))
    if spec.contraction == -2:
        values = values.mT
    return values.expand(spec.shape) if spec.leading else values


def _quantized_activation(x: Tensor, spec: WeightSpec) -> tuple[list[Tensor], str]:
    activation = spec.scheme.activation
    if activation is None:
        return [x], ops.NO_ACTIVATION
    return torch.ops.fxquant.quantize_activation(x, activation.name), activation.name


def linear(x: Tensor, components: list[Tensor], spec: WeightSpec, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ w.T + bias`` under the weight's scheme, x (..., K) -> (..., N), through the two ops of ``ops``."""
    if spec.interleaved and bias is not None:
        bias = stack_turns(bias, -1, len(spec.shards))
    x_components, name = _quantized_activation(x, spec)
    result: Tensor = torch.ops.fxquant.scaled_mm(
        x_components, components, bias, name, spec.scheme.weight.name, out_dtype, spec.shards, spec.backend
    )
    return take_turns(result, -1, len(spec.shards)) if spec.interleaved else result


def grouped(
    x: Tensor,
    components: list[Tensor],
    spec: WeightSpec,
    out_dtype: torch.dtype,
    *,
    offs: Tensor | None = None,
    expert_ids: Tensor | None = None,
) -> Tensor:
    """Products with an expert of each row: x (T, K) -> (T, N), or x (E, T, K) -> (E, T, N); see ``ops.scaled_grouped_mm``."""
    if offs is not None and spec.scheme.has_joint_activation_scale:
        x = ops.without_padding(x, offs)
    x_components, name = _quantized_activation(x, spec)
    result: Tensor = torch.ops.fxquant.scaled_grouped_mm(
        x_components, components, offs, expert_ids, name, spec.scheme.weight.name, out_dtype, spec.shards, spec.backend
    )
    return take_turns(result, -1, len(spec.shards)) if spec.interleaved else result


def quantized_components(
    values: Tensor, spec: WeightSpec, reduce_amax: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Components for float values of the spec's logical shape; refuses values that are not finite and formats to read only."""

    def checked(magnitude: Tensor) -> Tensor:
        if reduce_amax is not None:
            magnitude = reduce_amax(magnitude)
        if magnitude.device.type != "meta" and not bool(magnitude.isfinite().all()):
            raise UnsupportedError(
                f"cannot quantise a weight of shape {tuple(values.shape)} to {spec.scheme.weight.name}: it holds NaN or "
                "infinity; check the checkpoint, or leave the layer as it is (ignore)"
            )
        return magnitude

    scheme = spec.scheme
    if not scheme.weight.weight:
        raise UnsupportedError(
            f"floats cannot be converted to {scheme.weight.name}, which comes from checkpoints only; use one of: "
            f"{', '.join(WEIGHT_FORMATS)}"
        )
    matrix = values if spec.contraction == -1 else values.mT
    if spec.interleaved:
        matrix = stack_turns(matrix, -2, len(spec.shards))
    components = numerics.quantize(matrix, scheme.weight, checked, scale_search=scheme.scale_search, shards=spec.shards)
    return [component.contiguous() for component in components]
