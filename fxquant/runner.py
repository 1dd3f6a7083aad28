"""The function that Dynamo calls: it checks the weights that arrive and hands their components to the compiled graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .conversions import CONVERSIONS
from .errors import UnsupportedError
from .log import warn_once
from .rewrite import Calls

_record = operator.attrgetter("record")


def runner(calls: Calls, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the traced graph's inputs that calls ``compiled`` with the rewritten graph's.

    The checks stand in for the guards on quantised parameters, which ``fxquant.compile`` has Dynamo leave out. They run once
    per call for every weight of the graph, hence the itemgetters, map and zip in place of loops.
    """
    take_kept, user_inputs = _taker(calls.kept), calls.user_inputs
    stored = [
        (_taker([slot.index for slot in group]), tuple(slot.spec for slot in group))
        for group in calls.groups
        if not group[0].plain
    ]
    copied = [group for group in calls.groups if group[0].plain]

    def run(*args: Any) -> Any:
        if user_inputs and torch.is_grad_enabled():
            args = _without_grad(args, user_inputs)
        inputs = [*take_kept(args)]
        for take, specs in stored:
            try:
                found, *columns = zip(*map(_record, take(args)), strict=True)
            except (AttributeError, ValueError):  # not a QuantizedTensor, or one with other components
                return _run_eagerly(calls, args)
            if found != specs:
                return _run_eagerly(calls, args)
            for column in columns:
                inputs += column
        for group in copied:
            _, *columns = zip(*(CONVERSIONS.get(args[s.index], s.spec, s.name).record for s in group), strict=True)
            for column in columns:
                inputs += column
        return compiled(*inputs)

    return run


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
