"""Cascade attention against the decode kernel and the reference, and partial results merged by
hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton.cascade import CascadeCosts, SharedPrefix
from hf_paged.step import StepMetadata
from tests.support.kernels.device import DEVICE, available

pytestmark = available

SIZE, SCALE = 8, 0.3
FREE = CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=1000)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# two prompts with samples, a lone row, and a sample that has just begun; as (prompt, shared blocks,
# own tokens)
ROWS = [("a", 3, 5), ("b", 5, 1), ("a", 3, 17), ("", 0, 30), ("b", 5, 9), ("a", 3, 1)]


def call(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepMetadata,
    **features: Any,
) -> Any:
    return AttentionCall(query, KVBlocks((keys, values), keys, values), step, **features)


def build(
    rows: list[tuple[str, int, int]],
    dtype: torch.dtype,
    window: int | None = None,
    heads: int = 6,
    num_blocks: int = 100,
) -> Any:
    """Queries, K and V with NaN in unused slots, and the step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    both = torch.full((num_blocks, 4, SIZE, 16), torch.nan, dtype=dtype)
    prompts: dict[str, list[int]] = {}
    tables, seq_lens = [], []
    for prompt, shared, own in rows:
        if prompt not in prompts:
            prompts[prompt] = [ids.pop() for _ in range(shared)]
            both[prompts[prompt]] = torch.randn(shared, 4, SIZE, 16, generator=generator).to(dtype)
        mine = [ids.pop() for _ in range(-(-own // SIZE))]
        for token in range(own):
            both[mine[token // SIZE], :, token % SIZE] = torch.randn(4, 16, generator=generator).to(
                dtype
            )
        tables.append([*prompts[prompt], *mine])
        seq_lens.append(shared * SIZE + own)
    width = max(map(len, tables)) + 1
    padded = torch.tensor(
        [[*table, *([2**30] * (width - len(table)))] for table in tables], dtype=torch.int32
    )
    step = StepMetadata.rectangle(
        padded.to(DEVICE), seq_lens, SIZE, window=window, block_ids=tables
    )
    query = torch.randn(len(rows), heads, 16, generator=generator).to(dtype)
    keys, values = both.to(DEVICE).chunk(2, dim=1)
    return query.to(DEVICE), keys, values, step


@pytest.mark.slow_cases("*-3", "torch.bfloat16-*-1", "torch.float32-sinks-1")
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_shared_prefixes_give_what_plain_decode_gives(
    dtype: torch.dtype, sinks: bool, splits: int | None
) -> None:
    from hf_paged.kernels.triton import attention, cascade

    query, keys, values, step = build(ROWS, dtype)
    features: dict[str, Any] = dict(scale=SCALE, softcap=4.0 if sinks else None)
    features["sinks"] = torch.randn(6).to(dtype).to(DEVICE) if sinks else None
    plan = cascade.find_cascade(step, FREE)
    assert plan is not None
    assert plan.query_index.tolist() == [0, 2, 5, 1, 4] and plan.prefixes.seq_lens == (24, 40)
    with torch.no_grad():
        output = attention.cascade_attention(
            query, keys, values, plan, num_splits=splits, **features
        )
    expected = reference.attend(
        call(query.double(), keys.double(), values.double(), step, **features)
    )
    tolerance = TOLERANCE[dtype]
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
def test_rows_whose_window_ends_within_them_share_nothing() -> None:
    from hf_paged.kernels.triton import attention, cascade

    for window, members in ((60, [0, 2, 5, 1, 4]), (41, [0, 2, 5]), (40, [0, 5]), (28, None)):
        query, keys, values, step = build(ROWS, torch.float32, window)
        plan = cascade.find_cascade(step, FREE)
        if members is None:
            assert plan is None
            continue
        assert plan is not None and plan.query_index.tolist() == members
        with torch.no_grad():
            output = attention.cascade_attention(query, keys, values, plan, scale=SCALE)
        expected = reference.attend(call(query, keys, values, step, scale=SCALE))
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_short_prefixes_are_not_worth_two_more_launches() -> None:
    from hf_paged.kernels.triton import cascade

    query, keys, values, step = build(ROWS, torch.float32)
    assert cascade.find_cascade(step, cascade.default_costs(query.shape[1], keys, values)) is None


def test_a_cascade_of_given_groups_takes_any_part_of_what_is_shared() -> None:
    from hf_paged.kernels.triton import attention, cascade

    query, keys, values, step = build(ROWS, torch.float32)
    groups = (SharedPrefix((4, 1), 2), SharedPrefix((5, 0), 3))
    plan = cascade.make_cascade(groups, step)
    with torch.no_grad():
        output = attention.cascade_attention(query, keys, values, plan, scale=SCALE)
    expected = reference.attend(call(query, keys, values, step, scale=SCALE))
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("with_tail", [False, True], ids=["parts", "tail"])
def test_merging_gives_the_weighted_mean_and_skips_what_saw_nothing(with_tail: bool) -> None:
    from hf_paged.kernels.triton.merge import merge

    parts, tokens, heads, dim = 3, 4, 5, 24
    partials, lse = torch.randn(parts, tokens, heads, dim), torch.randn(parts, tokens, heads) * 30
    tail, tail_lse = torch.randn(6, heads, dim), torch.randn(6, heads)
    lse[0, 0], lse[1, 1, 2], lse[:, 2, 3] = -torch.inf, -torch.inf, -torch.inf
    tail_lse[5, 3], tail_lse[1] = -torch.inf, -torch.inf
    partials[lse == -torch.inf] = torch.nan
    tail[tail_lse == -torch.inf] = torch.nan
    index = torch.tensor([3, 1, 5, 0], dtype=torch.int32) if with_tail else None
    out = tail.clone() if with_tail else torch.full((tokens, heads, dim), torch.nan)
    out_lse = torch.full((6 if with_tail else tokens, heads), 7.0)
    device = [
        x if x is None else x.to(DEVICE) for x in (partials, lse, out, out_lse, index, tail_lse)
    ]
    merge(
        *device[:3],
        out_lse=device[3],
        index=device[4],
        tail_lse=device[5] if with_tail else None,
    )
    where = index.long() if index is not None else torch.arange(tokens)
    all_lse = torch.cat([lse, tail_lse[where][None]]) if with_tail else lse
    states = torch.cat([partials, tail[where][None]]) if with_tail else partials
    weights = all_lse.double().softmax(0).nan_to_num(0.0)[..., None]
    expected = (weights * states.nan_to_num(0.0)).sum(0).float()
    torch.testing.assert_close(device[2].cpu()[where], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(device[3].cpu()[where], all_lse.logsumexp(0), atol=1e-5, rtol=1e-5)
    if with_tail:  # rows in no group are unchanged
        assert (
            torch.equal(device[2].cpu()[[2, 4]], tail[[2, 4]]) and (device[3][[2, 4]] == 7.0).all()
        )
