"""Rows in virtual memory while other users of the same memory come and go: threads, collections,
interrupts, forks."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import PagedCache, forks
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.swap import HostLayer
from hf_paged.virtual import mappings, row_slots
from hf_paged.virtual import storage as virtual
from hf_paged.virtual.pages import MemoryFile
from hf_paged.virtual.row_slots import MIN_SLOTS
from hf_paged.virtual.storage import MappedStorage
from tests.support import models
from tests.support.checks import in_threads
from tests.virtual.test_pages import fails_at

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
    found = cache.layers[0].group.group_memory.storage
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
@pytest.mark.parametrize("run", [in_threads, lambda job: job()], ids=["another", "the same"])
def test_a_finalizer_waits_for_no_lock_and_changes_nothing_that_it_guards(
    run: Any, options: dict[str, Any]
) -> None:
    """Collections run in any thread, under any lock: one that waited for the memory's lock would be
    a deadlock."""
    cache, _ = filled(options)
    memory, pool = cache.memory, cache.layers[0].group.group_memory.pool

    def collect() -> None:
        nonlocal cache
        del cache
        gc.collect()

    with memory.lock:
        run(collect)
        assert pool.num_used
    assert not memory.is_used and not pool.num_used
    memory.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, FakeTensorMode, Refusing, torch.inference_mode]
)
@BOTH
def test_keys_outlive_a_cache_that_is_collected_in_a_cycle(
    options: dict[str, Any], mode: Callable[[], Any]
) -> None:
    """Their blocks are freed, and taken by another cache. Collections happen in any code: while it
    exports a model, for instance."""
    cache, expected = filled(options)
    memory, keys = cache.memory, cache.layers[0].keys
    cache.me = cache  # type: ignore[attr-defined]
    with mode():
        del cache
        gc.collect()
    assert not memory.is_used
    refill(PagedCache(memory=memory))
    assert torch.equal(keys + 0, expected)
    assert not keys.dense().is_inference()


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
    view, is_over, found = lent(cache), threading.Event(), list[bool]()

    def read() -> None:
        while not is_over.is_set():
            found.append(torch.equal(view, expected))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while len(found) < 100 and reader.is_alive():
            view = lent(cache)
            other.update(token, token, 0)
    finally:
        is_over.set()
        reader.join()
    assert len(found) >= 100 and all(found)


@pytest.mark.slow
def test_an_interrupt_leaves_slots_and_mappings_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """At lines of their code, in calls with more and longer rows than the one before: no later call
    takes a block for mapped that is not."""
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    model = models.build("llama", num_hidden_layers=1)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    paged = {"cache_implementation": "paged", "cache_config": {"storage": "virtual"}}
    few, many = models.token_ids(2, 70), models.token_ids(MIN_SLOTS + 2, 100)
    expected = [model.generate(ids, **options) for ids in (few, many)]
    files = mappings.__file__, row_slots.__file__
    number, num_interrupts, has_failed = 0, 0, True
    while has_failed:
        hf_paged.free(model)
        assert torch.equal(model.generate(few, **options, **paged), expected[0])
        call = functools.partial(model.generate, many, **options, **paged)
        has_failed = fails_at(number, call, *files, error=KeyboardInterrupt)
        for ids, tokens in zip((many, few), reversed(expected)):
            assert torch.equal(model.generate(ids, **options, **paged), tokens), f"line {number}"
        hf_paged.check_integrity(model)
        number = int(1.4 * number) + 3
        num_interrupts += has_failed
    assert num_interrupts > 10


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
    listeners = [storage_of(each) for each in (busy, broken, cache)]
    monkeypatch.setattr(forks, "members_of", lambda weak_set: listeners)
    assert in_child(
        lambda: torch.equal(cache.layers[0].keys + 0, expected), before_end=lambda: refill(cache)
    )
    assert len(layers) == 2


def test_a_cache_is_pickled_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread could add layers meanwhile."""
    cache, expected = filled(VIRTUAL)
    own, found = HostLayer.copy_of, list[bool]()

    def at(layer: KVBlocks, block_ids: list[int]) -> HostLayer:
        found.append(cache.memory.lock._is_owned())  # type: ignore[attr-defined]
        return own(layer, block_ids)

    monkeypatch.setattr(HostLayer, "copy_of", at)
    copied = pickle.loads(pickle.dumps(cache))
    assert found and all(found)
    assert torch.equal(copied.layers[0].keys + 0, expected)


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


def test_positions_whose_mapping_failed_read_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding may follow there: it must not read the blocks of an earlier row."""
    cache, _ = filled(VIRTUAL)
    assert lent(cache).any()
    mapped = storage_of(cache).layers[0].rows.mappings
    (slot,) = [slot for slot, ids in enumerate(mapped.mapped_ids) if ids]

    def fail(*args: Any) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(type(mapped.pages.extents), "check", fail)
    with pytest.raises(MemoryError, match="on purpose"):
        mapped._map(slot, 0, mapped.mapped_ids[slot][0] + 1, 1)
    assert mapped.mapped_ids[slot][0] is None
    assert not mapped.keys_and_values[0][slot, :, : mapped.block_size].any()


def test_keys_of_a_narrower_dtype_outlive_a_promotion() -> None:
    cache, keys = PagedCache(None, VIRTUAL), numbers(70, 0)
    half = keys.bfloat16()
    cache.update(half[:, :, :69], -half[:, :, :69], 0)
    held = [*cache.update(half[:, :, 69:], -half[:, :, 69:], 0), lent(cache)]
    cache.update(keys[:, :, :1], -keys[:, :, :1], 0)  # float32
    for found, expected in zip(held, (half, -half, half)):
        assert torch.equal(found.float(), expected.float())


def test_keys_of_blocks_that_moved_outlive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "address_limit", lambda: 1 << 40)
    cache, expected = filled(VIRTUAL)
    keys, more = cache.layers[0].keys, numbers(64 * 40, 1)
    cache.update(more, -more, 0)

    def check() -> bool:
        cache.reset()  # gathers handles
        return torch.equal(keys + 0, expected)

    assert in_child(check, before_end=lambda: refill(cache, length=64 * 42))


def test_a_saved_slice_does_not_bring_all_rows() -> None:
    cache, expected = filled(VIRTUAL)
    part, file = cache.layers[0].keys[:, :, :10], io.BytesIO()
    torch.save(part, file)
    whole = storage_of(cache).layers[0].rows.mappings.part_addresses[0].size
    assert file.tell() < whole / 50
    file.seek(0)
    assert torch.equal(torch.load(file), expected[:, :, :10])
