"""The errors that fxquant raises on purpose, and the 'did you mean' that their messages share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from .kernels.errors import FxQuantError, UnsupportedError

__all__ = ["ConfigError", "FxQuantError", "RuleError", "UnsupportedError", "suggest"]


class ConfigError(FxQuantError, ValueError):
    """``quantization`` or ``quantization_config`` cannot be parsed, or the two cannot be merged."""


class RuleError(FxQuantError, ValueError):
    """Rules contradict each other on a layer, or a pattern matches nothing.

    Args:
        message: what was found, what would be accepted and the remedy, layer by layer.
        layers: names of the layers at fault, in model order; empty where only patterns are.
    """

    def __init__(self, message: str, layers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.layers = tuple(layers)


def suggest(name: str, accepted: Collection[str]) -> str:
    """`` Did you mean 'x'?`` for the accepted name nearest to this one, or an empty string where none is near."""
    folded = {candidate.casefold(): candidate for candidate in accepted}
    near = get_close_matches(name.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f" Did you mean '{folded[near[0]]}'?" if near else ""
