"""The amount of memory reserved and requested."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import hf_paged
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.free_memory import Reservation, free_bytes
from hf_paged.cache.groups import FULL_ATTENTION, GroupSpec
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.storage import BlockStorage
from hf_paged.config import MIN_BLOCK_SIZE
from hf_paged.kernels import quantized
from tests.support import models
from tests.test_forks import holds_in_child

CPU, MPS, WINDOW = torch.device("cpu"), torch.device("mps"), GroupSpec(window=64)


def rows(most: int, live: int, device: torch.device = MPS) -> tuple[int, int]:
    """Blocks of 100 bytes for two layers with full attention and six with a window, given half of
    200,000 bytes."""
    counts = {FULL_ATTENTION: 2, WINDOW: 6}
    reservation = Reservation(
        dict.fromkeys(counts, most), {FULL_ATTENTION: 1 << 30, WINDOW: live}, counts, 0.5
    )
    full, window = (reservation.num_layer_blocks(spec, 100, device) for spec in counts)
    return full, window


def test_layers_with_windows_leave_what_they_do_not_need_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is free is asked once."""
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 200_000)
    assert rows(1 << 30, 50) == ((1000 - 6 * 50) // 2, 50)
    assert rows(1 << 30, 1 << 30) == (125, 125)
    assert rows(100, 50) == (100, 50) and rows(100, 1 << 30) == (100, 100)
    assert rows(1 << 30, 50, CPU) == (125, 125), "what is not touched costs nothing there"
    assert rows(40, 50, CPU) == (40, 40)
    told, half = iter((1000, 10)), reservation()
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: next(told))
    assert [half.num_layer_blocks(FULL_ATTENTION, 10, CPU) for _ in range(2)] == [25, 25]


def reservation() -> Reservation:
    """Half of what is free, for two layers."""
    most = {FULL_ATTENTION: 1 << 30}
    return Reservation(most, most, {FULL_ATTENTION: 2}, 0.5)


def test_devices_that_tell_otherwise_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds in reserve is free."""
    mps = dict(recommended_max_memory=lambda: 900, driver_allocated_memory=lambda: 300)
    xpu = dict(mem_get_info=lambda device: (100, 1000), memory_reserved=lambda device: 500)
    xpu["memory_allocated"] = lambda device: 380
    for name, functions, expected in (("mps", mps, 600), ("xpu", xpu, 220)):
        monkeypatch.setattr(torch, name, SimpleNamespace(**functions))
        assert free_bytes(torch.device(name)) == expected
    unknown: Any = torch.device("privateuseone")
    with pytest.raises(ValueError, match=r"the free memory of privateuseone.*`num_blocks`"):
        free_bytes(unknown)
    assert reservation().num_layer_blocks(FULL_ATTENTION, 10, unknown) == 0


def test_a_device_of_which_nothing_is_known_grows_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(device: torch.device) -> int:
        raise ValueError(f"torch does not report the free memory of {device}")

    for module in (free_memory, kv_blocks):
        monkeypatch.setattr(module, "commits_when_touched", lambda device: False)
    monkeypatch.setattr(free_memory, "free_bytes", unknown)
    model = models.build("llama")
    inputs = models.padded_prompt("llama", (20, 7))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
    found = model.generate(**inputs, **options, cache_implementation="paged")
    assert torch.equal(found, model.generate(**inputs, **options))
    hf_paged.check_integrity(model)


def test_a_process_forks_however_much_its_pools_have_reserved() -> None:
    """Contiguous addresses are one mapping: two of these have more bytes than the machine."""
    keys = torch.empty(1, 2, 0, 64)
    block_bytes = KVBlocks.allocate(1, 16, keys.to("meta"), keys.to("meta")).block_bytes
    num_blocks = int(0.7 * psutil.virtual_memory().total) // block_bytes
    pools = [KVBlocks.allocate(num_blocks, 16, keys, keys) for _ in range(2)]
    for pool in pools:
        pool.keys[-1] = 7
    assert holds_in_child(lambda: all(bool((pool.keys[-1] == 7).all()) for pool in pools))
    with torch.inference_mode():
        pools[0].keys[0] += 1


@pytest.mark.skipif(sys.platform != "linux", reason="addresses outlive their memory on Linux")
def test_layers_return_to_the_addresses_that_they_were_released_from() -> None:
    def make(num_blocks: int, dtype: torch.dtype = torch.float32) -> list[KVBlocks]:
        storage.pool.grow(num_blocks - storage.pool.num_blocks)
        keys = torch.empty(1, 2, 0, 64, dtype=dtype)
        return [storage.make(index, keys, keys) for index in range(2)]

    def release() -> None:
        for tensor in (tensor for layer in storage.layers.values() for tensor in layer.data):
            tensor.fill_(7)
        storage.pool.shrink()
        storage.clear()
        assert not (
            storage.layers or storage.nbytes or storage.num_allocated_blocks or storage.block_bytes
        )

    storage = BlockStorage(16, BlockPool())
    first = make(100)
    for num_blocks in (100, 1):
        release()
        assert [*storage.released.values()] == first
        assert make(num_blocks) == first and not storage.released
        assert not any(layer.keys[1:-1].any() for layer in first), "the memory is new"
    for num_blocks, dtype in ((101, torch.float32), (101, torch.bfloat16)):
        release()
        second = make(num_blocks, dtype)
        assert not any(layer in first for layer in second) and not storage.released
        first = second


def test_only_whole_pages_of_host_memory_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.full((1 << 20,), 7, dtype=torch.uint8)
    is_on_linux = sys.platform == "linux"
    assert free_memory.discard([tensor[5:9]]) == is_on_linux, "the whole storage"
    page = mmap.PAGESIZE
    assert bool((tensor[page:-page] == 0).all()) == is_on_linux
    assert tensor.count_nonzero() < 2 * page or not is_on_linux
    small = torch.full((9,), 7)
    assert free_memory.discard([small]) == is_on_linux and bool((small == 7).all())
    assert not free_memory.discard([torch.empty(1 << 20, device="meta")])
    for name, value in (("address_limit", 1 << 46), ("_charges_addresses", True)):
        with monkeypatch.context() as patch:
            patch.setattr(free_memory, name, lambda value=value: value)
            assert not free_memory.discard([tensor])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("block_size", "dims"), [(1, (6, 6)), (2, (3, 3)), (2, (7, 4))], ids=["one", "odd", "latent"]
)
def test_quantized_blocks_whose_scales_are_not_aligned_are_refused_before_memory_is_taken(
    block_size: int, dims: tuple[int, int], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = (torch.empty(1, 1, 0, dim) for dim in dims)
    with monkeypatch.context() as patch:
        patch.setattr(kv_blocks, "_empty", None)  # nothing is allocated
        message = (
            f"block of {block_size} tokens .*, not a multiple of 4, so .*: pass a `block_size`"
        )
        with pytest.raises(ValueError, match=message):
            KVBlocks.allocate(2, block_size, keys, values, kv_dtype=kv_dtype)
    # the least size of `PagedConfig` goes with any dims
    blocks = KVBlocks.allocate(2, MIN_BLOCK_SIZE, keys, values, kv_dtype=kv_dtype)
    assert quantized.scales(blocks.keys).shape == (2, 1, MIN_BLOCK_SIZE)
