"""The pages of one tensor of a layer, and the places of rows into which they are mapped a second time."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .pages import PLANE_BYTES, Addresses, Extents, Pages
from .row_slots import Row


@dataclass(frozen=True)
class Planes:
    """How one tensor of a layer's blocks lies in planes of pages: tokens side by side, of one head or of all."""

    count: int
    inner: int  # heads side by side in each token of a plane
    width: int  # numbers of a head
    block_size: int
    dtype: torch.dtype
    parts: int  # keys and values lie in one tensor of blocks, and apart in rows

    @property
    def unit(self) -> int:
        """Numbers of a token in a plane."""
        return self.inner * self.width

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.unit * self.dtype.itemsize

    @classmethod
    def fit(cls, shape: tuple[int, ...], dtype: torch.dtype, parts: int, page: int) -> Planes | None:
        """For blocks `(heads, block_size, width)`, each of which fills whole pages in each plane; `None` if none do."""
        heads, block_size, width = shape
        for count, inner, own in ((heads, 1, parts), (1, heads, 1)):
            planes = cls(count, inner, width, block_size, dtype, own)
            if planes.block_bytes and not planes.block_bytes % page:
                return planes
        return None


class Region:
    """One tensor of a layer's blocks, `(num_blocks, heads, block_size, width)`, and the places of its rows."""

    def __init__(self, pages: Pages, planes: Planes, num_blocks: int, offset: int | None = None) -> None:
        """Its pages are those from `offset` on, by default new ones. Raises `MemoryError` where there are no
        addresses."""
        self.pages, self.planes, self.num_blocks = pages, planes, num_blocks
        self.offset = pages.extend(planes.count * PLANE_BYTES) if offset is None else offset
        self.num_mapped = 0  # blocks
        addresses = pages.reserve(max(1, planes.count * num_blocks) * planes.block_bytes)
        count, inner, width, size = planes.count, planes.inner, planes.width, planes.block_size
        block = size * planes.unit
        self.address = addresses.address
        self.blocks = addresses.tensor(planes.dtype).as_strided(
            (num_blocks, count * inner, size, width),
            (block, num_blocks * block if inner == 1 else width, planes.unit, 1),
        )
        self.places: Places | None = None

    def offset_of(self, plane: int, block_id: int) -> int:
        return self.offset + plane * PLANE_BYTES + block_id * self.planes.block_bytes

    def back(self, num_blocks: int) -> None:
        """So many blocks may be written to: their pages are mapped. Raises `MemoryError`."""
        size, first = self.planes.block_bytes, self.num_mapped
        if num_blocks > first:
            for plane in range(self.planes.count):
                address = self.address + (plane * self.num_blocks + first) * size
                self.pages.map(address, self.offset_of(plane, first), (num_blocks - first) * size)
            self.num_mapped = num_blocks

    def grown(self, num_blocks: int) -> Region:
        """The same pages at other addresses, where there is room for `num_blocks` blocks."""
        region = Region(self.pages, self.planes, num_blocks, self.offset)
        region.back(num_blocks if self.pages.is_sparse else self.num_mapped)
        return region

    def map_fresh(self, pages: Pages) -> None:
        """In a child process: other pages at the same addresses."""
        num_mapped, self.pages, self.num_mapped, self.places = self.num_mapped, pages, 0, None
        self.back(num_mapped)

    def close(self) -> None:
        """Its pages go back to the system. No table holds a block."""
        size, places = self.planes.block_bytes, self.places
        if places is not None:
            places.settle()
        self.places = None
        if not self.pages.maps_over:
            if places is not None:
                self.pages.unmap(places.address, places.size)
            for plane in range(self.planes.count):
                self.pages.unmap(self.address + plane * self.num_blocks * size, self.num_mapped * size)
        self.pages.release(self.offset, self.planes.count * PLANE_BYTES)


@dataclass(eq=False)
class Loan:
    """A view of rows that code of a model's own has been given."""

    addresses: weakref.ref[Addresses]  # dead with the last tensor of it
    part: int
    slots: range
    positions: range  # blocks in each slot


