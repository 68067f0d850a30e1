"""`benchmarks.scheduler` and `benchmarks.decode_step` with `--quick` print their tables."""

from __future__ import annotations

import json

import pytest

from benchmarks import decode_step, scheduler


@pytest.mark.slow
def test_scheduler(tmp_path, capsys):
    scheduler.main(["--quick", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert (
        printed.startswith("| waiting | tokens scheduled |") and "waste at block size 16" in printed
    )
    found = json.loads((tmp_path / "found.json").read_text())
    waiting = [row["waiting"] for row in found["rows"]]
    assert waiting == ["1000", "10000", "1000, 2000 blocks"] and found["facts"]["torch"]


@pytest.mark.slow
def test_decode_step(tmp_path, capsys):
    decode_step.main(["--quick", "--json", str(tmp_path / "found.json")])
    assert capsys.readouterr().out.startswith("| case | plain ms | paged ms |")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["route"]["in_place"] for row in rows)
    assert all(row["equal"].endswith("%") and row["kv_mib"] > 0 for row in rows)


def test_decode_step_of_a_case_of_ones_own(capsys):
    decode_step.main(["--quick", "--case", "3x40", "--only", "40"])
    assert "| 3x40 |" in capsys.readouterr().out


def test_decode_step_names_the_devices(capsys):
    with pytest.raises(SystemExit):
        decode_step.main(["--device", "abacus"])
    assert "choose from" in capsys.readouterr().err
