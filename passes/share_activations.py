"""Siblings that read the same activation share one quantisation of it (q/k/v, gate/up, any others).

Inductor does not merge equal quantisations by itself: without this pass each sibling has its own amax and FP8 buffer.
"""

from __future__ import annotations

import torch
from torch import fx

from .mutation import perhaps_written_operands, storages


def share_activations(graph: fx.Graph) -> int:
    """Merge equal ``quantize_activation`` nodes in place; returns the number of nodes removed.

    A write to the activation between two of them, or what may be one, keeps them apart.
    """
    removed = 0
    current: dict[tuple[object, object], fx.Node] = {}
    for node in list(graph.nodes):
        written = {storage for operand in perhaps_written_operands(node) for storage in storages(operand)}
        if written:
            current = {key: first for key, first in current.items() if not written & storages(first.args[0])}  # type: ignore[arg-type]
        if node.op != "call_function" or node.target is not torch.ops.fxquant.quantize_activation.default:
            continue
        key = (node.args[0], node.args[1])
        first = current.setdefault(key, node)
        if first is node:
            continue
        parts = {user.args[1]: user for user in first.users}
        for user in list(node.users):
            user.replace_all_uses_with(parts[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        removed += 1
    return removed
