"""The pages of one block tensor of a layer, and the places: the rows' address ranges, where they
are mapped again."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import VirtualStorage
from .pages import PLANE_BYTES, Addresses, Backing, Extents, Pages, when_freed
from .row_slots import Placement, Row, RowSlots


@dataclass(frozen=True)
class Planes:
    """The layout of one block tensor in planes of pages: consecutive tokens, of one head or of all
    heads."""

    count: int
    inner: int  # heads per token of a plane
    width: int  # head dim
    block_size: int
    dtype: torch.dtype
    parts: int  # 2 if one block tensor has keys and values, which are separate in rows; else 1

    @property
    def unit(self) -> int:
        """Elements per token in a plane."""
        return self.inner * self.width

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.unit * self.dtype.itemsize

    def offset(self, plane: int, block_id: int) -> int:
        """Returns where a block's page begins, in bytes after the first block's in plane 0."""
        return plane * PLANE_BYTES + block_id * self.block_bytes

    @classmethod
    def fit(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: int,
        page: int,
    ) -> Planes | None:
        """Returns a layout in which each block `(heads, block_size, width)` fills whole pages per
        plane, or `None`."""
        heads, block_size, width = shape
        of_one_head = cls(heads, 1, width, block_size, dtype, parts)
        of_all_heads = cls(1, heads, width, block_size, dtype, 1)
        for planes in (of_one_head, of_all_heads):
            block_bytes = planes.block_bytes
            if block_bytes and block_bytes % page == 0:
                return planes
        return None


class Region:
    """One block tensor of a layer, `(num_blocks, heads, block_size, width)`, and the places of its
    rows."""

    def __init__(
        self,
        pages: Pages,
        planes: Planes,
        num_blocks: int,
        num_backed: int,
        backing: Backing | None = None,
    ) -> None:
        """Uses the pages of `backing`, by default new ones, and maps those of `num_backed` blocks,
        of all if that takes no memory. Raises `MemoryError` without free addresses."""
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
        addresses.holds = backing
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
        self.places: Places | None = None
        self.back(num_blocks if pages.is_sparse else num_backed)

    def back(self, num_blocks: int) -> None:
        """Maps the pages of the first `num_blocks` blocks, so that they can be written. Raises
        `MemoryError`."""
        size = self.planes.block_bytes
        first = self.num_mapped
        num_new = num_blocks - first
        if num_new > 0:
            for plane in range(self.planes.count):
                first_row = plane * self.num_blocks + first
                address = self.address + first_row * size
                offset = self.backing.offset + self.planes.offset(plane, first)
                self.pages.map(address, offset, num_new * size)
            self.num_mapped = num_blocks

    def grown(self, num_blocks: int) -> Region:
        """Returns a region with the same pages at new addresses, with room for `num_blocks`
        blocks."""
        return Region(self.pages, self.planes, num_blocks, self.num_mapped, self.backing)

    def follow(self, placement: Placement, slots: RowSlots, config: VirtualStorage) -> Places:
        """Maps what is not mapped yet of the placed rows. Raises `MemoryError`."""
        shape = (slots.num_slots, slots.max_len)
        stale = placement.slots
        if self.places is not None and self.places.shape == shape:
            versions = self.places.versions
            rows = slots.rows
            stale = [slot for slot in stale if versions[slot] != rows[slot].version]
            if not stale:
                return self.places
        self.settle()
        if self.places is not None and self.places.shape != shape:
            self.places = None
        if self.places is None:
            self.places = Places(self, *shape)
            stale = placement.slots
        for slot in stale:
            self.places.follow(slot, slots.rows[slot], config, self.num_mapped)
        return self.places

    def settle(self) -> None:
        """Preserves lent views that are still alive. Call before mapping over, or writing to,
        blocks."""
        if self.places is not None and self.places.preserve():
            self.places = None

    def drop(self, slots: Sequence[int]) -> None:
        """Unmaps these slots."""
        self.settle()
        for slot in slots:
            if self.places is not None and slot < self.places.shape[0]:
                self.places.drop(slot)

    def map_fresh(self, pages: Pages) -> None:
        """In a child process: maps other pages at the same addresses."""
        num_mapped = self.num_mapped
        self.pages, self.num_mapped, self.places = pages, 0, None
        self._addresses.holds = self.backing = Backing(
            pages, self.backing.offset, self.backing.size
        )
        self.back(num_mapped)

    def close(self) -> None:
        """Returns its pages to the system. No table may hold a block."""
        size = self.planes.block_bytes
        plane_size = self.num_blocks * size
        places = self.places
        self.settle()
        self.places = None
        if not self.pages.maps_over:
            if places is not None:
                self.pages.unmap(places.address, places.size)
            for plane in range(self.planes.count):
                address = self.address + plane * plane_size
                self.pages.unmap(address, self.num_mapped * size)
        self.backing.release()


@dataclass(eq=False)
class Loan:
    """A view of rows lent to the model's own code."""

    addresses: weakref.ref[Addresses]  # dead once all its tensors are freed
    part: int
    slots: range
    positions: range  # in blocks, in each slot


