"""Cascade attention against the decode kernel and the reference, and partial results merged by
hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton import attention, cascade
from hf_paged.kernels.triton.cascade import CascadeCosts, SharedPrefix
from hf_paged.kernels.triton.merge import merge
from hf_paged.step import StepMetadata
from tests.support.kernels.device import DEVICE, available

pytestmark = available

SIZE, SCALE = 8, 0.3
FREE = CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=1000)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# two prompts with samples, a lone row, and a sample that has just begun; as (prompt, shared blocks,
# own tokens)
ROWS = [("a", 3, 5), ("b", 5, 1), ("a", 3, 17), ("", 0, 30), ("b", 5, 9), ("a", 3, 1)]


def call(query: Any, keys: Any, values: Any, step: StepMetadata, **features: Any) -> Any:
    return AttentionCall(query, KVBlocks((keys, values), keys, values), step, **features)


def check(
    built: Any, plan: Any, tolerance: float = 2e-5, splits: int | None = None, **features: Any
) -> None:
    query, *blocks, step = built
    with torch.no_grad():
        output = attention.cascade_attention(
            query, *blocks, plan, scale=SCALE, num_splits=splits, **features
        )
    exact = (x.double() for x in (query, *blocks))
    expected = reference.attend(call(*exact, step, scale=SCALE, **features))
    assert output.dtype == query.dtype
    torch.testing.assert_close(output.double(), expected.double(), atol=tolerance, rtol=tolerance)


def build(
    rows: list[tuple[str, int, int]],
    dtype: torch.dtype,
    window: int | None = None,
    heads: int = 6,
    num_blocks: int = 100,
) -> Any:
    """Queries, K and V with NaN in unused slots, and the step."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 16, generator=generator).to(dtype)

    ids = torch.randperm(num_blocks, generator=generator).tolist()
    both = torch.full((num_blocks, 4, SIZE, 16), torch.nan, dtype=dtype)
    prompts: dict[str, list[int]] = {}
    tables, seq_lens = [], []
    for prompt, shared, own in rows:
        if prompt not in prompts:
            prompts[prompt] = [ids.pop() for _ in range(shared)]
            both[prompts[prompt]] = normal(shared, 4, SIZE)
        mine = [ids.pop() for _ in range(-(-own // SIZE))]
        for token in range(own):
            both[mine[token // SIZE], :, token % SIZE] = normal(4)
        tables.append([*prompts[prompt], *mine])
        seq_lens.append(shared * SIZE + own)
    width = max(map(len, tables)) + 1
    padded = torch.tensor([x + [2**30] * (width - len(x)) for x in tables], dtype=torch.int32)
    options: dict[str, Any] = {"window": window, "block_ids": tables}
    step = StepMetadata.rectangle(padded.to(DEVICE), seq_lens, SIZE, **options)
    return normal(len(rows), heads).to(DEVICE), *both.to(DEVICE).chunk(2, dim=1), step


@pytest.mark.slow_cases(
    *("*-3", "torch.bfloat16-*-1", "torch.bfloat16-sinks-None", "torch.float16--1"),
    *("torch.float16-sinks-None", "torch.float32-sinks-1"),
)
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_as_plain_decodes(dtype: torch.dtype, sinks: bool, splits: int | None) -> None:
    built = build(ROWS, dtype)
    features: dict[str, Any] = {}
    if sinks:
        features = dict(softcap=4.0, sinks=torch.randn(6).to(dtype).to(DEVICE))
    plan = cascade.find_cascade(built[-1], FREE)
    assert plan is not None
    assert plan.query_index.tolist() == [0, 2, 5, 1, 4] and plan.prefixes.seq_lens == (24, 40)
    check(built, plan, TOLERANCE[dtype], splits, **features)


WINDOWS = [(60, [0, 2, 5, 1, 4]), (41, [0, 2, 5]), (40, [0, 5]), (28, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "members"), WINDOWS)
def test_windows_that_end_within_prefixes(window: int, members: list[int] | None) -> None:
    built = build(ROWS, torch.float32, window)
    plan = cascade.find_cascade(built[-1], FREE)
    if members is None:
        assert plan is None
    else:
        assert plan is not None and plan.query_index.tolist() == members
        check(built, plan)


def test_groups_that_are_given_or_not_worth_two_more_launches() -> None:
    """A cascade of given groups takes any part of what is shared."""
    built, groups = build(ROWS, torch.float32), (SharedPrefix((4, 1), 2), SharedPrefix((5, 0), 3))
    query, keys, values, step = built
    assert cascade.find_cascade(step, cascade.default_costs(query.shape[1], keys, values)) is None
    check(built, cascade.make_cascade(groups, step))


@pytest.mark.parametrize("with_tail", [False, True], ids=["parts", "tail"])
def test_merging_gives_the_weighted_mean_and_skips_what_saw_nothing(with_tail: bool) -> None:
    partials, lse = torch.randn(3, 4, 5, 24), torch.randn(3, 4, 5) * 30
    out, tail_lse = torch.randn(6, 5, 24), torch.randn(6, 5)
    lse[0, 0] = lse[1, 1, 2] = lse[:, 2, 3] = tail_lse[5, 3] = tail_lse[1] = -torch.inf
    where, out_lse = torch.arange(4), torch.full((6, 5), 7.0)
    states, all_lse = partials, lse
    if with_tail:
        where = torch.tensor([3, 1, 5, 0])
        states = torch.cat([partials, out[where][None]])
        all_lse = torch.cat([lse, tail_lse[where][None]])
    weights = all_lse.double().softmax(0).nan_to_num(0.0)[..., None]
    expected, before = (weights * states).sum(0).float(), out.clone()
    partials[lse == -torch.inf] = torch.nan
    out[tail_lse == -torch.inf] = torch.nan
    if not with_tail:
        out, out_lse = torch.full_like(out[:4], torch.nan), out_lse[:4]
    partials, lse, out, out_lse, tail_lse = (
        x.to(DEVICE) for x in (partials, lse, out, out_lse, tail_lse)
    )
    tail = dict(index=where.int().to(DEVICE), tail_lse=tail_lse) if with_tail else {}
    merge(partials, lse, out, out_lse=out_lse, **tail)
    found, found_lse = out.cpu()[where], out_lse.cpu()[where]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, all_lse.logsumexp(0), atol=1e-5, rtol=1e-5)
    if with_tail:  # rows in no group are unchanged
        assert torch.equal(out.cpu()[[2, 4]], before[[2, 4]]) and (out_lse[[2, 4]] == 7.0).all()
