"""Each call takes the components from the weights that arrive, after checking that they are what was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxquant
from fxquant import QuantizedTensor, UnsupportedError
from fxquant.kernels.formats import FORMATS, Scheme
from fxquant.options import BackendOptions
from fxquant.rewrite import Rewritten, rewrite
from fxquant.runner import runner


@pytest.fixture
def traced() -> tuple[nn.Linear, Rewritten]:
    """A converted layer and its rewritten graph."""
    module = nn.Linear(16, 32, bias=False)
    fxquant.quantize_(module, "fp8_per_channel")
    graphs: list[Rewritten] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(rewrite(gm, inputs, BackendOptions()))
        return gm

    with torch.no_grad():
        torch.compile(module, backend=backend)(torch.zeros(3, 16))
    return module, graphs[0]


def arguments(graph: Rewritten, x: torch.Tensor, weight: Any) -> list[Any]:
    """Inputs of the traced graph with this activation and weight."""
    (slot,) = graph.calls.slots
    given: list[Any] = [None] * (len(graph.calls.kept) + 1)
    given[slot.index], given[graph.calls.kept[0]] = weight, x
    return given


def test_components_are_handed_over_in_order(traced):
    module, graph = traced
    x = torch.randn(3, 16)
    assert runner(graph.calls, lambda *inputs: inputs)(*arguments(graph, x, module.weight)) == (
        x,
        module.weight.qdata,
        module.weight.scale,
    )


def test_an_equal_spec_is_enough(traced):
    module, graph = traced
    other = QuantizedTensor.from_float(torch.randn(32, 16), module.weight.spec.scheme)
    _, qdata, _ = runner(graph.calls, lambda *inputs: inputs)(*arguments(graph, torch.randn(3, 16), other))
    assert qdata is other.qdata


@pytest.mark.parametrize("kind", ["float", "other format"])
def test_other_weights_run_the_graph_as_traced(traced, kind):
    _, graph = traced
    weight, x = torch.randn(32, 16), torch.randn(3, 16)
    if kind == "other format":
        weight = QuantizedTensor.from_float(weight, Scheme(weight=FORMATS["fp8_per_block_static"]))

    def never(*inputs: Any) -> None:
        raise AssertionError("the compiled graph is for another format")

    (result,) = runner(graph.calls, never)(*arguments(graph, x, weight))
    assert torch.equal(result, torch.nn.functional.linear(x, weight))


def test_another_shape_is_refused(traced):
    module, graph = traced
    weight = QuantizedTensor.from_float(torch.randn(8, 16), module.weight.spec.scheme)
    with pytest.raises(UnsupportedError, match=r"weight of shape \(32, 16\).*\(8, 16\)"):
        runner(graph.calls, lambda *inputs: inputs)(*arguments(graph, torch.randn(3, 16), weight))


def test_gradients_are_refused_for_leaves_and_dropped_for_others(traced):
    module, graph = traced
    call = runner(graph.calls, lambda *inputs: inputs)
    leaf = torch.randn(3, 16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="inference only"):
        call(*arguments(graph, leaf, module.weight))
    assert not call(*arguments(graph, leaf * 2, module.weight))[0].requires_grad
    with torch.no_grad():
        assert call(*arguments(graph, leaf, module.weight))[0] is leaf
