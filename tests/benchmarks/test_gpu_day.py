"""`benchmarks.gpu_day`: a stage that fails in any way ends alone, and the results have a size that
can be kept."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import machine
from benchmarks.gpu_day import runner, steps, suite
from benchmarks.gpu_day.__main__ import main
from benchmarks.gpu_day.record import FAKE, Record, Skipped
from benchmarks.gpu_day.runner import STAGES, Options, Stage, run
from benchmarks.gpu_day.summary import LIMIT, summary
from benchmarks.sections import gpu_day
from benchmarks.workers import Lost, in_workers

CHUNKS = ("plain", "ours", "ours, chunks not recorded")
HERE = "tests.benchmarks.test_gpu_day"
ROOT = Path(__file__).resolve().parents[2]


def works(record: Record) -> None:
    record.add(what="first", equal=True)


def crashes(record: Record) -> None:
    works(record)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(record: Record) -> None:
    works(record)
    record.add(child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid)
    time.sleep(3600)


def raises(record: Record) -> None:
    with record.guard(what="second"):
        raise ValueError("first line\nsecond line")
    works(record)


def is_skipped(record: Record) -> None:
    raise Skipped("no device")


def stage(function: Any, **options: Any) -> Stage:
    return Stage(
        **{
            "name": function.__name__,
            "title": "a test",
            "function": f"{HERE}:{function.__name__}",
            **options,
        }
    )


def read(folder: Path, function: Any) -> dict[str, Any]:
    return json.loads((folder / f"gpu_day-{function.__name__}.json").read_text())


@pytest.mark.full
@pytest.mark.slow
def test_a_stage_that_crashes_hangs_or_raises_ends_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """What it has added so far stays; the processes that it started end with it."""
    functions = (hangs, crashes, raises, is_skipped, works)
    stages = [stage(function, seconds=1.0 if function is hangs else 30.0) for function in functions]
    stages[0] = dataclasses.replace(stages[0], is_beside=True)
    assert run(stages, Options(9.0, tmp_path, FAKE, grace_seconds=1.0, least_seconds=0.0)) == 1
    found = {function: read(tmp_path, function) for function in functions}
    assert (
        found[hangs]["status"].startswith("timed out")
        and "time.sleep" not in found[hangs]["status"]
    )
    assert "in hangs" in found[hangs]["log"], "the stacks say where it hangs"
    assert found[crashes]["status"] == "crashed: exit status -11"
    assert found[raises]["status"] == "failed: 1 of 2"
    assert found[raises]["rows"][0]["problem"].startswith(
        "ValueError: first line / second line (test_gpu_day.py:"
    )
    assert found[is_skipped]["status"] == "skipped: no device" and found[works]["status"] == "ok"
    assert all(
        {"what": "first", "equal": True} in found[function]["rows"]
        for function in (hangs, crashes, works)
    )
    assert len(list(tmp_path.iterdir())) == len(functions) + 1
    printed = capsys.readouterr().out
    assert (
        "(works) a test: ok" in printed
        and printed == (tmp_path / "gpu_day-summary.txt").read_text() + "\n"
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(found[hangs]["rows"][1]["child"])
        while child.status() != psutil.STATUS_ZOMBIE:
            # it was killed, and ends when it is scheduled
            time.sleep(0.05)


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Python's own handlers: processes in the background inherit ones that ignore SIGINT or
    SIGHUP."""
    own = dict.fromkeys(runner.ENDING, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_stages_and_keeps_their_results(
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost connection, Ctrl-C and `kill`, while a stage is waited for. A full disk does not keep
    the summary back."""

    def interrupt() -> None:
        while not (path.exists() and len(json.loads(path.read_text())["rows"]) == 2):
            time.sleep(0.02)
        monkeypatch.setattr(runner, "replace_file", full)
        os.kill(os.getpid(), number)

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, handlers = (
        tmp_path / "gpu_day-hangs.json",
        [signal.getsignal(one) for one in runner.ENDING],
    )
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run([stage(hangs, seconds=60.0), stage(works, seconds=1.0)], Options(9.0, tmp_path, FAKE))
    assert [signal.getsignal(one) for one in runner.ENDING] == handlers
    child = json.loads(path.read_text())["rows"][1]["child"]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(10)
    printed = capsys.readouterr()
    assert (
        "(hangs) a test: crashed: exit status -9" in printed.out and f"child={child}" in printed.out
    )
    assert printed.err.count("No space left on device") == 2, "the stage's file and the summary"


def test_results_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    """Nor does a stage that was skipped keep them."""
    path = tmp_path / "gpu_day-works.json"
    path.write_text("{}")
    run([stage(works, seconds=30.0)], Options(0.01, tmp_path, FAKE))
    assert not path.exists()


def floods(record: Record) -> None:
    works(record)
    sys.stdout.buffer.write(
        b"\xff\xf0" * 100_000
        + "\nZeichen: \N{GREEK SMALL LETTER MU}\udc80\n".encode(errors="surrogatepass")
    )
    os.kill(os.getpid(), signal.SIGKILL)  # as when memory runs out


@pytest.mark.slow
def test_any_output_is_printable(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run([stage(floods, seconds=30.0)], Options(9.0, tmp_path, FAKE))
    printed = capsys.readouterr().out
    assert (
        printed.isascii() and "crashed: exit status -9" in printed and "Zeichen: \\u03bc" in printed
    )
    assert len(read(tmp_path, floods)["log"]) <= runner.LOG_CHARACTERS
    problem = {"title": "", "status": "failed", "rows": [{"problem": "\udc80\N{SNOWMAN}" * 1000}]}
    assert summary({"a": problem}).isascii() and len(summary({"a": problem})) < LIMIT


@pytest.mark.slow
def test_skipped_stages_are_no_failure(tmp_path: Path) -> None:
    assert run([stage(is_skipped, seconds=30.0)], Options(9.0, tmp_path, FAKE)) == 0
    assert run([stage(works, seconds=0)], Options(0.01, tmp_path, FAKE)) == 0, "no time is left"


def test_the_summary_is_short_and_begins_with_what_failed() -> None:
    rows = [
        {"what": f"row {number}", "number": 0.123456789, "long": "x" * 500} for number in range(100)
    ]
    rows.append({"what": "the last", "problem": "wrong tokens"})
    status = {"title": "a test", "facts": {"gpu": "y" * 5000}, "seconds": 1.0}
    results = {name: {**status, "status": "failed: 1 of 101", "rows": rows} for name in "0abcdef"}
    text = summary(results)
    assert 8000 < len(text) <= LIMIT + 1 < 10_000
    assert (
        text.count("FAILED wrong tokens")
        == len(results)
        == text.count("a test: failed: 1 of 101, 1 s")
    )
    assert text.count("more") == len(results)
    few = summary({"a": {**status, "status": "ok", "rows": rows[:2]}})
    assert "row 0" in few and "row 1" in few and "more" not in few


def test_at_most_8_files_and_every_function_exists() -> None:
    assert len({stage.name for stage in STAGES}) + 1 <= 8
    for each in STAGES:
        module, _, name = each.function.partition(":")
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert f"def {name}(record: Record" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "a, z"], "invalid choice: 'z' (choose from 0, a, b, c, d, e, f)"),
        (["--minutes", "nan"], "nan is not between 0 and 1440"),
        (["--minutes", "inf"], "inf is not between 0 and 1440"),
        (["--out", __file__], "must be a folder that can be written to"),
        (["--cache", "/proc/kernels"], "must be a folder that can be written to"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "fake", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkout_without_git_or_device(tmp_path: Path) -> None:
    """Elsewhere, with nothing installed but what is imported; a stage that needs a device says
    so."""
    for folder in ("benchmarks", "hf_paged"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("results", "__pycache__"),
        )
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_day",
        "--only",
        "c",
        "--out",
        str(tmp_path / "out"),
    ]
    env = {**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(c) attention alone: skipped: no device" in done.stdout


def job(number: int) -> int:
    if number == 1:
        os._exit(3)
    if number == 2:
        time.sleep(3600)
    return 10 * number


@pytest.mark.full
@pytest.mark.slow
def test_a_job_that_dies_or_hangs_is_lost_alone() -> None:
    found = dict(in_workers(job, [0, 1, 2, 3], 2, 3.0))
    assert found[0] == 0 and found[3] == 30
    assert found[1] == Lost("the process died with exit status 3") and found[2] == Lost(
        "no result within 3 s"
    )


@pytest.mark.slow
def test_no_job_runs_past_the_end() -> None:
    """The first job hangs; at its own limit it would be reported as lost."""
    assert not dict(in_workers(job, [2, 0], 1, 60.0, time.monotonic() + 0.3))


def test_a_sample_of_tests_goes_first() -> None:
    names = [
        "a.py::one[1]",
        "a.py::one[2]",
        "a.py::one[3]",
        "a.py::two",
        "b.py::three[1]",
        "b.py::three[2]",
    ]
    groups = suite.in_order(names)
    assert groups[:3] == [("a.py::one[1]",), ("b.py::three[1]",), ("a.py::two",)]
    assert sorted(name for group in groups for name in group) == names


def test_outcomes_stand_beside_predictions() -> None:
    facts = {**machine.facts(), "gpu": "a card", "driver": "580"}
    decode = {"heads": gpu_day.LLAMA, "case": "64 x 8192", "contender": "ours", "GB/s": 3801.0}
    step = {"model": gpu_day.QWEN, "case": "1x16", "system": "paged", "ms": 1.234}
    calls = [
        {"workload": "W3", "system": name, "plain_over": speed}
        for name, speed in zip(CHUNKS, (1.0, 4.0, 3.0))
    ]
    results = {
        "a": {
            "facts": facts,
            "rows": [{"kernel": "store", "problem": ""}, {"kernel": "x", "problem": "y"}],
        },
        "b": {
            "facts": facts,
            "rows": [{"equal": True}, {"equal": False}, {"note": "no time left"}],
        },
        "c": {"facts": facts, "rows": [{**decode, "of bandwidth, %": 88.4}]},
        "d": {"facts": facts, "rows": [step], "status": "timed out after 9 s"},
        "e": {"facts": facts, "rows": calls},
        "f": {"facts": facts, "rows": [{"counts": {"passed": 3, "failed": 1}}]},
    }
    shown = gpu_day.outcomes({name: {"status": "ok", **data} for name, data in results.items()})
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("|")]
    found = {what.strip(): outcome.strip() for _, what, _, outcome in rows}
    assert "a card, driver 580" in shown and "prediction" in shown
    assert found["kernels that give their reference's numbers"] == "1 of 2"
    assert found["tokens of plain `generate` in float32"] == "1 of 2 equal"
    assert (
        found[f"decode kernel, 64 rows of 8192 tokens, heads of {gpu_day.LLAMA}"]
        == "3801 GB/s, 88.4 % of a copy's"
    )
    assert found[f"a token of one row, {gpu_day.QWEN}"] == "1.234 ms"
    assert found[f"a token of one row, {gpu_day.LLAMA}"] == "timed out after 9 s"
    assert found["W3 with chunks as graphs, over without"] == "0.75"
    assert found["`pytest -m gpu`"] == "3 passed, 1 failed"
    assert gpu_day.outcomes({}).count(gpu_day.NOT_RUN) == len(gpu_day.PREDICTIONS)


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


def test_kernels_and_launches_of_a_profile_are_counted() -> None:
    """The profiler makes an object of its enumeration for each event."""

    def event(name: str, device: DeviceType) -> FunctionEvent:
        return FunctionEvent(
            0, name, 0, start_us=10, end_us=15, device_type=DeviceType(int(device))
        )

    host, device = DeviceType.CPU, DeviceType.CUDA
    names = ("cudaGraphLaunch", "cuLaunchKernelEx", "aten::mm", "cudaMemcpyAsync")
    events = [event(name, host) for name in names] + [event("attention_kernel", device)] * 3
    assert steps.counts(events) == (2, 3, 0.015)


@pytest.mark.slow
def test_tests_run_in_workers(tmp_path: Path) -> None:
    """A failure comes with its first lines; a test that ends its process is lost alone; a file that
    does not import counts as failed."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import no_such_module")
    (_, collected), *_ = in_workers(suite.collect, [(str(tmp_path),)], 1, 60.0)
    assert not isinstance(collected, Lost) and len(collected.names) == 5
    assert any("no_such_module" in lines for lines in collected.failed.values())
    found = [
        result
        for _, result in in_workers(suite.run_group, suite.in_order(collected.names), 1, 60.0)
    ]
    lost = [result for result in found if isinstance(result, Lost)]
    ran = [result for result in found if not isinstance(result, Lost)]
    assert lost == [Lost("the process died with exit status 1")]
    assert (
        sorted(len(result.passed) for result in ran) == [0, 1, 1]
        and sum(len(result.skipped) for result in ran) == 1
    )
    (lines,) = [lines for result in ran for lines in result.failed.values()]
    assert "number is too large" in lines


@pytest.mark.slow
@pytest.mark.full
def test_a_run_on_the_stand_in_of_a_device(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_day",
        "--device",
        "fake",
        "--minutes",
        "20",
        "--out",
        str(tmp_path),
    ]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.stem[-1]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: data["status"] for name, data in found.items()} == {
        **dict.fromkeys("0abcde", "ok"),
        "f": "skipped: no device",
    }
    assert len(done.stdout) <= LIMIT + 2
    assert {row["kernel"] for row in found["a"]["rows"] if "note" not in row} > {
        "store",
        "copy",
        "hash",
        "lora",
    }
    assert all(row["equal"] for row in found["b"]["rows"] if "note" not in row)
    assert {row["system"] for row in found["d"]["rows"]} == {"paged", "plain"}
    assert {row["workload"] for row in found["e"]["rows"]} == {"W1", "W3", "W6"}
