"""Renders the figures of README.md, docs and benchmarks/README.md from the committed JSON files,
between their marks.

    python -m benchmarks.readme [--check | --pictures | --fresh]

With `--pictures` it draws the results' pictures again, from the same files. No figure in the text
is written by hand: `tests/test_truth.py` renders it again and compares. With `--fresh` it fails if
figures of `benchmarks.all` are older than what they measure, as `.ci/release` asks.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    compiled,
    first_call,
    generate,
    grpo,
    linears,
    lora,
    machine,
    parallel,
    pictures,
    report,
    runner,
    side_by_side,
    speculation,
    tables,
    tiers,
    trainer,
    virtual,
)
from benchmarks.all import NAME, STAGES
from benchmarks.paper import __main__ as paper
from benchmarks.paper import plots
from benchmarks.peers import TITLES
from benchmarks.report import flow, machine_of, picture_of, result
from benchmarks.sections import architectures, attention, gpu_day, overview
from benchmarks.sections.overview import WHOLE
from benchmarks.workloads import ALL, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
COMPUTES = ("hf_paged/kernels", "hf_paged/attention", "hf_paged/batching")
"""Folders whose changes make figures old."""
ARCHITECTURES, PAPER = "architectures", "paper-cpu"


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
    row = workloads["W2"]
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
            row = tables.base_of(data["rows"], name, system)
            line[title] = f"{statistics.median(row['seconds']):.3g}" if row else "not measured"
        rows.append(line)
    settings_of = {
        row["system"]: row["figures"].get("settings") for row in data["rows"] if row["seconds"]
    }
    settings = [f"{name} {said}" for name, said in settings_of.items() if said]
    how = "; ".join(settings) or "the engines ran at their defaults, from their packages"
    said = f"Seconds, less is better: {overview.hardware(data)}. Settings: {how}."
    return f"{report.markdown(rows, {key: key for key in rows[0]})}\n\n{flow(said)}"


def appendix(*parts: Callable[[], str]) -> Callable[[], str]:
    """A page of docs/figures."""
    return lambda: "\n\n".join(filter(None, (part() for part in parts)))


def paper_sections() -> str:
    waste = picture_of(f"{PAPER}-waste", "Memory by use: reservation against blocks", "../..")
    return "\n\n".join([*paper.sections(result(PAPER)), *waste])


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
        lambda: compiled.section(result("compiled")),
    ),
    "papers": paper_sections,
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
        PAPER: "the papers' tables, the last of which",
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
    ROOT / "docs" / "benchmarks.md": {"benchmarks": overview.overview},
    **{ROOT / "docs" / "figures" / f"{name}.md": {"figures": FIGURES[name]} for name in FIGURES},
    ROOT / "docs" / "guide" / "compatibility.md": {"architectures": architectures_section},
    ROOT / "benchmarks" / "gpu_day.md": {"outcomes": lambda: gpu_day.outcomes(report.RESULTS)},
    ROOT / "docs" / "guide" / "other-engines.md": {"engines": engines_section},
    ROOT / "benchmarks" / "README.md": {"workloads": workloads_section, "results": results_section},
}


PICTURES: dict[str, Callable[[Any, Path], Any]] = {
    WHOLE: lambda data, stem: pictures.draw_all(data, stem),
    PAPER: lambda data, stem: plots.draw_all(data, stem),
}
"""What draws the pictures of a result, beside its JSON file."""


def stale() -> list[str]:
    """Why the figures of `benchmarks.all` cannot be released."""
    if not report.exists(NAME):
        return ["there is no run of benchmarks.all"]
    entries = {entry["name"]: entry for entry in result(NAME)["stages"]}
    reasons = []
    for stage in STAGES:
        if stage.name not in entries:
            reasons.append(f"{NAME}.json has no stage {stage.name}")
        elif entries[stage.name]["reason"]:
            reasons.append(f"stage {stage.name}: {entries[stage.name]['reason']}")
        elif not report.exists(stage.file):
            reasons.append(f"{stage.file}.json is missing")
    for name in [NAME, *(stage.file for stage in STAGES if report.exists(stage.file))]:
        facts = result(name)["facts"]
        revision = facts["revision"]
        if facts["tree"] != "clean":
            reasons.append(f"{name}.json is of a work tree with changes: {facts['tree']}")
        changed = changed_files(revision)
        if changed is None:
            reasons.append(f"{name}.json is of revision {revision}, which is not committed")
        elif changed:
            reasons.append(f"{name}.json is of revision {revision}, before {', '.join(changed)}")
    return reasons


def changed_files(revision: str) -> list[str] | None:
    """Files in `COMPUTES` whose code is not that of a revision; `None` without that revision."""
    names = machine.git("diff", "--name-only", revision, "HEAD", "--", *COMPUTES)
    if names is None:
        return None
    return [name for name in names.split() if code_of(name, revision) != code_of(name, "HEAD")]


def code_of(name: str, revision: str) -> str | None:
    """A file at a revision, Python without comments and docstrings; `None` if it is not there."""
    text = machine.git("show", f"{revision}:{name}")
    if text is None or not name.endswith(".py"):
        return text
    return ast.dump(_WithoutStrings().visit(ast.parse(text)))


class _WithoutStrings(ast.NodeTransformer):
    """Removes strings that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node


def between(text: str, mark: str) -> tuple[int, int]:
    """Start and end of the text between two marks. Raises `ValueError` without them."""
    begin, end = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
    return text.index(begin) + len(begin), text.index(end)


def render(path: Path) -> str:
    """The file with its sections rendered."""
    text = path.read_text()
    for mark, make in SECTIONS[path].items():
        start, end = between(text, mark)
        text = text[:start] + make() + "\n" + text[end:]
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    options = {
        "--check": runner.flag("write nothing; fail if a file is not what it should be"),
        "--fresh": runner.flag("fail if kernels or the engine changed after the figures"),
        "--pictures": runner.flag("draw the pictures in benchmarks/results instead"),
    }
    arguments = runner.parser_of(__doc__, options).parse_args(argv)
    check, status = arguments.check, 0
    if arguments.pictures:
        for name, draw in PICTURES.items():
            draw(result(name), report.RESULTS / name)
        return 0
    if arguments.fresh:
        reasons = stale()
        print(*reasons, sep="\n")
        return int(bool(reasons))
    for path in SECTIONS:
        text, name = render(path), os.path.relpath(path)
        if text == path.read_text():
            print(f"{name}: as the results say")
        elif check:
            print(f"{name}: differs from the results; run python -m benchmarks.readme")
            status = 1
        else:
            path.write_text(text)
            print(f"{name}: rendered from the results")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
