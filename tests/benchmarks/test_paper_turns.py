"""The papers' tables measured in turns: processes, pages, costs of a model over GPUs, text and
plots."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from benchmarks import linears, parallel, readme, report, runner, tables, virtual
from benchmarks.paper import __main__ as command
from benchmarks.paper import article, vattention
from benchmarks.paper.rows import FULL, TINY
from benchmarks.paper.turns import measured, said

mapped = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


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
    assert said([1.0], TINY) == "1.000 (1.000..1.000), 1 turn"


@mapped
def test_what_rows_waste_is_counted_in_pages_and_in_blocks():
    lengths = [5, 64, 300]
    for page, tokens in ((1 << 12, 16), (1 << 16, 256), (1 << 17, 64)):
        found, needed, held, whole = vattention.wasted_bytes(page, 4, 128, lengths)
        assert found == tokens and needed == sum(lengths) * 2 * 4 * 128 * 2
        assert whole == sum(-(-length // tokens) * tokens for length in lengths) * 2 * 4 * 128 * 2
        assert needed <= held <= whole and held % (1 << 12) == 0


@mapped
def test_calls_that_map_are_counted_in_one_thread_and_the_method_comes_back():
    from hf_paged.virtual.pages import MemoryFile

    own = MemoryFile.map
    with vattention.mmaps() as sizes:
        vattention.map_seconds(1 << 16, 1 << 20)
    assert sizes == [1 << 16] * 16 and MemoryFile.map is own


def test_a_model_over_gpus_costs_what_its_part_does_and_the_links():
    shape = parallel.LLAMAS[0]
    one, two = article.step_cost(shape, 1), article.step_cost(shape, 2)
    assert one.floor == pytest.approx(6.6e9 * 2 / 2.039e12, rel=0.02)  # the embedding is not read
    assert (two.floor, two.per_token) == pytest.approx((one.floor / 2, one.per_token / 2))
    assert one.per_link == 0 < two.per_link
    line = next(row for row in parallel.scaling() if (row["model"], row["gpus"]) == (shape.name, 2))
    step = two.seconds(line["rows"], line["rows"] * parallel.LENGTH)
    assert 1000 * step == pytest.approx(line["step_ms"], abs=0.1)


def test_the_text_has_the_tables_that_were_run():
    (run, *_) = report.result(readme.PAPER)["runs"]
    row = {"case": "spikes", "name": "a", "published": "2", "ours": "1"}
    row |= {"unit": "ms", "source": "S1", "why": "slow"}
    run |= {"rows": [row, {**row, "name": "b", "published": ""}]}
    said, shown = command.sections({"runs": [run]})
    assert "vAttention's tables" in said and "--only spikes`" in said
    assert "| a | 2 | 1 | ms | S1 | slow |" in shown and "| b |" not in shown
    assert list(command.sections({"runs": []})) == []


def test_results_of_two_processes_are_one_table():
    turns = {"together": [1.0, 1.0], "one adapter a forward": [4.0, 4.0], "one adapter": [0.9, 0.9]}
    over = {"one adapter a forward": 3.0, "one adapter": 1.2}
    rows = [
        {"case": "8 rows", "system": name, "seconds": seconds, "over": over, "figures": {"n": 2}}
        for name, seconds in turns.items()
    ]
    rows = tables.pooled([{"rows": rows}] * 2)
    (line, *_) = tables.table(rows).splitlines()[2:]
    assert line == (
        "| 8 rows | together | 4, 2 | 1 (1 to 1) | 4.00, at least 3: met |"
        " 0.90, at least 1.2: not met | 2 |"
    )


@pytest.mark.parametrize("module", [*readme.FIGURES_OF, linears, parallel, virtual])
def test_committed_results_have_the_rows_of_the_runner(module):
    names = list(filter(report.exists, itertools.chain(*module.BENCHMARK.results)))
    assert names or module.__name__ == "benchmarks.trainer"  # not yet measured
    if not names:
        return
    for name in names:
        data = report.result(name)
        for run in data.get("runs", [data]):
            assert run["rows"] and run["facts"]["revision"]
            assert all(row["case"] and row["system"] for row in run["rows"])
    assert not names or "| case | system |" in module.BENCHMARK.section()
