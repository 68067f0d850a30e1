"""The amount of memory reserved and requested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import hf_paged
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.cache.free_memory import Reservation, free_bytes
from hf_paged.cache.groups import FULL_ATTENTION, GroupSpec
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.config import MIN_BLOCK_SIZE
from hf_paged.kernels import quantized
from tests.support import models
from tests.test_forks import holds_in_child

CPU, WINDOW = torch.device("cpu"), GroupSpec(window=64)
MPS = torch.device("mps")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 200_000)


def rows(most: int, live: int, device: torch.device = MPS) -> tuple[int, int]:
    """Blocks of 100 bytes for two layers with full attention and six with a window, given half of
    200,000 bytes."""
    counts = {FULL_ATTENTION: 2, WINDOW: 6}
    reservation = Reservation(
        dict.fromkeys(counts, most), {FULL_ATTENTION: 1 << 30, WINDOW: live}, counts, 0.5
    )
    full, window = (reservation.num_layer_blocks(spec, 100, device) for spec in counts)
    return full, window


def test_layers_with_windows_leave_what_they_do_not_need_to_the_others(free: None) -> None:
    assert rows(1 << 30, 50) == ((1000 - 6 * 50) // 2, 50)
    assert rows(1 << 30, 1 << 30) == (125, 125)
    assert rows(100, 50) == (100, 50) and rows(100, 1 << 30) == (100, 100)
    assert rows(1 << 30, 50, CPU) == (125, 125), "what is not touched costs nothing there"
    assert rows(40, 50, CPU) == (40, 40)


@pytest.fixture
def reservation() -> Reservation:
    """Half of what is free, for two layers."""
    most = {FULL_ATTENTION: 1 << 30}
    return Reservation(most, most, {FULL_ATTENTION: 2}, 0.5)


def test_what_is_free_is_asked_once(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter((1000, 10))
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: next(told))
    assert [reservation.num_layer_blocks(FULL_ATTENTION, 10, CPU) for _ in range(2)] == [25, 25]


def test_devices_that_tell_otherwise_or_not(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert reservation.num_layer_blocks(FULL_ATTENTION, 10, unknown) == 0


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
