"""State slots beside blocks, whose snapshots are in the prefix cache; engines with them are in
`tests/rectangles/test_state_snapshots.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool, OutOfBlocksError
from hf_paged.cache.group_memory import KEPT_STATES
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.config import PagedConfig
from hf_paged.rectangles.preemption import num_matching
from hf_paged.rectangles.states import StateSpec
from tests.support.pools import PoolGroup, manager_of

SIZE = 4
TOKENS = list(range(40))


def grown(blocks: BlockManager, tokens: Sequence[int], *stops: int) -> SequenceBlocks:
    """A sequence that holds `tokens`, computed up to each stop and then to the end."""
    sequence = blocks.new()
    sequence.stops = stops
    for first, end in zip((0, *stops), (*stops, len(tokens))):
        sequence.register(tokens, first, None)
        assert sequence.append(end - first)
        blocks.flush_copies()
        blocks.check_integrity()
    return sequence


def hit(blocks: BlockManager, tokens: Sequence[int]) -> tuple[int, int]:
    """Prefix hit of a new sequence in tokens, and its hit if there were a snapshot after each
    block."""
    sequence = blocks.new()
    found = sequence.match(tokens, None), num_matching(blocks, tokens, None)
    sequence.free()
    return found


def test_with_states_alone_only_snapshots_are_known() -> None:
    """Prefixes without a snapshot have no block to keep their place in the index, or to give it
    up."""
    blocks = manager_of([PoolGroup(BlockPool(9), StateSpec())], SIZE)
    grown(blocks, TOKENS[:30]).free()
    assert hit(blocks, TOKENS) == (0, 0) and not blocks.index._roots
    grown(blocks, TOKENS[:30], 20).free()
    assert hit(blocks, TOKENS) == (20, 20) and hit(blocks, TOKENS[:15]) == (0, 12)
    blocks.groups[0].pool.evict(9)
    blocks.check_integrity()
    assert not blocks.index._roots


def test_a_limit_on_slots_is_not_told_in_tokens() -> None:
    memory = PagedMemory(PagedConfig(num_blocks=2))
    with pytest.raises(OutOfBlocksError, match="needs 3 slots for states, but only 2 of 2"):
        memory.group(StateSpec()).take(3)


def test_a_few_snapshots_are_kept_without_a_budget() -> None:
    memory = PagedMemory(PagedConfig(block_size=8))
    blocks = memory.manager([GroupSpec(), StateSpec()])
    keys, group = memory.group(GroupSpec()), memory.group(StateSpec())
    keys.pool.release(keys.take(4 * KEPT_STATES))  # memory for blocks that are kept
    for number in range(KEPT_STATES + 4):
        grown(blocks, range(100 * number, 100 * number + 10), 8).free()
        memory.check_integrity()
    assert group.pool.num_cached == KEPT_STATES and group.pool.num_blocks == KEPT_STATES + 1


def test_slots_without_states_are_not_counted_as_shared_blocks() -> None:
    memory = PagedMemory(PagedConfig(block_size=8))
    blocks = memory.manager([GroupSpec(), StateSpec(is_empty=True)])
    sequence = grown(blocks, range(5))
    fork = sequence.fork()
    stats = memory.stats()
    assert stats.used_blocks == stats.shared_blocks == 1
    fork.free()
    sequence.free()
