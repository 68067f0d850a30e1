"""Tools of `tests/support` that run tests, leave tests out or check them do not pass by mistake."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged import rooms
from hf_paged.rooms import ROOMS, is_installed
from tests import conftest
from tests.support import alone, full, mutants, slow, tools
from tests.support.collected import Collected, lost
from tests.support.tools import ROOT
from tests.support.workers import Lost, in_workers

PASSES = [
    sys.executable,
    "-c",
    "print('3 cases so far'); print('1,500 cases, 7 calls, 0 failed, 2 s'); print('bye')",
]
FAILS = [sys.executable, "-c", "print('2 passed, 1 failed in 3.00s'); raise SystemExit(3)"]


def test_goes_on_after_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "RESULT", tmp_path / "full.json")
    monkeypatch.setattr(full, "PARTS", {"one": [FAILS, PASSES], "two": [PASSES], "three": [FAILS]})
    assert full.main(["one", "two"]) == 1
    result = json.loads((tmp_path / "full.json").read_text())
    assert [part["part"] for part in result["parts"]] == ["one", "two"]
    assert [part["exit_code"] for part in result["parts"]] == [3, 0]
    assert [part["counts"] for part in result["parts"]] == [
        {"passed": 2, "failed": 1},
        {"cases": 1500, "calls": 7, "failed": 0},
    ]
    assert {"cpu", "cores", "python", "torch", "transformers", "revision"} <= result["facts"].keys()
    assert full.main(["two"]) == 0


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        full.main(["fuzz", "laod"])
    assert "unknown parts: laod" in capsys.readouterr().err


def test_the_parts_are_files_and_modules_that_exist() -> None:
    for path in (full.MATRIX, *full.FAULTS):
        assert (full.ROOT / path).exists()
    modules = {
        argument for commands in full.PARTS.values() for command in commands for argument in command
    }
    programs = {name for name in modules if name.startswith("tests.support.")}
    assert len(programs) == 9
    for name in programs:
        assert (full.ROOT / f"{name.replace('.', '/')}.py").exists()


@pytest.mark.parametrize(
    ("least", "code", "status"), [(2, 0, 0), (3, 0, 1), (2, 1, 1), (0, 0, 0), (0, 5, 5)]
)
def test_too_few_tests_that_pass_are_a_failure(
    least: int,
    code: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], cwd: str, env: dict[str, str]) -> Any:
        left = {path.stem for path in (Path(cwd) / "hf_paged").iterdir()}
        assert left & {*ROOMS} == {*filter(is_installed, ROOMS)} - {"tiers", "ray"}
        assert "cache" in left
        assert not (Path(cwd) / "tests" / "tiers").exists()
        assert env["PYTHONPATH"] == cwd and command[-2:] == ["-q", "tests/cache"]
        found = Counter(passed=2, skipped=1)
        return code, found + Counter(failed=1, error=1) if code == 1 else found

    options = ["--without", "tiers,ray", "--least", str(least), "-q", "tests/cache"]
    monkeypatch.setattr(tools, "run_counted", run)
    monkeypatch.setattr(sys, "argv", ["alone", *options])
    with pytest.raises(SystemExit) as caught:
        alone.main()
    assert caught.value.code == status
    failed = 2 if code == 1 else 0
    told = f"without tiers, ray: 2 passed, 1 skipped, {failed} failed"
    assert told in capsys.readouterr().out


def test_a_room_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["alone", "--without", "tiers,cellar"])
    with pytest.raises(SystemExit):
        alone.main()
    assert "no room has the name cellar" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "No module named 'hf_paged.beams'",
        "No module named 'tests.beams.searches'",
        "`num_beams` needs `hf_paged.beams`",
    ],
)
def test_an_error_that_names_a_missing_room_is_a_skip(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_is_taken_away", lambda room: room == "beams")
    assert conftest._missing_room(text) == "needs the room beams"
    assert conftest._missing_room(text.replace("beams", "tiers")) is None


def test_a_test_that_pretends_that_rooms_are_missing_can_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rooms, "is_installed", lambda name: False)
    names = list[str]()
    with conftest._noting_missing_rooms(names):
        assert all(rooms.missing(name, "an option") for name in ROOMS)
    assert names == [name for name in ROOMS if not is_installed(name)]


# What a machine has that runs the package and its tests; `.ci/collect` installs no more.
REQUIRED = "accelerate hypothesis numpy psutil pytest safetensors torch transformers triton".split()
# required by these
REQUIRED += "_pytest filelock huggingface_hub packaging tokenizers tqdm".split()
REQUIRED += ["benchmarks", "hf_paged", "tests", *sys.stdlib_module_names]


def optional_imports(path: Path) -> Iterator[str]:
    """Packages imported at the top of a module before `pytest.importorskip` has found them."""
    present = set(REQUIRED)
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        else:
            names = []
            if "importorskip" in ast.unparse(statement):
                strings = (
                    node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)
                )
                present |= {value.partition(".")[0] for value in strings if isinstance(value, str)}
        yield from {name.partition(".")[0] for name in names} - present


@pytest.mark.slow
def test_modules_import_optional_packages_only_if_they_are_there() -> None:
    wrong = {path: [*optional_imports(path)] for path in (ROOT / "tests").rglob("*.py")}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_test_is_lost_unless_its_module_is_skipped() -> None:
    here = Collected(["tests/a.py::test_x[1]", "tests/a.py::test_y", "tests/b.py::test_z"], {})
    there = Collected(["tests/a.py::test_y"], {"tests/b.py": "could not import 'peft'"})
    assert lost(here, there) == ["tests/a.py::test_x[1]"] and lost(here, here) == []


PATH = ROOT / "hf_paged" / "cache" / "block_pool.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", "a <= b"),
        ("a is None", "a is not None"),
        ("a + 1", "a - 1"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("3", "4"),
        ("a if b else c", "c if b else a"),
    ],
)
def test_what_a_mutant_changes(source: str, expected: str) -> None:
    made = mutants.changed(ast.parse(source, mode="eval").body)
    assert made is not None and ast.unparse(made) == expected


@pytest.mark.parametrize("source", ["True", "a", "f(x)", "'text'", "-a"])
def test_what_stays(source: str) -> None:
    assert mutants.changed(ast.parse(source, mode="eval").body) is None


def test_each_site_is_one_change_of_a_line_that_a_test_reaches() -> None:
    number = next(n for n, line in enumerate(PATH.read_text().splitlines(), 1) if " == " in line)
    found = list(mutants.sites({str(PATH): {number: ["tests/a.py::test_a|run"], number + 1: [""]}}))
    assert found and {(path, node.lineno) for path, node in found} == {(PATH, number)}
    for path, node in found:
        old, new = path.read_text().splitlines(), mutants.replaced(path, node).splitlines()
        ast.parse("\n".join(new))
        differing = [n for n, lines in enumerate(zip(old, new), 1) if lines[0] != lines[1]]
        assert differing == [number] and len(old) == len(new)


@pytest.mark.parametrize(
    ("patterns", "but", "expected"),
    [
        (["*-beams", "t5-samples"], [], {"llama-beams", "t5-beams", "t5-samples"}),
        (["*-be"], [], set()),
        ([], ["llama-*"], {"t5-beams", "t5-samples", "cpu-[1, 2]"}),
        (["cpu-[1, 2]"], [], {"cpu-[1, 2]"}),
    ],
    ids=["patterns", "none", "but", "brackets"],
)
def test_cases_are_slow_by_patterns(
    patterns: list[str], but: list[str], expected: set[str]
) -> None:
    cases = ["llama-beams", "llama-samples", "t5-beams", "t5-samples", "cpu-[1, 2]"]
    assert {case for case in cases if slow.is_slow(case, patterns, but)} == expected


def test_an_eighth_of_slow_tests_is_kept() -> None:
    name = "tests/virtual/test_pages.py::test_cell"
    grid = [f"{name}[{row}-{column}]" for row in range(8) for column in range(4)]
    left = slow.left_to_full(grid)
    assert left < {*grid} and len(left) == 28
    # an order of the grid's own would leave columns out
    assert len({name[-2] for name in {*grid} - left}) > 1
    alone = [f"tests/test_load.py::test_{number}" for number in range(800)]
    assert 80 <= len({*alone} - slow.left_to_full(alone)) <= 120


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
