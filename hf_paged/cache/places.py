"""The pages of one block tensor of a layer, and the places: the rows' address ranges, where they are mapped again."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .pages import PLANE_BYTES, Addresses, Backing, Extents, Pages
from .row_slots import Row


@dataclass(frozen=True)
class Planes:
    """The layout of one block tensor in planes of pages: consecutive tokens, of one head or of all heads."""

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

    @classmethod
    def fit(cls, shape: tuple[int, ...], dtype: torch.dtype, parts: int, page: int) -> Planes | None:
        """Returns a layout in which each block `(heads, block_size, width)` fills whole pages per plane, or `None`."""
        heads, block_size, width = shape
        for count, inner, own in ((heads, 1, parts), (1, heads, 1)):
            planes = cls(count, inner, width, block_size, dtype, own)
            if planes.block_bytes and not planes.block_bytes % page:
                return planes
        return None


class Region:
    """One block tensor of a layer, `(num_blocks, heads, block_size, width)`, and the places of its rows."""

    def __init__(self, pages: Pages, planes: Planes, num_blocks: int, backing: Backing | None = None) -> None:
        """Uses the pages of `backing`, by default new ones. Raises `MemoryError` without free addresses."""
        self.pages, self.planes, self.num_blocks = pages, planes, num_blocks
        if backing is None:
            size = planes.count * PLANE_BYTES
            backing = Backing(pages, pages.extend(size), size)
        self.backing = backing
        self.num_mapped = 0  # blocks
        self._addresses = addresses = pages.reserve(max(1, planes.count * num_blocks) * planes.block_bytes)
        addresses.holds = backing
        count, inner, width, size = planes.count, planes.inner, planes.width, planes.block_size
        block = size * planes.unit
        self.address = addresses.address
        self.blocks = addresses.tensor(planes.dtype).as_strided(
            (num_blocks, count * inner, size, width),
            (block, num_blocks * block if inner == 1 else width, planes.unit, 1),
        )
        self.places: Places | None = None

    def offset_of(self, plane: int, block_id: int) -> int:
        return self.backing.offset + plane * PLANE_BYTES + block_id * self.planes.block_bytes

    def back(self, num_blocks: int) -> None:
        """Maps the pages of the first `num_blocks` blocks, so that they can be written. Raises `MemoryError`."""
        size, first = self.planes.block_bytes, self.num_mapped
        if num_blocks > first:
            for plane in range(self.planes.count):
                address = self.address + (plane * self.num_blocks + first) * size
                self.pages.map(address, self.offset_of(plane, first), (num_blocks - first) * size)
            self.num_mapped = num_blocks

    def grown(self, num_blocks: int) -> Region:
        """Returns a region with the same pages at new addresses, with room for `num_blocks` blocks."""
        region = Region(self.pages, self.planes, num_blocks, self.backing)
        region.back(num_blocks if self.pages.is_sparse else self.num_mapped)
        return region

    def map_fresh(self, pages: Pages) -> None:
        """In a child process: maps other pages at the same addresses."""
        num_mapped, self.pages, self.num_mapped, self.places = self.num_mapped, pages, 0, None
        self._addresses.holds = self.backing = Backing(pages, self.backing.offset, self.backing.size)
        self.back(num_mapped)

    def close(self) -> None:
        """Returns its pages to the system. No table may hold a block."""
        size, places = self.planes.block_bytes, self.places
        if places is not None:
            places.settle()
        self.places = None
        if not self.pages.maps_over:
            if places is not None:
                self.pages.unmap(places.address, places.size)
            for plane in range(self.planes.count):
                self.pages.unmap(self.address + plane * self.num_blocks * size, self.num_mapped * size)
        self.backing.release()


@dataclass(eq=False)
class Loan:
    """A view of rows lent to the model's own code."""

    addresses: weakref.ref[Addresses]  # dead once all its tensors are freed
    part: int
    slots: range
    positions: range  # in blocks, in each slot


