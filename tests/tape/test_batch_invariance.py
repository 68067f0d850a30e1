"""With `batch_invariant` a row gets the same bits alone, in any batch, in chunks, preempted, after
cached prefixes."""

from __future__ import annotations

import functools
import random
import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged import PagedConfig, PagedEngine
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.build import ISA_VARIABLE, PATHS, batch_invariant, best_path
from hf_paged.step import Lengths, StepMetadata
from hf_paged.tape.invariant import (
    NotInvariant,
    _programs,
    batch_invariant_operations,
    in_fixed_order,
)
from tests.support import models

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")

NEW_TOKENS = 9


class Recorder:
    """A logits processor that records its inputs."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores[0].clone())
        return scores


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return models.build(name).to(dtype)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Rows, some with a common prefix of a block, a tile of 64 tokens or more."""
    draw = random.Random(seed)
    own = [[draw.randrange(3, models.VOCAB_SIZE) for _ in range(200)] for _ in range(4)]
    found = []
    for _ in range(count):
        prefix = draw.choice(own)[: draw.choice([0, 0, 5, 16, 70, 150])]
        found.append(
            prefix + [draw.randrange(3, models.VOCAB_SIZE) for _ in range(draw.randint(1, 40))]
        )
    return found


def run(
    engine: PagedEngine, rows: dict[int, list[int]], draw: random.Random
) -> dict[int, torch.Tensor]:
    """Logits `(NEW_TOKENS, vocab_size)` of each row, greedy or sampled with its seed; rows join one
    by one."""
    recorders, waiting = {number: Recorder() for number in rows}, list(rows.items())
    while waiting or engine.has_unfinished:
        for _ in range(draw.choice([1, 2, 40])):
            if waiting:
                number, prompt = waiting.pop()
                options: dict[str, Any] = {
                    "max_new_tokens": NEW_TOKENS,
                    "do_sample": number % 3 == 0,
                }
                options |= {"top_k": 20} if options["do_sample"] else {}
                engine.add_request(
                    prompt, options, seed=number, logits_processor=[recorders[number]]
                )
        for output in engine.step():
            assert output.result is None or output.result.error is None, output.result.error
    return {number: torch.stack(recorder.logits) for number, recorder in recorders.items()}


def config(draw: random.Random, **options: Any) -> PagedConfig:
    block_size = draw.choice([8, 16])
    return PagedConfig(
        block_size=block_size,
        # room for two growing rows, or three
        num_blocks=draw.choice([None, 400 // block_size, 400 // block_size]),
        max_num_batched_tokens=draw.choice([13, 64, 2048]),
        max_num_seqs=draw.choice([3, 16, 256]),
        preemption=draw.choice(["recompute", "swap"]),
        prefix_caching=draw.random() < 0.7,
        batch_invariant=True,
        **options,
    )


def check(
    name: str,
    dtype: torch.dtype,
    count: int,
    num_batches: int,
    seed: int = 0,
    kv_dtype: str | None = None,
) -> dict[str, int]:
    draw, model = random.Random(f"{name} {seed}"), model_of(name, dtype)
    rows = dict(enumerate(prompts(count, seed)))
    alone: dict[int, torch.Tensor] = {}
    with PagedEngine(
        model, PagedConfig(batch_invariant=True, prefix_caching=False, kv_dtype=kv_dtype)
    ) as engine:
        for number, prompt in rows.items():
            alone |= run(engine, {number: prompt}, draw)
    seen = {"preemptions": 0, "cached": 0, "replayed": 0}
    for _ in range(num_batches):
        chosen = draw.sample(sorted(rows), min(count, 15 + draw.randint(0, 20)))
        with PagedEngine(model, config(draw, kv_dtype=kv_dtype)) as engine:
            found = run(engine, {number: rows[number] for number in chosen}, draw)
            stats = engine.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["cached"] += stats.num_prefix_hit_tokens
        seen["replayed"] += stats.num_captured_steps
        for number, logits in found.items():
            assert torch.equal(logits, alone[number]), f"row {number} of {engine.config}"
    return seen


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.full
def test_rows_are_the_same_alone_and_in_any_batch() -> None:
    seen = check("llama", torch.bfloat16, count=40, num_batches=8)
    assert all(seen.values()), seen


@pytest.mark.slow_cases("int8")
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
def test_quantized_keys_and_values(kv_dtype: str) -> None:
    seen = check("llama", torch.bfloat16, count=10, num_batches=2, seed=1, kv_dtype=kv_dtype)
    assert all(seen.values()), seen


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_300_rows_in_20_batches(dtype: torch.dtype) -> None:
    seen = check("llama", dtype, count=300, num_batches=20)
    assert all(seen.values()), seen


@pytest.mark.slow_cases("gemma3", "mixtral")
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "mixtral",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "gpt_oss", "phi3", "qwen3")),
    ],
)
def test_other_families(name: str) -> None:
    check(name, torch.bfloat16, count=12, num_batches=3)


