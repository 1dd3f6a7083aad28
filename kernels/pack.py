"""Packing: the stored bytes of several weights as those of one stack, which one product reads.

A pack exists once: its members hold views of its memory, so that a write to a member is a write to the pack, and the memory
that they held before is freed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import numerics
from .quantized_tensor import QuantizedTensor
from .weight_spec import WeightSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A stack of weights.

    It refers to what its members hold and not to the members themselves: they can be moved and swapped as other tensors can.
    A member that has come to hold something else has another record than the pack knows.

    Args:
        record: (spec with shards, *stacked components).
        members: the members' records in order.
    """

    record: tuple[Any, ...]
    members: tuple[tuple[Any, ...], ...]


@functools.cache
def packed_spec(specs: tuple[WeightSpec, ...]) -> WeightSpec:
    """Spec of the stack of weights that differ in their rows at most; one object for equal arguments."""
    rows = tuple(spec.rows for spec in specs)
    return replace(specs[0], rows=sum(rows), shards=rows)


def is_packed(weights: Sequence[QuantizedTensor]) -> bool:
    """Whether the weights are the members of one pack, in this order."""
    pack = weights[0].pack
    return (
        pack is not None
        and len(pack.members) == len(weights)
        and all(weight.record is member for weight, member in zip(weights, pack.members, strict=True))
    )


def pack(weights: Sequence[QuantizedTensor]) -> Pack:
    """Stack weights of equal format and columns; each then holds views of the stack.

    It takes their memory twice for the moment. What shares a weight's memory without being the weight itself (a detached
    alias, a state dict of before) keeps the old memory, and writes to it are not seen any more.
    """
    spec = packed_spec(tuple(weight.spec for weight in weights))
    format = spec.scheme.weight
    with torch.inference_mode(False), torch.no_grad():
        components = _joined(weights) or numerics.stack_shards([weight.components for weight in weights], format)
        for weight, parts in zip(weights, numerics.split_shards(components, format, spec.shards), strict=True):
            weight._hold([_no_view(part) for part in parts], weight.spec)
    made = Pack(record=(spec, *components), members=tuple(weight.record for weight in weights))
    for weight in weights:
        weight.pack = made
    return made


def _no_view(part: Tensor) -> Tensor:
    """The same memory as a tensor that autograd does not know as a view: tracing would bring in the base of one."""
    return part.new_empty(0).set_(part)  # type: ignore[call-overload, no-any-return]


def _joined(weights: Sequence[QuantizedTensor]) -> list[Tensor] | None:
    """The stack of weights that lie behind one another already, as aliases of a pack's members do."""
    stacked = []
    for column in zip(*(weight.components for weight in weights), strict=True):
        first, end = column[0], column[0].storage_offset()
        for part in column:
            if not part.is_contiguous() or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
                return None
            if part.storage_offset() != end:
                return None
            end += part.numel()
        shape = (sum(part.shape[0] for part in column), *first.shape[1:]) if first.dim() else (len(column),)
        whole = first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), shape)  # type: ignore[call-overload]
        stacked.append(whole)
    return stacked
