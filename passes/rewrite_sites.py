"""Products with a quantised weight become ``quantize_activation`` + ``scaled_mm``; other reads of the weight dequantise it.

A quantised weight is a placeholder that carries ``QuantizedInput`` in its meta: the nodes of its components and its spec.
After the pass no node uses the placeholder itself, unless its reads stay in float.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..kernels import numerics
from ..kernels.errors import UnsupportedError
from ..kernels.formats import FORMATS
from ..kernels.ops import NO_ACTIVATION
from ..kernels.weight_spec import WeightSpec
from .mutation import storages, view_base, written_operands
from .weights import Site, WeightUse, sites, value_of, weight_use

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


def dequantize_weight(components: list[Tensor], weight_format: str, dtype: torch.dtype, swapped: bool) -> Tensor:
    """Float values of a stored weight (N, K), as (K, N) where ``swapped``; the call that the pass writes into graphs."""
    values = numerics.dequantize(components, FORMATS[weight_format], dtype)
    return values.mT if swapped else values


def rewrite_sites(graph: fx.Graph) -> int:
    """Rewrite the graph in place; returns the number of products.

    Raises:
        UnsupportedError: the graph writes to a quantised weight.
    """
    _refuse_writes(graph)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    count = 0
    for site in sites(graph, is_quantized):
        weight: QuantizedInput = site.weight.source.meta[META_KEY]
        if weight.spec.contraction == site.contraction:
            _rewrite(graph, site, weight, casts)
            count += 1
    _dequantize_other_reads(graph)
    return count


def _rewrite(graph: fx.Graph, site: Site, weight: QuantizedInput, casts: dict[tuple[fx.Node, torch.dtype], fx.Node]) -> None:
    node, x = site.node, site.x
    out_dtype = value_of(node).dtype
    activation = weight.spec.scheme.activation
    with graph.inserting_before(node):
        if value_of(x).dtype != out_dtype:  # autocast: the product's operands are cast before they are quantised
            if (x, out_dtype) not in casts:
                casts[x, out_dtype] = graph.call_method("to", (x, out_dtype))
                casts[x, out_dtype].meta = {"example_value": value_of(x).to(out_dtype)}
            x = casts[x, out_dtype]
        quantized = [x]
        if activation is not None:
            result = graph.call_function(torch.ops.fxquant.quantize_activation.default, (x, activation.name))
            count = len(activation.components)
            quantized = [graph.call_function(operator.getitem, (result, i)) for i in range(count)]
        name = NO_ACTIVATION if activation is None else activation.name
        scaled_mm = graph.call_function(
            torch.ops.fxquant.scaled_mm.default,
            (quantized, list(weight.components), site.bias, name, weight.spec.scheme.weight.name, out_dtype),
            {"backend": weight.spec.backend},
        )
    scaled_mm.meta = dict(node.meta)
    node.replace_all_uses_with(scaled_mm)
    graph.erase_node(node)


def _dequantize_other_reads(graph: fx.Graph) -> None:
    uses: list[tuple[fx.Node, WeightUse]] = []
    for node in graph.nodes:
        use = weight_use(node, is_quantized)
        if use is not None:
            uses.append((node, use))
    expressions = {node for node, _ in uses}
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1] if uses else None
    for node, use in uses:
        readers = [user for user in node.users if user not in expressions]
        weight: QuantizedInput = use.source.meta[META_KEY]
        if readers and not weight.float_reads:
            swapped = use.swapped != (weight.spec.contraction == -2)
            with graph.inserting_after(last_placeholder if node.op == "placeholder" else node):
                values = graph.call_function(
                    dequantize_weight, (list(weight.components), weight.spec.scheme.weight.name, use.dtype, swapped)
                )
            values.meta = {"example_value": value_of(node)}
            for user in readers:
                user.replace_input_with(node, values)
    for node, _ in reversed(uses):
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)


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
