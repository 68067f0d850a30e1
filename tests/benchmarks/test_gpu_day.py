"""`benchmarks.gpu_day`: its stages on the stand-in of a device, and what they found beside the
predictions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import machine, report, runner
from benchmarks.gpu_day import suite
from benchmarks.gpu_day.__main__ import STAGES, outcomes
from tests.support.tools import ROOT


def run_in(folder, env, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--out", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 1300}
    return subprocess.run(command, cwd=folder, env=env, **options)


def test_every_stage_has_a_file():
    assert len({stage.file for stage in STAGES}) == len(STAGES) == 6


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


def test_the_tables_of_all_stages_are_printed(tmp_path):
    assert not list(outcomes(tmp_path))
    facts = {**machine.facts(), "gpu": "a card", "driver": "580"}
    rows = [runner.row_of("W1", "plain"), runner.row_of("W1", "ours")]
    rows[0]["seconds"], rows[1]["seconds"], rows[1]["over"] = [2.0] * 5, [1.0] * 5, {"plain": 1.3}
    for name, found in {"a": [runner.row_of("x", "a process", "died")], "e": rows}.items():
        content = json.dumps({"facts": facts, "rows": found})
        (tmp_path / f"gpu_day-{name}.json").write_text(content)
    entries = [{"name": "d", "reason": "ended after 9 s"}, {"name": "e", "reason": ""}]
    (tmp_path / "gpu_day.json").write_text(json.dumps({"stages": entries}))
    shown = list(outcomes(tmp_path))
    assert shown[0].startswith("(a) kernels against their reference: a card, driver 580; ")
    assert "| x | a process | died |" in shown[1]
    assert shown[5] == "Targets: 1 of 1 are met." and "| 2.00, at least 1.3: met |" in shown[4]
    assert shown[6:] == ["- d: ended after 9 s"]


TESTS = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(3))
def test_some(number):
    assert number < 2, "number is too large"

def test_skips():
    pytest.skip("not here")
"""
DIES = """
import os, pytest

@pytest.mark.gpu
def test_dies():
    os._exit(3)
"""


@pytest.mark.slow
def test_files_run_in_processes(tmp_path):
    """A failure comes with its reason; a file that ends its process or does not import is lost
    alone."""
    later = time.monotonic() + 100
    contents = {"test_some.py": TESTS, "test_other.py": DIES, "lost.py": "import no_module"}
    paths = [str(tmp_path / name) for name in contents]
    for path, content in zip(paths, contents.values()):
        Path(path).write_text(content)
    counts, problem = suite.rows_of_file(paths[0], later)
    assert counts["figures"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert "problem" not in counts and "number is too large" in problem["problem"]
    (lost,) = suite.rows_of_file(paths[1], later)
    assert lost["problem"].startswith("exit status 3: ")
    first, *_ = suite.rows_of_file(paths[2], later)
    assert first["problem"].startswith("exit status 2: ")
    (late,) = suite.rows_of_file(paths[0], 0.0)
    assert late["figures"] == {"note": "no time left"}
    tests = suite.tests_of(suite.files(["tests/test_gpu.py"]))
    assert "tests/test_gpu.py::test_families_on_cuda[BloomForCausalLM]" in tests
    named = suite.files(["tests/kernels/triton/test_*.py"])
    assert named[0].endswith("test_gpu.py") and named[-1].endswith("test_gpu_memcheck.py")


@pytest.mark.slow
@pytest.mark.full
def test_a_run_on_the_stand_in_of_a_device(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_in(ROOT, env, str(tmp_path), "--device", "fake", "--minutes", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    entries = report.read(tmp_path / "gpu_day.json")["stages"]
    assert {entry["name"]: entry["reason"] for entry in entries} == dict.fromkeys("abcdef", "")
    found = {name: report.read(tmp_path / f"gpu_day-{name}.json")["rows"] for name in "abcdef"}
    assert sum(row["figures"]["passed"] for row in found["a"]) > 0
    for name in "de":
        assert {row["case"][:2] for row in found[name]} == {"W1", "W3", "W6"}
