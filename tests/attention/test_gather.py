"""The portable path on devices without kernels: its operations per step, and the rows that it
gathers together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import gather
from hf_paged.attention.backends.parts import SCRATCH_BYTES, Part, plan_parts
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks, store_portable
from hf_paged.cache.reading import BlockLayout
from hf_paged.kernels import cpp
from hf_paged.step import StepMetadata
from tests.attention.test_backends import Case, build
from tests.support import models
from tests.support.kernels.device import to_device
from tests.support.operations import Operations


def test_rows_of_different_lengths(device: torch.device) -> None:
    """In one part, and on a GPU."""
    case = Case(seq_lens=(33, 70, 5, 64), queries=3, window=20, bias=(0, 1))
    call = to_device(build(case), device)
    assert len(parts_of(call.step, call.key_blocks, call.value_blocks)) == 1
    out = call.run("gather").double().cpu()
    torch.testing.assert_close(out, call.expected, atol=2e-5, rtol=2e-5)


def operations_per_step(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> float:
    totals = []
    for steps in (3, 5):
        with Operations() as operations:
            model.generate(**inputs, **options, max_new_tokens=steps, do_sample=False)
        totals.append(operations.counts.total())
    return (totals[1] - totals[0]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_decode_step_takes_few_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel of ours, as on a GPU that the Triton kernels do not run on. Sixteen rows of
    different lengths; full and sliding layers, softcaps, sinks."""
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "gather")
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    model = models.build(name, **({"num_hidden_layers": 4} if name != "gpt_oss" else {}))
    inputs = models.padded_prompt(name, tuple(range(12, 44, 2)))
    model.generate(**inputs, **models.UNRECORDED, max_new_tokens=2)  # with the check of the model
    plain, paged = (
        operations_per_step(model, inputs, options) for options in ({}, models.UNRECORDED)
    )
    assert hf_paged.last_route(model).reason.startswith("packed")  # type: ignore[union-attr]
    assert paged <= plain


def test_a_device_without_kernels_slows_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, which `last_route` and one warning show."""
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    query, blocks = torch.zeros(2, 4, 16, device="meta"), torch.zeros(3, 2, 16, 16, device="meta")
    step = StepMetadata.rectangle(torch.zeros(2, 1, dtype=torch.int32, device="meta"), (5, 9), 16)
    reasons: set[str] = set()
    token = backends.unsupported_reasons.set(reasons)
    call = AttentionCall(query, KVBlocks((blocks,), blocks, blocks), step, 1.0)
    try:
        assert backends.select(call) is gather
    finally:
        backends.unsupported_reasons.reset(token)
    (reason,) = reasons
    assert reason.startswith(
        "decode steps gather keys and values on meta: the Triton kernels do not run on this device"
    )


def parts_of(step: StepMetadata, *blocks: torch.Tensor) -> tuple[Part, ...]:
    return step.plan(plan_parts, *map(BlockLayout.of, blocks))[0]


@pytest.mark.parametrize(
    ("queries", "seq_lens", "expected"),
    [
        # a token takes 256 bytes: the scratch holds 8,192 of them, and up to 1,024 may be padding
        (1, [40, 33, 70, 1], [[40, 33, 70, 1]]),
        (1, [1500, 3, 1400, 7], [[1500, 1400], [3, 7]]),
        (1, [3000, 2900, 2800], [[3000, 2900], [2800]]),
        (1, [5000, 5000], [[5000], [5000]]),
        # masks have a row for each query
        (2, [1500, 1400], [[1500, 1400]]),
        (3, [1500, 1400], [[1500], [1400]]),
        (31, [150, 140], [[150], [140]]),
    ],
)
def test_rows_of_similar_lengths_are_gathered_together(
    queries: int, seq_lens: list[int], expected: list[list[int]]
) -> None:
    tables = torch.zeros(len(seq_lens), -(-max(seq_lens) // 16), dtype=torch.int32)
    step = StepMetadata.rectangle(tables, seq_lens, 16, query_len=queries)
    blocks = torch.zeros(1, 2, 16, 16)
    found = [[seq_lens[row] for row, _ in part.members] for part in parts_of(step, blocks, blocks)]
    assert found == expected


def test_a_mask_with_a_row_per_head_takes_less_than_the_scratch() -> None:
    """With as many query heads per K/V head as Falcon-7B, and about as many rows as are gathered
    together."""
    call = build(Case(seq_lens=(340, 330, 335, 338), queries=3, heads=71, kv_heads=1))
    call.run("gather")
    assert len(parts_of(call.step, call.key_blocks, call.value_blocks)) == 1
    (mask,) = (plan for plan in call.step._plans.values() if isinstance(plan, torch.Tensor))
    assert mask.shape == (4, 1, 71 * 3, 340)
    assert mask.untyped_storage().nbytes() < SCRATCH_BYTES


def test_slots_are_looked_up_once_for_all_layers() -> None:
    keys, slots = torch.randn(2, 3, 1, 8), torch.tensor([[5], [-1]])
    blocks = torch.zeros(4, 6, 4, 8).chunk(2, dim=1)
    with Operations() as operations:
        for _ in range(3):
            store_portable(keys, keys, *blocks, slots)
    assert operations.counts["nonzero"] == 1
    slots[1] = 7  # the same tensor
    store_portable(keys, keys, *blocks, slots)
    assert torch.equal(torch.stack([blocks[0][1, :, n] for n in (1, 3)]), keys[:, :, 0])
    assert blocks[1].count_nonzero() == 48
