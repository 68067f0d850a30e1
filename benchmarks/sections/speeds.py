"""What `tests.support.speeds` measured of each class of transformers, tiny, beside plain
`generate`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks import report
from benchmarks.paired import NOT_SLOWER
from benchmarks.report import Row


def is_slower(row: Row) -> bool:
    """Whether the interval of the ratio lies wholly above `NOT_SLOWER`."""
    low: float = row["interval"][0]
    return low > NOT_SLOWER


def kind(row: Row) -> str:
    """How the decode steps of a call ran."""
    if row["road"] != "engine":
        return "paged cache in the model's own loop" if row["road"] == "hf_loop" else "plain"
    return "engine, steps recorded" if row["replayed"] else "engine, steps not recorded"


def counts(rows: list[Row]) -> str:
    """Classes by the kind of their steps, with the medians of their ratios."""
    lines = []
    for title in dict.fromkeys(sorted(map(kind, rows))):
        members = [row for row in rows if kind(row) == title]
        line: Row = {"decode steps": title, "classes": len({row["name"] for row in members})}
        for num_rows in sorted({row["rows"] for row in rows}):
            ratios = [row["ratio"] for row in members if row["rows"] == num_rows]
            slower = sum(is_slower(row) for row in members if row["rows"] == num_rows)
            name = f"{num_rows} row" + "s" * (num_rows > 1)
            line[f"{name}: paged / plain"] = f"{statistics.median(ratios):.2f}" if ratios else ""
            line[f"{name}: slower"] = slower
        lines.append(line)
    return report.markdown(lines)


def slower(rows: Iterable[Row]) -> str:
    """The classes that are slower, the slowest first, with their ratios by number of rows."""
    ratios: dict[str, dict[int, float]] = {}
    for row in rows:
        if is_slower(row):
            ratios.setdefault(row["name"], {})[row["rows"]] = row["ratio"]
    ordered = sorted(ratios.items(), key=lambda item: -max(item[1].values()))
    return ", ".join(
        f"{name} ({', '.join(f'{ratio:.2f} with {count}' for count, ratio in by_rows.items())})"
        for name, by_rows in ordered
    )


def speeds(data: Row) -> str:
    """The section of docs/guide/compatibility.md."""
    measured = [row for row in data["results"] if row["ratio"] is not None]
    num_slower = len({row["name"] for row in measured if is_slower(row)})
    head = f"""Each class tiny (2 layers or so), float32, one thread, 48 new tokens, with 1 and 8
        prompts, in turns with plain `generate`. Such models compute next to nothing, so the
        ratios compare the Python of a call; the larger a model, the nearer they are to 1, or to
        what its products and attention gain. {num_slower} classes are slower: the 95% interval of
        the ratio of times lies wholly above {NOT_SLOWER}."""
    parts = [
        f"{report.flow(head)}\n\n`{data['command']}`, {report.machine_of(data['facts'])}:",
        counts(measured),
        f"<details><summary>The slower ones</summary>\n\n{slower(measured)}.\n\n</details>",
    ]
    return "\n\n".join(parts)
