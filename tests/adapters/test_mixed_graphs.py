"""Recorded steps that mix chunks and decodes, and decodes with shared prefixes, on the CPU."""

from __future__ import annotations

import logging

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
from tests.support.engine_helpers import assert_drained, assert_same_as_lone
from tests.support.graph_helpers import (
    CapturedBench,
    assert_as_lone,
    graphs_of,
    job,
    results,
    use_fake_graphs,
)
from tests.support.latents import build_deepseek

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing reads lengths from tensors"
)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    return use_fake_graphs(monkeypatch)


def use_triton(monkeypatch):
    if not kernels.triton.is_available(torch.device("cpu")):
        pytest.skip("no Triton, or TRITON_INTERPRET unset")
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")


def small(name):
    """Few layers, of Gemma both kinds."""
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        return models.build(name, num_hidden_layers=2, layer_types=kinds)
    return models.build(name, num_hidden_layers=1)


def keys_of(memory):
    return [key._replace(variant=None) for key in graphs_of(memory)._graphs]


def test_which_graph_serves_which_step():
    buckets = [chunk_bucket(n) for n in range(1, 513)]
    assert sorted(set(buckets)) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(n <= size <= max(16, 3 * n / 2) for n, size in enumerate(buckets, 1))
    serves, decodes, mixed = Key.serves, Key(8, (4,)), Key(8, (4,), 4, 32)
    assert serves(decodes, Key(4, (2,)))
    assert not serves(decodes, mixed) and not serves(mixed, decodes)
    assert serves(mixed, Key(2, (4,), 4, 16)) and not serves(mixed, Key(2, (4,), 8, 32))
    assert not serves(Key(8, (4,), 4, 64), Key(8, (4,), 4, 24)), "more padding than tokens"
    shared = decodes._replace(prefixes=((4, 4),))
    assert serves(decodes, shared) and not serves(shared, decodes)
    assert not serves(shared, shared._replace(prefixes=((8, 4),)))
    assert not serves(decodes._replace(variant=0), decodes._replace(variant=1))


@pytest.mark.parametrize("kernel", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_schedules_give_plain_logits(name, kernel, graphs, monkeypatch):
    bench = CapturedBench(small(name), graphs)
    bench.rows(9)
    if kernel == "triton":
        use_triton(monkeypatch)
    bench.begin()
    check_random_schedule(bench, num_steps=24 if kernel == "cpp" else 10)
    assert any(key.num_chunks for key in keys_of(bench.memory))
    assert bench.runner.num_captured_steps == graphs.num_replays > (10 if kernel == "cpp" else 2)


def test_a_prompt_in_every_step_keeps_nothing_from_being_recorded():
    """The model's state is also read in steps with decodes, not only when idle."""
    model, jobs = models.get("llama"), [job(30, 4, seed) for seed in range(12)]
    config = PagedConfig(block_size=SIZE, max_num_batched_tokens=12, max_num_seqs=4, num_blocks=80)
    with PagedEngine(model, config) as engine:
        found = results(engine, jobs)
        stats = engine.stats()
        assert stats.num_captured_steps > 0.5 * stats.num_steps
        assert {key.num_chunk_tokens for key in keys_of(engine.memory)} >= {16}
        assert_drained(engine)
    assert_as_lone(model, jobs, found)


def test_padding_writes_nothing(graphs, monkeypatch):
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 128)
    bench = CapturedBench(models.get("llama"), graphs)
    layers = bench.groups[0].storage.layers.values()
    for layer in layers:
        # new memory may still hold the very keys that an earlier pool had in the same slots
        layer.data.fill_(1e4)
    rows, others = bench.rows(3, 3, 3), [Row(tokens(60, 9 + seed), bench) for seed in range(3)]
    for _ in range(3):
        chunks = [other.take(8, known=60) for other in others[:2]]
        bench.run([*(row.take(1) for row in rows), *chunks])
    before = [layer.data[0].view(torch.int32).clone() for layer in layers]
    bench.run([*(row.take(1) for row in rows), others[2].take(9, known=60)])
    assert graphs.num_replays == 3 and len(graphs.graphs) == 1
    for layer, old in zip(layers, before):
        # [num_blocks, block_size]
        changed = (layer.data[0].view(torch.int32) != old).any(dim=3).any(dim=1)
        assert changed.sum() == 3 + 9


