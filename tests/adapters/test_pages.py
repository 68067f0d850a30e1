"""Adapters in the pool: counted, pinned, cached in one LRU order with prefixes."""

from __future__ import annotations

import pytest

from hf_paged.adapters.pages import AdapterPages
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

BYTES = 100


def make(num_blocks):
    group, evicted = PoolGroup(BlockPool(num_blocks)), []
    group.block_bytes = BYTES
    blocks = manager_of([group], 4)
    return AdapterPages(blocks, lambda: evicted.append), blocks, group, evicted


def use(pages, name, num_blocks):
    """Of a request that is admitted and ends."""
    assert pages.pin(name, num_blocks * BYTES, "a request")
    pages.record_admission(name)
    pages.unpin(name, "a request")


def test_an_adapter_takes_as_many_blocks_as_hold_its_bytes():
    pages, blocks, group, _ = make(8)
    assert pages.pin("a", 2 * BYTES + 1, "r1") and group.pool.num_used == 3
    assert pages.pin("a", 2 * BYTES + 1, "r2") and group.pool.num_used == 3
    blocks.check_integrity()
    group.pool.check_integrity([table.block_ids for table in blocks.tables(0)])
    assert not pages.pin("b", 6 * BYTES, "r3") and "b" not in pages
    pages.unpin("a", "r1")
    assert group.pool.num_used == 3
    pages.unpin("a", "r2")
    assert (group.pool.num_used, group.pool.num_cached) == (0, 3) and "a" in pages
    blocks.check_integrity()


def test_the_least_recently_used_goes_first_and_as_a_whole():
    pages, blocks, group, evicted = make(6)
    for name in ("a", "b", "a"):
        use(pages, name, 3)
    row = blocks.new()
    assert row.append(1) and evicted == ["b"]
    assert (group.pool.num_free, group.pool.num_cached) == (2, 3)
    assert "a" in pages and "b" not in pages and pages.num_evictions == 1
    blocks.check_integrity()
    assert row.append(11) and evicted == ["b"]
    assert row.append(1) and evicted == ["b", "a"]
    row.free()
    assert group.pool.num_free == 6


def test_prefixes_and_adapters_have_one_order():
    pages, blocks, _, evicted = make(4)
    use(pages, "a", 2)
    row, tokens = blocks.new(), list(range(8))
    assert row.append(8)
    row.register(tokens, 8, None)
    row.free()
    assert pages.pin("b", 2 * BYTES, "r") and evicted == ["a"], "it was let go before the prefix"
    assert len(blocks.index.find([*tokens, 0], None, 2)) == 2
    assert pages.pin("c", BYTES, "s") and len(blocks.index.find([*tokens, 0], None, 2)) < 2
    blocks.check_integrity()


def test_hits_are_admissions_with_a_place():
    pages, *_ = make(4)
    assert pages.pin("a", BYTES, "r")
    pages.unpin("a", "r")  # its request was not admitted
    for num_hits in (0, 1):
        use(pages, "a", 1)
        assert pages.num_hits == num_hits


def test_before_the_first_layer_is_made_one_adapter_has_a_place():
    """The bytes of a block are not known then."""
    pages, blocks, group, evicted = make(4)
    group.block_bytes = 0
    assert pages.pin("a", 2 * BYTES, "r") and not pages.pin("b", 2 * BYTES, "s")
    pages.record_admission("a")
    group.block_bytes = BYTES
    assert pages.pin("b", 2 * BYTES, "s") and group.pool.num_used == 2
    pages.unpin("a", "r")
    assert "a" in pages and group.pool.num_cached == 2
    assert pages.pin("c", 2 * BYTES, "t") and evicted == ["a"]
    blocks.check_integrity()


@pytest.mark.parametrize("size", [0, BYTES], ids=["before the first layer is made", "with blocks"])
@pytest.mark.parametrize("is_admitted", [False, True])
def test_an_adapter_counts_as_evicted_only_if_a_request_used_it(is_admitted, size):
    """Others have no weights in memory."""
    pages, blocks, group, evicted = make(4)
    group.block_bytes = size
    assert pages.pin("a", 2 * BYTES, "r")
    if is_admitted:
        pages.record_admission("a")
    pages.unpin("a", "r")
    assert pages.pin("b", 4 * BYTES, "s") and "a" not in pages
    assert evicted == ["a"] * is_admitted and pages.num_evictions == is_admitted
    blocks.check_integrity()


def test_a_recovery_evicts_only_what_a_request_used():
    pages, blocks, group, evicted = make(4)
    for name in ("a", "b"):
        assert pages.pin(name, 2 * BYTES, name)
    pages.record_admission("a")
    pages.recover()
    group.pool.recount(table.block_ids for table in blocks.tables(0))
    assert "a" not in pages and "b" not in pages and group.pool.num_free == 4
    assert evicted == ["a"] and pages.num_evictions == 1
