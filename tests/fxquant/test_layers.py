"""What counts as a layer, and of which kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxquant
from fxquant.layers import SHARED_WEIGHT, LayerWeight, find_layers, is_router


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.mlp.gate", True),
        ("model.layers.1.mlp.gate_proj", False),
        ("model.layers.1.mlp.gate_up_proj", False),
        ("model.layers.0.block_sparse_moe.router.layer", True),
        ("mlp.shared_expert_gate", True),
        ("mlp.shared_expert.gate_proj", False),
        ("", False),
    ],
)
def test_routers_are_named_by_whole_components(name, expected):
    assert is_router(name) is expected


def kinds(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.kind for layer in find_layers(model)}


def test_llama_tied_and_untied(llama):
    for tied in (False, True):
        found = find_layers(llama(tie_word_embeddings=tied))
        by_name = {layer.name: layer for layer in found}
        assert by_name["lm_head"].kind == "head"
        assert by_name["model.embed_tokens"].kind == "embedding"
        assert (by_name["lm_head"].nbytes == 0) is tied
        assert sum(layer.kind == "linear" for layer in found) == 14


def test_other_modules_are_untouched():
    model = nn.ModuleDict(
        {"conv": nn.Conv3d(2, 2, 3), "conv1": nn.Conv1d(2, 2, 3), "emb": nn.Embedding(4, 4), "bi": nn.Bilinear(2, 2, 2)}
    )
    assert kinds(model) == {"emb": "embedding"}


def test_conv1d_of_gpt2_contracts_its_first_dimension():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    layer = {layer.name: layer for layer in find_layers(model)}["transformer.h.0.attn.c_attn"]
    assert (layer.kind, layer.weights) == ("linear", (LayerWeight(parameter="weight", rows=96, columns=32, contraction=-2),))


def test_moe_experts_routers_and_shared_experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.device("meta"):
        config = Qwen3MoeConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=50,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=64,
        )  # fmt: skip
        found = kinds(Qwen3MoeForCausalLM(config))
    assert found["model.layers.0.mlp.experts"] == "moe"
    assert found["model.layers.0.mlp.gate"] == "router"


def stacks(**shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    return module


def weights_of(experts: nn.Module) -> dict[str, LayerWeight]:
    (layer,) = find_layers(nn.ModuleDict({"experts": experts}))
    assert (layer.name, layer.kind) == ("experts", "moe")
    return {weight.parameter: weight for weight in layer.weights}


def test_the_layout_of_experts_comes_from_their_flags_else_from_their_shapes():
    plain = weights_of(stacks(gate_up_proj=(4, 48, 32), down_proj=(4, 32, 24)))
    assert plain["gate_up_proj"] == LayerWeight(parameter="gate_up_proj", rows=48, columns=32, experts=4, shards=(24, 24))
    assert plain["down_proj"] == LayerWeight(parameter="down_proj", rows=32, columns=24, experts=4)

    llama4 = weights_of(stacks(gate_up_proj=(4, 32, 48), down_proj=(4, 24, 32)))
    assert llama4["gate_up_proj"] == replace(plain["gate_up_proj"], contraction=-2)
    assert llama4["down_proj"] == replace(plain["down_proj"], contraction=-2)

    gpt_oss = stacks(gate_up_proj=(4, 32, 32), down_proj=(4, 16, 32))
    gpt_oss.is_transposed, gpt_oss.is_concatenated, gpt_oss.has_gate = True, False, True
    found = weights_of(gpt_oss)["gate_up_proj"]
    assert (found.contraction, found.shards, found.interleaved) == (-2, (16, 16), True)

    square = weights_of(stacks(gate_up_proj=(4, 32, 16), down_proj=(4, 16, 16)))  # H = I
    assert square["gate_up_proj"].contraction == -1

    relu2 = weights_of(stacks(up_proj=(4, 48, 32), down_proj=(4, 32, 48)))
    assert (relu2["up_proj"].contraction, relu2["up_proj"].shards) == (-1, ())

    uneven = weights_of(stacks(gate_up_proj=(6, 48, 32), down_proj=(4, 32, 24)))  # experts without weights of their own
    assert (uneven["gate_up_proj"].experts, uneven["down_proj"].experts) == (6, 4)


def test_three_dimensional_parameters_of_other_modules_are_no_experts():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(8, 2, 4))

    class CausalConv(nn.Conv1d):
        pass

    assert kinds(nn.ModuleDict({"attention": Attention(), "experts_conv": CausalConv(2, 2, 3)})) == {}
    decoder = nn.ModuleDict({"moe_decoder": nn.ModuleList([nn.ModuleDict({"attention": Attention()})])})
    assert kinds(decoder) == {}


def test_biases_of_experts_are_no_weights_and_one_expert_is_enough():
    found = weights_of(stacks(w1=(1, 48, 32), b1=(1, 1, 48), w2=(1, 32, 48), w2_bias=(1, 32, 4)))
    assert list(found) == ["w1", "w2"]


def test_layers_that_share_a_parameter_name_their_owner():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second, "c": first})
    assert [layer.tied_to for layer in find_layers(model)] == [None, "a", "a"]


def test_a_weight_that_something_else_reads_stays():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.weight_again = self.proj.weight
            self.free = nn.Linear(8, 8)

    assert kinds(Reads()) == {"proj": SHARED_WEIGHT, "free": "linear"}
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(8, 4), "out": nn.Linear(4, 8)})
    model["out"].weight = model["bag"].weight
    assert kinds(model) == {"bag": "embedding", "out": "head"}


def test_layers_that_are_not_initialised_yet_are_no_candidates():
    assert kinds(nn.ModuleDict({"a": nn.LazyLinear(8), "b": nn.Linear(8, 8)})) == {"b": "linear"}


def test_packed_attention_projections_are_listed_as_staying():
    plan = fxquant.plan(nn.TransformerEncoderLayer(16, 2, 32), "fp8_per_tensor")
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert reasons["self_attn.in_proj_weight"] == "packed projection"
    assert reasons["self_attn.out_proj"] == ""


def test_parametrised_weights_are_not_layers():
    model = nn.ModuleDict({"a": torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "b": nn.Linear(8, 8)})
    assert kinds(model) == {"b": "linear"}