def test_a_forward_that_does_not_pick_logits(graphs):
    bench = CapturedBench(models.get("llama"), graphs)
    bench.runner._takes_logits_to_keep = False
    # as many chunk rows as the smallest token capacity for chunks
    rows = [Row(tokens(12, seed), bench) for seed in range(14)]
    for _ in range(4):
        items = [rows[0].take(2)]
        items += [row.take(1, known=12 if n % 2 else None) for n, row in enumerate(rows) if n]
        logits = bench.run(items)
        ready = [row for row in rows if row.num_computed_tokens == len(row.token_ids)]
        assert_close(logits, [bench.plain(row) for row in ready])
    # tables grew once
    assert graphs.num_replays == 2 and {key.num_chunks for key in keys_of(bench.memory)} == {16}


# ---- shared prefixes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("llama", None), ("llama", "int8"), ("gemma3", None)]
)
def test_shared_prefixes_are_read_once(name, kv_dtype, graphs, monkeypatch):
    """Two families of rows, and one row alone; rows leave, and a chunk joins them."""
    from hf_paged.kernels.triton import attention

    costs = cascade.CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=64)
    for module in (shared_prefixes, cascade):
        monkeypatch.setattr(module, "default_costs", lambda *tensors: costs)
    bench = CapturedBench(small(name), graphs, kv_dtype=kv_dtype)
    # of logits of about 3, where keys and values are rounded
    tolerance = 1e-4 if kv_dtype is None else 0.2
    parents = [Row(tokens(count * SIZE, count), bench) for count in (3, 2)]
    bench.run([parent.take(len(parent.tokens)) for parent in parents])
    rows = [Row(parents[n % 2].tokens + tokens(30, 10 + n), bench) for n in range(5)]
    for row, parent in zip(rows, parents * 3):  # share its computed blocks
        row.num_computed_tokens = parent.num_computed_tokens
        row.blocks.tables = [table.fork() for table in parent.blocks.tables]
    rows.append(Row(tokens(40, 30), bench))
    bench.run([rows[-1].take(11)])
    bench.run([row.take(2) for row in rows])  # in window layers nothing is shared any more
    use_triton(monkeypatch)
    plans, cascaded = [], attention.cascade_attention

    def recorded(*args, **features):
        plans.append(args[3])
        return cascaded(*args, **features)

    monkeypatch.setattr(attention, "cascade_attention", recorded)
    bench.begin()
    for _ in range(3):
        assert_close(bench.decode(*rows), [bench.plain(row) for row in rows], tolerance)
    assert graphs.num_replays == 2
    assert any(groups for groups, _ in keys_of(bench.memory)[0].prefixes)
    from_tensors = [plan for plan in plans if plan.tails.lengths is not None]
    assert len(from_tensors) >= 2 and not any(plan.tails.seq_lens for plan in from_tensors)
    gone = rows[:1] + rows[3:]
    assert_close(bench.decode(*gone), [bench.plain(row) for row in gone], tolerance)
    assert graphs.num_replays == 3, "the buffers of more rows serve"
    late = Row(tokens(60, 50), bench)
    for _ in range(3):
        found = bench.run([*(row.take(1) for row in rows), late.take(7)])
        assert_close(found, [bench.plain(row) for row in (*rows, late)], tolerance)
    last = keys_of(bench.memory)[-1]
    assert last.num_chunks and last.prefixes and graphs.num_replays == 5


def test_a_failure_with_shared_prefixes_rules_out_cascades_not_steps(graphs, caplog):
    recorder = CapturedBench(models.get("llama"), graphs).runner.recorder
    key = Key(2, (4,), prefixes=((4, 4),))
    with caplog.at_level("INFO", logger="hf_paged"):
        recorder._handle_failure(key, RuntimeError("too wide"), "too wide")
    assert recorder._limits == {"prefixes": 0} and recorder.unsupported_reason is None
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["steps are recorded without cascades over shared prefixes: too wide"]


# ---- adapters


