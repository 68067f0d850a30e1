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
from hf_paged.attention.backends.parts import SCRATCH_BYTES, plan_parts
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.reading import BlockLayout
from hf_paged.cache.store import store_portable
from hf_paged.kernels import cpp
from hf_paged.step import StepMetadata
from tests.attention.test_backends import Case, build
from tests.support import models
from tests.support.kernels.device import to_device
from tests.support.operations import Operations


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of ours, as on a GPU that the Triton kernels do not run on."""
    monkeypatch.setenv(kernels.VARIABLE, "gather")
    monkeypatch.setattr(cpp, "is_available", lambda: False)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "features", [{}, {"bias": (0, 1)}, {"softcap": 3.0, "sinks": True}, {"window": 20}], ids=str
)
def test_rows_of_different_lengths(
    features: dict[str, Any], queries: int, device: torch.device
) -> None:
    call = to_device(build(Case(seq_lens=(33, 70, 5, 64), queries=queries, **features)), device)
    assert len(call.step.plan(plan_parts, *layouts_of(call.key_blocks, call.value_blocks))[0]) == 1
    torch.testing.assert_close(
        call.run("gather").double().cpu(), call.expected, atol=2e-5, rtol=2e-5
    )


def test_numbers_of_64_bits_are_not_rounded(device: torch.device) -> None:
    """With as many query heads as K/V heads, which takes its own route for numbers of 16 bits on
    the CPU."""
    call = to_device(build(Case(seq_lens=(27, 9), heads=2, dtype=torch.float64)), device)
    torch.testing.assert_close(call.run("gather").cpu(), call.expected, atol=1e-10, rtol=1e-10)


def test_nothing_visible_gives_zeros(device: torch.device) -> None:
    call = to_device(build(Case(seq_lens=(20, 31), bias=())), device)
    call.options["bias"].fill_(-torch.inf)
    assert not call.run("gather").any()


def layouts_of(*blocks: torch.Tensor) -> list[BlockLayout]:
    return [BlockLayout.of(x) for x in blocks]


def operations_per_step(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> float:
    totals = []
    for steps in (3, 5):
        with Operations() as operations:
            model.generate(**inputs, **options, max_new_tokens=steps, do_sample=False)
        totals.append(operations.counts.total())
    return (totals[1] - totals[0]) / 2


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt_oss"))],
)
def test_a_decode_step_takes_no_more_operations_than_plain(name: str, portable: None) -> None:
    """Sixteen rows of different lengths; full and sliding layers, softcaps, sinks."""
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
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    query, blocks = torch.zeros(2, 4, 16, device="meta"), torch.zeros(3, 2, 16, 16, device="meta")
    step = StepMetadata.rectangle(torch.zeros(2, 1, dtype=torch.int32, device="meta"), (5, 9), 16)
    reasons: set[str] = set()
    token = backends.unsupported_reasons.set(reasons)
    try:
        assert (
            backends.select(AttentionCall(query, KVBlocks((blocks,), blocks, blocks), step, 1.0))
            is gather
        )
    finally:
        backends.unsupported_reasons.reset(token)
    (reason,) = reasons
    assert reason.startswith(
        "decode steps gather keys and values on meta: the Triton kernels do not run on this device"
    )


def lengths_of_parts(
    seq_lens: list[int], queries: int = 1, heads: int = 2, dim: int = 16
) -> list[list[int]]:
    """Lengths of the rows in each part of a step."""
    width = -(-max(seq_lens) // 16)
    tables = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    step = StepMetadata.rectangle(tables, seq_lens, 16, query_len=queries)
    blocks = torch.zeros(1, heads, 16, dim)
    (layout,) = layouts_of(blocks)
    parts, is_complete = plan_parts(step, layout, layout)
    assert is_complete
    return [[seq_lens[row] for row, _ in part.members] for part in parts]


def test_rows_of_similar_lengths_are_gathered_together() -> None:
    """A token takes 256 bytes: the scratch holds 8,192 of them, and up to 1,024 may be padding."""
    assert lengths_of_parts([40, 33, 70, 1]) == [[40, 33, 70, 1]]
    assert lengths_of_parts([1500, 3, 1400, 7]) == [[1500, 1400], [3, 7]]
    assert lengths_of_parts([3000, 2900, 2800]) == [[3000, 2900], [2800]]
    assert lengths_of_parts([5000, 5000]) == [[5000], [5000]]


def test_masks_of_rows_gathered_together_are_small() -> None:
    """They have a row for each query, so that fewer rows of several queries are gathered
    together."""
    assert lengths_of_parts([1500, 1400], queries=2) == [[1500, 1400]]
    assert lengths_of_parts([1500, 1400], queries=3) == [[1500], [1400]]
    assert lengths_of_parts([150, 140], queries=31) == [[150], [140]]


def test_a_mask_with_a_row_per_head_takes_less_than_the_scratch() -> None:
    """With as many query heads per K/V head as Falcon-7B, and about as many rows as are gathered
    together."""
    case = Case(seq_lens=(340, 330, 335, 338), queries=3, heads=71, kv_heads=1)
    call = build(case)
    call.run("gather")
    assert len(call.step.plan(plan_parts, *layouts_of(call.key_blocks, call.value_blocks))[0]) == 1
    (mask,) = (plan for plan in call.step._plans.values() if isinstance(plan, torch.Tensor))
    assert mask.shape == (4, 1, 71 * 3, 340)
    assert mask.untyped_storage().nbytes() < SCRATCH_BYTES


def test_shorter_rows_are_padded_in_front() -> None:
    """The first visible token of such a row is repeated, and masked as padding."""
    tables = torch.tensor([[4, 2, 0], [3, 1, 0]], dtype=torch.int32)
    step = StepMetadata.rectangle(tables, (10, 6), 4, starts=(3, 4))
    blocks = torch.zeros(5, 2, 4, 8)
    (layout,) = layouts_of(blocks)
    ((part,), _) = plan_parts(step, layout)
    assert part.positions is not None and part.is_padding is not None
    assert part.positions.tolist() == [[3, 4, 5, 6, 7, 8, 9], [4, 4, 4, 4, 4, 4, 5]]
    assert part.is_padding[:, 0, 0].tolist() == [[False] * 7, [True] * 5 + [False] * 2]


def test_slots_are_looked_up_once_for_all_layers() -> None:
    keys, slots = torch.randn(2, 3, 1, 8), torch.tensor([[5], [-1]])
    first, second = torch.zeros(4, 6, 4, 8).chunk(2, dim=1)
    with Operations() as operations:
        for _ in range(3):
            store_portable(keys, keys, first, second, slots)
    assert operations.counts["nonzero"] == 1
    assert torch.equal(first[1, :, 1], keys[0, :, 0]) and first.count_nonzero() == 24
    slots[1] = 7  # the same tensor
    store_portable(keys, keys, first, second, slots)
    assert torch.equal(first[1, :, 3], keys[1, :, 0])