class Places:
    """The rows of a region: `views[part]` `(num_slots, heads, max_len, width)`. Slots and heads can
    be merged into one dimension if planes have one head."""

    def __init__(self, region: Region, num_slots: int, max_len: int) -> None:
        # not the region, for no cycle: pages are freed with their last user, not by the next
        # collection
        self.planes = planes = region.planes
        self.pages = region.pages
        self._first_offset = region.backing.offset
        self.shape = (num_slots, max_len)
        self.heads = planes.count // planes.parts  # planes per part
        token_bytes = planes.unit * planes.dtype.itemsize
        self.row_bytes = max_len * token_bytes  # per plane
        num_rows = planes.count * num_slots
        addresses = self.pages.reserve(num_rows * self.row_bytes)
        self.address = addresses.address
        self.size = addresses.size
        addresses.holds = region.backing
        self._addresses = addresses
        self.views = self._views(addresses)
        # block ids of each slot, by position
        self.mapped: list[list[int | None]] = [[] for _ in range(num_slots)]
        self.versions = [0] * num_slots
        self.owners = [0] * num_slots
        self._num_extents = [0]
        when_freed(addresses, _forget, self.pages.extents, self._num_extents)
        self.loans: list[Loan] = []
        self._is_left = False  # rows must get new addresses

    def _views(self, addresses: Addresses) -> tuple[Tensor, ...]:
        planes = self.planes
        num_slots, max_len = self.shape
        flat = addresses.tensor(planes.dtype)
        row = max_len * planes.unit
        slot_step = self.heads * row
        head_step = row if planes.inner == 1 else planes.width
        heads = self.heads * planes.inner
        shape = (num_slots, heads, max_len, planes.width)
        strides = (slot_step, head_step, planes.unit, 1)
        part_step = num_slots * slot_step
        offsets = (part * part_step for part in range(planes.parts))
        return tuple(flat.as_strided(shape, strides, offset) for offset in offsets)

    def _spots(self, slot: int, position: int) -> list[int]:
        """Returns the address of a block's position in each plane."""
        num_slots, _ = self.shape
        first = self.address + position * self.planes.block_bytes
        spots = []
        for part in range(self.planes.parts):
            row = (part * num_slots + slot) * self.heads
            spots += [first + (row + head) * self.row_bytes for head in range(self.heads)]
        return spots

    def follow(self, slot: int, row: Row, config: VirtualStorage, num_blocks: int) -> None:
        """Maps a row's blocks in a slot, and `blocks_ahead` blocks after them, if there are as many
        of `num_blocks`. Raises `MemoryError`."""
        have = self.mapped[slot]
        want = row.block_ids
        end = row.first + len(want)
        if self.owners[slot] != row.owner and not config.keep_mappings:
            self._unmap(slot, 0, len(have))
        if row.hides:  # padding reads as zeros
            for position, block_id in enumerate(have[: row.first]):
                if block_id is not None:
                    self._unmap(slot, position, 1)
        have += [None] * (end - len(have))
        position = row.first
        while position < end:
            # consecutive positions with consecutive block ids are mapped at once
            first_id = want[position - row.first]
            count = 0
            while position + count < end:
                block_id = want[position + count - row.first]
                if block_id != first_id + count or block_id == have[position + count]:
                    break
                count += 1
            if not count:  # mapped already
                position += 1
                continue
            num_mapped = count
            if position + count == end:
                num_positions = self.shape[1] // self.planes.block_size
                room = min(num_positions - end, num_blocks - (first_id + count))
                num_mapped += max(0, min(config.blocks_ahead, room))
            self._map(slot, position, first_id, num_mapped)
            position += count
        self.versions[slot], self.owners[slot] = row.version, row.owner

    def drop(self, slot: int) -> None:
        """Unmaps a slot."""
        have = self.mapped[slot]
        self._unmap(slot, 0, len(have))
        have.clear()
        self.versions[slot] = -1

    def _map(
        self,
        slot: int,
        position: int,
        block_id: int,
        count: int,
    ) -> None:
        pages = self.pages
        size = self.planes.block_bytes
        block_ids: list[int | None] = list(range(block_id, block_id + count))
        if not pages.maps_over:
            self._unmap(slot, position, count)
        try:
            self._note(slot, position, block_ids)
            pages.extents.check()
            for plane, address in enumerate(self._spots(slot, position)):
                offset = self._first_offset + self.planes.offset(plane, block_id)
                pages.map(address, offset, count * size)
        except BaseException:
            self._note(slot, position, [None] * count)  # some planes may be mapped
            raise

    def _unmap(self, slot: int, position: int, count: int) -> None:
        if count:
            for address in self._spots(slot, position):
                self.pages.unmap(address, count * self.planes.block_bytes)
        self._note(slot, position, [None] * count)

    def _note(self, slot: int, position: int, block_ids: list[int | None]) -> None:
        """Records what is mapped from `position` on, and counts extents."""
        have = self.mapped[slot]
        end = position + len(block_ids)
        have += [None] * (end - len(have))
        before = _num_ends(have, position, end)
        have[position:end] = block_ids
        more = (_num_ends(have, position, end) - before) * self.planes.count
        self._num_extents[0] += more
        self.pages.extents.add(more)

    def lend(
        self,
        part: int,
        slots: range,
        first: int,
        end: int,
    ) -> Tensor:
        """Returns a view of tokens `[first, end)` of consecutive slots, for the model's own
        code."""
        planes = self.planes
        rows = self.views[part]
        view = rows[slots.start : slots.stop, :, first:end]
        # only what the view spans: torch saves whole storages
        start = view.storage_offset()
        axes = zip(view.shape, view.stride())
        last = sum((size - 1) * step for size, step in axes)
        num_spanned = last + 1
        itemsize = planes.dtype.itemsize
        lent = self._addresses.lend(start * itemsize, num_spanned * itemsize)
        size = planes.block_size
        positions = range(first // size, -(-end // size))
        addresses = weakref.ref(lent)
        loan = Loan(addresses, part, slots, positions)
        self.loans.append(loan)
        flat = lent.tensor(planes.dtype)
        return flat.as_strided(view.shape, view.stride())

    def preserve(self) -> bool:
        """Copies the content of lent views that are still alive, at the same addresses
        (`Pages.detach`). Returns whether rows must get new addresses."""
        spots: set[int] = set()  # addresses of mapped blocks
        for loan in self.loans:
            if loan.addresses() is None:
                continue
            first_plane = loan.part * self.heads
            planes = slice(first_plane, first_plane + self.heads)
            for slot in loan.slots:
                have = self.mapped[slot]
                for position in loan.positions:
                    if position < len(have) and have[position] is not None:
                        spots.update(self._spots(slot, position)[planes])
        if spots:
            # whatever is raised: some pages may be copies then
            self._is_left = True
            self.pages.detach(self._addresses, sorted(spots), self.planes.block_bytes)
        self.loans = []
        return self._is_left


def _num_ends(have: list[int | None], first: int, end: int) -> int:
    """Counts extent boundaries: positions whose block, or lack of one, does not continue the one
    before."""
    before_first = have[first - 1] if first else None
    ids = [before_first, *have[first : end + 1]]
    if end >= len(have):
        ids.append(None)
    num_ends = 0
    for before, block_id in itertools.pairwise(ids):
        expected = None if before is None else before + 1
        num_ends += block_id != expected
    return num_ends


def _forget(extents: Extents, count: list[int]) -> None:
    extents.add(-count[0])
