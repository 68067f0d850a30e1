"""Blocks of sequences over several layer groups, and the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.config import PagedConfig
from tests.support.pools import PoolGroup, manager_of

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
    assert sequence.append(len(tokens))
    sequence.register(tokens, len(tokens), namespace)
    return sequence


def hit(blocks: BlockManager, tokens: Sequence[int], namespace: str | None = None) -> int:
    """Tokens of a new sequence found in the prefix cache; frees the sequence."""
    sequence = blocks.new()
    found = sequence.match(tokens, namespace)
    assert all(table.num_tokens == found for table in sequence.tables)
    blocks.check_integrity()
    sequence.free()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_prefix_that_was_stored_is_found(seed: int) -> None:
    """In whole blocks, short of the last token; a namespace without blocks is forgotten, such as
    the salt of one request."""
    draw, texts = random.Random(seed), list[tuple[str, list[int]]]()
    sizes, window = draw.choice([(4, 4), (8, 2)]), draw.choice([None, 3, 6])
    specs = GroupSpec(), GroupSpec(window=window)
    blocks = manager_of([PoolGroup(BlockPool(900), *pair) for pair in zip(specs, sizes)], SIZE)
    for number in range(80):
        namespace, length = draw.choice("ab"), draw.randrange(1, 24)
        text = [draw.randrange(2) for _ in range(length)]
        same = [old for other, old in texts if other == namespace]
        ends = range(0, len(text), sizes[0])
        known = [n for n in ends for old in same if text[:n] == old[:n]]
        assert hit(blocks, text, namespace) == max(known, default=0)
        texts.append((namespace, text))
        stored(blocks, text, namespace).free()
        if number == 40:
            blocks.drop_cached()
            texts.clear()
    assert {*blocks.index._roots} == {"a", "b"}
    for group in blocks.groups:
        group.pool.evict(group.pool.num_cached)
    assert not blocks.index._roots


def test_equal_hashes_are_not_equal_tokens() -> None:
    blocks = manager(None)
    stored(blocks, [-1, 0, 0, 0, 0])
    assert hash((-1, 0, 0, 0)) == hash((-2, 0, 0, 0)) and hit(blocks, [-2, 0, 0, 0, 0]) == 0


def test_the_first_of_equal_blocks_is_named_and_the_tail_is_evicted_first() -> None:
    blocks = manager(None)
    first, second = stored(blocks, range(4)), stored(blocks, range(12))
    second.free()
    assert blocks.groups[0].pool.num_cached == 2  # blocks 1 and 2 of the second; its first is free
    assert hit(blocks, range(13)) == 12
    first.free()
    for left in (8, 4, 0):
        blocks.groups[0].pool.evict(1)
        assert hit(blocks, range(13)) == left


def test_a_hit_needs_what_the_window_shows() -> None:
    blocks = manager(None, 6)
    sequence = stored(blocks, range(8))
    for start in range(8, 24, 4):
        assert sequence.append(4)
        sequence.register(range(24), start + 4, None)
    sequence.trim()
    full, window = sequence.tables
    assert (len(full.block_ids), window.num_dropped) == (6, 4)
    sequence.free()
    assert hit(blocks, range(25)) == 24
    second = blocks.new()
    assert second.match(range(25), None) == 24
    assert (second.tables[1].num_dropped, len(second.tables[1].block_ids)) == (4, 2)
    second.free()
    pool = blocks.groups[1].pool
    pool.evict(pool.num_cached - 3)  # the least recently released are the oldest
    # after 20 tokens a query sees tokens 15 to 19, in blocks 3 and 4; after 16 it sees block 2
    assert [hit(blocks, range(n)) for n in (25, 21, 17)] == [24, 20, 0]


def test_only_registered_blocks_count_as_shared_after_a_window_has_dropped_some() -> None:
    blocks = manager(6)
    sequence = stored(blocks, range(8))
    for start in range(8, 24, 4):
        assert sequence.append(4)
        sequence.register(range(24), start + 4, None)
    assert sequence.append(2)
    (table,) = sequence.tables
    assert (table.num_dropped, len(table.block_ids)) == (4, 3)
    forks = [sequence.fork(), sequence.fork()]
    assert sequence.num_shared_blocks(num_rows=1) == 2, "not the tail"
    for each in (sequence, *forks):
        each.free()


def test_a_copy_whose_target_went_back_is_not_made_to_blocks_of_a_cache() -> None:
    """An interrupted step leaves no copies to the next one: a cache of the same memory may hold the
    blocks."""
    group = PoolGroup(BlockPool(3))
    group.copy_blocks = lambda copies: pytest.fail(f"{copies}")  # type: ignore[method-assign]
    blocks = manager_of([group], SIZE)
    first = blocks.new()
    first.append(6)
    second = first.fork()
    assert second.append(1)
    for each in (first, second):
        each.free()
    blocks.extend(0, [blocks.new().tables[0]], [(0, 12)])
    blocks.flush_copies()


def test_a_layer_made_anew_serves_nothing_from_before() -> None:
    memory = PagedMemory(PagedConfig(block_size=8))
    blocks, member = memory.manager([GroupSpec()]), memory.group(GroupSpec())
    stored(blocks, range(32)).free()
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
    second.free()
    assert [table.block_ids for table in tables] == [[]]
