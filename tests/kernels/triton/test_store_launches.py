"""Launches of the Triton kernels: only one per operation, and addresses past 2^31 elements."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.step import StepMetadata
from tests.support.kernels.device import DEVICE, available
from tests.support.models import PAGED, build, token_ids

pytestmark = available
FAR = 1 << 30  # elements: a stride that fits in 31 bits; twice that does not


@pytest.mark.slow
def test_no_keys_are_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.attention.backends import triton
    from hf_paged.kernels.triton import store as kernel

    monkeypatch.setenv("HF_PAGED_ATTENTION", "triton")
    monkeypatch.setattr(triton, "unsupported_reason", lambda call: "slow in the interpreter")
    stored: list[torch.Tensor] = []
    original = kernel.store

    def count(keys: torch.Tensor, *rest: Any) -> None:
        stored.append(keys)
        original(keys, *rest)

    monkeypatch.setattr(kernel, "store", count)
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
            self.memory = torch.frombuffer(
                mmap.mmap(-1, 2 * count, flags=flags), dtype=torch.bfloat16
            )
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


def test_store_reads_heads_that_are_far_apart(far: Far) -> None:
    from hf_paged.kernels.triton.store import store

    content = random(3, 16)
    keys = far.rows(content)[None, :, None]  # [1, 3 heads, 1 token, 16]
    blocks = torch.zeros(2, 6, 8, 16, dtype=torch.bfloat16, device=DEVICE)
    store(keys, keys, blocks[:, :3], blocks[:, 3:], torch.tensor([[9]], device=DEVICE))
    assert torch.equal(blocks[1, :, 1], torch.cat([content, content]))


def test_store_writes_heads_that_are_far_apart(far: Far) -> None:
    from hf_paged.kernels.triton.store import store

    content = random(3, 16)
    blocks = far.rows(torch.zeros(3, 16))[None, :, None]  # [1, 3 heads, 1 slot, 16]
    store(
        *[content[None, :, None]] * 2,
        blocks,
        blocks,
        torch.zeros(1, 1, dtype=torch.int64, device=DEVICE),
    )
    assert torch.equal(blocks[0, :, 0], content)


def test_prefill_reads_heads_that_are_far_apart(far: Far) -> None:
    from hf_paged.kernels.triton.attention import prefill_attention

    content, blocks = random(3, 16), random(1, 2, 8, 16)

    def attend(query: torch.Tensor) -> torch.Tensor:
        step = StepMetadata.rectangle(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), (3,), 8)
        out: torch.Tensor = prefill_attention(
            query[None], blocks[:, :1], blocks[:, 1:], step, scale=0.3
        )
        return out

    expected = attend(content)
    assert torch.equal(attend(far.rows(content)), expected) and expected.isfinite().all()


def test_decode_reads_queries_and_biases_that_are_far_apart(far: Far) -> None:
    from hf_paged.kernels.triton.attention import decode_attention

    content, blocks = random(3, 16), random(1, 2, 8, 16)
    step = StepMetadata.rectangle(
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), (3,), 8, query_len=3
    )

    def attend(query: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = decode_attention(
            query[:, None], blocks[:, :1], blocks[:, 1:], step, scale=0.3, bias=bias
        )
        return out

    by_query, by_key = far.rows(random(3, 16)), far.rows(random(3, 16))
    for bias in (by_query[:, :3], by_key[:, :3].t()):
        expected = attend(content, bias.contiguous())
        assert torch.equal(attend(far.rows(content), bias), expected) and expected.isfinite().all()


def test_merge_reads_parts_that_are_far_apart(far: Far) -> None:
    from hf_paged.kernels.triton.merge import merge

    values, weights = random(3, 16).float(), random(3, 16)
    found, expected = (torch.zeros(1, 1, 16, device=DEVICE) for _ in range(2))
    merge(values[:, None, None], weights[:, :1, None], expected)
    merge(values[:, None, None], far.rows(weights)[:, :1, None], found)
    assert torch.equal(found, expected) and expected.isfinite().all()
