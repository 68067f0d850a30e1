"""What `generate` needs of each tiny architecture: prompts and masks, encoder inputs, images, sound.

Every batch has two rows of unequal length, so that padding is part of the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

LONG_PROMPT, SHORT_PROMPT = 11, 6  # tokens
OMNI = {"thinker_max_new_tokens": 18}  # these ignore `max_new_tokens`


def make_inputs(model: PreTrainedModel, seed: int = 1) -> dict[str, Any]:
    """What `generate` needs of this model: two prompts of unequal length with their mask, or encoder inputs."""
    torch.manual_seed(seed)
    name = type(model).__name__
    if name in INPUTS:
        return INPUTS[name](model.config)
    return encoder_text(model.config) if model.config.is_encoder_decoder else decoder_text(model.config)


def decoder_text(config: PretrainedConfig, rows_per_prompt: int = 1) -> dict[str, torch.Tensor]:
    """`(2 * rows_per_prompt, 11)` tokens and the mask of two prompts of 11 and 6 tokens, padded on the left."""
    mask = torch.ones(2, LONG_PROMPT, dtype=torch.long)
    mask[1, : LONG_PROMPT - SHORT_PROMPT] = 0
    tokens = torch.randint(5, 100, (2, rows_per_prompt, LONG_PROMPT)) * mask[:, None]
    return {"input_ids": tokens.flatten(0, 1), "attention_mask": mask}


def encoder_text(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """The same two sequences for an encoder: padded on the right."""
    inputs = decoder_text(config)
    return {name: torch.cat([x[:1], x[1:].roll(SHORT_PROMPT - LONG_PROMPT, 1)]) for name, x in inputs.items()}


def waveform(config: PretrainedConfig, samples: int = 4000) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, samples), "attention_mask": _lengths_mask(samples)}


def spectrogram(config: PretrainedConfig, bins: int, frames: int, bins_first: bool = False) -> dict[str, torch.Tensor]:
    features = torch.randn(2, bins, frames) if bins_first else torch.randn(2, frames, bins)
    return {"input_features": features, "attention_mask": _lengths_mask(frames)}


def image(config: PretrainedConfig, size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def image_prompt(config: PretrainedConfig, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image of 4 placeholder tokens within the prompts."""
    inputs = decoder_text(config)
    inputs["input_ids"][:, 5:9] = getattr(config, "image_token_id", None) or config.video_token_index
    return {**inputs, **image(config), **others}


def _lengths_mask(length: int) -> torch.Tensor:
    """`(2, length)`: the second row ends at three quarters."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 3 // 4 :] = 0
    return mask


INPUTS: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    "Blip2ForConditionalGeneration": image_prompt,
    "BlipForConditionalGeneration": lambda c: {**image(c, c.vision_config.image_size), **decoder_text(c)},
    "CanaryForConditionalGeneration": lambda c: spectrogram(c, c.encoder_config.num_mel_bins, 64),
    "CohereAsrForConditionalGeneration": lambda c: spectrogram(c, c.encoder_config.num_mel_bins, 64),
    "IdeficsForVisionText2Text": lambda c: {
        **decoder_text(c),
        "pixel_values": torch.randn(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, LONG_PROMPT, 1, dtype=torch.long),
    },
    "InstructBlipForConditionalGeneration": lambda c: image_prompt(c, qformer_input_ids=torch.randint(5, 100, (2, 4))),
    "InstructBlipVideoForConditionalGeneration": lambda c: image_prompt(
        c, qformer_input_ids=torch.randint(5, 100, (2, 4)), pixel_values=torch.randn(2, 1, 3, 32, 32)
    ),
    "Kosmos2ForConditionalGeneration": lambda c: {
        **decoder_text(c),
        **image(c),
        "image_embeds_position_mask": torch.arange(LONG_PROMPT).expand(2, -1).sub(5).clamp(0, 5).remainder(5).gt(0),
    },
    "MoonshineForConditionalGeneration": waveform,
    "MoonshineStreamingForConditionalGeneration": waveform,
    "MusicgenForCausalLM": lambda c: decoder_text(c, c.num_codebooks),
    "MusicgenMelodyForCausalLM": lambda c: decoder_text(c, c.num_codebooks),
    "PPFormulaNetForConditionalGeneration": image,
    "Pop2PianoForConditionalGeneration": lambda c: spectrogram(c, c.d_model, 20),
    "Qwen2_5OmniForConditionalGeneration": lambda c: {**decoder_text(c), "generation_mode": "text", **OMNI},
    "Qwen3OmniMoeForConditionalGeneration": lambda c: {**decoder_text(c), "return_audio": False, **OMNI},
    "SeamlessM4TForSpeechToText": lambda c: spectrogram(c, 160, 40),
    "SeamlessM4Tv2ForSpeechToText": lambda c: spectrogram(c, 160, 40),
    "Speech2TextForConditionalGeneration": lambda c: spectrogram(c, c.input_feat_per_channel, 40),
    "SpeechEncoderDecoderModel": waveform,
    "SpeechT5ForSpeechToText": waveform,
    "UdopForConditionalGeneration": lambda c: {**encoder_text(c), "bbox": torch.rand(2, LONG_PROMPT, 4)},
    "VisionEncoderDecoderModel": image,
    "WhisperForConditionalGeneration": lambda c: spectrogram(c, c.num_mel_bins, 2 * c.max_source_positions, True),
}
