"""Stages of a run: one that fails in any way ends alone, with a reason, and leaves its rows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import all as whole_run
from benchmarks import machine, readme, report, stages
from benchmarks.all import STAGES
from benchmarks.peers import TITLES
from benchmarks.sections import overview
from benchmarks.stages import NO_TIME, Options, Stage
from benchmarks.workers import Lost, in_workers
from tests.benchmarks.failing_stages import crashes, hangs, is_silent, raises, works


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are functions of `failing_stages`."""
    monkeypatch.setattr(stages, "PACKAGE", "tests.benchmarks")


def stage(function: Any, minutes: float = 1.0, **options: Any) -> Stage:
    name = function.__name__
    return Stage(name, minutes, f"failing_stages {name}", file=name, **options)


def run(folder: Path, *chosen: Stage, minutes: float = 9.0) -> dict[str, dict[str, Any]]:
    stages.run(chosen, Options(minutes, minutes, folder), "all")
    return {entry["name"]: entry for entry in report.read(folder / "all.json")["stages"]}


@pytest.mark.slow
def test_a_stage_that_crashes_hangs_or_raises_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has added so far stays; the processes that it started end with it."""
    monkeypatch.setattr(stages, "START_SECONDS", 3.0)
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.0)
    (tmp_path / "is_silent.json").write_text("of an earlier run")
    found = run(
        tmp_path,
        stage(hangs, minutes=0.01, is_beside=True),
        *map(stage, (crashes, raises, is_silent, works)),
        stage(works, is_timed=True)._replace(name="last", file="last"),
    )
    assert {name: entry["reason"] for name, entry in found.items()} == {
        "crashes": found["crashes"]["reason"],
        "raises": "exit status 1: ValueError: out of luck",
        "is_silent": "left no file",
        "works": "",
        "hangs": "ended after 4 s",
        "last": "",
    }
    assert found["crashes"]["reason"].startswith("exit status -11: ")
    assert len(found["crashes"]["log"]) <= stages.LOG_CHARACTERS
    assert "in hangs" in found["hangs"]["log"], "the stack says where it hangs"
    for name in ("crashes", "hangs", "works"):
        assert {"what": "first"} in report.read(tmp_path / f"{name}.json")["rows"]
    ends(report.read(tmp_path / "hangs.json")["rows"][1]["child"])


def ends(number: int) -> None:
    """Waits for the end of a process that was killed, which ends when it is scheduled."""
    last = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(number)
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < last, child
            time.sleep(0.05)


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Python's own handlers: processes in the background inherit ones that ignore SIGINT or
    SIGHUP."""
    own = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    own |= {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) == own[number], "the handler was not put back"


