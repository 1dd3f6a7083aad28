"""SmolLM2 writes the same tokens compiled as in eager, with a cache that grows and with a static one."""

from __future__ import annotations

import copy

import pytest
import torch

import fxquant


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "static"])
def test_compiled_generate_gives_the_tokens_of_eager(cache, smollm2):
    model, tokenizer = smollm2
    model = copy.deepcopy(model)
    fxquant.quantize_(model, "fp8_per_channel")
    inputs = tokenizer("The capital of France is", return_tensors="pt")

    def write() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**inputs, max_new_tokens=6, do_sample=False, cache_implementation=cache)

    eager = write()
    assert "Paris" in tokenizer.decode(eager[0])
    fxquant.compile(model, dynamic=True)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(write(), eager)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert torch.equal(write(), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # nothing is compiled at the second call
