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