@pytest.mark.slow
@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_stages_and_keeps_their_results(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A lost connection, Ctrl-C and `kill`, while a stage is waited for: what is complete, of this
    run and of an earlier one of the same revision, stays in the list."""
    path = tmp_path / "hangs.json"
    later = stage(works)._replace(name="later", file="later")
    monkeypatch.setattr(machine, "revision", lambda: "0123456")
    assert run(tmp_path, later).keys() == {"later"}

    def interrupt() -> None:
        while not (path.exists() and len(report.read(path)["rows"]) == 2):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    capsys.readouterr()
    monkeypatch.setattr(whole_run, "STAGES", (stage(works), stage(hangs), later))
    with pytest.raises(SystemExit) as caught:
        whole_run.main(["--out", str(tmp_path)])
    assert caught.value.code == 128 + number
    about, first, last = capsys.readouterr().err.splitlines()
    assert ", revision 0123456" in about and f", {machine.cores()} cores, " in about
    assert first.startswith("works: ")
    assert last.startswith(f"interrupted by {signal.Signals(number).name}: ")
    ends(report.read(path)["rows"][1]["child"])
    listed = {entry["name"]: entry for entry in report.read(tmp_path / "all.json")["stages"]}
    assert {name: entry["reason"] for name, entry in listed.items()} == {
        "later": "",
        "works": "",
        "hangs": stages.NOT_ENDED,
    }
    assert (tmp_path / "later.json").exists()


def test_a_stage_without_time_keeps_no_older_results(tmp_path: Path) -> None:
    (tmp_path / "works.json").write_text("{}")
    assert run(tmp_path, stage(works), minutes=0.01)["works"]["reason"] == NO_TIME
    assert not (tmp_path / "works.json").exists()


def test_a_stage_that_is_repeated_takes_its_place_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision, names in (("0123456", {"works", "raises"}), ("89abcde", {"raises"})):
        if revision == "0123456":
            monkeypatch.setattr(machine, "revision", lambda: "0123456")
            assert run(tmp_path, stage(works), stage(raises))["raises"]["reason"]
        else:
            monkeypatch.setattr(machine, "revision", lambda: "89abcde")
        found = run(tmp_path, stage(works)._replace(name="raises"))
        assert found.keys() == names and not found["raises"]["reason"]
        assert ("repeated" in report.read(tmp_path / "all.json")) == (len(names) == 2)


def test_a_folder_that_cannot_be_written_is_an_error_before_a_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "Running", lambda *_: pytest.fail("a stage was started"))
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below", Path("/proc/benchmarks")):
        with pytest.raises(SystemExit) as caught:
            whole_run.main(["--out", str(path)])
        last = capsys.readouterr().err.splitlines()[-1]
        assert caught.value.code == 2 and f"argument --out: cannot write to {path}: " in last
    facts = {"revision": machine.revision()}
    for content, said in (
        ("{", "not JSON: "),
        (json.dumps({"facts": facts, "stages": ["whole"]}), "failed: TypeError: "),
    ):
        (tmp_path / "all.json").write_text(content)
        assert whole_run.main(["--out", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"all.json: {said}" in line


def test_two_runs_do_not_write_to_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "Running", lambda *_: pytest.fail("a stage was started"))
    with (
        stages.alone(tmp_path),
        pytest.raises(SystemExit, match="another run writes to "),
    ):
        run(tmp_path, stage(works))
    run(tmp_path, stage(works), minutes=0.01)
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    run(tmp_path, stage(works), minutes=0.01)


@pytest.mark.slow
def test_quick_runs_stages_and_lists_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "PACKAGE", "benchmarks")
    bad = Stage("bad", 1, "nothing_of_this_name", file="bad-cpu")
    first_call = next(stage for stage in STAGES if stage.name == "first_call")
    monkeypatch.setattr(whole_run, "STAGES", (bad, first_call))
    assert whole_run.main(["--quick", "--out", str(tmp_path)]) == 1
    assert report.read(tmp_path / f"{first_call.file}.json")["rows"]
    failed, ran = report.read(tmp_path / "all.json")["stages"]
    assert failed["reason"].startswith("exit status 1: ") and "nothing_of" in failed["reason"]
    assert ran["reason"] == "" and ran["seconds"] > 0
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "2 stages; not complete: bad (exit status 1: " in overview.missing()


def test_stages_fit_the_hour_and_the_docs_read_their_files(tmp_path: Path) -> None:
    assert sum(stage.minutes for stage in STAGES) <= whole_run.MINUTES
    files = [stage.file for stage in STAGES]
    assert len(set(files)) == len(files)
    modules = readme.FIGURES_OF
    shown = {name for module in modules for names in module.BENCHMARK.results for name in names}
    assert set(files) <= shown
    whole, quick = (
        whole_run.options_of(whole_run.parse(["--out", str(tmp_path), *more]))
        for more in ([], ["--quick"])
    )
    command = whole.command(STAGES[0], 12.5)
    assert command[-2] == "--json" and command[command.index("--minutes") + 1] == "12.5"
    assert command[command.index("--peers") + 1 :][: len(TITLES)] == list(TITLES)
    for stage in STAGES:
        arguments = quick.command(stage, 1)
        assert "--quick" in arguments and not {"--peers", "--turns", "--repeats"} & set(arguments)


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
    lost = {1: "the process died with exit status 3", 2: "no result within 3 s"}
    assert found == {0: 0, 3: 30} | {number: Lost(reason) for number, reason in lost.items()}


@pytest.mark.slow
def test_no_job_runs_past_the_end() -> None:
    """The first job hangs; at its own limit it would be reported as lost."""
    assert not dict(in_workers(job, [2, 0], 1, 60.0, time.monotonic() + 0.3))
