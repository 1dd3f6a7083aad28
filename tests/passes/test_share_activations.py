"""Siblings share one quantisation of their input, unless the input is written in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxquant


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) * self.c(x)


class WrittenBetween(Siblings):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        first = self.a(x)
        x.view(-1)[:16].mul_(3.0)
        return first + self.b(x) + self.c(x)


class WrittenElsewhere(Siblings):
    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu_(self.a(x))
        return first.mul_(2) + self.b(x) + self.c(x)


class WrittenByAnActivation(Siblings):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Hardtanh(-0.1, 0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        first = self.a(x)
        self.act(x)
        return first + self.b(x) + self.c(x)


class OtherInput(Siblings):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x + 1) + self.c(x)


def run(module: nn.Module, rewrite_and_run, relative_error, quantization="fp8_per_channel", config=None):
    fxquant.quantize_(module, quantization, config)
    x = torch.randn(4, 32)
    got, graph = rewrite_and_run(module, x.clone())
    with torch.no_grad():
        assert relative_error(got, module(x.clone())) < 1e-5
    return graph


def test_siblings_share(rewrite_and_run, relative_error, count_ops):
    graph = run(Siblings(), rewrite_and_run, relative_error)
    assert graph.matches == {"rewrite_sites": 3, "share_activations": 2, "fuse_siblings": 1}
    assert count_ops(graph.gm.graph)["quantize_activation"] == 1


@pytest.mark.parametrize("module", [WrittenBetween, WrittenByAnActivation])
def test_a_write_in_between_keeps_them_apart(module, rewrite_and_run, relative_error, count_ops):
    graph = run(module(), rewrite_and_run, relative_error)
    assert count_ops(graph.gm.graph)["quantize_activation"] == 2


def test_a_write_to_something_else_does_not(rewrite_and_run, relative_error, count_ops):
    graph = run(WrittenElsewhere(), rewrite_and_run, relative_error)
    assert count_ops(graph.gm.graph)["quantize_activation"] == 1


def test_other_inputs_and_other_formats_are_not_shared(rewrite_and_run, relative_error, count_ops):
    graph = run(OtherInput(), rewrite_and_run, relative_error)
    assert count_ops(graph.gm.graph)["quantize_activation"] == 2
    mixed = {"targets": {"a": "fp8_per_block", "[bc]": "fp8_per_channel"}}
    graph = run(Siblings(), rewrite_and_run, relative_error, None, mixed)
    assert count_ops(graph.gm.graph)["quantize_activation"] == 2


def test_a_llama_block_quantises_four_activations(rewrite_and_run, llama, count_ops):
    """q/k/v, o, gate/up, down: one quantisation and one product each."""
    model = llama(num_hidden_layers=1)
    fxquant.quantize_(model, "fp8_per_channel")
    _, graph = rewrite_and_run(model, torch.arange(16).reshape(2, 8))
    counts = count_ops(graph.gm.graph)
    assert counts == {"quantize_activation": 4, "scaled_mm": 4, "scaled_grouped_mm": 0, "dequantize_weight": 0}
