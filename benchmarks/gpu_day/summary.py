"""The summary of a run: all that matters, in a length that a console keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report import text

LIMIT = 9_900
"""Characters of a summary."""
LINE = 420
"""Characters of a row."""
HIDDEN = (
    *("took", "problem", "phase", "timed as", "of matmul, %", "over_ours", "reason", "ms_min"),
    *("device, MiB", "of the roofline, %", "TTFT p99, ms", "TPOT p99, ms", "K/V of plain's, %"),
)
"""Keys that only the files have."""


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """
    A head with the status of each stage, then the rows, those with a problem first.

    Args:
        results (`Mapping`): By the stage's name: `status`, `title`, `rows`, and, where it ran,
            `facts` and `seconds`.
    """
    facts = {
        name: fact for result in results.values() for name, fact in result.get("facts", {}).items()
    }
    head = [printable("; ".join(f"{name} {value}" for name, value in facts.items()), 700)]
    for name, result in results.items():
        taken = f", {result['seconds']:.0f} s" if "seconds" in result else ""
        head.append(printable(f"({name}) {result['title']}: {result['status']}{taken}", 300))
    parts = ["\n".join(head)]
    left = LIMIT - len(parts[0])
    for index, (name, result) in enumerate(results.items()):
        part = rows_of(name, result, left // (len(results) - index))
        left -= len(part)
        parts.append(part)
    return "".join(parts) + "\n"


def rows_of(name: str, result: Mapping[str, Any], most: int) -> str:
    """The rows of a stage in at most this number of characters."""
    rows = sorted(result["rows"], key=lambda row: not row.get("problem"))
    lines = [line(row) for row in rows]
    if not str(result["status"]).startswith(("ok", "skipped")) and not any(
        row.get("problem") for row in rows
    ):
        lines += [
            printable("    " + end, LINE) for end in str(result.get("log", "")).splitlines()[-6:]
        ]
    chosen = f"\n\n({name})" if lines else ""
    for count, one in enumerate(lines):
        more = f"\n  and {len(lines) - count} more"
        if len(chosen) + len(one) + 1 + len(more) > most:
            return (chosen + more)[: max(0, most)]
        chosen += "\n" + one
    return chosen


def line(row: Mapping[str, Any]) -> str:
    """A row in one line: the values of its first keys, then `key=value`; what failed comes with its
    first lines."""
    named = [
        f"{key}={text(value)}"
        for key, value in row.items()
        if key not in HIDDEN and value not in (None, "", [])
    ]
    problem = f" FAILED {row['problem']}" if row.get("problem") else ""
    return printable(f"  {' '.join(named)}{problem}", LINE)


def printable(content: str, most: int) -> str:
    """At most this number of ASCII characters, which every console shows."""
    return content.encode("ascii", "backslashreplace").decode()[:most]
