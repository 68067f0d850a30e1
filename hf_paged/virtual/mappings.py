"""Maps the pages of a layer's block tensors at the blocks' addresses, and again in the slots of the
rows that read them. `row_slots.py` chooses the slots."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.kv_blocks import KVBlocks
from ..config import VirtualStorage
from .pages import PLANE_BYTES, Addresses, Backing, Extents, Pages, when_freed
from .row_slots import Row


@dataclass(frozen=True)
class PlaneLayout:
    """How a block tensor is divided into planes. The pages of a plane hold consecutive tokens of
    one head, or of all heads."""

    num_planes: int
    heads_per_plane: int
    head_dim: int
    block_size: int  # tokens
    dtype: torch.dtype
    # number of parts (`RowMappings`): 2 if the tensor has both keys and values, and each plane has
    # one head; otherwise 1
    num_parts: int

    @property
    def token_elements(self) -> int:
        """Elements per token in a plane."""
        return self.heads_per_plane * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a plane."""
        return self.block_size * self.token_elements * self.dtype.itemsize

    @classmethod
    def fit(
        cls,
        blocks: Tensor,
        num_parts: int,
        page_bytes: int,
    ) -> PlaneLayout | None:
        """Returns a layout of `blocks` `(n, heads, block_size, dim)` in which every block fills
        whole pages of each plane; `None` if there is none. `num_parts`: the number of parts in a
        layout with one head per plane; a layout with all heads in one plane has one part."""
        _, num_heads, block_size, dim = blocks.shape
        by_head = cls(num_heads, 1, dim, block_size, blocks.dtype, num_parts)
        all_heads = cls(1, num_heads, dim, block_size, blocks.dtype, 1)
        for layout in (by_head, all_heads):
            block_bytes = layout.block_bytes
            if block_bytes and block_bytes % page_bytes == 0:
                return layout
        return None


class Region:
    """One block tensor of a layer, `blocks` `(num_blocks, heads, block_size, dim)`, over mapped
    pages."""

    def __init__(
        self,
        pages: Pages,
        layout: PlaneLayout,
        num_blocks: int,
        num_mapped_blocks: int,
        backing: Backing | None = None,
    ) -> None:
        """Uses the pages of `backing`, by default new ones, and maps the pages of the first
        `num_mapped_blocks` blocks, or of all blocks if that takes no memory. Raises `MemoryError`
        if addresses or memory run out."""
        self.pages = pages
        self.layout = layout
        self.num_blocks = num_blocks
        if backing is None:
            backing_bytes = layout.num_planes * PLANE_BYTES
            offset = pages.extend(backing_bytes)
            backing = Backing(pages, offset, backing_bytes)
        self.backing = backing
        self.num_mapped = 0  # blocks
        num_plane_blocks = max(1, layout.num_planes * num_blocks)
        addresses = pages.reserve(num_plane_blocks * layout.block_bytes, backing)
        self._addresses = addresses
        self.address = addresses.address
        num_heads = layout.num_planes * layout.heads_per_plane
        dim = layout.head_dim
        block_size = layout.block_size
        block_stride = block_size * layout.token_elements
        head_stride = num_blocks * block_stride if layout.heads_per_plane == 1 else dim
        flat = addresses.tensor(layout.dtype)
        self.blocks = flat.as_strided(
            (num_blocks, num_heads, block_size, dim),
            (block_stride, head_stride, layout.token_elements, 1),
        )
        self.map_blocks(num_blocks if pages.is_sparse else num_mapped_blocks)

    def offset_of(self, plane: int, block_id: int) -> int:
        """Returns the offset of a block's pages in one plane, within the offset space of
        `pages`."""
        plane_offset = self.backing.offset + plane * PLANE_BYTES
        return plane_offset + block_id * self.layout.block_bytes

    def map_blocks(self, num_blocks: int) -> None:
        """Maps the pages of the first `num_blocks` blocks, so that these blocks can be written.
        Raises `MemoryError`."""
        block_bytes = self.layout.block_bytes
        first = self.num_mapped
        num_new = num_blocks - first
        if num_new <= 0:
            return
        addresses = []
        for plane in range(self.layout.num_planes):
            plane_block = plane * self.num_blocks + first
            addresses.append(self.address + plane_block * block_bytes)
        try:
            for plane, address in enumerate(addresses):
                self.pages.map(address, self.offset_of(plane, first), num_new * block_bytes)
            self.num_mapped = num_blocks
        except BaseException:
            if not self.pages.can_map_over:
                for address in addresses:  # the earlier planes are mapped
                    self.pages.unmap(address, num_new * block_bytes)
            raise

    def grown(self, num_blocks: int) -> Region:
        """Returns a region for `num_blocks` blocks with the same pages, at new addresses."""
        return Region(self.pages, self.layout, num_blocks, self.num_mapped, self.backing)

    def remap(self, pages: Pages) -> None:
        """In a child process: maps `pages` at the same addresses in place of the parent's pages."""
        num_mapped = self.num_mapped
        self.pages, self.num_mapped = pages, 0
        self._addresses.backing = self.backing = Backing(
            pages, self.backing.offset, self.backing.size
        )
        self.map_blocks(num_mapped)

    def close(self) -> None:
        """Returns the pages to the system. No block table may contain a block of this region."""
        block_bytes = self.layout.block_bytes
        if not self.pages.can_map_over:
            for plane in range(self.layout.num_planes):
                address = self.address + plane * self.num_blocks * block_bytes
                self.pages.unmap(address, self.num_mapped * block_bytes)
        self.backing.release()


