"""The plot of a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report

PARTS = {
    "used": "holds a token",
    "reserved": "reserved, filled later",
    "internal": "reserved, never filled",
    "external": "free, but unusable",
}


def draw_all(data: Mapping[str, Any], stem: Path) -> Path:
    """Draws the table `waste` of a result to `<stem>-waste.png`."""
    subject = "simulated with the engine's scheduler and block manager"
    path = stem.with_name(f"{stem.name}-waste.png")
    (run,) = (one for one in data["runs"] if one["rows"][0]["case"] == "waste")
    return waste(run["rows"], report.caption(run["facts"], subject), path)


def waste(rows: list[dict[str, Any]], foot: str, path: Path) -> Path:
    """Stacked bars: published and ours for every system."""
    found = {row["name"].split(", ")[1]: row for row in rows if "details" in row}
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
