"""The benchmark of a process's first call runs and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import first_call
from benchmarks.machine import facts


def test_the_section_has_the_parts_and_the_target() -> None:
    plain = {"system": "plain", "turns": 3, "first": 2.0, "later": 1.5, "range": [1.9, 2.2]}
    rows = [
        plain | dict.fromkeys(first_call.PARTS, 0.0),
        plain
        | {"system": "paged", "first": 2.75, "self_check": 0.5, "build": 0.125, "record": 0.25},
        plain
        | {
            "system": "compiling",
            "first": 20.5,
            "turns": 1,
            "self_check": 0.5,
            "build": 18,
            "record": 0.25,
        },
    ]
    data = {
        "machine": facts(),
        "model": "llama-100m",
        "dtype": "bfloat16",
        "new_tokens": 64,
        "rows": rows,
    }
    said = "\n\n".join(first_call.show([data]))
    assert "here 4.00 s" in said and "64 new, `llama-100m` in bfloat16" in said
    assert said.splitlines()[-3:] == [
        "| plain `generate` | 2.00 (1.90 to 2.20) |  |  |  | 1.50 |",
        "| paged, kernels compiled before | 2.75 (1.90 to 2.20) | 0.50 | 0.12 | 0.25 | 1.50 |",
        "| paged, compiling | 20.50 | 0.50 | 18.00 | 0.25 | 1.50 |",
    ]
    assert len({line.count("|") for line in said.splitlines() if line.startswith("|")}) == 1


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    first_call.main(["--quick", "--dtype", "float32", "--json", str(path)])
    plain, compiling = json.loads(path.read_text())["rows"]
    assert plain["self_check"] == plain["build"] == plain["record"] == 0
    assert all(0 < compiling[part] < compiling["first"] for part in ("self_check", "build"))
    assert "paged, compiling" in capsys.readouterr().out
