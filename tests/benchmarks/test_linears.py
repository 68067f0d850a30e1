"""The benchmark of linear products runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import linears
from hf_paged.kernels import cpp

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linears.main(["--quick", "--json", str(tmp_path / "found.json")])
    data = json.loads((tmp_path / "found.json").read_text())
    cases = [f"llama-tiny, {count}" for count in ("1 row", "1 row", "5 rows", "5 rows")]
    assert [row["case"] for row in data["rows"]] == cases
    assert data["title"].startswith("Path of the kernel: ")
    assert all(row["seconds"][0] > 0 and row["figures"]["floor, ms"] > 0 for row in data["rows"])
    assert "| llama-tiny, 5 rows | ours | 1, 1 |" in capsys.readouterr().out
