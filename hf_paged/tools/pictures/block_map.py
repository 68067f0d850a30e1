"""The blocks of a pool as a matplotlib picture: which are free, used, shared by how many, cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import WIDTH, add_legend, new_axes, require
from .kinds import KINDS, count_kinds, group_label, to_cells

MAX_CELLS = 128 * 64  # of all groups together; of larger pools a cell shows several blocks
_COLUMNS = ((512, 32), (2048, 64), (MAX_CELLS, 128))  # up to this number of cells, this number of columns
_NUMBERED_COLUMNS = 32  # with more columns the number of holders does not fit into a cell
_HEADING = 1 / 20  # of the width: room above a group among several


def plot_block_map(block_map: Mapping[Any, list[int]], title: str | None = None, ax: Any = None) -> Any:
    """
    Draws a square for each block, in the order of the block ids, layer group under layer group. A shared block says how
    many hold it, where there is room for that.

    Args:
        block_map (`Mapping`): For each layer group, by its window or by kind and window, the holders of every block (0:
            free, -1: cached).
        title (`str`, *optional*): Above the picture.
        ax (`matplotlib.axes.Axes`, *optional*): Draw there; otherwise in a new figure, 800 pixels wide.

    Returns:
        `matplotlib.figure.Figure`: What was drawn in. A new one does not belong to pyplot: a notebook shows it, a
        script saves it (`figure.savefig`).

    Raises:
        ImportError: without matplotlib.
    """
    groups = {key: states for key, states in block_map.items() if states}
    size = max(1, -(-sum(map(len, groups.values())) // MAX_CELLS))  # blocks in a cell
    panels = [(key, states, to_cells(states, size)) for key, states in groups.items()]
    num_cells = sum(len(cells) for *_, cells in panels)
    columns = next((columns for most, columns in _COLUMNS if num_cells <= most), _COLUMNS[-1][1])
    heading = _HEADING * columns if len(panels) > 1 else 0.0
    rows = sum(-(-len(cells) // columns) + heading for *_, cells in panels) or 1.0
    if ax is None:
        ax = new_axes(rows * 0.97 * WIDTH / columns + 0.9 + (0.3 if title else 0.0))
    top = 0.0
    ticks: dict[float, int] = {}  # by their height in cells, the first block id of rows
    for key, states, cells in panels:
        if heading:
            text = f"{group_label(key)}: {len(states):,} blocks"
            ax.text(0, top + 0.85 * heading, text, fontsize=9, va="bottom")
            top += heading
        _draw_cells(ax, cells, columns, top)
        for block_id, state in enumerate(states if size == 1 and columns <= _NUMBERED_COLUMNS else ()):
            if state > 1:
                row, column = divmod(block_id, columns)
                place = column + 0.5, top + row + 0.52
                ax.text(*place, f"{state}", ha="center", va="center", fontsize=8, weight="bold")
        num_rows = -(-len(cells) // columns)
        ticks |= {top + row + 0.5: row * columns * size for row in range(0, num_rows, -(-columns // 50))}
        top += num_rows
    _label_axes(ax, columns, rows, size, ticks)
    if not panels:
        ax.text(columns / 2, 0.5, "no blocks yet", ha="center", va="center")
    if title is not None:
        ax.set_title(title, loc="left", fontsize=10, pad=44, parse_math=False)
    counts = count_kinds(state for states in groups.values() for state in states)
    patch = require("matplotlib.patches").Patch
    handles = [patch(color=kind.colour, label=f"{kind.label}: {count:,}") for kind, count in zip(KINDS, counts)]
    add_legend(ax, handles, columns=3)
    return ax.figure


def _draw_cells(ax: Any, cells: list[int], columns: int, top: float) -> None:
    collections, to_rgba = require("matplotlib.collections"), require("matplotlib.colors").to_rgba
    palette = [to_rgba(kind.colour) for kind in KINDS]
    corners = ((column, top + row) for row, column in (divmod(place, columns) for place in range(len(cells))))
    squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in corners]
    line = 1.5 if columns <= _NUMBERED_COLUMNS else 0.5
    faces = [palette[cell] for cell in cells]
    ax.add_collection(collections.PolyCollection(squares, facecolors=faces, edgecolors="white", linewidths=line))


def _label_axes(ax: Any, columns: int, rows: float, size: int, ticks: dict[float, int]) -> None:
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.set_yticks(list(ticks), [f"{block_id:,}" for block_id in ticks.values()])
    places = range(0, columns, columns // 4) if ticks else ()
    ax.set_xticks([place + 0.5 for place in places], [f"{place * size:,}" for place in places])
    if ticks:
        cells = "" if size == 1 else f"; {size} blocks to a cell"
        ax.set_xlabel(f"block id: number at the row + number below the column{cells}", fontsize=9)
