"""`benchmarks.tune --block-sizes` writes the table that `block_size="auto"` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import block_costs
from hf_paged.attention import backends
from hf_paged.config import KV_DTYPES
from hf_paged.kernels import costs


def test_a_run_writes_a_table_that_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(block_costs, "SIZES", [4, 16])
    rows = block_costs.write("cpu", 1, True, tmp_path)
    assert rows and all(row["figures"]["16"] == 1.0 and row["figures"]["4"] > 0 for row in rows)
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    times, source = costs.find_costs(torch.device("cpu"), torch.float32)
    assert list(times) == [4, 16] and all(time > 0 for time in times.values())
    assert source.endswith(f"/float32 on {costs.machine_name(torch.device('cpu'))}")
    (path,) = tmp_path.iterdir()
    assert {"cpu", "revision", "command", "seconds"} <= json.loads(path.read_text())[
        "measured"
    ].keys()


@pytest.mark.parametrize("stored", ["float32", *KV_DTYPES])
def test_what_is_timed_is_right(stored: str) -> None:
    calls = block_costs.calls_of(stored, 64, 4, (2, 3, 21, 2), "cpu")
    block_costs.check(calls, backends.gather, stored)
    with pytest.raises(RuntimeError, match="other numbers than the reference"):
        block_costs.check(calls, _Other(calls[1]), stored)


class _Other:
    """A backend that attends to the K/V of another call."""

    def __init__(self, other: backends.AttentionCall) -> None:
        self.blocks = other.blocks

    def attend(self, call: backends.AttentionCall) -> torch.Tensor:
        return backends.reference.attend(call._replace(blocks=self.blocks))
