"""`tests.support.alone` counts the tests that passed without rooms, and fails if they are too
few."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_paged import rooms
from hf_paged.rooms import ROOMS, is_installed
from tests import conftest
from tests.support import alone, tools


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
