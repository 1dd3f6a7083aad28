"""Writes are recognised in every spelling that Dynamo leaves in a graph."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from torch import fx

from fxquant.passes.mutation import perhaps_written_operands, storages, view_base, written_operands


@pytest.mark.parametrize(
    ("target", "method", "writes"),
    [
        ("mul_", True, True),
        ("mul", True, False),
        ("__getitem__", True, False),
        (operator.iadd, False, True),
        (operator.add, False, False),
        (operator.setitem, False, True),
        (torch.relu_, False, True),
        (torch.relu, False, False),
        (torch.ops.aten.add_.Tensor, False, True),
        (torch.ops.aten.add.Tensor, False, False),
    ],
)
def test_written_operands(target, method, writes):
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_method if method else graph.call_function
    node = call(target, (x, y))
    assert list(written_operands(node)) == ([x] if writes else [])


def test_out_and_inplace_keywords_write():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(written_operands(graph.call_function(torch.add, (x, x), {"out": y}))) == [y]
    assert list(written_operands(graph.call_function(torch.nn.functional.relu, (x,), {"inplace": True}))) == [x]


@pytest.mark.parametrize(
    "target",
    [torch.nn.functional.hardtanh, torch.nn.functional.elu, torch.nn.functional.leaky_relu, torch.nn.functional.hardswish],
)
def test_inplace_by_position_writes(target):
    graph = fx.Graph()
    x = graph.placeholder("x")
    names = list(inspect.signature(target).parameters)
    defaults = [inspect.signature(target).parameters[name].default for name in names[1:]]
    for asked in (True, False):
        arguments = [asked if name == "inplace" else value for name, value in zip(names[1:], defaults, strict=True)]
        assert list(written_operands(graph.call_function(target, (x, *arguments)))) == ([x] if asked else [])


def test_packets_write_as_their_overloads_and_higher_order_ops_may_write_all():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(written_operands(graph.call_function(torch.ops.aten.add_, (x, y)))).count(x)
    assert not list(written_operands(graph.call_function(torch.ops.aten.add, (x, y))))
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    assert list(perhaps_written_operands(graph.call_function(checkpoint, (x, y)))) == [x, y]
    assert list(written_operands(graph.call_function(checkpoint, (x, y)))) == []
    assert list(perhaps_written_operands(graph.call_method("mul_", (x, y)))) == [x]


def test_views_share_storage_and_lead_to_their_base():
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_method("view", (graph.call_function(operator.getitem, (x, 0)), -1))
    x.meta["example_value"] = torch.zeros(2, 2)
    view.meta["example_value"] = x.meta["example_value"][0].view(-1)
    assert view_base(view) is x
    assert storages(view) == storages(x)
    other = graph.call_method("clone", (x,))
    other.meta["example_value"] = x.meta["example_value"].clone()
    assert view_base(other) is other
    assert not storages(other) & storages(x)
