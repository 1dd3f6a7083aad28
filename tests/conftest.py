"""Small real models and measures that many tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Every test starts without compiled graphs and with the same random numbers."""
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """||a - b|| / ||b||, 0 for two empty tensors."""

    def measure(a: Tensor, b: Tensor) -> float:
        assert a.shape == b.shape
        error, scale = (a.detach().float() - b.detach().float()).norm(), b.detach().float().norm()
        return float(error / scale) if scale else float(error)

    return measure


@pytest.fixture
def llama() -> Callable[..., nn.Module]:
    """A small random Llama of transformers; keywords go into its config."""

    def make(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: object) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        defaults: dict[str, object] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
        }
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**defaults, **config})).to(dtype).eval()

    return make
