"""The papers' tables: exact bookkeeping of the simulations, and rows of every table."""

from __future__ import annotations

import json
import math
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import hf_paged
from benchmarks.models import SHAPES, build
from benchmarks.paper import __main__ as command
from benchmarks.paper import kernel, plots, sharing, vattention
from benchmarks.paper.reservation import POLICIES, Buddy, power_of_two, reserve_pow2
from benchmarks.paper.rows import TINY, TOLD, TOLD_S1, TOLD_S2
from benchmarks.paper.schedulers import sustained
from benchmarks.paper.serving import (
    A100,
    OPT_13B_SLOTS,
    Outcome,
    StepCost,
    serve_paged,
    serve_reserved,
    serve_static,
)
from benchmarks.paper.traces import ALPACA, LONGEST, SHAREGPT, Trace, make_trace
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

COST = StepCost("test", fixed=1.0, per_token=0.25, per_context=0.001)
TRACE = make_trace(SHAREGPT, 80, rate=0.02)
SYSTEMS = {
    "static": serve_static,
    **{
        name: lambda trace, cost, slots, name=name: serve_reserved(
            trace, cost, slots, POLICIES[name]
        )
        for name in POLICIES
    },
    "ours": serve_paged,
}


def test_buddy_chunks_never_overlap_and_all_slots_come_back():
    draw = random.Random(0)
    buddy = Buddy(3000)
    held: dict[int, int] = {}
    refused = 0
    for _ in range(2000):
        if held and draw.random() < 0.45:
            start = draw.choice(list(held))
            buddy.release(start, held.pop(start))
            continue
        size = draw.randint(1, 700)
        start = buddy.allocate(size)
        if start is None:
            refused += 1
            continue
        held[start] = size
        spans = sorted((start, start + power_of_two(size)) for start, size in held.items())
        assert (
            all(end <= begin for (_, end), (begin, _) in pairwise(spans)) and spans[-1][1] <= 3000
        )
        assert buddy.num_free == 3000 - sum(map(power_of_two, held.values()))
    for start, size in held.items():
        buddy.release(start, size)
    assert refused and buddy.num_free == 3000
    assert [buddy.allocate(size) for size in (2048, 512, 256, 128, 32, 16, 8)].count(None) == 0, (
        "joined again"
    )
    assert buddy.num_free == 0 and buddy.allocate(1) is None


def test_reservations_are_the_paper_s():
    assert reserve_pow2(10, 25) == 10 + 32  # the paper's example, section 6.1
    assert POLICIES["Max"](10, 25) == LONGEST == POLICIES["Pow2"](1500, 600)
    assert POLICIES["Oracle"](10, 25) == 35


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_slot_second_is_counted_once(name, monkeypatch):
    counted, step = [], Outcome.step

    def recorded(self, seconds, *others):
        step(self, seconds, *others)
        counted.append(seconds * others[-1])

    monkeypatch.setattr(Outcome, "step", recorded)
    outcome = SYSTEMS[name](make_trace(SHAREGPT, 60), COST, 5000)
    usage = outcome.usage
    total = usage.used + usage.reserved + usage.internal + usage.external
    assert sum(counted) > 0 and total == pytest.approx(5000 * sum(counted))
    assert min(usage.used, usage.reserved, usage.internal, usage.external) >= -1e-6 * total
    assert sum(usage.percent().values()) == pytest.approx(100)


def test_the_oracle_reserves_nothing_that_stays_empty_and_paging_reserves_nothing():
    trace = make_trace(SHAREGPT, 60)
    oracle = serve_reserved(trace, COST, OPT_13B_SLOTS, POLICIES["Oracle"]).usage
    assert oracle.internal == 0 < oracle.external
    ours = serve_paged(make_trace(SHAREGPT, 300), A100, OPT_13B_SLOTS)
    assert ours.usage.reserved == 0
    shares = ours.usage.percent()
    assert shares["used"] > 90 and shares["internal"] / (shares["used"] + shares["internal"]) < 0.04


@pytest.mark.parametrize("name", SYSTEMS)
def test_one_request_alone_takes_what_its_steps_cost(name):
    trace = Trace([5.0], [40], [7])
    outcome = SYSTEMS[name](trace, COST, 4096)
    seconds = COST.seconds(40, 40) + sum(COST.seconds(1, 40 + done) for done in range(1, 7))
    assert outcome.normalized_latency == pytest.approx(seconds / 7)
    assert (outcome.seconds, outcome.steps, outcome.rows) == (
        pytest.approx(5 + seconds),
        7,
        pytest.approx(1),
    )


