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
    (row,) = json.loads(path.read_text())["rows"]
    assert row["dtype"] == "float32" and row["paged"]["throughput"] == 1
    assert all(row[system]["equal_tokens"] == 1 for system in threads.SYSTEMS)
    assert "paged in 8 threads" in capsys.readouterr().out
