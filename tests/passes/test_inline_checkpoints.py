"""Layers inside a checkpoint are rewritten like any others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxquant


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def body(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, checkpoint(self.inner, y, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        y, z = checkpoint(self.body, x, use_reentrant=False)
        return y + self.third(z)


def test_converted(rewrite_and_run, relative_error, count_ops):
    module, x = Checkpointed(), torch.randn(4, 32)
    fxquant.quantize_(module, "fp8_per_channel")
    with torch.no_grad():
        expected = module(x)
    got, graph = rewrite_and_run(module, x)
    counts = count_ops(graph.gm.graph)
    assert counts == {"quantize_activation": 3, "scaled_mm": 3, "scaled_grouped_mm": 0, "dequantize_weight": 0}
    assert relative_error(got, expected) < 1e-5


def test_plain(rewrite_and_run, count_ops):
    _, graph = rewrite_and_run(Checkpointed(), torch.randn(4, 32), quantization="fp8_per_channel")
    assert count_ops(graph.gm.graph)["scaled_mm"] == 3
    assert {slot.name for slot in graph.calls.slots} == {"first", "second", "third"}
