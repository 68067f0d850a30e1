"""Maps the pages of a layer's block tensors at the blocks' addresses, and a second time in the
address ranges of its rows. Leaves which row goes where to `row_slots.py`."""

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
class Planes:
    """The layout of one block tensor in planes of pages, each with consecutive tokens of one head,
    or of all heads."""

    count: int
    inner: int  # heads per token of a plane
    width: int  # head dim
    block_size: int
    dtype: torch.dtype
    parts: int  # 2 if one block tensor has both keys and values, which rows separate; else 1

    @property
    def unit(self) -> int:
        """Elements per token in a plane."""
        return self.inner * self.width

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.unit * self.dtype.itemsize

    @classmethod
    def fit(
        cls,
        blocks: Tensor,
        parts: int,
        page: int,
    ) -> Planes | None:
        """Returns a layout in which every one of the blocks `(n, heads, block_size, width)` fills
        whole pages in each plane, or `None`."""
        _, heads, block_size, width = blocks.shape
        of_one_head = cls(heads, 1, width, block_size, blocks.dtype, parts)
        of_all_heads = cls(1, heads, width, block_size, blocks.dtype, 1)
        for planes in (of_one_head, of_all_heads):
            block_bytes = planes.block_bytes
            if block_bytes and block_bytes % page == 0:
                return planes
        return None


class Region:
    """One block tensor of a layer, `(num_blocks, heads, block_size, width)`."""

    def __init__(
        self,
        pages: Pages,
        planes: Planes,
        num_blocks: int,
        num_backed: int,
        backing: Backing | None = None,
    ) -> None:
        """Uses the pages of `backing`, by default new ones, and maps those of `num_backed` blocks,
        or of all blocks if that takes no memory. Raises `MemoryError` without free addresses."""
        self.pages = pages
        self.planes = planes
        self.num_blocks = num_blocks
        if backing is None:
            size = planes.count * PLANE_BYTES
            offset = pages.extend(size)
            backing = Backing(pages, offset, size)
        self.backing = backing
        self.num_mapped = 0  # blocks
        num_units = max(1, planes.count * num_blocks)
        addresses = pages.reserve(num_units * planes.block_bytes)
        self._addresses = addresses
        addresses.backing = backing
        self.address = addresses.address
        heads = planes.count * planes.inner
        width = planes.width
        size = planes.block_size
        block_step = size * planes.unit
        head_step = num_blocks * block_step if planes.inner == 1 else width
        flat = addresses.tensor(planes.dtype)
        self.blocks = flat.as_strided(
            (num_blocks, heads, size, width),
            (block_step, head_step, planes.unit, 1),
        )
        self.back(num_blocks if pages.is_sparse else num_backed)

    def offset_of(self, plane: int, block_id: int) -> int:
        plane_offset = self.backing.offset + plane * PLANE_BYTES
        return plane_offset + block_id * self.planes.block_bytes

    def back(self, num_blocks: int) -> None:
        """Maps the pages of the first `num_blocks` blocks, so that these can be written. Raises
        `MemoryError`."""
        size = self.planes.block_bytes
        first = self.num_mapped
        num_new = num_blocks - first
        if num_new > 0:
            for plane in range(self.planes.count):
                first_row = plane * self.num_blocks + first
                address = self.address + first_row * size
                self.pages.map(address, self.offset_of(plane, first), num_new * size)
            self.num_mapped = num_blocks

    def grown(self, num_blocks: int) -> Region:
        """Returns a region that has the same pages at new addresses, enough for `num_blocks`
        blocks."""
        return Region(self.pages, self.planes, num_blocks, self.num_mapped, self.backing)

    def remap(self, pages: Pages) -> None:
        """In a child process, maps other pages at the same addresses."""
        num_mapped = self.num_mapped
        self.pages, self.num_mapped = pages, 0
        self._addresses.backing = self.backing = Backing(
            pages, self.backing.offset, self.backing.size
        )
        self.back(num_mapped)

    def close(self) -> None:
        """Returns the pages to the system. No table may hold a block."""
        size = self.planes.block_bytes
        if not self.pages.maps_over:
            for plane in range(self.planes.count):
                address = self.address + plane * self.num_blocks * size
                self.pages.unmap(address, self.num_mapped * size)
        self.backing.release()