@pytest.mark.slow
def test_the_portable_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "wide")
    best_path.cache_clear()
    try:
        for dtype in (torch.bfloat16, torch.float16):
            check("llama", dtype, count=8, num_batches=2)
    finally:
        monkeypatch.undo()
        best_path.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 2])
def test_generate(num_beams: int) -> None:
    model = model_of("llama", torch.bfloat16)
    rows = [prompt[:30] for prompt in prompts(6, 5)]
    options = {"max_new_tokens": 20, "num_beams": num_beams, "do_sample": False}
    config = {"batch_invariant": True}

    def texts(rows: list[list[int]]) -> list[list[int]]:
        width = max(map(len, rows))
        ids = torch.tensor([[models.PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        found = model.generate(
            ids, attention_mask=mask, cache_implementation="paged", cache_config=config, **options
        )
        return [row[width:] for row in found.tolist()]

    assert texts(rows) == [texts([row])[0] for row in rows]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "the model has an encoder"),
        ("qwen3_next", "layers"),
        ("whisper", "the model has an encoder"),
    ],
)
def test_models_that_cannot_are_refused(name: str, reason: str) -> None:
    model = models.get(name)
    inputs = models.prompt(name)
    with pytest.raises(ValueError, match=f"`batch_invariant` is True.*{reason}"):
        model.generate(
            **inputs,
            max_new_tokens=2,
            cache_implementation="paged",
            cache_config={"batch_invariant": True},
        )


def test_calls_that_only_transformers_serves_are_refused() -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    options = {
        "cache_implementation": "paged",
        "cache_config": {"batch_invariant": True},
        "max_new_tokens": 2,
    }
    with pytest.raises(ValueError, match=r"`batch_invariant` is True.*use_cache is False"):
        models.get("llama").generate(ids, use_cache=False, **options)


def test_operations_without_a_kernel_are_refused() -> None:
    x = torch.randn(4, 8)
    with in_fixed_order(), batch_invariant_operations():
        assert torch.equal(x * 2 + 1, (x * 2 + 1).clone())
        with pytest.raises(NotInvariant, match=r"aten\.linalg_vector_norm"):
            x.norm(dim=-1)
    assert not batch_invariant.get()


PATH_NAMES = list(PATHS)[: best_path() + 1] if cpp.is_available() else []


