"""Stages of a run: one that fails in any way ends alone, with a reason, and leaves its rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import psutil
import pytest

from benchmarks import all as whole_run
from benchmarks import machine, readme, report, stages
from benchmarks.all import STAGES
from benchmarks.peers import TITLES
from benchmarks.stages import NO_TIME, Options, Stage
from tests.benchmarks.failing_stages import crashes, hangs, is_silent, raises, works


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """Stages are functions of `failing_stages`."""
    monkeypatch.setattr(stages, "PACKAGE", "tests.benchmarks")


def stage(function, minutes=1.0, name="", **options):
    name = name or function.__name__
    return Stage(name, minutes, f"failing_stages {function.__name__}", file=name, **options)


def listed(folder):
    """Why each stage failed."""
    entries = report.read(folder / "all.json")["stages"]
    return {entry["name"]: entry["reason"] for entry in entries}


def run(folder, *chosen, minutes=9.0):
    stages.run(chosen, Options(minutes, minutes, folder), "all")
    return listed(folder)


def ends(number):
    """Waits for the end of a process that was killed, which ends when it is scheduled."""
    last = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(number)
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < last, child
            time.sleep(0.05)


@pytest.mark.slow
def test_a_stage_that_crashes_hangs_or_raises_ends_alone(tmp_path, monkeypatch):
    """What it has added so far stays; the processes that it started end with it."""
    monkeypatch.setattr(stages, "START_SECONDS", 3.0)
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.0)
    (tmp_path / "is_silent.json").write_text("of an earlier run")
    reasons = run(
        tmp_path,
        stage(hangs, minutes=0.01),
        *map(stage, (crashes, raises, is_silent, works)),
        stage(works, name="last"),
    )
    assert reasons.pop("crashes").startswith("exit status -11: ")
    assert reasons == {
        "raises": "exit status 1: ValueError: out of luck",
        "is_silent": "left no file",
        "works": "",
        "hangs": "ended after 4 s",
        "last": "",
    }
    logs = {
        entry["name"]: entry.get("log", "")
        for entry in report.read(tmp_path / "all.json")["stages"]
    }
    assert len(logs["crashes"]) <= stages.LOG_CHARACTERS
    assert "in hangs" in logs["hangs"], "the stack says where it hangs"
    for name in ("crashes", "hangs", "works"):
        assert {"what": "first"} in report.read(tmp_path / f"{name}.json")["rows"]
    ends(report.read(tmp_path / "hangs.json")["rows"][1]["child"])


@pytest.fixture
def default_handlers():
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
def test_a_signal_ends_the_stages_and_keeps_their_results(number, tmp_path, monkeypatch, capsys):
    """A lost connection, Ctrl-C and `kill`, while a stage is waited for: what is complete, of this
    run and of an earlier one of the same revision, stays in the list."""
    path, later = tmp_path / "hangs.json", stage(works, name="later")
    monkeypatch.setattr(machine, "revision", lambda: "0123456")
    assert run(tmp_path, later) == {"later": ""}

    def interrupt():
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
    assert listed(tmp_path) == {"later": "", "works": "", "hangs": stages.NOT_ENDED}
    assert (tmp_path / "later.json").exists()


def test_a_stage_without_time_keeps_no_older_results(tmp_path, monkeypatch):
    (tmp_path / "works.json").write_text("{}")
    assert run(tmp_path, stage(works), minutes=0.01) == {"works": NO_TIME}
    assert not (tmp_path / "works.json").exists()
    monkeypatch.setattr(stages, "run_stage", lambda *_: pytest.fail("a stage was started"))
    with stages.alone(tmp_path), pytest.raises(SystemExit, match="another run writes to "):
        run(tmp_path, stage(works))


def test_a_stage_that_is_repeated_takes_its_place_in_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "revision", lambda: "0123456")
    assert run(tmp_path, stage(works), stage(raises))["raises"]
    for revision, names in (("0123456", {"works", "raises"}), ("89abcde", {"raises"})):
        monkeypatch.setattr(machine, "revision", lambda revision=revision: revision)
        assert run(tmp_path, stage(works, name="raises")) == dict.fromkeys(names, "")
        assert ("repeated" in report.read(tmp_path / "all.json")) == (len(names) == 2)


def test_a_folder_that_cannot_be_written_is_an_error_before_a_stage_runs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stages, "run_stage", lambda *_: pytest.fail("a stage was started"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as caught:
        whole_run.main(["--out", str(file / "below")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and f"cannot write to {file / 'below'}: " in last
    facts = {"revision": machine.revision()}
    for content in ("{", json.dumps({"facts": facts, "stages": ["whole"]})):
        (tmp_path / "all.json").write_text(content)
        assert whole_run.main(["--out", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "all.json: " in line


def test_stages_fit_the_hour_and_the_docs_read_their_files(tmp_path):
    assert sum(stage.minutes for stage in STAGES) <= whole_run.MINUTES
    files = [stage.file for stage in STAGES]
    results = (names for module in readme.FIGURES_OF for names in module.BENCHMARK.results)
    assert len(set(files)) == len(files) and set(files) <= {name for one in results for name in one}
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
