"""The demo on its real model, against a fake quantisation written here from the formulas alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant import QuantizedTensor, demo
from fxquant.config import resolve
from fxquant.evaluate import Score, passage, score, windows
from fxquant.kernels.formats import WEIGHT_FORMATS

pytestmark = pytest.mark.slow

TINY = torch.finfo(torch.float32).tiny


def _fp8(x: Tensor) -> Tensor:
    """``x`` after a trip through e4m3 with one scale, max(amax / 448, T)."""
    scale = torch.clamp(x.abs().max() / torch.tensor(448.0), min=TINY)
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale


def _by_row(x: Tensor) -> Tensor:
    scale = torch.clamp(x.abs().max(dim=-1, keepdim=True).values / torch.tensor(448.0), min=TINY)
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale


def _by_tile(w: Tensor) -> Tensor:
    return torch.cat([torch.cat([_fp8(tile) for tile in rows.split(128, dim=1)], dim=1) for rows in w.split(128, dim=0)])


def _by_128_columns(x: Tensor) -> Tensor:
    return torch.cat([_by_row(part) for part in x.split(128, dim=-1)], dim=-1)


def _int8(w: Tensor) -> Tensor:
    scale = torch.clamp(w.abs().amax(1, keepdim=True) / torch.tensor(127.0), min=TINY)
    return (w / scale).round().clamp(-127, 127) * scale


def _amax(w: Tensor, columns: int) -> Tensor:
    """The magnitude of each element's block, in float64."""
    blocks = w.unflatten(1, (-1, columns)).abs().amax(2)
    return blocks.repeat_interleave(columns, 1).double().clamp(min=TINY)


def _mxfp8(w: Tensor) -> Tensor:
    scale = torch.exp2(torch.ceil(torch.log2(_amax(w, 32) / 448))).float()
    return (w / scale).to(torch.float8_e4m3fn).float() * scale


