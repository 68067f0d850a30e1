"""Pictures of the tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.paper.schedulers import SYSTEMS, shown

PARTS = {
    "used": "holds a token",
    "reserved": "reserved, filled later",
    "internal": "reserved, never filled",
    "external": "free, but not to be had; rounding",
}


def draw_all(rows: Iterable[dict[str, Any]], stem: Path) -> list[Path]:
    """A picture for each table that is among `rows` and has one, at `<stem>-<name>.png`."""
    rows = list(rows)
    pictures = {"waste": waste, "schedulers": schedulers, "blocks": blocks}
    paths = []
    for name, draw in pictures.items():
        path = stem.with_name(f"{stem.name}-{name}.png")

        def make(draw: Any = draw, path: Path = path) -> Path | None:
            return draw(rows, path)

        made = report.plot(make)
        paths += [made] if made is not None else []
    return paths


def waste(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """Stacked bars: published and ours for every system."""
    found = {row["name"].split(", ")[1]: row for row in rows if row["table"] == "waste" and "details" in row}
    if not found:
        return None
    drawing, axis = report.figure(420)
    places, labels = [], []
    for place, (system, row) in enumerate(found.items()):
        published = _numbers(row["published"])
        for offset, shares in ((-0.21, published), (0.21, row["details"])):
            bottom = 0.0
            for index, part in enumerate(PARTS):
                share = shares.get(part, 0.0)
                axis.bar(
                    place + offset,
                    share,
                    0.38,
                    bottom,
                    color=report.PALETTE[index],
                    hatch=report.HATCHES[index],
                    edgecolor="white",
                    linewidth=0.5,
                    label=PARTS[part] if not place and offset < 0 else None,
                )
                if share >= 5:
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
                    middle = bottom + share / 2
                    axis.text(place + offset, middle, f"{share:.0f}", ha="center", va="center", fontsize=8, bbox=box)
                bottom += share
            places.append(place + offset)
            labels.append("paper" if offset < 0 else "here")
        axis.text(place, -9, "vLLM and ours" if system == "ours" else system, ha="center", va="top", fontsize=10)
    axis.set_xticks(places, labels, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("% of the memory for keys and values")
    axis.set_ylim(0, 100)
    axis.set_title("Memory while requests wait for room, ShareGPT-like lengths", fontsize=11, pad=26)
    drawing.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return report.save(drawing, path)


def _numbers(published: str) -> dict[str, float]:
    pairs = [part.split() for part in published.split(", ")]
    return {name: float(number) for number, name in pairs}


def schedulers(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """Normalized latency over the request rate, for each cost of a step."""
    found = [row["details"] for row in rows if row["table"] == "schedulers" and "curves" in row.get("details", {})]
    if not found:
        return None
    drawing, axes = report.figure(420, ncols=len(found), squeeze=False)
    for axis, details in zip(axes[0], found):
        for index, system in enumerate(SYSTEMS):
            rates, latencies = zip(*details["curves"][system])
            style = {"color": report.PALETTE[index], "marker": report.MARKERS[index], "markersize": 5, "linewidth": 1.6}
            axis.plot(rates, latencies, label=shown(system) if axis is axes[0][0] else None, **style)
        axis.axhline(details["bound"], color="#555555", linewidth=0.8, linestyle="--")
        axis.set_ylim(0, 2 * details["bound"])
        axis.set_xlim(left=0)
        axis.set_xlabel("requests a second")
        axis.set_title(details["cost"], fontsize=10)
    axes[0][0].set_ylabel("seconds per output token (mean)")
    axes[0][0].text(0, found[0]["bound"], " latency bound", va="bottom", fontsize=8, color="#555555")
    drawing.legend(loc="outside upper center", ncols=len(SYSTEMS), fontsize=9, frameon=False)
    return report.save(drawing, path)


def blocks(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """Left: throughput over block sizes; right: recompute and swap."""
    rates: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["table"] == "block_sizes":
            details = row["details"]
            rates.setdefault(details["series"], []).append((details["block_size"], row["ours"]))
    swaps = [row["details"] for row in rows if row["table"] == "preemption"]
    if not rates or not swaps:
        return None
    drawing, (left, right) = report.figure(400, ncols=2)
    for index, (series, points) in enumerate(rates.items()):
        style = {"color": report.PALETTE[index], "marker": report.MARKERS[index]}
        left.plot(*zip(*points), label=series, **style)
    left.set_ylim(0, 1.3)
    left.set_ylabel("throughput, over block size 16")
    sizes = [details["block_size"] for details in swaps]
    lines = {
        "recompute": [details["recompute_ms"] for details in swaps],
        "swap out and in": [details["swap_out_ms"] + details["swap_in_ms"] for details in swaps],
    }
    for index, (name, times) in enumerate(lines.items(), start=len(rates)):
        right.plot(sizes, times, label=name, color=report.PALETTE[index], marker=report.MARKERS[index])
    right.set_yscale("log")
    right.set_ylabel("milliseconds of one preempted request")
    for axis, ticks in ((left, sorted({size for points in rates.values() for size, _ in points})), (right, sizes)):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in a block")
        axis.set_xticks(ticks, [str(size) for size in ticks])
        axis.legend(fontsize=8, frameon=False)
    return report.save(drawing, path)
