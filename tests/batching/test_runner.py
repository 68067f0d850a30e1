"""Packed steps against a plain forward over each whole sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged.attention.switch import switch_attention
from hf_paged.batching.execution.packed import PackedRunner
from hf_paged.batching.factory import find_recorder
from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedCache
from hf_paged.config import PagedConfig
from hf_paged.plan import StepPlan
from tests.support import models

SIZE = models.BLOCK_SIZE


class Row:
    """A sequence as the runner needs it: tokens, number of computed tokens, a block table per
    group."""

    def __init__(self, tokens: list[int], bench: Bench) -> None:
        self.tokens, self.bench = tokens, bench
        self.token_ids: list[int] = []
        self.draft: list[int] = []
        self.num_computed_tokens = 0
        self.request = SimpleNamespace(inputs=None, prompt_logprobs=None)
        tables = [BlockTable(group.pool, group.block_size) for group in bench.groups]
        self.blocks: Any = SimpleNamespace(tables=tables)

    def take(self, query_len: int, known: int | None = None) -> tuple[Any, int]:
        """Room for `query_len` more tokens, and these as a row of a plan; `known`: number of
        existing tokens, if larger."""
        tables = self.blocks.tables
        for group, window, table in zip(self.bench.groups, self.bench.runner.windows, tables):
            if window is not None:
                table.drop_before(max(0, self.num_computed_tokens - window + 1))
            group.ensure_free(table.num_needed_blocks(query_len))
            assert table.append(query_len) is None
        end = self.num_computed_tokens + query_len
        self.token_ids = self.tokens[: end if known is None else known]
        return self, query_len

    def free(self) -> None:
        for table in self.blocks.tables:
            table.free()


class Bench:
    """A model with a runner on a separate memory."""

    def __init__(self, model: Any, can_mix_lengths: bool = True, **config: Any) -> None:
        self.model = model
        self.memory = PagedMemory(PagedConfig(block_size=SIZE, **config))
        self.cache = PagedCache(model.config, memory=self.memory)
        recorder = find_recorder(model, self.cache, self.memory.config.capture)
        self.runner = PackedRunner(model, self.cache, can_mix_lengths, recorder)
        self.groups = [group.group_memory for group in self.cache.groups.values()]

    def run(self, items: list[tuple[Any, int]]) -> torch.Tensor:
        with torch.no_grad(), switch_attention(list(self.model.modules())):
            logits = self.runner.run(StepPlan.of(items))
        for row, query_len in items:
            row.num_computed_tokens += query_len
        return logits

    @torch.no_grad()
    def plain(self, row: Row) -> torch.Tensor:
        ids = torch.tensor([row.tokens[: row.num_computed_tokens]])
        return self.model(ids, use_cache=False).logits[0, -1]


def tokens(length: int, seed: int) -> list[int]:
    return models.token_ids(1, length, seed)[0].tolist()


def assert_close(
    found: torch.Tensor, expected: list[torch.Tensor], tolerance: float = 1e-4
) -> None:
    torch.testing.assert_close(found, torch.stack(expected), atol=tolerance, rtol=tolerance)


# Whether steps are packed; if not, from which step on, and whether rows of different lengths are
# padded.
NOT_PADDED = "side by side, not padded"
LAYOUTS = {
    "packed": (None, True),
    "side by side": (3, True),
    NOT_PADDED: (3, False),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "packed") for name in models.DECODER_ONLY),
        *((name, "side by side") for name in ("llama", "gemma3", "gpt2", "mixtral")),
        *((name, NOT_PADDED) for name in ("qwen3", "mistral", "gemma2", "gpt_oss", "phi3")),
    ],
)
def test_random_schedules_give_plain_logits(name: str, layout: str) -> None:
    unpacked_at, can_mix_lengths = LAYOUTS[layout]
    bench = Bench(models.build(name), can_mix_lengths)

    def unpack(step: int) -> None:
        if step == unpacked_at:
            assert bench.runner.unpack("on purpose") and not bench.runner.unpack("on purpose")

    check_random_schedule(bench, num_steps=12, before=unpack)


def check_random_schedule(
    bench: Bench, num_steps: int, before: Callable[[int], object] = lambda step: None
) -> None:
    """Prompts in chunks beside decodes, rows that join and leave, windows that free blocks."""
    draw, rows = random.Random(0), list[Row]()
    prompts: dict[Row, int] = {}
    for step in range(num_steps):
        before(step)
        if len(rows) < 6:
            rows.append(Row(tokens(90, step), bench))
            prompts[rows[-1]] = draw.choice([1, 6, SIZE, 19, 33])
        if step % 4 == 3:
            rows.pop(draw.randrange(len(rows))).free()
        decodes = [
            row for row in rows if row.num_computed_tokens >= prompts[row] and draw.random() < 0.8
        ]
        items = [row.take(1) for row in decodes]
        for row in rows:
            if left := max(0, prompts[row] - row.num_computed_tokens):
                items.append(row.take(draw.randint(1, left), known=prompts[row]))
        if items:
            logits = bench.run(items)
            ready = [row for row, _ in items if row.num_computed_tokens == len(row.token_ids)]
            assert logits.shape == (len(ready), models.VOCAB_SIZE)
            if ready:
                assert_close(logits, [bench.plain(row) for row in ready])
    assert len(prompts) > 5


def test_a_table_too_short_for_its_tokens_is_an_error() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool, SIZE)
    table.append(2 * SIZE)
    table.block_ids = [3, 1]
    assert table.slots(SIZE - 2, SIZE + 1) == [4 * SIZE - 2, 4 * SIZE - 1, SIZE]
    for first, end in ((0, 2 * SIZE + 1), (-1, 2)):
        with pytest.raises(ValueError, match="2 blocks of 8 tokens"):
            table.slots(first, end)
