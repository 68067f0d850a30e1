"""The Triton store kernel against the PyTorch one of `cache.store`."""

from __future__ import annotations

import pytest
import torch

from hf_paged.cache import store
from hf_paged.cache.store import choose_store, store_portable
from tests.support.kernels.device import DEVICE, available

pytestmark = available


def _states(
    batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    if transposed:
        return torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, heads, tokens, 2 * dim).to(dtype)[..., ::2]  # no stride is 1


@pytest.mark.parametrize(
    ("source", "target", "slot_dtype"),
    [
        (torch.float32, torch.float32, torch.int64),
        (torch.bfloat16, torch.bfloat16, torch.int32),
        (torch.float32, torch.bfloat16, torch.int64),
        (torch.float16, torch.float32, torch.int32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "block", "transposed"),
    [(2, 16, 16, 8, True), (3, 40, 9, 16, False), (1, 64, 128, 2048, True), (33, 80, 80, 8, False)],
    ids=["h2-d16", "h3-d40_9-strided", "h1-d64_128-large", "h33-d80-strided"],
)
def test_stores_what_the_plain_one_stores(
    heads: int,
    key_dim: int,
    value_dim: int,
    block: int,
    transposed: bool,
    source: torch.dtype,
    target: torch.dtype,
    slot_dtype: torch.dtype,
) -> None:
    from hf_paged.kernels.triton import store as kernel

    batch, tokens, num_blocks = 3, 5, 7
    keys = _states(batch, heads, tokens, key_dim, source, transposed)
    values = _states(batch, heads, tokens, value_dim, source, transposed)
    slots = torch.randperm(num_blocks * block)[: batch * tokens].view(batch, tokens).to(slot_dtype)
    slots[1, :2] = -1
    pool = torch.randn(num_blocks, heads, block, key_dim + value_dim).to(target)
    expected = pool.clone()
    store_portable(keys, values, expected[..., :key_dim], expected[..., key_dim:], slots.long())
    found, slots = pool.to(DEVICE), slots.to(DEVICE)
    blocks = found[..., :key_dim], found[..., key_dim:]
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    kernel.store(keys, values, *blocks, slots)
    # the interpreter truncates float32 to bfloat16, where a GPU rounds
    is_cut = DEVICE.type == "cpu" and target == torch.bfloat16 != source
    torch.testing.assert_close(found.cpu(), expected, atol=0, rtol=2**-7 if is_cut else 0)


def test_slots_outside_the_pool_are_not_written() -> None:
    from hf_paged.kernels.triton.store import store

    memory = torch.zeros(6, 4, 8, 16, device=DEVICE)
    pool = memory[1:5]  # guard blocks before and after, to detect out-of-bounds writes
    states = torch.ones(1, 2, 4, 16, device=DEVICE)
    store(
        states, states, pool[:, :2], pool[:, 2:], torch.tensor([[-1, 4 * 8, 31, -7]], device=DEVICE)
    )
    assert memory.count_nonzero() == 4 * 16 and (pool[3, :, 7] == 1).all()


def test_slots_may_be_a_column_of_something() -> None:
    from hf_paged.kernels.triton.store import store

    pool = torch.zeros(4, 4, 8, 16, device=DEVICE)
    states = torch.ones(2, 2, 1, 16, device=DEVICE)
    slots = torch.tensor([[3, 0, 0], [17, 0, 0]], device=DEVICE).t()[:1].t()
    store(states, states, pool[:, :2], pool[:, 2:], slots)
    assert (
        (pool[0, :, 3] == 1).all()
        and (pool[2, :, 1] == 1).all()
        and pool.count_nonzero() == 2 * 4 * 16
    )


def test_refuses_what_it_would_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels.triton import store as kernel

    def is_taken(keys: torch.Tensor, values: torch.Tensor, value_blocks: torch.Tensor) -> bool:
        taken.clear()
        choose_store(keys, values, key_blocks, value_blocks, slots)(keys, values, slots)
        return bool(taken)

    taken: list[object] = []
    monkeypatch.setattr(kernel, "store", lambda *inputs: taken.append(inputs))
    monkeypatch.setattr(store, "uses_triton", lambda tensor: True)
    key_blocks, value_blocks = (torch.zeros(4, 2, 8, 16, device=DEVICE) for _ in range(2))
    states, slots = (
        torch.zeros(1, 2, 1, 16, device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int64, device=DEVICE),
    )
    assert is_taken(states, states, value_blocks)
    assert not is_taken(states.double(), states.double(), value_blocks)
    assert not is_taken(states, states[:, :1], value_blocks[:, :1])
