"""
Scheduler, manager and pools under every order of events, against a simulated memory.

`Memory` simulates the tensors: each slot's content, where a token's K/V depend on all tokens up to
and including it. Slots hold garbage until they are "computed". Forwards write and read through
block tables as the runner does, so a wrong copy-on-write, a stale prefix hit or a window block
freed too early shows as wrong content. `tests.support.engine_machine` swaps, with real blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool, BlockTable, OutOfBlocksError
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.sequence_blocks import NO_BLOCKS
from tests.support.pools import PoolGroup, Pools, manager_of

GARBAGE = ("garbage",)
CONFIGS = st.fixed_dictionaries(
    dict(
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (None, 9, 3)]),
        sizes=st.sampled_from([(4, 4, 4)] * 3 + [(4, 2, 8), (8, 2, 2), (2, 8, 4)]),
        num_blocks=st.integers(6, 24),
        prefix_caching=st.sampled_from([True, True, False]),
        max_tokens=st.sampled_from([1, 3, 7, 16, 64]),
        max_chunk=st.sampled_from([None, None, 1, 5, 16]),
        max_seqs=st.integers(1, 8),
        watermark=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**16),
    )
)


class Memory:
    """Contents of the slots of one layer group."""

    def __init__(self, block_size: int) -> None:
        self.slots: dict[tuple[int, int], Any] = {}
        self.block_size = block_size

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        assert len({target for _, target in copies}) == len(copies)
        contents = [
            [self.slots.get((source, offset), GARBAGE) for offset in range(self.block_size)]
            for source, _ in copies
        ]
        for (_, target), content in zip(copies, contents):
            for offset, value in enumerate(content):
                self.slots[target, offset] = value

    def slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        number = position // self.block_size - table.num_dropped
        return table.block_ids[number], position % self.block_size


class Group(PoolGroup):
    """A group whose block contents are in a `Memory`."""

    def __init__(self, pool: BlockPool, spec: GroupSpec, memory: Memory) -> None:
        super().__init__(pool, spec, memory.block_size)
        self.copy_blocks = memory.copy_blocks  # type: ignore[method-assign]


class SharedPools(Pools):
    """Pools that share one limit."""

    def __init__(self, groups: list[Group], num_blocks: int) -> None:
        super().__init__(groups, 16)
        self.num_blocks = num_blocks
        for group in groups:
            group.ensure_free = lambda needed, pool=group.pool: self.grow(pool, needed)

    def num_available(self, groups: Any, assume_unused: bool = False) -> int:
        return self.num_blocks - (0 if assume_unused else sum(g.pool.num_used for g in self.groups))

    def grow(self, pool: BlockPool, needed: int) -> None:
        if needed > self.num_available(self.groups):
            raise OutOfBlocksError("budget")
        pool.grow(max(0, needed - pool.num_available))


class Engine(RuleBasedStateMachine):
    """Rules are the callers' actions. A decoding owns one request, or several that advance
    together; it gives tokens once all of its open rows have their logits.
    """

    @initialize(config=CONFIGS)
    def begin(self, config: dict[str, Any]) -> None:
        self.random = random.Random(config["seed"])
        self.windows, self.num_blocks = config["windows"], config["num_blocks"]
        self.memories = [Memory(size) for _, size in zip(self.windows, config["sizes"])]
        self.groups = [
            Group(BlockPool(0), GroupSpec(window=window), memory)
            for window, memory in zip(self.windows, self.memories)
        ]
        pools = SharedPools(self.groups, self.num_blocks)
        self.manager = manager_of(self.groups, 16, config["prefix_caching"], pools)
        self.scheduler = Scheduler(
            Preemption(self.manager),
            max_num_batched_tokens=config["max_tokens"],
            max_num_seqs=config["max_seqs"],
            max_chunk_tokens=config["max_chunk"],
            watermark=config["watermark"],
        )
        self.scheduler.queue.arrivals_per_priority = 4
        self.decodings: list[list[Request]] = []
        self.answered: dict[Request, set[int]] = {}
        self.is_beam: dict[Request, bool] = {}
        self.version = 0  # of the weights
        # least weights version that a request may be served
        self.least_version: dict[Request, int] = {}

    # -- what callers do --------------------------------------------------------------------------

    @rule(
        prompts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3),
        rows=st.sampled_from([1, 1, 1, 2, 3]),
        is_beam=st.booleans(),
        new_tokens=st.integers(1, 14),
        priority=st.integers(-1, 2),
        namespace=st.sampled_from([None, None, "adapter"]),
    )
    def add(self, prompts, rows, is_beam, new_tokens, priority, namespace) -> None:
        decoding = []
        for shared, own in prompts:
            ids = [1] * shared + [self.random.randrange(3) for _ in range(own)]
            request = Request(
                "r", [Sequence(ids)], len(ids) + new_tokens, rows, priority, namespace
            )
            try:
                self.scheduler.add(request)
            except OutOfBlocksError as error:
                assert f"blocks of {self.manager.size_text} tokens, but at most" in str(error)
                continue
            decoding.append(request)
            self.answered[request], self.is_beam[request] = set(), is_beam
        self.decodings.append(decoding)

    @rule(fails=st.sampled_from([False] * 3 + [True]), retries=st.booleans())
    def step(self, fails: bool, retries: bool) -> None:
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        for request in batch.admitted:
            self.least_version[request] = self.version
        self.manager.flush_copies()
        self.write(batch, broken=fails)
        if fails:
            self.scheduler.undo_step()
            for request in dict.fromkeys(sequence.request for sequence in batch.sequences):
                if not retries:
                    self.scheduler.finish(request)
            return
        self.read(batch)
        self.scheduler.commit(batch)
        for sequence in batch.sequences:
            if sequence.num_computed_tokens == sequence.num_tokens:
                self.answered[sequence.request].add(sequence.index)
        self.decode()

    @precondition(lambda self: any(self.decodings))
    @rule(number=st.integers(0, 99), only_row=st.booleans())
    def cancel(self, number: int, only_row: bool) -> None:
        requests = [request for decoding in self.decodings for request in decoding]
        request = requests[number % len(requests)]
        if only_row and len(request.sequences) > 1 and not self.is_beam[request]:
            self.scheduler.finish_sequence(request.sequences[number % len(request.sequences)])
        else:
            self.scheduler.finish(request)

    @rule()
    def weights_change(self) -> None:
        self.version += 1
        self.manager.drop_cached()

    # -- the simulated forward --------------------------------------------------------------------

    def check_batch(self, batch) -> None:
        counts = list(batch.counts)
        assert sum(counts) <= self.scheduler.max_num_batched_tokens and 0 not in counts
        assert counts == [1] * counts.count(1) + [count for count in counts if count > 1]
        chunk, new = self.scheduler.max_chunk_tokens, batch.admitted
        decodes = any(
            sequence.num_to_compute == 1 and sequence.request not in new
            for sequence in batch.sequences[: batch.num_decodes]
        )
        assert chunk is None or not decodes or sum(count for count in counts if count > 1) <= chunk
        assert max(Counter(map(id, batch.sequences)).values(), default=0) <= 1
        columns = zip(batch.sequences, batch.starts, batch.counts, batch.num_logits)
        for sequence, start, count, num_logits in columns:
            assert sequence.request.status is Status.RUNNING and not sequence.is_finished
            assert start == sequence.num_computed_tokens and start + count <= sequence.num_tokens
            assert num_logits == (start + count == sequence.num_tokens)
            for table in sequence.blocks.tables:
                assert table.num_tokens == start + count

    def content(self, sequence: Sequence, position: int) -> tuple[Any, ...]:
        namespace = sequence.request.namespace
        return (self.version, namespace, *sequence.token_ids[: position + 1])

    def write(self, batch, broken: bool) -> None:
        written = set()
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts):
            for group, (memory, table) in enumerate(zip(self.memories, sequence.blocks.tables)):
                for position in range(start, start + count):
                    slot = memory.slot(table, position)
                    assert (group, slot) not in written
                    written.add((group, slot))
                    memory.slots[slot] = GARBAGE if broken else self.content(sequence, position)

    def read(self, batch) -> None:
        counts = dict(zip(batch.sequences, batch.counts))
        for request in self.scheduler.queue.running:
            for sequence in request.sequences:
                if sequence.blocks is NO_BLOCKS:
                    continue
                context_len = sequence.num_computed_tokens
                end = context_len + counts.get(sequence, 0)
                for window, memory, table in zip(
                    self.windows, self.memories, sequence.blocks.tables
                ):
                    first = 0 if window is None else max(0, context_len - window + 1)
                    for position in range(first, end):
                        version, *content = memory.slots.get(memory.slot(table, position), GARBAGE)
                        assert content == list(self.content(sequence, position)[1:])
                        assert version >= self.least_version[request]

    # -- the simulated decodings ------------------------------------------------------------------

    def decode(self) -> None:
        for decoding in self.decodings:
            open_requests = [request for request in decoding if not request.is_finished]
            for request in open_requests:
                if self.answered[request] and len(request.sequences) < request.num_rows:
                    request.fork(request.num_rows)
                    self.answered[request] = set(range(request.num_rows))
            if all(s.index in self.answered[r] for r in open_requests for s in r.open_sequences):
                for request in open_requests:
                    self.advance(request)
        self.decodings = [[r for r in decoding if not r.is_finished] for decoding in self.decodings]
        self.decodings = [decoding for decoding in self.decodings if decoding]

    def advance(self, request: Request) -> None:
        self.answered[request] = set()
        count = len(request.sequences)
        tokens = [self.random.randrange(3) for _ in range(count)]
        if self.is_beam[request]:
            parents = [self.random.randrange(count) for _ in range(count)]
            expected = [
                [*request.sequences[p].token_ids, token] for p, token in zip(parents, tokens)
            ]
            request.continue_beams(parents, tokens)
            assert [sequence.token_ids for sequence in request.sequences] == expected
        else:
            for sequence, token in zip(request.sequences, tokens):
                if not sequence.is_finished:
                    sequence.token_ids.append(token)
                    if self.random.random() < 0.05:
                        self.scheduler.finish_sequence(sequence)
        if max(sequence.num_tokens for sequence in request.sequences) >= request.max_num_tokens:
            self.scheduler.finish(request)

    # -- always true ------------------------------------------------------------------------------

    @invariant()
    def everything_is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for number, group in enumerate(self.groups):
            group.pool.check_integrity([table.block_ids for table in self.manager.tables(number)])
        assert sum(group.pool.num_used for group in self.groups) <= self.num_blocks
        queue = self.scheduler.queue
        keys = [request.sort_key for request in queue.running]
        assert keys == sorted(keys)
        assert queue.num_rows == sum(request.num_open_rows for request in queue.running)
        unfinished = [request for request in self.answered if not request.is_finished]
        assert len(queue.running) + len(queue.waiting) == len(unfinished)
        for request in self.answered:
            if request.status is not Status.RUNNING:
                assert all(not t.block_ids for s in request.sequences for t in s.blocks.tables)

    def teardown(self) -> None:
        """Everything finishes in a bounded number of steps, and no block is left."""
        if not hasattr(self, "manager"):
            return
        # one token per step, rows in turn, takes thousands of steps
        self.scheduler.max_num_batched_tokens = 64
        steps = 0
        while self.scheduler.queue.running or self.scheduler.queue.waiting:
            self.step(False, False)
            self.everything_is_whole()
            steps += 1
            assert steps < 5_000, repr(self.scheduler)
        self.manager.drop_cached()
        assert all(group.pool.num_free == group.pool.num_blocks for group in self.groups)


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngine = pytest.mark.slow(TestEngine)
