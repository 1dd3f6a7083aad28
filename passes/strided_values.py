"""Putting a value that is not contiguous in the place of one that was, where the readers allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .mutation import perhaps_written_operands, storages
from .weights import value_of

_RESHAPES: dict[Any, Any] = {
    "view": "reshape",
    "view_as": "reshape_as",
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
}
"""Ops that need strides which allow a view, and those that copy where there is none."""

_READ_LAYOUT = (
    {"as_strided", "stride", "storage_offset", "is_contiguous", "untyped_storage", "data_ptr", "view_as_complex"}
    | {"numpy", "__dlpack__", "tolist"}
)  # fmt: skip

_ALIGNMENT = 16
"""Bytes that kernels read at once."""


def aligned(value: torch.Tensor) -> bool:
    """Whether every row of a slice begins where kernels that read several numbers at once can begin."""
    strides = [stride for stride in value.stride()[:-1] if isinstance(stride, int)]
    return all(n * value.itemsize % _ALIGNMENT == 0 for n in (value.storage_offset(), *strides))


def needs_contiguous(node: fx.Node) -> bool:
    """Whether a reader of ``node`` or of its views looks at the memory itself: writes it, returns it, or is not torch's own.

    A write would be lost where ``use_reshape`` makes a copy, and what leaves the graph should not bring other values along.
    """
    return any(_reads_memory(user, alias) for alias in _aliases(node) for user in alias.users)


def use_reshape(node: fx.Node) -> None:
    """Let the readers of ``node`` that need a layout which can be viewed take a copy where there is none."""
    for alias in _aliases(node):
        for user in alias.users:
            if user.target in _RESHAPES and user.args[0] is alias:
                user.target = _RESHAPES[user.target]


def _aliases(node: fx.Node) -> list[fx.Node]:
    """``node`` and the nodes made of it whose values share its memory."""
    own, found = storages(node), [node]
    for alias in found:  # grows meanwhile
        found += [user for user in alias.users if user not in found and user.op != "output" and own & storages(user)]
    return found


def _reads_memory(user: fx.Node, operand: fx.Node) -> bool:
    target: Any = user.target
    if user.op not in ("call_function", "call_method") or operand in perhaps_written_operands(user):
        return True
    if target in _RESHAPES and any(isinstance(argument, torch.dtype) for argument in (*user.args, *user.kwargs.values())):
        return True  # other bytes of the same memory
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target).partition(".")
        return name[0] not in ("aten", "prims", "fxquant") or name[2].partition(".")[0] in _READ_LAYOUT
    if isinstance(target, str):
        return target in _READ_LAYOUT
    if target is getattr:
        return value_of(user) is None
    library = (getattr(target, "__module__", None) or "").partition(".")[0]
    return library not in ("torch", "_operator", "builtins", "math") or target.__name__ in _READ_LAYOUT
