"""Each benchmark runs with `--quick`, prints its table and writes its rows."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

import hf_paged
from benchmarks import first_call, lora, report, side_by_side, tiers, virtual
from hf_paged.kernels import cpp
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401

Rows = list[dict[str, Any]]
ONLY = "Bloom|NemotronH tiny|Qwen2.5|Whisper tiny 1|(T5|BART).*beams"
NEEDS_MEMORY_FILES = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")
NEEDS_COMPILER = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
FULL = [pytest.mark.slow, pytest.mark.full]
RUNS = {
    "linears": ("| llama-tiny, 5 rows | ours | 1, 1 |", [NEEDS_COMPILER]),
    "virtual": ("| decode step of bloom, 2x64 | virtual |", [pytest.mark.slow, NEEDS_MEMORY_FILES]),
    "first_call": ("1.5 times plain's time and 1 s more are ", FULL),
    "grpo": ("rollouts: 4 steps of 4 x 8 x 6 tokens |", FULL),
    "lora": ("| one adapter a forward / it |", FULL),
    "parallel": ("| 2 processes |", FULL),
    "side_by_side": ("| Bloom, tiny, 16 new | engine |", FULL),
    "speculation": ("| W7: 32 rows, edit a text of 96 words | n-grams | 1, 1 |", FULL),
    "tiers": ("first token, new process", FULL),
}
"""By benchmark: what is printed, and the marks of its test."""
ARGUMENTS = {"first_call": ["--dtype", "float32"], "side_by_side": ["--only", ONLY]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (_, marks) in RUNS.items()]
)
def test_quick(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("grpo", "lora"):
        pytest.importorskip({"grpo": "trl", "lora": "peft"}[name])
    module, path = importlib.import_module(f"benchmarks.{name}"), tmp_path / "found.json"
    try:
        status = module.main(["--quick", *ARGUMENTS.get(name, ()), "--json", str(path)])
    finally:
        if name == "grpo":  # it installs more
            hf_paged.uninstall()
            hf_paged.install()
    assert status == 0 and RUNS[name][0] in capsys.readouterr().out
    data = report.read(path)
    assert data["facts"]["torch"] and data["rows"]
    assert all(sum(row["seconds"]) > 0 and row.get("equal", 1) == 1 for row in data["rows"])
    if name in CHECKS:
        CHECKS[name](data["rows"])


def by_system(rows: Rows, key: str) -> dict[str, Any]:
    """A figure of each system."""
    return {row["system"]: row["figures"].get(key) for row in rows}


def check_first_call(rows: Rows) -> None:
    plain, paged, compiling = (row["figures"] for row in rows)
    assert not any(plain[part] for part in first_call.PARTS.values())
    for part in ("self-check, s", "kernels, s"):
        assert 0 < compiling[part] < rows[2]["seconds"][0]
    assert paged["kernels, s"] < compiling["kernels, s"]


def check_grpo(rows: Rows) -> None:
    routes = {"plain": "plain", "paged": "engine", "generate_batch": "engine"}
    assert len(rows) == 6 and by_system(rows, "route") == routes
    assert all(row["figures"]["training, s"] > row["seconds"][0] for row in rows)


def check_lora(rows: Rows) -> None:
    forwards = by_system(rows, "forwards")
    assert forwards[lora.MIXED] == forwards[lora.ONE] == forwards[lora.BASE]
    assert forwards[lora.APART] == 8 * forwards[lora.MIXED]
    assert by_system(rows, "adapters loaded")[lora.FOLDERS] > 0


def check_parallel(rows: Rows) -> None:
    held = by_system(rows, "K/V of each process, MiB")
    assert held["2 processes"] * 2 == held["1 process"]


def check_side_by_side(rows: Rows) -> None:
    even, beams = side_by_side.WORKLOADS
    expected = [("Bloom", even), ("NemotronH", even), ("Qwen2.5-VL", even), ("Whisper", even)]
    expected += [(name, beams) for name in ("Whisper", "T5-small", "BART-base")]
    names = {f"{model}, tiny, {workload}" for model, workload in expected}
    assert {row["case"] for row in rows} == names and len(rows) == 3 * len(names)
    routes = {row["figures"]["route"] for row in rows if row["system"] != "plain"}
    assert routes == {"engine"}


def check_speculation(rows: Rows) -> None:
    assert [row["case"][:2] for row in rows[::2]] == ["W7", "W8"]
    for row in rows[1::2]:
        assert 0 <= row["figures"]["acceptance, %"] <= 100
        stages = {name: s for name, s in row["figures"].items() if name.endswith(", s")}
        assert sum(stages.values()) == pytest.approx(row["seconds"][0])
        assert "target, steps, s" in stages


def check_tiers(rows: Rows) -> None:
    assert by_system(rows[:2], tiers.FOUND) == {"computed": 0, "disk": 192}
    assert by_system(rows[2:], tiers.FOUND)["disk"] > 0


def check_virtual(rows: Rows) -> None:
    assert {row["case"] for row in rows} == {
        f"decode step of {name}, 2x64" for name in virtual.TARGETS
    }


CHECKS = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}
