"""``fxquant demo``: a real language model in bfloat16 and in every scheme, measured on the same text."""

from __future__ import annotations

import copy
import json
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import __version__, markdown, models
from .config import resolve
from .errors import ConfigError
from .evaluate import Score, continue_greedily, passage, score, windows
from .kernels.formats import FORMATS, SCALE_SEARCHES, WEIGHT_FORMATS
from .planner import megabytes, model_nbytes
from .quantize import quantize_

PROMPT = "The capital of France is"
WINDOWS, WINDOW_LENGTH, NEW_TOKENS = 9, 512, 12

EXPECTED = "What one would expect of the perplexities, and whether it came out so on this text:"
README_BEGIN = "<!-- written by: fxquant demo --readme README.md -->"
README_END = "<!-- end of what it writes -->"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What ``quantize_`` is asked for, in its own arguments; as a string, how to write it. Neither: nothing is quantised."""

    quantization: str | None = None
    quantization_config: dict[str, Any] | None = None

    def __str__(self) -> str:
        config = json.dumps(self.quantization_config) if self.quantization_config else None
        return " + ".join(filter(None, (self.quantization, config))) or "bf16"


BF16 = Ask()

SCHEMES = (
    Ask(quantization="fp8_per_tensor"),
    Ask(quantization="fp8_per_channel"),
    Ask(quantization="fp8_per_block"),
    Ask(quantization="mxfp8"),
    Ask(quantization="mxfp4"),
    Ask(quantization="mxfp4", quantization_config={"scale_search": "mse"}),
    Ask(quantization_config={"linear": "nvfp4"}),
    Ask(quantization_config={"linear": "nvfp4", "scale_search": "mse"}),
    Ask(quantization_config={"linear": "int8_per_channel_static"}),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One scheme's numbers.

    Args:
        ask: what was asked for.
        model_bytes: bytes of all parameters and buffers.
        quantised_bytes_before, quantised_bytes_after: bytes of the weights that were quantised; 0 for ``bf16``.
        perplexity: on the demo's passage.
        perplexity_change: relative to ``bf16``: 0.01 is one per cent worse.
        top1_agreement: share of places where the most likely next token is bf16's.
        continuation: what the model writes after the prompt.
        seconds: wall-clock seconds of converting, scoring and continuing.
        plan, report: ``Plan.to_dict()`` and ``Report.to_dict()``; None for ``bf16``.
    """

    ask: Ask
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
    ask: Ask,
    windows_BL: Tensor,
    *,
    baseline: Score | None = None,
    new_tokens: int,
    say: Callable[[str], None] = print,
) -> tuple[Measured, Score]:
    """Convert ``model`` in place (not for ``BF16``), then score it and let it write.

    The model runs eager: on two cores, compiling takes longer than all that the demo computes.

    Args:
        windows_BL: the tokens to score, see ``evaluate.windows``.
        baseline: the score of the unquantised model; default: this model's own.
        new_tokens: length of the continuation.
        say: gets each piece of text for the reader.
    """
    start = time.perf_counter()
    report = None if ask == BF16 else quantize_(model, ask.quantization, ask.quantization_config)
    converted = time.perf_counter()
    say(f"{report.plan}\n\n{report}\n" if report else f"nothing is quantised: {megabytes(model_nbytes(model))} MB\n")
    scored = score(model, windows_BL)
    between = time.perf_counter()
    continuation = continue_greedily(model, tokenizer, PROMPT, new_tokens)
    end = time.perf_counter()
    baseline = baseline or scored
    sizes = report.to_dict() if report else {}
    measured = Measured(
        ask=ask,
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


def table(runs: Iterable[Measured], width: int = 120) -> str:
    """The numbers of all runs: a row for each, in Markdown."""
    numbers = ("model MB", "quantised part MB", "perplexity", "change", "top-1 = bf16", "seconds")
    rows = [
        (
            str(run.ask),
            megabytes(run.model_bytes),
            f"{megabytes(run.quantised_bytes_before)} -> {megabytes(run.quantised_bytes_after)}" if run.plan else "-",
            f"{run.perplexity:.3f}",
            f"{run.perplexity_change:+.2%}",
            f"{run.top1_agreement:.2%}",
            f"{sum(run.seconds.values()):.1f}",
        )
        for run in runs
    ]
    return markdown.table(("scheme", *numbers), rows, numbers=numbers, width=width)


def orderings(runs: Iterable[Measured]) -> Iterator[str]:
    """What one would expect of the perplexities, a line each: whether it came out so, and the two numbers that decide it."""
    found: dict[tuple[str, str], float] = {}
    for run in runs:
        weight, search = "bf16", "amax"
        if run.ask != BF16:
            policy = resolve(run.ask.quantization, run.ask.quantization_config)
            assert policy.linear is not None
            weight, search = policy.linear.weight.name, policy.scale_search
        found[weight, search] = run.perplexity

    def of(weights: Collection[str], searches: Collection[str] = SCALE_SEARCHES) -> list[float]:
        return [perplexity for (weight, search), perplexity in found.items() if weight in weights and search in searches]

    four = {name for name in WEIGHT_FORMATS if FORMATS[name].packed}
    eight = set(WEIGHT_FORMATS) - four
    expectations = [
        ("bf16 below every scheme", of({"bf16"}), of(WEIGHT_FORMATS)),
        ("8-bit weights below 4-bit ones", of(eight), of(four)),
        ("nvfp4 (blocks of 16) below mxfp4 (blocks of 32)", of({"nvfp4"}, {"amax"}), of({"mxfp4"}, {"amax"})),
        ("nvfp4 below mxfp4, both with scale_search mse", of({"nvfp4"}, {"mse"}), of({"mxfp4"}, {"mse"})),
        ("mxfp4 with scale_search mse below amax", of({"mxfp4"}, {"mse"}), of({"mxfp4"}, {"amax"})),
        ("nvfp4 with scale_search mse below amax", of({"nvfp4"}, {"mse"}), of({"nvfp4"}, {"amax"})),
    ]
    for text, lower, higher in expectations:
        if lower and higher:
            yield f"{text}: {'yes' if max(lower) < min(higher) else 'no'} ({max(lower):.3f} and {min(higher):.3f})"


def run(output: Path, device: str = "cpu", schemes: Sequence[Ask] = SCHEMES, readme: Path | None = None) -> None:
    """Measure every scheme, print the table, and write every number to ``output`` as JSON.

    Args:
        readme: a file whose lines between ``README_BEGIN`` and ``README_END`` become the table.

    Raises:
        ModelError: the packages that carry the model are missing.
        ConfigError: ``readme`` cannot be read, or lacks the marks.
    """
    if readme:
        _write_readme(readme, None)  # before minutes are spent
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
    for ask in (BF16, *schemes):
        print(f"## {ask}\n", flush=True)
        subject = model if ask == BF16 else copy.deepcopy(model)
        measured, scored = measure(subject, tokenizer, ask, windows_BL, baseline=baseline, new_tokens=NEW_TOKENS)
        baseline = baseline or scored
        runs.append(measured)
    print(table(runs))
    print(f"\n{EXPECTED}", *orderings(runs), sep="\n* ")

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
        "runs": [{"scheme": str(run.ask), **asdict(run)} for run in runs],
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{seconds['all']:.0f} s in all; every number: {output}")
    if readme:
        _write_readme(readme, _readme_block(runs, device))


def _readme_block(runs: Sequence[Measured], device: str) -> str:
    machine = f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    lines = [
        f"SmolLM2-135M-Instruct on {WINDOWS * WINDOW_LENGTH} tokens of Alice's Adventures in Wonderland ({WINDOWS} windows),",
        f"eager, {machine}. Seconds: to convert, to score the text and to write {NEW_TOKENS} tokens.",
        "",
        table(runs, width=200),
        "",
        EXPECTED,
        "",
        *(f"* {line}" for line in orderings(runs)),
    ]
    return "\n".join(lines)


def _write_readme(readme: Path, block: str | None) -> None:
    """Put ``block`` between the marks; None: only see that it can be done."""
    try:
        text = readme.read_text(encoding="utf-8")
        replaced = markdown.replace_block(text, README_BEGIN, README_END, block or "")
        if block:
            readme.write_text(replaced, encoding="utf-8")
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--readme: got {str(readme)!r}: {error}") from None
