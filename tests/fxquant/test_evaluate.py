"""Perplexity and its companions on models whose answers are known."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxquant import ConfigError
from fxquant.evaluate import Score, continue_greedily, passage, score, windows
from fxquant.models import load

VOCABULARY = 11


class Successor(nn.Module):
    """Predicts token + 1 with a probability of its own choice, the others evenly."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.seen.append(input_ids.shape[1])
        rest = (1 - self.probability) / (VOCABULARY - 1)
        logits = torch.full((*input_ids.shape, VOCABULARY), math.log(rest))
        logits.scatter_(-1, ((input_ids + 1) % VOCABULARY)[..., None], math.log(self.probability))
        return SimpleNamespace(logits=logits)


def _counting(windows: int, length: int) -> Tensor:
    return (torch.arange(windows * length) % VOCABULARY).view(windows, length)


def test_perplexity_of_a_model_with_known_probabilities() -> None:
    model = Successor(0.5)
    result = score(model, _counting(3, 7))
    assert result.perplexity == pytest.approx(2.0, rel=1e-5)
    assert result.top1.shape == (3, 6)
    assert torch.equal(result.top1, _counting(3, 7)[:, 1:])
    assert model.seen == [7, 7, 7]
    assert score(Successor(1 / VOCABULARY), _counting(2, 5)).perplexity == pytest.approx(VOCABULARY, rel=1e-5)


def test_every_scored_token_weighs_the_same() -> None:
    tokens = torch.tensor([[0, 1, 2], [0, 0, 0]])  # two right successors, two wrong
    expected = math.exp(-(2 * math.log(0.5) + 2 * math.log(0.05)) / 4)
    assert score(Successor(0.5), tokens).perplexity == pytest.approx(expected, rel=1e-5)


def test_agreement() -> None:
    a = Score(perplexity=1.0, top1=torch.tensor([[1, 2], [3, 4]]))
    b = Score(perplexity=1.0, top1=torch.tensor([[1, 2], [3, 5]]))
    assert a.agreement(a) == 1
    assert a.agreement(b) == b.agreement(a) == 0.75


def test_windows(saved_llama: Path) -> None:
    _, tokenizer = load(str(saved_llama))
    cut = windows(tokenizer, "abcdefgh", 2, 3)
    assert tokenizer.batch_decode(cut) == ["abc", "def"]
    with pytest.raises(ConfigError, match="a text of 8 tokens, needed are 3 windows of 3 = 9"):
        windows(tokenizer, "abcdefgh", 3, 3)


def test_the_continuation_is_the_models_own_greedy_one(saved_llama: Path) -> None:
    model, tokenizer = load(str(saved_llama))
    ids = tokenizer("Alice", return_tensors="pt").input_ids
    with torch.inference_mode():
        for _ in range(6):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert continue_greedily(model, tokenizer, "Alice", 6) == tokenizer.decode(ids[0, 5:])


def test_the_passage_is_two_whole_chapters() -> None:
    text = passage()
    assert text.startswith("CHAPTER I. Down the Rabbit-Hole\n\nAlice was beginning to get very tired")
    assert text.endswith("and the whole party swam to the shore.\n")
    assert "CHAPTER II. The Pool of Tears" in text
    assert "Gutenberg" not in text
    assert 20_000 < len(text) < 25_000
