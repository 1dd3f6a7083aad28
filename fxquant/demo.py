"""``fxquant demo``: a real language model in bfloat16 and in three FP8 schemes, measured on the same text."""

from __future__ import annotations

import copy
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from . import __version__, models
from .evaluate import Score, continue_greedily, passage, score, windows
from .planner import megabytes, model_nbytes
from .quantize import quantize_

SCHEMES = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
PROMPT = "The capital of France is"
WINDOWS, WINDOW_LENGTH, NEW_TOKENS = 9, 512, 24


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One scheme's numbers.

    Args:
        scheme: the shorthand, or ``bf16`` for the model as it was loaded.
        model_bytes: bytes of all parameters and buffers.
        quantised_bytes_before, quantised_bytes_after: bytes of the weights that were quantised; 0 for ``bf16``.
        perplexity: on the demo's passage.
        perplexity_change: relative to ``bf16``: 0.01 is one per cent worse.
        top1_agreement: share of places where the most likely next token is bf16's.
        continuation: what the model writes after the prompt.
        seconds: wall-clock seconds of converting, scoring and continuing.
        plan, report: ``Plan.to_dict()`` and ``Report.to_dict()``; None for ``bf16``.
    """

    scheme: str
    model_bytes: int
    quantised_bytes_before: int
    quantised_bytes_after: int
    perplexity: float
    perplexity_change: float
    top1_agreement: float
    continuation: str
    seconds: dict[str, float]
    plan: dict[str, Any] | None
    report: dict[str, Any] | None


def measure(
    model: nn.Module,
    tokenizer: Any,
    scheme: str | None,
    windows_BL: Tensor,
    *,
    baseline: Score | None = None,
    new_tokens: int,
    say: Callable[[str], None] = print,
) -> tuple[Measured, Score]:
    """Convert ``model`` in place (not where ``scheme`` is None), then score it and let it write.

    The model runs eager: on two cores, compiling takes longer than all that the demo computes.

    Args:
        windows_BL: the tokens to score, see ``evaluate.windows``.
        baseline: the score of the unquantised model; default: this model's own.
        new_tokens: length of the continuation.
        say: gets each piece of text for the reader.
    """
    start = time.perf_counter()
    report = quantize_(model, scheme) if scheme else None
    converted = time.perf_counter()
    say(f"{report.plan}\n\n{report}\n" if report else f"nothing is quantised: {megabytes(model_nbytes(model))} MB\n")
    scored = score(model, windows_BL)
    between = time.perf_counter()
    continuation = continue_greedily(model, tokenizer, PROMPT, new_tokens)
    end = time.perf_counter()
    baseline = baseline or scored
    sizes = report.to_dict() if report else {}
    measured = Measured(
        scheme=scheme or "bf16",
        model_bytes=model_nbytes(model),
        quantised_bytes_before=sizes.get("quantised_bytes_before", 0),
        quantised_bytes_after=sizes.get("quantised_bytes_after", 0),
        perplexity=scored.perplexity,
        perplexity_change=scored.perplexity / baseline.perplexity - 1,
        top1_agreement=scored.agreement(baseline),
        continuation=continuation,
        seconds={"convert": converted - start, "score": between - converted, "continue": end - between},
        plan=report.plan.to_dict() if report else None,
        report=sizes or None,
    )
    say(f"perplexity: {measured.perplexity:.3f}, top-1 agreement with bf16: {measured.top1_agreement:.2%}")
    say(f"continuation: {PROMPT + continuation!r}\n")
    return measured, scored


def table(runs: Iterable[Measured]) -> Table:
    """The last thing that the demo prints: a row for each scheme, in Markdown."""
    result = Table(box=MARKDOWN)
    result.add_column("scheme")
    for heading in ("model MB", "quantised part MB", "perplexity", "change", "top-1 = bf16", "seconds"):
        result.add_column(heading, justify="right")
    for run in runs:
        before, after = run.quantised_bytes_before, run.quantised_bytes_after
        result.add_row(
            run.scheme,
            megabytes(run.model_bytes),
            f"{megabytes(before)} -> {megabytes(after)} ({after / before:.3f})" if before else "-",
            f"{run.perplexity:.3f}",
            f"{run.perplexity_change:+.2%}",
            f"{run.top1_agreement:.2%}",
            f"{sum(run.seconds.values()):.1f}",
        )
    return result


def run(output: Path, device: str = "cpu", schemes: Sequence[str] = SCHEMES) -> None:
    """Measure every scheme, print the table, and write every number to ``output`` as JSON.

    Raises:
        ModelError: the packages that carry the model are missing.
    """
    start = time.perf_counter()
    model, tokenizer = models.load(models.DEMO)
    model.to(device)
    loaded = time.perf_counter() - start
    windows_BL = windows(tokenizer, passage(), WINDOWS, WINDOW_LENGTH).to(device)
    print(
        f"SmolLM2-135M-Instruct, loaded in {loaded:.1f} s; the text: {WINDOWS} windows of {WINDOW_LENGTH} tokens\n", flush=True
    )

    runs: list[Measured] = []
    baseline = None
    for scheme in (None, *schemes):
        print(f"## {scheme or 'bf16'}\n", flush=True)
        subject = copy.deepcopy(model) if scheme else model
        measured, scored = measure(subject, tokenizer, scheme, windows_BL, baseline=baseline, new_tokens=NEW_TOKENS)
        baseline = baseline or scored
        runs.append(measured)
    Console(width=110).print(table(runs))

    seconds = {"load": loaded, "all": time.perf_counter() - start}
    result = {
        "model": "SmolLM2-135M-Instruct",
        "package": models.DEMO_PACKAGE,
        "text": {"windows": WINDOWS, "window_length": WINDOW_LENGTH, "tokens": windows_BL.numel()},
        "prompt": PROMPT,
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {"fxquant": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": seconds,
        "runs": [asdict(run) for run in runs],
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{seconds['all']:.0f} s in all; every number: {output}")
