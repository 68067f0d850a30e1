"""Text and tables of each benchmark's results, as shown in the documentation
(`benchmarks.readme`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import report
from benchmarks.report import RESULTS

Data = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    """Content of a result file."""
    return report.read(RESULTS / f"{name}.json")


def picture_of(name: str, said: str) -> list[str]:
    """Markdown of a result's picture, if the file exists."""
    return (
        [f"![{said}](../benchmarks/results/{name}.png)"]
        if (RESULTS / f"{name}.png").exists()
        else []
    )


def flow(text: str) -> str:
    """Joins a paragraph into one line."""
    return " ".join(text.split())


def machine_of(facts: Data) -> str:
    """One line about the machine and the software of a run."""
    isa = f" ({facts['isa']}, bfloat16: {facts['bf16']})" if facts.get("bf16") else ""
    return flow(
        f"""{facts["date"]} UTC, revision {facts["revision"]} (work tree: {facts.get("tree", "not recorded")});
        {facts["cpu"]}{isa}, {facts["cores"]} cores, {facts["threads"]} threads, {facts["ram_gib"]} GiB, load
        {facts["load_1min"]} at the start; Python {facts["python"]}, torch {facts["torch"]}, transformers
        {facts["transformers"]}"""
    )
