"""Plans: made on meta, by rule and fused name, with kernels or reasons, and bytes that come true."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import fxquant
from fxquant import ConfigError, RuleError, UnsupportedError
from fxquant.planner import group_name


@pytest.fixture
def meta_llama(llama):
    with torch.device("meta"):
        return llama()


def by_name(plan):
    return {layer.name: layer for layer in plan.layers}


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_a_plan_on_meta_predicts_what_conversion_does(scheme, meta_llama, llama):
    plan = fxquant.plan(meta_llama, scheme)
    report = fxquant.quantize_(llama(), scheme)
    assert plan.model_bytes == report.bytes_before
    assert plan.model_bytes_after == report.bytes_after
    assert [x.to_dict() for x in plan.layers] == [x.to_dict() for x in report.plan.layers]
    assert len(plan.chosen) == 14
    assert by_name(plan)["lm_head"].reason == "head"


def test_text_and_dict(meta_llama):
    plan = fxquant.plan(meta_llama, None, {"targets": {r"re:.*self_attn\.o_proj": "fp8_per_block"}})
    assert list(plan.summary())[3] == r"self_attn.o_proj: 2 (from targets: re:.*self_attn\.o_proj, fp8_per_block)"
    text = str(plan)
    assert "fp8_per_block_static x fp8_per_block_dynamic" in text
    assert "quantised layers: 2 of 15" in text
    assert max(map(len, text.splitlines())) < 200
    assert json.loads(json.dumps(plan.to_dict()))["layers"][3]["weight"] == "fp8_per_block_static"


def test_fused_names_decide_for_separate_shards(meta_llama):
    plan = fxquant.plan(meta_llama, None, {"targets": {"*v_proj": "fp8_per_tensor"}})
    chosen = {layer.name.rpartition(".")[2] for layer in plan.chosen}
    assert chosen == {"q_proj", "k_proj", "v_proj"}
    assert by_name(plan)["model.layers.0.self_attn.q_proj"].fused_name == "model.layers.0.self_attn.qkv_proj"
    assert "through" in str(plan)


def test_half_a_fused_group_is_an_error(meta_llama):
    with pytest.raises(RuleError, match="gate_up_proj"):
        fxquant.plan(meta_llama, "fp8_per_tensor", {"ignore": ["*.gate_proj"]})


def test_patterns_that_match_nothing(meta_llama, caplog):
    with pytest.raises(RuleError, match=r"self_attn\.o_proj"):
        fxquant.plan(meta_llama, "fp8_per_tensor", {"ignore": ["model.layers.0.self_attn.o_porj"]})
    with pytest.raises(RuleError, match=r"model\.layers\.0\.mlp\.\*"):
        fxquant.plan(meta_llama, "fp8_per_tensor", {"ignore": ["model.layers.0.mlp"]})
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        fxquant.plan(meta_llama, "fp8_per_tensor", {"ignore": ["no.such.layer"]}, strict=False)
    assert any("no.such.layer" in record.message for record in caplog.records)


@pytest.mark.parametrize("pattern", ["lm_head", "*lm_head", "model.embed_tokens", "*qkv_proj", "*"])
def test_patterns_that_count_as_matched(pattern, meta_llama):
    fxquant.plan(meta_llama, "fp8_per_tensor", {"ignore": [pattern]})


def test_a_head_is_quantised_only_by_its_exact_name(meta_llama):
    assert by_name(fxquant.plan(meta_llama, None, {"targets": {"*": "fp8_per_tensor"}}))["lm_head"].scheme is None
    plan = fxquant.plan(meta_llama, None, {"targets": {"*": "fp8_per_tensor", "lm_head": "fp8_per_channel"}})
    assert by_name(plan)["lm_head"].scheme.weight.name == "fp8_per_channel_static"


def test_activation_overrides(meta_llama):
    plan = fxquant.plan(meta_llama, "fp8_per_channel", {"linear": {"activation": "none"}})
    assert {str(layer.scheme) for layer in plan.chosen} == {"fp8_per_channel_static x none"}
    plan = fxquant.plan(meta_llama, "fp8_per_channel", {"linear": {"activation": "fp8_per_tensor_dynamic"}})
    assert {layer.scheme.activation.name for layer in plan.chosen} == {"fp8_per_tensor_dynamic"}


def test_methods_that_do_not_exist_are_reasons_and_pinned_ones_errors(meta_llama):
    plan = fxquant.plan(meta_llama.to(torch.float64), "mxfp8")
    assert not plan.chosen
    assert "no method: the weight is torch.float64" in by_name(plan)["model.layers.0.mlp.up_proj"].reason
    meta_llama.to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.q_proj.*'reference'"):
        fxquant.plan(meta_llama, "fp8_per_block", linear_backend="torch")
    with pytest.raises(ConfigError, match="auto, torch, triton, reference"):
        fxquant.plan(meta_llama, "fp8_per_block", linear_backend="tensorrt")
    plan = fxquant.plan(meta_llama, "fp8_per_channel", linear_backend="reference")
    assert {layer.kernel.family for layer in plan.chosen} == {"reference"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there(meta_llama):
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        fxquant.plan(meta_llama, "fp8_per_tensor", device="cuda")
    with pytest.raises(ConfigError, match="device"):
        fxquant.plan(meta_llama, "fp8_per_tensor", device="gpu0")


def test_layers_that_share_a_weight_must_agree():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second})
    with pytest.raises(RuleError, match="a and b share one weight"):
        fxquant.plan(model, "fp8_per_tensor", {"ignore": ["b"]})
    plan = fxquant.plan(model, "fp8_per_tensor")
    assert [layer.bytes_after for layer in plan.layers] == [16 * 16 + 4, 0]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.12.self_attn.q_proj", "self_attn.q_proj"),
        ("transformer.h.0.attn.c_attn", "attn.c_attn"),
        ("lm_head", "lm_head"),
        ("0", "0"),
        ("blocks.3.1", "blocks.*.1"),
        ("0.2", "*.2"),
        ("blocks.3.mlp.0", "mlp.0"),
        ("", "(root)"),
    ],
)
def test_group_names(name, group):
    assert group_name(name) == group


def test_compiled_models_are_planned_by_their_own_names(llama):
    plan = fxquant.plan(torch.compile(llama()), "fp8_per_tensor")
    assert plan.layers[0].name == "model.layers.0.self_attn.q_proj"


def test_planning_touches_no_weight(llama):
    model = llama()
    versions = [p._version for p in model.parameters()]
    fxquant.plan(model, "fp8_per_tensor")
    assert [p._version for p in model.parameters()] == versions
    assert all(type(p) is nn.Parameter for p in model.parameters())
