"""In-place conversion: what changes, what stays, what is freed, what is refused before anything happens."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import fxquant
from fxquant import ConfigError, QuantizedTensor, RuleError, UnsupportedError
from fxquant.kernels.weight_spec import quantized_components


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def test_originals_die_and_everything_is_frozen(llama):
    model = llama()
    originals = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    fxquant.quantize_(model, "fp8_per_channel")
    gc.collect()
    assert all(original() is None for original in originals)
    assert not any(p.requires_grad for p in model.parameters())
    assert type(model.lm_head.weight) is nn.Parameter
    assert type(model.model.embed_tokens.weight) is nn.Parameter


class SomeExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(3, 64, 32).bfloat16())
        self.experts.down_proj = nn.Parameter(torch.randn(3, 32, 32).bfloat16())


def test_each_original_is_freed_before_the_next_is_converted(monkeypatch):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    originals = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []

    def watched(*args, **kwargs):
        alive.append(sum(original() is not None for original in originals))
        return quantized_components(*args, **kwargs)

    monkeypatch.setattr("fxquant.quantize.quantized_components", watched)
    fxquant.quantize_(model, "fp8_per_tensor")
    assert alive == [4, 3, 2, 1]


def test_experts_are_converted_one_matrix_at_a_time(monkeypatch):
    seen = []

    def watched(values, spec, *args):
        seen.append(tuple(values.shape))
        return quantized_components(values, spec, *args)

    monkeypatch.setattr("fxquant.quantize.quantized_components", watched)
    model = SomeExperts()
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = fxquant.quantize_(model, "mxfp4")
    assert seen == [(64, 32)] * 3 + [(32, 32)] * 3
    for name, parameter in model.named_parameters():
        expected = QuantizedTensor.from_float(original[name], parameter.spec.scheme, shards=parameter.spec.shards)
        assert all(map(torch.equal, parameter.components, expected.components))
    assert report.plan.expert_bytes_left == 0
    assert "experts left as they are: none" in str(report)
    assert report.to_dict()["expert_bytes_left"] == 0
    assert 15 < report.to_dict()["groups"][0]["sqnr_db"] < 25


def test_a_stack_that_is_quantised_already_stays_and_the_other_is_converted():
    model = SomeExperts()
    fxquant.quantize_(model, "mxfp8")
    kept = model.experts.gate_up_proj
    model.experts.down_proj = nn.Parameter(torch.randn(3, 32, 32).bfloat16())
    fxquant.quantize_(model, "mxfp8")
    assert model.experts.gate_up_proj is kept
    assert isinstance(model.experts.down_proj, QuantizedTensor)
    with pytest.raises(RuleError, match="quantised as mxfp8 x none"):
        fxquant.quantize_(model, "mxfp4")


def test_experts_that_are_ignored_stay_however_much_of_them_is_quantised():
    model = SomeExperts()
    fxquant.quantize_(model, "mxfp8")
    model.experts.down_proj = nn.Parameter(torch.randn(3, 32, 32).bfloat16())
    model.other = nn.Linear(32, 32)
    fxquant.quantize_(model, "mxfp8", {"ignore": ["experts"]})
    assert not isinstance(model.experts.down_proj, QuantizedTensor)


def test_ties_of_experts_are_kept():
    whole = nn.ModuleDict({"a": SomeExperts(), "b": SomeExperts()})
    whole.b.experts.gate_up_proj, whole.b.experts.down_proj = whole.a.experts.gate_up_proj, whole.a.experts.down_proj
    fxquant.quantize_(whole, "mxfp4")
    assert whole.b.experts.down_proj is whole.a.experts.down_proj
    assert isinstance(whole.b.experts.gate_up_proj, QuantizedTensor)

    part = nn.ModuleDict({"a": SomeExperts(), "b": SomeExperts(), "free": SomeExperts()})
    part.b.experts.gate_up_proj = part.a.experts.gate_up_proj
    down = part.b.experts.down_proj
    report = fxquant.quantize_(part, "mxfp4")
    assert part.b.experts.gate_up_proj is part.a.experts.gate_up_proj
    assert part.b.experts.down_proj is down
    assert report.plan.expert_bytes_left == 2 * (3 * 64 * 32 + 3 * 32 * 32) * 2 - 3 * 64 * 32 * 2
    assert "weight shared with a module of another sort" in str(report)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float8_e4m3fn])
def test_experts_of_mixed_dtypes_stay(dtype):
    model = nn.ModuleDict({"a": SomeExperts(), "b": SomeExperts()})
    odd = torch.zeros(3, 32, 32).to(dtype)
    model.b.experts.down_proj = nn.Parameter(odd, requires_grad=False)
    report = fxquant.quantize_(model, "mxfp4")
    assert not isinstance(model.b.experts.gate_up_proj, QuantizedTensor)
    assert f"the weight is {dtype}" in str(report)


def test_an_expert_that_is_not_finite_is_refused_by_name():
    model = SomeExperts()
    with torch.no_grad():
        model.experts.down_proj[1, 2, 3] = float("nan")
    with pytest.raises(UnsupportedError, match=r"experts\.down_proj: .*NaN.*\"experts\""):
        fxquant.quantize_(model, "mxfp4")
    assert not quantized_names(model)


def test_report(llama):
    report = fxquant.quantize_(llama(), "fp8_per_channel", {"ignore": ["*o_proj"]})
    text, data = str(report), report.to_dict()
    assert "self_attn.o_proj: 2 (stays: ignored: *o_proj)" in text
    assert "lm_head: 1 (stays: head)" in text
    groups = {group["group"]: group for group in data["groups"]}
    assert 25 < groups["mlp.up_proj"]["sqnr_db"] < 40
    assert groups["self_attn.o_proj"]["sqnr_db"] is None
    assert data["quantised_bytes_after"] / data["quantised_bytes_before"] < 0.55  # 4 bytes of scale a row of 64 or 128
    assert data["model_bytes_after"] < data["model_bytes_before"]
    assert data["seconds"] > 0


def test_the_same_configuration_again_changes_nothing_and_another_is_an_error(llama):
    model = llama()
    fxquant.quantize_(model, "fp8_per_channel")
    before = {name: id(p) for name, p in model.named_parameters()}
    report = fxquant.quantize_(model, "fp8_per_channel")
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not report.energies
    with pytest.raises(RuleError, match="quantised as fp8_per_channel_static x fp8_per_token with backend auto already"):
        fxquant.quantize_(model, "fp8_per_block")
    with pytest.raises(RuleError, match="with backend reference is asked for"):
        fxquant.quantize_(model, "fp8_per_channel", linear_backend="reference")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_before_anything_is_converted(bad, llama):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = bad
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.down_proj.*NaN or infinity"):
        fxquant.quantize_(model, "fp8_per_tensor")
    assert not quantized_names(model)
    assert all(p.requires_grad for p in model.parameters())
    fxquant.quantize_(model, "fp8_per_tensor", {"ignore": ["model.layers.1.mlp.down_proj"]})


def test_meta_weights_and_methods_that_do_not_exist_are_refused(llama):
    with torch.device("meta"):
        model = llama()
    with pytest.raises(UnsupportedError, match="meta device"):
        fxquant.quantize_(model, "fp8_per_tensor")
    with pytest.raises(UnsupportedError, match=r"(?s)nothing would be quantised.*weight format 'nvfp4' into"):
        fxquant.quantize_(llama(), "nvfp4_per_token")
    with pytest.raises(UnsupportedError, match="none of these layers is of a kind that the configuration speaks of"):
        fxquant.quantize_(llama(), quantization_config={"moe": "mxfp4"})
    with pytest.raises(UnsupportedError, match="no linear or expert layer"):
        fxquant.quantize_(nn.Conv2d(3, 3, 3), "fp8_per_tensor")
    with pytest.raises(ConfigError):
        fxquant.quantize_(llama())


def test_tied_layers_share_one_converted_weight(relative_error):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    fxquant.quantize_(model, "fp8_per_channel")
    assert isinstance(first.weight, QuantizedTensor)
    assert first.weight is second.weight
    x = torch.randn(3, 32)
    assert relative_error(fxquant.compile(model)(x), model(x)) < 0.02


def test_an_exact_target_unties_only_the_head(llama, relative_error):
    model = llama(tie_word_embeddings=True)
    ids = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        plain = model(ids).logits
        report = fxquant.quantize_(model, None, {"targets": {"lm_head": "fp8_per_channel"}})
        assert quantized_names(model) == {"lm_head.weight"}
        assert type(model.model.embed_tokens.weight) is nn.Parameter
        assert report.bytes_after > report.bytes_before
        assert report.plan.model_bytes_after == report.bytes_after
        assert relative_error(model(ids).logits, plain) < 0.06


def test_gpt2_conv1d(relative_error):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=50)).bfloat16().eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        plain = model(ids).logits
        report = fxquant.quantize_(model, "fp8_per_channel")
        assert len(report.plan.chosen) == 8
        eager = model(ids).logits
        assert 0 < relative_error(eager, plain) < 0.1
        assert relative_error(fxquant.compile(model)(ids).logits, eager) < 0.02


def test_inside_inference_mode_and_run_outside(relative_error):
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(2, 32)
    expected = model(x)
    with torch.inference_mode():
        fxquant.quantize_(model, "fp8_per_channel")
    assert relative_error(model(x.requires_grad_()), expected) < 0.06


def test_gradients_reach_an_adapter_beside_a_quantised_layer():
    """Unmerged adapters train through the frozen quantised weight in eager mode."""
    base, adapter = nn.Linear(32, 32), nn.Linear(32, 32)
    fxquant.quantize_(base, "fp8_per_channel")
    base(adapter(torch.randn(4, 32))).sum().backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.isfinite().all()


def test_a_merge_into_a_quantised_weight_is_quantised_again(relative_error):
    layer = nn.Linear(64, 64)
    merged = layer.weight.detach() + 0.1 * torch.randn(64, 64)
    fxquant.quantize_(layer, "fp8_per_channel")
    layer.weight.data += merged - layer.weight.dequantize()
    assert isinstance(layer.weight, QuantizedTensor)
    assert relative_error(layer.weight.dequantize(), merged) < 0.04


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_both_ways(assign, relative_error):
    model, other, x = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32)), torch.randn(2, 32)
    fxquant.quantize_(model, "fp8_per_channel")
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(twin(x), model(x))
    twin.load_state_dict(other.state_dict())
    assert isinstance(twin[0].weight, QuantizedTensor) is not assign or isinstance(twin[0].weight, QuantizedTensor)
    assert relative_error(twin(x), other(x)) < 0.06


def test_progress_bar_on_demand(capsys):
    fxquant.quantize_(nn.Linear(16, 16), "fp8_per_tensor", progress=True)
    assert "quantising" in capsys.readouterr().err
    fxquant.quantize_(nn.Linear(16, 16), "fp8_per_tensor", progress=False)
    assert capsys.readouterr().err == ""


def test_multihead_attention_runs_on_a_converted_output_projection(relative_error):
    module, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = module(x, x, x)[0]
        fxquant.quantize_(module, "fp8_per_channel")
        assert isinstance(module.out_proj.weight, QuantizedTensor)
        assert relative_error(module(x, x, x)[0], expected) < 0.06


def test_a_saved_state_dict_loads_after_import_fxquant_alone(tmp_path):
    model = nn.Linear(16, 16)
    fxquant.quantize_(model, "fp8_per_channel")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    code = f"import torch, fxquant; print(torch.load({str(tmp_path / 'weights.pt')!r}, weights_only=True)['weight'])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "fp8_per_channel_static x fp8_per_token" in printed
