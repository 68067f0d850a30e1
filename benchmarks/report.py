"""Results as files, as Markdown and as plots."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

Row = Mapping[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
CLEAN = "clean"  # of a work tree
COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")
WIDTH_PIXELS = 800
PIXELS_PER_INCH = 100
FOOT_PIXELS = 22
GREY = "#555555"  # of what is said in small print
# Okabe and Ito's colours, distinct for colour-blind readers; hatches repeat the distinction
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")


def command_line() -> str:
    """The command that repeats this run."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def text(value: Any) -> str:
    """Formats a cell: four significant digits of a float, empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if 1e4 <= abs(value) < 1e6:
            return f"{value:.0f}"
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def failed(error: Exception) -> str:
    """What a table says of a contender that failed; a failing peer is a result."""
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def markdown(
    rows: Iterable[Row], columns: Mapping[str, str] | None = None, right: Collection[str] = ()
) -> str:
    """
    A Markdown table; columns of numbers are right-aligned.

    Args:
        rows (`Iterable[Mapping]`): A missing key is an empty cell.
        columns (`Mapping[str, str]`, *optional*): Keys with their titles; `None`: all keys of the
            rows, in order of first appearance.
        right (`Collection[str]`): Keys of texts that are right-aligned, too.
    """
    rows = list(rows)
    keys = {key: key.replace("_", " ") for row in rows for key in row}
    titles = keys if columns is None else columns

    def numeric(key: str) -> bool:
        values = [row[key] for row in rows if row.get(key) not in (None, "")]
        return bool(values) and all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in values
        )

    lines = [
        "| " + " | ".join(titles.values()) + " |",
        "|" + "".join("--:|" if k in right or numeric(k) else "---|" for k in titles),
    ]
    lines += ["| " + " | ".join(text(row.get(key)) for key in titles) + " |" for row in rows]
    return "\n".join(lines)


class Damaged(ValueError):
    """A file is not what it should be; the message is one line, which names the file."""


KINDS: dict[str, type] = {
    **dict.fromkeys(("rows", "runs", "stages", "results", "seconds"), list),
    **dict.fromkeys(("facts", "figures", "over"), dict),
    **dict.fromkeys(("command", "title", "case"), str),
}
"""Types of entries, of runs (which have `facts`) and of rows (which have a `system`)."""


class Entries(dict[str, Any]):
    """An object of a JSON file. Raises `Damaged` where an entry is missing."""

    def __init__(self, path: Path, pairs: Iterable[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.path = path
        for key in KINDS if self.keys() & {"facts", "system"} else ():
            if key in self and not isinstance(self[key], KINDS[key]):
                said = f"{key!r} is {json.dumps(self[key])[:60]}, not a {KINDS[key].__name__}"
                raise Damaged(f"{os.path.relpath(path)}: {said}")

    def __missing__(self, key: str) -> Any:
        entries = ", ".join(map(repr, self)) or "none"
        raise Damaged(f"{os.path.relpath(self.path)}: no entry {key!r} beside these: {entries}")


WRONG = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of code that reads what is not as it should be."""
_OPENED: ContextVar[dict[str, None] | None] = ContextVar("opened", default=None)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Within it, an error of results that were read is `Damaged`, and names `what` and them."""
    names: dict[str, None] = {}
    token = _OPENED.set(names)
    try:
        yield
    except Damaged:
        raise
    except WRONG as error:
        said = ", of ".join(filter(None, [what, ", ".join(names)]))
        raise Damaged(f"{said}: {failed(error)}") from error
    finally:
        _OPENED.reset(token)


def _not_finite(said: str) -> NoReturn:
    raise ValueError(f"{said} is not a number")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a JSON file of the runner: `command`, `facts`, `rows`, or `runs` of these.
    Raises `Damaged` if it is not that."""
    path, opened = Path(path), _OPENED.get()
    name = os.path.relpath(path)
    if opened is not None:
        opened[name] = None
    try:
        data = json.loads(
            path.read_text(),
            object_pairs_hook=lambda pairs: Entries(path, pairs),
            parse_constant=_not_finite,
        )
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"{name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Damaged(f"{name}: a {type(data).__name__}, not an object of JSON")
    return data


def result(name: str) -> dict[str, Any]:
    """Content of a result file, of committed revisions. Raises `Damaged` if it is not that."""
    path = RESULTS / f"{name}.json"
    data = read(path)
    for run in data.get("runs", [data]):
        if not COMMIT.fullmatch(revision := run["facts"]["revision"]):
            said = f"revision {revision!r} is not the hash of a commit"
            raise Damaged(f"{os.path.relpath(path)}: {said}")
    return data


def exists(name: str) -> bool:
    """Whether there is such a result file."""
    return (RESULTS / f"{name}.json").exists()


def picture_of(name: str, said: str, up: str = "..") -> list[str]:
    """Markdown of a result's picture, if the file exists; `up`: from the page to the checkout."""
    is_there = (RESULTS / f"{name}.png").exists()
    return [f"![{said}]({up}/benchmarks/results/{name}.png)"] if is_there else []


