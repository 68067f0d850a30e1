"""Virtual storage: rows as contiguous tensors (vAttention, arXiv 2405.04437). A block's pages are
mapped at the block's address, which kernels, copies and files use, and again in the slot (address
range) of every row that reads it.

A row's next step finds the row's slot by the row's last block, maps new blocks there, and reads the
slot as a strided tensor. So this storage need not be notified when rows begin, fork or end.
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
from ..cache.free_memory import address_limit
from ..cache.groups import GroupSpec
from ..cache.kv_blocks import KVBlocks
from ..cache.storage import BlockCopier, BlockStorage
from ..config import MAX_BLOCK_SIZE, MAX_VIRTUAL_BLOCK_SIZE, PagedConfig, VirtualStorage
from ..step import StepMetadata
from ..threads import attempt
from ..topics import Topic
from ..weak_sets import members_of
from .mappings import PlaneLayout, Region, RowMappings
from .pages import MemoryFile, Pages, pages_for
from .row_slots import Placement, RowSlots, RowViews

logger = logging.getLogger(__name__)

# address space for a layer's blocks, unless more blocks are reserved; growth beyond it moves the
# blocks
ADDRESS_BYTES = 64 << 30
# with `blocks_ahead`, a pool without a limit grows by at least this many runs of `1 + blocks_ahead`
# blocks, so that new rows find free runs
RUNS_PER_GROWTH = 16


def make_storage(
    config: PagedConfig, spec: GroupSpec, block_size: int, before_move: Callable[[], None]
) -> MappedStorage:
    """Makes the storage of a layer group (`seams.StorageFactory`)."""
    options = config.storage
    assert isinstance(options, VirtualStorage)
    select = functools.partial(_take_runs, 1 + options.blocks_ahead)
    return MappedStorage(block_size, BlockPool(select=select), spec, options, before_move)


def _take_runs(
    run_length: int, free: dict[int, None], num_blocks: int, count: int, after: Sequence[int]
) -> list[int]:
    """Takes `count` free blocks (`block_pool.BlockSelector`). Prefers the id after the previous
    block's (for the first block, after the last id of `after`). If that block is not free, takes
    the first block of an aligned free run of `run_length` blocks or, without such a run, the free
    block with the lowest id."""
    block_ids = []
    next_id = after[-1] + 1 if after else -1
    for _ in range(count):
        if next_id not in free:
            starts: Sequence[int] = ()
            if run_length > 1:
                starts = range(0, num_blocks - run_length + 1, run_length)
            free_starts = (
                start
                for start in starts
                if all(block_id in free for block_id in range(start, start + run_length))
            )
            lowest = min(free)
            next_id = next(free_starts, lowest)
        del free[next_id]
        block_ids.append(next_id)
        next_id += 1
    return block_ids


def fit_blocks(
    config: PagedConfig,
    model_config: Any,
    device: torch.device,
) -> PagedConfig:
    """Returns `config` with the smallest block size whose blocks fill whole pages in half
    precision: in each head or, if that takes more than `MAX_BLOCK_SIZE` tokens, in all heads of a
    layer's tensor together. Returns `config` unchanged if its storage is not virtual, or if its
    block size is at least that large: larger blocks also fill whole pages, since block sizes and
    page sizes are powers of two. Raises `ValueError` if pages cannot be mapped, or are too large
    for any block size."""
    if not isinstance(config.storage, VirtualStorage):
        return config
    page_bytes = pages_for(device, config.storage.page_bytes).granularity
    num_heads, head_dim = _block_shape(model_config)
    head_bytes = 2 * head_dim  # of a token
    num_tokens = page_bytes // math.gcd(page_bytes, head_bytes)
    if num_tokens > MAX_BLOCK_SIZE:
        token_bytes = num_heads * head_bytes
        num_tokens = page_bytes // math.gcd(page_bytes, token_bytes)
    if num_tokens > MAX_VIRTUAL_BLOCK_SIZE:
        raise ValueError(
            f"`page_bytes` of `VirtualStorage` is {page_bytes:,}, but no block of at most"
            f" {MAX_VIRTUAL_BLOCK_SIZE:,} tokens of this model, {num_heads} x {head_dim} numbers"
            " each, fills whole pages: lower `page_bytes`"
        )
    size = config.block_size  # "auto" is replaced by the smallest size that fills pages
    if not isinstance(size, str) and size >= num_tokens:
        return config
    return dataclasses.replace(config, block_size=num_tokens)


def _block_shape(config: Any) -> tuple[int, int]:
    """Returns the number of heads in a layer's block tensor, and the dim of a head. Where layers
    differ, or the keys and values of a layer, returns the greatest common divisors."""
    text_config = None
    if config is not None:
        text_config = config.get_text_config(decoder=True)
    layer_configs = compat.layer_configs(text_config)
    head_counts, head_dims = zip(*map(_block_shape_of_layer, layer_configs))
    return math.gcd(*head_counts), math.gcd(*head_dims)


def _block_shape_of_layer(config: Any) -> tuple[int, int]:
    num_heads = getattr(config, "num_attention_heads", None) or 1
    latent_dim = getattr(config, "kv_lora_rank", None)
    if isinstance(latent_dim, int):
        rotary_dim = getattr(config, "qk_rope_head_dim", None) or 0
        return 1, latent_dim + rotary_dim
    head_dim = getattr(config, "head_dim", None)
    if not head_dim:
        hidden_size = getattr(config, "hidden_size", None)
        head_dim = (hidden_size or 64 * num_heads) // num_heads
    if not isinstance(head_dim, int):
        head_dim = 64
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    value_dim = getattr(config, "v_head_dim", None)
    if isinstance(value_dim, int) and value_dim != head_dim:
        return num_kv_heads, math.gcd(head_dim, value_dim)
    return 2 * num_kv_heads, head_dim


class LayerRows:
    """The rows of one layer as strided tensors (`seams.MappedRows`)."""

    def __init__(
        self,
        storage: MappedStorage,
        regions: Sequence[Region],
        view_arguments: tuple[Any, ...],
    ) -> None:
        self.slots = storage.slots
        self.config = storage.config
        self.regions = list(regions)
        self.mappings: RowMappings | None = None
        self._view_arguments = view_arguments
        self._allows_views = True  # until the model's own code needs contiguous tensors

    def disallow_views(self) -> None:
        self._allows_views = False

    def place(self, step: StepMetadata) -> RowViews | None:
        """Maps the rows of a step and returns views of them; returns `None` if they cannot be
        mapped."""
        with self.slots.lock:
            result = self._map_rows(step, are_consecutive=False)
        if result is None:
            return None
        placement, mappings = result
        return RowViews(placement, *mappings.keys_and_values, step)

    def _map_rows(
        self, step: StepMetadata, are_consecutive: bool
    ) -> tuple[Placement, RowMappings] | None:
        """Maps the rows of a step, in consecutive slots if `are_consecutive`. Returns their
        placement and the layer's mappings; `None` if the rows cannot be mapped. The caller holds
        the slots' lock."""
        placement: Placement | None = step.plan(self.slots.place, are_consecutive)
        if placement is None:
            return None
        try:
            return placement, self._update_mappings(placement)
        except MemoryError:
            _unmap_idle_slots(placement, self.slots)
            try:
                return placement, self._update_mappings(placement)
            except MemoryError as error:
                message = "rows are gathered, since no more of them can be mapped: %s"
                logger.warning(Topic.VIRTUAL_STORAGE(message), error)
                self.slots.back_off()
                return None

    def _update_mappings(self, placement: Placement) -> RowMappings:
        """Maps the blocks of the placement's rows that this layer has not mapped yet; returns the
        layer's mappings. Raises `MemoryError`."""
        slots = self.slots
        shape = (slots.num_slots, slots.max_len)
        stale_slots = placement.slots
        if self.mappings is not None and self.mappings.shape == shape:
            versions = self.mappings.versions
            rows = slots.rows
            stale_slots = [slot for slot in stale_slots if versions[slot] != rows[slot].version]
            if not stale_slots:
                return self.mappings
        self.preserve_views()
        if self.mappings is None or self.mappings.shape != shape:
            self.mappings = RowMappings(self.regions, self._view_arguments, *shape)
            stale_slots = placement.slots
        num_blocks = min(region.num_mapped for region in self.regions)
        for slot in stale_slots:
            self.mappings.update_slot(slot, slots.rows[slot], self.config, num_blocks)
        return self.mappings

    def unmap(self, slots: Iterable[int]) -> None:
        """Unmaps these slots. The caller holds the slots' lock."""
        self.preserve_views()
        for slot in slots:
            if self.mappings is not None and slot < len(self.mappings.mapped_ids):
                self.mappings.unmap_slot(slot)

    def strided_view(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as a view `(rows, heads, len(columns), dim)`,
        with zeros for padding; `None` if no single view covers the rows, or none is allowed."""
        columns = step.columns
        size = step.block_size
        if columns is None or not len(columns):
            return None
        if not step.num_rows or not self._allows_views:
            return None
        shift = step.origins[0] % size
        if any(origin % size != shift for origin in step.origins):
            return None
        if step.has_padding and not self.regions[0].pages.can_map_over:
            return None  # padding is not mapped
        first = columns.start - shift
        end = columns.stop - shift
        if first < 0:
            return None
        with self.slots.lock:
            result = self._map_rows(step, are_consecutive=True)
            if result is None:
                return None
            placement, mappings = result
            slots = range(placement.slots[0], placement.slots[-1] + 1)
            return mappings.borrow_view(is_value, slots, first, end)

    def preserve_views(self) -> None:
        """Preserves borrowed views that are still alive (`RowMappings.preserve`). Must be called
        before their blocks are mapped over or written to."""
        mappings = self.mappings  # read once: another thread may replace it
        if mappings is not None and mappings.borrowed_views:
            with self.slots.lock:
                if self.mappings is not None and self.mappings.preserve():
                    self.mappings = None

    def grow(self, num_blocks: int) -> None:
        """Moves the blocks to a new address range for `num_blocks` blocks. Raises `MemoryError`,
        with the blocks at their old addresses."""
        regions = [region.grown(num_blocks) for region in self.regions]
        with self.slots.lock:
            self.preserve_views()  # the new regions write to the same pages
            self.regions = regions

    def close(self) -> None:
        """Returns the pages to the system. No block table may contain a block of this layer."""
        with self.slots.lock:
            mappings = self.mappings
            self.preserve_views()
            self.mappings = None
            if mappings is not None:
                mappings.close()
            for region in self.regions:
                region.close()

    def remap(self, pages: Pages, slots: RowSlots) -> None:
        """In a child process: maps `pages` at the blocks' addresses in place of the parent's pages,
        but no rows in `slots` yet."""
        self.slots = slots
        self.mappings = None
        for region in self.regions:
            region.remap(pages)


class MappedStorage(BlockStorage):
    """A storage that maps the pages of its blocks a second time, in the slots of rows. Layers whose
    blocks do not fill whole pages have ordinary blocks."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        spec: GroupSpec,
        config: VirtualStorage,
        before_move: Callable[[], None],
    ) -> None:
        """`before_move`: copies the tokens of all live handles to separate tensors. It is called
        before blocks move to other addresses, since after a fork the child maps its own pages only
        at the latest addresses."""
        super().__init__(block_size, pool, spec)
        self._copier = BlockCopier(can_launch=False)
        self.config = config
        self.slots = RowSlots(config.keep_mappings)
        self.pages: Pages | None = None
        # for a child process: ids and content of used and cached blocks, by layer
        self._child_contents: dict[int, tuple[list[int], KVBlocks]] = {}
        # includes dropped layers' rows, whose views may still be alive
        self._all_layer_rows: weakref.WeakSet[LayerRows] = weakref.WeakSet()
        self._before_move = before_move
        _storages.add(self)
        forks.add_listener(self)

    @property
    def _regions(self) -> list[Region]:
        return [region for rows in self._layer_rows for region in rows.regions]

    @property
    def _layer_rows(self) -> list[LayerRows]:
        layers = list(self.layers.values())
        return [layer.rows for layer in layers if isinstance(layer.rows, LayerRows)]

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory that the pages take."""
        if self.pages is None:
            return 0
        return self.pages.physical_bytes()

    @property
    def max_bytes(self) -> int | None:  # type: ignore[override]
        return self.physical_bytes if self.config.blocks_ahead else None

    @property
    def growth_step(self) -> int:  # type: ignore[override]
        blocks_ahead = self.config.blocks_ahead
        return RUNS_PER_GROWTH * (1 + blocks_ahead) if blocks_ahead else 0

    @property
    def num_allocated_blocks(self) -> int:
        mapped_counts = [region.num_mapped for region in self._regions]
        return min([super().num_allocated_blocks, *mapped_counts])

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
        """Unless addresses are limited, returns at least the number of blocks that fill
        `ADDRESS_BYTES`: addresses cost nothing, and spare addresses let the pool grow in place."""
        num_addressable = 0
        if address_limit() is None:
            num_addressable = ADDRESS_BYTES // max(block_bytes, 1)
        num_reserved = super()._num_reserved(block_bytes, device)
        return max(num_addressable, num_reserved)

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        if keys.device.type == "meta":
            return super()._allocate(num_blocks, keys, values)
        outline = self.outline(keys, values)
        if self.pages is None:
            self.pages = pages_for(keys.device, self.config.page_bytes)
        page_bytes = self.pages.granularity
        num_heads = outline.data[0].shape[1]
        has_keys_and_values = len(outline.data) == 1 and num_heads == 2 * outline.keys.shape[1]
        num_parts = 2 if has_keys_and_values else 1
        candidates = [PlaneLayout.fit(tensor, num_parts, page_bytes) for tensor in outline.data]
        layouts = [layout for layout in candidates if layout is not None]
        if len(layouts) < len(candidates):
            logger.warning(
                Topic.VIRTUAL_STORAGE(
                    "blocks of %d tokens, with shapes %s, do not fill whole pages of %d bytes and"
                    " are gathered: raise `block_size`"
                ),
                self.block_size,
                " and ".join(str(tuple(tensor.shape[1:])) for tensor in outline.data),
                page_bytes,
            )
            return super()._allocate(num_blocks, keys, values)
        num_mapped_blocks = self.pool.num_blocks
        regions = [Region(self.pages, layout, num_blocks, num_mapped_blocks) for layout in layouts]
        rows = LayerRows(self, regions, outline.view_arguments)
        self._all_layer_rows.add(rows)
        return self._blocks_over(outline, rows)

    def _blocks_over(self, blocks: KVBlocks, rows: LayerRows) -> KVBlocks:
        tensors = [region.blocks for region in rows.regions]
        return dataclasses.replace(blocks.like(tensors), rows=rows)

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        rows = layer.rows
        if not isinstance(rows, LayerRows):
            return super()._grown(layer, num_blocks)
        self._before_move()
        rows.grow(num_blocks)
        return self._blocks_over(layer, rows)

    def grow(self, num_blocks: int, max_blocks: int) -> None:
        super().grow(num_blocks, max_blocks)
        for region in self._regions:
            region.map_blocks(num_blocks)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        self._before_move()
        return super().promote(index, keys, values)

    def clear(self) -> None:
        for rows in self._layer_rows:
            rows.close()
        super().clear()
        slots = RowSlots(self.config.keep_mappings)
        self.pages, self.slots = None, slots

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for rows in self._layer_rows:
            rows.preserve_views()
        super().copy_blocks(copies)

    def before_fork(self) -> None:
        """Copies the content of used and cached blocks for the child, which would otherwise share
        the mapped pages with the parent."""
        if not isinstance(self.pages, MemoryFile):
            return
        for rows in members_of(self._all_layer_rows):
            rows.preserve_views()
        holder_counts = enumerate(self.pool.holder_counts())
        ids = [block_id for block_id, count in holder_counts if count]  # -1 if cached
        for index, layer in list(self.layers.items()):  # other threads may add layers
            if layer.rows is not None and ids:
                self._child_contents[index] = ids, layer.select(ids)

    def after_in_parent(self) -> None:
        self._child_contents = {}

    def after_in_child(self) -> None:
        """Maps new pages at the blocks' addresses, and restores the content of the blocks."""
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


def _unmap_idle_slots(placement: Placement, row_slots: RowSlots) -> None:
    """Unmaps the slots that no step reads, in all storages that no other thread is using, except
    the slots of `placement` in `row_slots`. The caller holds the lock of `row_slots`."""
    for storage in members_of(_storages):
        slots = storage.slots
        with attempt(slots.lock) as is_held:
            if not is_held:
                continue
            excepted_slots = set(placement.slots) if slots is row_slots else ()
            free_slots = (slot for slot, row in enumerate(slots.rows) if row.is_free)
            idle_slots = [slot for slot in free_slots if slot not in excepted_slots]
            for rows in storage._layer_rows:
                rows.unmap(idle_slots)
            slots.clear_mapped(slots.rows[slot] for slot in idle_slots)
