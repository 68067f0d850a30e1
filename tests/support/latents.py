"""A small model with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support import models

CONFIG: dict[str, Any] = {
    "vocab_size": models.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": models.PAD,
    "eos_token_id": None,
}


def build_deepseek() -> DeepseekV3ForCausalLM:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**CONFIG)).eval()
    models.init_weights(model, 0)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = models.PAD, None
    return model
