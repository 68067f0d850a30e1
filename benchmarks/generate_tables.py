"""Results of `benchmarks.generate`, with their tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import arrivals, paired, report
from benchmarks.workloads import WORKLOADS

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
}


@dataclass
class Result:
    """
    Seconds of each repeat, and how its tokens compare with plain's.

    Args:
        problem (`str`): Why there are no figures, such as "not installed" or "failed: ..."; empty
            if there are.
        tokens (`int`): New tokens per repeat, checked against the number asked for.
        floor (`float`): Seconds per repeat by the roofline.
        seconds, cpu_seconds (`list[float]`): Wall time and CPU time of all threads per repeat; CPU
            time well below `seconds` times threads means that the cores were shared.
        equal (`list[float]`): Share of tokens equal to plain's, per repeat.
        latencies (`list[dict[str, float]]`): `latency.summary` of each repeat.
        kv_bytes, device_bytes (`int`, *optional*): Peak bytes of K/V, and of PyTorch's memory on
            the device.
        processes (`int`): Number of processes, one after the other, that ran the turns.
        settings (`str`): What another engine ran with.
    """

    workload: str
    system: str
    target: float | None = None
    problem: str = ""
    tokens: int = 0
    floor: float = 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)
    latencies: list[dict[str, float]] = field(default_factory=list)
    kv_bytes: int | None = None
    device_bytes: int | None = None
    processes: int = 1
    settings: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def add(self, other: Result) -> None:
        """Adds the turns of another process."""
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.equal += other.equal
        self.latencies += other.latencies
        self.processes += other.processes
        self.problem = self.problem or other.problem


def best_plain(results: Sequence[Result]) -> Result | None:
    """The fastest batch size of plain `generate`."""
    plain = [result for result in results if result.system.startswith("plain") and result.seconds]
    return min(plain, key=lambda result: result.median, default=None)


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each system of one workload."""
    rows = []
    plain = best_plain(results)
    for result in results:
        row: dict[str, Any] = {"workload": result.workload, "system": result.system}
        rows.append(row)
        if result.problem or not result.seconds:
            row["time"] = result.problem
            continue
        speeds = paired.ratios(plain.seconds, result.seconds) if plain else []
        interval = paired.interval(speeds) if result is not plain else None
        row |= {
            "time": f"{result.median:.2f} ({min(result.seconds):.2f}..{max(result.seconds):.2f})",
            "seconds": result.seconds,
            "cpu_s": statistics.median(result.cpu_seconds),
            "turns": len(result.seconds),
            "tokens_per_s": result.tokens / result.median,
            "processes": result.processes,
            "plain_over": statistics.median(speeds) if speeds else None,
            "interval": paired.span(interval),
            "target": paired.verdict(speeds, result.target)
            if speeds and result.system in OURS
            else "",
            "equal": f"{statistics.mean(result.equal):.0%}" if result.equal else "",
            "kv_mib": None if result.kv_bytes is None else result.kv_bytes / 2**20,
            "device_mib": None if result.device_bytes is None else result.device_bytes / 2**20,
            "roofline_share": f"{result.floor / result.median:.0%}" if result.floor else "",
        }
        row |= {"settings": result.settings} if result.settings else {}
        for key in result.latencies[0] if result.latencies else ():
            row[key] = statistics.median(found[key] for found in result.latencies)
    return rows


def peer_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Time of transformers' continuous batching over that of each of ours."""
    found = {(result.workload, result.system): result for result in results if result.seconds}
    rows = []
    for (workload, system), peer in found.items():
        for ours in OURS:
            if system in PEER_TARGETS and (workload, ours) in found:
                values = paired.ratios(peer.seconds, found[workload, ours].seconds)
                row = {"workload": workload, "peer": system, "time over": ours}
                row |= {"ratio": statistics.median(values), "turns": len(values)}
                rows.append({**row, "target": paired.verdict(values, PEER_TARGETS[system])})
    return rows


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
