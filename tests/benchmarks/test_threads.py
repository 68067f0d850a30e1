"""The benchmark of threads runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import threads


@pytest.mark.slow
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    threads.main(["--quick", "--dtype", "float32", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5 and {row["case"] for row in rows} == {"llama-tiny, float32"}
    assert all(row["equal"] == 1 and len(row["seconds"]) == 2 for row in rows)
    assert "paged in 8 threads" in capsys.readouterr().out
