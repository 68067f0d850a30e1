"""
The least time a step or a whole call can take on ceilings that were measured.

A step of `B` rows reads the weights (`W` bytes) once or computes `2 P B` operations, whichever is longer, then reads
each row's keys and values: `max(W / BW, 2 P B / FLOPS) + sum(L) kv / BW`. Attention's operations and all that is not a
matrix product are left out, so a real step takes longer. Keys and values are counted once for each row that reads
them: rows that share blocks may beat this floor by reading them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.models import Shape


@dataclass(frozen=True)
class Cost:
    """
    Args:
        shape ([`Shape`]): Whose keys and values.
        body (`int`): Parameters that every token is multiplied with.
        head (`int`): Parameters that a token is multiplied with to get its logits.
        itemsize (`int`): Bytes of a parameter, and of an element of keys and values.
    """

    shape: Shape
    body: int
    head: int
    itemsize: int

    @classmethod
    def of(cls, model: Any, shape: Shape) -> Cost:
        """A model's; the input embedding is looked up, not multiplied with, unless it is also the head."""
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        total = sum(parameter.numel() for parameter in model.parameters())  # tied weights count once
        apart = head.numel() if embedding is head else head.numel() + embedding.numel()
        return cls(shape, total - apart, head.numel(), head.element_size())

    @property
    def weight_bytes(self) -> int:
        """Read in every step."""
        return (self.body + self.head) * self.itemsize


def step_seconds(
    cost: Cost, ceilings: Ceilings, flops: float, tokens: int, rows: int, lengths: Sequence[int] = ()
) -> float:
    """
    Args:
        flops (`float`): Operations per second in the model's dtype.
        tokens (`int`): Computed in this step.
        rows (`int`): That get logits.
        lengths (`Sequence[int]`): Tokens in the cache of each row that reads it.
    """
    weights = cost.weight_bytes / ceilings.bandwidth
    compute = 2 * (cost.body * tokens + cost.head * rows) / flops
    kv = sum(cost.shape.kv_bytes(length, cost.itemsize) for length in lengths)
    return max(weights, compute) + kv / ceilings.bandwidth


def call_seconds(
    cost: Cost,
    ceilings: Ceilings,
    flops: float,
    prompts: Sequence[int],
    new_tokens: Sequence[int],
    rows_per_prompt: int = 1,
    shared: int = 0,
) -> float:
    """
    Of a whole call that computes every prompt once, all in one step, then decodes all open rows together.

    Args:
        prompts, new_tokens (`Sequence[int]`): Of each prompt.
        rows_per_prompt (`int`): Samples or beams.
        shared (`int`): Tokens that all prompts begin with; computed once.
    """
    rows = len(prompts) * rows_per_prompt
    computed = sum(prompts) - shared * (len(prompts) - 1)
    seconds = step_seconds(cost, ceilings, flops, computed, rows)
    for step in range(1, max(new_tokens)):
        lengths = [p + step for p, new in zip(prompts, new_tokens) if step < new for _ in range(rows_per_prompt)]
        seconds += step_seconds(cost, ceilings, flops, len(lengths), len(lengths), lengths)
    return seconds
