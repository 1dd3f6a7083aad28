"""Activation checkpoints are taken apart: graphs here are for inference, where nothing is recomputed.

Dynamo keeps the body of ``torch.utils.checkpoint`` as a graph of its own, in which no other pass would look.
"""

from __future__ import annotations

import torch
from torch import fx


def inline_checkpoints(gm: fx.GraphModule) -> int:
    """Put the bodies of checkpoints in their place; returns how many. One that holds attributes of its own stays."""
    count = 0
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint and node.args[0].op == "get_attr":
            body = getattr(gm, node.args[0].target)
            count += inline_checkpoints(body)
            if not body.graph.find_nodes(op="get_attr"):
                _inline(gm.graph, node, body.graph)
                count += 1
    if count:
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
    return count


def _inline(graph: fx.Graph, call: fx.Node, body: fx.Graph) -> None:
    inner_to_outer = dict(zip(body.find_nodes(op="placeholder"), call.args[1:], strict=True))
    with graph.inserting_before(call):
        for inner in body.nodes:
            if inner.op not in ("placeholder", "output"):
                inner_to_outer[inner] = graph.node_copy(inner, lambda node: inner_to_outer[node])
    (output,) = body.find_nodes(op="output")
    results = fx.node.map_arg(output.args[0], lambda node: inner_to_outer[node])
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
