"""Contiguous rows in virtual memory: mappings against a model of them, on both drivers."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.reading import gather
from hf_paged.config import VirtualStorage
from hf_paged.step import StepMetadata
from hf_paged.virtual import storage as virtual
from hf_paged.virtual.mappings import PlaneLayout, Region, RowMappings
from hf_paged.virtual.pages import CudaPages, Extents, MemoryFile, Pages
from hf_paged.virtual.row_slots import BACKOFF_STEPS, RowSlots
from hf_paged.virtual.storage import MappedStorage
from tests.virtual.cuda_driver import Driver, StandInPages

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")

HEADS, DIM = 2, 8


def make_storage(
    monkeypatch: pytest.MonkeyPatch,
    pages: Pages,
    size: int,
    dims: tuple[int, int] = (DIM, DIM),
    device: str = "cpu",
    **options: Any,
) -> tuple[MappedStorage, BlockPool, KVBlocks]:
    """With one layer, of no blocks yet."""
    monkeypatch.setattr(virtual, "pages_for", lambda device, page_bytes: pages)
    pool = BlockPool()
    storage = MappedStorage(size, pool, FULL_ATTENTION, VirtualStorage(**options), lambda: None)
    states = [torch.zeros(1, HEADS, 0, dim, device=device) for dim in dims]
    return storage, pool, storage.make(0, *states)


def device_pages() -> Pages:
    pytest.importorskip("cuda.bindings")
    return CudaPages(torch.device("cuda"))


# the device, the dim and the heads of keys in a page
def file_pages() -> MemoryFile:
    """Returns pages that count mappings of their own: a process has one count, from which garbage
    of other tests may still be taken."""
    pages = MemoryFile()
    pages.extents = Extents()
    return pages


DRIVERS: dict[str, tuple[Callable[[], Pages], str, int, int]] = {
    "file": (file_pages, "cpu", DIM, 1),
    "cuda": (lambda: StandInPages(Driver(1 << 16)), "cpu", DIM, 1),
    "cuda, all heads in a plane": (lambda: StandInPages(Driver(1 << 16)), "cpu", DIM, HEADS * 2),
    "device": (device_pages, "cuda", 512, 1),
}
ON_HOST = [name for name in DRIVERS if name != "device"]


class Model:
    """Rows with one number per token, the same in all heads and dims of its keys; values are its
    negative."""

    def __init__(
        self, storage: MappedStorage, pool: BlockPool, layer: KVBlocks, size: int, seed: int
    ) -> None:
        self.storage, self.pool, self.layer, self.size = storage, pool, layer, size
        self.random, self.rows = random.Random(seed), [(BlockTable(pool, size), [])]
        self.rows: list[tuple[BlockTable, list[float]]]
        self.loans: list[tuple[Tensor, Tensor]] = []
        self.number = 0.0

    def _take(self, count: int) -> list[int]:
        if self.pool.num_available < count:
            self.storage.grow(self.pool.num_blocks + count, most=1 << 30)
            self.pool.grow(count)
            self.layer = self.storage.layers[0]
        return self.pool.allocate(count)

    def begin(self) -> None:
        self.rows.append((BlockTable(self.pool, self.size), []))

    def append(self) -> None:
        table, tokens = self.random.choice(self.rows)
        count = self.random.choice([1, 1, self.size // 2, self.size + 3])
        copy = table.append(count, self._take(table.num_needed(count)))
        if copy is not None:
            self.storage.copy_blocks([copy])
        new = [self.number + i for i in range(count)]
        self.number = (self.number + count) % (1 << 23)
        tokens += new
        end = table.num_tokens - table.first_token
        device, dim = self.layer.keys.device, self.layer.keys.shape[3]
        slots = torch.tensor([table.slots(end - count, end)], device=device)
        states = (
            torch.tensor(new, device=device)
            .view(1, 1, count, 1)
            .expand(1, HEADS, count, dim)
            .contiguous()
        )
        self.layer.store((), states, -states, slots)
        self.layer.store_signature = None

    def fork(self) -> None:
        table, tokens = self.random.choice(self.rows)
        self.rows.append((table.fork(), list(tokens)))

    def end(self) -> None:
        table, _ = self.rows.pop(self.random.randrange(len(self.rows)))
        table.free()
        if not self.rows:
            self.begin()

    def shuffle(self) -> None:
        self.random.shuffle(self.rows)

    def truncate(self) -> None:
        table, tokens = self.random.choice(self.rows)
        count = self.random.randint(table.first_token, table.num_tokens)
        table.truncate(count)
        del tokens[count:]

    def drop(self) -> None:
        table, _ = self.random.choice(self.rows)
        table.drop_before(self.random.randint(0, table.num_tokens))

    def step(self, rows: list[tuple[BlockTable, list[float]]], **fields: Any) -> StepMetadata:
        width = max(len(table.block_ids) for table, _ in rows)
        ids = [table.block_ids + [0] * (width - len(table.block_ids)) for table, _ in rows]
        lengths = [table.num_tokens - table.first_token for table, _ in rows]
        tables = torch.tensor(ids, dtype=torch.int32, device=self.layer.keys.device).view(
            len(rows), width
        )
        return StepMetadata.rectangle(tables, lengths, self.size, **fields)

    def read(self) -> None:
        """Reads some rows, each in a separate slot."""
        rows = self.random.sample(self.rows, self.random.randint(1, len(self.rows)))
        step = self.step(rows, origins=tuple(table.first_token for table, _ in rows))
        placement, keys, values, _ = self.layer.rows.place(step)
        for (table, tokens), slot, first in zip(rows, placement.slots, placement.offsets):
            expected = torch.tensor(tokens[table.first_token :], device=keys.device)
            found = keys[slot, :, first : first + len(expected)]
            assert torch.equal(found, expected.view(1, -1, 1).expand_as(found))
            assert torch.equal(values[slot, :, first : first + len(expected)], -found)

    def strided_view(self) -> None:
        """Rows of equal length as one tensor, as custom attention code gets them."""
        count = min(len(tokens) for _, tokens in self.rows)
        rows = [row for row in self.rows if row[0].first_token <= count]
        first = max((table.first_token for table, _ in rows), default=0)
        if not rows or first >= count:
            return
        origins = tuple(table.first_token for table, _ in rows)
        step = self.step(rows, origins=origins, columns=range(first, count), query_len=0)
        for is_value, blocks in enumerate((self.layer.keys, self.layer.values)):
            found = self.layer.rows.strided_view(step, bool(is_value))
            assert found is not None and torch.equal(found, gather(step, blocks, torch.float32))
            if self.random.random() < 0.2:
                self.loans.append((found, found.clone()))
        if len(self.loans) > 3:
            self.loans.pop(self.random.randrange(4))

    def check(self) -> None:
        self.pool.check_integrity([table.block_ids for table, _ in self.rows])
        mappings = self.layer.rows.mappings if self.layer.rows is not None else None
        if mappings is not None:
            assert mappings._num_boundaries[0] * len(mappings.planes) == num_extents(mappings)
        for found, expected in self.loans:
            assert torch.equal(found, expected)


def num_extents(mappings: RowMappings) -> int:
    """Number of separate contiguous mappings."""
    found = 0
    for have in mappings.mapped:
        beside = zip([None, *have], [*have, None])
        found += sum(
            new != (None if old is None else old + 1) and (old, new) != (None, None)
            for old, new in beside
        )
    return found * len(mappings.planes)


def walk(model: Model, count: int) -> None:
    for number in range(count):
        kinds = (
            [model.append] * 6
            + [model.read] * 4
            + [model.strided_view, model.shuffle, model.fork, model.truncate, model.drop]
        )
        kinds += [model.end] * (1 + len(model.rows) // 3) + [model.begin]
        model.random.choice(kinds)()
        if number % 25 == 0:
            model.check()


@pytest.mark.slow_cases(but=["device-*"])
@pytest.mark.parametrize(
    "options", [{}, {"keep_mappings": False, "blocks_ahead": 3}], ids=["kept", "ahead"]
)
@pytest.mark.parametrize("driver", [*ON_HOST, pytest.param("device", marks=pytest.mark.gpu)])
def test_rows_are_where_a_model_says(
    driver: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks(driver, options, 600, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ON_HOST)
def test_a_hundred_thousand_operations(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks(driver, {"blocks_ahead": 1}, 100_000, monkeypatch)


def walks(
    driver: str, options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, device, dim, heads = DRIVERS[driver]
    pages = make()
    size = pages.granularity // (4 * dim * heads)
    before = pages.extents.count
    storage, pool, layer = make_storage(monkeypatch, pages, size, (dim, dim), device, **options)
    model = Model(storage, pool, layer, size, seed=1)
    walk(model, count)
    assert pages.physical_bytes() > 0 and pages.extents.count > before
    for table, _ in model.rows:
        table.free()
    model.loans, model.layer = [], None  # type: ignore[assignment]
    storage.clear()
    del layer
    gc.collect()
    assert pages.physical_bytes() == 0 and pages.extents.count == before
    if isinstance(pages, StandInPages):
        assert not pages._api.broken and not pages._api.reserved and not pages._api.handles


def mapped(address: int, size: int) -> int:
    """Number of mapped regions of memory files there, as Linux counts them."""
    with open("/proc/self/maps") as file:
        lines = [line for line in file if "memfd:hf_paged" in line]
    begins = [int(line.split("-")[0], 16) for line in lines]
    return sum(address <= begin < address + size for begin in begins)


def grown(
    monkeypatch: pytest.MonkeyPatch, pages: MemoryFile, num_rows: int = 5, num_blocks: int = 7
) -> tuple[MappedStorage, list[BlockTable]]:
    """Rows that grow by a block each in turn, so that a row's blocks are scattered."""
    size = pages.granularity // (4 * DIM)
    storage, pool, _ = make_storage(monkeypatch, pages, size)
    total = num_rows * num_blocks
    storage.grow(total, most=total)
    pool.grow(total)
    tables = [BlockTable(pool, size) for _ in range(num_rows)]
    for _ in range(num_blocks):
        for table in tables:
            table.append(size, pool.allocate(1))
    return storage, tables


