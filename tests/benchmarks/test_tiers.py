"""Prefixes from disk: found by another process, with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert tiers.main(["--quick", "--json", str(path)]) == 0
    first, second = json.loads(path.read_text())["rows"]
    assert first["equal"] == second["equal"] == "yes"
    assert first["found"] == 192 and second["found"] > 0
    assert "first token, new process" in capsys.readouterr().out
