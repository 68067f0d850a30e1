"""Rows in virtual memory while other users of the same memory come and go: threads, collections,
interrupts, forks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import PagedCache, VirtualStorage, forks
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.step import StepMetadata
from hf_paged.virtual import mappings
from hf_paged.virtual import storage as virtual
from hf_paged.virtual.pages import MemoryFile
from hf_paged.virtual.row_slots import MIN_ROWS, RowSlots
from hf_paged.virtual.storage import MappedStorage
from tests.support import models

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")

VIRTUAL = {"storage": "virtual", "block_size": 64}
BOTH = pytest.mark.parametrize("options", [{"block_size": 64}, VIRTUAL], ids=["blocks", "virtual"])


def filled(options: dict[str, Any], length: int = 70, seed: int = 0) -> tuple[PagedCache, Tensor]:
    """A cache of one layer and row, whose last token came in a step of its own, and its keys;
    values are their negative."""
    cache, keys = PagedCache(None, options), numbers(length, seed)
    cache.update(keys[:, :, :-1], -keys[:, :, :-1], 0)
    cache.update(keys[:, :, -1:], -keys[:, :, -1:], 0)
    return cache, keys


def numbers(length: int, seed: int) -> Tensor:
    return torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(seed))


def lent(cache: PagedCache) -> Tensor:
    """A view of all keys, as code of a model's own gets it."""
    keys = cache.layers[0].keys
    assert keys is not None
    view: Tensor = keys.read()[:, :, :]
    assert type(view) is Tensor
    return view


def refill(cache: PagedCache, length: int = 70) -> None:
    """Lets the cache's blocks be written again, with sevens."""
    cache.reset()
    sevens = torch.full((1, 2, length, 16), 7.0)
    cache.update(sevens, sevens, 0)


def storage_of(cache: PagedCache) -> MappedStorage:
    found = cache.layers[0].group.blocks.storage
    assert isinstance(found, MappedStorage)
    return found


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("on purpose")


