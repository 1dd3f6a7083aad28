"""Which nodes of a graph write to their operands. Dynamo's graphs are not functional: a write may stand between two reads."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from .weights import value_of

_IN_PLACE_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_IN_PLACE_OPERATORS = {getattr(operator, f"i{name}") for name in _IN_PLACE_NAMES} | {operator.setitem}

_VIEWS = (
    {"getitem", "view", "reshape", "select", "narrow", "unsqueeze", "squeeze", "flatten", "unflatten", "chunk", "split"}
    | {"unbind", "expand", "view_as", "reshape_as", "expand_as", "diagonal", "movedim", "moveaxis", "unfold", "as_strided"}
    | {"transpose", "permute", "swapaxes", "swapdims", "t", "adjoint", "ravel", "tensor_split", "hsplit", "vsplit"}
)


def view_base(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, by the names of the ops in between; the node itself where it is none."""
    while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], fx.Node):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]
        if name not in _VIEWS:
            break
        node = node.args[0]
    return node


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operand nodes that ``node`` writes to."""
    if node.op not in ("call_function", "call_method"):
        return
    target: Any = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        for overload in _overloads(target):
            for index, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield from _nodes(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
        return
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name[3:-2] in _IN_PLACE_NAMES)
    if in_place or target in _IN_PLACE_OPERATORS or _asks_for_in_place(node):
        yield from _nodes(node.args[0] if node.args else node.kwargs.get("input"))
    if "out" in node.kwargs:
        yield from _nodes(node.kwargs["out"])


def perhaps_written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operand nodes that ``node`` writes to, or may write to: those of a higher-order op, whose body is not looked into."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        yield from node.all_input_nodes
    else:
        yield from written_operands(node)


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    return [getattr(target, name) for name in target.overloads()]


def _asks_for_in_place(node: fx.Node) -> bool:
    """Whether the call's ``inplace`` argument is true, by name or, as torch.nn's activations pass it, by position."""
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is True
    if not callable(node.target):
        return False
    try:
        names = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # built-in functions have none; torch spells their in-place twins with an underscore
        return False
    return "inplace" in names and names.index("inplace") < len(node.args) and node.args[names.index("inplace")] is True


def _nodes(value: Any) -> list[fx.Node]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, fx.Node)]


def storages(node: fx.Node) -> set[int]:
    """Identities of the storages behind a node's fake value; nodes that share one may alias."""
    values = value_of(node)
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return {getattr(value, "qdata", value).untyped_storage()._cdata for value in tensors if isinstance(value, Tensor)}
