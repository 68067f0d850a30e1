"""Lower bound for the time of a step or a whole call, from measured ceilings.

A step of `B` rows reads the weights (`W` bytes) once or computes `2 P B` operations, whichever
takes longer, then reads each row's K/V: `max(W / BW, 2 P B / FLOPS) + sum(L) kv / BW`. Attention
FLOPs and everything that is not a matrix product are left out, so a real step takes longer. K/V
count once per row that reads them: rows that share blocks may beat this bound by reading them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.models import Shape


@dataclass(frozen=True)
class Cost:
    """The parameters and the K/V that a step reads."""

    shape: Shape  # whose K/V are counted
    body: int  # parameters that every token is multiplied with
    head: int  # parameters that a token is multiplied with for its logits
    itemsize: int  # bytes of a parameter and of an element of K/V

    @classmethod
    def of(cls, model: Any, shape: Shape) -> Cost:
        """Cost of a model. The input embedding is a lookup and counts only if it is also the LM
        head."""
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # tied weights count once
        total = sum(parameter.numel() for parameter in model.parameters())
        apart = head.numel() if embedding is head else head.numel() + embedding.numel()
        return cls(shape, total - apart, head.numel(), head.element_size())


def call_seconds(
    cost: Cost,
    ceilings: Ceilings,
    flops: float,
    prompts: Sequence[int],
    new_tokens: Sequence[int],
    rows_per_prompt: int = 1,
    shared: int = 0,
) -> float:
    """Seconds of a whole call, which computes all prompts in one step, then decodes all open rows
    together. `flops`: operations per second in the model's dtype. `prompts`, `new_tokens`: lengths,
    by prompt. `rows_per_prompt`: samples or beams. `shared`: length of the common prefix of all
    prompts, computed once."""
    reading = (cost.body + cost.head) * cost.itemsize / ceilings.bandwidth  # the weights

    def step(tokens: int, lengths: Sequence[int], rows: int) -> float:
        computing = 2 * (cost.body * tokens + cost.head * rows) / flops
        kv = sum(cost.shape.kv_bytes(length, cost.itemsize) for length in lengths)
        return max(reading, computing) + kv / ceilings.bandwidth

    computed = sum(prompts) - shared * (len(prompts) - 1)
    seconds = step(computed, (), len(prompts) * rows_per_prompt)
    for done in range(1, max(new_tokens)):
        pairs = zip(prompts, new_tokens)
        lengths = [p + done for p, new in pairs if done < new for _ in range(rows_per_prompt)]
        seconds += step(len(lengths), lengths, len(lengths))
    return seconds
