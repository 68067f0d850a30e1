"""With `batch_invariant` a row gets the same bits however it is served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged import PagedConfig, PagedEngine
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.build import ISA_VARIABLE, PATHS, batch_invariant, best_path
from hf_paged.step import StepMetadata
from hf_paged.tape.invariant import (
    NotInvariant,
    _programs,
    batch_invariant_operations,
    in_fixed_order,
)
from tests.support import models
from tests.support.checks import in_threads

pytestmark = pytest.mark.usefixtures("needs_compiler")

NEW_TOKENS = 9
CONFIG = {"batch_invariant": True}
INVARIANT: dict[str, Any] = {"cache_implementation": "paged", "cache_config": CONFIG}


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
    logits: dict[int, list[torch.Tensor]] = {number: [] for number in rows}
    waiting = list(rows.items())

    def record(number: int) -> Any:
        return lambda ids, scores: (logits[number].append(scores[0].clone()), scores)[1]

    while waiting or engine.has_unfinished:
        for _ in range(draw.choice([1, 2, 40])):
            if waiting:
                number, prompt = waiting.pop()
                options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
                if number % 3 == 0:
                    options |= {"do_sample": True, "top_k": 20}
                engine.add_request(prompt, options, seed=number, logits_processor=[record(number)])
        for output in engine.step():
            assert output.result is None or output.result.error is None, output.result.error
    return {number: torch.stack(each) for number, each in logits.items()}


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
        **options,
    )


def check(
    model: PreTrainedModel,
    count: int,
    num_batches: int,
    kv_dtype: str | None = None,
    name: str = "llama",
) -> dict[str, int]:
    seed = int(kv_dtype is not None)  # with which all that is counted occurs
    draw, rows = random.Random(f"{name} {seed}"), dict(enumerate(prompts(count, seed)))
    alone: dict[int, torch.Tensor] = {}
    options: dict[str, Any] = {"batch_invariant": True, "kv_dtype": kv_dtype}
    with PagedEngine(model, PagedConfig(prefix_caching=False, **options)) as engine:
        for number, prompt in rows.items():
            alone |= run(engine, {number: prompt}, draw)
    seen = {"preemptions": 0, "cached": 0, "replayed": 0}
    for _ in range(num_batches):
        chosen = draw.sample(sorted(rows), min(count, 15 + draw.randint(0, 20)))
        with PagedEngine(model, config(draw, **options)) as engine:
            found = run(engine, {number: rows[number] for number in chosen}, draw)
            stats = engine.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["cached"] += stats.num_prefix_hit_tokens
        seen["replayed"] += stats.num_captured_steps
        for number, logits in found.items():
            assert torch.equal(logits, alone[number]), f"row {number} of {engine.config}"
    return seen


FULL = (pytest.mark.slow, pytest.mark.full)
FAMILIES = ("gemma3", "mixtral", "gpt2", "gpt_oss", "phi3", "qwen3")
HALF = torch.bfloat16
ROWS = [  # model, dtypes, rows, batches
    pytest.param("llama", HALF, None, 40, 8, marks=FULL, id="llama"),
    *(
        pytest.param("llama", dtype, None, 300, 20, marks=FULL, id=f"300-{dtype}")
        for dtype in (HALF, torch.float32, torch.float16)
    ),
    *(
        pytest.param("llama", HALF, kv_dtype, 10, 2, marks=pytest.mark.slow, id=kv_dtype)
        for kv_dtype in ("int8", "fp8_e4m3")
    ),
    *(pytest.param(name, HALF, None, 12, 3, marks=pytest.mark.slow, id=name) for name in FAMILIES),
]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype", "count", "num_batches"), ROWS)
def test_rows_are_the_same_alone_and_in_any_batch(
    name: str, dtype: torch.dtype, kv_dtype: str | None, count: int, num_batches: int
) -> None:
    seen = check(models.build(name).to(dtype), count, num_batches, kv_dtype, name)
    assert all(seen.values()) or name != "llama", seen


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_portable_products(dtype: torch.dtype, use_path: Callable[[str], None]) -> None:
    use_path("wide")
    check(models.build("llama").to(dtype), 8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 2])
def test_generate(num_beams: int) -> None:
    model, rows = models.build("llama").bfloat16(), [prompt[:30] for prompt in prompts(6, 5)]
    options = {"max_new_tokens": 20, "num_beams": num_beams, "do_sample": False, **INVARIANT}

    def texts(rows: list[list[int]]) -> list[list[int]]:
        found = model.generate(**models.left_padded(rows), **options)
        return found[:, max(map(len, rows)) :].tolist()

    assert texts(rows) == [texts([row])[0] for row in rows]


class _Part(torch.nn.Module):
    """A function in a module's place, which gets it and its input."""

    def __init__(self, inner: torch.nn.Module, function: Any) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner, x)


def with_mlps(function: Any) -> Any:
    model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp = _Part(layer.mlp, function)
    return model


