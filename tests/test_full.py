"""`.ci/full` continues after a failed part and reports the failure in its result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import full

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
