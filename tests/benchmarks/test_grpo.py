"""The benchmark of TRL's rollouts runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_paged
from benchmarks import grpo
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    try:
        grpo.main(["--quick", "--json", str(path)])
    finally:
        hf_paged.uninstall()
        hf_paged.install()
    rows = json.loads(path.read_text())["rows"]
    assert [row["system"] for row in rows] == ["plain", "paged", "generate_batch"] * 2
    for row in rows:
        assert row["equal"] == 1 and row["figures"]["training, s"] > row["seconds"][0] > 0
        assert row["figures"]["route"] == ("plain" if row["system"] == "plain" else "engine")
    assert "rollouts: 4 steps of 4 x 8 x 6 tokens |" in capsys.readouterr().out
