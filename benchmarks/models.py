"""Model shapes by name, built with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

PAD = 0
FIRST_WORD = 3  # ids below are special


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    name: str
    family: str  # its `model_type` in transformers
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries, keys and values
    intermediate: int
    vocab: int
    tied: bool = True  # whether the LM head is the embedding

    @property
    def never(self) -> int:
        """An id that no row generates: with it as the only end-of-sequence id, `generate` pads
        finished rows."""
        return self.vocab - 1

    def kv_bytes(self, length: int, itemsize: int) -> int:
        """Bytes of K/V that one row of `length` tokens needs over all layers."""
        return 2 * self.layers * length * self.kv_heads * self.head_dim * itemsize

    def config(self) -> Any:
        """The transformers config of this shape."""
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=None,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-24m", "llama", 384, 8, 6, 2, 64, 1024, 32000),
        Shape("llama-100m", "llama", 768, 12, 12, 4, 64, 2048, 32000),
        Shape("llama-3.2-1b", "llama", 2048, 16, 32, 8, 64, 8192, 128256),
        Shape("llama-3.1-8b", "llama", 4096, 32, 32, 8, 128, 14336, 128256, tied=False),
        Shape("qwen2.5-0.5b", "qwen2", 896, 24, 14, 2, 64, 4864, 151936),
        Shape("qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936),
        Shape("llama-tiny", "llama", 128, 2, 4, 2, 32, 256, 2048),
    )
}


@torch.no_grad()
def build(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, made on `device` in `dtype`. Weights are drawn so that
    activations keep their scale, attention is peaked and logits have a standard deviation of about
    3: greedy text does not fall into a loop. The embedding is small beside the layers' outputs;
    otherwise a tied model would repeat its last token."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:  # norms and biases
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter += 0.5
            continue
        gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.2
        std = gain / parameter.shape[1] ** 0.5
        if "embed_tokens" in name or "lm_head" in name:
            std = 3.0 / shape.hidden**0.5
        parameter.normal_(0.0, std, generator=generator)
    model.get_output_embeddings().weight[shape.never] = 0.0  # logit 0, far below the likeliest
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=1, eos_token_id=None)
    return model.eval()
