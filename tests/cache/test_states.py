"""State slots beside blocks: snapshots in the prefix cache, host copies, rows that have
advanced."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.group_memory import KEPT_STATES
from hf_paged.cache.groups import GroupSpec, StateSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.cache.states import StateStorage
from hf_paged.cache.swap import BlockSwapper
from hf_paged.config import PagedConfig
from tests.support.pools import PoolGroup, manager_of

SIZE = 4
TOKENS = list(range(40))


def manager(*, num_blocks: int = 40, num_slots: int = 16, is_empty: bool = False) -> BlockManager:
    groups = [
        PoolGroup(BlockPool(num_blocks)),
        PoolGroup(BlockPool(num_blocks), GroupSpec(window=6)),
        PoolGroup(BlockPool(num_slots), StateSpec(is_empty=is_empty)),
    ]
    return manager_of(groups, SIZE)


def grown(blocks: BlockManager, tokens: Sequence[int], *stops: int) -> SequenceBlocks:
    """A sequence that holds `tokens`, computed up to each stop and then to the end."""
    sequence = blocks.new()
    sequence.stops = stops
    for first, end in zip((0, *stops), (*stops, len(tokens))):
        blocks.register(sequence, tokens, first, None)
        assert blocks.append(sequence, end - first)
        blocks.flush_copies()
        blocks.check_integrity()
    return sequence


def hit(blocks: BlockManager, tokens: Sequence[int]) -> tuple[int, int]:
    """Prefix hit of a new sequence in tokens, and its hit if there were a snapshot after each
    block."""
    sequence = blocks.new()
    found, known = blocks.match(sequence, tokens, None), blocks.num_matching(tokens, None)
    assert all(table.num_tokens == found for table in sequence.tables)
    blocks.check_integrity()
    blocks.free(sequence)
    return found, known


def test_a_sequence_begins_where_a_snapshot_is() -> None:
    blocks = manager()
    blocks.free(grown(blocks, TOKENS[:30], 8, 20))
    blocks.check_integrity()
    assert blocks.groups[2].pool.num_cached == 2
    assert hit(blocks, TOKENS) == (20, 20)  # the following blocks were not indexed
    assert hit(blocks, TOKENS[:20]) == (8, 16)  # short of the last token
    assert hit(blocks, [*TOKENS[:14], 99, *TOKENS[15:]]) == (8, 12)
    assert hit(blocks, TOKENS[:8]) == (0, 4)


def test_a_sequence_computes_on_a_slot_of_its_own() -> None:
    blocks, copies = manager(), []
    blocks.groups[2].copy_blocks = copies.extend  # type: ignore[method-assign]
    first = grown(blocks, TOKENS[:30], 20)
    (snapshot, own), *_ = copies
    assert first.tables[2].block_ids == [own] and blocks.groups[2].pool.is_kept(snapshot)
    second, third = blocks.new(), blocks.new()
    for sequence in (second, third):
        assert blocks.match(sequence, TOKENS, None) == 20 and sequence.tables[2].block_ids == [
            snapshot
        ]
        assert blocks.append(sequence, 20)
    blocks.flush_copies()
    slots = {sequence.tables[2].block_ids[0] for sequence in (first, second, third)}
    assert len(slots) == 3 and snapshot not in slots
    assert copies[1:] == [
        (snapshot, sequence.tables[2].block_ids[0]) for sequence in (second, third)
    ]
    for sequence in (first, second, third):
        blocks.free(sequence)
    blocks.check_integrity()


def test_without_a_place_for_a_slot_of_its_own_the_snapshot_goes() -> None:
    """A prompt that fits without snapshots must fit with them."""
    blocks = manager(num_slots=1)
    first = grown(blocks, TOKENS[:30], 20)
    assert hit(blocks, TOKENS) == (0, 20)
    blocks.free(first)
    cached = manager(num_slots=2)
    cached.free(grown(cached, TOKENS[:30], 20))
    other = grown(cached, TOKENS[::-1])
    second = cached.new()
    assert (
        cached.match(second, TOKENS, None) == 20 and cached.num_spanned(20, 40, 20, second)[2] == 0
    )
    assert cached.append(second, 20), "the snapshot was meant to become the sequence's own"
    cached.check_integrity()
    assert (
        not cached.groups[2].pool.kept_ids
        and other.tables[2].block_ids != second.tables[2].block_ids
    )


def test_a_snapshot_goes_with_the_blocks_in_front() -> None:
    blocks = manager()
    blocks.free(grown(blocks, TOKENS[:30], 20))
    blocks.groups[0].pool.evict(1)  # the least recently used one is the last
    blocks.groups[0].pool.evict(40)
    blocks.check_integrity()
    assert not blocks.groups[2].pool.kept_ids and hit(blocks, TOKENS) == (0, 0)


def test_the_snapshot_may_go_while_blocks_are_taken() -> None:
    """The snapshot at the sequence's position, since the blocks before it belong to another
    sequence."""
    blocks = manager(num_blocks=7)
    blocks.free(grown(blocks, TOKENS[:21], 20))
    second = blocks.new()
    second.stops = (20,)
    assert blocks.append(second, 20)  # also computes cached tokens, and evicts some
    blocks.register(second, TOKENS, 20, None)
    blocks.check_integrity()
    assert blocks.append(second, 8)
    blocks.check_integrity()
    assert len(second.tables[2].block_ids) == 1


def test_no_state_is_named_in_a_step_that_is_undone() -> None:
    blocks = manager()
    sequence = grown(blocks, TOKENS[:20])
    sequence.stops = (20,)
    blocks.index.begin_step()
    blocks.register(sequence, TOKENS, 20, None)
    assert blocks.groups[2].pool.kept_ids
    blocks.index.undo_step()
    blocks.check_integrity()
    assert not blocks.groups[2].pool.kept_ids


def test_without_states_a_sequence_begins_behind_any_block() -> None:
    blocks = manager(is_empty=True)
    blocks.free(grown(blocks, TOKENS[:30], 20, 28))
    assert hit(blocks, TOKENS) == (28, 28) and hit(blocks, TOKENS[:10]) == (8, 8)
    assert blocks.groups[2].pool.num_used == 0


def test_with_states_alone_only_snapshots_are_known() -> None:
    """Prefixes without a snapshot have no block to keep their place in the index, or to give it
    up."""
    blocks = manager_of([PoolGroup(BlockPool(9), StateSpec())], SIZE)
    blocks.free(grown(blocks, TOKENS[:30]))
    assert hit(blocks, TOKENS) == (0, 0) and not blocks.index._roots
    blocks.free(grown(blocks, TOKENS[:30], 20))
    assert hit(blocks, TOKENS) == (20, 20) and hit(blocks, TOKENS[:15]) == (0, 12)
    blocks.groups[0].pool.evict(9)
    blocks.check_integrity()
    assert not blocks.index._roots


class Holder:
    """Rows with a state of two layers: `value` plus the row's number."""

    def __init__(self, num_rows: int, value: float) -> None:
        self.state_layers: list[Any] = [
            SimpleNamespace(
                is_conv_states_initialized={0: True},
                is_recurrent_states_initialized={0: False},
                has_previous_state={0: True},
                conv_kernel_size={0: 3},
                dtype=torch.float32,
                device=torch.device("cpu"),
                conv_states={
                    0: torch.arange(num_rows)[:, None, None]
                    + torch.full((num_rows, 2, 3), value + layer)
                },
                recurrent_states={0: None},
            )
            for layer in (0.0, 0.5)
        ]


