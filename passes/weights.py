"""Weights in a Dynamo graph: which node stands for which, through transposes, casts and the choice of experts, and where it is
multiplied. ``expert_sites`` finds the products with stacks of experts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten

LINEAR = {F.linear, torch._C._nn.linear, aten.linear.default}
MATMUL = {torch.matmul, operator.matmul, torch.mm, aten.matmul.default, aten.mm.default, "matmul", "mm", "__matmul__"}
ADDMM = {torch.addmm, aten.addmm.default, "addmm"}

_SWAPS_LAST_TWO = {torch.t, aten.t.default, aten.numpy_T.default, "t"}
_SWAPS_GIVEN = {torch.transpose, aten.transpose.int, "transpose", "swapaxes", "swapdims"}
_PERMUTES = {torch.permute, aten.permute.default, "permute"}
_SELECTS = {torch.select, aten.select.int, "select"}
_INDEXES = {operator.getitem, aten.index.Tensor}
UNBINDS = {torch.unbind, aten.unbind.int, "unbind"}
_KEEPS = {torch.detach, aten.detach.default, aten.alias.default, "detach", "contiguous", "requires_grad_"}
_CASTS = {"to", "float", "half", "bfloat16", "double", "type_as", "type", aten._to_copy.default, aten.to.dtype}
_TRANSPOSING_ATTRIBUTES = ("T", "mT")


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """A node whose value is a weight, perhaps transposed or cast, or some experts of one.

    Args:
        source: the placeholder of the weight.
        swapped: whether the last two dimensions are exchanged.
        dtype: dtype of the node's value.
        index: what chose among the experts of a stack: a number, or a node of numbers; None: nothing did.
        chooser: the node that did.
    """

    source: fx.Node
    swapped: bool
    dtype: torch.dtype
    index: Any = None
    chooser: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """One product y = x @ w.T + bias in the graph.

    Args:
        node: the node that computes it.
        x: the activation, (..., K).
        weight: the weight's use.
        contraction: dimension of the placeholder's weight that is contracted: -1 for [N, K], -2 for [K, N].
        bias: (N,) or None.
    """

    node: fx.Node
    x: fx.Node
    weight: WeightUse
    contraction: int
    bias: fx.Node | None


def value_of(node: fx.Node) -> Any:
    """The fake value that tracing left on a node (Dynamo's or the exporter's)."""
    return node.meta.get("example_value", node.meta.get("val"))


def weight_use(node: Any, is_weight: Callable[[fx.Node], bool]) -> WeightUse | None:
    """``node`` as a use of a weight, or None; transposes of the last two dimensions, casts and one index are looked through."""
    swapped, index, chooser = False, None, None
    if not isinstance(node, fx.Node):
        return None
    start = node
    while node.op != "placeholder":
        chosen = _chosen_experts(node) if index is None else None
        if chosen is not None:
            chooser, (index, node) = node, chosen
            continue
        step = _step(node)
        if step is None:
            return None
        swapped ^= step
        node = node.args[0]
        if not isinstance(node, fx.Node):
            return None
    value, source = value_of(start), value_of(node)
    if not is_weight(node) or not isinstance(value, Tensor) or source.dim() not in (2, 3):
        return None
    if value.dim() != source.dim() and (index is None or value.dim() != 2):
        return None
    return WeightUse(source=node, swapped=swapped, dtype=value.dtype, index=index, chooser=chooser)


def _chosen_experts(node: fx.Node) -> tuple[Any, fx.Node] | None:
    """(index, the stack's node) where a node takes matrices out of a stack of experts."""
    if node.op not in ("call_function", "call_method") or len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return None
    stack, rest = node.args[0], node.args[1:]
    if node.target in _SELECTS and len(rest) == 2 and rest[0] in (0, -3):
        index: Any = rest[1]
    elif node.target in _INDEXES:
        along = {*stack.args[1:], *stack.kwargs.values()} if stack.target in UNBINDS else {None}
        if isinstance(stack.args[0] if stack.args else None, fx.Node) and along <= {0, -3}:
            stack = stack.args[0]  # type: ignore[assignment]
        wrapped = list if node.target is aten.index.Tensor else tuple  # a list in brackets is an index by itself
        index = rest[0][0] if isinstance(rest[0], wrapped) and len(rest[0]) == 1 else rest[0]
    else:
        return None
    value = value_of(stack)
    if not isinstance(value, Tensor) or value.dim() != 3:
        return None
    if isinstance(index, fx.Node):
        numbers = value_of(index)
        one = isinstance(numbers, (int, torch.SymInt))
        many = isinstance(numbers, Tensor) and numbers.dim() < 2 and numbers.dtype in (torch.int32, torch.int64)
        return (index, stack) if one or many else None
    return (index, stack) if isinstance(index, int) and not isinstance(index, bool) else None


def _step(node: fx.Node) -> bool | None:
    """Whether this node swaps its operand's last two dimensions; None where it does something else than transpose or cast."""
    target, rest = node.target, node.args[1:]
    operand = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(operand, Tensor) or operand.dim() not in (2, 3):
        return None
    last = operand.dim() - 1
    if target in _SWAPS_LAST_TWO or (target is getattr and rest and rest[0] in _TRANSPOSING_ATTRIBUTES):
        return True if last == 1 or rest == ("mT",) else None
    if target in _SWAPS_GIVEN or target in _PERMUTES:
        given = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        if not isinstance(given, (list, tuple)):
            return None
        dims = [dim % operand.dim() for dim in given if isinstance(dim, int)]
        if len(dims) < len(given):
            return None
        if target in _PERMUTES:
            return {(0, 1): False, (1, 0): True, (0, 1, 2): False, (0, 2, 1): True}.get(tuple(dims))
        return True if sorted(dims) == [last - 1, last] else False if len(set(dims)) == 1 else None
    if target is getattr and rest and rest[0] == "data":
        return False
    if target in _KEEPS:
        return False
    if target in _CASTS:
        before, after = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None, value_of(node)
        floating = isinstance(after, Tensor) and after.is_floating_point() and after.dtype.itemsize > 1
        return False if floating and isinstance(before, Tensor) and before.device == after.device else None
    return None


def arguments(node: fx.Node, *names: str) -> list[Any]:
    """Arguments by position or name, None where absent."""
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in enumerate(names)]


def match_site(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> Site | None:
    """The product that ``node`` computes with a weight, or None."""
    bias: Any = None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in LINEAR:
        x, weight, bias = arguments(node, "input", "weight", "bias")
        contracted = -1
    elif node.target in MATMUL:
        x, weight = arguments(node, "input", "other" if node.target is torch.matmul else "mat2")
        contracted = -2
    elif node.target in ADDMM and node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1:
        bias, x, weight = arguments(node, "input", "mat1", "mat2")
        contracted = -2
        if not isinstance(bias, fx.Node) or not isinstance(value_of(bias), Tensor) or value_of(bias).dim() != 1:
            return None
    else:
        return None
    use = weight_use(weight, is_weight)
    if (
        use is None
        or value_of(weight).dim() != 2
        or not isinstance(x, fx.Node)
        or not isinstance(value_of(x), Tensor)
        or "out" in node.kwargs
    ):
        return None
    if weight_use(x, is_weight) is not None or not value_of(x).is_floating_point() or value_of(x).dim() == 0:
        return None
    contraction = -3 - contracted if use.swapped else contracted
    return Site(node=node, x=x, weight=use, contraction=contraction, bias=bias)


def sites(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Iterator[Site]:
    """Every product with a weight, in graph order."""
    for node in list(graph.nodes):
        site = match_site(node, is_weight)
        if site is not None:
            yield site
