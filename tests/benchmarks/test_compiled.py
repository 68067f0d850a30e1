"""`benchmarks.compiled` compiles without a GPU and prints its findings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tools import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="no Triton to compile with",
)


@pytest.mark.slow
@pytest.mark.full
def test_quick(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.compiled",
        "--quick",
        "--jobs",
        "1",
        "--results",
        str(tmp_path),
    ]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    data = json.loads((tmp_path / "compiled.json").read_text())
    assert data["facts"]["triton"] and data["facts"]["revision"]
    rows = {row["kernel"]: row for row in data["rows"]}
    assert rows.keys() == {"attention_kernel", "merge_kernel", "_store_kernel"}
    decode = rows["attention_kernel"]
    assert decode["chip"] == "sm_90" and decode["tile"] == 64 and decode["spills"] == 0
    assert 100 < decode["loop"] < 2000 and decode["per_token"] == round(decode["loop"] * 4 / 64, 1)
    assert decode["blocks"] >= 1 and decode["limit"] in (
        "registers",
        "shared memory",
        "warps",
        "blocks",
    )
    assert "none of 3 kernels spills registers" in done.stdout
    assert done.stdout.splitlines()[0] in (tmp_path / "compiled.md").read_text()
