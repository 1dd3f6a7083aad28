"""Run a module through Dynamo and the passes, without Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxquant.options import BackendOptions
from fxquant.rewrite import Rewritten, rewrite
from fxquant.runner import runner


@pytest.fixture
def rewrite_and_run() -> Callable[..., tuple[Any, Rewritten]]:
    """(output, rewritten graph) of a module: the rewritten graph is run as it is."""

    def run(module: nn.Module, *args: Any, **options: Any) -> tuple[Any, Rewritten]:
        graphs: list[Rewritten] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(rewrite(gm, inputs, BackendOptions.parse(None, options)))
            return runner(graphs[-1].calls, graphs[-1].gm)

        torch.compiler.reset()
        with torch.no_grad():
            output = torch.compile(module, backend=backend, fullgraph=True)(*args)
        (graph,) = graphs
        return output, graph

    return run


@pytest.fixture
def count_ops() -> Callable[[torch.fx.Graph], dict[str, int]]:
    """How often each op of fxquant stands in a graph."""

    def count(graph: torch.fx.Graph) -> dict[str, int]:
        ops = torch.ops.fxquant
        names = {
            ops.quantize_activation.default: "quantize_activation",
            ops.scaled_mm.default: "scaled_mm",
            ops.scaled_grouped_mm.default: "scaled_grouped_mm",
        }
        counts = {"quantize_activation": 0, "scaled_mm": 0, "scaled_grouped_mm": 0, "dequantize_weight": 0}
        for node in graph.nodes:
            name = names.get(node.target) or getattr(node.target, "__name__", "")
            if name in counts:
                counts[name] += 1
        return counts

    return count
