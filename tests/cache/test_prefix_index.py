"""The prefix index: windows, epochs, and what it tells of blocks that go. Any order of fills,
evictions and undone steps is played in `tests/support/engine_machine.py`."""

from __future__ import annotations

import pytest

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.prefix_index import PrefixIndex

SIZE = 2


def fill(
    index: PrefixIndex, pools: list[BlockPool], path: tuple, num_dropped: int, epoch: int
) -> None:
    """Fills a sequence of this path whose table in the second group begins after `num_dropped`
    blocks."""
    gone = (0, num_dropped)
    held = [
        [None] * dropped + pool.allocate(len(path) - dropped) for pool, dropped in zip(pools, gone)
    ]
    node = index.root(None)
    for tokens, *block_ids in zip(path, *held):
        node = index.add(node, tokens, block_ids, epoch)


def test_a_hole_in_a_window_is_not_stepped_over() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    index = PrefixIndex(pools, [None, 4], SIZE, [1, 1])
    path = ((5, 5), (5, 6), (6, 5))
    fill(index, pools, path, num_dropped=2, epoch=0)
    # the window group has the first block and the third
    fill(index, pools, path[:1], num_dropped=0, epoch=0)
    assert len(index.find([5, 5, 5, 6, 6, 5], None, 3)) == 1
    fill(index, pools, path, num_dropped=1, epoch=0)
    assert len(index.find([5, 5, 5, 6, 6, 5], None, 3)) == 3


def test_a_node_is_as_old_as_its_oldest_block() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    index = PrefixIndex(pools, [None, 3], SIZE, [1, 1])
    fill(index, pools, ((5, 5),), num_dropped=1, epoch=1)
    # indexes the block that the window group lacked
    fill(index, pools, ((5, 5),), num_dropped=0, epoch=2)
    assert len(index.find([5, 5], None, 1)) == 1
    index.remove_before(2)
    assert index.find([5, 5], None, 1) == []


def test_check_integrity_sees_a_name_that_no_node_has() -> None:
    pool = BlockPool(1)
    index = PrefixIndex([pool], [None], SIZE, [1])
    node = index.add(index.root(None), (5, 6), pool.allocate(1))
    index.check_integrity()
    node.block_ids[0] = None
    with pytest.raises(AssertionError, match="lacks its block in group 0"):
        index.check_integrity()


def test_blocks_registered_after_a_step_was_undone_are_computed() -> None:
    """A loaded prefix, for example."""
    pool = BlockPool(2)
    index = PrefixIndex([pool], [None], 2, [1])
    told: list[int] = []
    index.offload = lambda group, block_id, digest: told.append(block_id)
    index.begin_step()
    index.undo_step()
    (block_id,) = pool.allocate(1)
    index.add(index.root("a"), (1, 2), [block_id])
    index.undo_step()
    assert len(index.find([1, 2], "a", 1)) == 1
    pool.release([block_id])
    pool.evict(1)
    assert told == [block_id]


def test_blocks_of_a_step_that_was_undone_are_not_found() -> None:
    """Nothing has computed them; those of the step before stay."""
    pool = BlockPool(4)
    index = PrefixIndex([pool], [None], SIZE, [1])
    (kept,) = pool.allocate(1)
    index.begin_step()
    node = index.add(index.root(None), (5, 6), [kept])
    index.end_step()
    index.begin_step()
    (undone,) = pool.allocate(1)
    index.add(node, (7, 8), [undone])
    assert len(index.find([5, 6, 7, 8], None, 2)) == 2
    index.undo_step()
    (link,) = index.find([5, 6, 7, 8], None, 2)
    assert link.tokens == (5, 6)
    index.check_integrity()
