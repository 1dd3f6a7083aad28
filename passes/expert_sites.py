"""Products with stacks of experts in a Dynamo graph: grouped_mm, bmm and matmul (of the stack or of chosen experts), einsum.

Each is brought to one of the forms of ``scaled_grouped_mm``: rows sorted by expert with the ends of the groups, rows with the
number of an expert each, or a batch of rows for each expert. What stands between that form and the node is written into the
graph by the site's ``before`` (on the activation) and ``after`` (on the product).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .weights import MATMUL, WeightUse, arguments, value_of, weight_use

aten = torch.ops.aten

GROUPED = {torch._grouped_mm, F.grouped_mm, aten._grouped_mm.default}
GROUPED_NAMES = {"transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default"}
BMM = {torch.bmm, aten.bmm.default, "bmm"}
BADDBMM = {torch.baddbmm, aten.baddbmm.default, "baddbmm"}
EINSUM = {torch.einsum, torch.functional.einsum}

Step = Callable[[fx.Graph, fx.Node], fx.Node]


@dataclass(frozen=True, kw_only=True)
class ExpertSite:
    """One product with a stack of experts.

    Args:
        node: the node that computes it.
        x: the activation as the node reads it.
        weight: the stack's use; an index that chose among the experts is in ``expert_ids`` instead where it is one a row.
        contraction: dimension of the placeholder's weight that is contracted: -1 for [E, N, K], -2 for [E, K, N].
        offs, expert_ids: see ``ops.scaled_grouped_mm``.
        before: writes what makes the op's activation of ``x``; after: what makes the node's value of the product.
    """

    node: fx.Node
    x: fx.Node
    weight: WeightUse
    contraction: int
    offs: fx.Node | None = None
    expert_ids: fx.Node | None = None
    before: Step
    after: Step


def method(graph: fx.Graph, name: str, x: fx.Node, *args: Any) -> fx.Node:
    """A call of a tensor's method, with its fake value."""
    node = graph.call_method(name, (x, *args))
    operands = fx.node.map_arg((x, *args), value_of)
    if all(operand is not None for operand in operands):
        node.meta = {"example_value": getattr(operands[0], name)(*operands[1:])}
    return node


