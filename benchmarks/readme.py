"""Renders the figures of README.md, docs and benchmarks/README.md from the committed JSON files,
between their marks. With `--pictures` it draws README's picture again, from the same files. No
figure in the text is written by hand: `tests/test_truth.py` renders it again and compares. It fails
if files of `benchmarks.all` are of several revisions or machines, or of a quick run; with
`--fresh`, which writes nothing either, also if they are older than the code that they measure, as
`.ci/release` asks."""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    first_call,
    generate,
    grpo,
    linears,
    lora,
    parallel,
    pictures,
    report,
    revisions,
    runner,
    side_by_side,
    speculation,
    tables,
    tiers,
    trainer,
    virtual,
)
from benchmarks.paper import __main__ as paper
from benchmarks.peers import TITLES
from benchmarks.report import flow, machine_of, result
from benchmarks.sections import architectures, attention, overview, speeds, targets
from benchmarks.sections.overview import WHOLE
from benchmarks.workloads import ALL, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES, PAPER, SPEEDS = "architectures", "paper-cpu", "speeds"


def sections(*modules: Any) -> list[Callable[[], str]]:
    """What the commands of these benchmarks print for the committed results."""
    return [module.BENCHMARK.section for module in modules]


def badges_section() -> str:
    """Section of README.md: facts of pyproject.toml, as pictures of text."""
    project = (ROOT / "pyproject.toml").read_text()
    badges = {
        "license": (r'^license = "([^"]+)"', "{}"),
        "python": (r'^requires-python = ">=([\d.]+)"', "{} or newer"),
        "version": (r'^version = "([^"]+)"', "{}"),
    }
    pictures = []
    for name, (pattern, said) in badges.items():
        value = said.format(re.search(pattern, project, re.MULTILINE)[1])  # type: ignore[index]
        escaped = value.replace("-", "--").replace(" ", "_")
        pictures.append(f"![{name}: {value}](https://img.shields.io/badge/{name}-{escaped}-blue)")
    return "\n".join(pictures)


def gain_section() -> str:
    """Section of README.md: two numbers, with the model and the hardware."""
    data = result(WHOLE)
    workloads = {one.name: one for one in overview.beside(data["rows"])}
    if (row := workloads.get("W2")) is None:
        raise report.Damaged(f"{WHOLE}.json: has not both plain's and our times of W2")
    return flow(
        f"""For {WORKLOADS["W2"].title}, a paged call is **{row.speed.value:.1f} times as fast** as plain `generate`, and
        its keys and values take **{row.share:.0%} of the memory**: {overview.hardware(data)}."""
    )


def engines_section() -> str:
    """Section of docs/guide/other-engines.md: median seconds of whole calls beside engines for
    CPUs."""
    data, rows = result(WHOLE), []
    names = {"plain": "plain `generate`", "ours": "hf_paged", **dict.fromkeys(TITLES.values())}
    ran = {row["system"].partition(", batch")[0] for row in data["rows"]}
    titles = {name: title or name for name, title in names.items() if name in ran}
    for name in [name for name in ALL if tables.base_of(data["rows"], name, "ours")]:
        line = {"call": ALL[name].title}
        for system, title in titles.items():
            settings = overview.PLAIN if system == "plain" else [system]
            row = overview.fastest(data["rows"], name, settings)
            line[title] = f"{statistics.median(row['seconds']):.3g}" if row else "not measured"
        rows.append(line)
    settings_of: dict[str, dict[str, None]] = {}  # by system; in some, calls differ
    for row in data["rows"]:
        if row["seconds"] and (said := row["figures"].get("settings")):
            settings_of.setdefault(row["system"], {})[said] = None
    settings = [f"{name} {' or '.join(texts)}" for name, texts in settings_of.items()]
    how = "; ".join(settings) or "the engines ran at their defaults, from their packages"
    said = (
        f"Seconds, less is better; {overview.AT_BEST}: {overview.hardware(data)}. Settings: {how}."
    )
    return f"{report.markdown(rows, {key: key for key in rows[0]})}\n\n{flow(said)}"


def appendix(*parts: Callable[[], str]) -> Callable[[], str]:
    """A page of docs/figures."""
    return lambda: "\n\n".join(filter(None, (part() for part in parts)))


FIGURES_OF = generate, first_call, grpo, trainer, side_by_side, speculation, lora, tiers
FIGURES: dict[str, Callable[[], str]] = {
    "whole-calls": appendix(lambda: workloads_section(), *sections(generate, first_call)),
    "training": appendix(*sections(grpo, trainer)),
    "families": appendix(*sections(side_by_side)),
    "features": appendix(*sections(speculation, lora, tiers, parallel, virtual)),
    "kernels": appendix(
        lambda: attention.attention(result(attention.ATTENTION)),
        *sections(linears),
        lambda: attention.quantized(list(map(result, attention.QUANTIZED))),
    ),
    "papers": appendix(*sections(paper)),
}
"""Pages of docs/figures: what the benchmarks print, by topic."""


