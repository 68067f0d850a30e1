"""The rules of pools and of block tables, one by one; any order of them is played in
`tests/support/engine_machine.py`."""

import pytest

from hf_paged.cache.block_pool import BlockPool, BlockTable, OutOfBlocksError
from hf_paged.cache.sequence_blocks import SequenceBlocks

SIZE = 8  # tokens in a block


def ignore(block_id: int) -> None:
    pass


def test_blocks_are_allocated_once_and_the_least_recently_freed_comes_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(2) + pool.allocate(1)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (3, 0, 3)
    pool.release([b])
    pool.release([c, a])
    pool.grow(2)
    assert pool.allocate(5) == [b, c, a, 3, 4]


def test_a_block_is_free_only_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(2)
    pool.acquire([ids[0], ids[0]])
    for refcount, num_shared in ((3, 1), (2, 1), (1, 0)):
        assert (pool.refcount(ids[0]), pool.num_shared, pool.num_free) == (refcount, num_shared, 0)
        pool.release([ids[0]])
    assert pool.num_free == 1


def test_operations_that_do_not_fit_a_blocks_state_are_refused() -> None:
    pool = BlockPool(1)
    for operation, message in (
        (lambda: pool.acquire([0]), "^block 0 is free and cannot be shared$"),
        (lambda: pool.release([0]), "^block 0 has no holder to remove$"),
        (lambda: pool.keep(0, ignore), "is unused"),
    ):
        with pytest.raises(ValueError, match=message):
            operation()
    pool.keep(*pool.allocate(1), ignore)
    with pytest.raises(ValueError, match="already kept"):
        pool.keep(0, ignore)


def test_kept_blocks_are_cached_then_evicted_least_recently_released_first() -> None:
    pool, evicted = BlockPool(4), []
    a, b, c, d = pool.allocate(4)
    for block_id in (a, b, c):
        pool.keep(block_id, evicted.append)
    pool.release([b, d, a])
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 2, 1, 3)
    message = "needs 4 blocks, but only 1 of 4 are free and 2 cached"
    with pytest.raises(OutOfBlocksError, match=message):
        pool.allocate(4)
    assert not evicted
    assert pool.allocate(2) == [d, b] and evicted == [b]
    assert pool.is_kept(a) and not pool.is_kept(b)
    pool.check_integrity([[b, c, d]])


def test_checks_see_leaks_stale_tables_and_writes_to_blocks_that_others_read() -> None:
    pool = BlockPool(4)
    shared, kept, own = pool.allocate(3)
    pool.acquire([shared])
    pool.keep(kept, ignore)
    tables = [[shared, kept, own], [shared]]
    pool.check_writable([own])
    pool.check_integrity(tables)
    for wrong, count in (([], 0), ([*tables, [3]], 1)):
        with pytest.raises(AssertionError, match=f"held by {count} tables"):
            pool.check_integrity(wrong)
    pool.needs_recount = True  # tables may have been garbage-collected since they were listed
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="held by 1 tables"):  # collection adds no tables
        pool.check_integrity([*tables, [3]])
    pool.needs_recount = False
    for block_id, state in ((shared, "refcount 2, kept: False"), (kept, "refcount 1, kept: True")):
        message = f"block {block_id} would be overwritten: {state}"
        with pytest.raises(AssertionError, match=message):
            pool.check_writable([own, block_id])
        with pytest.raises(AssertionError, match=message):  # ever after
            pool.check_integrity(tables)


def test_a_pool_shrinks_to_its_last_used_block() -> None:
    pool = BlockPool(4)
    first, second, third, last = pool.allocate(4)
    pool.keep(third, ignore)
    pool.release([first, third, last])
    assert pool.peak_used == 4
    pool.shrink()
    assert (pool.num_blocks, pool.num_free, pool.num_cached) == (2, 1, 0)
    assert pool.holder_counts() == [0, 1]
    pool.check_integrity([[second]])
    pool.release([second])
    pool.shrink()
    assert (pool.num_blocks, pool.peak_used) == (0, 0)
    pool.grow(2)
    assert pool.allocate(2) == [0, 1]


def filled(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool, SIZE)
    table.append(num_tokens)
    return table


def test_append_that_the_pool_cannot_serve_changes_nothing() -> None:
    pool = BlockPool(2)
    table = filled(pool, 9)
    with pytest.raises(OutOfBlocksError):
        table.append(8)
    assert (table.block_ids, table.num_tokens, pool.num_free) == ([0, 1], 9, 0)


def test_tables_begin_behind_blocks_that_were_freed_skipped_or_are_shared() -> None:
    pool = BlockPool(8)
    table = filled(pool, 3 * SIZE)
    second = BlockTable(pool, SIZE)
    second.attach(table.block_ids[1:], num_dropped=1, num_tokens=3 * SIZE)
    assert (second.num_tokens, second.num_dropped, pool.num_shared) == (3 * SIZE, 1, 2)
    assert second.append(1) is None  # after full blocks nothing is copied
    with pytest.raises(ValueError, match="holds 25 tokens"):
        second.attach(table.block_ids, 0, 3 * SIZE)
    table.drop_before(SIZE + 1)
    table.truncate(SIZE)
    assert (table.block_ids, table.num_tokens, table.num_dropped) == ([], SIZE, 1)
    with pytest.raises(ValueError, match="have been freed"):
        table.truncate(SIZE - 1)
    skipped = BlockTable(pool, SIZE)
    skipped.skip(19)
    assert (skipped.num_dropped, skipped.num_tokens) == (2, 16)
    skipped.append(5)
    assert len(skipped.block_ids) == 1
    with pytest.raises(ValueError, match="holds 21 tokens"):
        skipped.skip(1)


def test_a_kept_block_that_may_be_written_to_is_not_called_shared() -> None:
    pool = BlockPool(1)
    table = BlockTable(pool, SIZE)
    table.append(2)
    pool.keep(table.block_ids[0], lambda block_id: None)
    message = "block 0 is shared or kept, but may be written to"
    with pytest.raises(AssertionError, match=message):
        SequenceBlocks((table,), capacity=SIZE).check_integrity()
    table.free()


def test_slots_of_a_sequences_tokens_after_dropped_ones() -> None:
    table = BlockTable(BlockPool(4), SIZE)
    table.append(3 * SIZE)
    expected = table.slots(SIZE, 3 * SIZE)
    table.drop_before(SIZE + 1)
    assert table.first_token == SIZE and table.slots(SIZE, 3 * SIZE) == expected
    for first, end in ((SIZE - 1, SIZE + 1), (SIZE, 3 * SIZE + 1)):
        with pytest.raises(ValueError, match=f"2 blocks of {SIZE} tokens from token {SIZE} on"):
            table.slots(first, end)
