"""Every backend against a dense float64 computation without blocks; slots that must not be read
hold NaN."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import gather, reference
from hf_paged.attention.backends.parts import SLICE_QUERIES, Part, plan_parts
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.reading import BlockLayout
from hf_paged.cache.store import choose_store, store_portable
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention, Store
from hf_paged.step import StepMetadata
from tests.support.attention import attend, rectangle
from tests.support.checks import in_threads
from tests.support.precision import TensorFloats

BACKENDS = ("reference", "gather", "cpp")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Case:
    """One call. A length below `queries` means that the first queries of the row are padding."""

    seq_lens: tuple[int, ...] = (33, 1, 70)
    starts: tuple[int, ...] | None = None
    queries: int = 1
    block: int = 16
    heads: int = 14
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    joined: bool = False  # K and V side by side in one tensor, so that no tile is contiguous
    sinks: bool = False
    bias: tuple[int, ...] | None = None  # which of batch, heads, queries are not broadcast
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = f"L{'_'.join(map(str, self.seq_lens))}-q{self.queries}-b{self.block}"
        name += f"-h{self.heads}_{self.kv_heads}"
        name += f"-d{self.key_dim}_{self.value_dim}-{str(self.dtype)[6:]}"
        for field in ("starts", "window", "softcap", "sinks", "bias", "joined"):
            if getattr(self, field):
                name += f"-{field}"
        return name if self.causal else name + "-full"


@dataclass(frozen=True)
class Call:
    query: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    step: StepMetadata
    options: dict
    expected: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, StepMetadata]:
        return self.query, self.key_blocks, self.value_blocks, self.step

    def made(self) -> AttentionCall:
        return rectangle(*self.inputs, **self.options)

    def run(self, backend: str) -> Tensor:
        with torch.no_grad():
            return attend(backends.BACKENDS[backend], *self.inputs, **self.options)


def build(case: Case, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, longest = len(case.seq_lens), max(case.seq_lens)
    starts = case.starts or (0,) * batch
    per_row = max(1, -(-longest // case.block))
    num_blocks = batch * per_row + 1
    tables = (
        torch.randperm(num_blocks, generator=generator)[: batch * per_row]
        .view(batch, per_row)
        .int()
    )
    step = StepMetadata.rectangle(
        tables,
        case.seq_lens,
        case.block,
        query_len=case.queries,
        starts=starts,
        causal=case.causal,
        window=case.window,
    )
    key = random(batch, case.kv_heads, longest, case.key_dim)
    value = random(batch, case.kv_heads, longest, case.value_dim)
    if case.joined:
        shape = (num_blocks, case.kv_heads, case.block, case.key_dim + case.value_dim)
        pool = torch.full(shape, math.nan, dtype=case.dtype)
        key_blocks, value_blocks = pool[..., : case.key_dim], pool[..., case.key_dim :]
    elif case.key_dim == case.value_dim:
        pool = torch.full(
            (num_blocks, 2 * case.kv_heads, case.block, case.key_dim), math.nan, dtype=case.dtype
        )
        key_blocks, value_blocks = pool[:, : case.kv_heads], pool[:, case.kv_heads :]
    else:
        shape = (num_blocks, case.kv_heads, case.block)
        key_blocks = torch.full((*shape, case.key_dim), math.nan, dtype=case.dtype)
        value_blocks = torch.full((*shape, case.value_dim), math.nan, dtype=case.dtype)
    query = random(batch, case.queries, case.heads, case.key_dim).transpose(1, 2)
    sinks = random(case.heads) if case.sinks else None
    bias = None
    if case.bias is not None:
        sizes = [
            size if axis in case.bias else 1
            for axis, size in enumerate((batch, case.heads, case.queries))
        ]
        bias = random(*sizes, longest + 3)
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = -math.inf
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = torch.finfo(case.dtype).min
    scale = case.key_dim**-0.5

    expected = torch.zeros(batch, case.queries, case.heads, case.value_dim, dtype=torch.float64)
    for row in range(batch):
        stored: set[int] = set()
        for i in range(case.queries):
            position = case.seq_lens[row] - case.queries + i
            high = position + 1 if case.causal else case.seq_lens[row]
            low = max(starts[row], position - case.window + 1) if case.window else starts[row]
            if low >= high:
                continue
            for t in set(range(low, high)) - stored:
                block, offset = tables[row, t // case.block], t % case.block
                key_blocks[block, :, offset] = key[row, :, t]
                value_blocks[block, :, offset] = value[row, :, t]
            stored.update(range(low, high))
            spread = [
                side[row, :, low:high].double().repeat_interleave(case.heads // case.kv_heads, 0)
                for side in (key, value)
            ]
            logits = torch.einsum("hd,htd->ht", query[row, :, i].double(), spread[0]) * scale
            if case.softcap:
                logits = torch.tanh(logits / case.softcap) * case.softcap
            if bias is not None:
                full = bias.expand(batch, case.heads, case.queries, longest + 3)[
                    row, :, i, low:high
                ]
                # added in the compute precision: finfo.min absorbs the score, as it does in every
                # mask of a model
                logits = (
                    (logits.float() + full.float()).double()
                    if case.dtype != torch.float64
                    else logits + full
                )
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
            # all -inf: nothing is seen
            weights = logits.softmax(-1).nan_to_num(0.0)[:, : high - low]
            expected[row, i] = torch.einsum("ht,htd->hd", weights, spread[1])
    options = {"scale": scale, "softcap": case.softcap, "sinks": sinks, "bias": bias}
    return Call(query, key_blocks, value_blocks, step, options, expected)


def check(case: Case, backend: str, seed: int = 0) -> None:
    call = build(case, seed)
    if backend == "cpp":
        if not cpp.is_available():
            pytest.skip("no compiler")
        if backends.cpp.unsupported_reason(call.made()) is not None:
            assert case.dtype == torch.float64
            return
    out = call.run(backend)
    assert out.shape == call.expected.shape and out.is_contiguous() and out.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), call.expected, atol=tolerance, rtol=tolerance)


HALF = (torch.bfloat16, torch.float16)
CASES = [
    Case(),
    Case(seq_lens=(512, 5, 129), block=8, dtype=torch.bfloat16),
    Case(seq_lens=(300, 257, 256, 255), block=256, heads=4, kv_heads=4, key_dim=128, value_dim=128),
    Case(seq_lens=(130, 4, 33), block=4),
    Case(seq_lens=(130, 70), queries=20, block=4, window=11, dtype=torch.bfloat16),
    Case(seq_lens=(31, 32, 33), queries=2, heads=4, kv_heads=2, key_dim=8, value_dim=8),
    Case(
        seq_lens=(40, 3),
        queries=3,
        heads=6,
        kv_heads=2,
        key_dim=40,
        value_dim=40,
        dtype=torch.float16,
    ),
    # rows shorter than query_len
    Case(seq_lens=(2, 70, 4), queries=5, key_dim=80, value_dim=80, block=32),
    Case(seq_lens=(20, 100), queries=16, heads=7, kv_heads=1, key_dim=16, value_dim=16),
    Case(seq_lens=(33, 33, 90), queries=33, heads=6, kv_heads=2),  # square, causal, no past
    Case(seq_lens=(40, 12, 12), queries=40, starts=(7, 0, 3), heads=3, kv_heads=3),
    Case(seq_lens=(100, 64), key_dim=64, value_dim=128, heads=6, kv_heads=2),
    Case(
        seq_lens=(100, 64),
        key_dim=24,
        value_dim=9,
        heads=2,
        kv_heads=1,
        queries=3,
        dtype=torch.bfloat16,
    ),
    Case(seq_lens=(100, 64), key_dim=9, value_dim=24, heads=2, kv_heads=1, dtype=torch.bfloat16),
    Case(seq_lens=(100, 64, 30), key_dim=32, value_dim=48, heads=6, kv_heads=2, joined=True),
    Case(
        seq_lens=(70, 40, 40),
        key_dim=72,
        value_dim=9,
        queries=40,
        joined=True,
        dtype=torch.bfloat16,
    ),
    Case(seq_lens=(200, 17, 5), window=16),
    Case(seq_lens=(200, 17, 5), window=9, queries=5, starts=(0, 10, 2), block=8),
    Case(seq_lens=(200, 40), window=7, queries=33, heads=4, kv_heads=2),
    Case(seq_lens=(90, 50), starts=(37, 50)),  # the second row sees nothing
    Case(seq_lens=(90, 0), queries=2, causal=False, starts=(13, 0)),
    Case(
        seq_lens=(64, 65), queries=16, causal=False, heads=6, kv_heads=2, key_dim=128, value_dim=128
    ),
    Case(seq_lens=(90, 50), softcap=2.5, queries=2),
    Case(seq_lens=(90, 1), sinks=True, starts=(0, 1)),
    Case(seq_lens=(90, 50), sinks=True, softcap=1.5, window=20, queries=3, dtype=torch.bfloat16),
    Case(seq_lens=(50, 50, 50), sinks=True, queries=40, heads=4, kv_heads=2, bias=(0, 2), block=8),
    Case(seq_lens=(50, 9), bias=(), queries=2),
    Case(seq_lens=(50, 9), bias=(0,), queries=2, starts=(11, 0), dtype=torch.bfloat16),
    Case(seq_lens=(50, 9), bias=(1,), queries=1),
    Case(seq_lens=(50, 9, 70), bias=(0, 1, 2), queries=5, softcap=3.0, sinks=True),
    Case(seq_lens=(70, 3), queries=2, dtype=torch.float64, heads=4),
    Case(seq_lens=(70, 3), dtype=torch.float64, heads=2),
    Case(seq_lens=(1500, 300), heads=8, kv_heads=1, block=64, dtype=torch.float16),
]
# Query counts on either side of the portable path's thresholds: 32, 64 and slices of at most 256.
MANY = dict(heads=6, kv_heads=2, key_dim=16, value_dim=16)
CASES += [
    Case(seq_lens=(63, 130, 131), queries=63, dtype=torch.bfloat16),
    Case(seq_lens=(64, 130, 131), queries=64, dtype=torch.bfloat16),
    Case(seq_lens=(64, 130, 131), queries=64, dtype=torch.float16),
    Case(seq_lens=(70, 113), queries=70, heads=3, kv_heads=3, key_dim=40, value_dim=40),
    # padding before queries
    Case(seq_lens=(77, 3, 0, 200, 50), queries=77, starts=(5, 0, 0, 9, 50), **MANY),
    Case(seq_lens=(75, 160), queries=75, causal=False, **MANY),
    Case(seq_lens=(75, 160), queries=75, heads=6, kv_heads=2, key_dim=24, value_dim=16),
    Case(seq_lens=(260, 300, 7, 301), queries=260, **MANY),
    Case(seq_lens=(300, 400), queries=259, starts=(0, 90), dtype=torch.bfloat16, **MANY),
    Case(seq_lens=(300, 290, 513), queries=290, window=20, block=8, **MANY),
    Case(seq_lens=(300, 290), queries=290, window=300, **MANY),
    Case(
        seq_lens=(300, 257), queries=257, softcap=2.0, sinks=True, window=40, bias=(0, 1, 2), **MANY
    ),
    Case(seq_lens=(300, 257), queries=257, heads=6, kv_heads=2, key_dim=9, value_dim=16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_dense_attention(case: Case, backend: str) -> None:
    check(case, backend)


@st.composite
def any_cases(draw: st.DrawFn, max_queries: int = 33) -> Case:
    """Small calls with any combination of features."""
    batch = draw(st.integers(1, 4))
    seq_lens = draw(st.tuples(*[st.integers(0, 90)] * batch).filter(any))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    causal = draw(st.booleans())
    dims = st.sampled_from((8, 16, 40, 64))
    key_dim = draw(dims)
    return Case(
        seq_lens=seq_lens,
        starts=tuple(
            draw(st.integers(0, max(0, length))) if draw(st.booleans()) else 0
            for length in seq_lens
        ),
        queries=draw(st.sampled_from([n for n in (1, 2, 3, 5, 16, 33) if n <= max_queries])),
        block=draw(st.sampled_from((4, 8, 16, 32, 64))),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 7))),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=draw(st.one_of(st.just(key_dim), dims)),
        joined=draw(st.sampled_from((False, False, True))),
        window=draw(st.one_of(st.none(), st.integers(1, 70))) if causal else None,
        causal=causal,
        softcap=draw(st.sampled_from((None, None, 2.0))),
        sinks=draw(st.booleans()),
        bias=draw(st.sampled_from((None, None, (), (0,), (1, 2), (0, 1, 2)))),
        dtype=draw(st.sampled_from((torch.float32, *HALF))),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=any_cases(), seed=st.integers(0, 3))
def test_matches_dense_attention_on_any_sizes(case: Case, seed: int) -> None:
    for backend in BACKENDS:
        if backend != "cpp" or cpp.is_available():
            check(case, backend, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_visible_gives_zeros(backend: str) -> None:
    if backend == "cpp" and not cpp.is_available():
        pytest.skip("no compiler")
    case = Case(seq_lens=(20, 30), starts=(20, 30), sinks=True)
    assert torch.equal(build(case).run(backend), torch.zeros(2, 1, 14, 64))
    hidden = build(replace(case, starts=None, bias=(), sinks=False))
    hidden.options["bias"].fill_(-math.inf)
    assert torch.equal(hidden.run(backend), torch.zeros(2, 1, 14, 64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend: str) -> None:
    if backend == "cpp" and not cpp.is_available():
        pytest.skip("no compiler")
    call = build(Case())
    step = StepMetadata.rectangle(torch.zeros(0, 1, dtype=torch.int32), (), 16)
    assert replace(call, query=call.query[:0], step=step).run(backend).shape == (0, 1, 14, 64)


@pytest.mark.parametrize(
    ("seq_lens", "queries"), [((20, 20, 9), 3), ((80, 80, 90), 80), ((300, 270), 270)], ids=str
)
def test_gradients_match_the_reference(seq_lens: tuple[int, ...], queries: int) -> None:
    shape = dict(heads=4, kv_heads=2, key_dim=8, value_dim=8, dtype=torch.float64)
    call = build(Case(seq_lens=seq_lens, queries=queries, **shape))
    grads = []
    for module in (reference, gather, backends):
        leaves = [
            t.nan_to_num(0.0).clone().requires_grad_()
            for t in (call.query, call.key_blocks, call.value_blocks)
        ]
        attend(module, *leaves, call.step, **call.options).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def test_scratch_survives_inference_mode() -> None:
    call = build(Case())
    with torch.inference_mode():
        first = call.run("gather")
    other = build(replace(Case(), block=32))  # larger scratch, other plan
    torch.testing.assert_close(other.run("gather").double(), other.expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(call.run("gather"), first)


def parts_of(call: Call, step: StepMetadata | None = None) -> tuple[Part, ...]:
    layouts = [BlockLayout.of(x) for x in (call.key_blocks, call.value_blocks)]
    return (step or call.step).plan(plan_parts, *layouts)[0]


def test_mask_of_a_step_is_a_corner_of_one() -> None:
    call = build(
        Case(seq_lens=(700, 600, 300), queries=300, heads=2, kv_heads=1, key_dim=8, value_dim=8)
    )
    call.run("gather")
    (mask,) = (made for made in call.step._plans.values() if isinstance(made, Tensor))
    assert mask.untyped_storage().nbytes() <= 4 * SLICE_QUERIES * 704  # rows of whole alignments
    for part in parts_of(call):
        assert [(q.stop - q.start, seen.start) for q, seen in part.slices] == [(150, 0), (150, 0)]
        assert [seen.stop for _, seen in part.slices] == [part.length - 150, part.length]
    for part in parts_of(call, replace(call.step, window=20)):
        assert all(seen.stop - seen.start <= 150 + 19 for _, seen in part.slices)


def test_threads_do_not_share_scratch() -> None:
    calls = [build(Case(seq_lens=(60 + i, 30)), seed=i) for i in range(4)]
    for call in calls:
        call.run("cpp" if cpp.is_available() else "gather")
    wrong: list[str] = []

    def work(call: Call) -> None:
        for backend in ("gather", "cpp") if cpp.is_available() else ("gather",):
            for _ in range(20):
                if not torch.allclose(call.run(backend).double(), call.expected, atol=2e-5):
                    wrong.append(backend)

    in_threads(*(functools.partial(work, call) for call in calls))
    assert not wrong


def test_plan_lives_as_long_as_its_step() -> None:
    call = build(Case())
    call.run("gather")
    part = weakref.ref(parts_of(call)[0])
    assert parts_of(call)[0] is part()
    del call
    assert part() is None


def chosen_store(*inputs: torch.Tensor) -> None:
    choose_store(*inputs)(*inputs[:2], inputs[4])


def cpp_store(*inputs: torch.Tensor) -> None:
    Store(*inputs)(*inputs[:2], inputs[4])


STORES = [chosen_store, store_portable, *([cpp_store] if cpp.is_available() else [])]


@pytest.mark.parametrize("block", [8, 16, 100])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (40, 9)], ids=["d16", "d40_9"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_is_a_loop_over_tokens(
    block: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    batch, kv_heads, tokens, num_blocks = 3, 2, 5, 7
    generator = torch.Generator().manual_seed(block)
    keys = (
        torch.randn(batch, tokens, kv_heads, key_dim, generator=generator).to(dtype).transpose(1, 2)
    )
    values = (
        torch.randn(batch, tokens, kv_heads, value_dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)
    )
    slots = torch.randperm(num_blocks * block, generator=generator)[: batch * tokens].view(
        batch, tokens
    )
    slots[1, :2] = -1
    both = torch.randn(num_blocks, kv_heads, block, key_dim + value_dim).to(dtype)
    blocks = [both[..., :key_dim], both[..., key_dim:]]
    expected = [b.clone() for b in blocks]
    for row in range(batch):
        for token in range(tokens):
            if slots[row, token] >= 0:
                block_id, offset = divmod(int(slots[row, token]), block)
                expected[0][block_id, :, offset] = keys[row, :, token]
                expected[1][block_id, :, offset] = values[row, :, token]
    for store in STORES:
        joined = both.clone()
        for found in ([b.clone() for b in blocks], [joined[..., :key_dim], joined[..., key_dim:]]):
            store(keys, values, found[0], found[1], slots)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), store


def test_store_converts_and_checks() -> None:
    pool = torch.zeros(4, 4, 8, 16, dtype=torch.bfloat16)
    keys = torch.randn(1, 2, 1, 16)
    chosen_store(keys, keys, pool[:, :2], pool[:, 2:], torch.tensor([[9]]))
    assert torch.equal(pool[1, :2, 1], keys[0, :, 0].bfloat16()) and pool.count_nonzero() == 64
    same = keys.bfloat16()
    for store in STORES:
        with pytest.raises(IndexError):
            store(same, same, pool[:, :2], pool[:, 2:], torch.tensor([[4 * 8]]))


def _selected(call: Call) -> ModuleType:
    return backends.select(replace(call, step=replace(call.step)).made())


def test_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    best = backends.cpp if cpp.is_available() else gather
    call = build(Case())
    assert _selected(call) is best
    assert _selected(replace(call, query=call.query.clone().requires_grad_())) is gather
    assert _selected(build(Case(queries=70, seq_lens=(70,), dtype=torch.bfloat16))) is best
    assert _selected(build(Case(dtype=torch.float64))) is gather
    for name in ("reference", "gather"):
        monkeypatch.setenv(kernels.VARIABLE, name)
        assert _selected(call) is backends.BACKENDS[name]
    monkeypatch.setenv(kernels.VARIABLE, "fast")
    with pytest.raises(
        ValueError,
        match="HF_PAGED_ATTENTION='fast' names no backend: use one of reference, gather, cpp",
    ):
        _selected(call)


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
def test_a_kernel_is_not_taken_for_broken_where_torchs_products_are_less_precise() -> None:
    with TensorFloats():
        assert backends.cpp._agrees.__wrapped__()


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_a_kernel_that_a_compiler_broke_is_not_used(
    num_rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    run = Attention.__call__

    def broken(self: Attention, query: Tensor, *others: object) -> Tensor:
        out = run(self, query, *others)  # type: ignore[arg-type]
        return out + 1e-2 * (query.shape[1] == num_rows)

    monkeypatch.setattr(Attention, "__call__", broken)
    monkeypatch.setattr(backends.cpp, "_agrees", functools.cache(backends.cpp._agrees.__wrapped__))
    assert _selected(build(Case())) is gather and "results differ from PyTorch" in caplog.text
