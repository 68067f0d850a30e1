"""`benchmarks.scheduler` and `benchmarks.decode_step` with `--quick` print their tables."""

from __future__ import annotations

import json

import pytest

from benchmarks import decode_step, scheduler


@pytest.mark.slow
def test_scheduler(tmp_path, capsys):
    scheduler.main(["--quick", "--json", str(tmp_path / "found.json")])
    assert "| CPU time | 1000 waiting |" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    waiting = ["1000 waiting", "10000 waiting", "1000 waiting, 2000 blocks"]
    assert [row["system"] for row in found["rows"]] == waiting and found["facts"]["torch"]


@pytest.mark.slow
def test_decode_step(tmp_path, capsys):
    decode_step.main(["--quick", "--json", str(tmp_path / "found.json")])
    assert "| plain / it |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    paged = [row for row in rows if row["system"] == "paged"]
    assert len(rows) == 4 and all(row["figures"]["in place"] == "yes" for row in paged)
    assert all(row["equal"] and row["figures"]["peak K/V, MiB"] > 0 for row in paged)


def test_decode_step_of_a_case_of_ones_own(capsys):
    decode_step.main(["--quick", "--case", "3x40", "--only", "40"])
    assert "| llama-tiny, 3x40 | paged |" in capsys.readouterr().out


def test_decode_step_names_the_devices(capsys):
    with pytest.raises(SystemExit):
        decode_step.main(["--device", "abacus"])
    assert "choose from" in capsys.readouterr().err