def in_child(check: Callable[[], bool], before_end: Callable[[], None] = lambda: None) -> bool:
    """Runs `check` in a child process, after `before_end` in this one."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.read(read, 1)
            code = 0 if check() else 2
        finally:
            os._exit(code)
    before_end()
    os.write(write, b"x")
    os.close(read)
    os.close(write)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
@BOTH
def test_a_finalizer_waits_for_no_lock(options: dict[str, Any]) -> None:
    """Collections run in any thread, under any lock: one that waited for the memory's lock would be
    a deadlock."""
    cache, _ = filled(options)
    memory, locked, done = cache.memory, threading.Event(), threading.Event()

    def hold() -> None:
        with memory.lock:
            locked.set()
            done.wait(120)

    def collect() -> None:
        nonlocal cache
        del cache
        gc.collect()

    holder, collector = threading.Thread(target=hold), threading.Thread(target=collect)
    holder.start()
    locked.wait(30)
    collector.start()
    collector.join(60)
    waited = collector.is_alive()
    done.set()
    holder.join()
    collector.join()
    assert not waited
    assert memory.num_used == 0
    memory.check_integrity()


@pytest.mark.slow
@BOTH
def test_a_finalizer_changes_nothing_in_the_middle_of_a_change(options: dict[str, Any]) -> None:
    cache, _ = filled(options)
    memory, pool = cache.memory, cache.layers[0].group.blocks.pool
    with memory.lock:
        del cache
        gc.collect()
        assert pool.num_used
    assert not memory.is_used and not pool.num_used


@pytest.mark.slow
@BOTH
def test_keys_outlive_a_cache_that_is_collected_in_a_cycle(options: dict[str, Any]) -> None:
    """Their blocks are freed, and taken by another cache."""
    cache, expected = filled(options)
    memory, keys = cache.memory, cache.layers[0].keys
    cache.me = cache  # type: ignore[attr-defined]
    del cache
    gc.collect()
    assert not memory.is_used
    refill(PagedCache(memory=memory))
    assert torch.equal(keys + 0, expected)


def test_placed_rows_stay_readable_while_others_are_placed() -> None:
    """Between placing and reading, another thread may preserve lent views, which gives rows new
    addresses."""
    cache, expected = filled(VIRTUAL)
    view = lent(cache)
    layer = storage_of(cache).layers[0]
    step = cache.layers[0].group.view(70, torch.device("cpu"))
    placed = layer.rows.place(step)
    assert placed is not None
    layer.rows.preserve_views()
    assert layer.rows.mappings is None
    slot, first = placed.placement.slots[0], placed.placement.offsets[0]
    assert torch.equal(placed.keys[slot : slot + 1, :, first : first + 70], expected)
    assert torch.equal(placed.values[slot : slot + 1, :, first : first + 70], -expected)
    assert torch.equal(view, expected)


def test_a_view_stays_readable_while_it_is_preserved() -> None:
    """A thread computes with it while another cache of the memory writes: it sees no page between
    two mappings."""
    cache, expected = filled(VIRTUAL, length=5000)
    other, token = cache.empty_twin(cache.memory), numbers(1, 1)
    view, is_over, found = lent(cache), False, list[bool]()

    def read() -> None:
        while not is_over:
            found.append(torch.equal(view, expected))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(100):
            view = lent(cache)
            time.sleep(0.001)
            other.update(token, token, 0)
    finally:
        is_over = True
        reader.join()
    assert len(found) > 50 and all(found)


@pytest.mark.parametrize("length", [64, 70])
def test_a_slot_belongs_to_all_steps_that_read_it(length: int) -> None:
    """A twin grows in the slot and ends; then a third cache needs a slot."""
    cache = PagedCache(None, VIRTUAL)
    keys, token = numbers(length, 0), numbers(1, 1)
    cache.update(keys, -keys, 0)
    twin = copy.deepcopy(cache)
    assert torch.equal(cache.layers[0].keys + 0, keys)  # placed, and the step is kept
    assert torch.equal(twin.update(token, -token, 0)[0] + 0, torch.cat([keys, token], 2))
    twin.reset()
    del twin
    third = PagedCache(memory=cache.memory)
    third.update(-keys, keys, 0)
    assert torch.equal(third.update(token, -token, 0)[0] + 0, torch.cat([-keys, token], 2))
    assert torch.equal(cache.layers[0].keys + 0, keys)


@BOTH
def test_a_window_that_moves_leaves_another_step_its_blocks(options: dict[str, Any]) -> None:
    """A twin's row goes on in the slot of handles of which only those of the first layer have been
    read."""
    config = models.build("mistral", sliding_window=192).config
    cache = PagedCache(config, {**options, "block_size": 128})
    count, (_, heads, _, dim) = (
        len(cache.layers),
        (1, config.num_key_value_heads, 0, config.head_dim),
    )
    states = [
        torch.randn(1, heads, 256 + 71, dim, generator=torch.Generator().manual_seed(i))
        for i in range(count)
    ]

    def update(to: PagedCache, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        return [
            to.update(x[:, :, start:end], -x[:, :, start:end], layer)
            for layer, x in enumerate(states)
        ]

    update(cache, 0, 255)
    held = update(cache, 255, 256)
    shown = held[0][0].shape[2]
    assert torch.equal(held[0][0] + 0, states[0][:, :, 256 - shown : 256])
    twin = copy.deepcopy(cache)
    update(twin, 256, 256 + 70)
    for layer, (keys, _) in enumerate(update(twin, 256 + 70, 256 + 71)):
        assert torch.equal(keys + 0, states[layer][:, :, -keys.shape[2] :])
    for (keys, values), x in zip(held, states):
        assert torch.equal(keys + 0, x[:, :, 256 - shown : 256])
        assert torch.equal(values + 0, -x[:, :, 256 - shown : 256])


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
def test_an_interrupt_leaves_slots_whole() -> None:
    """Signals at every bytecode of `RowSlots` while more rows than there are slots for, some of
    them longer, are placed."""

    def step_of(num_rows: int, num_blocks: int) -> StepMetadata:
        tables = (
            torch.arange(num_rows * num_blocks, dtype=torch.int32)
            .view(num_blocks, num_rows)
            .T.contiguous()
        )
        return StepMetadata.rectangle(tables, [num_blocks * 4] * num_rows, 4)

    codes = {
        getattr(RowSlots, name).__code__ for name in ("_assign", "_grow", "_choose_slots", "place")
    }
    num_interrupts, at, was_reached = 0, 0, True
    while was_reached:
        slots, at, was_reached = RowSlots(), at + 7, False
        slots.place(step_of(2, 1), are_consecutive=False)
        before = [(row.version, list(row.block_ids)) for row in slots.rows]
        remaining = at

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal remaining, was_reached
            if frame.f_code not in codes:
                return None
            frame.f_trace_opcodes = True
            remaining -= event == "opcode"
            if not remaining and not was_reached:
                was_reached = True
                signal.raise_signal(signal.SIGINT)
            return trace

        try:
            sys.settrace(trace)
            slots.place(step_of(MIN_ROWS + 2, 2), are_consecutive=False)
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            sys.settrace(None)
        assert len(slots.rows) == slots.num_slots
        for row, (version, block_ids) in zip(slots.rows, before):
            assert row.version != version or row.block_ids == block_ids
    assert num_interrupts > 20


@pytest.mark.parametrize("at", range(1, 6))
def test_an_interrupt_while_mappings_are_noted(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later call takes a block for mapped that is not."""
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    model = models.build("llama")
    ids = torch.randint(5, 60, (2, 70), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    call = {"cache_implementation": "paged", "cache_config": {"storage": "virtual"}}
    expected = model.generate(ids, **options)
    own, num_calls = mappings._count_boundaries, 0

    def count(*args: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(mappings, "_count_boundaries", count)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **options, **call)
    assert torch.equal(model.generate(ids, **options, **call), expected)
    hf_paged.check_integrity(model)


@pytest.mark.slow
@pytest.mark.parametrize("is_settled", [False, True], ids=["lent", "preserved"])
def test_each_process_has_its_own_views(is_settled: bool) -> None:
    """After a fork neither process sees what the other writes to a view, or loses a view that the
    other drops."""
    cache, expected = filled(VIRTUAL)
    view, second = lent(cache), lent(cache)
    if is_settled:
        refill(cache)

    def check() -> bool:
        nonlocal cache, second
        del cache, second
        gc.collect()
        is_right = torch.equal(view, expected)
        view.zero_()
        return is_right

    def drop() -> None:
        nonlocal cache
        del cache
        gc.collect()

    assert in_child(check)
    assert torch.equal(view, expected)
    assert in_child(lambda: torch.equal(second, expected), before_end=drop)
    assert torch.equal(view, expected)


def test_a_fork_while_other_threads_make_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage is told of the fork, whatever happens to another one."""
    (busy, _), (broken, _), (cache, expected) = filled(VIRTUAL), filled(VIRTUAL), filled(VIRTUAL)
    own, layers = KVBlocks.select, storage_of(busy).layers

    def at(blocks: KVBlocks, block_ids: list[int]) -> KVBlocks:
        if blocks is layers[0]:
            layers[len(layers)] = storage_of(cache).layers[0]
        if blocks is storage_of(broken).layers[0]:
            raise MemoryError
        return own(blocks, block_ids)

    monkeypatch.setattr(KVBlocks, "select", at)
    monkeypatch.setattr(
        forks, "_fork_listeners", [storage_of(each) for each in (busy, broken, cache)]
    )
    assert in_child(
        lambda: torch.equal(cache.layers[0].keys + 0, expected), before_end=lambda: refill(cache)
    )
    assert len(layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FakeTensorMode, Refusing, torch.inference_mode])
@BOTH
def test_a_collection_under_a_mode_of_other_code(
    options: dict[str, Any], mode: Callable[[], Any]
) -> None:
    """Collections happen in any code: while it exports a model, for instance."""
    cache, expected = filled(options)
    memory, keys = cache.memory, cache.layers[0].keys
    cache.me = cache  # type: ignore[attr-defined]
    with mode():
        del cache
        gc.collect()
    refill(PagedCache(memory=memory))
    assert torch.equal(keys + 0, expected)
    assert not keys.dense().is_inference()


def test_a_cache_is_pickled_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread could add layers meanwhile."""
    cache, expected = filled(VIRTUAL)
    own, found = KVBlocks.select, list[bool]()

    def at(blocks: KVBlocks, block_ids: list[int]) -> KVBlocks:
        found.append(cache.memory.lock._is_owned())  # type: ignore[attr-defined]
        return own(blocks, block_ids)

    monkeypatch.setattr(KVBlocks, "select", at)
    copied = pickle.loads(pickle.dumps(cache))
    assert found and all(found)
    assert torch.equal(copied.layers[0].keys + 0, expected)


def test_a_limit_on_files_is_told_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 30, 1 << 30))
    with pytest.raises(ValueError, match=r"limited to 1,073,741,824 bytes \(ulimit -f\)"):
        hf_paged.PagedEngine(models.build("llama"), hf_paged.PagedConfig(storage="virtual"))


