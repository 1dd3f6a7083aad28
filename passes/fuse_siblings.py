"""Siblings that read the same activation become one product with their weights packed into one (q/k/v, gate/up, any others).

Siblings are products in one module: the innermost that holds more than one. They are found by what they read, not by name. A
group is fused whole or not at all: with one member that stays in float or has another scheme, the others stay as they are.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels.capability import Kernel, Problem, choose
from ..kernels.errors import UnsupportedError
from ..kernels.numerics import stack_shards
from ..kernels.pack import packed_spec
from ..kernels.weight_spec import WeightSpec
from .mutation import perhaps_written_operands, storages
from .rewrite_sites import META_KEY, QuantizedInput
from .strided_values import aligned, needs_contiguous, use_reshape
from .weights import match_site, value_of

log = logging.getLogger("fxquant")

PACK_KEY = "fxquant_pack"
"""Meta of the placeholders of a pack's components: ``PackedInput``."""

PACKED_WITH_KEY = "fxquant_packed_with"
"""Meta of a weight's placeholder: placeholders of the members of the pack that it sits in already, None for one elsewhere."""

_SCALED_MM = torch.ops.fxquant.scaled_mm.default
_ARGUMENTS = tuple(argument.name for argument in _SCALED_MM._schema.arguments)
_QUANTIZE = torch.ops.fxquant.quantize_activation.default
_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


@dataclass(frozen=True, kw_only=True)
class PackedInput:
    """What stands for several weights stacked into one.

    Args:
        members: the weights' placeholders (``QuantizedInput``), in order.
        components: placeholders of the stacked components, in the format's order.
    """

    members: tuple[fx.Node, ...]
    components: tuple[fx.Node, ...]


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """A product of an activation and a weight.

    Args:
        node: the product.
        read: the activation before casts and quantisation, and how often it had been written when it was read.
        weight: placeholder of the quantised weight; None where the weight is none, or not stored as it is.
    """

    node: fx.Node
    read: tuple[fx.Node, int]
    weight: fx.Node | None

    @property
    def input(self) -> QuantizedInput:
        assert self.weight is not None
        found: QuantizedInput = self.weight.meta[META_KEY]
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the product by name."""
        return {**dict(zip(_ARGUMENTS, self.node.args, strict=False)), **self.node.kwargs}


def fuse_siblings(graph: fx.Graph) -> int:
    """Fuse groups of siblings in place; returns the number of groups.

    A packed weight is new placeholders (``PACK_KEY``) behind the others. Those of its members' components stay, unread.
    """
    fused = 0
    for group in _groups(graph):
        obstacle = _obstacle(group)
        if obstacle is None:
            _fuse(graph, group)
            fused += 1
        elif any(reader.weight is not None for reader in group):
            log.debug("siblings that read %s stay as they are: %s", group[0].read[0], obstacle)
    return fused


def _groups(graph: fx.Graph) -> list[list[_Reader]]:
    """Two or more products each that read the same activation in the same module."""
    readers = list(_readers(graph))
    modules = [list(reader.node.meta.get("nn_module_stack", {})) for reader in readers]
    products = Counter(itertools.chain.from_iterable(modules))
    groups: dict[Any, list[_Reader]] = defaultdict(list)
    for reader, path in zip(readers, modules, strict=True):
        scope = next((module for module in reversed(path) if products[module] > 1), None)
        groups[reader.read, scope].append(reader)
    return [group for group in groups.values() if len(group) > 1]


def _readers(graph: fx.Graph) -> Iterator[_Reader]:
    owners = {
        component: node
        for node in graph.find_nodes(op="placeholder")
        if META_KEY in node.meta
        for component in node.meta[META_KEY].components
    }
    writes: Counter[fx.Node] = Counter()
    seen: dict[fx.Node, set[int]] = {}
    quantized: dict[fx.Node, tuple[fx.Node, int]] = {}

    def read(x: fx.Node) -> tuple[fx.Node, int]:
        while x.target == "to" and isinstance(x.args[0], fx.Node):  # autocast's; an unquantised sibling casts by itself
            x = x.args[0]
        seen.setdefault(x, storages(x))
        return x, writes[x]

    for node in graph.nodes:
        written = {storage for operand in perhaps_written_operands(node) for storage in storages(operand)}
        if written:
            writes.update(x for x, memory in seen.items() if memory & written)
        if node.op == "call_function" and node.target is _QUANTIZE:
            quantized[node] = read(node.args[0])
        elif node.op == "call_function" and node.target is _SCALED_MM:
            x, components = node.args[0][0], node.args[1]
            source = x.args[0] if x.args and isinstance(x.args[0], fx.Node) else None
            weight = owners.get(components[0])
            whole = weight is not None and list(weight.meta[META_KEY].components) == list(components)
            yield _Reader(
                node=node, read=quantized[source] if source in quantized else read(x), weight=weight if whole else None
            )
        elif (site := match_site(node, _is_parameter)) is not None:
            yield _Reader(node=node, read=read(site.x), weight=None)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a placeholder stands for a parameter that stays as it is: Dynamo marks what a module holds."""
    return META_KEY not in node.meta and bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def _obstacle(group: Sequence[_Reader]) -> str | None:
    """Why a group cannot be fused; None where it can."""
    if any(reader.weight is None for reader in group):
        return "not all of their weights are quantised"
    spec = group[0].input.spec
    if spec.leading or spec.experts or spec.shards or spec.scheme.weight.reordered:
        return f"weights of {spec} are not stacked"
    if len({(replace(reader.input.spec, rows=0), _shared_arguments(reader)) for reader in group}) > 1:
        return "their schemes differ"
    if any(len(component.users) != 1 for reader in group for component in reader.input.components):
        return "a weight is read more than once"
    members = tuple(reader.weight for reader in group)
    if any(reader.weight.meta.get(PACKED_WITH_KEY, members) != members for reader in group if reader.weight is not None):
        return "a weight is packed with others already"
    if not all(isinstance(value_of(reader.node), Tensor) for reader in group):
        return "the shape of a product is not known"
    return _obstacle_in_order(group) or _obstacle_in_kernels(group)


