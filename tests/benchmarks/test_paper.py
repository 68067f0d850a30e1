"""The papers' tables: exact bookkeeping of the simulations, and rows of every table."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest
import torch

import hf_paged
from benchmarks import readme, report, runner
from benchmarks.models import SHAPES, build
from benchmarks.paper import __main__ as command
from benchmarks.paper import simulation, spikes
from benchmarks.paper.rows import FULL, TINY, TOLD_S1, measured, timed_row
from benchmarks.paper.traces import SHAREGPT, make_trace
from hf_paged.cache.block_pool import BlockPool
from hf_paged.virtual.pages import MemoryFile
from tests.support.pools import PoolGroup, manager_of

mapped = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


def test_memory_is_counted_in_the_steps_in_which_requests_wait():
    # 7 blocks: the first two requests take 5, then 6, and the third waits until one ends
    steps = list(simulation.serve([(32, 4), (33, 2), (40, 5)], num_slots=7 * 16))
    assert steps[0] == (2, 65, 5 * 16)
    assert {step.rows for step in steps} == {2} and len(steps) == 2
    assert steps[1].held == 67 and steps[1].taken == 6 * 16
    steps = list(simulation.serve(make_trace(SHAREGPT, 300)))
    assert all(step.held <= step.taken <= simulation.OPT_13B_SLOTS for step in steps)
    assert simulation.used_percent(steps) > 90 and simulation.empty_percent(steps) < 4


@pytest.mark.parametrize(("count", "prompt", "output"), [(4, 19, 40), (3, 32, 17)])
def test_grown_samples_take_the_blocks_that_the_engine_takes(count, prompt, output):
    manager = manager_of([PoolGroup(BlockPool(100))], 16, prefix_caching=False)
    # the last token's K and V are never computed
    _, _, peak = simulation.grow(manager, count, prompt, output - 1)
    assert manager.groups[0].pool.num_used == 0
    options = {"do_sample": True, "num_return_sequences": count, "max_new_tokens": output}
    model = build(SHAPES["llama-tiny"], "cpu", torch.bfloat16)
    with hf_paged.PagedEngine(model, {"prefix_caching": False}) as engine:
        engine.generate([list(range(5, 5 + prompt))], {**options, "eos_token_id": None})
        assert engine.stats().peak_blocks == peak
    for asked, message in (((4, 20, 20), "4 samples"), ((1, 64, 1), "a prompt of 64")):
        manager = manager_of([PoolGroup(BlockPool(3))], 16, prefix_caching=False)
        with pytest.raises(ValueError, match=f"no room for {message}"):
            simulation.grow(manager, *asked)


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
    row = timed_row("a", [1.0, 1.1, 1.2], two)
    assert row.ours == "1.100 (1.000..1.200), 3 turns in 2 processes"


@mapped
def test_mappings_are_counted():
    own, shape = MemoryFile.map, SHAPES["llama-tiny"]
    model = build(shape)
    model.set_attn_implementation("hf_paged")
    with spikes.mmaps() as sizes:
        spikes.Decoding(model, shape, 1, 40).step()
    assert sizes and MemoryFile.map is own


@pytest.mark.slow_cases("preempted", "spikes")
@pytest.mark.parametrize("name", command.TABLES)
def test_every_table_prints_its_rows(name):
    if name in command.VATTENTION and not hasattr(os, "memfd_create"):
        pytest.skip("no memory files")
    rows = command.run([name], TINY)
    printed = "\n".join(command.show([{"rows": rows}]))
    for row in rows:
        assert row["case"] == name and row["name"] in printed and row["unit"]
        assert isinstance(row["ours"], str) or math.isfinite(row["ours"])
        if row["published"]:
            assert "read" in row["source"] or row["source"] == TOLD_S1
    assert any(row["published"] for row in rows)


def test_a_run_keeps_other_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK", TINY)
    path = tmp_path / "paper.json"
    for name in ("sampling", "batch_size", "batch_size"):
        command.main(["--quick", "--only", name, "--json", str(path)])
    content = json.loads(path.read_text())
    assert [run["rows"][0]["case"] for run in content["runs"]] == ["sampling", "batch_size"]
    path.write_text("{")
    assert command.main(["--quick", "--only", "sampling", "--json", str(path)]) == 2
    assert path.read_text() == "{", "it adds nothing to a damaged file"


def test_the_text_has_the_tables_that_were_run():
    (run, *_) = report.result(readme.PAPER)["runs"]
    row = {"case": "spikes", "name": "a", "published": "2", "ours": "1"}
    row |= {"unit": "ms", "source": "S1", "why": "slow"}
    run |= {"rows": [row, {**row, "name": "b", "published": ""}]}
    text, shown = command.sections({"runs": [run]})
    assert "vAttention's spikes" in text and "--only spikes`" in text
    assert "| a | 2 | 1 | ms | S1 | slow |" in shown and "| b |" not in shown
    assert list(command.sections({"runs": []})) == []
