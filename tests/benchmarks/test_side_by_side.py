"""The benchmark of models that cannot be packed runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import runner, side_by_side


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    side_by_side.main(
        [
            "--quick",
            "--only",
            "Bloom|NemotronH tiny 8|Qwen2.5|Whisper tiny 1|(T5|BART).*beams",
            "--json",
            str(path),
        ]
    )
    rows = json.loads(path.read_text())["rows"]
    even, stragglers, beams = side_by_side.WORKLOADS
    expected = [("Bloom", even), ("Bloom", stragglers), ("NemotronH", stragglers)]
    expected += [("Qwen2.5-VL", even), ("Qwen2.5-VL", stragglers), ("Whisper", even)]
    expected += [(name, beams) for name in ("Whisper", "T5-small", "BART-base")]
    names = {f"{model}, tiny, {workload}" for model, workload in expected}
    assert {row["case"] for row in rows} == names and len(rows) == 3 * len(names)
    for row in rows:
        assert row["equal"] == 1 and (
            row["system"] == "plain" or row["figures"]["route"] == "engine"
        )
    assert "| Bloom, tiny, 16 new | engine |" in capsys.readouterr().out


def test_cases_take_the_place_of_older_ones() -> None:
    def row(case: str, seconds: float) -> dict[str, Any]:
        return {"case": case, "seconds": [seconds]}

    runs = runner.added([], {"facts": 1, "rows": [row("a", 1.0), row("b", 1.0)]})
    runs = runner.added(runs, {"facts": 2, "rows": [row("b", 2.0)]})
    assert runs == [{"facts": 1, "rows": [row("a", 1.0)]}, {"facts": 2, "rows": [row("b", 2.0)]}]
    assert runner.added(runs, {"facts": 3, "rows": [row("a", 3.0)]})[0]["facts"] == 2


def test_every_shape_of_100m_is_about_that_large() -> None:
    for name in side_by_side.SHAPES.keys() - side_by_side.FULL:
        with torch.device("meta"):
            model = side_by_side.build(name, is_tiny=False)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert 60e6 < count < 160e6, f"{name}: {count:,} parameters"
