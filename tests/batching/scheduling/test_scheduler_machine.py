"""
Scheduler, manager and pools under every order of events, against a simulated memory.

`Memory` simulates the tensors: each slot's content, where a token's K/V depend on all tokens up to
and including it. Slots hold garbage until they are "computed". Forwards write and read through
block tables as the runner does, so a wrong copy-on-write, a stale prefix hit, a lost swap or a
window block freed too early shows as wrong content.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.preemption import CostModel, Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool, BlockTable, OutOfBlocksError
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.sequence_blocks import NO_BLOCKS
from tests.support.pools import PoolGroup, Pools, manager_of

SIZES = [(4, 4, 4)] * 3 + [(4, 2, 8), (8, 2, 2), (2, 8, 4)]  # tokens in a block of each layer group
GARBAGE = ("garbage",)


class Memory:
    """Contents of the slots of one layer group."""

    def __init__(self, block_size: int) -> None:
        self.slots: dict[tuple[int, int], Any] = {}
        self.block_size = block_size

    def block(self, block_id: int) -> list[Any]:
        return [self.slots.get((block_id, offset), GARBAGE) for offset in range(self.block_size)]

    def fill(self, block_id: int, content: list[Any]) -> None:
        for offset, value in enumerate(content):
            self.slots[block_id, offset] = value

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        assert len({target for _, target in copies}) == len(copies)
        contents = [self.block(source) for source, _ in copies]
        for (_, target), content in zip(copies, contents):
            self.fill(target, content)

    def slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        return table.block_ids[
            position // self.block_size - table.num_dropped
        ], position % self.block_size


@dataclass(eq=False)
class Host:
    """Contents swapped out together, by group and former block id."""

    contents: list[dict[int, list[Any]]]


class Group(PoolGroup):
    """A group whose block contents are in a `Memory`."""

    def __init__(self, pool: BlockPool, spec: GroupSpec, memory: Memory) -> None:
        super().__init__(pool, spec, memory.block_size)
        self.copy_blocks = memory.copy_blocks  # type: ignore[method-assign]


class ApartPools(Pools):
    """Pools of which each has a limit: a request fits if the smallest could hold all of it."""

    def num_available(self, groups: Any, if_unused: bool = False) -> int:
        if if_unused:
            return min(group.pool.num_blocks for group in groups)
        return super().num_available(groups)


class SharedPools(Pools):
    """Pools that share one limit."""

    def __init__(self, groups: list[Group], num_blocks: int) -> None:
        super().__init__(groups, 16)
        self.num_blocks = num_blocks

    def num_available(self, groups: Any, if_unused: bool = False) -> int:
        if if_unused:
            return self.num_blocks
        return self.num_blocks - sum(group.pool.num_used for group in groups)


class AnyCost(CostModel):
    """Chooses at random."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__(1.0)
        self.random = generator

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        return self.random.choice(["swap", "recompute"])


