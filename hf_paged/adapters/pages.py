"""Accounts for adapter weights as blocks of the pool, as in S-LoRA's unified paging (arXiv
2311.03285, section 5.1), but only reserves a number of blocks: `files.py` stores the weights
elsewhere. Handles no tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..cache.block_manager import BlockManager
from ..cache.block_pool import BlockPool
from ..cache.sequence_blocks import NO_BLOCKS, SequenceBlocks


@dataclass(eq=False)
class _ResidentAdapter:
    num_bytes: int  # of its weights
    # `None` until they are allocated: their number is unknown before the pool's first layer exists
    block_ids: list[int] | None = None
    sequence: SequenceBlocks = NO_BLOCKS  # its table holds `block_ids` while there are `holders`
    holders: set[Any] = field(default_factory=set)  # requests
    was_admitted: bool = False  # whether a request with it was admitted

    def hold(self, block_ids: list[int], block_manager: BlockManager, group_index: int) -> None:
        """Puts the adapter's blocks, which are already acquired, into a block table of the group,
        so that a recount of the pool finds them."""
        self.block_ids = block_ids
        self.sequence = block_manager.new()
        table = self.sequence.tables[group_index]
        table.append(len(block_ids) * table.block_size, block_ids)

    def admit(self) -> bool:
        """Records that a request with this adapter is admitted. Returns whether an earlier request
        was."""
        was_admitted, self.was_admitted = self.was_admitted, True
        return was_admitted

    def release(self) -> None:
        """Releases the adapter's blocks, which stay cached."""
        self.sequence.free()
        self.sequence = NO_BLOCKS


