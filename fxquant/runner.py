"""The function that Dynamo calls: it checks the weights that arrive and hands their components to the compiled graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .conversions import CONVERSIONS
from .errors import UnsupportedError
from .kernels.pack import is_packed, pack
from .kernels.quantized_tensor import QuantizedTensor
from .log import warn_once
from .rewrite import Calls, Packing, Slot

_record = operator.attrgetter("record")
_pack = operator.attrgetter("pack")
_members = operator.attrgetter("members")

_Columns = Callable[[tuple[Any, ...]], Sequence[Any] | None]
"""Inputs of the rewritten graph, column by column, from those of the traced one with plain weights quantised; None where a
weight is not what the graph was compiled for."""


def runner(calls: Calls, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the traced graph's inputs that calls ``compiled`` with the rewritten graph's.

    The checks stand in for the guards on quantised parameters, which ``fxquant.compile`` has Dynamo leave out. They run once
    per call for every weight of the graph, hence the itemgetters, map and zip in place of loops.
    """
    take_kept, user_inputs = _taker(calls.kept), calls.user_inputs
    copied = [slot for slot in calls.slots if slot.plain]
    columns_of = [_single(group) for group in calls.groups] + [_packed(group) for group in calls.packs]

    def run(*args: Any) -> Any:
        if user_inputs and torch.is_grad_enabled():
            args = _without_grad(args, user_inputs)
        inputs, weights = [*take_kept(args)], args
        if copied:
            given = list(args)
            for slot in copied:
                given[slot.index] = CONVERSIONS.get(args[slot.index], slot.spec, slot.name)
            weights = tuple(given)
        for columns in columns_of:
            found = columns(weights)
            if found is None:
                return _run_eagerly(calls, args)
            for column in found:
                inputs += column
        return compiled(*inputs)

    return run


def _single(group: Sequence[Slot]) -> _Columns:
    """The components of weights."""
    take, specs = _taker([slot.index for slot in group]), tuple(slot.spec for slot in group)

    def columns(weights: tuple[Any, ...]) -> Sequence[Any] | None:
        try:
            found, *components = zip(*map(_record, take(weights)), strict=True)
        except (AttributeError, ValueError):  # not a QuantizedTensor, or one with other components
            return None
        return components if found == specs else None

    return columns


def _packed(group: Sequence[Packing]) -> _Columns:
    """The components of stacks of weights; they are made where the weights that arrive are not packed in this way.

    They are not at first, with another layer of those that share the graph, and where a weight was replaced.
    """
    take_first = _taker([packing.slots[0].index for packing in group])
    take = _taker([slot.index for packing in group for slot in packing.slots])
    specs = tuple(packing.spec for packing in group)

    def ready(weights: tuple[Any, ...]) -> Sequence[Any] | None:
        try:
            packs = list(map(_pack, take_first(weights)))
            found, *components = zip(*map(_record, packs), strict=True)
            known = itertools.chain.from_iterable(map(_members, packs))
            if found == specs and all(map(operator.is_, map(_record, take(weights)), known)):
                return components
        except (AttributeError, ValueError):  # not a QuantizedTensor, or one that is not packed
            pass
        return None

    def columns(weights: tuple[Any, ...]) -> Sequence[Any] | None:
        found = ready(weights)
        if found is None and _make_packs(group, weights):
            found = ready(weights)
        return found

    return columns


def _make_packs(group: Sequence[Packing], weights: tuple[Any, ...]) -> bool:
    """Pack what is not yet; False where a weight is not what the graph was compiled for."""
    stacks = [([weights[slot.index] for slot in packing.slots], packing) for packing in group]
    for members, packing in stacks:
        for member, slot in zip(members, packing.slots, strict=True):
            if not isinstance(member, QuantizedTensor) or member.spec != slot.spec or member.device != members[0].device:
                return False
        if len(set(map(id, members))) < len(members):  # one weight in two places has one place in memory
            return False
    for members, _ in stacks:
        if not is_packed(members):
            if all(member.pack is not None for member in members):
                warn_once(
                    "fxquant backend: weights that were packed in one way are packed in another; where two compiled graphs "
                    "that read the same weights take turns, every call is slow. Compile the whole model, not its methods"
                )
            pack(members)
    return True


def _taker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """A function that picks these items of a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: [args[index] for index in indices]


def _without_grad(args: tuple[Any, ...], user_inputs: Sequence[int]) -> tuple[Any, ...]:
    tracked = [index for index in user_inputs if args[index].requires_grad]
    if not tracked:
        return args
    for index in tracked:
        if args[index].is_leaf:
            raise UnsupportedError(
                f"an input of shape {tuple(args[index].shape)} requires grad, but fxquant compiles for inference only; call "
                "the model under torch.no_grad(), or pass input.detach()"
            )
    warn_once("fxquant backend: an input carries a gradient history; it is detached, fxquant compiles for inference only")
    detached = list(args)
    for index in tracked:
        detached[index] = args[index].detach()
    return tuple(detached)


def _run_eagerly(calls: Calls, args: tuple[Any, ...]) -> Any:
    """Run the graph as traced, with whatever weights arrive: right, but not compiled."""
    for slot in calls.slots:
        weight = args[slot.index]
        if tuple(weight.shape) != slot.spec.shape or weight.dtype != slot.spec.dtype:
            raise UnsupportedError(
                f"{slot.name}: the compiled graph is for a weight of shape {slot.spec.shape} and {slot.spec.dtype}, got "
                f"{tuple(weight.shape)} and {weight.dtype}; compile the model again (torch.compiler.reset() drops old graphs)"
            )
    warn_once(
        "fxquant backend: a weight is no longer in the format that a graph was compiled for; the graph runs uncompiled. "
        "Compile the model again: torch.compiler.reset(), then fxquant.compile(model)"
    )
    given = list(args)
    for slot in calls.slots:
        if slot.plain:
            given[slot.index] = CONVERSIONS.get(given[slot.index], slot.spec, slot.name)
    with torch.no_grad():
        return calls.traced(*given)
