"""What `benchmarks.generate` runs: a random Llama, the workloads W1 to W6, and the prompts of each repeat."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

PAD = 0
FIRST_WORD = 3  # ids below are special


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def never(self) -> int:
        """An id that no row says: an end-of-sequence set of it alone makes `generate` pad rows that are done."""
        return self.vocab - 1

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of the keys and values of `tokens` tokens over all layers."""
        return 2 * tokens * self.layers * self.kv_heads * (self.hidden // self.heads) * itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-100m", 768, 12, 12, 4, 2048, 32000),
        Shape("llama-1b", 2048, 16, 32, 8, 8192, 128256),
        Shape("llama-tiny", 128, 2, 4, 2, 256, 2048),
    )
}


@torch.no_grad()
def build(shape: Shape, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """
    Random weights, drawn so that activations keep their size, attention is peaked and logits have a standard deviation
    of about 3: greedy text does not fall into a loop. The embedding is small beside what the layers add, since a tied
    model would repeat its last token otherwise.
    """
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue  # norms
        gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.2
        std = 3.0 / shape.hidden**0.5 if "embed_tokens" in name else gain / parameter.shape[1] ** 0.5
        parameter.normal_(0.0, std, generator=generator)
    model.get_input_embeddings().weight[shape.never] = 0.0  # logit 0, far below the likeliest
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=1, eos_token_id=None)
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Batch:
    """The prompts of one repeat, and how many tokens each is to get."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def ragged(self) -> bool:
        """Whether rows stop at different steps."""
        return len(set(self.new_tokens)) > 1


@dataclass(frozen=True)
class Workload:
    """
    Args:
        prompt_lengths, new_tokens: Of each prompt, drawn with the given generator; the same in every repeat.
        prefix (`int`): Tokens that all prompts begin with.
        options (`dict`): Of `generate`.
        target (`float`, *optional*): Plain's time over ours, at least; from the issue.
        batch_sizes (`tuple[int, ...]`): Of plain `generate`; the best counts.
    """

    name: str
    title: str
    num_prompts: int
    prompt_lengths: tuple[int, int]
    new_tokens: tuple[int, int]
    prefix: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    batch_sizes: tuple[int, ...] = ()
    repeats: int = 5

    @property
    def rows_per_prompt(self) -> int:
        """Rows that come back for each prompt."""
        return self.options.get("num_return_sequences", 1)

    @property
    def sampled(self) -> bool:
        return bool(self.options.get("do_sample"))

    def batch(self, repeat: int, vocab: int) -> Batch:
        """Fresh words in every repeat, so that a prefix cache holds none of them; lengths stay."""
        lengths, words = random.Random(self.name), random.Random(f"{self.name} {repeat}")

        def text(length: int) -> list[int]:
            return [words.randrange(FIRST_WORD, vocab - 1) for _ in range(length)]

        prefix = text(self.prefix)
        prompts = [prefix + text(lengths.randint(*self.prompt_lengths)) for _ in range(self.num_prompts)]
        return Batch(prompts, [lengths.randint(*self.new_tokens) for _ in prompts])

    def scaled(self, prompts: float, tokens: float) -> Workload:
        """A smaller one, for `--quick` and for checks in float32."""

        def shrink(span: tuple[int, int]) -> tuple[int, int]:
            return max(1, round(span[0] * tokens)), max(2, round(span[1] * tokens))

        return replace(
            self,
            num_prompts=max(1, round(self.num_prompts * prompts)),
            prompt_lengths=shrink(self.prompt_lengths),
            new_tokens=shrink(self.new_tokens),
            prefix=round(self.prefix * tokens),
            batch_sizes=tuple(max(1, round(size * prompts)) for size in self.batch_sizes),
        )


GREEDY = {"do_sample": False}
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "32 ragged prompts of 32..256, 64 new", 32, (32, 256), (64, 64), 0, GREEDY, 1.3),
        Workload("W2", "64 such prompts, 8..256 new", 64, (32, 256), (8, 256), 0, GREEDY, 2.0, (16, 32, 64), repeats=3),
        Workload("W3", "64 prompts, 512 tokens shared + 8..64, 32 new", 64, (8, 64), (32, 32), 512, GREEDY, 3.0),
        Workload(
            "W4",
            "16 samples of one prompt of 512, 64 new",
            1,
            (512, 512),
            (64, 64),
            0,
            {"do_sample": True, "num_return_sequences": 16, "top_k": 0},
            2.0,
        ),
        Workload(
            "W5", "8 beams over 512, 64 new", 1, (512, 512), (64, 64), 0, {"do_sample": False, "num_beams": 8}, 1.5
        ),
        Workload("W6", "one prompt of 16, 64 new", 1, (16, 16), (64, 64), 0, GREEDY, 1.0, repeats=9),
    )
}


def sharegpt_like(num_requests: int, scale: float, vocab: int) -> Batch:
    """
    Lengths as ShareGPT's in the PagedAttention paper (arXiv 2309.06180, section 6.1): log-normal with means of 161 in
    and 338 out, at most 2048 each, times `scale`.
    """
    draw, words = random.Random("sharegpt"), random.Random("sharegpt words")

    def length(mean: float, sigma: float) -> int:
        # exp(mu + sigma^2 / 2) is a log-normal's mean
        drawn = mean * draw.lognormvariate(-(sigma**2) / 2, sigma)
        return max(4, round(min(2048.0, drawn) * scale))

    lengths = [(length(161, 1.0), length(338, 0.8)) for _ in range(num_requests)]
    prompts = [[words.randrange(FIRST_WORD, vocab - 1) for _ in range(inputs)] for inputs, _ in lengths]
    return Batch(prompts, [outputs for _, outputs in lengths])


def left_padded(prompts: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """`[rows, longest]` int64 ids and mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def equal_share(expected: list[list[int]], actual: list[list[int]]) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [(a, b) for left, right in zip(expected, actual) for a, b in zip(left, right)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
