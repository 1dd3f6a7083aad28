"""The Dynamo backend: the graph is rewritten over quantised weights, and Inductor compiles the rest."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback

from . import kernels
from .errors import FxQuantError
from .options import BackendOptions
from .passes.rewrite_sites import TRACED_CALLS
from .rewrite import Rewritten, rewrite
from .runner import runner


def fxquant_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend for ``torch.compile(model, backend="fxquant", options={...})``; see ``BackendOptions`` for the options.

    Raises:
        ConfigError: an option, the mode or the quantisation configuration cannot be parsed.
        RuleError: rules contradict each other, or a pattern matches nothing in this graph.
        UnsupportedError: a weight or shape that cannot be served.
    """
    try:
        parsed = BackendOptions.parse(mode, options)
        rewritten = rewrite(gm, example_inputs, parsed)
        return runner(rewritten.calls, _inductor(rewritten, parsed))
    except FxQuantError as error:
        raise _through_dynamo(error) from None


class _ThroughDynamo(ShortenTraceback):
    """What Dynamo does not wrap; its frames above the compiled call are of no use to a caller."""

    def remove_dynamo_frames(self) -> _ThroughDynamo:  # type: ignore[override]
        return self.with_traceback(None)


def _through_dynamo(error: FxQuantError) -> FxQuantError:
    """The error as one that Dynamo hands to the caller as it is, instead of inside a ``BackendCompilerFailed``."""
    kind = type(type(error).__name__, (type(error), _ThroughDynamo), {"__module__": type(error).__module__})
    visible: FxQuantError = kind.__new__(kind, *error.args)
    visible.__dict__.update(error.__dict__)
    return visible


def _inductor(rewritten: Rewritten, options: BackendOptions) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches = options.inductor_patches()
    marked = dict(torch._inductor.config.unsafe_marked_cacheable_functions)
    ours = {f"{call.__module__}.{call.__name__}": _code_digest() for call in TRACED_CALLS}
    patches["unsafe_marked_cacheable_functions"] = {**marked, **ours}
    with torch.no_grad():
        return cast(Callable[..., Any], compile_fx(rewritten.gm, rewritten.inputs, config_patches=patches))


@functools.cache
def _code_digest() -> str:
    """Digest of the kernels' source: AOTAutograd's cache knows our ops by name alone and must see when their code changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