class PlaneAddresses(NamedTuple):
    """The addresses of one plane's tokens in all slots."""

    address: int  # in the first slot
    slot_bytes: int  # distance between the addresses in adjacent slots
    block_bytes: int  # of a block in this plane
    offset: int  # of block 0's pages in the offset space
    part: int  # index of the part that the plane belongs to

    def address_of(self, slot: int, position: int) -> int:
        """Returns the address of the block at `position` (counted in blocks) in a slot."""
        return self.address + slot * self.slot_bytes + position * self.block_bytes


class BorrowedView(NamedTuple):
    """A view of rows that the model's own code may still hold."""

    addresses: weakref.ref[Addresses]  # dead once all tensors of the view are freed
    part: int
    slots: range
    positions: range  # in each slot, in blocks


class RowMappings:
    """The slots of a layer, each with the mapped blocks of one row. A part is a tensor that covers
    all slots and holds keys, values or both. `keys_and_values`: views of the parts, each
    `(num_slots, heads, max_len, dim)`. If each plane has one head, the slot and head axes can be
    flattened without a copy."""

    def __init__(
        self,
        regions: Sequence[Region],
        view_arguments: tuple[Any, ...],
        num_slots: int,
        max_len: int,
    ) -> None:
        """`view_arguments`: the `KVBlocks.view_arguments` of the layer's blocks."""
        self.shape = (num_slots, max_len)
        self.pages = regions[0].pages
        self.block_size = regions[0].layout.block_size
        # mapped block ids of each slot, by position in blocks
        self.mapped_ids: list[list[int | None]] = [[] for _ in range(num_slots)]
        self.versions = [0] * num_slots  # `Row.version` of each slot when it was last updated
        self.borrowed_views: list[BorrowedView] = []
        # boundaries between extents, per plane; in a list, so that finalizers read the latest count
        self._num_boundaries = [0]
        # whether a borrowed view has taken over some of the current addresses
        self._needs_new_addresses = False
        self.planes: list[PlaneAddresses] = []
        self.part_addresses: list[Addresses] = []  # by part; parts of one region share a range
        parts: list[Tensor] = []
        for region in regions:
            parts += self._reserve(region)
        kv_views = KVBlocks.view(tuple(parts), *view_arguments)
        self.keys_and_values = (kv_views.keys, kv_views.values)

    def _reserve(self, region: Region) -> list[Tensor]:
        """Reserves addresses for the planes of a region; returns its parts."""
        # this object keeps no reference to the region: in a cycle, the region's pages would be
        # freed at the next garbage collection instead of with their last user
        layout = region.layout
        num_slots, max_len = self.shape
        planes_per_part = layout.num_planes // layout.num_parts
        plane_elements = max_len * layout.token_elements  # of a plane in one slot
        plane_bytes = plane_elements * layout.dtype.itemsize
        num_bytes = layout.num_planes * num_slots * plane_bytes
        addresses = self.pages.reserve(num_bytes, region.backing)
        when_freed(
            addresses,
            _subtract_extents,
            self.pages.extents,
            self._num_boundaries,
            layout.num_planes,
        )
        flat = addresses.tensor(layout.dtype)
        head_stride = plane_elements if layout.heads_per_plane == 1 else layout.head_dim
        num_heads = planes_per_part * layout.heads_per_plane
        shape = (num_slots, num_heads, max_len, layout.head_dim)
        slot_stride = planes_per_part * plane_elements
        strides = (slot_stride, head_stride, layout.token_elements, 1)
        parts = []
        for plane in range(layout.num_planes):
            part, part_plane = divmod(plane, planes_per_part)
            # number of ranges, each of a slot and plane, before this plane's range in slot 0
            num_ranges_before = part * num_slots * planes_per_part + part_plane
            if not part_plane:
                parts.append(flat.as_strided(shape, strides, num_ranges_before * plane_elements))
                self.part_addresses.append(addresses)
            address = addresses.address + num_ranges_before * plane_bytes
            slot_bytes = planes_per_part * plane_bytes
            offset = region.offset_of(plane, 0)
            part_index = len(self.part_addresses) - 1
            self.planes.append(
                PlaneAddresses(address, slot_bytes, layout.block_bytes, offset, part_index)
            )
        return parts

    def update_slot(self, slot: int, row: Row, config: VirtualStorage, num_blocks: int) -> None:
        """Maps the blocks of a row in its slot. If the row's last block is newly mapped, also maps
        up to `blocks_ahead` blocks after it, which have the next ids below `num_blocks`. Unless
        mappings are kept, first unmaps the whole slot if its row was replaced or became shorter.
        Raises `MemoryError`."""
        mapped_ids = self.mapped_ids[slot]
        end = row.first_block + len(row.block_ids)
        if self.versions[slot] < row.assigned_version and not config.keep_mappings:
            self._unmap(slot, 0, len(mapped_ids))
        if row.has_padding:  # padding must read as zeros
            for position, block_id in enumerate(mapped_ids[: row.first_block]):
                if block_id is not None:
                    self._unmap(slot, position, 1)
        mapped_ids += [None] * (end - len(mapped_ids))

        def run_key(block: tuple[int, int]) -> int | None:
            """Returns the difference of id and position, equal for blocks that one call maps;
            `None` if the block is mapped already."""
            position, block_id = block
            return None if mapped_ids[position] == block_id else block_id - position

        for key, blocks in itertools.groupby(enumerate(row.block_ids, row.first_block), run_key):
            if key is None:
                continue
            run = list(blocks)
            position, first_id = run[0]
            last, last_id = run[-1]
            count = last + 1 - position
            if last + 1 == end:
                num_positions = self.shape[1] // self.block_size
                num_following = min(num_positions - end, num_blocks - 1 - last_id)
                count += max(0, min(config.blocks_ahead, num_following))
            self._map(slot, position, first_id, count)
        self.versions[slot] = row.version

    def unmap_slot(self, slot: int) -> None:
        self.versions[slot] = -1  # first: an interrupt may leave some blocks mapped
        mapped_ids = self.mapped_ids[slot]
        self._unmap(slot, 0, len(mapped_ids))
        mapped_ids.clear()

    def close(self) -> None:
        """Unmaps all slots if their pages must be unmapped before they are released."""
        if not self.pages.can_map_over:
            for addresses in self.part_addresses:
                self.pages.unmap(addresses.address, addresses.size)

    def _map(
        self,
        slot: int,
        position: int,
        block_id: int,
        count: int,
    ) -> None:
        pages = self.pages
        block_ids: list[int | None] = list(range(block_id, block_id + count))
        if not pages.can_map_over:
            self._unmap(slot, position, count)
        try:
            self._record(slot, position, block_ids)
            pages.extents.check()
            for plane in self.planes:
                block_bytes = plane.block_bytes
                offset = plane.offset + block_id * block_bytes
                pages.map(plane.address_of(slot, position), offset, count * block_bytes)
        except BaseException:
            # some planes may be mapped, and others may still have blocks of an earlier row
            self._unmap(slot, position, count)
            raise

    def _unmap(self, slot: int, position: int, count: int) -> None:
        self._record(slot, position, [None] * count)  # first: an interrupt may leave some mapped
        if count:
            for plane in self.planes:
                self.pages.unmap(plane.address_of(slot, position), count * plane.block_bytes)

    def _record(self, slot: int, position: int, block_ids: list[int | None]) -> None:
        """Records that these blocks are mapped from `position` on, and counts extents."""
        mapped_ids = self.mapped_ids[slot]
        end = position + len(block_ids)
        mapped_ids += [None] * (end - len(mapped_ids))
        num_before = _count_boundaries(mapped_ids, position, end)
        mapped_ids[position:end] = block_ids
        num_added = _count_boundaries(mapped_ids, position, end) - num_before
        self._num_boundaries[0] += num_added
        self.pages.extents.add(num_added * len(self.planes))

    def borrow_view(
        self,
        is_value: bool,
        slots: range,
        first: int,
        end: int,
    ) -> Tensor:
        """Returns tokens `[first, end)` of consecutive slots as a view `(len(slots), heads, end -
        first, dim)`, which the model's own code may keep."""
        part = min(is_value, len(self.part_addresses) - 1)
        view = self.keys_and_values[is_value][slots.start : slots.stop, :, first:end]
        # over the bytes of the view only, since `torch.save` writes a tensor's whole storage
        start = view.storage_offset()
        axes = zip(view.shape, view.stride())
        last = sum((size - 1) * stride for size, stride in axes)
        num_elements = last + 1
        itemsize = view.dtype.itemsize
        addresses = self.part_addresses[part].subrange(start * itemsize, num_elements * itemsize)
        block_size = self.block_size
        positions = range(first // block_size, -(-end // block_size))
        self.borrowed_views.append(BorrowedView(weakref.ref(addresses), part, slots, positions))
        flat = addresses.tensor(view.dtype)
        return flat.as_strided(view.shape, view.stride())

    def preserve(self) -> bool:
        """Gives borrowed views that are still alive private copies of their pages, at the same
        addresses (`MemoryFile.detach`). Returns whether rows need new addresses."""
        live_views = [view for view in self.borrowed_views if view.addresses() is not None]
        for part, addresses in enumerate(self.part_addresses):
            blocks: set[tuple[int, int]] = set()  # slots and positions of mapped blocks in views
            for view in live_views:
                if view.part == part:
                    for slot in view.slots:
                        for position, block_id in enumerate(self.mapped_ids[slot]):
                            if block_id is not None and position in view.positions:
                                blocks.add((slot, position))
            planes = [plane for plane in self.planes if plane.part == part]
            if blocks:
                # set before `detach`, which may raise after it has replaced some pages
                self._needs_new_addresses = True
                starts = sorted(plane.address_of(*block) for plane in planes for block in blocks)
                self.pages.detach(addresses, starts, planes[0].block_bytes)
        if not self._needs_new_addresses:
            self.borrowed_views = []
        return self._needs_new_addresses


def _count_boundaries(mapped_ids: list[int | None], first: int, end: int) -> int:
    """Counts the boundaries between extents at positions `first` through `end`: wherever a block id
    is not one more than its predecessor, or only one of the two positions is mapped."""
    id_before_first = mapped_ids[first - 1] if first else None
    ids = [id_before_first, *mapped_ids[first : end + 1]]
    if end >= len(mapped_ids):
        ids.append(None)
    num_boundaries = 0
    for id_before, block_id in itertools.pairwise(ids):
        next_id = None if id_before is None else id_before + 1
        num_boundaries += block_id != next_id
    return num_boundaries


def _subtract_extents(extents: Extents, num_boundaries: list[int], num_planes: int) -> None:
    extents.add(-num_boundaries[0] * num_planes)
