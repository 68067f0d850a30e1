"""The Triton prefill kernel against the reference, row by row; slots that must not be read hold
NaN, block ids that must not be followed are far out of range."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.attention.backends import reference
from hf_paged.step import StepMetadata
from tests.support.attention import attend
from tests.support.kernels.device import DEVICE, available

pytestmark = available

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """`rows`: (context_len, query_len) of each; `config`: block_m and tile."""

    rows: tuple[tuple[int, int], ...]
    block: int = 8
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False  # of heads and keys
    starts: tuple[int, ...] | None = None
    splits: int = 1
    dtype: torch.dtype = torch.float32
    config: tuple[int, int] = (32, 16)
    joined: bool = True  # K and V in one tensor, as the storage has them

    def __str__(self) -> str:
        name = (
            "_".join(f"{context}+{query}" for context, query in self.rows)
            + f"-b{self.block}-h{self.heads}_"
        )
        name += f"{self.kv_heads}-d{self.key_dim}_{self.value_dim}-{str(self.dtype)[6:]}"
        name += f"-m{self.config[0]}n{self.config[1]}"
        features = ("window", "softcap", "sinks", "bias", "starts")
        name += "".join(f"-{name}" for name in features if getattr(self, name))
        return (
            name + ("" if self.causal else "-all") + (f"-s{self.splits}" if self.splits > 1 else "")
        )


MIXED = ((19, 1), (0, 18), (17, 9), (0, 0), (20, 21), (0, 1))
CASES = [
    Case(((0, 1),)),
    Case(((0, 40),)),
    Case(((12, 23),)),
    Case(((0, 0), (4, 0), (3, 5))),
    Case(MIXED, config=(16, 16)),
    Case(MIXED, heads=5, kv_heads=1),
    Case(MIXED, heads=4, kv_heads=4, block=16, config=(32, 32)),
    Case(MIXED, heads=14, kv_heads=2, block=64, config=(32, 16)),
    Case(MIXED, block=256, config=(16, 32)),
    Case(MIXED, block=4, config=(16, 32)),
    Case(((509, 8), (0, 3)), block=512, heads=3, kv_heads=1, window=60, config=(16, 32), splits=2),
    Case(MIXED, dtype=torch.bfloat16),
    Case(MIXED, dtype=torch.float16, config=(64, 32)),
    Case(MIXED, key_dim=24, value_dim=8, joined=False),
    Case(MIXED, key_dim=80, value_dim=96),
    Case(MIXED, window=7),
    Case(MIXED, window=1),
    Case(MIXED, window=33, config=(16, 32)),
    Case(MIXED, softcap=5.0),
    Case(MIXED, sinks=True),
    Case(MIXED, bias=True),
    Case(MIXED, sinks=True, bias=True, starts=(3, 0, 17, 0, 8, 0), splits=2),
    Case(MIXED, starts=(3, 0, 17, 0, 8, 0)),
    Case(MIXED, causal=False),
    Case(MIXED, causal=False, starts=(3, 2, 1, 0, 33, 0), splits=2),
    Case(MIXED, window=9, softcap=3.0, sinks=True, splits=3),
    Case(MIXED, sinks=True, starts=(3, 0, 17, 0, 8, 0), splits=2),
    Case(((130, 5), (0, 3)), heads=4, splits=4),
    Case(((70, 3),), heads=2, kv_heads=1, key_dim=576, value_dim=512, dtype=torch.bfloat16),
]


@dataclass
class Built:
    """Arguments of `prefill_attention`, and the reference's step for each row."""

    query: torch.Tensor
    key_blocks: torch.Tensor
    value_blocks: torch.Tensor
    step: StepMetadata
    rows: list[tuple[slice, StepMetadata]]
    options: dict[str, Any] = field(default_factory=dict)