def _as_it_is(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return x


def _laid_out(graph: fx.Graph, product: fx.Node, node: fx.Node) -> fx.Node:
    """The product in the memory layout that readers of ``node`` expect, as far as they can tell: contiguous or not."""
    return graph.call_method("contiguous", (product,)) if value_of(node).is_contiguous() else product


def _method(name: str, *args: Any) -> Step:
    return lambda graph, x: method(graph, name, x, *args)


def expert_sites(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Iterator[ExpertSite]:
    """Every product with a stack of experts, in graph order."""
    for node in list(graph.nodes):
        site = match_expert_site(node, is_weight)
        if site is not None:
            yield site


def match_expert_site(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> ExpertSite | None:
    """The product with a stack of experts that ``node`` computes, or None."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return None
    if node.target in GROUPED or str(node.target) in GROUPED_NAMES:
        return _grouped(node, is_weight)
    if node.target in BMM or node.target in MATMUL:
        left, right = arguments(node, "input", "other" if node.target is torch.matmul else "mat2")
        return _batched(node, left, right, is_weight, matmul=node.target in MATMUL)
    if node.target in BADDBMM and node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1:
        bias, left, right = arguments(node, "input", "batch1", "batch2")
        site = _batched(node, left, right, is_weight, matmul=False)
        return None if site is None else _plus(site, bias)
    if node.target in EINSUM:
        return _einsum(node, is_weight)
    return None


def _stack_use(node: Any, is_weight: Callable[[fx.Node], bool]) -> WeightUse | None:
    """The use of a stack of experts as a whole, or of some of them; None for a single matrix and other nodes."""
    use = weight_use(node, is_weight)
    return use if use is not None and value_of(node).dim() == 3 else None


def _is_activation(node: Any, is_weight: Callable[[fx.Node], bool]) -> bool:
    if not isinstance(node, fx.Node) or weight_use(node, is_weight) is not None:
        return False
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _grouped(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> ExpertSite | None:
    x, weight = arguments(node, "input", "weight") if str(node.target) in GROUPED_NAMES else arguments(node, "mat_a", "mat_b")
    offs, bias = arguments(node, "", "", "offs", "bias")[2:]
    use = _stack_use(weight, is_weight)
    if use is None or use.index is not None or bias is not None or not _is_activation(x, is_weight):
        return None
    if value_of(x).dim() != (3 if offs is None else 2):
        return None
    contraction = -1 if use.swapped else -2
    return ExpertSite(node=node, x=x, weight=use, contraction=contraction, offs=offs, before=_as_it_is, after=_as_it_is)


def _batched(node: fx.Node, left: Any, right: Any, is_weight: Callable[[fx.Node], bool], *, matmul: bool) -> ExpertSite | None:
    use, x, on_left = _stack_use(right, is_weight), left, False
    if use is None:
        use, x, on_left = _stack_use(left, is_weight), right, True
    if use is None or not _is_activation(x, is_weight):
        return None
    dims = value_of(x).dim()
    if dims != 3 and not (matmul and dims == 2):
        return None
    contraction = -1 if use.swapped != on_left else -2
    swap = _method("transpose", -1, -2) if on_left else _as_it_is
    if use.index is None:
        experts, batch = value_of(use.source).shape[0], value_of(x).shape[0]
        if matmul and dims == 3 and batch not in (1, experts):
            return None  # one expert for many batches
        broadcast = dims == 2 or (matmul and batch != experts)
        spread = _method("expand", experts, -1, -1) if broadcast else _as_it_is
        return ExpertSite(
            node=node,
            x=x,
            weight=use,
            contraction=contraction,
            before=lambda graph, x: spread(graph, swap(graph, x)),
            after=lambda graph, product: _laid_out(graph, swap(graph, product), node),
        )
    rows = value_of(x).shape[-1 if on_left else -2]
    if dims != 3 or not isinstance(use.index, fx.Node) or rows != 1:
        return None  # more than one row for each choice
    if matmul and not _same_size(value_of(x).shape[0], value_of(use.index).shape[0]):
        return None  # broadcast
    single = -1 if on_left else 1
    return ExpertSite(
        node=node,
        x=x,
        weight=use,
        contraction=contraction,
        expert_ids=use.index,
        before=_method("squeeze", single),
        after=_method("unsqueeze", single),
    )


def _same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for certain."""
    return one == other if isinstance(one, int) and isinstance(other, int) else str(one) == str(other)


def _plus(site: ExpertSite, bias: Any) -> ExpertSite:
    def after(graph: fx.Graph, product: fx.Node) -> fx.Node:
        cast = graph.call_method("to", (bias, value_of(site.node).dtype))
        return graph.call_function(torch.add, (cast, site.after(graph, product)))

    return ExpertSite(**{**vars(site), "after": after})


def _einsum(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> ExpertSite | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    pairs = list(zip(operands, inputs.split(","), strict=True))
    for (weight, weight_axes), (x, x_axes) in (pairs, pairs[::-1]):
        use = _stack_use(weight, is_weight)
        if use is not None and use.index is None and _is_activation(x, is_weight):
            return _labelled(node, use, weight_axes, x, x_axes, out)
    return None


def _labelled(node: fx.Node, use: WeightUse, weight_axes: str, x: Any, x_axes: str, out: str) -> ExpertSite | None:
    """The site of an einsum: x is brought to (E, everything else, K), the product (E, everything else, N) to the output."""
    expert, *matrix = list(weight_axes)
    others = [axis for axis in x_axes if axis not in weight_axes]
    contracted = [axis for axis in matrix if axis in x_axes and axis not in out]
    if len(contracted) != 1 or len(set(x_axes)) != len(x_axes):
        return None
    inner = contracted[0]
    (rows,) = (axis for axis in matrix if axis != inner)
    product_axes = [expert, *others, rows]
    if rows in x_axes or expert not in out or set(out) != set(product_axes) or len(out) != len(product_axes):
        return None
    experts = value_of(use.source).shape[0]
    batched = expert in x_axes
    sizes = dict(zip(x_axes, value_of(x).shape, strict=True))
    (columns, out_features) = (value_of(use.source).shape[dim] for dim in _dimensions(matrix.index(inner), use.swapped))
    if sizes[inner] != columns or (batched and sizes[expert] != experts):
        return None  # broadcast

    def before(graph: fx.Graph, x: fx.Node) -> fx.Node:
        order = [x_axes.index(axis) for axis in [*([expert] if batched else []), *others, inner]]
        x = method(graph, "permute", x, *order)
        x = method(graph, "reshape", x, *((experts,) if batched else (1,)), -1, value_of(x).shape[-1])
        return x if batched else method(graph, "expand", x, experts, -1, -1)

    def after(graph: fx.Graph, product: fx.Node) -> fx.Node:
        lengths = [graph.call_method("size", (x, x_axes.index(axis))) for axis in others]
        product = graph.call_method("reshape", (product, experts, *lengths, out_features))
        product = graph.call_method("permute", (product, *(product_axes.index(axis) for axis in out)))
        return _laid_out(graph, product, node)

    contraction = -1 if (matrix.index(inner) == 1) != use.swapped else -2
    return ExpertSite(node=node, x=x, weight=use, contraction=contraction, before=before, after=after)


def _dimensions(inner: int, swapped: bool) -> tuple[int, int]:
    """Dimensions of a stack that are contracted and kept, for a use of it that contracts its matrix's ``inner``-th."""
    contracted = (inner + 1) if not swapped else 2 - inner
    return contracted, 3 - contracted
