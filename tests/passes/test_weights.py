"""Uses of a weight are followed through transposes and casts and through nothing else."""

from __future__ import annotations

import torch
from torch import fx

from fxquant.passes.weights import match_site, weight_use


def placeholder(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = torch.zeros(*shape)
    return node


def test_transposes_cancel_and_casts_are_seen_through():
    graph = fx.Graph()
    w = placeholder(graph, "w", 4, 6)
    node, value = w, w.meta["example_value"]
    for name, args, swapped in (("t", (), True), ("half", (), True), ("transpose", (0, 1), False), ("permute", (1, 0), True)):
        node = graph.call_method(name, (node, *args))
        value = getattr(value, name)(*args)
        node.meta["example_value"] = value
        use = weight_use(node, lambda n: n is w)
        assert use is not None
        assert (use.source, use.swapped, use.dtype) == (w, swapped, value.dtype)


def test_other_ops_end_the_trail():
    graph = fx.Graph()
    w = placeholder(graph, "w", 4, 6)
    doubled = graph.call_method("mul", (w, 2))
    doubled.meta["example_value"] = w.meta["example_value"] * 2
    assert weight_use(doubled, lambda n: n is w) is None
    assert weight_use(w, lambda n: False) is None


def test_weight_times_weight_and_scaled_addmm_are_no_sites():
    graph = fx.Graph()
    w, x, b = placeholder(graph, "w", 4, 4), placeholder(graph, "x", 2, 4), placeholder(graph, "b", 4)
    is_weight = lambda n: n is w  # noqa: E731
    assert match_site(graph.call_function(torch.matmul, (w, w)), is_weight) is None
    assert match_site(graph.call_function(torch.addmm, (b, x, w), {"beta": 2}), is_weight) is None
    assert match_site(graph.call_function(torch.matmul, (x, w), {"out": b}), is_weight) is None
    site = match_site(graph.call_function(torch.addmm, (b, x, w)), is_weight)
    assert site is not None
    assert (site.x, site.bias, site.contraction) == (x, b, -2)
