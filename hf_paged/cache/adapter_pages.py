"""Blocks that stand for the weights of adapters (unified paging of S-LoRA, arXiv 2311.03285, section 5.1, by count).
Plain Python: no tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .block_manager import NO_BLOCKS, BlockManager, SequenceBlocks
from .groups import StateSpec


@dataclass(eq=False)
class _Pages:
    num_bytes: int
    blocks: SequenceBlocks = NO_BLOCKS  # while a request runs with the adapter
    cached: list[int] = field(default_factory=list)  # block ids while none does
    holders: set[Any] = field(default_factory=set)
    is_counted: bool = False  # whether it has its blocks: how many is known once the pool's first layer is made
    was_used: bool = False


class AdapterPages:
    """Which adapters have a place beside keys and values: each as many blocks of the pool as hold its bytes. Those of
    an adapter that a request runs with are used. Those of others are cached, in one LRU order with cached prefixes, and
    the adapter goes with the first of them that is evicted. For use under the memory's lock."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        groups = (i for i, group in enumerate(blocks.groups) if group.spec.is_counted)
        self._group = next((i for i in groups if not isinstance(blocks.groups[i].spec, StateSpec)), None)
        self._pages: dict[Hashable, _Pages] = {}
        self._owners: dict[int, Hashable] = {}  # of the blocks
        self.on_evict: Callable[[Any], None] = lambda adapter: None  # is told of an adapter that lost its place
        self.num_hits = self.num_evictions = 0  # admitted requests whose adapter had a place; adapters that lost theirs

    def __contains__(self, adapter: Hashable) -> bool:
        return adapter in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self._pages.values())

    def pin(self, adapter: Hashable, num_bytes: int, holder: Any) -> bool:
        """The adapter has a place until `holder` lets it go. `False` if there is no room."""
        pages = self._pages.get(adapter)
        if pages is None:
            if not self._block_bytes and self._group is not None and self._pages:
                return False  # what a block takes is known after the first step
            pages = _Pages(num_bytes)
        if not pages.holders:
            if pages.cached:
                pages.blocks = self._blocks.new()
                self._blocks.groups[self._table].pool.acquire(pages.cached)
                self._hold(pages, pages.cached)
                pages.cached = []
            elif not self._count(adapter, pages):
                return False
        self._pages[adapter] = pages
        pages.holders.add(holder)
        return True

    def use(self, adapter: Hashable) -> None:
        """A request was admitted with an adapter that it has pinned."""
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
        if not pages.is_counted and not self._count(adapter, pages):  # there was no room for it in fact
            self._drop(adapter)
            return
        if pages.blocks is NO_BLOCKS:
            return
        pool, ids = self._blocks.groups[self._table].pool, list(pages.blocks.tables[self._table].block_ids)
        if all(map(pool.is_kept, ids)):
            pages.cached = ids
            self._blocks.free(pages.blocks)
        else:
            for block_id in filter(pool.is_kept, ids):
                pool.drop(block_id)
            self._blocks.free(pages.blocks)
            self._drop(adapter)
        pages.blocks = NO_BLOCKS

    @property
    def _table(self) -> int:
        assert self._group is not None
        return self._group

    @property
    def _block_bytes(self) -> int:
        return 0 if self._group is None else self._blocks.groups[self._group].block_bytes

    def _count(self, adapter: Hashable, pages: _Pages) -> bool:
        """Takes the blocks that it needs, if it is known how many these are."""
        if not self._block_bytes:
            return True
        needs = [0] * len(self._blocks.groups)
        needs[self._table] = -(-pages.num_bytes // self._block_bytes)
        taken = self._blocks.take(needs)
        if taken is None:
            return False
        ids, pages.blocks, pages.is_counted = taken[self._table], self._blocks.new(), True
        self._hold(pages, ids)
        for block_id in ids:
            self._owners[block_id] = adapter
            self._blocks.groups[self._table].pool.keep(block_id, self._evicted)
        return True

    def _hold(self, pages: _Pages, ids: list[int]) -> None:
        table = pages.blocks.tables[self._table]
        table.block_ids, table.num_tokens = list(ids), len(ids) * table.block_size

    def _evicted(self, block_id: int) -> None:
        adapter = self._owners[block_id]
        pages = self._pages[adapter]
        if pages.holders:  # a used block is no longer worth keeping once it is let go
            return
        pool, ids, pages.cached = self._blocks.groups[self._table].pool, pages.cached, []
        for other in ids:
            if other != block_id:
                pool.drop(other)
        self._drop(adapter, ids)

    def _drop(self, adapter: Hashable, ids: list[int] | None = None) -> None:
        for block_id in [i for i, owner in self._owners.items() if owner == adapter] if ids is None else ids:
            del self._owners[block_id]
        del self._pages[adapter]
        self.num_evictions += 1
        self.on_evict(adapter)