def architectures_section() -> str:
    """Section of docs/guide/compatibility.md."""
    from tests.support.architecture_media import NOT_GIVEN

    return architectures.architectures(result(ARCHITECTURES), NOT_GIVEN)


def results_section() -> str:
    """Section of benchmarks/README.md."""
    names = {
        WHOLE: "whole calls",
        attention.ATTENTION: "attention alone",
        PAPER: "the papers' figures, the last of which",
        ARCHITECTURES: "every architecture against plain `generate`",
    }
    lines = []
    for name, title in names.items():
        data = result(name)
        run = data["runs"][-1] if "runs" in data else data
        said = f"`{run['command']}`, {machine_of(run['facts'])}"
        lines.append(f"- {title}: {said}; [JSON](results/{name}.json)")
    return "\n".join(lines)


def workloads_section() -> str:
    """Section of benchmarks/README.md, from the code of the workloads."""
    lines = [f"- {name}: {workload.title}" for name, workload in ALL.items()]
    return "\n".join(lines)


SECTIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {
        "badges": badges_section,
        "gain": gain_section,
        "headline": overview.headline,
    },
    ROOT / "ROADMAP.md": {"targets": targets.missed},
    ROOT / "docs" / "benchmarks.md": {"benchmarks": overview.overview},
    **{ROOT / "docs" / "figures" / f"{name}.md": {"figures": FIGURES[name]} for name in FIGURES},
    ROOT / "docs" / "guide" / "compatibility.md": {
        "architectures": architectures_section,
        "speeds": lambda: speeds.speeds(result(SPEEDS)),
    },
    ROOT / "docs" / "guide" / "other-engines.md": {"engines": engines_section},
    ROOT / "benchmarks" / "README.md": {"workloads": workloads_section, "results": results_section},
}


def between(text: str, mark: str) -> tuple[int, int]:
    """Start and end of the text between two marks. Raises `ValueError` if each is not there
    once, in this order."""
    begin, end = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
    start, stop = text.find(begin), text.find(end)
    if not (text.count(begin) == text.count(end) == 1 and start < stop):
        raise ValueError(f"has not once {begin.strip()} and below it {end}, on lines of their own")
    return start + len(begin), stop


def render(path: Path) -> str:
    """The file with its sections rendered. Raises `report.Damaged` if it has not the marks, or if
    results are not as they should be."""
    name = os.path.relpath(path)
    with report.reading(name):
        text = path.read_text()
    for mark, make in SECTIONS[path].items():
        try:
            start, end = between(text, mark)
        except ValueError as error:
            raise report.Damaged(f"{name} {error}") from error
        with report.reading(f"{name}, section {mark}"):
            text = text[:start] + make() + "\n" + text[end:]
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 2 if a file is damaged."""
    options = {
        "--check": runner.flag("write nothing; fail if a file is not what it should be"),
        "--fresh": runner.flag(
            "--check, and fail if kernels or the engine changed since the figures"
        ),
        "--pictures": runner.flag("draw README's picture instead"),
    }
    parser = runner.parser_of(__doc__, options)
    arguments = parser.parse_args(argv)
    if arguments.pictures and (arguments.check or arguments.fresh):
        parser.error(
            "argument --pictures: not allowed with --check or --fresh, which write nothing"
        )
    try:
        if arguments.pictures:
            with report.reading("the picture"):
                pictures.draw(result(WHOLE), report.RESULTS / WHOLE)
            return 0
        with report.reading("revisions"):
            reasons = revisions.stale() if arguments.fresh else revisions.mixed()
        status = rendered(arguments.check or arguments.fresh)
    except report.Damaged as error:
        print(error, file=sys.stderr)
        return 2
    print(*reasons, sep="\n", end="\n" if reasons else "")
    return int(bool(status or reasons))


def rendered(check: bool) -> int:
    """Renders the pages; with `check`, 1 if one differs from its file."""
    status = 0
    for path, text in {path: render(path) for path in SECTIONS}.items():  # all, or none
        name = os.path.relpath(path)
        if text == path.read_text():
            print(f"{name}: as the results say")
        elif check:
            print(f"{name}: differs from the results; run python -m benchmarks.readme")
            status = 1
        else:
            with report.reading(name):
                path.write_text(text)
            print(f"{name}: rendered from the results")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
