"""Packed steps against a plain forward over each whole sequence."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged.attention.switch import switchable_configs, use_paged_attention
from hf_paged.batching.execution import inputs
from hf_paged.batching.execution.inputs import TableRows
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
            group.ensure_free(table.num_needed(query_len))
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
        self.groups = [group.blocks for group in self.cache.groups.values()]

    def run(self, items: list[tuple[Any, int]]) -> torch.Tensor:
        with torch.no_grad(), use_paged_attention(switchable_configs(self.model.modules())):
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
LAYOUTS = {
    "packed": (None, True),
    "side by side": (3, True),
    "side by side, not padded": (3, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_random_schedules_give_plain_logits(name: str, layout: str) -> None:
    """Prompts in chunks beside decodes, rows that join and leave, windows that free blocks."""
    unpacked_at, can_mix_lengths = LAYOUTS[layout]
    bench, draw = Bench(models.build(name), can_mix_lengths), random.Random(0)
    rows: list[Row] = []
    prompts: dict[Row, int] = {}
    for step in range(12):
        if step == unpacked_at:
            assert bench.runner.unpack("on purpose") and not bench.runner.unpack("on purpose")
        if len(rows) < 5:
            rows.append(Row(tokens(80, step), bench))
            prompts[rows[-1]] = draw.choice([1, 6, SIZE, 19, 33])
        if step % 4 == 3:
            gone = rows.pop(draw.randrange(len(rows)))
            gone.free()
        decodes = [
            row for row in rows if row.num_computed_tokens >= prompts[row] and draw.random() < 0.8
        ]
        chunks = [row for row in rows if row.num_computed_tokens < prompts[row]]
        items = [row.take(1) for row in decodes]
        for row in chunks:
            left = prompts[row] - row.num_computed_tokens
            items.append(row.take(draw.randint(1, left), known=prompts[row]))
        if items:
            logits = bench.run(items)
            ready = [row for row, _ in items if row.num_computed_tokens == len(row.token_ids)]
            assert logits.shape == (len(ready), models.VOCAB_SIZE)
            if ready:
                assert_close(logits, [bench.plain(row) for row in ready])
    assert len(prompts) > 5


def test_no_logits_are_returned() -> None:
    bench = Bench(models.get("llama"))
    row = Row(tokens(30, 0), bench)
    assert bench.run([row.take(9, known=30)]).shape == (0, models.VOCAB_SIZE)
    assert_close(bench.run([row.take(21)]), [bench.plain(row)])


def test_a_forward_that_does_not_pick_logits() -> None:
    bench = Bench(models.get("llama"))
    assert bench.runner._takes_logits_to_keep
    rows = [Row(tokens(12, seed), bench) for seed in range(3)]
    bench.runner._takes_logits_to_keep = False
    items = [rows[0].take(7), rows[1].take(5, known=12), rows[2].take(12)]
    logits = bench.run(items)
    assert_close(logits, [bench.plain(rows[0]), bench.plain(rows[2])])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_written_in_the_same_step_are_read(name: str) -> None:
    """Full blocks of a prompt serve another one admitted in the same step, in every layer."""
    bench = Bench(models.get(name))
    shared, first, second = tokens(2 * SIZE, 0), tokens(5, 1), tokens(11, 2)
    one, two = Row(shared + first, bench), Row(shared + second, bench)
    items = [one.take(len(one.tokens))]
    for mine, other in zip(two.blocks.tables, one.blocks.tables):
        mine.block_ids = other.block_ids[:2]
        mine.pool.acquire(mine.block_ids)
        mine.num_tokens = 2 * SIZE
    two.num_computed_tokens = 2 * SIZE
    items.append(two.take(len(second)))
    # the window freed a block, which the other row keeps
    assert two.blocks.tables[0].num_dropped == (name == "gemma3")
    logits = bench.run(items)
    assert_close(logits, [bench.plain(one), bench.plain(two)])


def test_forks_read_the_same_blocks() -> None:
    bench = Bench(models.get("qwen3"))
    parent = Row(tokens(2 * SIZE, 0), bench)
    bench.run([parent.take(2 * SIZE)])
    children = [Row(parent.tokens + tokens(3, seed), bench) for seed in (1, 2, 3)]
    for child in children:
        child.num_computed_tokens = 2 * SIZE
        child.blocks.tables = [table.fork() for table in parent.blocks.tables]
    for _ in range(3):
        assert_close(
            bench.run([child.take(1) for child in children]),
            [bench.plain(child) for child in children],
        )
    assert bench.memory.num_used == 2 + 3


def test_the_memory_grows_under_a_running_batch() -> None:
    bench = Bench(models.get("mistral"))
    row, other = Row(tokens(90, 0), bench), Row(tokens(90, 1), bench)
    bench.run([row.take(3)])
    before = bench.groups[0].storage.layers[0].keys.shape[0]
    assert_close(bench.run([row.take(1), other.take(80)]), [bench.plain(row), bench.plain(other)])
    assert bench.groups[0].storage.layers[0].keys.shape[0] > before


def test_a_forward_that_fails_leaves_the_runner_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(models.build("llama"))
    row = Row(tokens(20, 0), bench)
    bench.run([row.take(5)])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    item = row.take(4)
    with monkeypatch.context() as patch:
        patch.setattr(bench.model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            bench.run([item])
    assert all(layer.group.packed is None for layer in bench.runner.cache.layers)
    assert_close(bench.run([item]), [bench.plain(row)])


def test_logits_carry_no_graph_and_grad_mode_stays() -> None:
    bench = Bench(models.get("gpt2"))
    assert torch.is_grad_enabled()
    logits = bench.run([Row(tokens(6, 0), bench).take(6)])
    assert torch.is_grad_enabled() and not logits.requires_grad and not logits.is_inference()


def test_a_table_too_short_for_its_tokens_is_an_error() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool, SIZE)
    table.append(2 * SIZE)
    table.block_ids = [3, 1]
    assert table.slots(SIZE - 2, SIZE + 1) == [4 * SIZE - 2, 4 * SIZE - 1, SIZE]
    for first, end in ((0, 2 * SIZE + 1), (-1, 2)):
        with pytest.raises(ValueError, match="2 blocks of 8 tokens"):
            table.slots(first, end)


def test_a_table_whose_write_was_interrupted_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    rows = TableRows()
    rows.tensor([[1, 2], [5]])
    for tables in ([[3, 4], [5]], [[1, 2], [6]], [[1, 2, 7], [6, 8, 9]], [list(range(99)), [5]]):
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "array", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rows.tensor(tables)
        found = rows.tensor(tables)
        assert [row[: len(table)].tolist() for row, table in zip(found, tables)] == tables


def test_of_a_table_that_grew_only_the_new_blocks_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[list[int]] = []

    def spied(kind: str, items: Any) -> Any:
        written.append(list(items))
        return array(kind, items)

    rows, tables = TableRows(), [[1, 2], [], [5] * 8]
    rows.tensor(tables)
    monkeypatch.setattr(inputs, "array", spied)
    tables[0] += [3, 4]
    tables[1].append(7)
    found = rows.tensor(tables)
    assert [row[: len(table)].tolist() for row, table in zip(found, tables)] == tables
    tables[0][2] = 9
    rows.tensor(tables)
    assert written == [[3, 4], [7], [1, 2, 9, 4]]


def test_table_rows_follow_every_change() -> None:
    """Rows appear, grow, shrink, change in the middle, move up when an earlier row leaves, and
    exceed all before."""
    draw, rows = random.Random(0), TableRows()
    tables = [[draw.randrange(100) for _ in range(draw.randint(1, 4))] for _ in range(3)]
    for step in range(90):
        action = draw.choice(["append", "append", "change", "remove", "add", "drop", "pop", "none"])
        row = draw.randrange(len(tables)) if tables else 0
        if action == "add" or not tables:
            tables.insert(
                row, [draw.randrange(100) for _ in range(draw.randint(1, 2 + step // 10))]
            )
        elif action == "append":
            tables[row].append(draw.randrange(100))
        elif action == "change":
            tables[row][draw.randrange(len(tables[row]))] = draw.randrange(100)
        elif action == "remove":
            del tables[row]
        elif action == "drop" and len(tables[row]) > 1:
            del tables[row][0]
        elif action == "pop" and len(tables[row]) > 1:
            tables[row].pop()
        tensor = rows.tensor(tables)
        assert (
            tensor.dtype == torch.int32
            and tensor.shape[0] == len(tables)
            and tensor.is_contiguous()
        )
        assert [tensor[i, : len(ids)].tolist() for i, ids in enumerate(tables)] == tables