class AdapterPages:
    """Reserves for each adapter, in the first pool of keys and values, as many blocks as its
    weights would fill. The blocks of an adapter with running requests are in use. The blocks of
    other adapters are cached, in one LRU order with cached prefixes. When the pool evicts one block
    of an adapter, the adapter is dropped and its other blocks are freed. Callers hold the memory's
    lock.

    Without a pool of keys and values (Mamba), adapters have no blocks, and are evicted when their
    last holder unpins them."""

    def __init__(
        self,
        block_manager: BlockManager,
        weak_on_evict: Callable[[], Callable[[Any], None] | None],
    ) -> None:
        """`weak_on_evict`: a weak reference to a function, which is called with each adapter that
        counts as evicted (`_drop`)."""
        self._block_manager = block_manager
        self._group_index: int | None = None
        for index, group in enumerate(block_manager.groups):
            if group.spec.is_counted and not group.holds_states:
                self._group_index = index
                break
        self._adapters: dict[Hashable, _ResidentAdapter] = {}
        self._adapter_by_block: dict[int, Hashable] = {}  # by block id
        self._weak_on_evict = weak_on_evict
        # weak, since the pool keeps this function: in a cycle, the pool would be freed by the
        # garbage collector and not with its last user
        weak_self = weakref.ref(self)
        self._on_evict_block = lambda block_id: (
            None if (pages := weak_self()) is None else pages._evict_adapter_of(block_id)
        )
        # requests whose first admission found an adapter that an earlier admission had left
        # resident
        self.num_hits = 0
        self.num_evictions = 0
        block_manager.other_owners.add(self)

    def __contains__(self, adapter: Hashable) -> bool:
        return adapter in self._adapters

    def pin(self, adapter: Hashable, num_bytes: int, holder: Any) -> bool:
        """Holds the adapter's blocks until `holder` unpins it. Returns `False`, and pins nothing,
        if too few blocks are free. While the bytes of a block are unknown, only one adapter can be
        pinned, without blocks."""
        resident = self._adapters.get(adapter)
        if resident is None:
            is_unsized = not self._block_bytes and self._group_index is not None
            if is_unsized and self._adapters:
                return False
            resident = _ResidentAdapter(num_bytes)
        if not resident.holders:
            if resident.block_ids is not None:
                assert self._group_index is not None
                self._pool.acquire(resident.block_ids)
                resident.hold(resident.block_ids, self._block_manager, self._group_index)
            elif not self._allocate(adapter, resident):
                return False
        self._adapters[adapter] = resident
        resident.holders.add(holder)
        return True

    def record_admission(self, adapter: Hashable, is_first: bool = True) -> None:
        """Records that a request which has pinned the adapter was admitted. A request's first
        admission is a hit if the adapter is still resident from an earlier admission."""
        was_admitted = self._adapters[adapter].admit()
        self.num_hits += is_first and was_admitted

    def unpin(self, adapter: Hashable, holder: Any) -> None:
        """Ends the use of the adapter by `holder`; does nothing if `holder` has not pinned it. The
        blocks of an adapter without holders are cached, and its weights stay until the blocks are
        evicted; an adapter for which no blocks can be allocated is dropped at once."""
        resident = self._adapters.get(adapter)
        if resident is None or holder not in resident.holders:
            return
        resident.holders.discard(holder)
        if resident.holders:
            return
        if resident.block_ids is None:
            self._allocate(adapter, resident)
        if resident.block_ids is None:
            # Without a pool, or if the adapter does not fit after all, no later eviction of a block
            # would free its weights. Besides, while the bytes of a block are unknown, `pin` would
            # refuse every other adapter as long as this one stayed.
            self._drop(adapter)
            return
        resident.release()

    def recover(self) -> None:
        """Drops all adapters, including pinned ones, after an exception that may have left one
        partly changed. The caller must then recount the pool, which frees their blocks."""
        dropped_adapters = self._adapters
        self._adapters, self._adapter_by_block = {}, {}
        if self._group_index is not None:
            self._pool.forget_kept_by(self._on_evict_block)
        for adapter, resident in dropped_adapters.items():
            for table in resident.sequence.tables:
                table.abandon()
            if resident.was_admitted:
                self._report_eviction(adapter)

    @property
    def _pool(self) -> BlockPool:
        assert self._group_index is not None
        return self._block_manager.groups[self._group_index].pool

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block over all layers; 0 while they are unknown, or without a pool."""
        if self._group_index is None:
            return 0
        return self._block_manager.groups[self._group_index].block_bytes

    def _allocate(self, adapter: Hashable, resident: _ResidentAdapter) -> bool:
        """Allocates and holds the adapter's blocks. Returns `False` if too few are free; `True`,
        without blocks, if `_block_bytes` is 0."""
        block_bytes = self._block_bytes
        if self._group_index is None or not block_bytes:
            return True
        needs = [0] * len(self._block_manager.groups)
        needs[self._group_index] = -(-resident.num_bytes // block_bytes)
        taken_ids = self._block_manager.take(needs)
        if taken_ids is None:
            return False
        block_ids = taken_ids[self._group_index]
        resident.hold(block_ids, self._block_manager, self._group_index)
        for block_id in block_ids:
            self._adapter_by_block[block_id] = adapter
            self._pool.keep(block_id, self._on_evict_block)
        return True

    def _evict_adapter_of(self, block_id: int) -> None:
        """Drops the adapter of a block that the pool has evicted. The adapter has no holders, since
        the block was cached."""
        adapter = self._adapter_by_block[block_id]
        for other_id in self._adapters[adapter].block_ids or ():
            if other_id != block_id:
                self._pool.drop(other_id)
        self._drop(adapter)

    def _drop(self, adapter: Hashable) -> None:
        """Drops an adapter. It counts as evicted if a request with it was admitted. If none was, no
        step has loaded its weights to the device: at most prefetched weights or a copy in host
        memory exist, and they are kept."""
        resident = self._adapters[adapter]
        for block_id in resident.block_ids or ():
            del self._adapter_by_block[block_id]
        del self._adapters[adapter]
        if resident.was_admitted:
            self._report_eviction(adapter)

    def _report_eviction(self, adapter: Hashable) -> None:
        self.num_evictions += 1
        on_evict = self._weak_on_evict()
        if on_evict is not None:
            on_evict(adapter)