def step_of(tables: list[BlockTable]) -> StepMetadata:
    ids = torch.tensor([table.block_ids for table in tables], dtype=torch.int32)
    return StepMetadata.rectangle(ids, [table.num_tokens for table in tables], tables[0].block_size)


def test_extents_are_what_linux_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = file_pages()
    storage, tables = grown(monkeypatch, pages)
    rows = storage.layers[0].rows
    assert rows.place(step_of(tables)) is not None
    (addresses,) = set(rows.mappings.part_addresses)
    counts = [(mapped(addresses.address, addresses.size), num_extents(rows.mappings))]
    assert counts == [(5 * 7 * HEADS * 2, 5 * 8 * HEADS * 2)], (
        "seven runs in each row, and what is behind them"
    )
    assert pages.extents.count == sum(count for _, count in counts)


def test_idle_rows_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows fit, and each step reads five; a step of all rows but ten is gathered, and later
    ones try again."""
    pages = MemoryFile()
    pages.extents = Extents(limit=10 * 8 * HEADS * 2)
    storage, tables = grown(monkeypatch, pages, num_rows=15)
    rows = storage.layers[0].rows
    for first in (0, 5, 10, 0, 7):
        assert rows.place(step_of(tables[first : first + 5])) is not None
        assert pages.extents.count <= pages.extents.limit
    assert rows.place(step_of(tables)) is None and storage.slots._num_gathering_steps
    for _ in range(BACKOFF_STEPS):
        assert rows.place(step_of(tables[:5])) is None
    placement, *_ = rows.place(step_of(tables[:5]))
    assert placement is not None and not storage.slots._num_gathering_steps


@pytest.mark.parametrize("num_tensors", [1, 2], ids=["side by side", "in two tensors"])
@pytest.mark.parametrize("driver", ON_HOST)
def test_keys_and_values_of_different_forms(
    driver: str, num_tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other dims, or of other dtypes: views of both keep their numbers when blocks are written
    again."""
    make, _, dim, heads = DRIVERS[driver]
    pages = make()
    size = 2 * pages.granularity // (4 * dim * heads)
    before = pages.extents.count
    storage, pool, layer = make_storage(monkeypatch, pages, size, (dim, 3 * dim))
    if num_tensors == 2:
        keys = torch.zeros(1, HEADS, 0, dim)
        layer = storage.make(0, keys, keys.double())
    storage.grow(3, most=3)
    pool.grow(3)
    layer = storage.layers[0]
    assert len(layer.rows.regions) == num_tensors
    table = BlockTable(pool, size)
    table.append(2 * size + 3, pool.allocate(3))
    for blocks in (layer.keys, layer.values):  # which have room for many more
        blocks[table.block_ids] = torch.randn(3, *blocks.shape[1:], dtype=blocks.dtype)
    ids = torch.tensor([table.block_ids], dtype=torch.int32)
    columns = range(table.num_tokens)
    step = StepMetadata.rectangle(
        ids, [len(columns)], size, origins=(0,), columns=columns, query_len=0
    )
    expected = [gather(step, blocks, blocks.dtype) for blocks in (layer.keys, layer.values)]
    placed = layer.rows.place(step)
    (slot,) = placed.placement.slots
    for view, numbers in zip(placed[1:], expected):
        assert torch.equal(view[slot, :, : len(columns)], numbers[0])
    lent = [layer.rows.strided_view(step, is_value) for is_value in (False, True)]
    layer.rows.preserve_views()
    for blocks in (layer.keys, layer.values):
        blocks[table.block_ids] = 7
    for view, numbers in zip(lent, expected):
        assert view is not None and torch.equal(view, numbers)
    assert (layer.rows.place(step).values[slot, :, : len(columns)] == 7).all()
    del placed, lent, view, layer, blocks
    storage.clear()
    gc.collect()
    assert pages.physical_bytes() == 0 and pages.extents.count == before


