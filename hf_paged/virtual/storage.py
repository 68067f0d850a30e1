"""Virtual storage: rows as contiguous tensors (vAttention, arXiv 2405.04437). A block's pages are
mapped at the block's address, which kernels, copies and files use, and again in the slot (address
range) of every row that reads it.

A slot belongs to the row whose blocks are mapped there: the row's next step finds the slot by its
last block, maps new blocks, and reads plain strided tensors. So nobody tells this storage when rows
begin, fork or end.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat, forks
from ..cache.block_pool import BlockPool
from ..cache.copies import BlockCopier
from ..cache.free_memory import address_limit
from ..cache.groups import GroupSpec
from ..cache.kv_blocks import KVBlocks
from ..cache.storage import BlockStorage
from ..config import MAX_BLOCK_SIZE, MAX_VIRTUAL_BLOCK_SIZE, PagedConfig, VirtualStorage
from ..step import StepMetadata
from ..threads import attempt
from ..topics import Topic
from .mappings import Planes, Region, RowMappings
from .pages import MemoryFile, Pages, pages_for
from .row_slots import Placement, RowSlots, RowViews

logger = logging.getLogger(__name__)

# most addresses that are reserved for the blocks of a layer: growth beyond them moves the blocks
MAX_RESERVED_BYTES = 64 << 30
MANY_RUNS = 16  # runs of blocks that a pool adds at once, in which rows can begin


def make_storage(
    config: PagedConfig, spec: GroupSpec, block_size: int, before_move: Callable[[], None]
) -> MappedStorage:
    options = config.storage
    assert isinstance(options, VirtualStorage)
    take = functools.partial(_take_runs, 1 + options.blocks_ahead)
    return MappedStorage(block_size, BlockPool(take=take), spec, options, before_move)


def _take_runs(
    run: int, free: dict[int, None], num_blocks: int, count: int, after: Sequence[int]
) -> list[int]:
    """Takes blocks (`block_pool.BlockSelector`) that follow the last of `after`, else the first
    whole run of `run` free blocks, else the blocks with the lowest ids."""
    block_ids = []
    following = after[-1] + 1 if after else -1
    for _ in range(count):
        if following not in free:
            starts: Sequence[int] = ()
            if run > 1:
                starts = range(0, num_blocks - run + 1, run)
            whole = (
                start
                for start in starts
                if all(block_id in free for block_id in range(start, start + run))
            )
            lowest = min(free)
            following = next(whole, lowest)
        del free[following]
        block_ids.append(following)
        following += 1
    return block_ids


def fit_blocks(
    config: PagedConfig,
    model_config: Any,
    device: torch.device,
) -> PagedConfig:
    """Raises the block size so that in half precision a block's keys of one head fill whole pages,
    or, with large pages, its keys and values of all heads do. Reads the head sizes from
    `model_config`. Raises `ValueError` if pages cannot be mapped."""
    if not isinstance(config.storage, VirtualStorage):
        return config
    page = pages_for(device, config.storage.page_bytes).granularity
    heads, width = _widths(model_config)
    head_bytes = 2 * width  # of a token
    tokens = page // math.gcd(page, head_bytes)
    if tokens > MAX_BLOCK_SIZE:
        all_bytes = 2 * heads * head_bytes
        tokens = page // math.gcd(page, all_bytes)
    if tokens > MAX_VIRTUAL_BLOCK_SIZE:
        raise ValueError(
            f"`page_bytes` of `VirtualStorage` is {page:,}, and no block of at most"
            f" {MAX_VIRTUAL_BLOCK_SIZE:,} tokens of this model, {heads} KV heads of {width}, fills"
            " whole pages: lower `page_bytes`"
        )
    size = config.block_size  # "auto" takes the smallest size that fits
    if not isinstance(size, str) and size >= tokens:
        return config
    return dataclasses.replace(config, block_size=tokens)


def _widths(config: Any) -> tuple[int, int]:
    """Returns the number of KV heads and the head dim; where layers differ, common divisors of
    both."""
    text = None
    if config is not None:
        text = config.get_text_config(decoder=True)
    layer_configs = compat.layer_configs(text)
    heads, widths = zip(*map(_widths_of_layer, layer_configs))
    return math.gcd(*heads), math.gcd(*widths)


def _widths_of_layer(config: Any) -> tuple[int, int]:
    heads = getattr(config, "num_attention_heads", None) or 1
    latent = getattr(config, "kv_lora_rank", None)
    if isinstance(latent, int):
        rotary = getattr(config, "qk_rope_head_dim", None) or 0
        return 1, latent + rotary
    width = getattr(config, "head_dim", None)
    if not width:
        hidden_size = getattr(config, "hidden_size", None)
        width = (hidden_size or 64 * heads) // heads
    if not isinstance(width, int):
        width = 64
    kv_heads = getattr(config, "num_key_value_heads", None)
    return kv_heads or heads, width


class LayerRows:
    """The rows of one layer as strided tensors (`seams.MappedRows`)."""

    def __init__(
        self,
        storage: MappedStorage,
        regions: Sequence[Region],
        form: tuple[Any, ...],
    ) -> None:
        self.slots = storage.slots
        self.config = storage.config
        self.regions = list(regions)
        self.mappings: RowMappings | None = None
        self._form = form
        # whether the model's own code accepts tensors that are not contiguous
        self._can_lend = True

    def stop_lending(self) -> None:
        self._can_lend = False

    def place(self, step: StepMetadata) -> RowViews | None:
        """Maps the rows of a step and returns views to read them by; `None` if they cannot be
        mapped."""
        with self.slots.lock:
            placed = self._place(step, are_consecutive=False)
        if placed is None:
            return None
        placement, mappings = placed
        return RowViews(placement, *mappings.pair, step)

    def _place(
        self, step: StepMetadata, are_consecutive: bool
    ) -> tuple[Placement, RowMappings] | None:
        """Maps the rows of a step; returns their slots and the mappings. The caller holds the
        slots' lock."""
        placement: Placement | None = step.plan(self.slots.place, are_consecutive)
        if placement is None:
            return None
        try:
            return placement, self._follow(placement)
        except MemoryError:
            _drop_idle(placement, self.slots)
            try:
                return placement, self._follow(placement)
            except MemoryError as error:
                message = "rows are gathered, since no more of them can be mapped: %s"
                logger.warning(Topic.VIRTUAL_STORAGE(message), error)
                self.slots.back_off()
                return None

    def _follow(self, placement: Placement) -> RowMappings:
        """Maps blocks of the placement that are not mapped yet. Raises `MemoryError`."""
        slots = self.slots
        shape = (slots.num_slots, slots.max_len)
        stale = placement.slots
        if self.mappings is not None and self.mappings.shape == shape:
            versions = self.mappings.versions
            rows = slots.rows
            stale = [slot for slot in stale if versions[slot] != rows[slot].version]
            if not stale:
                return self.mappings
        self.preserve_views()
        if self.mappings is None or self.mappings.shape != shape:
            self.mappings = RowMappings(self.regions, self._form, *shape)
            stale = placement.slots
        num_blocks = min(region.num_mapped for region in self.regions)
        for slot in stale:
            self.mappings.follow(slot, slots.rows[slot], self.config, num_blocks)
        return self.mappings

    def drop(self, slots: Iterable[int]) -> None:
        """Unmaps these slots. The caller holds the slots' lock."""
        self.preserve_views()
        for slot in slots:
            if self.mappings is not None and slot < len(self.mappings.mapped):
                self.mappings.drop(slot)

    def lend(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as a view `(rows, heads, len(columns), dim)`,
        with zeros for padding; `None` if no single view covers the rows."""
        columns = step.columns
        size = step.block_size
        if columns is None or not len(columns):
            return None
        if not step.num_rows or not self._can_lend:
            return None
        shift = step.origins[0] % size
        if any(origin % size != shift for origin in step.origins):
            return None
        if step.has_padding and not self.regions[0].pages.maps_over:
            return None  # padding is not mapped
        first = columns.start - shift
        end = columns.stop - shift
        if first < 0:
            return None
        with self.slots.lock:
            placed = self._place(step, are_consecutive=True)
            if placed is None:
                return None
            placement, mappings = placed
            slots = range(placement.slots[0], placement.slots[-1] + 1)
            return mappings.lend(is_value, slots, first, end)

    def preserve_views(self) -> None:
        """Preserves borrowed views that are still alive (`RowMappings.preserve`). Call before
        mapping over blocks or writing to them."""
        mappings = self.mappings  # read once: another thread may change it
        if mappings is not None and mappings.borrowed:
            with self.slots.lock:
                if self.mappings is not None and self.mappings.preserve():
                    self.mappings = None

    def grow(self, num_blocks: int) -> None:
        """Gives the regions addresses for `num_blocks` blocks. Raises `MemoryError` before any
        change."""
        regions = [region.grown(num_blocks) for region in self.regions]
        with self.slots.lock:
            self.preserve_views()  # borrowed views of the old regions read these rows, too
            self.regions = regions

    def close(self) -> None:
        """Returns the pages to the system. No table may hold a block."""
        with self.slots.lock:
            mappings = self.mappings
            self.preserve_views()
            self.mappings = None
            if mappings is not None:
                mappings.close()
            for region in self.regions:
                region.close()

    def remap(self, pages: Pages, slots: RowSlots) -> None:
        """In a child process, maps other pages at the blocks' addresses."""
        self.slots = slots
        self.mappings = None
        for region in self.regions:
            region.remap(pages)


class MappedStorage(BlockStorage):
    """A storage that also maps its blocks' pages for rows. Layers whose blocks do not fill whole
    pages have plain blocks."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        spec: GroupSpec,
        config: VirtualStorage,
        before_move: Callable[[], None],
    ) -> None:
        """`before_move`: gathers all handles, before blocks move: a child process gets its own
        pages only at the blocks' current addresses."""
        super().__init__(block_size, pool, spec)
        self._copier = BlockCopier(can_launch=False)
        self.config = config
        self.slots = RowSlots(config.keep_mappings)
        self.pages: Pages | None = None
        self._child_contents: dict[int, tuple[list[int], KVBlocks]] = {}
        # also of former layers, whose views may still be alive
        self._layer_rows: weakref.WeakSet[LayerRows] = weakref.WeakSet()
        self._before_move = before_move
        _storages.add(self)
        forks.around_forks(self)

    @property
    def _regions(self) -> list[Region]:
        return [region for rows in self._mapped for region in rows.regions]

    @property
    def _mapped(self) -> list[LayerRows]:
        layers = list(self.layers.values())
        return [layer.rows for layer in layers if isinstance(layer.rows, LayerRows)]

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory that the pages take."""
        if self.pages is None:
            return 0
        return self.pages.physical_bytes()

    @property
    def most_bytes(self) -> int | None:  # type: ignore[override]
        return self.physical_bytes if self.config.blocks_ahead else None

    @property
    def growth_step(self) -> int:  # type: ignore[override]
        ahead = self.config.blocks_ahead
        return MANY_RUNS * (1 + ahead) if ahead else 0

    @property
    def num_rows(self) -> int:
        backed = [region.num_mapped for region in self._regions]
        return min([super().num_rows, *backed])

    @property
    def is_elastic(self) -> bool:
        if not super().is_elastic:
            return False
        return self.pages is None or self.pages.is_sparse

    @property
    def nbytes(self) -> int:
        num_bytes = self.physical_bytes
        for layer in self.layers.values():
            if layer.rows is None:
                num_bytes += sum(tensor.nbytes for tensor in layer.data)
        return num_bytes

    def _num_reserved(self, block_bytes: int, device: torch.device) -> int:
        """Reserves much more address space, which costs nothing, so that blocks rarely move as the
        pool grows."""
        num_addressable = 0
        if address_limit() is None:
            num_addressable = MAX_RESERVED_BYTES // max(block_bytes, 1)
        num_reserved = super()._num_reserved(block_bytes, device)
        return max(num_addressable, num_reserved)

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        if keys.device.type == "meta":
            return super()._allocate(num_blocks, keys, values)
        like = self.outline(keys, values)
        if self.pages is None:
            self.pages = pages_for(keys.device, self.config.page_bytes)
        page = self.pages.granularity
        heads = like.data[0].shape[1]
        has_both = len(like.data) == 1 and heads == 2 * like.keys.shape[1]
        parts = 2 if has_both else 1
        layouts = [Planes.fit(tensor, parts, page) for tensor in like.data]
        fitting = [layout for layout in layouts if layout is not None]
        if len(fitting) < len(layouts):
            logger.warning(
                Topic.VIRTUAL_STORAGE(
                    "blocks of %d tokens of %s do not fill whole pages of %d bytes and are"
                    " gathered: raise `block_size`"
                ),
                self.block_size,
                " and ".join(str(tuple(tensor.shape[1:])) for tensor in like.data),
                page,
            )
            return super()._allocate(num_blocks, keys, values)
        num_backed = self.pool.num_blocks
        regions = [Region(self.pages, layout, num_blocks, num_backed) for layout in fitting]
        rows = LayerRows(self, regions, like.form)
        self._layer_rows.add(rows)
        return self._over(like, rows)

    def _over(self, like: KVBlocks, rows: LayerRows) -> KVBlocks:
        tensors = [region.blocks for region in rows.regions]
        return dataclasses.replace(like.like(tensors), rows=rows)

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        rows = layer.rows
        if not isinstance(rows, LayerRows):
            return super()._grown(layer, num_blocks)
        self._before_move()
        rows.grow(num_blocks)
        return self._over(layer, rows)

    def grow(self, num_blocks: int, most: int) -> None:
        super().grow(num_blocks, most)
        for region in self._regions:
            region.back(num_blocks)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        self._before_move()
        return super().promote(index, keys, values)

    def clear(self) -> None:
        for rows in self._mapped:
            rows.close()
        super().clear()
        slots = RowSlots(self.config.keep_mappings)
        self.pages, self.slots = None, slots

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for rows in self._mapped:
            rows.preserve_views()
        super().copy_blocks(copies)

    def before_fork(self) -> None:
        """Copies the content of blocks for the child, since the parent and the child share mapped
        pages."""
        if not isinstance(self.pages, MemoryFile):
            return
        for rows in list(self._layer_rows):
            rows.preserve_views()
        counts = enumerate(self.pool.states())
        ids = [block_id for block_id, count in counts if count]
        for index, layer in list(self.layers.items()):  # other threads may add layers
            if layer.rows is not None and ids:
                self._child_contents[index] = ids, layer.select(ids)

    def after_in_parent(self) -> None:
        self._child_contents = {}

    def after_in_child(self) -> None:
        """Maps new pages at the same addresses and restores the blocks' content."""
        if not isinstance(self.pages, MemoryFile):
            return
        contents = self._child_contents
        pages = self.pages.empty_copy()
        self.pages, self.slots = pages, RowSlots(self.config.keep_mappings)
        self._child_contents = {}
        for index, layer in self.layers.items():
            if isinstance(layer.rows, LayerRows):
                layer.rows.remap(pages, self.slots)
                if index in contents:
                    layer.put_blocks(*contents[index])


_storages: weakref.WeakSet[MappedStorage] = weakref.WeakSet()


def _drop_idle(placement: Placement, placed_in: RowSlots) -> None:
    """Unmaps the slots that no step reads, in all storages, except those of `placement`, which are
    in `placed_in`. The caller holds that lock."""
    for storage in list(_storages):
        slots = storage.slots
        with attempt(slots.lock) as is_held:
            if not is_held:
                continue  # in use by another thread
            in_use = set(placement.slots) if slots is placed_in else ()
            free = (slot for slot, row in enumerate(slots.rows) if row.is_free)
            idle = [slot for slot in free if slot not in in_use]
            for rows in storage._mapped:
                rows.drop(idle)
            slots.forget(slots.rows[slot] for slot in idle)
