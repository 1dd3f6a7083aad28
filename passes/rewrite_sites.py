"""Products with a quantised weight become ``quantize_activation`` + ``scaled_mm``; other reads of the weight dequantise it.

A quantised weight is a placeholder that carries ``QuantizedInput`` in its meta: the nodes of its components and its spec.
After the pass no node uses the placeholder itself, unless its reads stay in float.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels import numerics
from ..kernels.errors import UnsupportedError
from ..kernels.formats import weight_format_named
from ..kernels.ops import NO_ACTIVATION, from_the_end, take, without_padding
from ..kernels.weight_spec import WeightSpec, stack_turns, take_turns
from .expert_sites import ExpertSite, match_expert_site, method
from .mutation import perhaps_written_operands, storages, view_base, written_operands
from .weights import UNBINDS, Site, WeightUse, match_site, value_of, weight_use

log = logging.getLogger("fxquant")

META_KEY = "fxquant_weight"


@dataclass(frozen=True, kw_only=True)
class QuantizedInput:
    """What a weight placeholder stands for.

    Args:
        components: nodes of the stored tensors, in the format's order.
        spec: formats and logical shape.
        name: the layer, for messages.
        float_reads: whether other reads than products see the placeholder's own float value (an embedding that shares its
            weight with a quantised head) instead of dequantised values.
    """

    components: tuple[fx.Node, ...]
    spec: WeightSpec
    name: str
    float_reads: bool = False


def is_quantized(node: fx.Node) -> bool:
    """Whether a placeholder stands for a quantised weight."""
    return META_KEY in node.meta


def dequantize_weight(
    components: list[Tensor], weight_format: str, dtype: torch.dtype, columns: int, shards: Sequence[int], interleaved: bool
) -> Tensor:
    """Float values of a stored weight (..., N, K); the call that the pass writes into graphs."""
    values = numerics.dequantize(components, weight_format_named(weight_format), dtype, shards=shards, columns=columns)
    return take_turns(values, -2, len(shards)) if interleaved else values


def take_experts(component: Tensor, index: Any) -> Tensor:
    """One component of the experts that ``index`` (a number, or a tensor of numbers) names; written into graphs too."""
    if not isinstance(index, Tensor):
        return component.select(0, index)
    taken = take(component, from_the_end(index.reshape(-1), component.shape[0]))
    return taken if index.dim() else taken.squeeze(0)


TRACED_CALLS = (dequantize_weight, take_experts, without_padding, take_turns, stack_turns)
"""The Python functions that the pass writes into graphs."""


class _Writer:
    """Writes the nodes that stand for weights and activations, each once."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._experts: dict[Any, list[fx.Node]] = {}
        self._writes: Counter[int] = Counter()
        self._chosen: dict[fx.Node, int] = {}

    def see(self, node: fx.Node) -> None:
        """Note a node that the pass goes by: what it writes to, or may write to, is not what was read before."""
        use = weight_use(node, is_quantized)
        if use is not None and use.chooser is node:
            self._chosen[node] = self._stamp(use)
        written = {storage for operand in perhaps_written_operands(node) for storage in storages(operand)}
        if written:
            self._writes.update(written)
            self._casts = {key: cast for key, cast in self._casts.items() if not written & storages(key[0])}

    def _stamp(self, use: WeightUse) -> int:
        """How often the numbers of the chosen experts have been written to."""
        return sum(self._writes[storage] for storage in storages(use.index)) if isinstance(use.index, fx.Node) else 0

    def is_stale(self, use: WeightUse) -> bool:
        """Whether the numbers of experts were written to after the experts had been chosen by them."""
        return use.chooser is not None and self._chosen[use.chooser] != self._stamp(use)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``x`` in ``dtype``; autocast: a product's operands are cast before they are quantised."""
        if value_of(x).dtype == dtype:
            return x
        if (x, dtype) not in self._casts:
            self._casts[x, dtype] = method(self.graph, "to", x, dtype)
        return self._casts[x, dtype]

    def components(self, use: WeightUse) -> list[fx.Node]:
        """The nodes of a use's components."""
        weight: QuantizedInput = use.source.meta[META_KEY]
        if use.index is None:
            return list(weight.components)
        key = (use.source, use.index, use.chooser and self._chosen.get(use.chooser))
        if key not in self._experts:
            self._experts[key] = [self.graph.call_function(take_experts, (part, use.index)) for part in weight.components]
        return self._experts[key]

    def quantized(self, x: fx.Node, spec: WeightSpec) -> tuple[list[fx.Node], str]:
        """(components of the activation, name of its format) for a product with a weight of ``spec``."""
        activation = spec.scheme.activation
        if activation is None:
            return [x], NO_ACTIVATION
        result = self.graph.call_function(torch.ops.fxquant.quantize_activation.default, (x, activation.name))
        count = len(activation.components)
        return [self.graph.call_function(operator.getitem, (result, i)) for i in range(count)], activation.name

    def logical(self, product: fx.Node, spec: WeightSpec) -> fx.Node:
        """The product's columns in the order of the logical rows of the weight."""
        if not spec.interleaved:
            return product
        return self.graph.call_function(take_turns, (product, -1, len(spec.shards)))


