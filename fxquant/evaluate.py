"""How well a language model still predicts a text: perplexity, agreement of top-1 predictions, a greedy continuation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ConfigError


def passage() -> str:
    """The text that the demo measures on: two chapters in the public domain (``data/README.md`` says which), 22 KB."""
    return (files("fxquant") / "data" / "alice.txt").read_text(encoding="utf-8")


def windows(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """The first ``count * length`` tokens of ``text`` as int64 of shape (count, length); no special tokens are added.

    Raises:
        ConfigError: the text has fewer tokens.
    """
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) < count * length:
        raise ConfigError(
            f"windows: got a text of {len(ids)} tokens, needed are {count} windows of {length} = {count * length}"
        )
    return torch.tensor(ids[: count * length]).view(count, length)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's predictions of a text.

    Args:
        perplexity: exp of the mean negative log-likelihood of every token but the first of each window.
        top1: the most likely next token at each of those places, int64 of shape (windows, length - 1).
    """

    perplexity: float
    top1: Tensor

    def agreement(self, other: Score) -> float:
        """Share of places at which both models' most likely token is the same, 0 to 1."""
        return (self.top1 == other.top1).double().mean().item()


@torch.inference_mode()
def score(model: nn.Module, windows_BL: Tensor) -> Score:
    """Score a causal language model on windows of tokens, one window at a time, each without the text before it.

    Args:
        model: called as ``model(input_ids=ids)``; returns an object with ``logits``.
        windows_BL: int64 of shape (windows, length) on the model's device; length at least 2.
    """
    losses, top1 = [], []
    for window in windows_BL:
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, window[1:], reduction="none").double())
        top1.append(logits.argmax(-1))
    return Score(perplexity=math.exp(torch.cat(losses).mean().item()), top1=torch.stack(top1).cpu())


@torch.inference_mode()
def continue_greedily(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """What the model writes after ``prompt``, taking the most likely token each time; the prompt itself is left out."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
