"""`python -m benchmarks.generate --quick` runs every workload and system, or gives the reason why
not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import generate, pictures, report, runner
from benchmarks.models import SHAPES, build
from benchmarks.peers import Peer
from benchmarks.systems import Answer, Engine, Generate, System
from benchmarks.workloads import GREEDY, WORKLOADS, Batch, Workload

TINY = SHAPES["llama-tiny"]


@pytest.fixture
def no_gc(monkeypatch):
    """Collecting garbage among all of transformers takes longer than a turn of a tiny model."""
    monkeypatch.setattr(generate.gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def model():
    return build(TINY, "cpu", torch.float32)


@pytest.mark.slow
def test_quick_prints_and_writes_every_workload_and_system(tmp_path, capsys):
    path = tmp_path / "generate-cpu-llama-tiny.json"
    assert generate.BENCHMARK.main(["--quick", "--json", str(path)]) == 0
    printed, data = capsys.readouterr().out, report.read(path)
    assert "| case | system |" in printed and "Measured ceilings" in printed
    found = {(row["case"], row["system"]): row for row in data["rows"]}
    for name in WORKLOADS:
        assert found[name, "static, compiled"]["problem"].startswith("skipped: ")
        for system in generate.OURS:
            figures = found[name, system]["figures"]
            for key in ("tokens/s", "K/V, MiB", "of the roofline, %", generate.KV_SHARE):
                assert figures[key] > 0
            # a beam's tokens are settled at the end
            assert ("TTFT p50, ms" in figures) == (name != "W5")
            if (name, system) != ("W4", "engine"):
                assert found[name + generate.EXACT, system]["equal"] == 1
    assert found["W1", "generate_batch"]["figures"]["tokens/s"] > 0
    told = found["W2", "generate_batch"]["problem"]
    assert told == "skipped: rows of one call get the same number of tokens"
    assert not [row for row in data["rows"] if row.get("problem", "").startswith("failed")]
    assert 0 < found["ShareGPT-like lengths", "engine"]["figures"][generate.WASTE] < 100
    assert found["W2" + generate.EXACT, generate.SMALL_POOL]["equal"] == 1
    pytest.importorskip("matplotlib")
    drawn = pictures.draw(data, path.with_suffix(""))
    assert 0 < drawn.stat().st_size < 100_000


class Failing(System):
    """Raises, or returns a token less than asked for."""

    def __init__(self, raises):
        self.raises = raises

    def __call__(self, model, shape, workload, batch):
        if self.raises:
            raise RuntimeError("out of luck\nand more")
        return Answer([[5] * (length - 1) for length in batch.new_tokens], [])


def rows_of(model, workload, systems):
    case = generate.case_of(model, TINY, workload, systems)
    return {row["system"]: row for row in runner.rows_of_case(case, 2)}


def test_a_system_that_fails_or_gives_too_few_tokens_is_listed(model, no_gc):
    workload = replace(WORKLOADS["W1"].scaled(0.1, 0.05), target=None)
    systems = {"plain": Generate(), "failing": Failing(True), "short": Failing(False)}
    rows = rows_of(model, workload, {**systems, "engine": Engine()})
    assert rows["failing"]["problem"] == "failed: RuntimeError: out of luck"
    assert rows["short"]["problem"].startswith("failed: RuntimeError: gave ")
    assert len(rows["engine"]["seconds"]) == 2 and rows["engine"]["equal"] == 1
    shown = "".join(generate.show([{"rows": list(rows.values())}]))
    assert "Without figures: failing (failed: RuntimeError: out of luck) on W1" in shown
    prompts = [workload.batch(repeat, TINY.vocab).prompts[0] for repeat in (0, 8)]
    assert prompts[0] != prompts[1]


def test_settings_of_one_system_are_known(model):
    peers = [Peer(name) for name in ("openvino", "openvino_u8", "vllm", "llamacpp")]
    systems = generate.systems_for(WORKLOADS["W2"], peers, invariant=True)
    assert "engine, batch_invariant" in systems and generate.SMALL_POOL in systems
    case = generate.case_of(model, TINY, WORKLOADS["W2"], systems)
    plain, openvino, *others = case.settings
    assert plain == ["plain, batch 32", "plain, batch 64"]
    assert openvino == ["OpenVINO GenAI", "OpenVINO GenAI, u8 K/V"]
    assert others == [["vLLM"], ["llama.cpp"]]


def test_times_belong_to_tokens(model):
    batch = Batch([[5, 6, 7], [8, 9]], [4, 2])
    workload = Workload("times", 2, (0, 0), (0, 0), 0, GREEDY)
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
    sizes = {"hidden": 128, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = replace(SHAPES[name], **sizes, intermediate=192, vocab=500)
    model = build(shape, "cpu", torch.float32)
    workload = Workload("agree", 3, (12, 20), (4, 9), 0, GREEDY)
    batch, engine = workload.batch(0, shape.vocab), Engine()
    systems = Generate(), Generate(cache="paged"), engine
    expected, paged, served = (one(model, shape, workload, batch).rows for one in systems)
    assert expected == paged == served
    engine.free()
    assert len({token for row in expected for token in row}) > 8  # no loop of a few tokens
