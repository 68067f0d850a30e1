"""Inputs of `generate` for each tiny architecture: text, and each medium that it takes.

Every batch has two rows of unequal length, so that padding is checked, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.architecture_media import media_inputs

LONG_PROMPT, SHORT_PROMPT = 11, 6  # tokens
OPTIONS: dict[str, dict[str, Any]] = {  # these ignore `max_new_tokens`
    "Qwen2_5OmniForConditionalGeneration": {
        "generation_mode": "text",
        "thinker_max_new_tokens": 18,
    },
    "Qwen3OmniMoeForConditionalGeneration": {"return_audio": False, "thinker_max_new_tokens": 18},
}


def make_inputs(model: PreTrainedModel, seed: int = 1) -> dict[str, dict[str, Any]]:
    """Inputs of `generate`, by medium: two prompts of unequal length with each medium of the model,
    and text alone."""
    torch.manual_seed(seed)
    name = type(model).__name__
    inputs: dict[str, dict[str, Any]] = media_inputs(model)
    if all("input_ids" in media for media in inputs.values()):
        text = encoder_text if model.config.is_encoder_decoder else decoder_text
        inputs["text"] = TEXT.get(name, text)(model.config)
    return {medium: {**tensors, **OPTIONS.get(name, {})} for medium, tensors in inputs.items()}


def decoder_text(config: PretrainedConfig, rows_per_prompt: int = 1) -> dict[str, torch.Tensor]:
    """`(2 * rows_per_prompt, 11)` tokens and the mask of two prompts of 11 and 6 tokens,
    left-padded."""
    mask = torch.ones(2, LONG_PROMPT, dtype=torch.long)
    mask[1, : LONG_PROMPT - SHORT_PROMPT] = 0
    tokens = torch.randint(5, 100, (2, rows_per_prompt, LONG_PROMPT)) * mask[:, None]
    return {"input_ids": tokens.flatten(0, 1), "attention_mask": mask}


def encoder_text(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """The same two sequences for an encoder, right-padded."""
    inputs = decoder_text(config)
    return {
        name: torch.cat([x[:1], x[1:].roll(SHORT_PROMPT - LONG_PROMPT, 1)])
        for name, x in inputs.items()
    }


TEXT: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    "MusicgenForCausalLM": lambda c: decoder_text(c, c.num_codebooks),
    "MusicgenMelodyForCausalLM": lambda c: decoder_text(c, c.num_codebooks),
    "UdopForConditionalGeneration": lambda c: {
        **encoder_text(c),
        "bbox": torch.rand(2, LONG_PROMPT, 4),
    },
}
