"""Every backend against a dense float64 computation without blocks; slots that must not be read
hold NaN."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import gather, reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import choose_store, store_portable
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.blocks import Store
from hf_paged.step import StepMetadata
from tests.support.attention import attend, rectangle
from tests.support.checks import in_threads
from tests.support.precision import TensorFloats

BACKENDS = ["reference", "gather", *(["cpp"] if cpp.is_available() else [])]
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

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    batch, longest = len(case.seq_lens), max(case.seq_lens)
    starts = case.starts or (0,) * batch
    per_row = max(1, -(-longest // case.block))
    num_blocks = batch * per_row + 1
    ids = torch.randperm(num_blocks, generator=generator)[: batch * per_row]
    tables = ids.view(batch, per_row).int()
    step = StepMetadata.rectangle(
        tables,
        case.seq_lens,
        case.block,
        query_len=case.queries,
        starts=starts,
        causal=case.causal,
        window=case.window,
    )
    dims = case.key_dim, case.value_dim
    key, value = (normal(batch, case.kv_heads, longest, dim) for dim in dims)
    heads = case.kv_heads * (2 if dims[0] == dims[1] and not case.joined else 1)
    width = dims[0] if heads > case.kv_heads else sum(dims)
    pool = torch.full((num_blocks, heads, case.block, width), math.nan, dtype=case.dtype)
    if heads > case.kv_heads:
        key_blocks, value_blocks = pool.chunk(2, dim=1)
    else:
        key_blocks, value_blocks = pool.split(dims, dim=3)
        if not case.joined:
            key_blocks, value_blocks = key_blocks.contiguous(), value_blocks.contiguous()
    query = normal(batch, case.queries, case.heads, case.key_dim).transpose(1, 2)
    sinks = normal(case.heads) if case.sinks else None
    bias = None
    if case.bias is not None:
        sizes = [batch, case.heads, case.queries]
        sizes = [size if axis in case.bias else 1 for axis, size in enumerate(sizes)]
        bias = normal(*sizes, longest + 3)
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = -math.inf
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = torch.finfo(case.dtype).min
    scale = case.key_dim**-0.5

    expected = torch.zeros(batch, case.queries, case.heads, case.value_dim, dtype=torch.float64)
    columns = torch.arange(longest)
    for row, (length, start) in enumerate(zip(case.seq_lens, starts)):
        position = torch.arange(length - case.queries, length)[:, None]
        end = position + 1 if case.causal else torch.full_like(position, length)
        sees = (columns >= start) & (columns < end)
        if case.window:
            sees &= columns > position - case.window
        used = columns[sees.any(0)]
        slots = tables[row].long()[used // case.block], slice(None), used % case.block
        key_blocks[slots] = key[row, :, used].transpose(0, 1)
        value_blocks[slots] = value[row, :, used].transpose(0, 1)
        group = case.heads // case.kv_heads
        spread = [side[row].double().repeat_interleave(group, 0) for side in (key, value)]
        logits = torch.einsum("hqd,htd->hqt", query[row].double(), spread[0]) * scale
        if case.softcap:
            logits = torch.tanh(logits / case.softcap) * case.softcap
        if bias is not None:
            full = bias.expand(batch, case.heads, case.queries, -1)[row, ..., :longest]
            # added in the compute precision: finfo.min absorbs the score, as it does in every
            # mask of a model
            precision = torch.promote_types(case.dtype, torch.float32)
            logits = (logits.to(precision) + full.to(precision)).double()
        logits = logits.masked_fill(~sees, -math.inf)
        if sinks is not None:
            ones = sinks.double()[:, None, None].expand(-1, case.queries, 1)
            logits = torch.cat([logits, ones], dim=-1)
        # all -inf: nothing is seen
        weights = logits.softmax(-1).nan_to_num(0.0)[..., :longest]
        expected[row] = torch.einsum("hqt,htd->qhd", weights, spread[1])
    options = {"scale": scale, "softcap": case.softcap, "sinks": sinks, "bias": bias}
    return Call(query, key_blocks, value_blocks, step, options, expected)


def check(case: Case, backend: str, seed: int = 0) -> None:
    call = build(case, seed)
    if backend == "cpp" and backends.cpp.unsupported_reason(call.made()) is not None:
        assert case.dtype == torch.float64
        return
    out = call.run(backend)
    assert out.shape == call.expected.shape and out.is_contiguous() and out.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), call.expected, atol=tolerance, rtol=tolerance)


HALF = (torch.bfloat16, torch.float16)
NARROW = dict(heads=6, kv_heads=2, key_dim=16, value_dim=16)
BF16, FP16 = HALF
CASES = [
    Case(),
    Case(seq_lens=(512, 5, 129), block=8, dtype=BF16),
    Case(seq_lens=(300, 257, 256, 255), block=256, heads=4, kv_heads=4, key_dim=128, value_dim=128),
    Case(seq_lens=(130, 70), queries=20, block=4, window=11, dtype=BF16),
    # rows shorter than query_len
    Case(seq_lens=(2, 70, 4), queries=5, key_dim=80, value_dim=80, block=32),
    Case(seq_lens=(33, 33, 90), queries=33, heads=6),  # square, causal, no past
    Case(seq_lens=(40, 12, 12), queries=40, starts=(7, 0, 3), heads=3, kv_heads=3),
    Case(seq_lens=(100, 64), heads=2, kv_heads=1, key_dim=9, value_dim=24, dtype=BF16),
    Case(seq_lens=(70, 40, 40), key_dim=72, value_dim=9, queries=40, joined=True, dtype=BF16),
    Case(seq_lens=(200, 17, 5), window=9, queries=5, starts=(0, 10, 2), block=8),
    Case(seq_lens=(200, 40), window=7, queries=33, heads=4),
    Case(seq_lens=(90, 50), starts=(37, 50)),  # the second row sees nothing
    Case(seq_lens=(90, 0), queries=2, causal=False, starts=(13, 0)),
    Case(seq_lens=(90, 1), sinks=True, starts=(0, 1)),
    Case(seq_lens=(90, 50), sinks=True, softcap=1.5, window=20, queries=3, dtype=BF16),
    Case(seq_lens=(50, 50, 50), sinks=True, queries=40, heads=4, bias=(0, 2), block=8),
    Case(seq_lens=(50, 9, 70), bias=(0, 1, 2), queries=5, softcap=3.0, sinks=True),
    Case(seq_lens=(70, 3), queries=2, dtype=torch.float64, heads=4),
    Case(seq_lens=(1500, 300), heads=8, kv_heads=1, block=64, dtype=FP16),
    # Query counts on either side of the portable path's thresholds: 32, 64 and slices of at most
    # 256.
    Case(seq_lens=(63, 130, 131), queries=63, dtype=BF16),
    Case(seq_lens=(64, 130, 131), queries=64, dtype=FP16),
    Case(seq_lens=(77, 3, 0, 200, 50), queries=77, starts=(5, 0, 0, 9, 50), **NARROW),
    Case(seq_lens=(75, 160), queries=75, causal=False, **NARROW),
    Case(seq_lens=(75, 160), queries=75, heads=6, key_dim=24, value_dim=16),
    Case(seq_lens=(260, 300, 7, 301), queries=260, **NARROW),
    Case(seq_lens=(300, 400), queries=259, starts=(0, 90), dtype=BF16, **NARROW),
    Case(seq_lens=(300, 290, 513), queries=290, window=20, block=8, **NARROW),
    Case((300, 257), queries=257, softcap=2.0, sinks=True, window=40, bias=(0, 1, 2), **NARROW),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_dense_attention(case: Case, backend: str) -> None:
    check(case, backend)


def any_case(seed: int, max_queries: int = 33) -> Case:
    """A small call with any combination of features."""
    draw = random.Random(seed)
    seq_lens = tuple(draw.randint(0, 90) for _ in range(draw.randint(1, 4)))
    causal, kv_heads = draw.random() < 0.5, draw.choice((1, 2, 3))
    key_dim, value_dim = draw.choices((8, 16, 40, 64), k=2)
    biases = (None, None, (), (0,), (1, 2), (0, 1, 2))
    return Case(
        seq_lens=seq_lens if any(seq_lens) else (1,),
        starts=tuple(draw.choice((0, draw.randint(0, length))) for length in seq_lens),
        queries=draw.choice([n for n in (1, 2, 3, 5, 16, 33) if n <= max_queries]),
        block=draw.choice((4, 8, 16, 32, 64)),
        heads=kv_heads * draw.choice((1, 2, 3, 7)),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=draw.choice((key_dim, value_dim)),
        joined=draw.random() < 0.3,
        window=draw.choice((None, draw.randint(1, 70))) if causal else None,
        causal=causal,
        softcap=draw.choice((None, None, 2.0)),
        sinks=draw.random() < 0.5,
        bias=draw.choice(biases),
        dtype=draw.choice((torch.float32, *HALF)),
    )


@pytest.mark.slow_cases(but=["0"])
@pytest.mark.parametrize("first", range(0, 60, 15))
def test_matches_dense_attention_on_any_sizes(first: int) -> None:
    for seed, backend in itertools.product(range(first, first + 15), BACKENDS):
        check(any_case(seed), backend, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_visible_gives_zeros(backend: str) -> None:
    """Nor do no rows."""
    case = Case(seq_lens=(20, 30), starts=(20, 30), sinks=True)
    hidden = build(replace(case, starts=None, bias=(), sinks=False))
    hidden.options["bias"].fill_(-math.inf)
    for call in (build(case), hidden):
        assert torch.equal(call.run(backend), torch.zeros(2, 1, 14, 64))
    step = StepMetadata.rectangle(torch.zeros(0, 1, dtype=torch.int32), (), 16)
    call = replace(build(Case()), step=step)
    assert replace(call, query=call.query[:0]).run(backend).shape == (0, 1, 14, 64)


GRADIENTS = [((20, 20, 9), 3), ((80, 80, 90), 80), ((300, 270), 270)]


@pytest.mark.parametrize(("seq_lens", "queries"), GRADIENTS, ids=str)
def test_gradients_match_the_reference(seq_lens: tuple[int, ...], queries: int) -> None:
    call = build(Case(seq_lens, queries=queries, dtype=torch.float64, **NARROW))
    grads = []
    for module in (reference, gather, backends):
        leaves = [x.nan_to_num(0.0).clone().requires_grad_() for x in call.inputs[:3]]
        attend(module, *leaves, call.step, **call.options).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[1:], [grads[0]] * 2)


def test_scratch_survives_inference_mode() -> None:
    call = build(Case())
    with torch.inference_mode():
        first = call.run("gather")
    other = build(replace(Case(), block=32))  # larger scratch, other plan
    torch.testing.assert_close(other.run("gather").double(), other.expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(call.run("gather"), first)


def test_threads_do_not_share_scratch() -> None:
    calls = [build(Case(seq_lens=(60 + i, 30)), seed=i) for i in range(4)]

    def work(call: Call) -> None:
        for backend in BACKENDS[1:] * 20:
            torch.testing.assert_close(call.run(backend).double(), call.expected, atol=2e-5, rtol=0)

    in_threads(*(functools.partial(work, call) for call in calls))


def chosen_store(*inputs: torch.Tensor) -> None:
    choose_store(*inputs)(*inputs[:2], inputs[4])


def cpp_store(*inputs: torch.Tensor) -> None:
    Store(*inputs)(*inputs[:2], inputs[4])


STORES = [chosen_store, store_portable, *([cpp_store] if cpp.is_available() else [])]


@pytest.mark.parametrize("block", [8, 16, 100])
@pytest.mark.parametrize("dims", [(16, 16), (40, 9)], ids=["d16", "d40_9"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_store_is_a_loop_over_tokens(block: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    key_dim, value_dim = dims
    batch, kv_heads, tokens, num_blocks = 3, 2, 5, 7
    shapes = [(batch, tokens, kv_heads, dim) for dim in (key_dim, value_dim)]
    states = [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]
    slots = torch.randperm(num_blocks * block)[: batch * tokens].view(batch, tokens)
    slots[1, :2] = -1
    both = torch.randn(num_blocks, kv_heads, block, key_dim + value_dim).to(dtype)
    expected = both.clone()
    stored = torch.cat(states, dim=3).transpose(1, 2)[slots >= 0]
    for slot, new in zip(slots[slots >= 0].tolist(), stored):
        expected[slot // block, :, slot % block] = new
    for store in STORES:
        for is_joined in (True, False):
            found = both.clone().split([key_dim, value_dim], dim=3)
            found = found if is_joined else [x.contiguous() for x in found]
            store(*states, *found, slots)
            assert torch.equal(torch.cat(found, dim=3), expected), store


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
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    best = backends.cpp if cpp.is_available() else gather
    call = build(Case())
    for other, backend in (
        (call, best),
        (build(Case(queries=70, seq_lens=(70,), dtype=BF16)), best),
        (replace(call, query=call.query.clone().requires_grad_()), gather),
        (build(Case(dtype=torch.float64)), gather),
    ):
        assert _selected(other) is backend
    for name in ("reference", "gather"):
        monkeypatch.setenv(kernels.BACKEND_VARIABLE, name)
        assert _selected(call) is backends.BACKENDS[name]
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "fast")
    message = "HF_PAGED_ATTENTION='fast' names no backend: use one of reference, gather, cpp"
    with pytest.raises(ValueError, match=message):
        _selected(call)


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_a_kernel_that_a_compiler_broke_is_not_used(
    num_rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    run = Attention.__call__

    def broken(self: Attention, query: Tensor, *others: object) -> Tensor:
        out = run(self, query, *others)  # type: ignore[arg-type]
        return out + 1e-2 * (query.shape[1] == num_rows)

    monkeypatch.setattr(Attention, "__call__", broken)
    monkeypatch.setattr(backends.cpp, "_agreements", {})
    assert _selected(build(Case())) is gather and "results differ from PyTorch" in caplog.text
    monkeypatch.setattr(Attention, "__call__", run)
    with TensorFloats():  # torch's products are less precise
        assert backends.cpp._agrees()