def state(storage: StateStorage, slot: int) -> list[float]:
    holder, row = storage.find(slot)
    return [float(layer.conv_states[0][row].mean()) for layer in holder.state_layers]


@pytest.mark.slow
def test_kept_states_are_copies_and_live_without_their_step() -> None:
    pool = BlockPool(3)
    storage, holder = StateStorage(pool), Holder(3, 10)
    slots, lost = pool.allocate(3), []
    storage.put(slots, holder, 48)
    pool.keep(slots[1], lost.append)
    storage.copy_snapshots()
    for layer in holder.state_layers:
        layer.conv_states[0] += 100
    assert state(storage, slots[1]) == [11.0, 11.5] and state(storage, slots[0]) == [110.0, 110.5]
    pool.release(slots)
    assert set().union(*storage.holders().values()) == {slots[1]}
    del holder
    gc.collect()
    storage.copy_snapshots()
    assert state(storage, slots[1]) == [11.0, 11.5] and not lost
    pool.evict(1)
    assert storage.holders() == {} and lost == [slots[1]]


@pytest.mark.slow
def test_a_kept_state_whose_step_is_gone_loses_its_name() -> None:
    pool = BlockPool(1)
    storage, lost = StateStorage(pool), []
    storage.put(pool.allocate(1), Holder(1, 1), 48)
    pool.keep(0, lost.append)
    gc.collect()
    storage.copy_snapshots()
    assert lost == [0] and not pool.kept_ids


@pytest.mark.slow
def test_states_are_swapped_with_the_blocks() -> None:
    memory = PagedMemory(PagedConfig(block_size=8))
    blocks = memory.manager([GroupSpec(), StateSpec()])
    group = memory.group(StateSpec())
    sequence = SimpleNamespace(blocks=blocks.new(), swapped=None, is_finished=False)
    assert blocks.append(sequence.blocks, 20)
    twin = SimpleNamespace(blocks=blocks.fork(sequence.blocks), swapped=None, is_finished=False)
    request = SimpleNamespace(sequences=[sequence, twin], open_sequences=[sequence, twin])
    swapper = BlockSwapper(blocks)
    assert not swapper.swap_out(request), "a state that was never computed cannot be swapped"
    holder = Holder(3, 10)
    group.storage.put([9, 8, sequence.blocks.tables[1].block_ids[0]], holder, 48)
    assert swapper.num_held_bytes(request) == 48
    assert swapper.swap_out(request) and group.pool.num_used == 0
    del holder
    gc.collect()
    assert not group.storage.holders()
    taken = group.take(3)  # others have its slot meanwhile
    swapper.swap_in(request)
    slot, *_ = sequence.blocks.tables[1].block_ids
    assert slot not in taken and twin.blocks.tables[1].block_ids == [slot]
    assert state(group.storage, slot) == [12.0, 12.5]
    group.pool.release(taken)
    memory.check_integrity()


def test_a_few_snapshots_are_kept_without_a_budget() -> None:
    memory = PagedMemory(PagedConfig(block_size=8))
    blocks = memory.manager([GroupSpec(), StateSpec()])
    keys, group = memory.group(GroupSpec()), memory.group(StateSpec())
    keys.pool.release(keys.take(4 * KEPT_STATES))  # memory for blocks that are kept
    for number in range(KEPT_STATES + 4):
        sequence, tokens = blocks.new(), list(range(100 * number, 100 * number + 10))
        sequence.stops = (8,)
        assert blocks.append(sequence, 8)
        blocks.register(sequence, tokens, 8, None)
        assert blocks.append(sequence, 2)
        blocks.free(sequence)
        memory.check_integrity()
    assert group.pool.num_cached == KEPT_STATES and group.pool.num_blocks == KEPT_STATES + 1