def _e2m1(x: Tensor) -> Tensor:
    """To the nearest of the 4-bit floats; a tie goes to the one of even code."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    down, up = torch.bucketize(x.abs(), midpoints), torch.bucketize(x.abs(), midpoints, right=True)
    code = torch.where(down % 2 == 0, down, up)
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code].copysign(x)


def _mxfp4(w: Tensor) -> Tensor:
    half, exponent = torch.frexp(_amax(w, 32))  # half in [0.5, 1): half of the mantissa
    scale = torch.exp2(exponent - 1 + (half >= 1.75 / 2).int() - 2).float()
    return _e2m1(w / scale) * scale


def _nvfp4(w: Tensor) -> Tensor:
    g = w.abs().max() / 2688
    scale = (_amax(w, 16).float() / 6 / g).to(torch.float8_e4m3fn).float() * g
    return torch.where(scale == 0, 0, _e2m1(w / scale) * scale)


def _as_it_is(x: Tensor) -> Tensor:
    return x


FAKES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fp8_per_tensor": (_fp8, _by_row),
    "fp8_per_channel": (_by_row, _by_row),
    "fp8_per_block": (_by_tile, _by_128_columns),
    "mxfp8": (_mxfp8, _as_it_is),
    "mxfp4": (_mxfp4, _as_it_is),
    '{"linear": "nvfp4"}': (_nvfp4, _as_it_is),
    '{"linear": "int8_per_channel_static"}': (_int8, _as_it_is),
}
SEARCHED = {'mxfp4 + {"scale_search": "mse"}': "mxfp4", '{"linear": "nvfp4", "scale_search": "mse"}': '{"linear": "nvfp4"}'}
"""Schemes that search their scales -> the same without."""

ASKS = {str(ask): ask for ask in demo.SCHEMES}


class _FakeLinear(nn.Module):
    def __init__(self, linear: nn.Linear, weight: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        assert linear.bias is None
        self.weight, self.activation = weight(linear.weight.detach().float()), activation

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(x.float()), self.weight).to(x.dtype)


def _fake_quantised(model: nn.Module, scheme: str) -> nn.Module:
    fake = copy.deepcopy(model)
    for name, module in list(fake.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(fake.get_submodule(parent), last, _FakeLinear(module, *FAKES[scheme]))
    return fake


@pytest.fixture(scope="module")
def text(smollm2: tuple[nn.Module, Any]) -> Tensor:
    return windows(smollm2[1], passage(), 2, 256)


def test_every_scheme_is_measured() -> None:
    assert set(ASKS) == {*FAKES, *SEARCHED}
    requests = [resolve(ask.quantization, ask.quantization_config).linear for ask in demo.SCHEMES]
    assert {request.weight.name for request in requests if request} == set(WEIGHT_FORMATS)


@pytest.fixture(scope="module")
def plain(smollm2: tuple[nn.Module, Any], text: Tensor) -> Score:
    return score(smollm2[0], text)


@pytest.mark.parametrize("scheme", FAKES)
def test_perplexity_is_that_of_an_independent_fake_quantisation(
    smollm2: tuple[nn.Module, Any], text: Tensor, plain: Score, scheme: str
) -> None:
    model, tokenizer = smollm2
    fake = score(_fake_quantised(model, scheme), text)
    measured, scored = demo.measure(
        copy.deepcopy(model), tokenizer, ASKS[scheme], text, baseline=plain, new_tokens=1, say=lambda _: None
    )
    assert measured.perplexity == pytest.approx(fake.perplexity, rel=0.01)
    assert measured.perplexity_change == measured.perplexity / plain.perplexity - 1
    four_bits = "fp4" in scheme
    # The demo's text is nine times as long, and its change below 4% for 8 bits.
    assert 0 < abs(measured.perplexity_change) < (0.6 if four_bits else 0.08)
    assert scored.agreement(fake) > scored.agreement(plain) == measured.top1_agreement
    assert measured.quantised_bytes_after <= (0.29 if four_bits else 0.52) * measured.quantised_bytes_before


def test_what_is_left_alone(smollm2: tuple[nn.Module, Any], text: Tensor) -> None:
    model, tokenizer = smollm2
    converted = copy.deepcopy(model)
    measured, _ = demo.measure(converted, tokenizer, ASKS["fp8_per_channel"], text[:1, :8], new_tokens=1, say=lambda _: None)
    before, after = dict(model.named_parameters()), dict(converted.named_parameters())
    quantised = {name for name, parameter in after.items() if isinstance(parameter, QuantizedTensor)}
    assert quantised == {name for name in before if name.endswith("_proj.weight")}
    assert len(quantised) == 210
    for name in before.keys() - quantised:
        assert type(after[name]) is nn.Parameter
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)), name
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    assert converted.lm_head.weight.dtype == torch.bfloat16
    assert measured.quantised_bytes_before == sum(before[name].nbytes for name in quantised)
    saved = measured.quantised_bytes_before - measured.quantised_bytes_after
    assert measured.model_bytes == sum(t.nbytes for t in [*before.values(), *model.buffers()]) - saved


def test_run_prints_and_writes_every_number(
    smollm2: tuple[nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.models, "load", lambda _: (copy.deepcopy(smollm2[0]), smollm2[1]))
    for name, value in {"WINDOWS": 1, "WINDOW_LENGTH": 64, "NEW_TOKENS": 2}.items():
        monkeypatch.setattr(demo, name, value)
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{demo.README_BEGIN}\nan old table\n{demo.README_END}\n\nThe rest.\n")
    demo.run(tmp_path / "demo.json", schemes=(ASKS["fp8_per_tensor"],), readme=readme)
    written = json.loads((tmp_path / "demo.json").read_text())
    plain, fp8 = written["runs"]
    assert (plain["scheme"], plain["plan"], plain["report"], plain["top1_agreement"]) == ("bf16", None, None, 1)
    assert fp8["scheme"] == fp8["ask"]["quantization"] == "fp8_per_tensor"
    assert len(fp8["plan"]["layers"]) == len(fp8["report"]["layers"]) == 211
    assert fp8["perplexity_change"] == pytest.approx(fp8["perplexity"] / plain["perplexity"] - 1)
    assert fp8["continuation"].startswith(" Paris")
    assert written["text"]["tokens"] == 64
    printed = capsys.readouterr().out
    assert "mlp.down_proj" in printed
    assert "SQNR" in printed
    assert "| fp8_per_tensor |" in printed
    assert f"{fp8['perplexity']:.3f}" in printed
    before, block = readme.read_text().split(f"{demo.README_BEGIN}\n")
    block, after = block.split(f"\n{demo.README_END}")
    assert (before, after) == ("# Title\n\n", "\n\nThe rest.\n")
    assert "an old table" not in block
    assert "on 64 tokens of Alice's Adventures in Wonderland (1 windows)," in block.splitlines()[0]
    assert [line for line in block.splitlines() if line.startswith("|")] == [
        line for line in printed.splitlines() if line.startswith("|")
    ]
    assert f"* bf16 below every scheme: {'yes' if plain['perplexity'] < fp8['perplexity'] else 'no'} (" in block


def _measured(ask: demo.Ask, perplexity: float) -> demo.Measured:
    return demo.Measured(
        ask=ask,
        model_bytes=1,
        quantised_bytes_before=1,
        quantised_bytes_after=1,
        perplexity=perplexity,
        perplexity_change=0.0,
        top1_agreement=1.0,
        continuation="",
        seconds={},
        plan=None,
        report=None,
    )


def test_the_order_of_perplexities_is_told_as_it_is() -> None:
    given = {"bf16": 20.0, "mxfp8": 19.0, "mxfp4": 30.0, 'mxfp4 + {"scale_search": "mse"}': 28.0, '{"linear": "nvfp4"}': 31.0}
    runs = [_measured(ASKS.get(scheme, demo.BF16), perplexity) for scheme, perplexity in given.items()]
    assert list(demo.orderings(runs)) == [
        "bf16 below every scheme: no (20.000 and 19.000)",
        "8-bit weights below 4-bit ones: yes (19.000 and 28.000)",
        "nvfp4 (blocks of 16) below mxfp4 (blocks of 32): no (31.000 and 30.000)",
        "mxfp4 with scale_search mse below amax: yes (28.000 and 30.000)",
    ]


def test_a_table_for_the_terminal_is_not_too_wide() -> None:
    lines = demo.table([_measured(ask, 20.0) for ask in demo.SCHEMES]).splitlines()
    assert max(map(len, lines)) <= 120
    assert max(map(len, demo.table([_measured(ask, 20.0) for ask in demo.SCHEMES], width=200).splitlines())) > 120


def test_the_demo_scores_at_least_4096_tokens() -> None:
    assert demo.WINDOWS * (demo.WINDOW_LENGTH - 1) >= 4096