@pytest.mark.slow
def test_one_recorded_step_serves_every_order_of_adapters(graphs, monkeypatch):
    """With the Triton kernels, prompts beside decodes, and fewer decodes than the step has room
    for."""
    pytest.importorskip("peft")
    use_triton(monkeypatch)
    from tests.support.peft_models import lone_with, lora_model

    model, first, second, base = lora_model(small("llama")), "first", "second", "__base__"
    orders = [(first, second, base), (second, first, base), (base, second, first)]
    with PagedEngine(
        model, PagedConfig(block_size=SIZE, num_blocks=60, max_num_batched_tokens=12)
    ) as engine:
        for order in orders * 2:
            jobs = [job(9 + n, 5, seed=3, adapter=name) for n, name in enumerate(order)]
            for (prompt, options), found in zip(jobs, results(engine, jobs, later=1)):
                config, name = options["generation_config"], options["adapter"]
                expected = lone_with(model, name, prompt, config)
                assert_same_as_lone(expected, found, config, f"{name} of {order}")
        mixes = [key for key in graphs_of(engine.memory)._graphs if key.num_ranges]
        assert any(key.num_chunks for key in mixes) and any(not key.num_chunks for key in mixes)
        assert all(isinstance(key.variant, frozenset) for key in mixes)
        assert graphs.num_replays > 8
        assert_drained(engine)


# ---- what is not recorded


def test_steps_that_are_eager(graphs, monkeypatch):
    monkeypatch.setattr(recording, "MAX_CHUNK_TOKENS", 8)
    bench = CapturedBench(models.get("llama"), graphs)
    rows, other = bench.rows(4, 4, 4), Row(tokens(60, 9), bench)
    for _ in range(3):
        bench.run([*(row.take(1) for row in rows[:2]), other.take(9)])
        # which waits for no logits
        bench.run([rows[0].take(1), rows[1].take(1), rows[2].take(1, known=30)])
    assert not graphs.graphs
    for _ in range(3):
        bench.run([*(row.take(1) for row in rows[:2]), other.take(8)])
    assert graphs.num_replays == 2


@pytest.mark.slow
def test_a_model_whose_chunks_cannot_be_recorded(graphs, caplog):
    """Steps with many queries expand all latents and are not recorded; decodes and steps of few
    queries still are."""
    caplog.set_level(logging.INFO, "hf_paged")
    model = build_deepseek()
    config = {"block_size": SIZE, "num_blocks": 100, "prefix_caching": False}
    lengths = (9, 20, 21, 9, 8, 22, 7)
    jobs = [job(length, 30 if length == 9 else 5, seed=length) for length in lengths]
    with PagedEngine(model, config) as engine:
        found = results(engine, jobs, later=6)
        assert graphs.num_replays > 20
        assert {key.num_chunk_tokens for key in keys_of(engine.memory)} == {0, 16}
    assert_as_lone(model, jobs, found)
    assert [r.getMessage() for r in caplog.records if "not recorded" in r.getMessage()] == [
        "steps with more than 16 chunk tokens are not recorded: the latents of rows with many"
        " queries are expanded, and the number of latents depends on the rows' lengths"
    ]


def test_decodes_that_are_too_many_leave_the_others(graphs):
    bench = CapturedBench(models.get("llama"), graphs)
    rows, recorder = bench.rows(4, 4, 4, 4, 4), bench.runner.recorder
    bench.decode(*rows[:2], times=2)
    recorder._limits.clear()

    def fail():
        raise RuntimeError("only few")

    graphs.fail = fail
    bench.check(*rows, times=3)
    assert recorder._limits == {"decodes": 4} and graphs.num_replays == 1
    graphs.fail = None
    for count in (2, 4, 4):
        bench.decode(*rows[:count])
    assert graphs.num_replays == 3 and recorder.unsupported_reason is None


def test_graphs_that_went_for_want_of_room_are_used_again_before_they_are_recorded(
    graphs, monkeypatch
):
    monkeypatch.setattr(recording, "MAX_GRAPHS", 1)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = bench.rows(SIZE + 1, SIZE + 1, SIZE + 1)
    for _ in range(6):
        bench.decode(*rows[:1])
        bench.decode(*rows)
    assert len(graphs.graphs) == 5, "not each time"
