"""Decode steps as CUDA graphs against eager ones, on the device. `python -m pytest -m gpu`."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.fingerprints import read_state
from hf_paged.tape import cuda_graphs, misses, run_ahead
from tests.batching.test_runner import SIZE, Bench, Row, tokens
from tests.support import models
from tests.support.engine_helpers import assert_drained
from tests.support.graph_helpers import job, results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

# tokens of the prompt, new tokens
LENGTHS = [(5, 60), (19, 32), (9, 46), (1, 51), (12, 40), (30, 29), (3, 37)]
JOBS = [job(*lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def texts(
    model: Any, later: int = 0, **config: Any
) -> tuple[list[list[int]], hf_paged.EngineStats]:
    with PagedEngine(model, PagedConfig(**{"block_size": SIZE, **config})) as engine:
        found = results(engine, JOBS, later)
        stats = engine.stats()
        assert_drained(engine)
    assert [result.error for result in found] == [None] * len(found)
    return [result.token_ids for result in found], stats


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_give_the_tokens_of_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end and join; tables outgrow their graphs; blocks leave windows. The next step runs
    while the host waits for the previous step's tokens, which a separate copy transfers."""
    model, taken, take = models.build(name).to("cuda"), [], run_ahead.GraphRunAhead.take

    def counted(self: run_ahead.GraphRunAhead, plan: Any) -> Any:
        found = take(self, plan)
        taken.append(found[1])
        return found

    monkeypatch.setattr(run_ahead.GraphRunAhead, "take", counted)
    expected, eager = texts(model, later=3, capture=False)
    taken.clear()
    found, stats = texts(model, later=3)
    assert found == expected
    assert eager.num_captured_steps == 0 < stats.num_steps / 2 < stats.num_captured_steps
    assert sum(count > 0 for count in taken) > stats.num_steps / 3
    half = models.build(name).to("cuda", torch.bfloat16)
    (found, stats), (again, _) = texts(half), texts(half)
    assert found == again and stats.num_captured_steps > 20
    monkeypatch.setattr(run_ahead.GraphRunAhead, "fetch", lambda *arguments: None)
    assert texts(model, later=3)[0] == expected


def test_tokens_come_before_what_is_launched_after_them() -> None:
    tokens = torch.arange(5, device="cuda")
    arrived = run_ahead._start_copy(tokens)
    tokens.fill_(9)  # stands for the next step, which must neither be awaited nor overtake the copy
    assert arrived() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "do_sample": False},
        {"do_sample": False},
    ],
    ids=["samples", "beams", "greedy"],
)
def test_generate_before_and_after_changes_of_weights(options: dict[str, Any]) -> None:
    """In place, and replaced."""
    model = models.build("llama").to("cuda")
    inputs = models.put(models.prompt("llama"), model.device)
    weight = model.model.layers[0].mlp.down_proj.weight
    for change in (
        lambda: None,
        lambda: weight.data.mul_(-1),
        lambda: setattr(weight, "data", -weight.data),
    ):
        change()
        found = []
        for paged in ({}, models.PAGED, models.PAGED):
            torch.manual_seed(0)
            found.append(model.generate(**inputs, max_new_tokens=60, **options, **paged))
            assert torch.equal(found[0], found[-1])
        assert hf_paged.last_route(model).num_captured_steps > 40  # type: ignore[union-attr]
        hf_paged.check_integrity(model)


def test_swap_and_growth() -> None:
    model = models.build("llama").to("cuda")
    expected, _ = texts(model, capture=False)
    found, stats = texts(model, num_blocks=26, preemption="swap", prefix_caching=False)
    assert found == expected and stats.num_swaps > 0 < stats.num_captured_steps

    bench = Bench(model)
    bench.runner.begin(read_state(model))
    row, other = Row(tokens(120, 0), bench), Row(tokens(600, 1), bench)
    bench.run([row.take(2)])
    for step in range(40):
        if step == 20:
            before = bench.groups[0].storage.layers[0].keys.data_ptr()
            bench.run([other.take(500)])
            assert bench.groups[0].storage.layers[0].keys.data_ptr() != before
        logits, ids = bench.run([row.take(1)]), torch.tensor([row.token_ids], device="cuda")
        with torch.no_grad():
            plain = model(ids, use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits, plain, atol=1e-3, rtol=1e-3)
    assert bench.runner.num_captured_steps > 30


def test_a_replay_does_not_wait_for_the_device() -> None:
    bench = Bench(models.build("gemma3").to("cuda"))
    bench.runner.begin(read_state(bench.model))
    bench.cache.reserve(64, 64)
    rows = [Row(tokens(60, seed), bench) for seed in range(3)]
    bench.run([row.take(4) for row in rows])
    for _ in range(misses.MIN_MISSES + 1):
        bench.run([row.take(1) for row in rows])
    count = bench.runner.num_captured_steps
    assert count
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            bench.run([row.take(1) for row in rows])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bench.runner.num_captured_steps == count + 10


def test_memory_is_freed() -> None:
    model = models.build("llama", vocab_size=50_000).to("cuda")
    inputs = models.put(models.prompt("llama"), model.device)

    def held(is_called: bool) -> int:
        if is_called:
            model.generate(**inputs, max_new_tokens=60, **models.PAGED, do_sample=False)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    held(True)
    hf_paged.free(model)
    before = held(False)
    for _ in range(3):
        assert held(True) > before
        hf_paged.free(model)
        assert held(False) <= before
        texts(model)
        assert held(False) <= before


@pytest.mark.parametrize("noticed", ["before", "during"])
def test_a_capture_that_fails_leaves_the_device_as_it_was(
    noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_llama.LlamaMLP.forward

    def waits(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert float(x.abs().max()) > 0
        return own(self, x)

    model = models.build("llama").to("cuda")
    expected, _ = texts(model, capture=False)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", waits)
    if noticed == "during":
        unguarded = type("Unguarded", (contextlib.nullcontext,), {"host_results": ()})
        monkeypatch.setattr(cuda_graphs, "CaptureGuard", unguarded)
        monkeypatch.setattr(cuda_graphs, "HostResultReplay", contextlib.nullcontext)
    stream = torch.cuda.current_stream()
    torch.manual_seed(5)
    numbers = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    found, stats = texts(model)
    assert found == expected and stats.num_captured_steps == 0
    assert torch.equal(torch.rand(3, device="cuda"), numbers)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    monkeypatch.undo()
    found, stats = texts(model)
    assert found == expected and stats.num_captured_steps > 20
