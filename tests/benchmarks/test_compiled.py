"""`benchmarks.compiled` compiles without a GPU and prints its findings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiled
from tests.support.tools import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="no Triton to compile with",
)


@pytest.mark.slow
@pytest.mark.full
def test_quick(tmp_path: Path) -> None:
    path = tmp_path / "compiled.json"
    command = f"{sys.executable} -m benchmarks.compiled --quick --jobs 1 --json {path}".split()
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    (data,) = json.loads(path.read_text())["runs"]
    assert data["facts"]["revision"]
    rows = {row["system"]: row for row in data["rows"]}
    assert rows.keys() == {"attention_kernel", "merge_kernel", "_store_kernel"}
    decode = rows["attention_kernel"]
    assert decode["case"].startswith("decode-d128-bf16, sm_90, Triton ")
    figures, loop = decode["figures"], decode["figures"]["loop, instructions"]
    assert figures["tile, tokens"] == 64 and figures["spills, bytes"] == 0
    assert 100 < loop < 2000 and figures["a token"] == round(loop * 4 / 64, 1)
    assert decode["limits"] == {"loop, instructions": compiled.TARGET}
    assert figures["blocks a multiprocessor"] >= 1
    assert figures["limited by"] in ("registers", "shared memory", "warps", "blocks")
    assert "| sm_90 |" in done.stdout
    assert "Targets: 1 of 1 are met." in done.stdout