def flow(text: str) -> str:
    """Joins a paragraph into one line."""
    return " ".join(text.split())


def machine_of(facts: Row) -> str:
    """One line about the machine and the software of a run."""
    isa = f" ({facts['isa']}, bfloat16: {facts['bf16']})" if facts.get("bf16") else ""
    cpu, clean = f"{facts['cpu']}{isa}", f" (work tree: {CLEAN})"
    when = f"{facts['date']} UTC, {revision_of(facts, clean)}"
    size = f"{facts['cores']} cores, {facts['threads']} threads, {facts['ram_gib']} GiB"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers"))
    load = f"load {facts['load_1min']} at the start"
    return f"{when}; {cpu}, {size}, {load}; Python {facts['python']}, {versions}"


def revision_of(facts: Row, clean: str = "") -> str:
    """The revision of a run, and in words that its work tree had changes; `clean`: said if it had
    none."""
    revision, tree = f"revision {facts['revision']}", facts.get("tree", "not recorded")
    if revision.endswith("+") or tree.startswith("changed"):
        return f"{revision.removesuffix('+')} with uncommitted changes ({tree})"
    return revision + (clean if tree == CLEAN else f" (work tree: {tree})")


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file in one go: a process that is killed leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def caption(facts: Row, subject: str = "") -> str:
    """One line for the foot of a picture: the subject, and the hardware and revision among a run's
    facts."""
    names = [str(facts[key]) for key in ("gpu", "cpu") if key in facts]
    parts = [subject, *names, *([f"{facts['cores']} cores"] if "cores" in facts else [])]
    parts += [revision_of(facts)] if "revision" in facts else []
    return ", ".join(
        [*filter(None, parts), *([str(facts["date"]).split()[0]] if facts.get("date") else [])]
    )


def figure(height_pixels: int, foot: str) -> tuple[Any, Any]:
    """
    A figure 800 pixels wide, and its axes, without a display.

    Args:
        height_pixels (`int`): Height of the picture.
        foot (`str`): A line in small print below everything else (`caption`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = WIDTH_PIXELS / PIXELS_PER_INCH, height_pixels / PIXELS_PER_INCH
    drawing: Any = Figure(figsize=size, dpi=PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(drawing)
    # a panel of its own, which legends outside of the axes do not reach
    heights = height_pixels - FOOT_PIXELS, FOOT_PIXELS
    drawing, below = drawing.subfigures(2, height_ratios=heights)
    below.text(0.008, 0.5, foot, fontsize=7.5, color=GREY, va="center")
    axis = drawing.subplots()
    axis.set_prop_cycle(color=PALETTE)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return drawing, axis


def save(drawing: Any, path: str | os.PathLike[str]) -> Path:
    """Writes a PNG of 64 colours, a few tens of kilobytes; returns its path."""
    from PIL import Image  # comes with matplotlib

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn, small = io.BytesIO(), io.BytesIO()
    drawing.figure.savefig(drawn, format="png", facecolor="white")  # of a panel, the whole figure
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="PNG", optimize=True)
    replace_file(path, small.getvalue())
    return path


def grouped_bars(
    axis: Any, values: Mapping[str, Mapping[str, float]], label: Callable[[float], str] = text
) -> None:
    """
    Horizontal bars in groups, with room for their labels and for the groups' names in words.

    Args:
        values (`Mapping[str, Mapping[str, float]]`): By series, then by group; a series may lack a
            group. Names of groups break at commas.
        label (`Callable`): The text at the end of a bar.
    """
    groups = list(dict.fromkeys(group for series in values.values() for group in series))
    rows: dict[tuple[str, str], float] = {}  # by series and group
    centers, top = [], 0.0
    for group in groups:
        members = [name for name, series in values.items() if group in series]
        rows |= {(name, group): top + index for index, name in enumerate(members)}
        centers.append(top + (len(members) - 1) / 2)
        top += len(members) + 0.7
    for index, (name, series) in enumerate(values.items()):
        style = {
            "color": PALETTE[index % 8],
            "hatch": HATCHES[index % 8],
            "edgecolor": "white",
            "linewidth": 0.5,
        }
        bars = axis.barh(
            [rows[name, group] for group in series], list(series.values()), 0.9, label=name, **style
        )
        # over lines that mark a value
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(
            bars, [label(value) for value in series.values()], fontsize=8, padding=3, bbox=box
        )
    axis.set_yticks(centers, [group.replace(", ", ",\n") for group in groups], fontsize=8.5)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.09, y=0.02)
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)


def title(axis: Any, said: str) -> None:
    """A title at the left of the axes."""
    axis.set_title(said, fontsize=10, loc="left")


def legend_below(figure: Any, axis: Any, columns: int, **options: Any) -> None:
    """A legend below all axes, of the marks of one."""
    marks = axis.get_legend_handles_labels()
    style = {"loc": "outside lower center", "fontsize": 8, "frameon": False, **options}
    figure.legend(*marks, ncols=columns, **style)
