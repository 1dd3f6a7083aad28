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
from fxquant.evaluate import passage, score, windows

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


FAKES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fp8_per_tensor": (_fp8, _by_row),
    "fp8_per_channel": (_by_row, _by_row),
    "fp8_per_block": (_by_tile, _by_128_columns),
}


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


@pytest.mark.parametrize("scheme", demo.SCHEMES)
def test_perplexity_is_that_of_an_independent_fake_quantisation(
    smollm2: tuple[nn.Module, Any], text: Tensor, scheme: str
) -> None:
    model, tokenizer = smollm2
    plain, fake = score(model, text), score(_fake_quantised(model, scheme), text)
    measured, scored = demo.measure(
        copy.deepcopy(model), tokenizer, scheme, text, baseline=plain, new_tokens=2, say=lambda _: None
    )
    assert measured.perplexity == pytest.approx(fake.perplexity, rel=0.01)
    assert measured.perplexity_change == measured.perplexity / plain.perplexity - 1
    assert 0 < abs(measured.perplexity_change) < 0.08  # the demo's text is nine times as long, and its change below 4%
    assert scored.agreement(fake) > scored.agreement(plain) == measured.top1_agreement
    assert measured.quantised_bytes_after <= 0.51 * measured.quantised_bytes_before


def test_what_is_left_alone(smollm2: tuple[nn.Module, Any], text: Tensor) -> None:
    model, tokenizer = smollm2
    converted = copy.deepcopy(model)
    measured, _ = demo.measure(converted, tokenizer, "fp8_per_channel", text[:1, :8], new_tokens=1, say=lambda _: None)
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
    demo.run(tmp_path / "demo.json", schemes=("fp8_per_tensor",))
    written = json.loads((tmp_path / "demo.json").read_text())
    plain, fp8 = written["runs"]
    assert (plain["scheme"], plain["plan"], plain["report"], plain["top1_agreement"]) == ("bf16", None, None, 1)
    assert fp8["scheme"] == "fp8_per_tensor"
    assert len(fp8["plan"]["layers"]) == len(fp8["report"]["layers"]) == 211
    assert fp8["perplexity_change"] == pytest.approx(fp8["perplexity"] / plain["perplexity"] - 1)
    assert fp8["continuation"].startswith(" Paris")
    assert written["text"]["tokens"] == 64
    printed = capsys.readouterr().out
    assert "mlp.down_proj" in printed
    assert "SQNR" in printed
    assert "| fp8_per_tensor |" in printed
    assert f"{fp8['perplexity']:.3f}" in printed


def test_the_demo_scores_at_least_4096_tokens() -> None:
    assert demo.WINDOWS * (demo.WINDOW_LENGTH - 1) >= 4096
