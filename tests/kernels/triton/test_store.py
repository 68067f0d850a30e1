"""The Triton store kernel against the PyTorch one of `cache.kv_blocks`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.cache import kv_blocks
from hf_paged.cache.kv_blocks import choose_store, store_portable
from hf_paged.kernels import quantized
from hf_paged.kernels.triton import store as kernel
from tests.support.kernels.device import DEVICE, available

pytestmark = available


def _states(
    batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    if transposed:
        return torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, heads, tokens, 2 * dim).to(dtype)[..., ::2]  # no stride is 1


DTYPES = [
    (torch.float32, torch.float32, torch.int64),
    (torch.bfloat16, torch.bfloat16, torch.int32),
    (torch.float32, torch.bfloat16, torch.int64),
    (torch.float16, torch.float32, torch.int32),
]
SIZES = {
    "h2-d16": (2, (16, 16), 8, True),
    "h3-d40_9-strided": (3, (40, 9), 16, False),
    "h1-d64_128-large": (1, (64, 128), 2048, True),
    "h33-d80-strided": (33, (80, 80), 8, False),
}


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_stores_what_the_plain_one_stores(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    heads, dims, block, transposed = SIZES[name]
    source, target, slot_dtype = dtypes
    states = [_states(3, heads, 5, dim, source, transposed) for dim in dims]
    slots = torch.randperm(7 * block)[:15].view(3, 5).to(slot_dtype)
    slots[1, :2] = -1
    pool = torch.randn(7, heads, block, sum(dims)).to(target)
    expected, found = pool.clone(), pool.to(DEVICE)
    store_portable(*states, *expected.split(dims, dim=3), slots.long())
    moved = [x.to(DEVICE) for x in states]
    kernel.store(*moved, *found.split(dims, dim=3), slots.to(DEVICE))
    # the interpreter truncates float32 to bfloat16, where a GPU rounds
    is_cut = DEVICE.type == "cpu" and target == torch.bfloat16 != source
    torch.testing.assert_close(found.cpu(), expected, atol=0, rtol=2**-7 if is_cut else 0)


def test_slots_outside_the_pool_are_not_written() -> None:
    memory = torch.zeros(6, 4, 8, 16, device=DEVICE)
    pool = memory[1:5]  # guard blocks before and after, to detect out-of-bounds writes
    states = torch.ones(1, 2, 4, 16, device=DEVICE)
    slots = torch.tensor([[-1, 4 * 8, 31, -7]], device=DEVICE)
    kernel.store(states, states, *pool.chunk(2, dim=1), slots)
    assert memory.count_nonzero() == 4 * 16 and (pool[3, :, 7] == 1).all()
    # slots may be a column of something
    states, slots = states.view(2, 2, 2, 16)[:, :, :1], slots.new_tensor([[3, 17], [0, 0]])
    memory.zero_()
    kernel.store(states, states, *pool.chunk(2, dim=1), slots[:1].t())
    assert memory.count_nonzero() == 2 * 4 * 16
    assert (pool[0, :, 3] == 1).all() and (pool[2, :, 1] == 1).all()


def test_refuses_what_it_would_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(kernel, "store", lambda *inputs: taken.append(inputs))
    monkeypatch.setattr(kv_blocks, "uses_triton", lambda tensor: True)
    blocks, states = torch.zeros(4, 2, 8, 16, device=DEVICE), torch.zeros(1, 2, 1, 16).to(DEVICE)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    for inputs, is_taken in (
        ((states, states, blocks, blocks), True),
        ((states.double(), states.double(), blocks, blocks), False),
        ((states, states[:, :1], blocks, blocks[:, :1]), False),
    ):
        taken.clear()
        choose_store(*inputs, slots)(*inputs[:2], slots)
        assert bool(taken) == is_taken


def test_blocks_of_different_formats_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(kernel, "store", lambda *inputs: taken.append(inputs))
    monkeypatch.setattr(kv_blocks, "uses_triton", lambda tensor: True)
    blocks, states = torch.zeros(4, 2, 8, 16, device=DEVICE), torch.ones(1, 2, 1, 16).to(DEVICE)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    tiles = torch.zeros(4, 2, quantized.tile_bytes(8, 16), dtype=torch.uint8, device=DEVICE)
    codes = quantized.codes(tiles, 8, torch.int8)
    for pair in ((codes, blocks), (blocks, codes)):
        choose_store(states, states, *pair, slots)(states, states, slots)
    assert not taken and blocks.count_nonzero() == 32
    choose_store(states, states, codes, codes, slots)(states, states, slots)
    assert taken
