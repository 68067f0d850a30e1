"""Results of `benchmarks.generate`, with their tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arrivals, paired, report, runner
from benchmarks.runner import Turn
from benchmarks.workloads import WORKLOADS, Workload, equal_share

OURS = ("ours", "engine")
# its time over ours, on W1 to W3
PEER_TARGETS = {"generate_batch": 6.0, "generate_batch, tuned": 2.5}
NAMES = {  # of systems, in pictures
    "ours": 'generate, cache_implementation="paged"',
    "engine": "PagedEngine",
    "engine, a third of its peak": "PagedEngine in a third of its memory",
    "generate_batch": "transformers' generate_batch",
    "generate_batch, tuned": "transformers' generate_batch, tuned",
}
COLUMNS = {
    "workload": "workload",
    "system": "system",
    "time": "seconds, median (min..max)",
    "cpu_s": "CPU s",
    "turns": "turns",
    "tokens_per_s": "tokens/s",
    "plain_over": "plain / it",
    "interval": "95% interval",
    "target": "target",
    "equal": "equal tokens",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "kv_mib": "peak KV, MiB",
    "device_mib": "peak device, MiB",
    "roofline_share": "of the roofline",
    "settings": "settings",
}


Turns = Mapping[str, Sequence[Turn | str]]
"""Of each system the turns, or why it has none, such as "not installed" or "failed: ..."."""


def seconds_of(turns: Sequence[Turn | str]) -> list[float]:
    return [turn.seconds for turn in turns if isinstance(turn, Turn)]


def best_plain(turns: Turns) -> str | None:
    """The fastest batch size of plain `generate`."""
    plain = {name: seconds_of(mine) for name, mine in turns.items() if name.startswith("plain")}
    ran = {name: statistics.median(seconds) for name, seconds in plain.items() if seconds}
    return min(ran, key=ran.__getitem__, default=None)


def rows_of(
    workload: Workload, turns: Turns, floor: float = 0.0, processes: int = 1
) -> list[dict[str, Any]]:
    """
    One row for each system of one workload.

    Args:
        floor (`float`): Seconds of a turn by the roofline; 0: unknown.
        processes (`int`): Number of processes, one after the other, that ran the turns.
    """
    rows = []
    best = best_plain(turns)
    for name, all_turns in turns.items():
        row: dict[str, Any] = {"workload": workload.name, "system": name}
        rows.append(row)
        mine = [turn for turn in all_turns if isinstance(turn, Turn)]
        problems = [turn for turn in all_turns if isinstance(turn, str)]
        if problems or not mine:
            row["time"] = next(iter(problems), "")
            continue
        seconds, plain = seconds_of(mine), turns[best] if best else []
        median = statistics.median(seconds)
        speeds = paired.ratios(seconds_of(plain), seconds)
        figures = runner.joined({key: [one] for key, one in turn.figures.items()} for turn in mine)
        row |= {
            "time": f"{median:.2f} ({min(seconds):.2f}..{max(seconds):.2f})",
            "seconds": seconds,
            "cpu_s": statistics.median(figures.pop("cpu_s", [0.0])),
            "turns": len(seconds),
            "tokens_per_s": max(figures.pop("tokens", [0])) / median,
            "processes": processes,
            "plain_over": statistics.median(speeds) if speeds else None,
            "interval": paired.span(paired.interval(speeds)) if name != best else "",
            "target": paired.verdict(speeds, workload.target) if speeds and name in OURS else "",
            "equal": "",
            "roofline_share": f"{floor / median:.0%}" if floor else "",
        }
        if plain and (not workload.sampled or name == "ours"):  # other draws, other samples
            pairs = zip(plain, mine)
            shares = [equal_share(one.tokens, other.tokens) for one, other in pairs]  # type: ignore[union-attr]
            row["equal"] = f"{statistics.mean(shares):.0%}"
        for key in ("kv_mib", "device_mib"):
            row[key] = max(figures.pop(key, [None]))
        row |= {
            key: values[-1] if isinstance(values[-1], str) else statistics.median(values)
            for key, values in figures.items()
        }
    return rows


def peer_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Time of transformers' continuous batching over that of each of ours."""
    found = {(row["workload"], row["system"]): row["seconds"] for row in rows if "seconds" in row}
    peers = []
    for (workload, system), seconds in found.items():
        for ours in OURS:
            if system in PEER_TARGETS and (workload, ours) in found:
                values = paired.ratios(seconds, found[workload, ours])
                row = {"workload": workload, "peer": system, "time over": ours}
                row |= {"ratio": statistics.median(values), "turns": len(values)}
                peers.append({**row, "target": paired.verdict(values, PEER_TARGETS[system])})
    return peers


def draw_all(data: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws what a result of `benchmarks.generate` holds to `<stem>.png`, `<stem>-memory.png`,
    `<stem>-latency.png`."""
    foot = report.caption(data["facts"], f"{data['model']['name']} with random weights, bfloat16")
    pictures = {
        "": (draw_speed, data["rows"]),
        "-memory": (draw_memory, data["rows"]),
        "-latency": (arrivals.draw, data.get("arrivals", [])),
    }
    drawn = []
    for name, (draw, rows) in pictures.items():
        path = stem.with_name(f"{stem.name}{name}.png")
        drawn.append(report.plot(lambda draw=draw, rows=rows, path=path: draw(rows, foot, path)))
    return [path for path in drawn if path is not None]


def by_system(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """A column of the rows that have it, by system and by workload, in words."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get(key):
            mine = values.setdefault(NAMES.get(row["system"], row["system"]), {})
            mine[WORKLOADS[row["workload"]].title] = row[key]
    return values


def draw_speed(rows: Sequence[Mapping[str, Any]], foot: str, path: Path) -> Path | None:
    """Speedup of each system over the best plain `generate`, by workload."""
    values = by_system((row for row in rows if not row["system"].startswith("plain")), "plain_over")
    if not values:
        return None
    figure, axis = report.figure(560, foot)
    report.grouped_bars(axis, values, label=lambda value: f"{value:.2f}")
    axis.axvline(1.0, color="black", linewidth=0.8)
    report.title(axis, "Plain generate's time over each system's: above 1 is faster")
    report.legend_below(figure, axis, 2)
    return report.save(figure, path)


def memory_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the best plain `generate` and of ours, whose peaks of K/V are compared."""
    held = [row for row in rows if row.get("kv_mib")]
    return [row for row in held if row["plain_over"] == 1 or row["system"] == "ours"]


def draw_memory(rows: Sequence[Mapping[str, Any]], foot: str, path: Path) -> Path | None:
    """Most MiB of K/V that plain `generate` and ours hold, by workload."""
    best = [
        {**row, "system": "plain generate" if row["system"] != "ours" else "ours"}
        for row in memory_rows(rows)
    ]
    values = by_system(best, "kv_mib")
    if not values:
        return None
    figure, axis = report.figure(430, foot)
    report.grouped_bars(axis, values, label=lambda value: f"{value:.3g}")
    report.title(axis, "Most memory that keys and values take in a call, MiB: less is better")
    report.legend_below(figure, axis, 2)
    return report.save(figure, path)
