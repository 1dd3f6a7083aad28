"""Names, kinds and ties of the layers in a Dynamo graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxquant.graph_layers import graph_layers


@pytest.fixture
def layers_of() -> Callable[..., dict[str, tuple[str, int, str | None]]]:
    """Name -> (kind, contraction, tied_to) of the layers in a module's graph."""

    def trace(module: nn.Module, *args: torch.Tensor) -> dict[str, tuple[str, int, str | None]]:
        found = {}

        def backend(gm, inputs):
            for layer, _ in graph_layers(gm.graph, inputs):
                found[layer.name] = (layer.kind, layer.weights[0].contraction, layer.tied_to)
            return gm

        with torch.no_grad():
            torch.compile(module, backend=backend, fullgraph=True)(*args)
        return found

    return trace


def test_tied_llama(layers_of, llama):
    found = layers_of(llama(tie_word_embeddings=True), torch.arange(4).reshape(1, 4))
    assert found["lm_head"] == ("head", -1, None)
    assert found["model.embed_tokens"] == ("embedding", -1, None)
    assert found["model.layers.1.mlp.down_proj"] == ("linear", -1, None)
    assert len(found) == 16


def test_a_linear_compiled_alone_has_the_empty_name(layers_of):
    assert layers_of(nn.Linear(8, 8), torch.randn(1, 8)) == {"": ("linear", -1, None)}


def test_conv1d_routers_and_functional_products(layers_of):
    from transformers.pytorch_utils import Conv1D

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate, self.plain = Conv1D(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.projection = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("table", torch.randn(8, 8))

        def forward(self, x):
            return F.linear(self.gate(self.conv(x)), self.plain.weight) @ self.projection @ self.table

    assert layers_of(Model(), torch.randn(2, 8)) == {
        "conv": ("linear", -2, None),
        "gate": ("router", -1, None),
        "plain": ("linear", -1, None),
        "projection": ("linear", -2, None),
    }


def test_shared_weights_come_under_each_name(layers_of):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert layers_of(model, torch.randn(2, 8)) == {"0": ("linear", -1, None), "1": ("linear", -1, "0")}


def test_adapters_of_a_linear_go_by_their_own_names(layers_of):
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

        def forward(self, x):
            return super().forward(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)

    found = layers_of(nn.Sequential(Adapted()), torch.randn(2, 8))
    assert set(found) == {"0", "0.lora_A", "0.lora_B"}


def test_tensors_that_a_caller_passes_are_no_layers(layers_of):
    class Functional(nn.Module):
        def forward(self, x, w):
            return F.linear(x, w)

    assert layers_of(Functional(), torch.randn(2, 8), torch.randn(8, 8)) == {}
    assert layers_of(Functional(), torch.randn(2, 8), nn.Parameter(torch.randn(8, 8))) == {}
