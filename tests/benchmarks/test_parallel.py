"""`benchmarks.parallel`: the computed table."""

from __future__ import annotations

import pytest

from benchmarks import parallel


def test_a_gpu_holds_its_part_of_the_weights_and_of_the_keys_and_values() -> None:
    rows = {(row["model"], row["gpus"]): row for row in parallel.scaling()}
    # its published size
    assert rows["LLaMA-7B", 1]["weights_gib"] == pytest.approx(6.74e9 * 2 / 2**30, rel=0.01)
    assert rows["LLaMA-65B", 1]["rows"] == 0  # it is larger than one GPU
    one, two = rows["LLaMA-13B", 1], rows["LLaMA-13B", 2]
    assert two["weights_gib"] == pytest.approx(one["weights_gib"] / 2, abs=0.1)
    assert two["kv_tokens"] > 2 * one["kv_tokens"]  # a larger share of the memory is left
    assert two["ratio"] > 2
    assert ("LLaMA-33B", 8) not in rows  # its 52 heads cannot be split by 8
