"""Virtual storage: rows as contiguous tensors (vAttention, arXiv 2405.04437). A block's pages are mapped at the block's
address, which kernels, copies and files use, and again in the address range (place) of each row that reads it.

A place belongs to the row whose blocks are mapped there: the row's next step finds it by its last block, maps new
blocks, and reads plain strided tensors. So this storage needs no notice when rows begin, fork or end.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import MAX_BLOCK_SIZE, MAX_VIRTUAL_BLOCK_SIZE, PagedConfig, VirtualStorage
from ..interrupts import held
from ..step import StepMetadata
from . import background
from .block_pool import BlockPool
from .copies import copy_portable
from .groups import GroupSpec
from .pages import Pages, leave_to_parent, pages_for
from .places import Places, Planes, Region
from .row_slots import PlacedRows, Placement, RowSlots
from .storage import KVBlocks, Storage, limits_addresses

logger = logging.getLogger(__name__)

MAX_ROOM_BYTES = 64 << 30  # of addresses for the blocks of a layer; growth beyond it maps them at other addresses


def fit_blocks(config: PagedConfig, model_config: Any, device: torch.device) -> PagedConfig:
    """Raises the block size so that a block's keys of one head, or with large pages its keys and values of all heads,
    fill whole pages in half precision, by the model's configuration. Raises `ValueError` if pages cannot be mapped."""
    if not isinstance(config.storage, VirtualStorage):
        return config
    page = pages_for(device, config.storage.page_bytes).granularity
    heads, width = _widths(model_config)
    tokens = page // math.gcd(page, 2 * width)
    if tokens > MAX_BLOCK_SIZE:
        tokens = page // math.gcd(page, 2 * width * 2 * heads)
    if tokens > MAX_VIRTUAL_BLOCK_SIZE:
        raise ValueError(
            f"`page_bytes` of `VirtualStorage` is {page:,}, and no block of at most {MAX_VIRTUAL_BLOCK_SIZE:,} tokens "
            f"of this model, {heads} KV heads of {width}, fills such pages: lower it"
        )
    size = config.block_size  # "auto": the smallest possible
    return config if not isinstance(size, str) and size >= tokens else dataclasses.replace(config, block_size=tokens)


def _widths(config: Any) -> tuple[int, int]:
    """Returns the number of KV heads and the head dim."""
    text = config.get_text_config(decoder=True) if config is not None else None
    heads = getattr(text, "num_attention_heads", None) or 1
    latent = getattr(text, "kv_lora_rank", None)
    if isinstance(latent, int):
        return 1, latent + (getattr(text, "qk_rope_head_dim", None) or 0)
    width = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", None) or 64 * heads) // heads
    return getattr(text, "num_key_value_heads", None) or heads, width if isinstance(width, int) else 64


