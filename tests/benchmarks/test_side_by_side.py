"""The benchmark of models that cannot be packed runs, and tells what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import side_by_side


def test_quick_prints_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    side_by_side.main(["--quick", "--only", "Bloom|Bamba", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows] == ["Bamba", "Bloom"]
    for row in rows:
        assert row["size"] == "tiny" and "side by side" in row["route"]
        assert row["generate"]["equal"] and row["engine"]["equal"]
    assert "| Bloom | tiny |" in capsys.readouterr().out


def test_every_shape_of_100m_is_about_that_large() -> None:
    for name in side_by_side.SHAPES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            model = side_by_side.build(name, is_tiny=False)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert 60e6 < count < 160e6, f"{name}: {count:,} parameters"