def build(case: Case, seed: int = 0) -> Built:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    size, lens = case.block, [context + query for context, query in case.rows]
    counts = [-(-length // size) for length in lens]
    num_blocks, num_tokens = sum(counts) + 3, sum(query for _, query in case.rows)
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    dims = (case.key_dim, case.value_dim)
    if case.joined and dims[0] == dims[1]:
        both = torch.full(
            (num_blocks, 2 * case.kv_heads, size, dims[0]), torch.nan, dtype=case.dtype
        )
        blocks = list(both.chunk(2, dim=1))
    elif case.joined:
        both = torch.full((num_blocks, case.kv_heads, size, sum(dims)), torch.nan, dtype=case.dtype)
        blocks = list(both.split(dims, dim=3))
    else:
        blocks = [
            torch.full((num_blocks, case.kv_heads, size, dim), torch.nan, dtype=case.dtype)
            for dim in dims
        ]
    tables = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32)
    starts = case.starts or (0,) * len(lens)
    rows, first = [], 0
    for row, (context, query_len) in enumerate(case.rows):
        table = [ids.pop() for _ in range(counts[row])]
        tables[row, : counts[row]] = torch.tensor(table, dtype=torch.int32)
        # rows without queries are not read at all
        low = context + query_len if query_len == 0 else starts[row]
        if case.window is not None and case.causal:
            low = max(low, context - case.window + 1)
        for t in range(low, lens[row]):
            for states, dim in zip(blocks, dims):
                states[table[t // size], :, t % size] = random(case.kv_heads, dim).to(case.dtype)
        alone = StepMetadata.rectangle(
            torch.tensor([table], dtype=torch.int32),
            (lens[row],),
            size,
            query_len=query_len,
            starts=(starts[row],),
            causal=case.causal,
            window=case.window,
        )
        rows.append((slice(first, first + query_len), alone))
        first += query_len
    step = StepMetadata(
        tables.to(DEVICE),
        (0, *itertools.accumulate(query for _, query in case.rows)),
        tuple(lens),
        starts,
        size,
        causal=case.causal,
        window=case.window,
    )
    options = dict(
        scale=SCALE,
        softcap=case.softcap,
        sinks=random(case.heads).to(case.dtype) if case.sinks else None,
        bias=random(1, case.heads, 1, max(lens)) if case.bias else None,
        num_splits=case.splits,
    )
    # a model's memory layout: heads after tokens
    return Built(
        random(num_tokens, case.heads, case.key_dim).to(case.dtype), *blocks, step, rows, options
    )


def expected(built: Built) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output `(num_tokens, heads, value_dim)` and log-sum-exp, in float64."""
    options = {name: built.options[name] for name in ("scale", "softcap", "bias")}
    sinks = built.options["sinks"]
    sinks = None if sinks is None else sinks.double()
    key_blocks, value_blocks = built.key_blocks.double(), built.value_blocks.double()
    heads = built.query.shape[1]
    outputs, lses = [], []
    for rows, step in built.rows:
        if step.query_len == 0:
            continue
        query = built.query[rows].double().transpose(0, 1)[None]
        arguments = (query, key_blocks, value_blocks, step)
        outputs.append(attend(reference, *arguments, sinks=sinks, **options)[0])
        # A sink, one more logit of 0, takes the share 1 / (1 + exp(lse)); taken from a sink and
        # values of one.
        ones = torch.ones_like(value_blocks[..., :1])
        zero = torch.zeros(heads, dtype=torch.float64)
        share = attend(reference, query, key_blocks, ones, step, sinks=zero, **options)[0, ..., 0]
        lse = torch.logit(share)
        lses.append(lse if sinks is None else torch.logaddexp(lse, sinks[None, :]))
    return torch.cat(outputs), torch.cat(lses)


def run(built: Built, config: tuple[int, int] | None = None, **options: Any) -> Any:
    from hf_paged.kernels.triton import attention, configs

    def move(value: Any) -> Any:
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    # keeps a view of the pool a view: `.to` keeps strides only of dense tensors
    pools = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
             for x in (built.key_blocks, built.value_blocks)]  # fmt: skip
    options = {name: move(value) for name, value in {**built.options, **options}.items()}
    query = move(built.query)
    chosen = (
        None if config is None else configs.LaunchConfig(*config[::-1], num_warps=4, num_stages=2)
    )
    with torch.no_grad():
        return attention.prefill_attention(query, *pools, built.step, config=chosen, **options)


def compare(
    built: Built, dtype: torch.dtype, config: tuple[int, int] | None = None, **options: Any
) -> None:
    """The output, and the partial results that are merged into it."""
    output = run(built, config, **options)
    parts, lse = run(built, config, is_merged=False, **options)
    want, want_lse = expected(built)
    tolerance = TOLERANCE[dtype]
    assert output.dtype == dtype and parts.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(output.double().cpu(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        lse.double().cpu().logsumexp(0), want_lse, atol=tolerance, rtol=tolerance
    )
    weights = lse.double().softmax(0).nan_to_num(0.0)[..., None]
    merged = torch.where(weights > 0, weights * parts, 0.0).sum(0)
    torch.testing.assert_close(merged.cpu(), want, atol=tolerance, rtol=tolerance)


def check(case: Case, seed: int = 0) -> None:
    compare(build(case, seed), case.dtype, case.config)


@pytest.mark.slow_cases("*-s4", "0+40-*", "19+1_0+18_17+9_0+0_20+21_0+1-*")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_gets_what_the_reference_gives_it(case: Case) -> None:
    check(case)


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=3))
    if not sum(query for _, query in rows):
        rows.append((draw(st.integers(0, 9)), 1))
    kv_heads = draw(st.integers(1, 3))
    starts = None
    if draw(st.integers(0, 3)) == 0:
        starts = tuple(draw(st.integers(0, context)) for context, _ in rows)
    return Case(
        rows=tuple(rows),
        block=draw(st.sampled_from((4, 8, 16, 32))),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        key_dim=draw(st.sampled_from((8, 16, 24))),
        value_dim=draw(st.sampled_from((8, 16, 40))),
        window=draw(st.sampled_from((None, None, 1, 5, 16, 33))),
        causal=draw(st.integers(0, 3)) > 0,
        softcap=draw(st.sampled_from((None, None, 2.0))),
        sinks=draw(st.booleans()),
        bias=draw(st.integers(0, 3)) == 0,
        starts=starts,
        splits=draw(st.sampled_from((1, 1, 2, 3))),
        config=draw(st.sampled_from(((16, 16), (16, 32), (32, 16)))),
        joined=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=any_cases(), seed=st.integers(0, 3))
def test_any_combination_gives_what_the_reference_gives(case: Case, seed: int) -> None:
    check(case, seed)


@pytest.mark.slow
def test_more_rows_than_one_load_of_their_lengths_holds() -> None:
    check(Case(rows=tuple((row % 3, row % 2) for row in range(260)), heads=1, kv_heads=1))


@pytest.mark.slow
def test_default_tiles_and_splits_give_the_same() -> None:
    built = build(Case(((700, 20), (0, 90)), block=16))
    output = run(built, num_splits=None)
    torch.testing.assert_close(output.double().cpu(), expected(built)[0], atol=2e-5, rtol=2e-5)
