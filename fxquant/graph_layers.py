"""The layers that a Dynamo graph multiplies with, as the rules see them; named by the parameters' place in the module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .kernels.quantized_tensor import QuantizedTensor
from .layers import HEAD_NAMES, Layer, is_router
from .passes.weights import sites

_STEP = re.compile(r"\._modules\['([^']+)'\]|\._(?:parameters|buffers)\['([^']+)'\]")


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
    """Name of the layer that owns the parameter, for rules and messages."""
    name = parameter_name(placeholder) or placeholder.name
    return name.removesuffix("weight").removesuffix(".")


def graph_layers(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Layer]:
    """Placeholder -> layer, for every float matrix parameter that the graph multiplies with or embeds with."""
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))

    def is_plain_matrix(node: fx.Node) -> bool:
        value = placeholders.get(node)
        return isinstance(value, nn.Parameter) and not isinstance(value, QuantizedTensor) and value.dim() == 2

    embedded = {
        node.args[1]
        for node in graph.nodes
        if node.target in (F.embedding, torch.embedding) and len(node.args) > 1 and is_plain_matrix(node.args[1])
    }
    layers: dict[fx.Node, Layer] = {}
    for site in sites(graph, is_plain_matrix):
        source = site.weight.source
        if source not in layers and parameter_name(source) is not None:
            layers[source] = _layer(source, placeholders[source], site.contraction, tied=source in embedded)
    for source in embedded - layers.keys():
        layers[source] = _layer(source, placeholders[source], -1, tied=False, kind="embedding")
    return layers


def _layer(source: fx.Node, weight: Tensor, contraction: int, *, tied: bool, kind: str | None = None) -> Layer:
    name = layer_name(source)
    rows, columns = weight.shape if contraction == -1 else weight.shape[::-1]
    if kind is None:
        head = tied or name.rpartition(".")[2] in HEAD_NAMES
        kind = "head" if head else "router" if is_router(name) else "linear"
    return Layer(
        name=name,
        kind=kind,
        rows=rows,
        columns=columns,
        contraction=contraction,
        nbytes=weight.numel() * weight.itemsize,
        device=weight.device,
        dtype=weight.dtype,
    )