class LayerRows:
    """The rows of one layer as strided tensors."""

    def __init__(self, storage: MappedStorage, regions: Sequence[Region], form: tuple[Any, ...]) -> None:
        self.slots, self.config, self.regions, self._form = storage.slots, storage.config, list(regions), form
        self.is_read = True  # whether the model's own code accepts tensors that are not contiguous

    def place(self, step: StepMetadata) -> PlacedRows | None:
        """Maps each row of a step and returns where it can be read; `None` if it cannot be mapped."""
        with self.slots.lock:
            found = self._place(step, together=False)
        if found is None:
            return None
        placement, each = found
        views = [view for places in each for view in places.views]
        if len(views) == 2:
            return PlacedRows(placement, *views)
        both = KVBlocks.view((views[0],), *self._form)
        return PlacedRows(placement, both.keys, both.values)

    def _place(self, step: StepMetadata, together: bool) -> tuple[Placement, list[Places]] | None:
        """Maps each row of a step; returns the slots, and the places of each region. Needs the slots' lock."""
        placement: Placement | None = step.plan(self.slots.place, together)
        if placement is None:
            return None
        try:
            return placement, self._follow(placement)
        except MemoryError:
            _drop_idle(keep=placement, of=self.slots)
            try:
                return placement, self._follow(placement)
            except MemoryError as error:
                logger.warning("rows are gathered, as no more of them can be mapped: %s", error)
                self.slots.fill()
                return None

    def _follow(self, placement: Placement) -> list[Places]:
        """Maps what is not mapped yet; returns the places of each region. Raises `MemoryError`."""
        found = []
        for region in self.regions:
            places = region.places
            stale = placement.slots if places is None else self._stale(places, placement.slots)
            if stale:
                with held():
                    places = self._map(region, stale, placement)
            assert places is not None
            found.append(places)
        return found

    def _stale(self, places: Places, some: list[int]) -> list[int]:
        """Returns which of these slots are not mapped as their rows are now."""
        slots = self.slots
        if (places.num_slots, places.max_len) != (slots.num_slots, slots.max_len):
            return some
        return [slot for slot in some if places.versions[slot] != slots.rows[slot].version]

    def _map(self, region: Region, stale: list[int], placement: Placement) -> Places:
        """Maps the rows in the slots `stale`, or, at new addresses, in all slots of the placement; returns the region's
        places. Raises `MemoryError`."""
        slots, places = self.slots, region.places
        if places is not None:
            places.settle()
            if (places.num_slots, places.max_len) != (slots.num_slots, slots.max_len):
                region.places = None
        if region.places is None:
            region.places, stale = Places(region, slots.num_slots, slots.max_len), placement.slots
        config, ahead = self.config, 0 if self.config.background else self.config.blocks_ahead
        for slot in stale:
            region.places.follow(slot, slots.rows[slot], ahead, config.keep_mappings)
        if config.background:
            background.submit(self, stale)
        return region.places

    def drop(self, some: Sequence[int]) -> None:
        """Unmaps these slots. Needs the slots' lock."""
        with held():
            for region in self.regions:
                if region.places is not None:
                    region.places.settle()
                for slot in some:
                    if region.places is not None and slot < region.places.num_slots:
                        region.places.drop(slot)

    def map_ahead(self, some: Sequence[int]) -> None:
        """Maps the next blocks of the rows in these slots, while the step computes."""
        for region in self.regions:
            for slot in some:
                with self.slots.lock:
                    if region.places is not None and slot < region.places.num_slots and not self.slots.is_full:
                        region.places.map_ahead(slot, self.slots.rows[slot], self.config.blocks_ahead)

    def lend(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as a view `(rows, heads, len(columns), dim)`, with zeros for padding;
        `None` if no single view covers the rows."""
        columns, size = step.columns, step.block_size
        if columns is None or not len(columns) or not step.num_rows or not self.is_read:
            return None
        shift = step.origins[0] % size
        if any(origin % size != shift for origin in step.origins):
            return None
        if step.has_padding and not self.regions[0].pages.maps_over:
            return None  # padding is not mapped
        first, end = columns.start - shift, columns.stop - shift
        if first < 0:
            return None
        with self.slots.lock, held():
            found = self._place(step, together=True)
            if found is None:
                return None
            placement, each = found
            slots, number = range(placement.slots[0], placement.slots[-1] + 1), int(is_value)
            if len(each) == 2:
                return each[number].lend(0, slots, first, end)
            if self.regions[0].planes.parts == 2:
                return each[0].lend(number, slots, first, end)
            both = KVBlocks.view((each[0].lend(0, slots, first, end),), *self._form)
            return both.values if is_value else both.keys

    def settle(self) -> None:
        """Preserves lent views before blocks are written to (`Places.settle`)."""
        for region in self.regions:
            places = region.places  # read once: another thread may change it
            if places is not None and places.loans:
                with self.slots.lock, held():
                    if region.places is not None:
                        region.places.settle()

    def grow(self, num_blocks: int) -> None:
        """Gives the regions addresses for `num_blocks` blocks. Raises `MemoryError`, with nothing changed."""
        regions = [region.grown(num_blocks) for region in self.regions]
        with self.slots.lock, held():
            for region in self.regions:  # readers of older blocks read these rows, too
                if region.places is not None:
                    region.places.settle()
            self.regions = regions

    def close(self) -> None:
        with self.slots.lock, held():
            for region in self.regions:
                region.close()


class MappedStorage(Storage):
    """A storage whose blocks' pages are also mapped for rows. Layers whose blocks do not fill whole pages have plain
    blocks."""

    def __init__(self, block_size: int, spec: GroupSpec, config: VirtualStorage, pool: BlockPool) -> None:
        super().__init__(block_size, spec)
        self.config, self.slots, self._pool = config, RowSlots(), pool
        self.pages: Pages | None = None
        self._for_child: dict[int, tuple[list[int], KVBlocks]] = {}
        self._made: weakref.WeakSet[LayerRows] = weakref.WeakSet()  # also of former layers, which views may hold
        # Gathers all handles. Called before blocks move, since a child process gets pages of its own at the blocks'
        # addresses alone.
        self.before_move: Callable[[], None] = lambda: None
        _storages.add(self)

    @property
    def _mapped(self) -> list[LayerRows]:
        return [layer.rows for layer in list(self.layers.values()) if layer.rows is not None]

    @property
    def physical_bytes(self) -> int:
        """Bytes of pages in physical memory."""
        return 0 if self.pages is None else self.pages.physical_bytes()

    @property
    def num_rows(self) -> int:
        backed = [region.num_mapped for rows in self._mapped for region in rows.regions]
        return min([super().num_rows, *backed])

    @property
    def is_elastic(self) -> bool:
        return super().is_elastic and (self.pages is None or self.pages.is_sparse)

    @property
    def nbytes(self) -> int:
        others = (layer for layer in self.layers.values() if layer.rows is None)
        return self.physical_bytes + sum(tensor.nbytes for layer in others for tensor in layer.data)

    def _num_reserved(self, block_bytes: int, device: torch.device) -> int:
        """Reserves much more address space, which costs nothing, so that blocks need not move as they grow."""
        room = 0 if limits_addresses() else MAX_ROOM_BYTES // max(block_bytes, 1)
        return max(room, super()._num_reserved(block_bytes, device))

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        if keys.device.type == "meta":
            return super()._allocate(num_blocks, keys, values)
        like = super()._allocate(1, keys[:, :, :0].to("meta"), values[:, :, :0].to("meta"))
        if self.pages is None:
            self.pages = pages_for(keys.device, self.config.page_bytes)
        parts = 2 if len(like.data) == 1 and like.data[0].shape[1] == 2 * like.keys.shape[1] else 1
        fits = [Planes.fit(tuple(x.shape[1:]), x.dtype, parts, self.pages.granularity) for x in like.data]
        planes = [found for found in fits if found is not None]
        if len(planes) < len(fits):
            logger.warning(
                "blocks of %d tokens of %s fill no whole pages of %d bytes: they are gathered; raise `block_size`",
                *(self.block_size, " and ".join(str(tuple(x.shape[1:])) for x in like.data), self.pages.granularity),
            )
            return super()._allocate(num_blocks, keys, values)
        regions = [Region(self.pages, each, num_blocks) for each in planes]
        for region in regions:
            region.back(num_blocks if self.pages.is_sparse else self.capacity)
        rows = LayerRows(self, regions, like.form)
        self._made.add(rows)
        return self._over(like, rows)

    def _over(self, like: KVBlocks, rows: LayerRows) -> KVBlocks:
        blocks = like.like([region.blocks for region in rows.regions])
        blocks.rows = rows
        return blocks

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        if layer.rows is None:
            return super()._grown(layer, num_blocks)
        self.before_move()
        layer.rows.grow(num_blocks)
        return self._over(layer, layer.rows)

    def grow(self, num_blocks: int, most: int) -> None:
        super().grow(num_blocks, most)
        for rows in self._mapped:
            for region in rows.regions:
                region.back(num_blocks)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        self.before_move()
        return super().promote(index, keys, values)

    def clear(self) -> None:
        for rows in self._mapped:
            rows.close()
        super().clear()
        self.pages, self.slots = None, RowSlots()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for rows in self._mapped:
            rows.settle()
        pairs = torch.tensor(copies, dtype=torch.int64, device="cpu")
        for layer in self.layers.values():
            copy_portable(layer.data, pairs.to(layer.keys.device))

    def before_fork(self) -> None:
        """Copies the content of blocks for the child, since mapped pages stay shared with the parent."""
        if self.pages is None or not self.pages.is_sparse:
            return
        for rows in list(self._made):
            rows.settle()
        ids = [block_id for block_id, count in enumerate(self._pool.states()) if count]
        for index, layer in list(self.layers.items()):  # other threads may add some
            if layer.rows is not None and ids:
                self._for_child[index] = ids, layer.at(ids)

    def after_in_parent(self) -> None:
        self._for_child = {}

    def after_in_child(self) -> None:
        """Maps new pages at the same addresses and restores the blocks' content."""
        if self.pages is None or not self.pages.is_sparse:
            return
        self.pages, self.slots, found = self.pages.fresh(), RowSlots(), self._for_child
        self._for_child = {}
        for index, layer in self.layers.items():
            if layer.rows is not None:
                layer.rows.slots = self.slots
                for region in layer.rows.regions:
                    region.map_fresh(self.pages)
                if index in found:
                    layer.put_blocks(*found[index])


_storages: weakref.WeakSet[MappedStorage] = weakref.WeakSet()


def _drop_idle(keep: Placement, of: RowSlots) -> None:
    """Unmaps slots that no step reads, in all storages, except `keep` in the slots `of`, whose lock is held."""
    for storage in list(_storages):
        slots = storage.slots
        if not slots.lock.acquire(blocking=False):
            continue  # in use by another thread
        try:
            kept = set(keep.slots) if slots is of else ()
            idle = [slot for slot, row in enumerate(slots.rows) if row.is_free and slot not in kept]
            for rows in storage._mapped:
                rows.drop(idle)
        finally:
            slots.lock.release()


def _tell(name: str) -> None:
    for storage in list(_storages):
        try:
            getattr(storage, name)()
        except Exception:  # must not keep the others from theirs
            logger.exception("blocks of a child process may be lost")


def _after_in_child() -> None:
    leave_to_parent()
    _tell("after_in_child")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=functools.partial(_tell, "before_fork"),
        after_in_parent=functools.partial(_tell, "after_in_parent"),
        after_in_child=_after_in_child,
    )
