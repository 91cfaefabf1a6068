"""Tiny models of the families that the transformers cache supports, built from config: no download, under a second."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

WINDOW = 16
VOCAB = 256
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that different tokens come out
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def configs() -> dict[str, PreTrainedConfig]:
    """One config a family; the two sliding-window ones have windows of `WINDOW` tokens."""
    deepseek = {**BASE, "num_key_value_heads": 4, "num_hidden_layers": 2}
    return {
        "llama": LlamaConfig(**BASE, num_hidden_layers=3),
        "qwen3": Qwen3Config(**BASE, num_hidden_layers=2, head_dim=16),
        "mistral": MistralConfig(**BASE, num_hidden_layers=2, sliding_window=WINDOW),
        "gemma3": Gemma3TextConfig(
            **BASE,
            num_hidden_layers=3,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "deepseek": DeepseekV3Config(
            **deepseek,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    }


FAMILIES = tuple(configs())


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The family's model with the same weights each time; made once a process, not to be changed by a test."""
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(configs()[family])
    return model.to(device, dtype).eval()


def prompt(tokens: int, device: str = "cpu") -> torch.Tensor:
    """(1, tokens) ids, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (1, tokens), generator=generator).to(device)
