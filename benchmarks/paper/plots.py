"""Plots of the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.paper.schedulers import SYSTEMS, shown

PARTS = {
    "used": "holds a token",
    "reserved": "reserved, filled later",
    "internal": "reserved, never filled",
    "external": "free, but unusable",
}


def draw_all(data: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws each table of a result that has a plot, to `<stem>-<name>.png`."""
    pictures = {
        "waste": (waste, "waste", "simulated with the engine's scheduler and block manager"),
        "schedulers": (
            schedulers,
            "schedulers",
            "simulated with the engine's scheduler and block manager",
        ),
        "blocks": (blocks, "block_sizes", ""),
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
                    axis.text(
                        place + offset,
                        middle,
                        f"{share:.0f}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        bbox=box,
                    )
                bottom += share
            places.append(place + offset)
            labels.append("paper" if offset < 0 else "here")
        axis.text(
            place,
            -9,
            "vLLM, hf_paged" if system == "ours" else system,
            ha="center",
            va="top",
            fontsize=10,
        )
    axis.set_xticks(places, labels, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("% of the memory for keys and values")
    axis.set_ylim(0, 100)
    axis.set_title(
        "What the memory holds while requests wait for room, ShareGPT-like lengths",
        fontsize=10,
        loc="left",
    )
    drawing.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return report.save(drawing, path)


def _numbers(published: str) -> dict[str, float]:
    pairs = [part.split() for part in published.split(", ")]
    return {name: float(number) for number, name in pairs}


def schedulers(rows: list[dict[str, Any]], foot: str, path: Path) -> Path | None:
    """Normalized latency over the request rate, by step cost."""
    found = [
        row["details"]
        for row in rows
        if row["table"] == "schedulers" and "curves" in row.get("details", {})
    ]
    if not found:
        return None
    drawing, axes = report.figure(440, foot, ncols=len(found), squeeze=False)
    for axis, details in zip(axes[0], found):
        for index, system in enumerate(SYSTEMS):
            rates, latencies = zip(*details["curves"][system])
            style = {
                "color": report.PALETTE[index],
                "marker": report.MARKERS[index],
                "markersize": 5,
                "linewidth": 1.6,
            }
            name = "hf_paged" if system == "ours" else shown(system)
            axis.plot(rates, latencies, label=name, **style)
        axis.axhline(details["bound"], color=report.GREY, linewidth=0.8, linestyle="--")
        axis.set_ylim(0, 2 * details["bound"])
        axis.set_xlim(left=0)
        axis.set_xlabel("requests a second")
        axis.set_title(details["cost"], fontsize=10)
        right, style = (
            axis.get_xlim()[1],
            {"fontsize": 8, "color": report.GREY, "ha": "right", "va": "bottom"},
        )
        axis.text(right, details["bound"], "latency bound", **style)
    axes[0][0].set_ylabel("seconds per output token (mean)")
    lines = axes[0][0].get_legend_handles_labels()
    drawing.legend(
        *lines, loc="outside lower center", ncols=len(SYSTEMS), fontsize=9, frameon=False
    )
    return report.save(drawing, path)


def blocks(rows: list[dict[str, Any]], foot: str, path: Path) -> Path | None:
    """Left: throughput over block sizes; right: recompute and swap."""
    rates: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["table"] == "block_sizes":
            details = row["details"]
            rates.setdefault(details["series"], []).append((details["block_size"], row["ours"]))
    swaps = [row["details"] for row in rows if row["table"] == "preemption"]
    if not rates or not swaps:
        return None
    drawing, (left, right) = report.figure(430, foot, ncols=2)
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
        right.plot(
            sizes, times, label=name, color=report.PALETTE[index], marker=report.MARKERS[index]
        )
    right.set_yscale("log")
    report.log_ticks(right.yaxis)
    right.set_ylabel("milliseconds of one preempted request")
    for axis, ticks in (
        (left, sorted({size for points in rates.values() for size, _ in points})),
        (right, sizes),
    ):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in a block")
        axis.set_xticks(ticks, [str(size) for size in ticks])
        report.legend_above(axis)
    return report.save(drawing, path)


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
        speeds = {
            details[key]: details["tokens_per_second"]
            for details in by_table[table]
            if key in details
        }
        for index, system in enumerate(next(iter(speeds.values()))):
            style = {
                "color": report.PALETTE[index],
                "marker": report.MARKERS[index],
                "markersize": 5,
            }
            axis.plot(list(speeds), [one[system] for one in speeds.values()], label=system, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(speeds), [str(one) for one in speeds])
        axis.set_xlabel(title)
        axis.set_ylabel("tokens a second")
        axis.set_ylim(bottom=0)
        report.legend_above(axis)
    found = {details["page_bytes"]: details for details in by_table["allocation"]}
    for index, (what, keys) in enumerate(
        {"mapped": ("map",), "mapped and written to": ("map", "write")}.items()
    ):
        rates = []
        for details in found.values():
            turns = zip(*(details[f"{key}_seconds"] for key in keys))
            rates.append(details["bytes"] / statistics.median(map(sum, turns)) / 1e9)
        style = {"color": report.PALETTE[index], "marker": report.MARKERS[index]}
        allocation.plot([one // 1024 for one in found], rates, label=what, **style)
    allocation.axhline(
        7.6, color=report.GREY, linewidth=0.8, linestyle="--", label="vAttention, A100 (S1)"
    )
    allocation.set_xscale("log", base=2)
    allocation.set_yscale("log")
    report.log_ticks(allocation.yaxis)
    allocation.set_xticks([one // 1024 for one in found], [str(one // 1024) for one in found])
    allocation.set_xlabel("KiB of a page group")
    allocation.set_ylabel("GB a second")
    report.legend_above(allocation)
    for index, details in enumerate(by_table["spikes"]):
        spikes.plot(
            details["step_ms"], label=details["mechanism"], color=report.PALETTE[index], linewidth=1
        )
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
    for index, (name, values) in enumerate(
        {"S4, A100": [details["published"] for details in throughput], "here, CPU": here}.items()
    ):
        sizes.plot(
            ticks, values, label=name, color=report.PALETTE[index], marker=report.MARKERS[index]
        )
    sizes.set_ylim(0, 1.3)
    sizes.set_ylabel("throughput, over block size 16")
    for index, method in enumerate(by_table["preempted"][0]["seconds"]):
        blocks_of = [details["block_size"] for details in by_table["preempted"]]
        seconds = [details["seconds"][method] for details in by_table["preempted"]]
        swaps.plot(
            blocks_of,
            seconds,
            label=method,
            color=report.PALETTE[index],
            marker=report.MARKERS[index],
        )
    swaps.set_ylim(bottom=0)
    swaps.set_ylabel("seconds of a run that preempts")
    for axis, at in ((sizes, ticks), (swaps, blocks_of)):
        axis.set_xscale("log", base=2)
        axis.set_xticks(at, [str(one) for one in at])
        axis.set_xlabel("tokens in a block")
        report.legend_above(axis)
    lines: dict[str, list[tuple[int, float]]] = {}
    for details in by_table["scaling"]:
        lines.setdefault(details["model"], []).append((details["gpus"], details["ours"]))
    for index, (name, points) in enumerate(lines.items()):
        style = {"color": report.PALETTE[index], "marker": report.MARKERS[index]}
        scaled.plot(*zip(*points), label=name, **style)
    scaled.set_xscale("log", base=2)
    scaled.set_yscale("log")
    report.log_ticks(scaled.yaxis)
    scaled.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    scaled.set_xlabel("GPUs")
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
