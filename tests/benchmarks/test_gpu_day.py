"""`benchmarks.gpu_day`: its stages on the stand-in of a device, and what they found beside the
predictions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import machine, report, runner
from benchmarks.gpu_day import suite
from benchmarks.gpu_day.__main__ import STAGES
from benchmarks.sections import gpu_day
from benchmarks.workers import Lost, in_workers
from tests.support.tools import ROOT


def run_in(folder, env, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--out", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 1300}
    return subprocess.run(command, cwd=folder, env=env, **options)


def test_at_most_8_files_and_every_stage_is_predicted():
    assert len({stage.file for stage in STAGES}) + 1 <= 8
    assert {one.stage for one in gpu_day.PREDICTIONS} == {stage.name for stage in STAGES} - {"0"}


@pytest.mark.slow
def test_a_checkout_without_git_or_device(tmp_path):
    """Elsewhere, with nothing installed but what is imported; a stage that needs a device says
    so."""
    for folder in ("benchmarks", "hf_paged"):
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    env = {**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    done = run_in(tmp_path, env, str(tmp_path / "out"), "--only", "c")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(c) attention alone: skipped: no device" in done.stdout


def test_a_sample_of_tests_goes_first():
    names = [f"a.py::one[{number}]" for number in (1, 2, 3)]
    names += ["a.py::two", "b.py::three[1]", "b.py::three[2]"]
    groups = suite.in_order(names)
    assert groups[:3] == [("a.py::one[1]",), ("b.py::three[1]",), ("a.py::two",)]
    assert sorted(name for group in groups for name in group) == names


def test_outcomes_stand_beside_predictions(tmp_path):
    def row(case, system, seconds, **more):
        return {**runner.row_of(case, system), "seconds": [seconds] * 3, **more}

    chunks, unlike = f"{gpu_day.QWEN}, W3, ours, chunks not recorded", "ours, chunks not recorded"
    token = {"figures": {"TPOT p50, ms": 1.234}}
    speed = {"figures": {"GB/s": 3801.0, "of bandwidth, %": 88.4}}
    counts = {"passed": 3, "skipped": 1, "failed": 0}
    rows = {
        "a": [runner.row_of("x", "tests", **counts), runner.row_of("y", "a process", "died")],
        "b": [runner.row_of("Llama", "greedy") | {"equal": share} for share in (1.0, 0.0)],
        "c": [row(gpu_day.DECODE, "ours", 1.0, **speed)],
        "d": [row(f"{gpu_day.QWEN}, 1 x 16, ours", "ours", 1.0, **token)],
        "e": [row(chunks, "ours", 0.3), row(chunks, unlike, 0.4)],
    }
    facts = {**machine.facts(), "gpu": "a card", "driver": "580"}
    for name, found in rows.items():
        content = json.dumps({"facts": facts, "rows": found})
        (tmp_path / f"gpu_day-{name}.json").write_text(content)
    entries = [{"name": "d", "reason": "ended after 9 s"}, {"name": "e", "reason": ""}]
    (tmp_path / "gpu_day.json").write_text(json.dumps({"stages": entries}))
    shown = gpu_day.outcomes(tmp_path)
    lines = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("|")]
    found = {what.strip(): outcome.strip() for _, what, _, outcome in lines}
    assert "a card, driver 580" in shown and shown.endswith("\n\n- d: ended after 9 s")
    assert found["kernels that give their reference's numbers"] == "3 passed, 1 failed"
    assert found["tokens of plain `generate` in float32"] == "1 of 2 equal"
    decode = f"decode kernel, 64 rows of 8192 tokens, heads of {gpu_day.LLAMA}"
    assert found[decode] == "3801 GB/s, 88.4 % of a copy's"
    assert found[f"a token of one row, {gpu_day.QWEN}"] == "1.234 ms"
    assert found["W3 with chunks as graphs, over without"] == "0.75"
    assert found["`pytest -m gpu`"] == found["W6, plain's time over ours"] == gpu_day.NOT_RUN
    empty = gpu_day.outcomes(tmp_path / "nowhere")
    assert empty.count(f"| {gpu_day.NOT_RUN} |") == len(gpu_day.PREDICTIONS)


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(3))
def test_some(number):
    assert number < 2, "number is too large"

def test_dies():
    os._exit(1)

def test_skips():
    pytest.skip("not here")
"""


@pytest.mark.slow
def test_tests_run_in_workers(tmp_path):
    """A failure comes with its first lines; a test that ends its process is lost alone; a file that
    does not import counts as failed."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import no_such_module")
    (_, collected), *_ = in_workers(suite.collect, [(str(tmp_path),)], 1, 60.0)
    assert not isinstance(collected, Lost) and len(collected.names) == 5
    assert any("no_such_module" in lines for lines in collected.failed.values())
    groups = suite.in_order(collected.names)
    results = [found for _, found in in_workers(suite.rows_of_group, groups, 1, 60.0)]
    lost = [found for found in results if isinstance(found, Lost)]
    assert lost == [Lost("the process died with exit status 1")]
    rows = [row for found in results if not isinstance(found, Lost) for row in found]
    counts = [row["figures"] for row in rows if row["system"] == "tests"]
    assert sorted(one["passed"] for one in counts) == [0, 1, 1]
    assert sum(one["skipped"] for one in counts) == sum(one["failed"] for one in counts) == 1
    (problem,) = [row["problem"] for row in rows if row["system"] == "a test"]
    assert "number is too large" in problem


@pytest.mark.slow
@pytest.mark.full
def test_a_run_on_the_stand_in_of_a_device(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_in(ROOT, env, str(tmp_path), "--device", "fake", "--minutes", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    entries = report.read(tmp_path / "gpu_day.json")["stages"]
    assert {entry["name"]: entry["reason"] for entry in entries} == dict.fromkeys("0abcdef", "")
    found = {name: report.read(tmp_path / f"gpu_day-{name}.json")["rows"] for name in "0abcdef"}
    assert sum(row["figures"]["passed"] for row in found["a"]) > 0
    assert all(row["equal"] == 1 for row in found["b"] if "equal" in row)
    assert {row["system"] for row in found["d"]} == {"plain", "ours", "fingerprint"}
    assert {row["case"].split(", ")[1] for row in found["e"]} == {"W1", "W3", "W6"}
