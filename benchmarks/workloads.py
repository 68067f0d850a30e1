"""Inputs of `benchmarks.generate`: the workloads W1 to W6, W9 and W10; the requests of a trace, and
the prompts of each repeat."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.models import FIRST_WORD, PAD, Shape
from benchmarks.paired import NOT_SLOWER
from benchmarks.paper.traces import Trace

GREEDY = {"do_sample": False}


@dataclass(frozen=True)
class Batch:
    """The prompts of one repeat, and the number of new tokens for each."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def ragged(self) -> bool:
        """Whether rows end at different steps."""
        return len(set(self.new_tokens)) > 1


@dataclass(frozen=True)
class Workload:
    """Prompts and their new tokens; each prompt draws its lengths, the same in every repeat."""

    name: str
    num_prompts: int
    prompt_lengths: tuple[int, int]
    new_tokens: tuple[int, int]
    prefix: int = 0  # length of the common prefix of all prompts
    options: dict[str, Any] = field(default_factory=lambda: GREEDY)  # of `generate`
    target: float | None = None  # least ratio of plain's time to ours; from the issue
    batch_sizes: tuple[int, ...] = ()  # of plain `generate`; the fastest counts
    repeats: int = 5  # most turns of each system, as the run's time allows
    fewest: int = 2  # and fewest turns
    processes: int = 1  # each takes this number of turns
    in_threads: bool = False  # whether each prompt comes from a thread of its own

    @property
    def title(self) -> str:
        """Its sizes in words."""
        return TITLES.get(self.name, self.name)

    @property
    def rows_per_prompt(self) -> int:
        """Returned rows per prompt."""
        return self.options.get("num_return_sequences", 1)

    @property
    def num_beams(self) -> int:
        return self.options.get("num_beams", 1)

    @property
    def sampled(self) -> bool:
        return bool(self.options.get("do_sample"))

    def batch(self, repeat: int, vocab: int) -> Batch:
        """New words in every repeat, so that prefix caches miss; the lengths stay."""
        lengths, words = random.Random(self.name), random.Random(f"{self.name} {repeat}")
        (prefix,) = texts(words, [self.prefix], vocab)
        sizes = [lengths.randint(*self.prompt_lengths) for _ in range(self.num_prompts)]
        prompts = [prefix + text for text in texts(words, sizes, vocab)]
        return Batch(prompts, [lengths.randint(*self.new_tokens) for _ in prompts])

    def scaled(self, prompts: float, tokens: float) -> Workload:
        """A smaller workload, for `--quick` and for checks in float32."""

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


TITLES = {
    "W1": "32 prompts of 32 to 256 tokens, 64 new tokens each",
    "W2": "64 prompts of 32 to 256 tokens, 8 to 256 new tokens each",
    "W3": "64 prompts with the same first 512 tokens, 32 new tokens each",
    "W4": "16 samples of a prompt of 512 tokens, 64 new tokens each",
    "W5": "8 beams of a prompt of 512 tokens, 64 new tokens",
    "W6": "one prompt of 16 tokens, 64 new tokens",
    "W9": "8 threads with a prompt of 64 to 128 tokens each, 32 new tokens",
    "W10": "one prompt of 8000 tokens, 32 new tokens",
}
SAMPLES = {"do_sample": True, "num_return_sequences": 16, "top_k": 0}
BEAMS = {"do_sample": False, "num_beams": 8}
SHORT = {"repeats": 8, "fewest": 8, "processes": 2}
LIST = (
    Workload("W1", 32, (32, 256), (64, 64), target=1.3),
    Workload("W2", 64, (32, 256), (8, 256), target=2.0, batch_sizes=(32, 64)),
    Workload("W3", 64, (8, 64), (32, 32), prefix=512, target=3.0),
    Workload("W4", 1, (512, 512), (64, 64), options=SAMPLES, target=2.0, fewest=3),
    Workload("W5", 1, (512, 512), (64, 64), options=BEAMS, target=1.5, fewest=3),
    Workload("W6", 1, (16, 16), (64, 64), target=1 / NOT_SLOWER, **SHORT),
    Workload("W9", 8, (64, 128), (32, 32), target=2.5, fewest=3, in_threads=True),
    Workload("W10", 1, (8000, 8000), (32, 32), target=1.3),
)
ALL = {workload.name: workload for workload in LIST}
"""What is measured in whole calls. (W7 and W8 are `benchmarks.speculation`'s.)"""
WORKLOADS = {name: ALL[name] for name in ("W1", "W2", "W3", "W4", "W5", "W6")}
"""Those of README."""


def texts(words: random.Random, lengths: Iterable[int], vocab: int) -> list[list[int]]:
    """Prompts of random words."""
    return [[words.randrange(FIRST_WORD, vocab - 1) for _ in range(length)] for length in lengths]


def batch_of(trace: Trace, scale: float, vocab: int) -> Batch:
    """The requests of a trace, `scale` times as long."""
    words = random.Random("trace 0")
    prompts, new_tokens = (
        [max(4, round(length * scale)) for length in lengths] for lengths in zip(*trace)
    )
    return Batch(texts(words, prompts, vocab), new_tokens)


def contiguous_bytes(shape: Shape, workload: Workload, batch: Batch, itemsize: int) -> int:
    """Bytes of plain `generate`'s `DynamicCache` with all prompts in one batch: every row as wide
    as the widest prompt plus the longest answer. The last token's K/V are never computed."""
    rows = len(batch.prompts) * max(workload.rows_per_prompt, workload.num_beams)
    width = max(map(len, batch.prompts)) + max(batch.new_tokens) - 1
    return rows * shape.kv_bytes(width, itemsize)


def left_padded(prompts: list[list[int]], device: Any) -> dict[str, torch.Tensor]:
    """`[rows, longest]` int64 ids and mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts], device=device)
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": ids, "attention_mask": torch.tensor(mask, device=device)}


def equal_share(expected: list[list[int]], actual: list[list[int]]) -> float:
    """Share of positions with equal tokens."""
    pairs = [(a, b) for left, right in zip(expected, actual) for a, b in zip(left, right)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
