"""Contiguous rows in virtual memory: mappings against a model of them, on both drivers."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged import PagedCache
from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.config import VirtualStorage
from hf_paged.step import StepMetadata
from hf_paged.virtual import storage as virtual
from hf_paged.virtual.mappings import PlaneLayout, Region
from hf_paged.virtual.pages import CudaPages, Extents, MemoryFile, Pages
from hf_paged.virtual.row_slots import BACKOFF_STEPS
from hf_paged.virtual.storage import MappedStorage
from tests.cache.test_mixed_lengths import WINDOWS, play
from tests.virtual.cuda_driver import Driver, StandInPages

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")

HEADS, DIM = 2, 16


def device_pages() -> Pages:
    pytest.importorskip("cuda.bindings")
    return CudaPages(torch.device("cuda"))


def file_pages() -> MemoryFile:
    """Returns pages that count mappings of their own: a process has one count, from which garbage
    of other tests may still be taken."""
    pages = MemoryFile()
    pages.extents = Extents()
    return pages


# with the dim and the heads of keys in a page
DRIVERS: dict[str, tuple[Callable[[], Pages], int, int]] = {
    "file": (file_pages, DIM, 1),
    "cuda": (lambda: StandInPages(Driver(1 << 12)), DIM, 1),
    "cuda, all heads in a plane": (lambda: StandInPages(Driver(1 << 12)), DIM, HEADS * 2),
    "device": (device_pages, 512, 1),
}
FORMS: dict[str, dict[str, Any]] = {
    "kept": {},
    "ahead": {"keep_mappings": False, "blocks_ahead": 3},
    "wide values": {"blocks_ahead": 1},
    "two tensors": {},
    "windows": {},
    "blocks that move": {},  # under `ulimit -v`, where no room is reserved
}


@pytest.mark.slow_cases(but=["device-*"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "driver", [*list(DRIVERS)[:3], pytest.param("device", marks=pytest.mark.gpu)]
)
def test_rows_are_where_a_dynamic_cache_has_them(
    driver: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, dim, heads = DRIVERS[driver]
    pages, device = make(), "cuda" if driver == "device" else "cpu"
    monkeypatch.setattr(virtual, "pages_for", lambda device, page_bytes: pages)
    size, before = pages.granularity // (4 * dim * heads), pages.extents.count
    shape = (HEADS, dim)
    values = {"wide values": (HEADS, 3 * dim), "two tensors": (3 * HEADS, dim)}.get(form, shape)
    config = {"storage": VirtualStorage(**FORMS[form]), "block_size": size}
    if form == "blocks that move":
        monkeypatch.setattr(virtual, "address_limit", lambda: 1 << 40)
    windows = WINDOWS if form == "windows" else None
    for seed in range(3):
        cache = PagedCache(windows, config)
        play(seed, 100, cache, [(shape, values)] * 2, windows, device)
    del cache
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
    monkeypatch.setattr(virtual, "pages_for", lambda device, page_bytes: pages)
    size, pool = pages.granularity // (4 * DIM), BlockPool()
    storage = MappedStorage(size, pool, FULL_ATTENTION, VirtualStorage(), lambda: None)
    storage.make(0, *2 * [torch.zeros(1, HEADS, 0, DIM)])
    total = num_rows * num_blocks
    storage.grow(total, max_blocks=total)
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
    assert mapped(addresses.address, addresses.size) == 5 * 7 * HEADS * 2, "runs of a block each"
    assert pages.extents.count == 5 * 8 * HEADS * 2, "and what is behind them"


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
