"""Accounts for adapter weights as blocks of the pool (unified paging of S-LoRA, arXiv 2311.03285,
section 5.1, by count). Handles no tensors, and leaves the weights to `files.py`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..cache.block_manager import BlockManager
from ..cache.block_pool import BlockPool
from ..cache.groups import StateSpec
from ..cache.sequence_blocks import NO_BLOCKS, SequenceBlocks


@dataclass(eq=False)
class _Pages:
    num_bytes: int
    # `None` until they are allocated: their number is known once the pool's first layer exists
    block_ids: list[int] | None = None
    blocks: SequenceBlocks = NO_BLOCKS  # holds them while a request runs with the adapter
    holders: set[Any] = field(default_factory=set)
    was_used: bool = False


class AdapterPages:
    """Allocates blocks for adapters in the pool of keys and values: as many as hold the bytes of
    the adapter's weights. Blocks of an adapter with running requests are used; those of other
    adapters are cached, in one LRU order with cached prefixes, and evicting the first of them
    evicts the adapter. Callers hold the memory's lock."""

    def __init__(
        self, blocks: BlockManager, on_evict: Callable[[], Callable[[Any], None] | None]
    ) -> None:
        self._blocks = blocks
        self._group: int | None = None  # the first with keys and values
        for number, group in enumerate(blocks.groups):
            if group.spec.is_counted and not isinstance(group.spec, StateSpec):
                self._group = number
                break
        self._pages: dict[Hashable, _Pages] = {}
        self._owners: dict[int, Hashable] = {}  # adapter by block id
        self._on_evict = on_evict  # returns the function to call with every evicted adapter
        # weak, since without a cycle a pool is freed with its last user, not by the collector
        itself = weakref.ref(self)
        self._on_evict_block = lambda block_id: (
            None if (pages := itself()) is None else pages._evicted(block_id)
        )
        # hits: admitted requests whose adapter was resident
        self.num_hits = self.num_evictions = 0
        blocks.holders.add(self)

    def __contains__(self, adapter: Hashable) -> bool:
        return adapter in self._pages

    def pin(self, adapter: Hashable, num_bytes: int, holder: Any) -> bool:
        """Holds the adapter's blocks until `holder` unpins it. Returns `False` if too few are
        free."""
        pages = self._pages.get(adapter)
        if pages is None:
            is_unsized = not self._block_bytes and self._group is not None
            if is_unsized and self._pages:
                return False  # the first step shows how many bytes a block has
            pages = _Pages(num_bytes)
        if not pages.holders:
            if pages.block_ids is not None:
                self._pool.acquire(pages.block_ids)
                self._hold(pages, pages.block_ids)
            elif not self._allocate(adapter, pages):
                return False
        self._pages[adapter] = pages
        pages.holders.add(holder)
        return True

    def record_admission(self, adapter: Hashable, is_first: bool = True) -> None:
        """Records that a request which has pinned the adapter was admitted. Its first admission is
        a hit if another request was admitted with the adapter while it was resident."""
        pages = self._pages[adapter]
        if is_first and pages.was_used:
            self.num_hits += 1
        pages.was_used = True

    def unpin(self, adapter: Hashable, holder: Any) -> None:
        pages = self._pages.get(adapter)
        if pages is None or holder not in pages.holders:
            return
        pages.holders.discard(holder)
        if pages.holders:
            return
        if self._group is None:
            # no block accounts for the weights, so no later eviction would free them
            if pages.was_used:
                self._drop(adapter)
            else:  # not admitted, so no weights were loaded
                del self._pages[adapter]
            return
        if pages.block_ids is None:
            self._allocate(adapter, pages)
        if pages.block_ids is None:
            # the adapter does not fit after all; or no step has run, and `pin` refuses other
            # adapters until one has
            self._drop(adapter)
            return
        self._blocks.free(pages.blocks)
        pages.blocks = NO_BLOCKS

    def recover(self) -> None:
        """Drops all adapters, including pinned ones, after an exception that may have split a
        change. A recount of the pool must follow."""
        dropped, self._pages, self._owners = self._pages, {}, {}
        if self._group is not None:
            self._pool.drop_all(self._on_evict_block)
        for adapter, pages in dropped.items():
            for table in pages.blocks.tables:
                table.block_ids = []
            self._report_eviction(adapter)

    @property
    def _table(self) -> int:
        assert self._group is not None
        return self._group

    @property
    def _pool(self) -> BlockPool:
        return self._blocks.groups[self._table].pool

    @property
    def _block_bytes(self) -> int:
        if self._group is None:
            return 0
        return self._blocks.groups[self._group].block_bytes

    def _allocate(self, adapter: Hashable, pages: _Pages) -> bool:
        """Allocates the adapter's blocks, if the bytes of a block are known. Returns `False` if too
        few are free."""
        if not self._block_bytes:
            return True
        needs = [0] * len(self._blocks.groups)
        needs[self._table] = -(-pages.num_bytes // self._block_bytes)
        allocated = self._blocks.take(needs)
        if allocated is None:
            return False
        pages.block_ids = allocated[self._table]
        self._hold(pages, pages.block_ids)
        for block_id in pages.block_ids:
            self._owners[block_id] = adapter
            self._pool.keep(block_id, self._on_evict_block)
        return True

    def _hold(self, pages: _Pages, block_ids: list[int]) -> None:
        pages.blocks = self._blocks.new()
        table = pages.blocks.tables[self._table]
        table.block_ids = list(block_ids)
        table.num_tokens = len(block_ids) * table.block_size

    def _evicted(self, block_id: int) -> None:
        """Evicts the adapter of an evicted block. No request uses it, since its blocks are
        cached."""
        adapter = self._owners[block_id]
        for other in self._pages[adapter].block_ids or ():
            if other != block_id:
                self._pool.drop(other)
        self._drop(adapter)

    def _drop(self, adapter: Hashable) -> None:
        for block_id in self._pages[adapter].block_ids or ():
            del self._owners[block_id]
        del self._pages[adapter]
        self._report_eviction(adapter)

    def _report_eviction(self, adapter: Hashable) -> None:
        self.num_evictions += 1
        on_evict = self._on_evict()
        if on_evict is not None:
            on_evict(adapter)
