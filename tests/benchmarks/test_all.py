"""One run of all benchmarks: stages as processes, their files, and those that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import all as whole_run
from benchmarks import readme, report
from benchmarks.all import STAGES, Stage
from benchmarks.peers import TITLES
from benchmarks.sections import overview


@pytest.mark.slow
def test_quick_runs_stages_and_lists_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Stage("bad", 1, "nothing_of_this_name", "", "bad-cpu")
    silent = Stage("silent", 1, "machine", "", "silent-cpu")
    first_call = next(stage for stage in STAGES if stage.name == "first_call")
    monkeypatch.setattr(whole_run, "STAGES", (bad, silent, first_call))
    (tmp_path / "bad-cpu.json").write_text("of an earlier run")
    assert whole_run.main(["--quick", "--out", str(tmp_path)]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all.json",
        f"{first_call.file}.json",
    ]
    assert report.read(tmp_path / f"{first_call.file}.json")["rows"]
    failed, quiet, ran = report.read(tmp_path / "all.json")["stages"]
    assert failed["reason"].startswith("exit status 1: ") and "nothing_of" in failed["reason"]
    assert quiet["reason"] == "left no file" and ran["reason"] == "" and ran["seconds"] > 0
    assert "bad: " in capsys.readouterr().out
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "3 stages; not complete: bad (exit status 1: " in overview.missing()


def test_a_stage_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Stage("slow", 60, "first_call", "--turns 1000", "slow-cpu")
    monkeypatch.setattr(whole_run, "STAGES", (slow, slow._replace(name="later")))
    monkeypatch.setattr(whole_run, "LEAST_SECONDS", 0.5)
    assert whole_run.main(["--minutes", "0.01", "--out", str(tmp_path)]) == 1
    ended, late = report.read(tmp_path / "all.json")["stages"]
    assert ended["reason"].startswith("ended after ") and late["reason"] == "no time was left"


def test_stages_fit_the_hour_and_the_docs_read_their_files() -> None:
    assert sum(stage.minutes for stage in STAGES) <= whole_run.MINUTES
    files = [stage.file for stage in STAGES]
    assert len(set(files)) == len(files)
    modules = readme.FIGURES_OF
    shown = {name for module in modules for names in module.BENCHMARK.results for name in names}
    assert set(files) <= shown
    args = whole_run.parse(["--out", "there"])
    command = whole_run.command_of(STAGES[0], args, 12.5, Path("there") / "a.json")
    assert command[-2] == "--json" and command[command.index("--minutes") + 1] == "12.5"
    assert command[command.index("--peers") + 1 :][: len(TITLES)] == list(TITLES)
    quick = whole_run.parse(["--quick", "--out", "there"])
    for stage in STAGES:
        arguments = whole_run.command_of(stage, quick, 1, Path("a.json"))
        assert "--quick" in arguments and not {"--peers", "--turns", "--repeats"} & set(arguments)


def test_bad_stages_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole_run.main(["--only", "whole,nonsense"])
    assert "'nonsense' (choose from whole, float32" in capsys.readouterr().err
