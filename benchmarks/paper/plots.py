"""Plots of the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report

PARTS = {
    "used": "holds a token",
    "reserved": "reserved, filled later",
    "internal": "reserved, never filled",
    "external": "free, but unusable",
}


def draw_all(data: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws each table of a result that has a plot, to `<stem>-<name>.png`."""
    simulated = "simulated with the engine's scheduler and block manager"
    pictures = {
        "waste": (waste, "waste", simulated),
        "vattention": (vattention, "decode", ""),
        "s4": (article, "sweep", "models over GPUs: computed"),
    }
    paths = []
    for name, (draw, table, subject) in pictures.items():
        path = stem.with_name(f"{stem.name}-{name}.png")
        foot = report.caption(data["runs"].get(table, {}).get("facts", {}), subject)

        def make(draw: Any = draw, foot: str = foot, path: Path = path) -> Path | None:
            return draw(data["rows"], foot, path)

        drawn = report.plot(make)
        paths += [drawn] if drawn is not None else []
    return paths


def waste(rows: list[dict[str, Any]], foot: str, path: Path) -> Path | None:
    """Stacked bars: published and ours for every system."""
    found = {
        row["name"].split(", ")[1]: row
        for row in rows
        if row["table"] == "waste" and "details" in row
    }
    if not found:
        return None
    drawing, axis = report.figure(440, foot)
    places, labels = [], []
    for place, (system, row) in enumerate(found.items()):
        published = _numbers(row["published"])
        for offset, shares in ((-0.21, published), (0.21, row["details"])):
            _stack(axis, place + offset, shares, is_first=not places)
            places.append(place + offset)
            labels.append("paper" if offset < 0 else "here")
        name = "vLLM, hf_paged" if system == "ours" else system
        axis.text(place, -9, name, ha="center", va="top", fontsize=10)
    axis.set_xticks(places, labels, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("% of the memory for keys and values")
    axis.set_ylim(0, 100)
    said = "What the memory holds while requests wait for room, ShareGPT-like lengths"
    report.title(axis, said)
    drawing.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return report.save(drawing, path)


def _stack(axis: Any, x: float, shares: Mapping[str, float], is_first: bool) -> None:
    """A stacked bar; the first one names its parts."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
    small = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
    bottom = 0.0
    for index, (part, name) in enumerate(PARTS.items()):
        share = shares.get(part, 0.0)
        style = {"color": report.PALETTE[index], "hatch": report.HATCHES[index]}
        style |= {"edgecolor": "white", "linewidth": 0.5, "label": name if is_first else None}
        axis.bar(x, share, 0.38, bottom, **style)
        if share >= 5:
            axis.text(x, bottom + share / 2, f"{share:.0f}", **small)
        bottom += share


def _numbers(published: str) -> dict[str, float]:
    pairs = [part.split() for part in published.split(", ")]
    return {name: float(number) for number, name in pairs}


def vattention(rows: list[dict[str, Any]], foot: str, path: Path) -> Path | None:
    """Prefill over contexts, decode over rows, mapping over page groups, and the steps of one
    turn."""
    by_table = _by_table(rows, ("prefill", "decode", "allocation", "spikes"))
    if by_table is None:
        return None
    drawing, axes = report.figure(860, foot, nrows=2, ncols=2)
    prefill, decode, allocation, spikes = axes.flat
    for axis, table, key, title in (
        (prefill, "prefill", "context", "tokens of a prompt"),
        (decode, "decode", "rows", "rows that decode"),
    ):
        rows_of = [details for details in by_table[table] if key in details]
        speeds = {details[key]: details["tokens_per_second"] for details in rows_of}
        for index, system in enumerate(next(iter(speeds.values()))):
            rates = [one[system] for one in speeds.values()]
            axis.plot(list(speeds), rates, label=system, **report.marked(index))
        report.octaves(axis, list(speeds), title)
        axis.set_ylabel("tokens a second")
        axis.set_ylim(bottom=0)
        report.legend_above(axis)
    found = {details["page_bytes"]: details for details in by_table["allocation"]}
    mapped = {"mapped": ("map",), "mapped and written to": ("map", "write")}
    for index, (what, keys) in enumerate(mapped.items()):
        rates = []
        for details in found.values():
            turns = zip(*(details[f"{key}_seconds"] for key in keys))
            rates.append(details["bytes"] / statistics.median(map(sum, turns)) / 1e9)
        allocation.plot([one // 1024 for one in found], rates, label=what, **report.marked(index))
    style = {"color": report.GREY, "linewidth": 0.8, "linestyle": "--"}
    allocation.axhline(7.6, label="vAttention, A100 (S1)", **style)
    allocation.set_yscale("log")
    report.log_ticks(allocation.yaxis)
    report.octaves(allocation, [one // 1024 for one in found], "KiB of a page group")
    allocation.set_ylabel("GB a second")
    report.legend_above(allocation)
    for index, details in enumerate(by_table["spikes"]):
        style = {"color": report.PALETTE[index], "linewidth": 1}
        spikes.plot(details["step_ms"], label=details["mechanism"], **style)
    spikes.set_xlabel("decode step")
    spikes.set_ylabel("ms")
    spikes.set_ylim(bottom=0)
    report.legend_above(spikes)
    return report.save(drawing, path)


def article(rows: list[dict[str, Any]], foot: str, path: Path) -> Path | None:
    """S4's block sizes, swap against recompute, and models of 7B to 65B, published and ours."""
    by_table = _by_table(rows, ("sweep", "preempted", "scaling"))
    if by_table is None:
        return None
    drawing, (sizes, swaps, scaled) = report.figure(390, foot, ncols=3)
    throughput = [details for details in by_table["sweep"] if "ratios" in details]
    ticks = [details["block_size"] for details in throughput]
    here = [statistics.median(details["ratios"]) for details in throughput]
    published = [details["published"] for details in throughput]
    for index, (name, values) in enumerate({"S4, A100": published, "here, CPU": here}.items()):
        sizes.plot(ticks, values, label=name, **report.marked(index))
    sizes.set_ylim(0, 1.3)
    sizes.set_ylabel("throughput, over block size 16")
    for index, method in enumerate(by_table["preempted"][0]["seconds"]):
        blocks_of = [details["block_size"] for details in by_table["preempted"]]
        seconds = [details["seconds"][method] for details in by_table["preempted"]]
        swaps.plot(blocks_of, seconds, label=method, **report.marked(index))
    swaps.set_ylim(bottom=0)
    swaps.set_ylabel("seconds of a run that preempts")
    for axis, at in ((sizes, ticks), (swaps, blocks_of)):
        report.octaves(axis, at, "tokens in a block")
        report.legend_above(axis)
    lines: dict[str, list[tuple[int, float]]] = {}
    for details in by_table["scaling"]:
        lines.setdefault(details["model"], []).append((details["gpus"], details["ours"]))
    for index, (name, points) in enumerate(lines.items()):
        scaled.plot(*zip(*points), label=name, **report.marked(index))
    scaled.set_yscale("log")
    report.log_ticks(scaled.yaxis)
    report.octaves(scaled, [1, 2, 4, 8], "GPUs")
    scaled.set_ylabel("requests a second, computed")
    report.legend_above(scaled)
    return report.save(drawing, path)


def _by_table(
    rows: list[dict[str, Any]], tables: Iterable[str]
) -> dict[str, list[dict[str, Any]]] | None:
    """Details of the rows of these tables; `None` unless all are there."""
    found = {
        table: [row["details"] for row in rows if row["table"] == table and "details" in row]
        for table in tables
    }
    return found if all(found.values()) else None
