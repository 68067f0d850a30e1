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
    forwards = {name: row["figures"]["forwards"] for name, row in rows.items()}
    assert forwards[lora.MIXED] == forwards[lora.ONE] == forwards[lora.BASE]
    assert forwards[lora.APART] == 8 * forwards[lora.MIXED]
    assert rows[lora.FOLDERS]["figures"]["adapters loaded"] > 0
    assert rows[lora.MIXED]["equal"] == rows[lora.FOLDERS]["equal"] == 1
    assert "| one adapter a forward / it |" in capsys.readouterr().out
