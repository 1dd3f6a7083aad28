"""The passes run in their order and log how often each matched."""

from __future__ import annotations

import logging

import torch
from torch import nn

import fxquant
from fxquant.passes.pipeline import PASSES


def test_order():
    assert [rewrite.__name__ for rewrite in PASSES] == ["rewrite_sites", "share_activations", "fuse_siblings"]


def test_match_counts_are_logged_and_the_graph_is_dumped_at_debug(caplog, rewrite_and_run):
    model = nn.Sequential(nn.Linear(32, 32))
    fxquant.quantize_(model, "fp8_per_tensor")
    with caplog.at_level(logging.DEBUG, logger="fxquant"):
        rewrite_and_run(model, torch.randn(2, 32))
    text = "\n".join(record.message for record in caplog.records)
    assert "pass rewrite_sites: 1 matches" in text
    assert "pass share_activations: 0 matches" in text
    assert "fxquant.scaled_mm" in text


def test_without_weights_nothing_matches(rewrite_and_run):
    x = torch.randn(2, 32)
    got, graph = rewrite_and_run(nn.Sequential(nn.ReLU()), x)
    assert torch.equal(got, x.relu())
    assert graph.matches == {"rewrite_sites": 0, "share_activations": 0, "fuse_siblings": 0}
