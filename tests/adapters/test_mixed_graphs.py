"""Recorded steps that mix chunks and decodes, and decodes with shared prefixes, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, kernels
from hf_paged.batching.execution.buckets import chunk_bucket
from hf_paged.kernels import cpp
from hf_paged.kernels.triton import cascade
from hf_paged.tape import graph_keys, shared_prefixes
from hf_paged.tape import graphs as recording
from hf_paged.tape.graph_keys import GraphKey as Key
from tests.batching.test_runner import SIZE, Row, assert_close, check_random_schedule, tokens
from tests.support import models
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, lone_run, prompts
from tests.support.graph_helpers import (
    CapturedBench,
    FakeGraphs,
    graphs_of,
    results,
    use_fake_graphs,
)
from tests.support.latents import build_deepseek

GREEDY = {"do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing reads lengths from tensors"
)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    yield use_fake_graphs(monkeypatch)


def _use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.triton.is_available(torch.device("cpu")):
        pytest.skip("no Triton, or TRITON_INTERPRET unset")
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")


def sizes_of(bench: Any) -> list[Key]:
    return [key._replace(variant=None) for key in graphs_of(bench.memory)._graphs]


def share(parent: Row, rows: list[Row]) -> None:
    """Makes rows share the computed blocks of `parent`."""
    for row in rows:
        row.num_computed_tokens = parent.num_computed_tokens
        row.blocks.tables = [table.fork() for table in parent.blocks.tables]


# ------------------------------------------------------------------------------------------ sizes


def test_few_sizes_serve_all_chunks() -> None:
    found = [chunk_bucket(n) for n in range(1, 513)]
    assert sorted(set(found)) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(n <= size <= max(16, 3 * n / 2) for n, size in enumerate(found, 1))


def test_which_graph_serves_which_step() -> None:
    serves = Key.serves
    decodes, mixed = Key(8, (4,)), Key(8, (4,), 4, 32)
    assert (
        serves(decodes, Key(4, (2,))) and not serves(decodes, mixed) and not serves(mixed, decodes)
    )
    assert serves(mixed, Key(2, (4,), 4, 16)) and not serves(mixed, Key(2, (4,), 8, 32))
    assert not serves(Key(8, (4,), 4, 64), Key(8, (4,), 4, 24)), "more padding than tokens"
    shared = decodes._replace(prefixes=((4, 4),))
    assert serves(decodes, shared) and not serves(shared, decodes)
    assert not serves(shared, shared._replace(prefixes=((8, 4),)))
    assert not serves(decodes._replace(variant=0), decodes._replace(variant=1))


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("kernel", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_schedules_give_plain_logits(
    name: str, kernel: str, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    model = models.build(name, num_hidden_layers=2 if layers else 1, **layers)
    bench = CapturedBench(model, graphs)
    bench.run([Row(tokens(9, 99), bench).take(9)])
    if kernel == "triton":
        _use_triton(monkeypatch)
    bench.begin()
    check_random_schedule(bench, num_steps=24 if kernel == "cpp" else 10)
    assert any(sizes.num_chunks for sizes in sizes_of(bench))
    assert bench.runner.num_captured_steps == graphs.num_replays > (10 if kernel == "cpp" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_an_engine_gives_plain_tokens(name: str, graphs: FakeGraphs) -> None:
    """Almost every step is a replay, including those with prompt chunks."""
    model = models.build(name)
    lengths = [(5, 40), (19, 12), (39, 26), (1, 31), (12, 20), (30, 9), (3, 17)]
    jobs: list[Any] = []
    for number, (prompt, new) in enumerate(lengths):
        jobs.append(
            (
                prompts(prompt, seed=number)[0],
                {"generation_config": {**GREEDY, "max_new_tokens": new}},
            )
        )
    with PagedEngine(
        model, PagedConfig(block_size=SIZE, max_num_batched_tokens=24, num_blocks=200)
    ) as engine:
        for _ in range(2):  # recordings of the first run serve the second
            before = engine.stats()
            found = results(engine, jobs, later=3)
        stats = engine.stats()
        assert stats.num_captured_steps - before.num_captured_steps > 0.8 * (
            stats.num_steps - before.num_steps
        )
        assert {key.num_chunk_tokens for key in graphs_of(engine.memory)._graphs} >= {0, 16}  # type: ignore[attr-defined]
        assert_drained(engine)
    for (prompt, options), result in zip(jobs, found):
        assert_same_as_lone(
            lone_run(model, prompt, options["generation_config"]), result, GREEDY, name
        )


def test_padding_writes_nothing(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 128)
    bench = CapturedBench(models.get("llama"), graphs)
    layers = bench.groups[0].storage.layers.values()
    for layer in layers:
        # new memory may still hold the very keys that an earlier pool had in the same slots
        layer.data.fill_(1e4)
    rows, others = ([Row(tokens(60, seed + 9 * n), bench) for seed in range(3)] for n in range(2))
    bench.run([row.take(3) for row in rows])
    for _ in range(3):
        bench.run(
            [*(row.take(1) for row in rows), *(other.take(8, known=60) for other in others[:2])]
        )
    before = [layer.data[0].view(torch.int32).clone() for layer in layers]
    bench.run([*(row.take(1) for row in rows), others[2].take(9, known=60)])
    assert graphs.num_replays == 3 and len(graphs.graphs) == 1
    for layer, old in zip(layers, before):
        # [num_blocks, block_size]
        changed = (layer.data[0].view(torch.int32) != old).any(dim=3).any(dim=1)
        assert changed.sum() == 3 + 9


def test_a_forward_that_does_not_pick_logits(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs)
    bench.runner._takes_logits_to_keep = False
    # as many chunk rows as the smallest token capacity for chunks
    many = [Row(tokens(12, seed), bench) for seed in range(14)]
    for _ in range(4):
        items = [
            row.take(2 if number == 0 else 1, known=12 if number % 2 else None)
            for number, row in enumerate(many)
        ]
        logits = bench.run(items)
        ready = [row for row, _ in items if row.num_computed_tokens == len(row.token_ids)]
        assert_close(logits, [bench.plain(row) for row in ready])
    # tables grew once
    assert graphs.num_replays == 2 and {sizes.num_chunks for sizes in sizes_of(bench)} == {16}


# -------------------------------------------------------------------------------- shared prefixes


@pytest.fixture
def free_cascades(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = cascade.CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=64)
    monkeypatch.setattr(shared_prefixes, "default_costs", lambda *tensors: costs)
    monkeypatch.setattr(cascade, "default_costs", lambda *tensors: costs)


@pytest.mark.slow_cases("llama-None")
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", None),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (("llama", "int8"), ("gemma3", None))
        ),
    ],
)
def test_shared_prefixes_are_read_once(
    name: str,
    kv_dtype: str | None,
    graphs: FakeGraphs,
    free_cascades: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two families of rows, and one row alone; rows leave, and a chunk joins them."""
    from hf_paged.kernels.triton import attention

    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    bench = CapturedBench(
        models.build(name, num_hidden_layers=1 + len(layers), **layers), graphs, kv_dtype=kv_dtype
    )
    # of logits of about 3, where keys and values are rounded
    tolerance = 1e-4 if kv_dtype is None else 0.2
    parents = [Row(tokens(count * SIZE, count), bench) for count in (3, 2)]
    bench.run([parent.take(len(parent.tokens)) for parent in parents])
    rows = [Row(parents[n % 2].tokens + tokens(30, 10 + n), bench) for n in range(5)]
    for parent, own in zip(parents, (rows[::2], rows[1::2])):
        share(parent, own)
    rows.append(Row(tokens(40, 30), bench))
    bench.run([rows[-1].take(11)])
    bench.run([row.take(2) for row in rows])  # in window layers nothing is shared any more
    _use_triton(monkeypatch)
    calls = []
    cascaded = attention.cascade_attention
    monkeypatch.setattr(
        attention,
        "cascade_attention",
        lambda *args, **features: calls.append(args[3]) or cascaded(*args, **features),
    )
    bench.begin()
    for _ in range(3):
        assert_close(bench.decode(*rows), [bench.plain(row) for row in rows], tolerance)
    assert graphs.num_replays == 2 and any(groups for groups, _ in sizes_of(bench)[0].prefixes)
    recorded = [plan for plan in calls if plan.tails.lengths is not None]
    assert len(recorded) >= 2 and not any(plan.tails.seq_lens for plan in recorded)
    gone = rows[:1] + rows[3:]
    assert_close(bench.decode(*gone), [bench.plain(row) for row in gone], tolerance)
    assert graphs.num_replays == 3, "the buffers of more rows serve"
    late = Row(tokens(60, 50), bench)
    for _ in range(3):
        found = bench.run([*(row.take(1) for row in rows), late.take(7)])
        assert_close(found, [bench.plain(row) for row in (*rows, late)], tolerance)
    assert (
        sizes_of(bench)[-1].num_chunks and sizes_of(bench)[-1].prefixes and graphs.num_replays == 5
    )


