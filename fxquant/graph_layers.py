"""The layers that a Dynamo graph multiplies with, as the rules see them.

A layer is named by the module that was running when its product was traced, relative to the module that was compiled. A
parameter's own name would not do: a tied weight carries that of its first owner.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .kernels.quantized_tensor import QuantizedTensor
from .layers import HEAD_NAMES, Layer, LayerWeight, is_router, layer_of, matrix_layer, says_experts, stack_weight
from .passes.expert_sites import ExpertSite, expert_sites
from .passes.weights import Site, sites

_STEP = re.compile(r"\._modules\['([^']+)'\]|\._(?:parameters|buffers)\['([^']+)'\]")
_ROOT = re.compile(r"^[LG]\[[^\]]*\](\[\d+\])*\.?")


def parameter_name(placeholder: fx.Node) -> str | None:
    """Path of the parameter behind a placeholder, relative to the module that was compiled; None for other inputs."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name if isinstance(source.name, str) else source.name()
    steps = _STEP.findall(name)
    if not steps or not steps[-1][1]:
        return None
    return ".".join(module or parameter for module, parameter in steps)


def layer_name(placeholder: fx.Node) -> str:
    """Name of the layer that owns the parameter, for messages."""
    name = parameter_name(placeholder) or placeholder.name
    parent, _, last = name.rpartition(".")
    return parent if last == "weight" else name


def _module_name(node: fx.Node, placeholder: fx.Node) -> str:
    """Name of the layer that runs ``node``; the parameter's own where it is none's ``weight`` or no layer runs."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if stack and (parameter_name(placeholder) or "").rpartition(".")[2] == "weight":
        path, kind = stack[-1][:2]
        leaf = isinstance(kind, type) and (issubclass(kind, (nn.Linear, nn.Embedding)) or kind.__name__ == "Conv1D")
        if leaf and isinstance(path, str):
            return _ROOT.sub("", path)
    return layer_name(placeholder)


def graph_layers(graph: fx.Graph, inputs: Sequence[Any]) -> list[tuple[Layer, tuple[fx.Node, ...]]]:
    """(layer, placeholders of its weights) for all float parameters that the graph multiplies with or embeds with: matrices,
    and stacks of experts, which make one layer where one module owns them.

    A parameter that several layers share comes with each of them.
    """
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))

    def is_plain(node: Any, dims: tuple[int, ...]) -> bool:
        value = placeholders.get(node)
        plain = isinstance(value, nn.Parameter) and not isinstance(value, QuantizedTensor) and value.dim() in dims
        return plain and parameter_name(node) is not None

    def is_plain_matrix(node: Any) -> bool:
        return is_plain(node, (2,))

    embeddings = [
        (node, node.args[1])
        for node in graph.nodes
        if node.target in (F.embedding, torch.embedding) and len(node.args) > 1 and is_plain_matrix(node.args[1])
    ]
    embedded = {source for _, source in embeddings}
    found: dict[tuple[str, fx.Node], Layer] = {}
    owners: dict[fx.Node, str] = {}
    for site in sites(graph, is_plain_matrix):
        source = site.weight.source
        name = _module_name(site.node, source)
        head = source in embedded or name.rpartition(".")[2] in HEAD_NAMES
        kind = "head" if head else "router" if is_router(name) else "linear"
        owner = owners.setdefault(source, name)
        layer = matrix_layer(name, kind, placeholders[source], site.contraction)
        found.setdefault((name, source), layer if owner == name else replace(layer, tied_to=owner))
    for node, source in embeddings:
        name = _module_name(node, source)
        found.setdefault((name, source), matrix_layer(name, "embedding", placeholders[source], -1))
    layers = [(layer, (source,)) for (_, source), layer in found.items()]
    return layers + _expert_layers(graph, placeholders, lambda node: is_plain(node, (3,)))


def _expert_layers(
    graph: fx.Graph, placeholders: Mapping[fx.Node, Any], is_plain_stack: Callable[[fx.Node], bool]
) -> list[tuple[Layer, tuple[fx.Node, ...]]]:
    owned: dict[str, dict[fx.Node, LayerWeight]] = {}
    found: list[Site | ExpertSite] = [*expert_sites(graph, is_plain_stack), *sites(graph, is_plain_stack)]
    for site in found:
        source = site.weight.source
        name, _, parameter = (parameter_name(source) or "").rpartition(".")
        stack = list(site.node.meta.get("nn_module_stack", {}).values())
        if not says_experts(name, getattr(stack[-1][1], "__name__", "") if stack else ""):
            continue
        weights = owned.setdefault(name, {})
        if source not in weights:
            shape = placeholders[source].shape
            weights[source] = stack_weight(parameter, shape, contraction=site.contraction, interleaved=_takes_turns(site.node))
    return [
        (layer_of(name, "moe", list(weights.values()), [placeholders[node] for node in weights]), tuple(weights))
        for name, weights in owned.items()
    ]


def _takes_turns(product: fx.Node) -> bool:
    """Whether a gate_up product, perhaps with a bias on it, is read by every second column."""
    reached = [product]
    for node in reached:
        for user in node.users:
            if user.target is operator.getitem:
                last = user.args[1][-1] if isinstance(user.args[1], tuple) else user.args[1]
                if isinstance(last, slice) and last.step == 2:
                    return True
            elif user.target in (operator.add, operator.iadd, torch.add, "add", "add_", "squeeze", "view", "reshape"):
                reached.append(user)
    return False
