"""The benchmark of a process's first call runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import first_call


def test_the_target_is_told_beside_the_table() -> None:
    rows = [
        {"case": "first call", "system": name, "seconds": [1.9, 2.0]} for name in ("plain", "x")
    ]
    assert list(first_call.limit(rows)) == ["1.5 times plain's time and 1 s more are 3.92 s."]


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    first_call.main(["--quick", "--dtype", "float32", "--json", str(path)])
    plain, paged, compiling = json.loads(path.read_text())["rows"]
    assert not any(plain["figures"][part] for part in first_call.PARTS.values())
    for part in ("self-check, s", "kernels, s"):
        assert 0 < compiling["figures"][part] < compiling["seconds"][0]
    assert paged["figures"]["kernels, s"] < compiling["figures"]["kernels, s"]
    assert "| compiling | paged |" in capsys.readouterr().out