class Places:
    """Where rows of a region are: `views[part]` `(num_slots, heads, max_len, width)`, of which rows and heads merge
    into one dimension where planes are of one head."""

    def __init__(self, region: Region, num_slots: int, max_len: int) -> None:
        planes = region.planes
        self.region, self.num_slots, self.max_len = region, num_slots, max_len
        self.heads = planes.count // planes.parts  # planes of a part
        self.row_bytes = max_len * planes.unit * planes.dtype.itemsize  # of a plane
        addresses = region.pages.reserve(planes.count * num_slots * self.row_bytes)
        self.address, self.size = addresses.address, addresses.size
        self._addresses = addresses
        self.views = self._views(addresses)
        self.mapped: list[list[int | None]] = [[] for _ in range(num_slots)]  # blocks of each slot, by position
        self.versions, self.owners = [0] * num_slots, [0] * num_slots
        self._num_extents = [0]
        weakref.finalize(addresses, _forget, region.pages.extents, self._num_extents).atexit = False
        self.seen = -1  # changes of the books that were made here
        self.loans: list[Loan] = []

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
        """Maps what is to be in a slot, and `ahead` blocks behind it. Raises `MemoryError`."""
        have, want = self.mapped[slot], row.block_ids
        if self.owners[slot] != row.owner and not keeps:
            self._unmap(slot, 0, len(have))
        if row.hides:  # padding reads as zeros
            for position in range(min(row.first, len(have))):
                if have[position] is not None:
                    self._unmap(slot, position, 1)
        runs: list[list[int]] = []  # neighbours in the row and among blocks: position, block, how many
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
        """How many blocks from this one on there are, and can be mapped from that position on."""
        positions = self.max_len // self.region.planes.block_size
        return max(0, min(positions - position, self.region.num_mapped - block_id))

    def map_ahead(self, slot: int, row: Row, ahead: int) -> None:
        """Maps `ahead` blocks behind those of a row, as far as they are not. Raises `MemoryError`."""
        if self.versions[slot] != row.version or not row.block_ids:
            return
        position, block_id = row.first + len(row.block_ids), row.block_ids[-1] + 1
        have = self.mapped[slot][position : position + ahead]
        same = next((i for i, found in enumerate(have) if found != block_id + i), len(have))
        count = min(ahead - same, self._room(position + same, block_id + same))
        if count > 0:
            self._map(slot, position + same, block_id + same, count)

    def drop(self, slot: int) -> None:
        """Nothing is mapped in a slot any more."""
        self._unmap(slot, 0, len(self.mapped[slot]))
        self.mapped[slot].clear()
        self.versions[slot] = -1

    def _map(self, slot: int, position: int, block_id: int, count: int) -> None:
        region, size = self.region, self.region.planes.block_bytes
        if not region.pages.maps_over:
            self._unmap(slot, position, count)
        self._note(slot, position, list(range(block_id, block_id + count)))
        try:
            region.pages.extents.check()
            for plane in range(region.planes.count):
                address = self._at(slot, plane) + position * size
                region.pages.map(address, region.offset_of(plane, block_id), count * size)
        except BaseException:
            self._note(slot, position, [None] * count)  # some planes are mapped, perhaps
            raise

    def _unmap(self, slot: int, position: int, count: int) -> None:
        region, size = self.region, self.region.planes.block_bytes
        for plane in range(region.planes.count) if count else ():
            region.pages.unmap(self._at(slot, plane) + position * size, count * size)
        self._note(slot, position, [None] * min(count, max(0, len(self.mapped[slot]) - position)))

    def _note(self, slot: int, position: int, found: list[int | None]) -> None:
        """Books what is mapped from a position on, and counts extents."""
        have, end = self.mapped[slot], position + len(found)
        have += [None] * (end - len(have))
        before = _num_ends(have, position, end)
        have[position:end] = found
        more = (_num_ends(have, position, end) - before) * self.region.planes.count
        self._num_extents[0] += more
        self.region.pages.extents.add(more)

    def lend(self, part: int, slots: range, first: int, end: int) -> Tensor:
        """Tokens `[first, end)` of neighbouring slots, for code that is not ours."""
        lent = self._addresses.lend()
        size = self.region.planes.block_size
        self.loans.append(Loan(weakref.ref(lent), part, slots, range(first // size, -(-end // size))))
        return self._views(lent)[part][slots.start : slots.stop, :, first:end]

    def settle(self) -> None:
        """Views that outlived their step keep what they show: it is copied to pages of their own, and rows get other
        addresses. To be called before anything is mapped over, or written."""
        size, pages = self.region.planes.block_bytes, self.region.pages
        spots: dict[int, None] = {}  # addresses of blocks, as far as any are mapped
        for loan in self.loans:
            for slot in loan.slots if loan.addresses() is not None else ():
                have = [at for at in loan.positions if self.mapped[slot][at : at + 1] not in ([], [None])]
                for plane in range(loan.part * self.heads, (loan.part + 1) * self.heads):
                    spots.update(dict.fromkeys(self._at(slot, plane) + at * size for at in have))
        if spots:
            total = len(spots) * size
            offset, copies = pages.extend(total), pages.reserve(total)
            pages.map(copies.address, offset, total)
            target, source = copies.tensor(torch.uint8).view(-1, size), self._addresses.tensor(torch.uint8)
            for number, spot in enumerate(spots):
                target[number] = source[spot - self.address :][:size]
                if not pages.maps_over:
                    pages.unmap(spot, size)
                pages.map(spot, offset + number * size, size)
            # with the last of the views
            weakref.finalize(self._addresses, _drop, pages, list(spots), size, offset).atexit = False
            self.region.places = None
        self.loans = []


def _num_ends(have: list[int | None], first: int, end: int) -> int:
    """Of extents: where a block, or none, is behind something that it does not follow."""
    beside = itertools.pairwise(
        [have[first - 1] if first else None, *have[first : end + 1], *[None][: end >= len(have)]]
    )
    return sum(block_id != (None if before is None else before + 1) for before, block_id in beside)


def _forget(extents: Extents, count: list[int]) -> None:
    extents.add(-count[0])


def _drop(pages: Pages, spots: list[int], size: int, offset: int) -> None:
    for spot in () if pages.maps_over else spots:
        pages.unmap(spot, size)
    pages.release(offset, len(spots) * size)
