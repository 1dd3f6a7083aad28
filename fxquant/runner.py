"""The function that Dynamo calls: it checks the weights that arrive and hands their components to the compiled graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .conversions import CONVERSIONS
from .errors import UnsupportedError
from .kernels.quantized_tensor import QuantizedTensor
from .log import warn_once
from .rewrite import Rewritten


def runner(rewritten: Rewritten, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the traced graph's inputs that calls ``compiled`` with the rewritten graph's.

    The checks stand in for the guards on quantised parameters, which ``fxquant.compile`` has Dynamo leave out.
    """
    stored = [(slot.index, slot.spec, slot.spec.scheme.weight.components) for slot in rewritten.slots if not slot.plain]
    copied = [slot for slot in rewritten.slots if slot.plain]
    kept, user_inputs = rewritten.kept, rewritten.user_inputs
    take_kept = operator.itemgetter(*kept) if len(kept) > 1 else lambda args: [args[index] for index in kept]

    def run(*args: Any) -> Any:
        if user_inputs and torch.is_grad_enabled():
            args = _without_grad(args, user_inputs)
        inputs = [*take_kept(args)]
        for index, spec, components in stored:
            weight = args[index]
            if type(weight) is not QuantizedTensor or (weight.spec is not spec and weight.spec != spec):
                return _run_eagerly(rewritten, args)
            for name in components:
                inputs.append(getattr(weight, name))
        for slot in copied:
            inputs.extend(CONVERSIONS.get(args[slot.index], slot.spec, slot.name).components)
        return compiled(*inputs)

    return run


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


def _run_eagerly(rewritten: Rewritten, args: tuple[Any, ...]) -> Any:
    """Run the graph as traced, with whatever weights arrive: right, but not compiled."""
    for slot in rewritten.slots:
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
    for slot in rewritten.slots:
        if slot.plain:
            given[slot.index] = CONVERSIONS.get(given[slot.index], slot.spec, slot.name)
    with torch.no_grad():
        return rewritten.traced(*given)