class RowsOfPlane(NamedTuple):
    """The addresses of the rows of one plane, one row per slot."""

    address: int  # of the first slot
    slot_bytes: int
    block_bytes: int
    offset: int  # of the page of block 0
    part: int  # index of the view that the plane belongs to

    def at(self, slot: int, position: int) -> int:
        return self.address + slot * self.slot_bytes + position * self.block_bytes


class BorrowedView(NamedTuple):
    """A view of rows that the model's own code may still hold."""

    addresses: weakref.ref[Addresses]  # dead once all tensors of the view are freed
    part: int
    slots: range
    positions: range  # in blocks, in every slot


class RowMappings:
    """The rows of a layer. `pair`: keys and values `(num_slots, heads, max_len, width)`, as views
    of one part each, or of one part with both. Slots and heads can be merged into one dimension if
    planes have one head."""

    def __init__(
        self,
        regions: Sequence[Region],
        form: tuple[Any, ...],
        num_slots: int,
        max_len: int,
    ) -> None:
        """`form`: the `KVBlocks.form` of the layer's blocks."""
        self.shape = (num_slots, max_len)
        self.pages = regions[0].pages
        self.block_size = regions[0].planes.block_size
        # block ids of each slot, by position
        self.mapped: list[list[int | None]] = [[] for _ in range(num_slots)]
        self.versions = [0] * num_slots
        self.borrowed: list[BorrowedView] = []
        self._num_ends = [0]  # extents per plane
        self._must_move = False  # whether rows need new addresses
        self.planes: list[RowsOfPlane] = []
        self.ranges: list[Addresses] = []  # by part; parts of one region share a range
        views: list[Tensor] = []
        for region in regions:
            views += self._reserve(region)
        both = KVBlocks.view(tuple(views), *form)
        self.pair = (both.keys, both.values)

    def _reserve(self, region: Region) -> list[Tensor]:
        """Reserves addresses for the planes of a region; returns the view of each part."""
        # holds no reference to the region: a cycle would free pages at the next collection instead
        # of with their last user
        planes = region.planes
        num_slots, max_len = self.shape
        heads = planes.count // planes.parts  # planes per part
        row = max_len * planes.unit
        row_bytes = row * planes.dtype.itemsize  # per plane
        addresses = self.pages.reserve(planes.count * num_slots * row_bytes)
        addresses.backing = region.backing
        when_freed(addresses, _forget, self.pages.extents, self._num_ends, planes.count)
        flat = addresses.tensor(planes.dtype)
        head_step = row if planes.inner == 1 else planes.width
        shape = (num_slots, heads * planes.inner, max_len, planes.width)
        strides = (heads * row, head_step, planes.unit, 1)
        views = []
        for plane in range(planes.count):
            part, head = divmod(plane, heads)
            first_row = part * num_slots * heads + head
            if not head:
                views.append(flat.as_strided(shape, strides, first_row * row))
                self.ranges.append(addresses)
            address = addresses.address + first_row * row_bytes
            offset = region.offset_of(plane, 0)
            number = len(self.ranges) - 1
            rows = RowsOfPlane(address, heads * row_bytes, planes.block_bytes, offset, number)
            self.planes.append(rows)
        return views

    def follow(self, slot: int, row: Row, config: VirtualStorage, num_blocks: int) -> None:
        """Maps a row's blocks in a slot, and up to `blocks_ahead` blocks after them, as far as the
        layer has them (`num_blocks`). Raises `MemoryError`."""
        mapped = self.mapped[slot]
        end = row.first + len(row.block_ids)
        if self.versions[slot] < row.first_version and not config.keep_mappings:
            self._unmap(slot, 0, len(mapped))
        if row.has_padding:  # padding reads as zeros
            for position, block_id in enumerate(mapped[: row.first]):
                if block_id is not None:
                    self._unmap(slot, position, 1)
        mapped += [None] * (end - len(mapped))

        def distance(block: tuple[int, int]) -> int | None:
            """Equal for blocks that one call maps, since their ids are as consecutive as their
            positions; `None` if a block is mapped already."""
            position, block_id = block
            return None if mapped[position] == block_id else block_id - position

        for shift, members in itertools.groupby(enumerate(row.block_ids, row.first), distance):
            if shift is None:
                continue
            run = list(members)
            position, first_id = run[0]
            last, last_id = run[-1]
            count = last + 1 - position
            if last + 1 == end:
                num_positions = self.shape[1] // self.block_size
                num_following = min(num_positions - end, num_blocks - 1 - last_id)
                count += max(0, min(config.blocks_ahead, num_following))
            self._map(slot, position, first_id, count)
        self.versions[slot] = row.version

    def drop(self, slot: int) -> None:
        """Unmaps a slot."""
        mapped = self.mapped[slot]
        self._unmap(slot, 0, len(mapped))
        mapped.clear()
        self.versions[slot] = -1

    def close(self) -> None:
        """Unmaps all slots, if mapped pages cannot be released."""
        if not self.pages.maps_over:
            for addresses in self.ranges:
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
        if not pages.maps_over:
            self._unmap(slot, position, count)
        try:
            self._record(slot, position, block_ids)
            pages.extents.check()
            for plane in self.planes:
                size = plane.block_bytes
                pages.map(plane.at(slot, position), plane.offset + block_id * size, count * size)
        except BaseException:
            self._record(slot, position, [None] * count)  # some planes may be mapped
            raise

    def _unmap(self, slot: int, position: int, count: int) -> None:
        if count:
            for plane in self.planes:
                self.pages.unmap(plane.at(slot, position), count * plane.block_bytes)
        self._record(slot, position, [None] * count)

    def _record(self, slot: int, position: int, block_ids: list[int | None]) -> None:
        """Records which blocks are mapped from `position` on, and counts extents."""
        mapped = self.mapped[slot]
        end = position + len(block_ids)
        mapped += [None] * (end - len(mapped))
        before = _num_ends(mapped, position, end)
        mapped[position:end] = block_ids
        num_added = _num_ends(mapped, position, end) - before
        self._num_ends[0] += num_added
        self.pages.extents.add(num_added * len(self.planes))

    def lend(
        self,
        is_value: bool,
        slots: range,
        first: int,
        end: int,
    ) -> Tensor:
        """Returns a view of tokens `[first, end)` of consecutive slots, for the model's own
        code."""
        part = min(is_value, len(self.ranges) - 1)
        view = self.pair[is_value][slots.start : slots.stop, :, first:end]
        # limited to the bytes that the view spans, since torch saves whole storages
        start = view.storage_offset()
        axes = zip(view.shape, view.stride())
        last = sum((size - 1) * step for size, step in axes)
        num_spanned = last + 1
        itemsize = view.dtype.itemsize
        addresses = self.ranges[part].subrange(start * itemsize, num_spanned * itemsize)
        size = self.block_size
        positions = range(first // size, -(-end // size))
        self.borrowed.append(BorrowedView(weakref.ref(addresses), part, slots, positions))
        flat = addresses.tensor(view.dtype)
        return flat.as_strided(view.shape, view.stride())

    def preserve(self) -> bool:
        """Copies the content of borrowed views that are still alive, at the same addresses
        (`Pages.detach`). Returns whether rows must get new addresses."""
        alive = [view for view in self.borrowed if view.addresses() is not None]
        for part, addresses in enumerate(self.ranges):
            blocks: set[tuple[int, int]] = set()  # the mapped ones, by slot and position
            for view in alive:
                if view.part == part:
                    for slot in view.slots:
                        for position, block_id in enumerate(self.mapped[slot]):
                            if block_id is not None and position in view.positions:
                                blocks.add((slot, position))
            planes = [plane for plane in self.planes if plane.part == part]
            if blocks:
                # before `detach`, which may raise with some pages copied
                self._must_move = True
                starts = sorted(plane.at(*block) for plane in planes for block in blocks)
                self.pages.detach(addresses, starts, planes[0].block_bytes)
        if not self._must_move:
            self.borrowed = []
        return self._must_move


def _num_ends(mapped: list[int | None], first: int, end: int) -> int:
    """Counts the ends of extents: positions whose block, or lack of one, does not continue that of
    the position before."""
    before_first = mapped[first - 1] if first else None
    ids = [before_first, *mapped[first : end + 1]]
    if end >= len(mapped):
        ids.append(None)
    num_ends = 0
    for before, block_id in itertools.pairwise(ids):
        expected = None if before is None else before + 1
        num_ends += block_id != expected
    return num_ends


def _forget(extents: Extents, num_ends: list[int], num_planes: int) -> None:
    extents.add(-num_ends[0] * num_planes)
