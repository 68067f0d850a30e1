"""The benchmark of models that cannot be packed runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import side_by_side


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    side_by_side.main(
        ["--quick", "--only", "Bloom|Bamba tiny 8|Qwen2.5|Whisper tiny 1", "--json", str(path)]
    )
    rows = json.loads(path.read_text())["runs"][0]["rows"]
    found = [(row["model"], row["workload"]) for row in rows]
    even, stragglers = side_by_side.WORKLOADS
    assert sorted(found) == sorted(
        [("Bloom", even), ("Bloom", stragglers), ("Bamba", stragglers), ("Qwen2.5-VL", even)]
        + [("Qwen2.5-VL", stragglers), ("Whisper", even)]
    )
    for row in rows:
        assert row["size"] == "tiny" and row["generate"]["road"].startswith("engine")
        assert row["generate"]["equal"] and row["engine"]["equal"]
    assert "| Bloom | tiny |" in capsys.readouterr().out


def test_rows_take_the_place_of_older_ones() -> None:
    def row(model: str, ratio: float) -> dict[str, Any]:
        return {"model": model, "size": "tiny", "workload": "16 new", "ratio": ratio}

    runs = side_by_side.added([], {"machine": 1, "rows": [row("a", 1.0), row("b", 1.0)]})
    runs = side_by_side.added(runs, {"machine": 2, "rows": [row("b", 2.0)]})
    assert runs == [
        {"machine": 1, "rows": [row("a", 1.0)]},
        {"machine": 2, "rows": [row("b", 2.0)]},
    ]
    assert side_by_side.added(runs, {"machine": 3, "rows": [row("a", 3.0)]})[0]["machine"] == 2


def test_every_shape_of_100m_is_about_that_large() -> None:
    for name in side_by_side.SHAPES:
        with torch.device("meta"):
            model = side_by_side.build(name, is_tiny=False)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert 60e6 < count < 160e6, f"{name}: {count:,} parameters"