def test_a_failure_with_shared_prefixes_rules_out_cascades_not_steps(
    graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    recorder: Any = CapturedBench(models.get("llama"), graphs).runner.recorder
    key = graph_keys.GraphKey(2, (4,), prefixes=((4, 4),))
    with caplog.at_level("INFO", logger="hf_paged"):
        recorder._handle_failure(key, RuntimeError("too wide"), "too wide")
    assert recorder._limits == {"prefixes": 0} and recorder.unsupported_reason is None
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["steps are recorded without cascades over shared prefixes: too wide"]


# --------------------------------------------------------------------------------------- adapters


@pytest.mark.slow
def test_one_recorded_step_serves_every_order_of_adapters(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the Triton kernels, prompts beside decodes, and fewer decodes than the step has room
    for."""
    pytest.importorskip("peft")
    _use_triton(monkeypatch)
    from tests.support.peft_models import lone_with, lora_model

    model = lora_model(models.build("llama", num_hidden_layers=1))
    texts = prompts(9, 10, 11, seed=3)
    expected = {
        (name, number): lone_with(model, name, texts[number], {**GREEDY, "max_new_tokens": 5})
        for name in ("first", "second", "__base__")
        for number in range(3)
    }
    orders = [
        ("first", "second", "__base__"),
        ("second", "first", "__base__"),
        ("__base__", "second", "first"),
    ]
    with PagedEngine(
        model, PagedConfig(block_size=SIZE, num_blocks=60, max_num_batched_tokens=12)
    ) as engine:
        for _ in range(2):
            for order in orders:
                options = {**GREEDY, "max_new_tokens": 5}
                jobs: list[Any] = [
                    (prompt, {"generation_config": options, "adapter": name})
                    for name, prompt in zip(order, texts)
                ]
                for number, (name, found) in enumerate(zip(order, results(engine, jobs, later=1))):
                    assert_same_as_lone(
                        expected[name, number], found, options, f"{name} of {order}"
                    )
        mixes = [key for key in graphs_of(engine.memory)._graphs if key.num_ranges]  # type: ignore[attr-defined]
        assert any(key.num_chunks for key in mixes) and any(not key.num_chunks for key in mixes)
        assert all(isinstance(key.variant, frozenset) for key in mixes)
        assert graphs.num_replays > 8
        assert_drained(engine)


# --------------------------------------------------------------------------------------- failures


def test_steps_that_are_eager(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_CHUNK_TOKENS", 8)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(3)]
    other = Row(tokens(60, 9), bench)
    bench.run([row.take(4) for row in rows])
    for _ in range(3):
        bench.run([*(row.take(1) for row in rows[:2]), other.take(9)])
        # which waits for no logits
        bench.run([rows[0].take(1), rows[1].take(1), rows[2].take(1, known=30)])
    assert not graphs.graphs
    for _ in range(3):
        bench.run([*(row.take(1) for row in rows[:2]), other.take(8)])
    assert graphs.num_replays == 2


@pytest.mark.slow
def test_a_model_whose_chunks_cannot_be_recorded(
    graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with many queries expand all latents and are not recorded; decodes and steps of few
    queries still are."""
    caplog.set_level(logging.INFO, "hf_paged")
    model = build_deepseek()
    jobs: list[Any] = [
        (
            prompts(number, seed=number)[0],
            {"generation_config": {**GREEDY, "max_new_tokens": 30 if number == 9 else 5}},
        )
        for number in (9, 20, 21, 9, 8, 22, 7)
    ]
    with PagedEngine(
        model, PagedConfig(block_size=SIZE, num_blocks=100, prefix_caching=False)
    ) as engine:
        found = results(engine, jobs, later=6)
        assert graphs.num_replays > 20
        assert {key.num_chunk_tokens for key in graphs_of(engine.memory)._graphs} == {0, 16}  # type: ignore[attr-defined]
    for (prompt, options), result in zip(jobs, found):
        assert_same_as_lone(
            lone_run(model, prompt, options["generation_config"]), result, GREEDY, "deepseek"
        )
    assert [r.getMessage() for r in caplog.records if "not recorded" in r.getMessage()] == [
        "steps with more than 16 chunk tokens are not recorded: the latents of rows with many"
        " queries are expanded, and the number of latents depends on the rows' lengths"
    ]


def test_decodes_that_are_too_many_leave_the_others(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(5)]
    bench.run([row.take(4) for row in rows])
    for _ in range(2):
        bench.decode(*rows[:2])
    bench.runner.recorder._limits.clear()  # type: ignore[union-attr]

    def fail() -> None:
        raise RuntimeError("only few")

    graphs.fail = fail
    for _ in range(3):
        assert_close(bench.decode(*rows), [bench.plain(row) for row in rows])
    assert bench.runner.recorder._limits == {"decodes": 4} and graphs.num_replays == 1  # type: ignore[union-attr]
    graphs.fail = None
    for count in (2, 4, 4):
        bench.decode(*rows[:count])
    assert graphs.num_replays == 3 and bench.runner.recorder.unsupported_reason is None  # type: ignore[union-attr]


def test_a_prompt_in_every_step_keeps_nothing_from_being_recorded(graphs: FakeGraphs) -> None:
    """The model's state is also read in steps with decodes, not only when idle."""
    model = models.get("llama")
    jobs = [
        (prompts(30, seed=n)[0], {"generation_config": {**GREEDY, "max_new_tokens": 4}})
        for n in range(12)
    ]
    with PagedEngine(
        model,
        PagedConfig(block_size=SIZE, max_num_batched_tokens=12, max_num_seqs=4, num_blocks=80),
    ) as engine:
        for prompt, options in jobs:
            engine.add_request(prompt, **options)
        for _ in range(20):
            engine.step()
        stats = engine.stats()
        assert stats.num_waiting and stats.num_captured_steps > 8
        while engine.has_unfinished:
            engine.step()


def test_graphs_that_went_for_want_of_room_are_used_again_before_they_are_recorded(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_GRAPHS", 1)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(3)]
    bench.run([row.take(SIZE + 1) for row in rows])
    for _ in range(6):
        bench.decode(*rows[:1])
        bench.decode(*rows)
    assert len(graphs.graphs) == 5, "not each time"