@pytest.mark.parametrize("rate", [0.02, 0.2, math.inf])
def test_with_room_for_all_reservation_and_ours_take_the_same_steps(rate):
    """Two simulations: of rows that have their memory from the start, and of our scheduler."""
    trace = make_trace(ALPACA, 40, rate)
    theirs = serve_reserved(trace, COST, 200 * LONGEST, POLICIES["Oracle"])
    ours = serve_paged(trace, COST, 200 * LONGEST)
    for name in ("steps", "requests"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("seconds", "latency", "row_seconds", "busy_seconds"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name


def test_static_batches_wait_for_their_longest():
    trace = Trace([0.0, 0.0, 0.0], [10, 30, 20], [5, 2, 3])
    outcome = serve_static(trace, COST, 2 * LONGEST)  # room for two rows
    first = COST.seconds(60, 60) + sum(COST.seconds(2, 2 * (30 + done)) for done in range(1, 5))
    second = COST.seconds(20, 20) + sum(COST.seconds(1, 20 + done) for done in range(1, 3))
    assert outcome.seconds == pytest.approx(first + second)
    assert outcome.latency == pytest.approx(first / 5 + first / 2 + (first + second) / 3)
    held = [10 + 30] + [
        sum(p + done for p, o in ((10, 5), (30, 2)) if o > done) for done in range(1, 5)
    ]
    steps = [COST.seconds(60, 60)] + [COST.seconds(2, 2 * (30 + done)) for done in range(1, 5)]
    assert outcome.usage.used == pytest.approx(sum(a * b for a, b in zip(held, steps)))


def test_a_step_costs_no_less_than_its_floor():
    assert A100.seconds(1, 0) == pytest.approx(26e9 / 1.555e12)
    assert A100.seconds(2048, 0) == pytest.approx(2048 * 26e9 / 312e12)


def test_traces_have_the_means_that_they_name():
    trace = make_trace(SHAREGPT, 20_000, rate=3.0)
    assert sum(trace.prompts) / len(trace) == pytest.approx(SHAREGPT.mean_in, rel=0.05)
    # cut at the longest
    assert sum(trace.outputs) / len(trace) == pytest.approx(SHAREGPT.mean_out, rel=0.08)
    assert all(p + o <= LONGEST and min(p, o) >= 1 for p, o in zip(trace.prompts, trace.outputs))
    assert trace.arrivals[-1] == pytest.approx(20_000 / 3, rel=0.05)


def test_sustained_interpolates_the_crossing():
    assert sustained([(1, 1), (2, 3), (3, 9)], 6) == pytest.approx(2.5)
    assert sustained([(1, 1), (2, 3)], 5) == 2
    assert sustained([(1, 7), (2, 9)], 5) == 0


def test_the_example_s_arithmetic_and_the_block_manager_agree():
    apart, together, ours, saved = sharing.example(TINY)
    gib = 819_200 / 2**30
    assert (apart.ours, together.ours) == pytest.approx((16 * 2176 * gib, (2048 + 16 * 128) * gib))
    assert ours.ours == together.ours
    assert saved.ours == pytest.approx(100 * (1 - 4096 / 34816))


@pytest.mark.parametrize(("count", "prompt", "output"), [(4, 19, 40), (3, 32, 17)])
def test_grown_samples_take_the_blocks_that_the_engine_takes(count, prompt, output):
    shape = SHAPES["llama-tiny"]
    manager = manager_of([PoolGroup(BlockPool(100))], 16, prefix_caching=False)
    # the last token's K and V are never computed
    _, _, peak = sharing.grow(manager, count, prompt, output - 1)
    assert manager.groups[0].pool.num_used == 0
    with hf_paged.PagedEngine(
        build(shape, "cpu", torch.bfloat16), {"prefix_caching": False}
    ) as engine:
        options = {
            "do_sample": True,
            "num_return_sequences": count,
            "max_new_tokens": output,
            "eos_token_id": None,
        }
        engine.generate([list(range(5, 5 + prompt))], options)
        assert engine.stats().peak_blocks == peak


def test_samples_that_need_more_than_the_pool_has_say_so():
    manager = manager_of([PoolGroup(BlockPool(3))], 16, prefix_caching=False)
    with pytest.raises(ValueError, match="no room for 4 samples"):
        sharing.grow(manager, 4, 20, 20)
    with pytest.raises(ValueError, match="no room for a prompt of 64"):
        sharing.grow(manager_of([PoolGroup(BlockPool(3))], 16, prefix_caching=False), 1, 64, 1)


def test_kernel_contenders_are_compared_with_the_reference(monkeypatch):
    functions = kernel.contenders(SHAPES["llama-tiny"], 64)
    assert {"one block a row", "sdpa", "blocks of 16", "blocks of 64"} <= set(functions)
    assert "blocks of 128" not in functions
    wrong = torch.zeros(kernel.ROWS, 1, 4, 32)
    monkeypatch.setattr(kernel.Ours, "prepare", lambda *_: lambda layer: wrong)
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        kernel.contenders(SHAPES["llama-tiny"], 64)


@pytest.mark.slow_cases("page_sizes", "preempted", "scaling", "schedulers", "spikes", "sweep")
@pytest.mark.parametrize("name", command.TABLES)
def test_every_table_prints_its_rows(name):
    if name in vattention.TABLES and not hasattr(os, "memfd_create"):
        pytest.skip("no memory files")
    rows = command.run([name], TINY)
    printed = "\n".join(command.show([{"rows": rows}]))
    for row in rows:
        assert row["case"] == name and row["name"] in printed
        assert isinstance(row["ours"], str) or math.isfinite(row["ours"])
        assert row["unit"]
        if row["published"]:
            assert "read" in row["source"] or row["source"] in (TOLD, TOLD_S1, TOLD_S2)
    assert any(row["published"] for row in rows)


@pytest.mark.slow
def test_a_run_keeps_other_tables_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "QUICK", TINY)
    path = tmp_path / "paper.json"
    for name in ("waste", "example", "example"):
        command.main(["--quick", "--only", name, "--json", str(path)])
    content = json.loads(path.read_text())
    assert [run["rows"][0]["case"] for run in content["runs"]] == ["waste", "example"]
    assert plots.draw_all(content, path.with_suffix("")) == tmp_path / "paper-waste.png"
    assert (tmp_path / "paper-waste.png").stat().st_size > 1000
