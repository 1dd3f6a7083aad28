"""Dynamo's graph over quantised weights: the order of its inputs, what it keeps, what it forgets."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fxquant
from fxquant.options import BackendOptions
from fxquant.rewrite import rewrite


@pytest.fixture
def rewritten_graph():
    def trace(module, *args, **options):
        graphs = []

        def backend(gm, inputs):
            graphs.append(rewrite(gm, inputs, BackendOptions.parse(None, options)))
            return gm

        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(module, backend=backend, fullgraph=True)(*args)
        return graphs[0]

    return trace


def placeholder_names(graph):
    return [node.name for node in graph.gm.graph.find_nodes(op="placeholder")]


def test_components_stand_behind_the_kept_inputs_column_by_column(rewritten_graph):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    fxquant.quantize_(model, "fp8_per_channel")
    graph = rewritten_graph(model, torch.randn(2, 16))
    names = placeholder_names(graph)
    assert len(names) == 2 + 4
    assert [name.rpartition("_")[2] for name in names[2:]] == ["qdata", "qdata", "scale", "scale"]
    assert [tuple(x.shape) for x in graph.inputs[2:]] == [(16, 16), (16, 16), (16, 1), (16, 1)]
    assert [slot.name for slot in graph.calls.slots] == ["0", "1"]


def test_components_are_static_inputs_with_a_source(rewritten_graph):
    model = nn.Linear(16, 16)
    fxquant.quantize_(model, "fp8_per_channel")
    graph = rewritten_graph(model, torch.randn(2, 16))
    for node in list(graph.gm.graph.find_nodes(op="placeholder"))[-2:]:
        assert node.meta["tensor_dict"]["_dynamo_static_input_type"]
        assert node._dynamo_source is not None


def test_the_graph_keeps_no_weight_alive(rewritten_graph):
    model = nn.Sequential(nn.Linear(16, 16))
    fxquant.quantize_(model, "fp8_per_channel")
    graph = rewritten_graph(model, torch.randn(2, 16))
    qdata = weakref.ref(model[0].weight.qdata)
    del model
    torch.compiler.reset()
    gc.collect()
    assert qdata() is None
    assert graph.matches["rewrite_sites"] == 1


def test_a_pinned_backend_reaches_the_op_or_names_the_layer(rewritten_graph):
    model = nn.Sequential(nn.Linear(16, 16))
    fxquant.quantize_(model, "fp8_per_block")
    graph = rewritten_graph(model, torch.randn(2, 16), linear_backend="reference")
    (node,) = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default)
    assert node.kwargs["backend"] == "reference"
    with pytest.raises(BackendCompilerFailed, match=r"(?s)0: no 'torch' kernel.*reference"):
        rewritten_graph(model, torch.randn(2, 16), linear_backend="torch")


def test_only_float_inputs_of_the_caller_are_user_inputs(rewritten_graph):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)
            self.register_buffer("offset", torch.zeros(16))

        def forward(self, ids, x):
            return self.proj(x + self.offset) + ids

    model = Model()
    fxquant.quantize_(model, "fp8_per_tensor")
    graph = rewritten_graph(model, torch.arange(16), torch.randn(2, 16))
    assert len(graph.calls.user_inputs) == 1
