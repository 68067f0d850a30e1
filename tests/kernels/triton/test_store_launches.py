"""Launches of the Triton kernels: only one per operation, and addresses past 2^31 elements."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import hf_paged
from hf_paged.attention.backends import triton
from hf_paged.kernels.triton import attention
from hf_paged.kernels.triton import store as kernel
from hf_paged.kernels.triton.merge import merge
from hf_paged.step import StepMetadata
from tests.support.kernels.device import DEVICE, available
from tests.support.models import PAGED, build, token_ids

pytestmark = available
FAR = 1 << 30  # elements: a stride that fits in 31 bits; twice that does not


@pytest.mark.slow
def test_no_keys_are_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_ATTENTION", "triton")
    monkeypatch.setattr(triton, "unsupported_reason", lambda call: "slow in the interpreter")
    stored, original = [], kernel.store
    monkeypatch.setattr(kernel, "store", lambda *x: (stored.append(x[0]), original(*x))[1])
    model = build("llama").to(DEVICE)
    ids = token_ids(2, 5).to(DEVICE)
    model.generate(ids, max_new_tokens=4, do_sample=False, **PAGED)
    assert hf_paged.last_route(model).road == "engine"
    assert len(stored) > 8
    assert not [1 for before, after in itertools.pairwise(stored) if before is after]
    hf_paged.free(model)


class Far:
    """Tensors of 3 rows of 16 elements that are 2^30 elements apart, in memory whose untouched
    pages are not allocated."""

    def __init__(self) -> None:
        count = 4 * FAR + 4096
        if DEVICE.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            memory = mmap.mmap(-1, 2 * count, flags=flags)
            self.memory = torch.frombuffer(memory, dtype=torch.bfloat16)
        else:
            self.memory = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
        self.used = 0

    def rows(self, content: torch.Tensor) -> torch.Tensor:
        """`content` `[3, 16]`; an overflowing int32 offset would put row 2 2^31 elements before row
        0: NaN is there."""
        first = 2 * FAR + self.used
        self.memory[self.used : self.used + 16] = float("nan")
        self.used += 16
        found = self.memory.as_strided((3, 16), (FAR, 1), first)
        found.copy_(content)
        return found


@pytest.fixture(scope="module")
def far() -> Far:
    return Far()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def stored(heads: torch.Tensor) -> torch.Tensor:
    blocks = torch.zeros(2, 6, 8, 16, dtype=torch.bfloat16, device=DEVICE)
    keys = heads[None, :, None]  # [1, 3 heads, 1 token, 16]
    kernel.store(keys, keys, blocks[:, :3], blocks[:, 3:], torch.tensor([[9]], device=DEVICE))
    return blocks


def written(heads: torch.Tensor) -> torch.Tensor:
    states, slots = -random(3, 16)[None, :, None], torch.zeros(1, 1, dtype=torch.int64)
    kernel.store(states, states, *[heads[None, :, None]] * 2, slots.to(DEVICE))
    return heads


def attended(query: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """By the kernel of decodes if there is a bias."""
    blocks, query_len = random(1, 2, 8, 16), 1 if bias is None else 3
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    step = StepMetadata.rectangle(table, (3,), 8, query_len=query_len)
    given = (query[None] if bias is None else query[:, None], blocks[:, :1], blocks[:, 1:], step)
    if bias is None:
        return attention.prefill_attention(*given, scale=0.3)
    return attention.decode_attention(*given, scale=0.3, bias=bias)


def merged(weights: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(1, 1, 16, device=DEVICE)
    merge(random(3, 16).float()[:, None, None], weights[:, :1, None], found)
    return found


FUNCTIONS: dict[str, Any] = {
    "store reads": stored,
    "store writes": written,
    "prefill reads queries": attended,
    "decode reads queries": lambda x: attended(x, random(3, 16)[:, :3]),
    "decode reads a bias of queries": lambda x: attended(random(3, 16), x[:, :3]),
    "decode reads a bias of keys": lambda x: attended(random(3, 16), x[:, :3].t()),
    "merge reads": merged,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_may_be_far_apart(name: str, far: Far) -> None:
    content = random(3, 16)
    found, expected = (FUNCTIONS[name](x) for x in (far.rows(content), content.clone()))
    assert torch.equal(found, expected) and expected.isfinite().all()
