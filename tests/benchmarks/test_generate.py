"""`python -m benchmarks.generate --quick` runs every workload and system, or gives the reason why
not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from benchmarks import generate, pictures, report, runner, tables
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES, build
from benchmarks.peers import Peer
from benchmarks.systems import Answer, Engine, Generate, NotAvailable, SmallPool, System
from benchmarks.workloads import GREEDY, WORKLOADS, Batch, Workload

TINY = SHAPES["llama-tiny"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Output of a quick run, and its results."""
    path = tmp_path_factory.mktemp("results") / "generate-cpu-llama-tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.extend(map(str, args)))
        assert generate.main(["--quick", "--json", str(path)]) == 0
    return "\n".join(lines), path


@pytest.fixture
def no_gc(monkeypatch):
    """Collecting garbage among all of transformers takes longer than a turn of a tiny model."""
    monkeypatch.setattr(generate.gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def model():
    return build(TINY, "cpu", torch.float32)


@pytest.mark.slow
def test_quick_prints_and_writes_every_workload_and_system(quick):
    printed, path = quick
    rows = report.read(path)["rows"]
    assert "| case | system |" in printed and "Measured ceilings" in printed
    found = {(row["case"], row["system"]): row for row in rows}
    for name in WORKLOADS:
        assert found[name, "static, compiled"]["problem"].startswith("skipped: ")
        for system in generate.OURS:
            figures = found[name, system]["figures"]
            assert figures["tokens/s"] > 0 and figures["K/V, MiB"] > 0
            assert figures["of the roofline, %"] > 0 and figures[generate.KV_SHARE] > 0
            # a beam's tokens are settled at the end
            assert ("TTFT p50, ms" in figures) == (name != "W5")
            if (name, system) != ("W4", "engine"):
                assert found[name + generate.EXACT, system]["equal"] == 1
    assert found["W1", "generate_batch"]["figures"]["tokens/s"] > 0
    told = found["W2", "generate_batch"]["problem"]
    assert told == "skipped: rows of one call get the same number of tokens"
    assert not [row for row in rows if row.get("problem", "").startswith("failed")]
    assert 0 < found["ShareGPT-like lengths", "engine"]["figures"][generate.WASTE] < 100
    assert found["W2" + generate.EXACT, generate.SMALL_POOL]["equal"] == 1


@pytest.mark.slow
def test_pictures_are_drawn_of_a_run(quick):
    _, path = quick
    pytest.importorskip("matplotlib")
    drawn = pictures.draw_all(report.read(path), path.with_suffix(""))
    assert len(drawn) == 2 and all(0 < one.stat().st_size < 100_000 for one in drawn)


@pytest.mark.parametrize(
    "argument, valid", [("--model", "qwen3-0.6b"), ("--device", "cpu"), ("--only", "waste")]
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


def rows_of(model, workload, systems, **options):
    case = generate.case_of(model, TINY, workload, systems)._replace(**options)
    return {row["system"]: row for row in runner.rows_of_case(case, case.turns)}


def test_a_system_that_fails_or_gives_too_few_tokens_is_listed(model, no_gc):
    workload = replace(WORKLOADS["W1"].scaled(0.1, 0.05), target=None)
    systems = {"plain": Generate(), "failing": Failing(), "short": Short(), "engine": Engine()}
    rows = rows_of(model, workload, systems, turns=2)
    assert rows["failing"]["problem"] == "failed: RuntimeError: out of luck"
    assert rows["short"]["problem"].startswith("failed: RuntimeError: gave ")
    assert len(rows["engine"]["seconds"]) == 2 and rows["engine"]["equal"] == 1
    shown = "".join(generate.show([{"rows": list(rows.values())}]))
    assert "Without figures: failing (failed: RuntimeError: out of luck) on W1" in shown


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
    rows = rows_of(model, workload, systems, turns=4, fewest=2)
    assert [len(row["seconds"]) for row in rows.values()] == [4, 4, 4]
    order = ["plain", "ours", "engine"]
    assert calls == order[::-1] + (order + order[::-1]) * 2  # the first warms up
    calls.clear()
    rows = rows_of(model, workload, systems, turns=4, fewest=2, until=0.0, first=8)
    assert [len(row["seconds"]) for row in rows.values()] == [2, 2, 2] and calls[3:6] == order
    prompts = {repeat: workload.batch(repeat, TINY.vocab).prompts[0] for repeat in (0, 8)}
    assert prompts[0] != prompts[8]


def test_a_slow_turn_ends_a_case_that_the_minutes_have_no_second_one_for():
    calls: list[tuple[str, int]] = []

    def sleeps(seconds):
        def work(turn, name):
            calls.append((name, turn))
            time.sleep(seconds[name] if turn >= 0 else 0.001)
            return 1.0

        return runner.each(work, list(seconds))

    case = runner.Case("slow", sleeps({"plain": 0.2, "ours": 0.001}), fewest=3)
    found = runner.take_turns(case._replace(end=time.perf_counter() + 0.3), 3, 1)
    assert {name: len(turns) for name, turns in found.items()} == {"plain": 1, "ours": 1}
    case = case._replace(once=("plain",), end=time.perf_counter() + 0.3)  # counts no longer
    assert len(runner.take_turns(case, 3, 1)["ours"]) == 3
    calls.clear()
    case = runner.Case("warm", runner.each(lambda turn, _: calls.append(("", turn)) or 0.0, ["a"]))
    runner.take_turns(case._replace(until=0.0, end=0.0), 2, 5)
    assert [turn for _, turn in calls] == [-5, 0]


def test_after_a_turn_the_fastest_setting_of_a_system_goes_on_alone():
    seconds = {"plain": 9.0, "a, u8": 2.0, "a": 1.0, "b": 3.0, "b, fast": "skipped: not here"}
    arms = runner.each(lambda turn, name: seconds[name], list(seconds))
    settings = [["a, u8", "a"], ["b", "b, fast"]]
    found = runner.take_turns(runner.Case("settings", arms, settings=settings), 3, 1)
    counts = {name: len(turns) for name, turns in found.items()}
    assert counts == {"plain": 3, "a, u8": 1, "a": 3, "b": 3, "b, fast": 1}


def test_settings_of_one_system_are_known(model):
    peers = [Peer(name) for name in ("openvino", "openvino_u8", "vllm", "llamacpp")]
    systems = generate.systems_for(WORKLOADS["W2"], peers)
    case = generate.case_of(model, TINY, WORKLOADS["W2"], systems)
    plain, openvino, *others = case.settings
    assert plain == ["plain, batch 32", "plain, batch 64"]
    assert openvino == ["OpenVINO GenAI", "OpenVINO GenAI, u8 K/V"]
    assert others == [["vLLM"], ["llama.cpp"]]


@pytest.mark.slow
def test_the_small_pool_has_a_third_of_what_the_engine_had_in_use(model, no_gc):
    workload = replace(WORKLOADS["W2"].scaled(0.15, 0.1), target=None)
    engine = Engine()
    small = SmallPool(of=engine)
    systems = {"plain": Generate(), "engine": engine, generate.SMALL_POOL: small}
    rows = rows_of(model, workload, systems, turns=2)
    held = {name: row["figures"]["K/V, MiB"] for name, row in rows.items()}
    assert len(rows[generate.SMALL_POOL]["seconds"]) == 2
    assert held[generate.SMALL_POOL] <= held["engine"] / 3
    assert rows[generate.SMALL_POOL]["over"]["engine"] == 1 / generate.SLOWER
    assert rows["engine"]["limits"] == {generate.KV_SHARE: 40.0}
    with pytest.raises(NotAvailable, match="the engine that it is compared with did not run"):
        SmallPool(of=Engine())(model, TINY, workload, workload.batch(0, TINY.vocab))


def rows_by_hand(case, **seconds):
    targets = {"plain": {"ours": 2.0}, "generate_batch": {"ours": 6.0}}
    return [
        {
            "case": case,
            "system": name.replace("_batch_", ", batch "),
            "seconds": turns,
            "over": {base: of.get(name) for base, of in targets.items()},
            "figures": {"n": 1},
            "equal": 0.5,
        }
        for name, turns in seconds.items()
    ]


def test_turns_of_a_second_process_are_added_to_those_of_the_first():
    first = rows_by_hand("W6", plain=[2.0, 2.0, 3.0], ours=[1.0])
    second = rows_by_hand("W6", ours=[2.0, 3.0])
    _, row = tables.pooled([{"rows": first}, {"rows": [second[0] | {"equal": 0.0}]}])
    assert (row["seconds"], row["processes"], row["equal"]) == ([1.0, 2.0, 3.0], 2, 0.25)


@pytest.mark.slow
def test_a_second_process_that_dies_leaves_the_turns_of_the_first(tmp_path, monkeypatch, no_gc):
    in_processes = runner.in_processes

    def dies(processes, *arguments):
        if processes:
            raise RuntimeError("no process")
        return in_processes(processes, *arguments)

    monkeypatch.setattr(runner, "in_processes", dies)
    workload = replace(WORKLOADS["W6"].scaled(1.0, 0.1), repeats=2, fewest=2)
    monkeypatch.setitem(generate.ALL, "W6", workload)
    told: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *args, **_: told.append(str(args[0])))
    limits = Ceilings(1e10, {"bfloat16": 1e11, "float32": 1e10})
    monkeypatch.setattr(generate.ceilings, "measure", lambda *_: limits)
    path = tmp_path / "found.json"
    arguments = ["--model", "llama-tiny", "--only", "W6", "--no-peers", "--json", str(path)]
    generate.main(arguments)
    rows = report.read(path)["rows"]
    assert "the second process failed: RuntimeError: no process" in told
    assert {len(row["seconds"]) for row in rows if row["case"] == "W6"} == {2}


def test_tables_compare_with_the_fastest_plain_and_judge_ours_only():
    rows = rows_by_hand(
        "W2",
        plain_batch_16=[9.0],
        plain_batch_32=[4.0, 6.0],
        ours=[2.0, 2.0],
        generate_batch=[20.0],
    )
    ratios = {
        (row["system"], base): (ratio.value, target)
        for row, base, ratio, target in tables.comparisons(rows)
    }
    assert ratios["plain, batch 16", "plain"] == (4 / 9, None)
    assert ratios["ours", "plain"] == (2.5, 2.0) and ratios["generate_batch", "plain"][0] == 0.2
    assert ratios["ours", "generate_batch"] == (10.0, 6.0)
    assert ("plain, batch 32", "plain") not in ratios
    assert tables.targets(rows) == "Targets: 2 of 2 are met."
    limited = [row | {"limits": {"n": 0.5}} for row in rows if row["system"] == "ours"]
    said = "Targets: 0 of 1 are met; not met: W2, ours: n 1, not at most 0.5."
    assert tables.targets(limited) == said
    assert "| 1, at most 0.5: not met |" in tables.table(limited)


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
    sizes = dict(
        hidden=128, layers=6, heads=4, kv_heads=2, head_dim=32, intermediate=192, vocab=500
    )
    shape = replace(SHAPES[name], **sizes)
    model = build(shape, "cpu", torch.float32)
    workload = Workload("agree", "", 3, (12, 20), (4, 9), 0, GREEDY)
    batch = workload.batch(0, shape.vocab)
    expected = Generate()(model, shape, workload, batch).rows
    paged, engine = Generate(cache="paged"), Engine()
    assert paged(model, shape, workload, batch).rows == expected
    assert engine(model, shape, workload, batch).rows == expected
    engine.free()
    assert len({token for row in expected for token in row}) > 8  # no loop of a few tokens
