"""The text and tables of each benchmark's results, as the documentation shows them (`benchmarks.readme`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import RESULTS

Data = Mapping[str, Any]


def read(name: str, directory: Path = RESULTS) -> dict[str, Any]:
    """The content of a result."""
    return report.read(directory / f"{name}.json")


def read_those(names: Sequence[str], directory: Path = RESULTS) -> list[dict[str, Any]]:
    """The contents of those results that are there."""
    return [read(name, directory) for name in names if (directory / f"{name}.json").exists()]


def picture_of(name: str, said: str) -> list[str]:
    """A picture of a result, if it is there."""
    return [f"![{said}](../benchmarks/results/{name}.png)"] if (RESULTS / f"{name}.png").exists() else []


def flow(text: str) -> str:
    """One paragraph in one line."""
    return " ".join(text.split())


def machine_of(facts: Data) -> str:
    """One line about where and on what a run was made."""
    isa = f" ({facts['isa']}, bfloat16: {facts['bf16']})" if facts.get("bf16") else ""
    return flow(
        f"""{facts["date"]} UTC, revision {facts["revision"]} (work tree: {facts.get("tree", "not recorded")});
        {facts["cpu"]}{isa}, {facts["cores"]} cores, {facts["threads"]} threads, {facts["ram_gib"]} GiB, load
        {facts["load_1min"]} at the start; Python {facts["python"]}, torch {facts["torch"]}, transformers
        {facts["transformers"]}"""
    )
