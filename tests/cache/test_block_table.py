"""Block tables over a pool against a model that keeps whole sequences: every operation, in any
order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hf_paged.cache.block_pool import BlockPool, BlockTable, OutOfBlocksError

SIZE = 8


class PagedSequences(RuleBasedStateMachine):
    """Each table stands for a list of tokens. `memory` simulates the slots' contents. Writes go
    through tables as in the cache; afterwards every table must read back its tokens, whatever
    happened to the others.
    """

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.memory: dict[tuple[int, int], int] = {}
        self.alive: dict[BlockTable, list[int]] = {}
        self.next_token = 0

    def write(self, table: BlockTable, count: int) -> None:
        needed, free = table.num_needed(count), self.pool.num_free
        if needed > free:
            before = (list(table.block_ids), table.num_tokens)
            with pytest.raises(OutOfBlocksError):
                table.append(count)
            assert (list(table.block_ids), table.num_tokens) == before
            return
        first = table.num_tokens
        copy = table.append(count)
        assert self.pool.num_free == free - needed
        if copy is not None:
            for offset in range(SIZE):
                if (copy[0], offset) in self.memory:
                    self.memory[copy[1], offset] = self.memory[copy[0], offset]
        for position in range(first, first + count):
            block_id = table.block_ids[position // SIZE - table.num_dropped]
            assert self.pool.refcount(block_id) == 1, "a shared block is written to"
            self.memory[block_id, position % SIZE] = self.next_token
            self.alive[table].append(self.next_token)
            self.next_token += 1

    @rule(target=tables, count=st.integers(0, 20))
    def start(self, count: int) -> BlockTable:
        table = BlockTable(self.pool, SIZE)
        self.alive[table] = []
        self.write(table, count)
        return table

    @rule(table=tables, count=st.integers(0, 20))
    def append(self, table: BlockTable, count: int) -> None:
        self.write(table, count)

    @rule(table=tables)
    def reserve(self, table: BlockTable) -> None:
        if table.shared_tail is None and self.pool.num_free:
            table.block_ids += self.pool.allocate(min(1, table.num_new_blocks(1)))

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        twin = table.fork()
        self.alive[twin] = list(self.alive[table])
        return twin

    @rule(table=tables, keep=st.integers(0, 60))
    def truncate(self, table: BlockTable, keep: int) -> None:
        if keep < table.num_dropped * SIZE:
            with pytest.raises(ValueError, match="have been freed"):
                table.truncate(keep)
            return
        table.truncate(keep)
        del self.alive[table][keep:]

    @rule(table=tables, token=st.integers(0, 60))
    def drop_before(self, table: BlockTable, token: int) -> None:
        table.drop_before(min(token, table.num_tokens))

    @rule(table=consumes(tables))
    def free(self, table: BlockTable) -> None:
        table.free()
        del self.alive[table]

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens in self.alive.items():
            assert table.num_tokens == len(tokens)
            for position in range(table.num_dropped * SIZE, len(tokens)):
                block_id = table.block_ids[position // SIZE - table.num_dropped]
                assert self.memory[block_id, position % SIZE] == tokens[position]

    @invariant()
    def the_pool_is_whole(self) -> None:
        self.pool.check_integrity([table.block_ids for table in self.alive])
        for table in self.alive:
            assert 0 <= table.num_unused_slots <= SIZE or table.num_tokens == 0


TestPagedSequences = PagedSequences.TestCase
TestPagedSequences.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPagedSequences = pytest.mark.slow(TestPagedSequences)


def test_the_last_holder_of_a_shared_tail_writes_in_place() -> None:
    pool = BlockPool(8)
    first = BlockTable(pool, SIZE)
    first.append(5)
    tables = [first, first.fork(), first.fork()]
    copies = [table.append(1) for table in tables]
    assert [copy is not None for copy in copies] == [True, True, False]
    assert len({table.block_ids[0] for table in tables}) == 3


def test_skip_starts_at_a_block() -> None:
    table = BlockTable(BlockPool(4), SIZE)
    table.skip(19)
    assert (table.num_dropped, table.num_tokens) == (2, 16)
    table.append(5)
    assert len(table.block_ids) == 1
    with pytest.raises(ValueError, match="holds 21 tokens"):
        table.skip(1)


def test_attach_shares_full_blocks() -> None:
    pool = BlockPool(6)
    first = BlockTable(pool, SIZE)
    first.append(3 * SIZE)
    second = BlockTable(pool, SIZE)
    second.attach(first.block_ids[1:], num_dropped=1)
    assert (second.num_tokens, second.num_dropped, pool.num_shared) == (3 * SIZE, 1, 2)
    assert second.append(1) is None  # after full blocks nothing is copied
    with pytest.raises(ValueError, match="holds 25 tokens"):
        second.attach(first.block_ids, 0)


def test_append_takes_blocks_that_were_allocated_for_it() -> None:
    pool = BlockPool(6)
    first = BlockTable(pool, SIZE)
    first.append(5)
    second = first.fork()
    assert second.num_needed(SIZE) == 2 and second.num_needed(0) == 0
    tail, new_ids = second.block_ids[0], pool.allocate(2)
    assert second.append(SIZE, new_ids) == (tail, new_ids[0])
    assert second.block_ids == new_ids
    pool.check_integrity([first.block_ids, second.block_ids])
