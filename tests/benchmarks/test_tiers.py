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
    rows = json.loads(path.read_text())["rows"]
    found = {row["system"]: row["figures"][tiers.FOUND] for row in rows[:2]}
    assert found == {"computed": 0, "disk": 192}
    assert [row["system"] for row in rows[2:]] == ["computed", "disk"]
    assert rows[3]["equal"] == 1 and rows[3]["figures"][tiers.FOUND] > 0
    assert "first token, new process" in capsys.readouterr().out
