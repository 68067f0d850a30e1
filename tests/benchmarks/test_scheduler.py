"""`benchmarks.scheduler --quick` prints its table."""

from __future__ import annotations

import json

import pytest

from benchmarks import scheduler


@pytest.mark.slow
def test_scheduler(tmp_path, capsys):
    scheduler.main(["--quick", "--json", str(tmp_path / "found.json")])
    assert "| CPU time | 1000 waiting |" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    waiting = ["1000 waiting", "10000 waiting", "1000 waiting, 2000 blocks"]
    assert [row["system"] for row in found["rows"]] == waiting and found["facts"]["torch"]
