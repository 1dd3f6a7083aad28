"""Weights in a Dynamo graph: which node stands for which, through transposes and casts, and where it is multiplied."""

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
_KEEPS = {torch.detach, aten.detach.default, aten.alias.default, "detach", "contiguous", "requires_grad_"}
_CASTS = {"to", "float", "half", "bfloat16", "double", "type_as", "type", aten._to_copy.default, aten.to.dtype}
_TRANSPOSING_ATTRIBUTES = ("T", "mT")


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """A node whose value is a weight, perhaps transposed or cast.

    Args:
        source: the placeholder of the weight.
        swapped: whether the two dimensions are exchanged.
        dtype: dtype of the node's value.
    """

    source: fx.Node
    swapped: bool
    dtype: torch.dtype


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
    """``node`` as a use of a weight, or None; only transposes of two dimensions and casts are looked through."""
    swapped = False
    if not isinstance(node, fx.Node):
        return None
    start = node
    while node.op != "placeholder":
        step = _step(node)
        if step is None:
            return None
        swapped ^= step
        node = node.args[0]
        if not isinstance(node, fx.Node):
            return None
    value = value_of(start)
    if not is_weight(node) or not isinstance(value, Tensor) or value.dim() != 2:
        return None
    return WeightUse(source=node, swapped=swapped, dtype=value.dtype)


def _step(node: fx.Node) -> bool | None:
    """Whether this node swaps its operand's two dimensions; None where it does something else than transpose or cast."""
    target, rest = node.target, node.args[1:]
    if target in _SWAPS_LAST_TWO:
        return True
    if target in _SWAPS_GIVEN:
        return len(rest) == 2 and all(isinstance(d, int) for d in rest) and rest[0] % 2 != rest[1] % 2  # type: ignore[operator]
    if target in _PERMUTES:
        dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return [d % 2 for d in dims] == [1, 0] if all(isinstance(d, int) for d in dims) else None  # type: ignore[operator, union-attr]
    if target is getattr and rest and rest[0] in _TRANSPOSING_ATTRIBUTES:
        return True
    if target is getattr and rest and rest[0] == "data":
        return False
    if target in _KEEPS:
        return False
    if target in _CASTS:
        before, after = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None, value_of(node)
        floating = isinstance(after, Tensor) and after.is_floating_point() and after.dtype.itemsize > 1
        return False if floating and isinstance(before, Tensor) and before.device == after.device else None
    return None


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """Arguments by position or name, None where absent."""
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in enumerate(names)]


def match_site(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> Site | None:
    """The product that ``node`` computes with a weight, or None."""
    bias: Any = None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in LINEAR:
        x, weight, bias = _arguments(node, "input", "weight", "bias")
        contracted = -1
    elif node.target in MATMUL:
        x, weight = _arguments(node, "input", "other" if node.target is torch.matmul else "mat2")
        contracted = -2
    elif node.target in ADDMM and node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1:
        bias, x, weight = _arguments(node, "input", "mat1", "mat2")
        contracted = -2
        if not isinstance(bias, fx.Node) or not isinstance(value_of(bias), Tensor) or value_of(bias).dim() != 1:
            return None
    else:
        return None
    use = weight_use(weight, is_weight)
    if use is None or not isinstance(x, fx.Node) or not isinstance(value_of(x), Tensor) or "out" in node.kwargs:
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
