"""Blocks of sequences over several layer groups, and the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool, OutOfBlocksError
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.config import PagedConfig
from tests.support.pools import PoolGroup, Pools, manager_of

SIZE = 4


def manager(*windows: int | None, num_blocks: int = 16, **options: object) -> BlockManager:
    """A manager with a separate pool per window."""
    return manager_of(
        [PoolGroup(BlockPool(num_blocks), GroupSpec(window=window)) for window in windows],
        SIZE,
        **options,
    )


def stored(
    blocks: BlockManager, tokens: Sequence[int], namespace: str | None = None
) -> SequenceBlocks:
    """A sequence that holds `tokens`, with full blocks in the prefix index."""
    sequence = blocks.new()
    assert blocks.append(sequence, len(tokens))
    blocks.register(sequence, tokens, len(tokens), namespace)
    return sequence


def hit(blocks: BlockManager, tokens: Sequence[int], namespace: str | None = None) -> int:
    """Tokens of a new sequence found in the prefix cache; frees the sequence."""
    sequence = blocks.new()
    found = blocks.match(sequence, tokens, namespace)
    assert all(table.num_tokens == found for table in sequence.tables)
    blocks.check_integrity()
    blocks.free(sequence)
    return found


def test_a_prefix_is_found_in_whole_blocks_short_of_the_last_token() -> None:
    blocks = manager(None)
    tokens = list(range(10))
    first = stored(blocks, tokens)
    assert [hit(blocks, tokens[:n]) for n in (1, 4, 5, 8, 9, 10)] == [0, 0, 4, 4, 8, 8]
    assert hit(blocks, [*tokens[:4], 99, *tokens[5:]]) == 4
    assert hit(blocks, [99, *tokens[1:]]) == 0
    assert hit(blocks, tokens, "adapter") == 0
    blocks.free(first)
    assert blocks.groups[0].pool.num_cached == 2
    assert hit(blocks, tokens) == 8


def test_a_namespace_without_blocks_is_forgotten() -> None:
    """One salt per request disables sharing: state kept for a salt must go with its blocks."""
    blocks = manager(None, 3, num_blocks=6)
    for number in range(20):
        blocks.free(stored(blocks, range(9), f"tenant {number}"))
        assert hit(blocks, range(9), f"tenant {number}") == 8
    assert len(blocks.index._roots) <= 3
    for group in blocks.groups:
        group.pool.evict(6)
    assert not blocks.index._roots
    blocks.check_integrity()


def test_equal_hashes_are_not_equal_tokens() -> None:
    blocks = manager(None)
    stored(blocks, [-1, 0, 0, 0, 0])
    assert hash((-1, 0, 0, 0)) == hash((-2, 0, 0, 0))
    assert hit(blocks, [-2, 0, 0, 0, 0]) == 0


def test_shared_blocks_are_taken_once() -> None:
    blocks = manager(None)
    tokens = list(range(9))
    first, second = stored(blocks, tokens), blocks.new()
    assert blocks.match(second, tokens, None) == 8 and blocks.append(second, 1)
    assert second.tables[0].block_ids[:2] == first.tables[0].block_ids[:2]
    assert blocks.groups[0].pool.num_used == 4


def test_only_the_first_of_equal_blocks_is_named_and_the_chain_goes_on() -> None:
    blocks = manager(None)
    first, second = stored(blocks, range(4)), stored(blocks, range(12))
    blocks.free(second)
    assert blocks.groups[0].pool.num_cached == 2  # blocks 1 and 2 of the second; its first is free
    assert hit(blocks, range(13)) == 12
    blocks.free(first)


def test_what_was_evicted_below_a_running_sequence_is_named_again() -> None:
    blocks = manager(None, num_blocks=4)
    first = stored(blocks, range(4))
    # its first block is unnamed, its second is below the named one
    second = stored(blocks, range(8))
    blocks.free(first)
    taken = blocks.groups[0].pool.allocate(2)  # evicts the first's block, and so forgets both names
    assert hit(blocks, range(9)) == 0
    blocks.groups[0].pool.release(taken)
    assert blocks.append(second, 4)
    blocks.register(second, range(12), 12, None)
    assert hit(blocks, range(13)) == 12
    blocks.check_integrity()


def test_the_tail_is_evicted_before_the_head() -> None:
    blocks = manager(None, num_blocks=4)
    blocks.free(stored(blocks, range(16)))
    for left in (12, 8, 4, 0):
        blocks.groups[0].pool.evict(1)
        assert hit(blocks, range(17)) == left


def test_a_hit_needs_what_the_window_shows() -> None:
    blocks = manager(None, 6)
    sequence = stored(blocks, range(8))
    for start in range(8, 24, 4):
        assert blocks.append(sequence, 4)
        blocks.register(sequence, range(24), start + 4, None)
    blocks.trim(sequence)
    full, window = sequence.tables
    assert (len(full.block_ids), window.num_dropped) == (6, 4)
    blocks.free(sequence)
    assert hit(blocks, range(25)) == 24
    second = blocks.new()
    assert blocks.match(second, range(25), None) == 24
    assert (second.tables[1].num_dropped, len(second.tables[1].block_ids)) == (4, 2)
    blocks.free(second)
    pool = blocks.groups[1].pool
    pool.evict(pool.num_cached - 3)  # the least recently released are the oldest
    # after 20 tokens a query sees tokens 15 to 19, in blocks 3 and 4; after 16 it sees block 2
    assert [hit(blocks, range(n)) for n in (25, 21, 17)] == [24, 20, 0]


def test_window_blocks_go_back_before_new_ones_are_taken() -> None:
    blocks = manager(5, num_blocks=2)
    sequence = blocks.new()
    for _ in range(30):
        assert blocks.append(sequence, 1)
    assert sequence.tables[0].num_tokens == 30 and blocks.groups[0].pool.num_used == 2


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_one_group_leaves_no_block_of_another(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = manager(None, 8)
    sequence = blocks.new()

    def ensure_free(num_blocks: int) -> None:
        raise error("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(blocks.groups[1], "ensure_free", ensure_free)
        for call in (lambda: blocks.append(sequence, 5), lambda: blocks.can_take([2, 2])):
            with pytest.raises(error, match="on purpose"):
                call()
            assert [group.pool.num_used for group in blocks.groups] == [0, 0]
    assert blocks.append(sequence, 5)


def test_append_that_one_group_cannot_serve_changes_nothing() -> None:
    pools = [BlockPool(4), BlockPool(1)]
    blocks = manager_of([PoolGroup(pool) for pool in pools], SIZE)
    sequence = blocks.new()
    assert not blocks.append(sequence, 5)
    assert [pool.num_free for pool in pools] == [4, 1] and sequence.tables[0].num_tokens == 0
    assert (
        not blocks.can_take([1, 2])
        and blocks.can_take([4, 1])
        and not blocks.can_take([1, 1], reserve=4)
    )


def test_copies_of_shared_tails_are_queued_and_flushed_once() -> None:
    made: list[tuple[int, int]] = []
    group = PoolGroup(BlockPool(8))
    group.copy_blocks = made.extend  # type: ignore[method-assign]
    blocks = manager_of([group], SIZE)
    first = blocks.new()
    blocks.append(first, 6)
    second = blocks.fork(first)
    assert first.capacity == second.capacity == 6
    assert [table.num_needed(1) for table in second.tables] == [1]
    tail = first.tables[0].block_ids[1]
    assert blocks.append(second, 1) and blocks.append(first, 1)
    assert (first.capacity, second.capacity) == (8, 8)
    blocks.flush_copies()
    assert made == [(tail, second.tables[0].block_ids[1])]
    blocks.flush_copies()
    assert len(made) == 1


def test_a_copy_whose_target_went_back_is_not_made() -> None:
    made: list[tuple[int, int]] = []
    group = PoolGroup(BlockPool(3))
    group.copy_blocks = made.extend  # type: ignore[method-assign]
    blocks = manager_of([group], SIZE)
    first = blocks.new()
    blocks.append(first, 6)
    second = blocks.fork(first)
    assert blocks.append(second, 1)
    blocks.free(second)
    third = blocks.new()
    assert blocks.append(third, 1)  # gets the former target block of the copy
    blocks.flush_copies()
    assert made == []


def test_a_copy_whose_target_went_back_is_not_made_to_blocks_of_a_cache() -> None:
    """An interrupted step leaves no copies to the next one: a cache of the same memory may hold the
    blocks."""
    made: list[tuple[int, int]] = []
    group = PoolGroup(BlockPool(3))
    group.copy_blocks = made.extend  # type: ignore[method-assign]
    blocks = manager_of([group], SIZE)
    first = blocks.new()
    blocks.append(first, 6)
    second = blocks.fork(first)
    assert blocks.append(second, 1)
    blocks.free(first)
    blocks.free(second)
    blocks.extend(0, [blocks.new().tables[0]], [(0, 12)])
    blocks.flush_copies()
    assert made == []


def test_undo_step_forgets_what_was_never_computed() -> None:
    blocks = manager(None)
    blocks.index.begin_step()
    first = stored(blocks, range(4))
    blocks.index.begin_step()
    blocks.append(first, 8)
    blocks.register(first, range(12), 12, None)
    assert hit(blocks, range(13)) == 12
    blocks.index.undo_step()
    assert hit(blocks, range(13)) == 4
    blocks.truncate(first, 4)
    blocks.append(first, 4)
    blocks.register(first, range(8), 8, None)
    assert hit(blocks, range(13)) == 8


def test_nothing_from_before_drop_cached_is_served() -> None:
    blocks = manager(None)
    old = stored(blocks, range(6), "a")
    blocks.free(stored(blocks, range(6), "b"))
    blocks.drop_cached()
    assert hit(blocks, range(6), "a") == hit(blocks, range(6), "b") == 0
    blocks.append(old, 6)
    blocks.register(old, range(12), 12, "a")  # its first tokens are from before
    assert hit(blocks, range(13), "a") == 0
    blocks.free(old)
    blocks.free(stored(blocks, range(12), "a"))
    assert hit(blocks, range(13), "a") == 12


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = manager(None, prefix_caching=False)
    blocks.free(stored(blocks, range(12)))
    assert hit(blocks, range(12)) == 0 and blocks.groups[0].pool.num_free == 16


def paged(num_groups: int, **options: object) -> tuple[PagedMemory, BlockManager]:
    """A manager on a `PagedMemory`, as the engine makes it."""
    memory = PagedMemory(PagedConfig(block_size=8, **options))
    return memory, memory.manager([GroupSpec(), GroupSpec("second")][:num_groups])


def test_the_budget_holds_for_used_and_cached_blocks_of_all_groups() -> None:
    memory, blocks = paged(2, num_blocks=12)
    blocks.free(stored(blocks, range(32)))
    assert (memory.num_used, memory.num_cached, blocks.num_free) == (0, 8, 12)
    second = stored(blocks, range(100, 124))
    # two nodes went, with their blocks in both groups
    assert (memory.num_used, memory.num_cached) == (6, 4)
    memory.check_integrity()
    assert not blocks.append(second, 32) and memory.num_cached == 4
    assert blocks.append(second, 24) and memory.num_cached == 0
    assert memory.stats().used_blocks == 12
    with pytest.raises(OutOfBlocksError, match="needs 1 blocks of 8 tokens, 0 of 12 are free"):
        memory.group(GroupSpec()).ensure_free(1)
    memory.check_integrity()


def test_without_a_budget_cached_blocks_go_before_the_pool_grows() -> None:
    memory, blocks = paged(1)
    pool = memory.group(GroupSpec()).pool
    blocks.free(stored(blocks, range(8 * 16)))
    size = pool.num_blocks
    blocks.free(stored(blocks, range(1000, 1000 + 8 * 16)))
    assert pool.num_blocks == size and memory.stats().cached_blocks == size


def test_with_a_budget_the_pool_grows_before_cached_blocks_go() -> None:
    memory, blocks = paged(1, num_blocks=32)
    blocks.free(stored(blocks, range(8 * 16)))
    second = stored(blocks, range(1000, 1000 + 8 * 16))
    assert (memory.num_used, memory.num_cached) == (16, 16)
    twin = blocks.fork(second)
    assert memory.stats().shared_blocks == 16
    blocks.free(twin)


def test_a_group_gives_its_unused_memory_to_another_and_grows_again() -> None:
    memory, _ = paged(2, memory_fraction=0.5)
    first, second = GroupSpec(), GroupSpec("second")
    states = torch.zeros(1, 2, 4, 16)
    for spec in (first, second):
        memory.group(spec).layer(0, states, states, num_layers=1, num_new_tables=0)
    memory._limit_bytes = 40 * memory.group(first).block_bytes
    memory.group(first).ensure_free(30)
    blocks = memory.manager([second, first])
    # the second's blocks fit only without the free ones of the first
    assert blocks.append(blocks.new(), 8 * 18)
    assert [group.pool.num_used for group in blocks.groups] == [18, 18]
    memory.check_integrity()


def test_a_layer_made_anew_serves_nothing_from_before() -> None:
    memory, blocks = paged(1)
    member = memory.group(GroupSpec())
    blocks.free(stored(blocks, range(32)))

    states = torch.zeros(1, 2, 4, 16)
    member.layer(0, states, states, num_layers=1, num_new_tables=0)
    assert member.pool.num_cached == 0
    blocks.check_integrity()


def test_a_sequence_may_be_freed_while_tables_are_looked_at() -> None:
    """Like the garbage collector with the rows of a cache in a cycle."""
    blocks = manager(None)
    first, second = stored(blocks, range(3)), stored(blocks, range(5))
    tables = blocks.tables(0)
    assert next(tables) is first.tables[0]
    blocks.free(second)
    assert [table.block_ids for table in tables] == [[]]


def test_groups_with_blocks_of_other_sizes_share_prefixes_in_steps_of_the_largest() -> None:
    full, window = (
        PoolGroup(BlockPool(16), GroupSpec(), 8),
        PoolGroup(BlockPool(16), GroupSpec(window=5), 2),
    )
    blocks = manager_of([full, window], SIZE)
    sequence = stored(blocks, range(21))
    assert [len(table.block_ids) for table in sequence.tables] == [3, 11]
    assert [hit(blocks, range(n)) for n in (8, 9, 16, 17, 21)] == [0, 8, 8, 16, 16]
    second = blocks.new()
    assert blocks.match(second, range(21), None) == 16
    assert [(table.num_dropped, len(table.block_ids)) for table in second.tables] == [
        (0, 2),
        (6, 2),
    ]
    assert second.tables[1].block_ids == sequence.tables[1].block_ids[6:8], "tokens 12 to 15"
    assert blocks.append(second, 1) and second.capacity == 18, (
        "where the next block of a group is needed"
    )
    assert blocks.append(second, 2)
    blocks.truncate(second, 16)
    for each in (sequence, second):
        blocks.free(each)
    assert (full.pool.num_cached, window.pool.num_cached) == (2, 8), (
        "what ends before a block of all groups is unnamed"
    )
    window.pool.evict(7)  # the last released, of the second sequence, stays: tokens 12 and 13
    assert [hit(blocks, range(n)) for n in (9, 17)] == [0, 0]
    full.pool.evict(1)
    blocks.check_integrity()


def test_a_manager_tells_of_sequences_that_end() -> None:
    groups = [PoolGroup(BlockPool(16))]
    pools = Pools(groups, SIZE)
    blocks = manager_of(groups, SIZE, pools=pools)
    for length in (3, 10):
        blocks.end(stored(blocks, range(length)))
    blocks.free(stored(blocks, range(6)))
    blocks.end(blocks.new())
    assert list(pools.sizes.lengths) == [3, 10] and blocks.groups[0].pool.num_used == 0