def _shared_arguments(reader: _Reader) -> tuple[Any, ...]:
    """What siblings have in common: operands and dtypes."""
    arguments = reader.arguments
    return tuple(arguments["x"]), *(arguments[name] for name in ("activation", "weight_format", "out_dtype"))


def _obstacle_in_order(group: Sequence[_Reader]) -> str | None:
    """The product of all stands where the first stood: what they read must be there already and stay as it is."""
    first, last = group[0].node, group[-1].node
    biases = [(reader.arguments.get("bias"), reader.input.spec.rows) for reader in group]
    given = [bias for bias, _ in biases if bias is not None]
    if any(not isinstance(value_of(bias), Tensor) or value_of(bias).shape != (rows,) for bias, rows in biases if bias):
        return "a bias is broadcast"
    if len({value_of(bias).dtype for bias in given}) > 1:
        return "the dtypes of their biases differ"
    if any(not bias < first for bias in given):
        return "a bias is computed between them"
    memory = {storage for operand in (*given, *group[0].arguments["x"]) for storage in storages(operand)}
    node = first
    while node is not last:
        if any(memory & storages(operand) for operand in perhaps_written_operands(node)):
            return "what they read is written between them"
        if node.target in _AUTOCAST:
            return "autocast changes between them"
        node = node.next
    return None


def _obstacle_in_kernels(group: Sequence[_Reader]) -> str | None:
    """Fusing changes how often a kernel runs, not which."""
    specs = [reader.input.spec for reader in group]
    out_dtype, device = group[0].arguments["out_dtype"], value_of(group[0].input.components[0]).device
    kernels = {_kernel(spec, device, out_dtype) for spec in (packed_spec(tuple(specs)), *specs)}
    return "another kernel would serve them together" if len(kernels) > 1 else None


def _kernel(spec: WeightSpec, device: torch.device, dtype: torch.dtype) -> Kernel | None:
    try:
        return choose(Problem.on(device, spec.scheme, spec.rows, spec.columns, dtype=dtype), spec.backend)
    except UnsupportedError:
        return None


def _fuse(graph: fx.Graph, group: Sequence[_Reader]) -> None:
    first = group[0]
    rows = [reader.input.spec.rows for reader in group]
    weight = _packed_placeholders(graph, group)
    value: Tensor = value_of(first.node)
    with graph.inserting_before(first.node):
        arguments = {**first.arguments, "weight": weight, "bias": _joint_bias(graph, group), "shards": rows}
        product = graph.call_function(_SCALED_MM, tuple(arguments.pop(name) for name in _ARGUMENTS[:6]), arguments)
        product.meta = {**first.node.meta, "example_value": value.new_empty((*value.shape[:-1], sum(rows)))}
        for index, reader in enumerate(group):
            part = _with_value(graph.call_function(torch.narrow, (product, -1, sum(rows[:index]), rows[index])))
            if needs_contiguous(reader.node) or not aligned(value_of(part)):
                part = graph.call_method("clone", (part,), {"memory_format": torch.contiguous_format})
                part.meta = {"example_value": value_of(reader.node)}
            else:
                use_reshape(reader.node)
            reader.node.replace_all_uses_with(part)
    for reader in group:
        graph.erase_node(reader.node)


def _packed_placeholders(graph: fx.Graph, group: Sequence[_Reader]) -> list[fx.Node]:
    inputs = [reader.input for reader in group]
    format = inputs[0].spec.scheme.weight
    values = stack_shards([[value_of(part) for part in weight.components] for weight in inputs], format)
    last = graph.find_nodes(op="placeholder")[-1]
    nodes = []
    for name, value in zip(format.components, values, strict=True):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{group[0].weight}_pack_{name}")
        last.meta = {"example_value": value}
        nodes.append(last)
    members = tuple(reader.weight for reader in group if reader.weight is not None)
    for node in nodes:
        node.meta[PACK_KEY] = PackedInput(members=members, components=tuple(nodes))
    return nodes


def _joint_bias(graph: fx.Graph, group: Sequence[_Reader]) -> fx.Node | None:
    """The biases behind one another, zeros for members without one."""
    biases = [reader.arguments.get("bias") for reader in group]
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    parts = [
        bias or _with_value(graph.call_method("new_zeros", (given, (reader.input.spec.rows,))))
        for reader, bias in zip(group, biases, strict=True)
    ]
    return _with_value(graph.call_function(torch.cat, (parts,)))


def _with_value(node: fx.Node) -> fx.Node:
    """The node with the fake value of its call."""
    args = fx.node.map_arg(node.args, value_of)
    target: Any = node.target
    value = getattr(args[0], target)(*args[1:]) if node.op == "call_method" else target(*args)
    node.meta = {"example_value": value}
    return node
