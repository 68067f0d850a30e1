"""Counts adapter weights as blocks of the pool (unified paging of S-LoRA, arXiv 2311.03285, section
5.1, by count). Plain Python: no tensors."""

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
    # block ids; `None` until they are taken: their number is known once the pool's first layer
    # exists
    ids: list[int] | None = None
    blocks: SequenceBlocks = NO_BLOCKS  # hold them while a request runs with the adapter
    holders: set[Any] = field(default_factory=set)
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
            if pages.ids is not None:
                self._pool.acquire(pages.ids)
                self._hold(pages, pages.ids)
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
        if pages.holders or self._group is None:
            return
        if pages.ids is None:
            self._count(adapter, pages)
        if pages.ids is None:
            # it turns out not to fit; or no step has run: `pin` refuses other adapters until the
            # first one has
            self._drop(adapter)
            return
        self._blocks.free(pages.blocks)
        pages.blocks = NO_BLOCKS

    def recover(self) -> None:
        """Forgets all adapters, pinned ones too, whatever an exception left half changed; a recount
        of the pool must follow."""
        gone, self._pages, self._owners = self._pages, {}, {}
        if self._group is not None:
            self._pool.drop_all(self._on_evict_block)
        for adapter, pages in gone.items():
            for table in pages.blocks.tables:
                table.block_ids = []
            self._note_eviction(adapter)

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

    def _count(self, adapter: Hashable, pages: _Pages) -> bool:
        """Takes the adapter's blocks, if a block's bytes are known. Returns `False` if there are
        too few."""
        if not self._block_bytes:
            return True
        needs = [0] * len(self._blocks.groups)
        needs[self._table] = -(-pages.num_bytes // self._block_bytes)
        taken = self._blocks.take(needs)
        if taken is None:
            return False
        pages.ids = taken[self._table]
        self._hold(pages, pages.ids)
        for block_id in pages.ids:
            self._owners[block_id] = adapter
            self._pool.keep(block_id, self._on_evict_block)
        return True

    def _hold(self, pages: _Pages, ids: list[int]) -> None:
        pages.blocks = self._blocks.new()
        table = pages.blocks.tables[self._table]
        table.block_ids = list(ids)
        table.num_tokens = len(ids) * table.block_size

    def _evicted(self, block_id: int) -> None:
        """Evicts an adapter, which no request uses: only cached blocks are evicted."""
        adapter = self._owners[block_id]
        for other in self._pages[adapter].ids or ():
            if other != block_id:
                self._pool.drop(other)
        self._drop(adapter)

    def _drop(self, adapter: Hashable) -> None:
        for block_id in self._pages[adapter].ids or ():
            del self._owners[block_id]
        del self._pages[adapter]
        self._note_eviction(adapter)

    def _note_eviction(self, adapter: Hashable) -> None:
        self.num_evictions += 1
        on_evict = self._on_evict()
        if on_evict is not None:
            on_evict(adapter)