MIXING = {
    "divides": lambda inner, x: inner(x / x.abs().amax()),
    "sums": lambda inner, x: inner(x) + 1e-3 * x.cumsum(1),
    "sorts": lambda inner, x: inner(x) + x.sort(1)[0],
    "sorts by name": lambda inner, x: inner(x) + x.sort(dim=1, stable=True)[0],
    "weighs": lambda inner, x: inner(x) * (1 + x.mT.softmax(1).mT * 20),
    "NumPy": lambda inner, x: inner(x) + torch.from_numpy(x.float().numpy()).to(x.dtype),
}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("t5", "the model has an encoder"),
        ("qwen3_next", "layers"),
        ("llama", "use_cache is False"),  # a call that only transformers serves
        *((name, "") for name in MIXING),  # forwards that mix rows
    ],
)
def test_models_and_calls_that_cannot_are_refused(what: str, reason: str) -> None:
    model = with_mlps(MIXING[what]).bfloat16() if what in MIXING else models.get(what)
    options = {"use_cache": False} if what == "llama" else {}
    with pytest.raises(ValueError, match=f"`batch_invariant` is True.*{reason}"):
        model.generate(models.token_ids(1, 4), max_new_tokens=2, **INVARIANT, **options)


def test_operations_without_a_kernel_are_refused() -> None:
    x = torch.randn(5, 41).abs()
    with torch.no_grad(), in_fixed_order(), batch_invariant_operations():
        assert torch.tensor(2.5).sum(0) == 2.5  # without dimensions
        # numbers that are equal but not the same
        assert not torch.signbit(x * 0.0).any() and torch.signbit(x * -0.0).all()
        known = len(_programs)
        for _ in range(3):
            x * float("nan")
        assert len(_programs) <= known + 1
        with pytest.raises(NotInvariant, match=r"aten\.linalg_vector_norm"):
            x.norm(dim=-1)
    assert not batch_invariant.get()


@pytest.fixture
def use_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def use(name: str) -> None:
        monkeypatch.setenv(ISA_VARIABLE, name)
        best_path.cache_clear()

    yield use
    monkeypatch.undo()
    best_path.cache_clear()


PATH_NAMES = list(PATHS)[: best_path() + 1] if cpp.is_available() else []


@pytest.mark.slow_cases("*-(16, 1, 80)-torch.float16-*", "700-(16, 1, 80)-torch.bfloat16-*")
@pytest.mark.parametrize("path", PATH_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 64), (16, 1, 80), (3, 1, 24)], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_attention(
    path: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
    use_path: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries of long rows alone, in chunks, in a batch with rows that share their first blocks, on
    any number of threads, and after freed tokens."""
    use_path(path)
    generator = torch.Generator().manual_seed(1)
    num_heads, kv_heads, dim = heads
    size, lengths = 16, [1500, 1301, 640, 601, 70]
    shapes = [(420, kv_heads, size)] * 2 + [(length, num_heads) for length in lengths]
    keys, values, *queries = (
        torch.randn(*shape, dim, generator=generator).to(dtype) for shape in shapes
    )
    order = torch.randperm(420, generator=generator).int()
    tables = torch.cat([order[:37].expand(5, 37), order[37:322].view(5, 57)], dim=1)

    def attend(parts: list[tuple[int, int, int]], dropped: int = 0) -> list[torch.Tensor]:
        """Output for queries [start, end) of rows, whose first `dropped` blocks are freed."""
        counts = [high - low for _, low, high in parts]
        step = StepMetadata(
            tables[[row for row, _, _ in parts], dropped:].contiguous(),
            tuple(itertools.accumulate(counts, initial=0)),
            tuple(end - dropped * size for _, _, end in parts),
            (0,) * len(parts),
            size,
            window=window,
            origins=(dropped * size,) * len(parts),
        )
        query = torch.cat([queries[row][low:high] for row, low, high in parts])
        found = Attention(query, keys, values, scale=0.2)(query, step)
        return list(found.split(counts))

    with in_fixed_order():
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        whole = [attend([(row, 0, length)])[0] for row, length in enumerate(lengths)]
        decodes = [(row, length - 1, length) for row, length in enumerate(lengths)]
        mixed = [(0, 1400, 1500), (3, 600, 601), (1, 3, 700), (4, 0, 70), (2, 639, 640)]
        for threads in (1, 2, 13):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            for spans in (decodes, decodes[:1], mixed):
                for (row, low, high), found in zip(spans, attend(spans)):
                    assert torch.equal(found, whole[row][low:high]), row
        if window is not None:
            assert torch.equal(attend([(0, 1450, 1500)], dropped=45)[0], whole[0][1450:])


@pytest.mark.slow
def test_products_of_slices() -> None:
    """Whose strides differ in a step of one token."""

    def half(inner: Any, x: torch.Tensor) -> torch.Tensor:
        weight = inner.down_proj.weight[:, :48].contiguous()
        return torch.nn.functional.linear(inner.up_proj(x).chunk(2, -1)[1], weight)

    check(with_mlps(half).bfloat16(), 6, 1)


def test_what_a_thread_computes_is_not_frozen_in_a_recording() -> None:
    """Recordings once replayed the numbers of the thread unchanged."""

    @torch.no_grad()
    def compute(inner: Any, x: torch.Tensor) -> torch.Tensor:
        return inner(x) + (x @ x.new_ones(64, 333) / 8 @ x.new_ones(333, 64)) * 1e-3

    model = with_mlps(lambda inner, x: in_threads(lambda: compute(inner, x))[0])
    ids, options = models.token_ids(3, 9), {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="paged", **options), plain)
