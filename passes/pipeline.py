"""The ordered list of passes, and what running one means: count, log, check."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import fx

from .fuse_siblings import fuse_siblings
from .rewrite_sites import rewrite_sites
from .share_activations import share_activations

log = logging.getLogger("fxquant")

Pass = Callable[[fx.Graph], int]
"""A pass rewrites a graph in place and returns how often it matched."""

PASSES: tuple[Pass, ...] = (rewrite_sites, share_activations, fuse_siblings)


def run_passes(graph: fx.Graph) -> dict[str, int]:
    """Run every pass in order on ``graph``; returns matches by pass name. At DEBUG the graph is logged after each."""
    matches = {}
    for rewrite in PASSES:
        matches[rewrite.__name__] = rewrite(graph)
        log.info("pass %s: %d matches", rewrite.__name__, matches[rewrite.__name__])
        log.debug("graph after %s:\n%s", rewrite.__name__, graph)
    graph.lint()
    return matches