def rewrite_sites(graph: fx.Graph) -> int:
    """Rewrite the graph in place; returns the number of products.

    Raises:
        UnsupportedError: the graph writes to a quantised weight.
    """
    _refuse_writes(graph)
    writer = _Writer(graph)
    count = 0
    for node in list(graph.nodes):
        writer.see(node)
        site = match_site(node, is_quantized) or match_expert_site(node, is_quantized)
        if site is None or writer.is_stale(site.weight):
            continue
        weight: QuantizedInput = site.weight.source.meta[META_KEY]
        if weight.spec.contraction != site.contraction:
            log.warning(
                "%s: the weight is quantised along another dimension than it is multiplied along, and so is dequantised in "
                "every call; a module of experts with weights [E, K, N] says so with an attribute is_transposed = True",
                weight.name,
            )
            continue
        with graph.inserting_before(node):
            rewrite = _rewrite if isinstance(site, Site) else _rewrite_experts
            result = rewrite(writer, site, weight.spec)  # type: ignore[arg-type]
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    _dequantize_other_reads(graph)
    return count


def _rewrite(writer: _Writer, site: Site, spec: WeightSpec) -> fx.Node:
    out_dtype = value_of(site.node).dtype
    quantized, activation = writer.quantized(writer.cast(site.x, out_dtype), spec)
    bias = site.bias
    if bias is not None and spec.interleaved:  # into the order of the stored rows
        bias = writer.graph.call_function(stack_turns, (bias, -1, len(spec.shards)))
    product = writer.graph.call_function(
        torch.ops.fxquant.scaled_mm.default,
        (quantized, writer.components(site.weight), bias, activation, spec.scheme.weight.name, out_dtype, list(spec.shards)),
        {"backend": spec.backend},
    )
    return writer.logical(product, spec)


def _rewrite_experts(writer: _Writer, site: ExpertSite, spec: WeightSpec) -> fx.Node:
    out_dtype = value_of(site.node).dtype
    x = site.before(writer.graph, writer.cast(site.x, out_dtype))
    if site.offs is not None and spec.scheme.has_joint_activation_scale:
        value, x = value_of(x), writer.graph.call_function(without_padding, (x, site.offs))
        x.meta = {"example_value": value.new_empty(value.shape)}
    quantized, activation = writer.quantized(x, spec)
    weight: QuantizedInput = site.weight.source.meta[META_KEY]
    product = writer.graph.call_function(
        torch.ops.fxquant.scaled_grouped_mm.default,
        (quantized, list(weight.components), site.offs, site.expert_ids, activation, spec.scheme.weight.name, out_dtype),
        {"shards": list(spec.shards), "backend": spec.backend},
    )
    return site.after(writer.graph, writer.logical(product, spec))


def _dequantize_other_reads(graph: fx.Graph) -> None:
    uses: list[tuple[fx.Node, WeightUse]] = []
    for node in graph.nodes:
        use = weight_use(node, is_quantized)
        if use is not None:
            uses.append((node, use))
    expressions = {node for node, _ in uses}
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1] if uses else None
    for node, use in uses:
        readers = [user for user in node.users if user not in expressions and not _is_taken_apart(user, expressions)]
        weight: QuantizedInput = use.source.meta[META_KEY]
        if readers and not weight.float_reads:
            spec = weight.spec
            after = last_placeholder if node.op == "placeholder" else node
            assert after is not None
            behind = after.next
            with graph.inserting_before((use.chooser or after).next):  # where the experts were chosen
                components = _Writer(graph).components(use)
            with graph.inserting_before(behind):
                values = graph.call_function(
                    dequantize_weight,
                    (
                        components,
                        spec.scheme.weight.name,
                        use.dtype,
                        spec.columns,
                        list(spec.shards),
                        spec.interleaved,
                    ),
                )
                if use.swapped != (spec.contraction == -2):
                    values = graph.call_method("transpose", (values, -1, -2))
            values.meta = {"example_value": value_of(node)}
            for user in readers:
                user.replace_input_with(node, values)
    for node, _ in reversed(uses):
        for user in [node, *node.users]:
            if not user.users and (user is node or _is_taken_apart(user, expressions)) and user.op != "placeholder":
                graph.erase_node(user)


def _is_taken_apart(node: fx.Node, expressions: set[fx.Node]) -> bool:
    """Whether ``node`` splits a stack of experts into matrices that are uses themselves."""
    return node.target in UNBINDS and expressions.issuperset(node.users)


def _refuse_writes(graph: fx.Graph) -> None:
    weights = {node: node.meta[META_KEY] for node in graph.nodes if node.op == "placeholder" and is_quantized(node)}
    owners = {storage: weight for node, weight in weights.items() for storage in storages(node)}
    for node in graph.nodes:
        for operand in written_operands(node):
            use = weight_use(view_base(operand), is_quantized)
            weight = use.source.meta[META_KEY] if use else next((owners[s] for s in storages(operand) if s in owners), None)
            if weight is not None and node.target != "requires_grad_":
                raise UnsupportedError(
                    f"the compiled code writes to the quantised weight of {weight.name or 'a layer'} ({node.target}); do it "
                    "outside torch.compile, where the result is quantised again, or leave the layer out (ignore)"
                )