def test_rows_of_which_a_view_could_not_be_preserved_get_new_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pages may be copies already, which later writes do not reach."""
    cache, keys = filled(VIRTUAL)
    more, detach = numbers(1, 1), MemoryFile.detach
    view = lent(cache)

    def fail_behind(*args: Any) -> None:
        detach(*args)
        raise MemoryError("on purpose")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="on purpose"):
        patch.setattr(MemoryFile, "detach", fail_behind)
        cache.update(more, -more, 0)
    assert torch.equal(view, keys)
    del view
    gc.collect()
    cache.update(more, -more, 0)
    assert torch.equal(lent(cache), torch.cat((keys, more), dim=2))


def test_keys_of_a_narrower_dtype_outlive_a_promotion() -> None:
    cache, keys = PagedCache(None, VIRTUAL), numbers(70, 0)
    half = keys.bfloat16()
    cache.update(half[:, :, :69], -half[:, :, :69], 0)
    held = [*cache.update(half[:, :, 69:], -half[:, :, 69:], 0), cache.layers[0].keys]
    view = cache.layers[0].keys[:, :, :]
    cache.update(keys[:, :, :1], -keys[:, :, :1], 0)  # float32
    for found, sign in zip(held, (1, -1, 1)):
        assert torch.equal(found.float(), sign * half.float())
    assert torch.equal(view, half)


def test_views_survive_blocks_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -v` no room is reserved, so that blocks get other addresses as they grow."""
    monkeypatch.setattr(virtual, "address_limit", lambda: 1 << 40)
    cache, expected = filled(VIRTUAL)
    view, keys = lent(cache), cache.layers[0].keys
    rows = storage_of(cache).layers[0].rows
    before = [region.address for region in rows.regions]
    more = numbers(64 * 40, 1)
    cache.update(more, -more, 0)
    assert [region.address for region in storage_of(cache).layers[0].rows.regions] != before
    assert torch.equal(view, expected) and torch.equal(keys + 0, expected)
    late = lent(cache)
    refill(cache, length=64 * 42)
    assert torch.equal(view, expected) and torch.equal(late, torch.cat([expected, more], 2))
    storage, physical = storage_of(cache), storage_of(cache).physical_bytes
    del rows, view, keys, late
    # as a pool drops layers that are too small, or that could not all be allocated
    storage.layers.clear()
    assert physical > 0 and storage.physical_bytes == 0


def test_keys_of_blocks_that_moved_outlive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "address_limit", lambda: 1 << 40)
    cache, expected = filled(VIRTUAL)
    keys, more = cache.layers[0].keys, numbers(64 * 40, 1)
    cache.update(more, -more, 0)

    def check() -> bool:
        cache.reset()  # gathers handles
        return torch.equal(keys + 0, expected)

    assert in_child(check, before_end=lambda: refill(cache, length=64 * 42))


def test_page_bytes_that_no_block_fills() -> None:
    with pytest.raises(ValueError, match=r"`page_bytes` of `VirtualStorage` is 2,097,152"):
        hf_paged.PagedEngine(
            models.build("llama", num_key_value_heads=1),
            hf_paged.PagedConfig(storage=VirtualStorage(page_bytes=1 << 21)),
        )


def test_a_saved_slice_does_not_bring_all_rows() -> None:
    cache, expected = filled(VIRTUAL)
    part, file = cache.layers[0].keys[:, :, :10], io.BytesIO()
    torch.save(part, file)
    whole = storage_of(cache).layers[0].rows.mappings.part_addresses[0].size
    assert file.tell() < whole / 50
    file.seek(0)
    assert torch.equal(torch.load(file), expected[:, :, :10])
