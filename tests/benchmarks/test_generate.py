"""`python -m benchmarks.generate --quick` runs every workload and system, or gives the reason why
not."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import arrivals, generate, generate_tables, kv_memory, report, runner
from benchmarks.arrivals import Record, Trace
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES, build
from benchmarks.runner import Turn
from benchmarks.systems import Answer, Engine, Generate, NotAvailable, SmallPool, System
from benchmarks.workloads import GREEDY, WORKLOADS, Batch, Workload, poisson_times, sharegpt_like

TINY = SHAPES["llama-tiny"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Output of a quick run, and its files."""
    directory = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
        generate.main(["--quick", "--results", str(directory)])
    return "\n".join(lines), directory


@pytest.fixture
def no_gc(monkeypatch):
    """Collecting garbage among all of transformers takes longer than a turn of a tiny model."""
    monkeypatch.setattr(generate.gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def model():
    return build(TINY, "cpu", torch.float32)


@pytest.mark.slow
def test_quick_prints_and_writes_every_workload_and_system(quick):
    printed, directory = quick
    data = report.read(directory / "generate-cpu-llama-tiny.json")
    assert "| workload | system |" in printed and "measured ceilings" in printed
    found = {(row["workload"], row["system"]): row for row in data["rows"]}
    for name in WORKLOADS:
        assert found[name, "static, compiled"]["time"].startswith("skipped: ")
        for system in ("ours", "engine"):
            row = found[name, system]
            assert (
                row["tokens_per_s"] > 0
                and row["kv_mib"] > 0
                and row["roofline_share"].endswith("%")
            )
            # a beam's tokens are settled at the end
            assert ("ttft_p50_ms" in row) == (name != "W5")
    assert found["W1", "generate_batch, tuned"]["tokens_per_s"] > 0
    assert found["W1", "generate_batch"]["time"].startswith("skipped: takes most of the memory")
    assert not [row for row in data["rows"] if str(row["time"]).startswith("failed")]
    assert {how for _, _, how in data["float32"]} == {"equal"}
    assert not [line for line in data["memory"] if line["problem"]]


@pytest.mark.slow
def test_quick_serves_arrivals_by_every_system(quick):
    _, directory = quick
    rows = report.read(directory / "generate-cpu-llama-tiny.json")["arrivals"]
    assert {row["system"] for row in rows} == {
        "engine",
        "plain, static batches",
        "generate_batch, tuned",
    }
    assert len(rows) == 6 and not [row for row in rows if "problem" in row]
    assert all(
        row[key] > 0 for row in rows for key in arrivals.COLUMNS if key not in ("system", "problem")
    )
    for end in (".png", "-memory.png", "-latency.png", ".md"):
        assert 0 < (directory / f"generate-cpu-llama-tiny{end}").stat().st_size < 100_000


@pytest.mark.parametrize(
    "argument, valid", [("--model", "qwen3-0.6b"), ("--device", "cpu"), ("--only", "arrivals")]
)
def test_bad_arguments_name_the_valid_ones_before_anything_is_built(
    argument, valid, capsys, monkeypatch
):
    monkeypatch.setattr(generate, "build", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(SystemExit):
        generate.main([argument, "nonsense"])
    message = capsys.readouterr().err
    assert "nonsense" in message and valid in message


class Failing(System):
    def __call__(self, model, shape, workload, batch):
        raise RuntimeError("out of luck\nand more")


class Short(System):
    """Returns a token less than asked for."""

    def __call__(self, model, shape, workload, batch):
        return Answer([[5] * (length - 1) for length in batch.new_tokens], [])


def test_a_system_that_fails_or_gives_too_few_tokens_is_listed(model, no_gc):
    workload = replace(WORKLOADS["W1"].scaled(0.1, 0.05), target=None)
    systems = {"plain": Generate(), "failing": Failing(), "short": Short(), "engine": Engine()}
    found = generate.run(model, TINY, workload, systems, repeats=2)
    rows = {row["system"]: row for row in generate_tables.rows_of(workload, found, 1e-6)}
    assert rows["failing"]["time"] == "failed: RuntimeError: out of luck"
    assert rows["short"]["time"].startswith("failed: RuntimeError: gave ")
    assert rows["engine"]["turns"] == 2 and rows["engine"]["equal"] == "100%"


class Asleep(System):
    """Sleeps and records the order of calls; returns the tokens asked for."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __call__(self, model, shape, workload, batch):
        self.calls.append(self.name)
        time.sleep(0.005)
        return Answer([[5] * length for length in batch.new_tokens], [])


def test_turns_alternate_and_end_in_time(model, no_gc):
    workload = replace(WORKLOADS["W6"].scaled(1.0, 0.1), target=1.0)
    calls: list[str] = []
    systems = {name: Asleep(name, calls) for name in ("plain", "ours", "engine")}
    found = generate.run(model, TINY, workload, systems, repeats=4, fewest=2, until=math.inf)
    assert [len(turns) for turns in found.values()] == [4, 4, 4]
    order = ["plain", "ours", "engine"]
    assert calls == order[::-1] + (order + order[::-1]) * 2  # the first warms up
    calls.clear()
    found = generate.run(model, TINY, workload, systems, repeats=4, fewest=2, until=0.0, first=8)
    assert [len(turns) for turns in found.values()] == [2, 2, 2] and calls[3:6] == order
    prompts = {repeat: workload.batch(repeat, TINY.vocab).prompts[0] for repeat in (0, 8)}
    assert prompts[0] != prompts[8]


@pytest.mark.slow
def test_the_small_pool_has_a_third_of_what_the_engine_had_in_use(model, no_gc):
    workload = replace(WORKLOADS["W2"].scaled(0.15, 0.1), target=None)
    engine = Engine()
    small = SmallPool(of=engine)
    systems = {"plain": Generate(), "engine": engine, generate.SMALL_POOL: small}
    found = generate.run(model, TINY, workload, systems, repeats=2)
    rows = generate_tables.rows_of(workload, found)
    by_name = {row["system"]: row for row in rows}
    assert by_name[generate.SMALL_POOL]["turns"] == 2
    assert by_name[generate.SMALL_POOL]["kv_mib"] <= by_name["engine"]["kv_mib"] / 3
    lines = kv_memory.of_rows(
        rows, TINY, workload, generate.SMALL_POOL, small.cache_config.num_blocks
    )
    assert [line.what for line in lines] == ["W2 peak", "W2 in a third of its peak"]
    assert (
        f"num_blocks={small.cache_config.num_blocks})" in lines[1].unit
        and "2 turns" in lines[1].unit
    )
    with pytest.raises(NotAvailable, match="the engine that it is compared with did not run"):
        SmallPool(of=Engine())(model, TINY, workload, workload.batch(0, TINY.vocab))


def turns_of(seconds, row, **figures):
    """Turns that return `row`."""
    figures = {"cpu_s": 1.0, "tokens": 10, **figures}
    return [Turn(one, [row], figures) for one in seconds]


def test_turns_of_a_second_process_are_added_to_those_of_the_first():
    plain, first = turns_of([2.0, 2.0, 3.0], [1, 2]), turns_of([1.0], [1, 2])
    second = turns_of([2.0], [1, 3]) + turns_of([3.0], [4, 5])
    found = runner.joined([{"plain": plain, "ours": first}, {"ours": second}])
    row = generate_tables.rows_of(WORKLOADS["W6"], found, processes=2)[1]
    assert (row["turns"], row["processes"], row["plain_over"], row["equal"]) == (3, 2, 1.0, "50%")


@pytest.mark.slow
def test_a_second_process_that_dies_leaves_the_turns_of_the_first(tmp_path, monkeypatch, no_gc):
    def dies(*_):
        raise RuntimeError("no process")

    monkeypatch.setattr(runner, "in_processes", dies)
    monkeypatch.setitem(
        WORKLOADS, "W6", replace(WORKLOADS["W6"].scaled(1.0, 0.1), repeats=2, fewest=2)
    )
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    arguments = [
        "--model",
        "llama-tiny",
        "--only",
        "W6",
        "--no-peers",
        "--no-memory",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(
        generate.ceilings, "measure", lambda *_: Ceilings(1e10, {"bfloat16": 1e11, "float32": 1e10})
    )
    generate.main(arguments)
    data = report.read(tmp_path / "generate-cpu-llama-tiny-w6.json")
    assert data["problems"] == ["W6, process 2: RuntimeError: no process"]
    assert {row["turns"] for row in data["rows"] if "seconds" in row} == {2}


def test_tables_compare_with_the_fastest_plain_and_judge_ours_only():
    found = {
        "plain, batch 16": turns_of([9.0], [1]),
        "plain, batch 32": turns_of([4.0, 6.0], [1]),
        "ours": turns_of([2.0, 2.0], [1]),
        "generate_batch": turns_of([20.0], [1], kv_mib=2.0),
        "vLLM": ["not installed"],
    }
    rows = generate_tables.rows_of(WORKLOADS["W2"], found, 1.0)
    assert [row.get("plain_over") for row in rows] == [4 / 9, 1.0, 2.5, 0.2, None]
    assert [row.get("target") for row in rows] == ["", "", "at least 2: met", "", None]
    assert rows[2]["roofline_share"] == "50%" and rows[2]["tokens_per_s"] == 5.0
    assert rows[3]["kv_mib"] == 2.0 and rows[4]["time"] == "not installed"
    peers = generate_tables.peer_rows(rows)
    assert [(row["time over"], row["ratio"], row["target"]) for row in peers] == [
        ("ours", 10.0, "at least 6: met")
    ]


def test_times_belong_to_tokens(model):
    batch = Batch([[5, 6, 7], [8, 9]], [4, 2])
    workload = Workload("times", "", 2, (0, 0), (0, 0), 0, GREEDY)
    engine = Engine()
    for system in (Generate(), Generate(cache="paged"), engine, Generate(batch_size=1)):
        answer = system(model, TINY, workload, batch)
        assert [len(row) for row in answer.rows] == [len(times) for times in answer.times] == [4, 2]
        assert all(times == sorted(times) for times in answer.times)
    assert answer.times[1][0] > answer.times[0][-1]  # the second call begins after the first
    engine.free()


@pytest.mark.slow_cases(but=["*-24m", "*-3.2-*"])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "llama-tiny"])
def test_every_shape_builds_and_all_systems_agree(name):
    """Fewer and narrower layers of the same family."""
    window = 8 if SHAPES[name].window else None
    sizes = dict(
        hidden=128, layers=6, heads=4, kv_heads=2, head_dim=32, intermediate=192, vocab=500
    )
    shape = replace(SHAPES[name], window=window, **sizes)
    model = build(shape, "cpu", torch.float32)
    workload = Workload("agree", "", 3, (12, 20), (4, 9), 0, GREEDY)
    batch = workload.batch(0, shape.vocab)
    expected = Generate()(model, shape, workload, batch).rows
    paged, engine = Generate(cache="paged"), Engine()
    assert paged(model, shape, workload, batch).rows == expected
    assert engine(model, shape, workload, batch).rows == expected
    engine.free()
    assert len({token for row in expected for token in row}) > 8  # no loop of a few tokens


def test_the_trace_is_the_papers():
    times = poisson_times(4000, 5.0)
    assert (
        times[0] == 0.0
        and times == sorted(times)
        and times[-1] == pytest.approx(4000 / 5.0, rel=0.05)
    )
    batch = sharegpt_like(4000, 1.0, 100)
    assert sum(map(len, batch.prompts)) / 4000 == pytest.approx(161, rel=0.06)
    assert sum(batch.new_tokens) / 4000 == pytest.approx(338, rel=0.06)
    first, second = (Trace.make("cpu", True, 2048, 1.0, repeat) for repeat in (1, 2))
    assert (
        first.batch.new_tokens == second.batch.new_tokens
        and first.batch.prompts != second.batch.prompts
    )


def test_figures_of_arrivals_by_hand():
    records = [Record(0.0, [1.0, 1.5], 2.0), Record(1.0, [3.0, 3.2, 3.4, 4.0], 5.0)]
    found = arrivals.figures(records, [2, 4])
    assert found["tokens_per_s"] == pytest.approx(6 / 5) and found[
        "requests_per_s"
    ] == pytest.approx(2 / 5)
    assert found["normalized_ms"] == pytest.approx(1000 * (2.0 / 2 + 4.0 / 4) / 2)
    assert found["normalized_p50_ms"] == found["normalized_p99_ms"] == pytest.approx(1000)
    assert found["ttft_p50_ms"] == pytest.approx(1500) and found["tpot_p50_ms"] == pytest.approx(
        350
    )
    with pytest.raises(RuntimeError, match="gave 6 tokens, not 7"):
        arrivals.figures(records, [2, 5])