def test_pages_go_with_their_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a garbage collection, before which other caches may have no mappings left."""
    pages = file_pages()
    gone, extents = weakref.ref(pages), pages.extents
    storage, tables = grown(monkeypatch, pages)
    before = extents.count
    assert storage.layers[0].rows.place(step_of(tables)) is not None and extents.count > before
    gc.disable()
    try:
        monkeypatch.undo()  # what makes storages holds the pages
        del storage, pages
        assert gone() is None and extents.count == before
    finally:
        gc.enable()


@pytest.mark.parametrize("is_retried", [False, True], ids=["closed", "tried again"])
def test_blocks_for_which_memory_runs_out_between_planes(is_retried: bool) -> None:
    driver = Driver(1 << 16)
    pages = StandInPages(driver)
    size = pages.granularity // (4 * DIM)
    layout = PlaneLayout(HEADS, 1, DIM, size, torch.float32, num_parts=1)
    region = Region(pages, layout, num_blocks=3, num_mapped_blocks=1)
    driver.memory = (HEADS + 2) * pages.granularity  # for both new blocks of the first plane
    with pytest.raises(MemoryError, match="cuMemCreate"):
        region.map_blocks(3)
    assert region.num_mapped == 1 and len(driver.mapped) == HEADS
    if is_retried:
        driver.memory = 3 * HEADS * pages.granularity
        region.map_blocks(3)
        region.blocks.fill_(1.0)
    region.close()
    assert not driver.broken and not driver.mapped and not driver.handles


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_a_new_row_takes_the_slot_with_the_most_blocks_that_it_needs(together: bool) -> None:
    def place(slots: RowSlots, *block_ids: int) -> int:
        ids = torch.tensor([block_ids], dtype=torch.int32)
        placement = slots.place(StepMetadata.rectangle(ids, [4 * len(block_ids)], 4), together)
        assert placement is not None
        return placement.slots[0]

    slots = RowSlots()
    held = [place(slots, *range(first, first + 4)) for first in (0, 10, 20)]
    if not together:  # else a row that begins takes the last one's slot
        assert len(set(held)) == 3
        assert place(slots, 10, 11, 30) == held[1], "two of its blocks"
        assert place(slots, 0, 1) == held[0] and place(slots, 20, 21, 22, 40) == held[2]
    assert place(slots, 10, 11, 30, 13) == place(slots, 10, 11), "blocks of the earlier row, too"
    other = RowSlots(keeps_mappings=False)
    first = place(other, 1, 2, 3)
    assigned_version = other.rows[first].assigned_version
    assert (
        place(other, 1, 2, 3, 4) == first and other.rows[first].assigned_version == assigned_version
    ), "the row goes on"
    other._slot_by_last_block.clear()
    if not together:
        assert place(other, 1, 2) != first, "nothing is kept there"
