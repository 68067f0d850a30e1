"""`benchmarks.parallel`: the table that is computed, and a run of the one that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import parallel


def test_a_gpu_holds_its_part_of_the_weights_and_of_the_keys_and_values() -> None:
    rows = {(row["model"], row["gpus"]): row for row in parallel.scaling()}
    assert rows["LLaMA-7B", 1]["weights_gib"] == pytest.approx(6.74e9 * 2 / 2**30, rel=0.01)  # its published size
    assert rows["LLaMA-65B", 1]["rows"] == 0  # it is larger than one
    one, two = rows["LLaMA-13B", 1], rows["LLaMA-13B", 2]
    assert two["weights_gib"] == pytest.approx(one["weights_gib"] / 2, abs=0.1)
    assert two["kv_tokens"] > 2 * one["kv_tokens"]  # and more of the memory is left
    assert two["ratio"] > 2
    assert ("LLaMA-33B", 8) not in rows  # whose 52 heads are not split by 8


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "table.json", tmp_path / "picture.png"
    assert parallel.main(["--quick", "--json", str(table), "--plot", str(picture)]) == 0
    one, two = json.loads(table.read_text())["rows"]
    assert two["kv_bytes"] * 2 == one["kv_bytes"] and picture.stat().st_size > 5000
