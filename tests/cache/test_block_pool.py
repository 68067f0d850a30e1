"""The rules of pools and of block tables, one by one; any order of them is played in
`tests/support/engine_machine.py`."""

import pytest

from hf_paged.cache.block_pool import BlockPool, BlockTable, OutOfBlocksError
from hf_paged.cache.sequence_blocks import SequenceBlocks

SIZE = 8  # tokens in a block


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


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("acquire", "^block 0 is free and cannot be shared$"),
        ("release", "^block 0 has no holder to remove$"),
    ],
    ids=["acquire", "release"],
)
def test_a_free_block_cannot_be_shared_or_released(operation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(BlockPool(1), operation)([0])


def test_check_integrity_sees_a_leak_and_a_stale_table() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(1)
    pool.check_integrity([ids])
    for tables, count in (([], 0), ([ids, [1]], 1)):
        with pytest.raises(AssertionError, match=f"held by {count} tables"):
            pool.check_integrity(tables)


def test_kept_blocks_are_cached_then_evicted_least_recently_released_first() -> None:
    pool, evicted = BlockPool(4), []
    a, b, c, d = pool.allocate(4)
    for block_id in (a, b, c):
        pool.keep(block_id, evicted.append)
    pool.release([b, d, a])
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 2, 1, 3)
    with pytest.raises(
        OutOfBlocksError, match="needs 4 blocks, but only 1 of 4 are free and 2 cached"
    ):
        pool.allocate(4)
    assert not evicted
    assert pool.allocate(2) == [d, b] and evicted == [b]
    assert pool.is_kept(a) and not pool.is_kept(b)
    pool.check_integrity([[b, c, d]])


def test_only_used_blocks_can_be_kept_and_only_once() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="is unused"):
        pool.keep(0, lambda _: None)
    pool.keep(*pool.allocate(1), lambda _: None)
    with pytest.raises(ValueError, match="already kept"):
        pool.keep(0, lambda _: None)


def test_a_write_to_a_block_that_others_read_is_seen_ever_after() -> None:
    pool = BlockPool(3)
    shared, kept, own = pool.allocate(3)
    pool.acquire([shared])
    pool.keep(kept, lambda _: None)
    tables = [[shared, kept, own], [shared]]
    pool.check_writable([own])
    pool.check_integrity(tables)
    for block_id, found in ((shared, "refcount 2, kept: False"), (kept, "refcount 1, kept: True")):
        message = f"block {block_id} would be overwritten: {found}"
        with pytest.raises(AssertionError, match=message):
            pool.check_writable([own, block_id])
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity(tables)


def test_a_pool_shrinks_to_its_last_used_block() -> None:
    pool = BlockPool(4)
    first, second, third, last = pool.allocate(4)
    pool.keep(third, lambda block_id: None)
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


def test_blocks_that_were_freed_are_not_truncated_to() -> None:
    table = filled(BlockPool(8), 3 * SIZE)
    table.drop_before(SIZE + 1)
    table.truncate(SIZE)
    assert (table.block_ids, table.num_tokens, table.num_dropped) == ([], SIZE, 1)
    with pytest.raises(ValueError, match="have been freed"):
        table.truncate(SIZE - 1)


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
    first, second = filled(pool, 3 * SIZE), BlockTable(pool, SIZE)
    second.attach(first.block_ids[1:], num_dropped=1)
    assert (second.num_tokens, second.num_dropped, pool.num_shared) == (3 * SIZE, 1, 2)
    assert second.append(1) is None  # after full blocks nothing is copied
    with pytest.raises(ValueError, match="holds 25 tokens"):
        second.attach(first.block_ids, 0)


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
