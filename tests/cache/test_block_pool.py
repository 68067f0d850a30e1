"""The pool's rules, one by one."""

import pytest

from hf_paged.cache.block_pool import BlockPool, OutOfBlocksError


def test_allocates_each_block_once_and_counts() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2) + pool.allocate(1)) == [0, 1, 2]
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (3, 0, 3)


def test_too_many_raises_and_takes_none() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="needs 3 blocks, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_is_free_only_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(1)
    ids = pool.allocate(1)
    pool.acquire(ids)
    pool.release(ids)
    assert pool.refcount(ids[0]) == 1 and pool.num_free == 0
    pool.release(ids)
    assert pool.num_free == 1


def test_least_recently_freed_comes_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.release([b])
    pool.release([c, a])
    assert pool.allocate(3) == [b, c, a]


def test_grow_keeps_what_is_used() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.grow(2)
    assert pool.allocate(2) == [1, 2]


@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_a_free_block_cannot_be_shared_or_released(operation: str) -> None:
    with pytest.raises(ValueError, match="block 0 is"):
        getattr(BlockPool(1), operation)([0])


def test_check_integrity_sees_a_leak_and_a_stale_table() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(1)
    pool.check_integrity([ids])
    with pytest.raises(AssertionError, match="held by 0 tables"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="held by 1 tables"):
        pool.check_integrity([ids, [1]])


def test_kept_blocks_are_cached_then_evicted_least_recently_released_first() -> None:
    pool, evicted = BlockPool(4), []
    a, b, c, d = pool.allocate(4)
    for block_id in (a, b, c):
        pool.keep(block_id, evicted.append)
    pool.release([b, d, a])
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 2, 1, 3)
    assert pool.allocate(2) == [d, b] and evicted == [b]
    assert pool.is_kept(a) and not pool.is_kept(b)
    pool.check_integrity([[b, c, d]])


def test_a_cached_block_can_be_revived_and_dropped() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(2)
    for block_id in ids:
        pool.keep(block_id, lambda _: pytest.fail("evicted"))
    pool.release(ids)
    pool.acquire([ids[0]])
    assert (pool.num_used, pool.num_cached) == (1, 1)
    pool.drop(ids[1])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.drop(ids[0])  # still used: only its content is no longer wanted
    pool.release([ids[0]])
    assert pool.num_free == 2
    pool.check_integrity([])


def test_an_eviction_may_drop_further_blocks() -> None:
    pool = BlockPool(3)
    a, b, _ = pool.allocate(3)
    pool.keep(a, lambda _: pool.drop(b))
    pool.keep(b, lambda _: None)
    pool.release([a, b])
    assert sorted(pool.allocate(2)) == [a, b] and pool.num_cached == 0


def test_too_many_evicts_none() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(2)
    pool.keep(ids[0], lambda _: pytest.fail("evicted"))
    pool.release([ids[0]])
    with pytest.raises(OutOfBlocksError, match="needs 2 blocks, 0 of 2 are free and 1 cached"):
        pool.allocate(2)
    assert pool.num_cached == 1


def test_only_used_blocks_can_be_kept_and_only_once() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="is unused"):
        pool.keep(0, lambda _: None)
    (block_id,) = pool.allocate(1)
    pool.keep(block_id, lambda _: None)
    with pytest.raises(ValueError, match="already kept"):
        pool.keep(block_id, lambda _: None)


def test_counts_shared_blocks() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(2)
    pool.acquire([ids[0], ids[0]])
    assert pool.num_shared == 1
    pool.release([ids[0]])
    assert pool.num_shared == 1
    pool.release([ids[0]])
    assert pool.num_shared == 0


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
    first, second, third, _ = pool.allocate(4)
    pool.keep(third, lambda block_id: None)
    pool.release([first, third, 3])
    pool.shrink()
    assert (pool.num_blocks, pool.num_free, pool.num_cached) == (2, 1, 0)
    assert pool.holder_counts() == [0, 1]
    pool.check_integrity([[second]])
    pool.release([second])
    pool.shrink()
    assert pool.num_blocks == 0
    pool.grow(2)
    assert pool.allocate(2) == [0, 1]


def test_the_most_blocks_in_use_at_once_are_counted_until_the_pool_is_shrunk() -> None:
    pool = BlockPool(12)
    first = pool.allocate(3)
    pool.release(first[1:])
    second = pool.allocate(4)
    assert pool.peak_used == 5
    pool.release([first[0], *second])
    assert pool.peak_used == 5
    pool.shrink()
    assert pool.peak_used == 0
