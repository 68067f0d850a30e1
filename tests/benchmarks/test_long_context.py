"""One long prompt: equal tokens, and no more K/V memory than its blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_context


def check(
    rows: list[dict[str, Any]], num_tokens: int, new_tokens: int = long_context.NEW_TOKENS
) -> None:
    assert [row["system"] for row in rows] == ["plain", "generate", "engine"]
    assert all(row["equal"] == "yes" for row in rows)
    plain, *ours = (row["kv_mib"] for row in rows)
    block_mib = plain / (num_tokens + new_tokens - 1) * 16
    assert all(plain - block_mib < mib <= plain + block_mib for mib in ours)


@pytest.mark.slow
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert long_context.main(["--quick", "--json", str(path)]) == 0
    check(json.loads(path.read_text())["rows"], 512)
    assert "| engine | yes |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.full
def test_32k_tokens() -> None:
    check(long_context.run(32768, turns=0, new_tokens=4), 32768, new_tokens=4)