class Places:
    """The rows of a region: `views[part]` `(num_slots, heads, max_len, width)`. Slots and heads can be merged into one
    dimension if planes have one head."""

    def __init__(self, region: Region, num_slots: int, max_len: int) -> None:
        planes = region.planes
        self._region = weakref.ref(region)  # no cycle: pages are freed with their last user, not by the next collection
        self.num_slots, self.max_len = num_slots, max_len
        self.heads = planes.count // planes.parts  # planes per part
        self.row_bytes = max_len * planes.unit * planes.dtype.itemsize  # per plane
        addresses = region.pages.reserve(planes.count * num_slots * self.row_bytes)
        self.address, self.size = addresses.address, addresses.size
        addresses.holds = region.backing
        self._addresses = addresses
        self.views = self._views(addresses)
        self.mapped: list[list[int | None]] = [[] for _ in range(num_slots)]  # block ids of each slot, by position
        self.versions, self.owners = [0] * num_slots, [0] * num_slots
        self._num_extents = [0]
        weakref.finalize(addresses, _forget, region.pages.extents, self._num_extents).atexit = False
        self.loans: list[Loan] = []

    @property
    def region(self) -> Region:
        region = self._region()
        assert region is not None, "places are used by their region alone"
        return region

    def _views(self, addresses: Addresses) -> tuple[Tensor, ...]:
        planes = self.region.planes
        flat, row = addresses.tensor(planes.dtype), self.max_len * planes.unit
        shape = (self.num_slots, self.heads * planes.inner, self.max_len, planes.width)
        strides = (self.heads * row, row if planes.inner == 1 else planes.width, planes.unit, 1)
        step = self.num_slots * self.heads * row
        return tuple(flat.as_strided(shape, strides, part * step) for part in range(planes.parts))

    def _at(self, slot: int, plane: int) -> int:
        part, head = divmod(plane, self.heads)
        return self.address + ((part * self.num_slots + slot) * self.heads + head) * self.row_bytes

    def follow(self, slot: int, row: Row, ahead: int, keeps: bool) -> None:
        """Maps a row's blocks in a slot, and `ahead` blocks after them. Raises `MemoryError`."""
        have, want = self.mapped[slot], row.block_ids
        if self.owners[slot] != row.owner and not keeps:
            self._unmap(slot, 0, len(have))
        if row.hides:  # padding reads as zeros
            for position in range(min(row.first, len(have))):
                if have[position] is not None:
                    self._unmap(slot, position, 1)
        runs: list[list[int]] = []  # consecutive positions with consecutive block ids: position, block id, count
        for position in range(row.first, row.first + len(want)):
            block_id = want[position - row.first]
            if position < len(have) and have[position] == block_id:
                continue
            if runs and runs[-1][0] + runs[-1][2] == position and runs[-1][1] + runs[-1][2] == block_id:
                runs[-1][2] += 1
            else:
                runs.append([position, block_id, 1])
        for position, block_id, count in runs:
            if ahead and position + count == row.first + len(want):
                count += min(ahead, self._room(position + count, block_id + count))
            self._map(slot, position, block_id, count)
        self.versions[slot], self.owners[slot] = row.version, row.owner

    def _room(self, position: int, block_id: int) -> int:
        """Returns how many blocks from `block_id` on exist and fit from `position` on."""
        positions = self.max_len // self.region.planes.block_size
        return max(0, min(positions - position, self.region.num_mapped - block_id))

    def map_ahead(self, slot: int, row: Row, ahead: int) -> None:
        """Maps `ahead` blocks after those of a row, unless mapped already. Raises `MemoryError`."""
        if self.versions[slot] != row.version or not row.block_ids:
            return
        position, block_id = row.first + len(row.block_ids), row.block_ids[-1] + 1
        have = self.mapped[slot][position : position + ahead]
        same = next((i for i, found in enumerate(have) if found != block_id + i), len(have))
        count = min(ahead - same, self._room(position + same, block_id + same))
        if count > 0:
            self._map(slot, position + same, block_id + same, count)

    def drop(self, slot: int) -> None:
        """Unmaps a slot."""
        self._unmap(slot, 0, len(self.mapped[slot]))
        self.mapped[slot].clear()
        self.versions[slot] = -1

    def _map(self, slot: int, position: int, block_id: int, count: int) -> None:
        region, size = self.region, self.region.planes.block_bytes
        if not region.pages.maps_over:
            self._unmap(slot, position, count)
        try:
            self._note(slot, position, list(range(block_id, block_id + count)))
            region.pages.extents.check()
            for plane in range(region.planes.count):
                address = self._at(slot, plane) + position * size
                region.pages.map(address, region.offset_of(plane, block_id), count * size)
        except BaseException:
            self._note(slot, position, [None] * count)  # some planes may be mapped
            raise

    def _unmap(self, slot: int, position: int, count: int) -> None:
        region, size = self.region, self.region.planes.block_bytes
        for plane in range(region.planes.count) if count else ():
            region.pages.unmap(self._at(slot, plane) + position * size, count * size)
        self._note(slot, position, [None] * min(count, max(0, len(self.mapped[slot]) - position)))

    def _note(self, slot: int, position: int, found: list[int | None]) -> None:
        """Records what is mapped from `position` on, and counts extents."""
        have, end = self.mapped[slot], position + len(found)
        have += [None] * (end - len(have))
        before = _num_ends(have, position, end)
        have[position:end] = found
        more = (_num_ends(have, position, end) - before) * self.region.planes.count
        self._num_extents[0] += more
        self.region.pages.extents.add(more)

    def lend(self, part: int, slots: range, first: int, end: int) -> Tensor:
        """Returns a view of tokens `[first, end)` of consecutive slots, for the model's own code."""
        planes, view = self.region.planes, self.views[part][slots.start : slots.stop, :, first:end]
        # only what the view spans: torch saves whole storages
        start, last = view.storage_offset(), sum((n - 1) * step for n, step in zip(view.shape, view.stride()))
        lent = self._addresses.lend(start * planes.dtype.itemsize, (last + 1) * planes.dtype.itemsize)
        size = planes.block_size
        self.loans.append(Loan(weakref.ref(lent), part, slots, range(first // size, -(-end // size))))
        return lent.tensor(planes.dtype).as_strided(view.shape, view.stride())

    def settle(self) -> None:
        """Preserves lent views that are still alive: copies their content at the same addresses (`Pages.detach`); rows
        get new addresses. Call before mapping over, or writing to, blocks."""
        size, pages = self.region.planes.block_bytes, self.region.pages
        spots: dict[int, None] = {}  # addresses of mapped blocks
        for loan in self.loans:
            for slot in loan.slots if loan.addresses() is not None else ():
                have = [at for at in loan.positions if self.mapped[slot][at : at + 1] not in ([], [None])]
                for plane in range(loan.part * self.heads, (loan.part + 1) * self.heads):
                    spots.update(dict.fromkeys(self._at(slot, plane) + at * size for at in have))
        if spots:
            pages.detach(self._addresses, list(spots), size)
            self.region.places = None
        self.loans = []


def _num_ends(have: list[int | None], first: int, end: int) -> int:
    """Counts extent boundaries: positions whose block, or lack of one, does not continue the one before."""
    beside = itertools.pairwise(
        [have[first - 1] if first else None, *have[first : end + 1], *[None][: end >= len(have)]]
    )
    return sum(block_id != (None if before is None else before + 1) for before, block_id in beside)


def _forget(extents: Extents, count: list[int]) -> None:
    extents.add(-count[0])
