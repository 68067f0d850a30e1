"""The papers' tables measured in turns: processes, pages, costs of a model over GPUs, text and
plots."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import lora, parallel, report, virtual
from benchmarks.paper import article, plots, vattention
from benchmarks.paper.rows import FULL, TINY
from benchmarks.paper.turns import backend, measured, said
from benchmarks.sections import papers
from hf_paged.kernels import VARIABLE

mapped = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


def process(size):
    return {"case": {"id": [float(os.getpid())] * size.turns}}


@pytest.mark.full
@pytest.mark.slow
def test_half_of_the_turns_are_in_a_second_process():
    here, two = measured(process, TINY), replace(TINY, turns=2, processes=2)
    assert here == {"case": {"id": [os.getpid()]}}
    first, again, second, last = measured(process, two)["case"]["id"]
    assert first == again != second == last and os.getpid() not in (first, second)
    assert FULL.turns * FULL.processes >= 15 and FULL.processes == 2
    assert said([1.0, 1.1, 1.2], two) == "1.100 (1.000..1.200), 3 turns in 2 processes"
    assert said([1.0], TINY) == "1.000 (1.000..1.000), 1 turn"


def test_a_forced_backend_is_forced_no_longer(monkeypatch):
    monkeypatch.setenv(VARIABLE, "reference")
    with pytest.raises(KeyError), backend("gather"):
        assert os.environ[VARIABLE] == "gather"
        raise KeyError
    assert os.environ[VARIABLE] == "reference"
    with backend(None):
        assert VARIABLE not in os.environ
    assert os.environ[VARIABLE] == "reference"
    monkeypatch.delenv(VARIABLE)
    with backend("gather"):
        pass
    assert VARIABLE not in os.environ


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
    with virtual.mmaps() as sizes:
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


def rows_of(table: str, details: list[dict]) -> list[dict]:
    return [
        {"table": table, "name": "a", "published": "2", "ours": "1", "details": one}
        for one in details
    ]


@pytest.mark.slow
def test_pictures_come_once_all_of_their_tables_are_there(tmp_path: Path):
    pytest.importorskip("matplotlib")
    speeds = {"blocks": 1.0, "virtual": 2.0}
    rows = [
        *rows_of("prefill", [{"context": n, "tokens_per_second": speeds} for n in (32, 64)]),
        *rows_of(
            "decode",
            [{"rows": n, "tokens_per_second": speeds} for n in (1, 2)] + [{"bytes_per_second": 1}],
        ),
        *rows_of(
            "allocation",
            [{"page_bytes": 4096, "bytes": 1, "map_seconds": [1.0], "write_seconds": [2.0]}],
        ),
    ]
    assert plots.vattention(rows, "", tmp_path / "a.png") is None
    rows += rows_of("spikes", [{"mechanism": "on demand", "step_ms": [1.0, 2.0]}])
    assert plots.vattention(rows, "", tmp_path / "a.png").stat().st_size > 5000
    seconds = {"swap": 1.0, "recompute": 2.0}
    rows = [
        *rows_of(
            "sweep",
            [
                {"block_size": 16, "published": 1.0, "ratios": [1.0]},
                {"block_size": 16, "published": 3},
            ],
        ),
        *rows_of("preempted", [{"block_size": 16, "seconds": seconds}]),
        *rows_of("scaling", [{"model": "LLaMA-7B", "gpus": 1, "ours": 3.0}]),
    ]
    assert plots.article(rows, "", tmp_path / "b.png").stat().st_size > 5000


def test_the_text_has_the_tables_that_were_run():
    data = {**report.result(papers.PAPER)}
    run = next(iter(data["runs"].values()))
    row = {**rows_of("spikes", [{}])[0], "unit": "ms", "source": "S1", "why": "slow"}
    data |= {"rows": [row, {**row, "name": "b", "published": ""}], "runs": {"spikes": run}}
    (shown,) = papers.paper_turns(data)
    assert (
        "vAttention's tables" in shown
        and "--only spikes`" in shown
        and "| a | 2 | 1 | ms | S1 | slow |" in shown
    )
    assert "| b |" not in shown and papers.paper_turns({**data, "rows": []}) == []


def test_results_of_two_processes_are_one_table():
    facts = report.result("tiers-cpu-1")["facts"]
    line = {"tokens_per_second": 8.0, "forwards": 2, "loads": 0, "equal": "yes"}
    turns = {"together": [1.0, 1.0], "one adapter a forward": [4.0, 4.0], "one adapter": [0.9, 0.9]}
    rows = [
        {"system": name, "seconds": s[0], "seconds_by_turn": s, **line} for name, s in turns.items()
    ]
    shown = "".join(lora.show([{"title": "8 rows", "rows": rows}] * 2))
    assert (
        "| together | 4, 2 | 1 | 8 |" in shown and "4.00 (4.00 to 4.00), at least 3: met" in shown
    )
    cases = [{"what": "decode", "case": "DynamicCache", "seconds": [1.0] * 3, "target": None}]
    cases += [{"what": "decode", "case": "virtual", "seconds": [2.0] * 3, "target": 0.95}]
    cases += [{"what": "bytes", "case": "virtual", "ratio": 0.2, "target": 0.25, "bytes after": 0}]
    shown = "".join(virtual.BENCHMARK.shown([{"machine": facts, "rows": cases}] * 2))
    assert (
        "| decode | virtual | 6, 2 | 2000 | 2.000 (2.000 to 2.000) | at most 0.95: not met |"
        in shown
    )
    assert "at most 0.25: met | 0 bytes when all rows are gone |" in shown
    row = {
        "seconds": 1.0,
        "tokens_s": 5.0,
        "kv_bytes": 2**21,
        "turns": 1,
        "seconds_by_turn": [1.0],
        "equal": "yes",
    }
    run = {
        "facts": facts,
        **{"model": "m", "prompts": 1, "new_tokens": 1},
        "rows": [{"processes": 1, **row}],
        "computed": parallel.scaling(),
    }
    shown = "".join(parallel.show([run, run]))
    assert (
        "| 1 | 2, 2 | 1 (1 to 1) | 5 | 2 | equal |" in shown
        and "Computed from data sheets, not measured" in shown
    )
