"""Counts adapter weights as blocks of the pool (unified paging of S-LoRA, arXiv 2311.03285, section
5.1, by count). Plain Python: no tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ..cache.block_manager import BlockManager
from ..cache.groups import StateSpec
from ..cache.sequence_blocks import NO_BLOCKS, SequenceBlocks


@dataclass(eq=False)
class _Pages:
    num_bytes: int
    blocks: SequenceBlocks = NO_BLOCKS  # while a request runs with the adapter
    cached: list[int] = field(default_factory=list)  # block ids while no request does
    holders: set[Any] = field(default_factory=set)
    # whether blocks were taken: their number is known once the pool's first layer exists
    is_counted: bool = False
    was_used: bool = False


class AdapterPages:
    """Reserves room for adapters beside keys and values: each takes as many blocks of the pool as
    hold its bytes. Blocks of an adapter that a request runs with are used; those of other adapters
    are cached, in one LRU order with cached prefixes, and the adapter is evicted with the first of
    them. Call under the memory's lock."""

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
        self._on_evict = on_evict  # returns what is called with each evicted adapter
        # avoids a cycle: a pool is freed with its last user, not by the garbage collector
        itself = weakref.ref(self)
        self._on_evict_block = lambda block_id: (
            None if (pages := itself()) is None else pages._evicted(block_id)
        )
        # admitted requests with a resident adapter; evicted adapters
        self.num_hits = self.num_evictions = 0
        blocks.holders.add(self)

    def __contains__(self, adapter: Hashable) -> bool:
        return adapter in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self._pages.values())

    def pin(self, adapter: Hashable, num_bytes: int, holder: Any) -> bool:
        """Keeps the adapter's room until `holder` unpins it. Returns `False` if there is no
        room."""
        pages = self._pages.get(adapter)
        if pages is None:
            is_unsized = not self._block_bytes and self._group is not None
            if is_unsized and self._pages:
                return False  # a block's bytes are known after the first step
            pages = _Pages(num_bytes)
        if not pages.holders:
            if pages.cached:
                pool = self._blocks.groups[self._table].pool
                pages.blocks = self._blocks.new()
                pool.acquire(pages.cached)
                self._hold(pages, pages.cached)
                pages.cached = []
            elif not self._count(adapter, pages):
                return False
        self._pages[adapter] = pages
        pages.holders.add(holder)
        return True

    def use(self, adapter: Hashable) -> None:
        """Notes that a request was admitted with an adapter that it has pinned."""
        pages = self._pages[adapter]
        self.num_hits += pages.was_used
        pages.was_used = True

    def unpin(self, adapter: Hashable, holder: Any) -> None:
        pages = self._pages.get(adapter)
        if pages is None or holder not in pages.holders:
            return
        pages.holders.discard(holder)
        if pages.holders:
            return
        if not pages.is_counted and not self._count(adapter, pages):  # it turns out not to fit
            self._drop(adapter)
            return
        if pages.blocks is NO_BLOCKS:
            # no step has run: `pin` refuses other adapters until the first one has
            if self._group is not None:
                self._drop(adapter)
            return
        pool = self._blocks.groups[self._table].pool
        ids = list(pages.blocks.tables[self._table].block_ids)
        if all(map(pool.is_kept, ids)):
            pages.cached = ids
            self._blocks.free(pages.blocks)
        else:
            for block_id in filter(pool.is_kept, ids):
                pool.drop(block_id)
            self._blocks.free(pages.blocks)
            self._drop(adapter)
        pages.blocks = NO_BLOCKS

    def recover(self) -> None:
        """Forgets all adapters, pinned ones too, whatever an exception left half changed; a recount
        of the pool must follow."""
        gone, self._pages, self._owners = self._pages, {}, {}
        if self._group is not None:
            self._blocks.groups[self._group].pool.drop_all(self._on_evict_block)
        for adapter, pages in gone.items():
            for table in pages.blocks.tables:
                table.block_ids = []
            self._note_eviction(adapter)

    @property
    def _table(self) -> int:
        assert self._group is not None
        return self._group

    @property
    def _block_bytes(self) -> int:
        if self._group is None:
            return 0
        return self._blocks.groups[self._group].block_bytes

    def _count(self, adapter: Hashable, pages: _Pages) -> bool:
        """Takes the adapter's blocks, if a block's bytes are known. Returns `False` if there are
        too few."""
        if not self._block_bytes:
            return True
        pool = self._blocks.groups[self._table].pool
        needs = [0] * len(self._blocks.groups)
        needs[self._table] = -(-pages.num_bytes // self._block_bytes)
        taken = self._blocks.take(needs)
        if taken is None:
            return False
        ids, pages.blocks, pages.is_counted = taken[self._table], self._blocks.new(), True
        self._hold(pages, ids)
        for block_id in ids:
            self._owners[block_id] = adapter
            pool.keep(block_id, self._on_evict_block)
        return True

    def _hold(self, pages: _Pages, ids: list[int]) -> None:
        table = pages.blocks.tables[self._table]
        table.block_ids, table.num_tokens = list(ids), len(ids) * table.block_size

    def _evicted(self, block_id: int) -> None:
        adapter = self._owners[block_id]
        pages = self._pages[adapter]
        if pages.holders:  # `unpin` drops the adapter
            return
        pool = self._blocks.groups[self._table].pool
        ids, pages.cached = pages.cached, []
        for other in ids:
            if other != block_id:
                pool.drop(other)
        self._drop(adapter, ids)

    def _drop(self, adapter: Hashable, ids: list[int] | None = None) -> None:
        if ids is None:
            owners = self._owners.items()
            ids = [block_id for block_id, owner in owners if owner == adapter]
        for block_id in ids:
            del self._owners[block_id]
        del self._pages[adapter]
        self._note_eviction(adapter)

    def _note_eviction(self, adapter: Hashable) -> None:
        self.num_evictions += 1
        on_evict = self._on_evict()
        if on_evict is not None:
            on_evict(adapter)
