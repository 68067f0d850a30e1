"""The picture of README: the memory of keys and values in whole calls."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, tables
from benchmarks.workloads import WORKLOADS

SYSTEMS = {"plain": "plain generate", "ours": 'generate, cache_implementation="paged"'}
# two of Okabe and Ito's colours, distinct for colour-blind readers; hatches repeat the distinction
STYLES = {"plain": ("#0072B2", ""), "ours": ("#E69F00", "//")}
INCHES, PIXELS_PER_INCH = (8.0, 4.3), 100


def draw(data: Mapping[str, Any], stem: Path) -> Path:
    """Draws a result of `benchmarks.generate` to `<stem>-memory.png`, of 64 colours."""
    from matplotlib.figure import Figure
    from PIL import Image  # comes with matplotlib

    figure = Figure(INCHES, dpi=PIXELS_PER_INCH, layout="constrained")
    axis, small = figure.subplots(), {"fontsize": 8}
    for offset, (system, name) in zip((-0.2, 0.2), SYSTEMS.items()):
        found = [tables.base_of(data["rows"], case, system) for case in WORKLOADS]
        held = [row["figures"]["K/V, MiB"] if row else 0.0 for row in found]
        color, hatch = STYLES[system]
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        places = [place + offset for place in range(len(held))]
        bars = axis.barh(places, held, 0.38, label=name, **style)
        axis.bar_label(bars, [f"{size:.3g}" for size in held], padding=3, **small)
    groups = [workload.title.replace(", ", ",\n") for workload in WORKLOADS.values()]
    axis.set_yticks(range(len(groups)), groups, fontsize=8.5)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.09, y=0.02)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    said = "Most memory that keys and values take in a call, MiB: less is better"
    axis.set_title(said, fontsize=10, loc="left")
    figure.legend(loc="outside upper right", frameon=False, **small)
    facts, model = data["facts"], data["title"].partition(". ")[0].replace("`", "")
    parts = model, facts["cpu"], f"{facts['cores']} cores", report.revision_of(facts)
    figure.supxlabel(", ".join([*parts, facts["date"].split()[0]]), fontsize=7.5, color="#555555")
    drawn, path = io.BytesIO(), stem.with_name(f"{stem.name}-memory.png")
    figure.savefig(drawn, format="png", facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(path, format="PNG", optimize=True)
    return path