class FakeSwapper:
    """Keeps contents, each distinct block once; refuses at random."""

    def __init__(
        self, groups: list[PoolGroup], memories: list[Memory], generator: random.Random
    ) -> None:
        self.groups, self.memories, self.random = groups, memories, generator
        self.hosts: weakref.WeakSet[Host] = weakref.WeakSet()
        self.restored: list[Request] = []

    def num_held_bytes(self, request: Request) -> int:
        return 1

    def swap_out(self, request: Request) -> bool:
        if self.random.random() < 0.2:
            return False
        rows = [sequence for sequence in request.sequences if sequence.blocks.tables]
        contents: list[dict[int, list[Any]]] = []
        for group, memory in enumerate(self.memories):
            ids = [
                block_id
                for sequence in rows
                for block_id in sequence.blocks.tables[group].block_ids
            ]
            contents.append({block_id: memory.block(block_id) for block_id in ids})
        host = Host(contents)
        for sequence in rows:
            tables = [
                (list(t.block_ids), t.num_dropped, t.num_tokens) for t in sequence.blocks.tables
            ]
            sequence.swapped = (host, tables)
            for table in sequence.blocks.tables:
                table.free()
        self.hosts.add(host)
        return True

    def held(self, request: Request) -> list[list[int]]:
        rows = [
            sequence.swapped[1] for sequence in request.sequences if sequence.swapped is not None
        ]
        return [
            list(dict.fromkeys(block_id for tables in rows for block_id in tables[group][0]))
            for group in range(len(self.groups))
        ]

    def num_blocks(self, request: Request) -> int:
        return sum(map(len, self.held(request)))

    def swap_in(self, request: Request) -> bool:
        taken: list[dict[int, int]] = []
        try:
            for group, ids in zip(self.groups, self.held(request)):
                group.ensure_free(len(ids))
                taken.append(dict(zip(ids, group.pool.allocate(len(ids)))))
        except OutOfBlocksError:
            for group, blocks in zip(self.groups, taken):
                group.pool.release(blocks.values())
            return False
        for sequence in request.sequences:
            if sequence.swapped is None:
                continue
            host, tables = sequence.swapped
            for group, (table, (ids, num_dropped, num_tokens)) in enumerate(
                zip(sequence.blocks.tables, tables)
            ):
                table.block_ids = [taken[group][block_id] for block_id in ids]
                table.num_dropped, table.num_tokens = num_dropped, num_tokens
                table.pool.acquire(table.block_ids)
                for block_id in ids:
                    self.memories[group].fill(
                        taken[group][block_id], host.contents[group][block_id]
                    )
            sequence.swapped = None
        for group, blocks in zip(self.groups, taken):
            group.pool.release(blocks.values())
        self.restored.append(request)
        return True


