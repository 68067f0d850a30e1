"""Results as files and as Markdown."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

Row = Mapping[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
CLEAN = "clean"  # of a work tree
COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")


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
    """A Markdown table, in which a missing key is an empty cell and columns of numbers are
    right-aligned. `columns`: keys with their titles; by default all keys of the rows, in order of
    first appearance. `right`: keys of texts that are also right-aligned."""
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


WRONG = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of code that reads what is not as it should be."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Within it, an error of results that were read is `Damaged`, and names `what`."""
    try:
        yield
    except Damaged:
        raise
    except WRONG as error:
        raise Damaged(f"{what}: {failed(error)}") from error


def _not_finite(said: str) -> NoReturn:
    raise ValueError(f"{said} is not a number")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a JSON file of the runner: `command`, `facts`, `rows`, or `runs` of these.
    Raises `Damaged` if it is no object of JSON."""
    name = os.path.relpath(path)
    try:
        data = json.loads(Path(path).read_text(), parse_constant=_not_finite)
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
    data, name = read(path), os.path.relpath(path)
    with reading(name):
        for run in data.get("runs", [data]):
            if not COMMIT.fullmatch(revision := run["facts"]["revision"]):
                raise Damaged(f"{name}: revision {revision!r} is not the hash of a commit")
    return data


def exists(name: str) -> bool:
    """Whether there is such a result file."""
    return (RESULTS / f"{name}.json").exists()


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