@pytest.mark.parametrize("path", PATH_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 64), (16, 1, 80), (3, 1, 24)], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_attention(
    path: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries of long rows alone, in chunks, in a batch with rows that share their first blocks, on
    any number of threads, and after freed tokens."""
    monkeypatch.setenv(ISA_VARIABLE, path)
    best_path.cache_clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(1)
    num_heads, kv_heads, dim = heads
    size, shared, lengths = 16, 37, [1500, 1301, 640, 601, 70]  # the first rows share blocks
    keys, values = (
        torch.randn(420, kv_heads, size, dim, generator=generator).to(dtype) for _ in range(2)
    )
    order = torch.randperm(420, generator=generator).int()
    tables, used = [], shared
    for length in lengths:
        needed = -(-length // size)
        own = max(0, needed - shared)
        tables.append(torch.cat([order[:shared][:needed], order[used : used + own]]))
        used += own
    queries = [
        torch.randn(length, num_heads, dim, generator=generator).to(dtype) for length in lengths
    ]

    def attend(parts: list[tuple[int, int, int]], dropped: int = 0) -> list[torch.Tensor]:
        """Output for queries [start, end) of rows, whose first `dropped` blocks are freed."""
        table = torch.zeros(len(parts), 100, dtype=torch.int32)
        for at, (row, _, end) in enumerate(parts):
            needed = tables[row][dropped : -(-end // size)]
            table[at, : len(needed)] = needed
        start = [0]
        for _, low, high in parts:
            start.append(start[-1] + high - low)
        step = StepMetadata(
            table,
            tuple(start),
            tuple(end - dropped * size for _, _, end in parts),
            (0,) * len(parts),
            size,
            window=window,
            origins=(dropped * size,) * len(parts),
        )
        query = torch.cat([queries[row][low:high] for row, low, high in parts])
        found = Attention(query, keys, values, scale=0.2)(query, step)
        return list(found.split([high - low for _, low, high in parts]))

    try:
        with in_fixed_order():
            whole = [attend([(row, 0, length)])[0] for row, length in enumerate(lengths)]
            last = [x[-1:] for x in whole]
            for threads in (1, 2, 13):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
                for row, found in enumerate(attend(decodes)):
                    assert torch.equal(found, last[row]), row
                assert torch.equal(attend(decodes[:1])[0], last[0])
                mixed = attend(
                    [(0, 1400, 1500), (3, 600, 601), (1, 3, 700), (4, 0, 70), (2, 639, 640)]
                )
                spans = [(0, 1400, 1500), (3, 600, 601), (1, 3, 700), (4, 0, 70), (2, 639, 640)]
                for (row, low, high), found in zip(spans, mixed):
                    assert torch.equal(found, whole[row][low:high]), row
                if window is not None:
                    assert torch.equal(
                        attend([(0, 1450, 1500)], dropped=45)[0], whole[0][1450:1500]
                    )
    finally:
        monkeypatch.undo()
        best_path.cache_clear()


def test_lengths_hold_origins_of_packed_rows() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    step = StepMetadata(table, (0, 1, 3), (5, 9), (0, 0), 16, origins=(0, 32))
    lengths = step.on_device
    assert isinstance(lengths, Lengths) and lengths.origins is not None
    assert lengths.origins.tolist() == [0, 32] and lengths.query_start is not None
    assert lengths.query_start.tolist() == [0, 1, 3]
    assert step.rows(1, 2).origins == (32,)
    assert (
        StepMetadata(
            table, (0, 1, 3), (5, 9), (0, 0), 16, columns=range(9), origins=(0, 4)
        ).on_device.origins
        is None
    )


class _Part(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


class _Mixes(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x / x.abs().amax())


class _Sums(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1e-3 * x.cumsum(1)


class _Weighs(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + (x.transpose(1, 2) * 3).softmax(1).transpose(1, 2) * 20)


class _InAThread(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def run() -> None:
            with torch.no_grad():
                found.append(
                    self.inner(x) + (x @ x.new_ones(64, 333) / 8 @ x.new_ones(333, 64)) * 1e-3
                )

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]


class _InNumPy(_Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.from_numpy(x.float().numpy()).to(x.dtype)


@pytest.mark.parametrize("kind", [_Mixes, _Sums, _Weighs, _InNumPy])
def test_forwards_that_mix_rows_are_refused(kind: type[_Part]) -> None:
    model = models.build("llama").to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp)
    with pytest.raises(ValueError, match="`batch_invariant` is True"):
        model.generate(
            torch.ones(1, 4, dtype=torch.long),
            max_new_tokens=2,
            cache_implementation="paged",
            cache_config={"batch_invariant": True},
        )


class _HalfOfOne(torch.nn.Module):
    """A product of a slice whose strides differ in a step of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 192), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(up) * gate[..., :64]


@pytest.mark.slow
def test_products_of_slices() -> None:
    torch.manual_seed(0)
    model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp = _HalfOfOne()
    model.to(torch.bfloat16)
    draw, rows = random.Random(1), dict(enumerate(prompts(6, 3)))
    with PagedEngine(model, PagedConfig(batch_invariant=True)) as engine:
        together = run(engine, rows, draw)
    for number, prompt in rows.items():
        with PagedEngine(model, PagedConfig(batch_invariant=True)) as engine:
            assert torch.equal(run(engine, {number: prompt}, draw)[number], together[number])


def test_what_a_thread_computes_is_not_frozen_in_a_recording() -> None:
    """Recordings once replayed the numbers of the thread unchanged."""
    model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp = _InAThread(layer.mlp)
    ids = models.token_ids(3, 9)
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="paged", **options), plain)


def test_numbers_that_are_equal_but_not_the_same() -> None:
    x = torch.randn(5, 41).abs()
    with torch.no_grad(), in_fixed_order(), batch_invariant_operations():
        zeros = x * 0.0, x * -0.0
        known = len(_programs)
        for _ in range(3):
            x * float("nan")
        assert len(_programs) <= known + 1
    assert not torch.signbit(zeros[0]).any() and torch.signbit(zeros[1]).all()
