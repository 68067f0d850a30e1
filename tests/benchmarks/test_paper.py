"""The papers' tables: exact bookkeeping of the simulations, and rows of every table."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

import hf_paged
from benchmarks import readme, report, runner
from benchmarks.models import SHAPES, build
from benchmarks.paper import __main__ as command
from benchmarks.paper import kernel, sharing, vattention
from benchmarks.paper.reservation import POLICIES, Buddy, power_of_two, reserve_pow2
from benchmarks.paper.rows import FULL, TINY, TOLD, TOLD_S1, TOLD_S2
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
from benchmarks.paper.turns import measured, said
from hf_paged.cache.block_pool import BlockPool
from hf_paged.virtual.pages import MemoryFile
from tests.support.pools import PoolGroup, manager_of

COST = StepCost("test", fixed=1.0, per_token=0.25, per_context=0.001)
SYSTEMS = {"static": serve_static, "ours": serve_paged}
SYSTEMS |= {name: partial(serve_reserved, policy=policy) for name, policy in POLICIES.items()}
mapped = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


def test_buddy_chunks_never_overlap_and_all_slots_come_back():
    draw, buddy, held, refused = random.Random(0), Buddy(3000), {}, 0
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
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert spans[-1][1] <= 3000
        assert buddy.num_free == 3000 - sum(map(power_of_two, held.values()))
    for start, size in held.items():
        buddy.release(start, size)
    assert refused and buddy.num_free == 3000
    sizes = (2048, 512, 256, 128, 32, 16, 8)
    assert None not in [buddy.allocate(size) for size in sizes], "joined again"
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
    usage = SYSTEMS[name](make_trace(SHAREGPT, 60), COST, 5000).usage
    total = sum(vars(usage).values())
    assert sum(counted) > 0 and total == pytest.approx(5000 * sum(counted))
    assert min(vars(usage).values()) >= -1e-6 * total
    assert sum(usage.percent().values()) == pytest.approx(100)
    # one request alone takes what its steps cost
    outcome = SYSTEMS[name](Trace([5.0], [40], [7]), COST, 4096)
    seconds = COST.seconds(40, 40) + sum(COST.seconds(1, 40 + done) for done in range(1, 7))
    assert outcome.normalized_latency == pytest.approx(seconds / 7)
    assert outcome.seconds == pytest.approx(5 + seconds)
    assert outcome.steps == 7 and outcome.rows == pytest.approx(1)


def test_the_oracle_reserves_nothing_that_stays_empty_and_paging_reserves_nothing():
    oracle = SYSTEMS["Oracle"](make_trace(SHAREGPT, 60), COST, OPT_13B_SLOTS).usage
    assert oracle.internal == 0 < oracle.external
    ours = serve_paged(make_trace(SHAREGPT, 300), A100, OPT_13B_SLOTS).usage
    shares = ours.percent()
    assert ours.reserved == 0 and shares["used"] > 90
    assert shares["internal"] / (shares["used"] + shares["internal"]) < 0.04


@pytest.mark.parametrize("rate", [0.02, 0.2, math.inf])
def test_with_room_for_all_reservation_and_ours_take_the_same_steps(rate):
    """Two simulations: of rows that have their memory from the start, and of our scheduler."""
    trace, slots = make_trace(ALPACA, 40, rate), 200 * LONGEST
    theirs, ours = (SYSTEMS[name](trace, COST, slots) for name in ("Oracle", "ours"))
    for name in ("steps", "requests", "seconds", "latency", "row_seconds", "busy_seconds"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name


def test_static_batches_wait_for_their_longest():
    trace = Trace([0.0, 0.0, 0.0], [10, 30, 20], [5, 2, 3])
    outcome = serve_static(trace, COST, 2 * LONGEST)  # room for two rows
    steps = [COST.seconds(60, 60), *(COST.seconds(2, 2 * (30 + done)) for done in range(1, 5))]
    first, second = sum(steps), COST.seconds(20, 20) + COST.seconds(1, 21) + COST.seconds(1, 22)
    assert outcome.seconds == pytest.approx(first + second)
    assert outcome.latency == pytest.approx(first / 5 + first / 2 + (first + second) / 3)
    held = [10 + 30, 11 + 31, 12, 13, 14]
    assert outcome.usage.used == pytest.approx(sum(a * b for a, b in zip(held, steps)))


def test_a_step_costs_no_less_than_its_floor():
    assert A100.seconds(1, 0) == pytest.approx(26e9 / 1.555e12)
    assert A100.seconds(2048, 0) == pytest.approx(2048 * 26e9 / 312e12)


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
    manager = manager_of([PoolGroup(BlockPool(100))], 16, prefix_caching=False)
    # the last token's K and V are never computed
    _, _, peak = sharing.grow(manager, count, prompt, output - 1)
    assert manager.groups[0].pool.num_used == 0
    options = {"do_sample": True, "num_return_sequences": count, "max_new_tokens": output}
    model = build(SHAPES["llama-tiny"], "cpu", torch.bfloat16)
    with hf_paged.PagedEngine(model, {"prefix_caching": False}) as engine:
        engine.generate([list(range(5, 5 + prompt))], {**options, "eos_token_id": None})
        assert engine.stats().peak_blocks == peak
    for asked, message in (((4, 20, 20), "4 samples"), ((1, 64, 1), "a prompt of 64")):
        manager = manager_of([PoolGroup(BlockPool(3))], 16, prefix_caching=False)
        with pytest.raises(ValueError, match=f"no room for {message}"):
            sharing.grow(manager, *asked)


def test_kernel_contenders_are_compared_with_the_reference(monkeypatch):
    functions = kernel.contenders(SHAPES["llama-tiny"], 64)
    assert {"one block a row", "sdpa", "blocks of 16", "blocks of 64"} <= set(functions)
    assert "blocks of 128" not in functions
    wrong = torch.zeros(kernel.ROWS, 1, 4, 32)
    monkeypatch.setattr(kernel.Ours, "prepare", lambda *_: lambda layer: wrong)
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        kernel.contenders(SHAPES["llama-tiny"], 64)


def process(size):
    yield runner.Case("case", {"id": lambda turn: float(os.getpid())})


@pytest.mark.full
@pytest.mark.slow
def test_half_of_the_turns_are_in_a_second_process():
    here, two = measured(process, TINY), replace(TINY, turns=2, processes=2)
    assert here["case"]["id"]["seconds"] == [os.getpid()]
    first, again, second, last = measured(process, two)["case"]["id"]["seconds"]
    assert first == again != second == last and os.getpid() not in (first, second)
    assert FULL.turns * FULL.processes >= 15 and FULL.processes == 2
    assert said([1.0, 1.1, 1.2], two) == "1.100 (1.000..1.200), 3 turns in 2 processes"


@mapped
def test_what_rows_waste_is_counted_in_pages_and_in_blocks():
    lengths = [5, 64, 300]
    for page, tokens in ((1 << 12, 16), (1 << 16, 256), (1 << 17, 64)):
        found, needed, held, whole = vattention.wasted_bytes(page, 4, 128, lengths)
        assert found == tokens and needed == sum(lengths) * 2 * 4 * 128 * 2
        assert whole == sum(-(-length // tokens) * tokens for length in lengths) * 2 * 4 * 128 * 2
        assert needed <= held <= whole and held % (1 << 12) == 0
    own = MemoryFile.map
    with vattention.mmaps() as sizes:
        vattention.map_seconds(1 << 16, 1 << 20)
    assert sizes == [1 << 16] * 16 and MemoryFile.map is own


@pytest.mark.slow_cases("page_sizes", "preempted", "scaling", "schedulers", "spikes", "sweep")
@pytest.mark.parametrize("name", command.TABLES)
def test_every_table_prints_its_rows(name):
    if name in vattention.TABLES and not hasattr(os, "memfd_create"):
        pytest.skip("no memory files")
    rows = command.run([name], TINY)
    printed = "\n".join(command.show([{"rows": rows}]))
    for row in rows:
        assert row["case"] == name and row["name"] in printed and row["unit"]
        assert isinstance(row["ours"], str) or math.isfinite(row["ours"])
        if row["published"]:
            assert "read" in row["source"] or row["source"] in (TOLD, TOLD_S1, TOLD_S2)
    assert any(row["published"] for row in rows)


def test_a_run_keeps_other_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK", TINY)
    path = tmp_path / "paper.json"
    for name in ("example", "overhead", "overhead"):
        command.main(["--quick", "--only", name, "--json", str(path)])
    content = json.loads(path.read_text())
    assert [run["rows"][0]["case"] for run in content["runs"]] == ["example", "overhead"]
    path.write_text("{")
    assert command.main(["--quick", "--only", "example", "--json", str(path)]) == 2
    assert path.read_text() == "{", "it adds nothing to a damaged file"


def test_the_text_has_the_tables_that_were_run():
    (run, *_) = report.result(readme.PAPER)["runs"]
    row = {"case": "spikes", "name": "a", "published": "2", "ours": "1"}
    row |= {"unit": "ms", "source": "S1", "why": "slow"}
    run |= {"rows": [row, {**row, "name": "b", "published": ""}]}
    text, shown = command.sections({"runs": [run]})
    assert "vAttention's tables" in text and "--only spikes`" in text
    assert "| a | 2 | 1 | ms | S1 | slow |" in shown and "| b |" not in shown
    assert list(command.sections({"runs": []})) == []
