"""Rows over several adapters: one forward per step, and the tokens of each adapter alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("peft")

from benchmarks import lora


@pytest.mark.full
@pytest.mark.slow
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert lora.main(["--quick", "--json", str(path)]) == 0
    rows = {row["system"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows[lora.MIXED]["forwards"] == rows[lora.ONE]["forwards"] == rows[lora.BASE]["forwards"]
    assert rows[lora.APART]["forwards"] == 8 * rows[lora.MIXED]["forwards"]
    assert rows[lora.FOLDERS]["loads"] > 0
    assert path.with_suffix(".png").stat().st_size > 5000
    assert "throughput over one adapter a forward" in capsys.readouterr().out
