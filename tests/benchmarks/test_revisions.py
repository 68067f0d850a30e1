"""Figures of several revisions, or older than the code that they measure, are refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import machine, readme, report, revisions
from benchmarks.all import STAGES

Write = Callable[..., None]
FILES = [stage.file for stage in STAGES]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of results, with a list of all stages, in a checkout of its own; no page is
    rendered."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(readme, "SECTIONS", {})

    def write(
        revision: str,
        *names: str,
        tree: str = "clean",
        threads: int = 2,
        command: str = "",
        without: str = "",
        reason: str = "",
    ) -> None:
        entries = [
            {"name": stage.name, "file": stage.file, "reason": reason}
            for stage in STAGES
            if stage.name != without
        ]
        facts = {"revision": revision, "tree": tree, "cpu": "A", "cores": 2, "threads": threads}
        content = {"command": command, "facts": facts, "stages": entries}
        for name in names or ("all", *FILES):
            (results / f"{name}.json").write_text(json.dumps(content))

    return write


def said(capsys: pytest.CaptureFixture[str], argument: str, status: int) -> list[str]:
    """The lines that the command prints."""
    assert readme.main([argument]) == status
    return "".join(capsys.readouterr()).splitlines()


def test_a_mix_of_revisions_is_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--check", 0) == [], "no run of benchmarks.all"
    write("0123456")
    assert said(capsys, "--check", 0) == []
    write("0123456", "lora-cpu")  # repeated alone
    assert said(capsys, "--check", 0) == []
    write("89abcde", "lora-cpu", "tiers-cpu")
    (line,) = said(capsys, "--check", 1)
    assert "all.json, generate-cpu-llama-100m.json" in line
    assert line.endswith("of revision 0123456; lora-cpu.json, tiers-cpu.json of revision 89abcde")
    assert said(capsys, "--fresh", 1)[0] == line
    write("0123456+", *FILES)
    (line,) = said(capsys, "--check", 1)
    assert "all.json of revision 0123456; generate-cpu" in line and "0123456+" in line
    write("0123456", without="adapters")  # a list of other stages, beside a file of another run
    write("89abcde", "lora-cpu")
    assert said(capsys, "--check", 1)[0].endswith("lora-cpu.json of revision 89abcde")
    write("0123456")
    (report.RESULTS / "lora-cpu.json").unlink()
    (line,) = said(capsys, "--check", 1)
    assert line == "all.json lists the stage adapters as complete; lora-cpu.json is missing"


def test_a_mix_of_machines_and_a_quick_run_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("0123456")
    write("0123456", "lora-cpu", threads=1)
    write("0123456", "tiers-cpu", command="python -m benchmarks.tiers --quick")
    machines, quick = said(capsys, "--check", 1)
    assert machines.startswith("files of benchmarks.all are of several machines: all.json, ")
    assert machines.endswith("of machine A, 2, 2; lora-cpu.json of machine A, 2, 1")
    assert quick == "tiers-cpu.json is of a quick run, which says nothing"
    assert {machines, quick} <= set(said(capsys, "--fresh", 1))


def test_a_page_that_is_not_rendered_is_not_released(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- a:begin -->\nold\n<!-- a:end -->")
    monkeypatch.setattr(readme, "SECTIONS", {page: {"a": lambda: "new"}})
    monkeypatch.setattr(revisions, "stale", lambda: [])
    (line,) = said(capsys, "--fresh", 1)
    assert "page.md: differs from the results" in line and "old" in page.read_text()


@pytest.mark.parametrize("revision", ["HEAD", "main", "unknown", "", "012345", "0123456++"])
@pytest.mark.parametrize("argument", ["--check", "--fresh"])
def test_a_revision_that_is_no_commit_is_refused(
    revision: str, argument: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("0123456")
    write(revision, "lora-cpu")
    (line,) = said(capsys, argument, 2)
    assert line.endswith(f"lora-cpu.json: revision {revision!r} is not the hash of a commit")


def test_figures_older_than_a_kernel_are_not_released(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def change(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(name: str, text: str = "") -> str:
        change(name, text)
        git("add", name)
        git("commit", "-q", "-m", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    kernels, step = "hf_paged/kernels/__init__.py", "hf_paged/batching/__init__.py"
    first = commit(kernels)
    assert said(capsys, "--fresh", 1) == ["there is no run of benchmarks.all"]
    write(first)
    commit("docs/index.md")
    commit(kernels, '"""Kernels."""  # in C++ and Triton\n')
    assert said(capsys, "--fresh", 0) == []
    last = commit(step, "step = 1\n")
    (line,) = said(capsys, "--fresh", 1)  # once for all files
    assert "all.json, " in line and "lora-cpu.json, " in line
    assert line.endswith(f" of revision {first}: changed since: {step}")
    write(last)
    assert said(capsys, "--fresh", 0) == []
    new = f"{revisions.COMPUTES[1]}/new.py"
    for name in (step, new):  # not committed
        path = change(name, "step = 2\n")
        (line,) = said(capsys, "--fresh", 1)
        assert line.endswith(f" of revision {last}: changed since: {name}")
        path.unlink()
        assert said(capsys, "--fresh", int(name != new))[-1:] == [line][: name != new]
        git("checkout", "-q", ".")
    write(last, "lora-cpu", tree="changed: step.py")
    (line,) = said(capsys, "--fresh", 1)
    assert line == (
        f"lora-cpu.json of revision {last}: not of a clean work tree (changed: step.py)"
    )
    write(f"{last}+", "lora-cpu")
    assert "not of a clean work tree" in said(capsys, "--fresh", 1)[-1]
    write(last)
    (report.RESULTS / "lora-cpu.json").unlink()
    assert "lora-cpu.json is missing" in said(capsys, "--fresh", 1)[0]
    write(last, without="adapters")
    assert said(capsys, "--fresh", 1) == ["all.json has no stage adapters"]
    write(last, reason="ended after 9 s")
    assert f"stage {STAGES[0].name}: ended after 9 s" in said(capsys, "--fresh", 1)
    write("0123456789abcdef")
    (line,) = said(capsys, "--fresh", 1)
    assert line.endswith(
        ": git has no such commit here (not committed, a shallow clone, or no git)"
    )


def test_code_is_compared_without_what_does_not_run() -> None:
    one = revisions.code_of("a.py", '"""Text."""\nx = "kept"  # said\n')
    assert one == revisions.code_of("a.py", 'x = "kept"')
    assert one != revisions.code_of("a.py", 'x = "other"')
    assert revisions.code_of("a.cpp", "// a") != revisions.code_of("a.cpp", "// b")
    assert revisions.code_of("a.py", "x =") == "x =" and revisions.code_of("a.py", None) is None