class Engine(RuleBasedStateMachine):
    """Rules are the callers' actions. A decoding owns one request, or several that advance
    together; it gives tokens once all of its open rows have their logits.
    """

    @initialize(
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (None, 9, 3)]),
        sizes=st.sampled_from(SIZES),
        num_blocks=st.integers(6, 24),
        is_shared=st.booleans(),
        prefix_caching=st.sampled_from([True, True, False]),
        max_tokens=st.sampled_from([1, 3, 7, 16, 64]),
        max_chunk=st.sampled_from([None, None, 1, 5, 16]),
        max_seqs=st.integers(1, 8),
        preempt=st.sampled_from(["recompute", "swap", "auto"]),
        watermark=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self,
        windows,
        sizes,
        num_blocks,
        is_shared,
        prefix_caching,
        max_tokens,
        max_chunk,
        max_seqs,
        preempt,
        watermark,
        seed,
    ) -> None:
        self.random = random.Random(seed)
        self.windows, self.num_blocks, self.is_shared = windows, num_blocks, is_shared
        self.memories = [Memory(size) for _, size in zip(windows, sizes)]
        pools = [BlockPool(0 if is_shared else num_blocks) for _ in windows]
        self.groups = [
            Group(pool, GroupSpec(window=window), memory)
            for pool, window, memory in zip(pools, windows, self.memories)
        ]
        if is_shared:
            for group, pool in zip(self.groups, pools):
                group.ensure_free = self.room(pool, pools)
            limited: Pools = SharedPools(self.groups, num_blocks)
        else:
            limited = ApartPools(self.groups, 16)
        self.manager = manager_of(self.groups, 16, prefix_caching, limited)
        self.swapper = FakeSwapper(self.groups, self.memories, self.random)
        self.scheduler = Scheduler(
            Preemption(
                self.manager,
                preempt,
                self.swapper,
                cost_model=AnyCost(self.random),
            ),
            max_num_batched_tokens=max_tokens,
            max_num_seqs=max_seqs,
            max_chunk_tokens=max_chunk,
            watermark=watermark,
        )
        self.scheduler.queue.arrivals_per_priority = 4
        self.decodings: list[list[Request]] = []
        self.answered: dict[Request, set[int]] = {}
        self.is_beam: dict[Request, bool] = {}
        self.version = 0  # of the weights
        # least weights version that a request may be served
        self.least_version: dict[Request, int] = {}
        self.outside: list[list[int]] = [[] for _ in windows]

    def room(self, pool: BlockPool, pools: list[BlockPool]) -> Any:
        def ensure_free(needed: int) -> None:
            if needed > self.num_blocks - sum(p.num_used for p in pools):
                raise OutOfBlocksError("budget")
            pool.grow(max(0, needed - pool.num_available))

        return ensure_free

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

    @rule(fails=st.sampled_from([False] * 9 + [True]), retries=st.booleans())
    def step(self, fails: bool, retries: bool) -> None:
        try:
            batch = self.scheduler.schedule()
        except OutOfBlocksError as error:
            assert any(self.outside), error
            assert "nothing can be scheduled" in str(error)
            return
        self.check_batch(batch)
        for request in batch.admitted:
            if request not in self.swapper.restored:
                self.least_version[request] = self.version
        self.swapper.restored.clear()
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
        if self.random.random() < 0.7:
            self.look_ahead()
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

    @rule(count=st.integers(0, 10), group=st.integers(0, 2))
    def others_hold_blocks(self, count: int, group: int) -> None:
        group %= len(self.groups)
        pool = self.groups[group].pool
        pool.release(self.outside[group])
        self.outside[group] = []
        count = min(count, self.manager.num_free if self.is_shared else pool.num_available)
        self.groups[group].ensure_free(count)
        self.outside[group] = pool.allocate(count)
        for block_id in self.outside[group]:
            self.memories[group].fill(block_id, [GARBAGE] * self.memories[group].block_size)

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

    def look_ahead(self) -> None:
        """The next step is launched for all rows, with tokens that turn out to be wrong."""
        rows = [
            sequence
            for request in self.scheduler.queue.running
            for sequence in request.open_sequences
        ]
        ending = [
            sequence
            for sequence in rows
            if sequence.num_tokens + 1 >= sequence.request.max_num_tokens
        ]
        going = [sequence for sequence in rows if sequence not in ending]
        if not self.scheduler.reserve_next(going, len(ending)):
            return
        for sequence in going:
            assert sequence.num_computed_tokens == sequence.num_tokens
            for group, memory, table in zip(self.groups, self.memories, sequence.blocks.tables):
                slot = memory.slot(table, sequence.num_tokens)
                assert group.pool.refcount(slot[0]) == 1 and not group.pool.is_kept(slot[0])
                memory.slots[slot] = GARBAGE

    # -- the simulated decodings ------------------------------------------------------------------

    def decode(self) -> None:
        for decoding in self.decodings:
            open_requests = [request for request in decoding if not request.is_finished]
            for request in open_requests:
                if self.answered[request] and len(request.sequences) < request.num_rows:
                    request.fork(self.scheduler.blocks, request.num_rows)
                    self.answered[request] = set(range(request.num_rows))
            if not all(
                s.index in self.answered[r] for r in open_requests for s in r.open_sequences
            ):
                continue
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
            request.permute(self.scheduler.blocks, parents, tokens)
            assert [sequence.token_ids for sequence in request.sequences] == expected
        else:
            for sequence, token in zip(request.sequences, tokens):
                if not sequence.is_finished:
                    sequence.token_ids.append(token)
                    if not self.is_beam[request] and self.random.random() < 0.05:
                        self.scheduler.finish_sequence(sequence)
        if max(sequence.num_tokens for sequence in request.sequences) >= request.max_num_tokens:
            self.scheduler.finish(request)

    # -- always true ------------------------------------------------------------------------------

    @invariant()
    def everything_is_whole(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for number, (group, outside) in enumerate(zip(self.groups, self.outside)):
            group.pool.check_integrity(
                [*(table.block_ids for table in self.manager.tables(number)), outside]
            )
        if self.is_shared:
            assert sum(group.pool.num_used for group in self.groups) <= self.num_blocks
        running = self.scheduler.queue.running
        assert [r.key for r in running] == sorted(r.key for r in running)
        assert self.scheduler.queue.num_rows == sum(request.num_open_rows for request in running)
        unfinished = [request for request in self.answered if not request.is_finished]
        queue = self.scheduler.queue
        assert len(queue.running) + len(queue.waiting) == len(unfinished)
        for request in self.answered:
            if request.status is not Status.RUNNING:
                assert all(not t.block_ids for s in request.sequences for t in s.blocks.tables)

    def teardown(self) -> None:
        """Everything finishes in a bounded number of steps, and no block is left."""
        if not hasattr(self, "manager"):
            return
        for group, outside in zip(self.groups, self.outside):
            group.pool.release(outside)
        self.outside = [[] for _ in self.groups]
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
        assert not self.swapper.hosts


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngine = pytest.mark.slow(TestEngine)
