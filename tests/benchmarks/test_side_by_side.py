"""Models beyond plain decoders: their sizes, and cases that are run again."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import runner, side_by_side


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
