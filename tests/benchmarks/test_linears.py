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
    assert [row["rows"] for row in data["rows"]] == [1, 5] and data["bandwidth_gb_s"] > 0
    assert data["path"] in ("wide", "avx512_bf16", "amx")
    assert all(row["ratio"] > 0 and row["floor_ms"] > 0 for row in data["rows"])
    assert "| llama-tiny | 5 |" in capsys.readouterr().out
