"""Renders the figures of README.md, docs and benchmarks/README.md from the committed JSON files,
between their marks.

    python -m benchmarks.readme [--check | --pictures]

With `--pictures` it draws the results' pictures again, from the same files. No figure in the text
is written by hand: `tests/test_truth.py` renders it again and compares.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    arrivals,
    first_call,
    generate_tables,
    grpo,
    linears,
    lora,
    parallel,
    report,
    runner,
    side_by_side,
    speculation,
    threads,
    tiers,
    virtual,
)
from benchmarks.paper import plots
from benchmarks.report import flow, machine_of, result
from benchmarks.sections import architectures, calls, chips, gpu_day, papers
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "architectures"
BEFORE = (first_call, threads, linears, grpo, speculation, tiers)
AFTER = (lora, parallel, virtual, side_by_side)
"""Benchmarks whose sections are what their commands print, before and after those of attention."""


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


def processor(facts: Mapping[str, Any]) -> str:
    """The processor of a run as a reader knows it."""
    return f"{facts['cores']} cores ({facts['cpu'].replace('(R)', '')})"


def compared() -> dict[str, tuple[float, float]]:
    """By workload, plain's time over ours, and the share of plain's peak bytes of K/V that ours
    holds."""
    peaks: dict[str, dict[str, float]] = {}
    speeds: dict[str, float] = {}
    for row in generate_tables.memory_rows(result(calls.WHOLE_CALLS)["rows"]):
        is_ours = row["system"] == "ours"
        peaks.setdefault(row["workload"], {})["ours" if is_ours else "plain"] = row["kv_mib"]
        speeds |= {row["workload"]: row["plain_over"]} if is_ours else {}
    return {
        name: (speeds[name], peak["ours"] / peak["plain"])
        for name, peak in peaks.items()
        if name in speeds
    }


def gain_section() -> str:
    """Section of README.md: two numbers, with the model and the hardware."""
    data = result(calls.WHOLE_CALLS)
    speed, share = compared()["W2"]
    return flow(
        f"""For {WORKLOADS["W2"].title}, a paged call is **{speed:.1f} times as fast** as plain `generate`, and its keys
        and values take **{share:.0%} of the memory**: `{data["model"]["name"]}` (random weights, bfloat16),
        {processor(data["facts"])}."""
    )


def headline_section() -> str:
    """Section of README.md: speed and memory in one table."""
    data = result(calls.WHOLE_CALLS)
    rows = [
        {
            "one call of `generate`": WORKLOADS[name].title,
            "plain's time / paged": f"{speed:.2f}",
            "paged memory / plain's": f"{share:.0%}",
        }
        for name, (speed, share) in compared().items()
    ]
    said = flow(
        f"""`{data["command"]}`, revision {data["facts"]["revision"]}: `{data["model"]["name"]}` with random weights in
        bfloat16, {processor(data["facts"])}. Memory: peak bytes of keys and values."""
    )
    return f"{report.markdown(rows)}\n\n{said}"


def engines_section() -> str:
    """Section of docs/guide/other-engines.md: whole calls beside engines for CPUs."""
    data = result(calls.PEERS[0])
    said = flow(
        f"""Seconds, less is better: `{data["model"]["name"]}` with random weights in bfloat16,
        {processor(data["facts"])}, revision {data["facts"]["revision"]}."""
    )
    return f"{calls.seconds_table(data)}\n\n{said}"


def benchmarks_section() -> str:
    """Section of docs/benchmarks.md."""
    parts = [
        flow(
            """Every figure from here to the end of this section is rendered by `python -m benchmarks.readme` from the
            JSON files in `benchmarks/results`; a test compares the two."""
        ),
        calls.whole_calls(result(calls.WHOLE_CALLS)),
        calls.processors(list(map(result, calls.PEERS))),
        calls.stages([result(name) for name in calls.PEERS if "int8" not in name]),
        calls.invariance(result(calls.INVARIANT)),
        *(module.BENCHMARK.section() for module in BEFORE),
        papers.quantized(list(map(result, papers.QUANTIZED))),
        *(module.BENCHMARK.section() for module in AFTER),
        papers.paper(result(papers.PAPER)),
        *papers.paper_turns(result(papers.PAPER)),
        papers.attention(result(papers.ATTENTION)),
        chips.compiled(result(chips.COMPILED)),
    ]
    return "\n\n".join(filter(None, parts))


def architectures_section() -> str:
    """Section of docs/guide/compatibility.md."""
    from tests.support.architecture_media import NOT_GIVEN

    return architectures.architectures(result(ARCHITECTURES), NOT_GIVEN)


def results_section() -> str:
    """Section of benchmarks/README.md."""
    names = {
        calls.WHOLE_CALLS: "whole calls, arrivals, memory",
        papers.ATTENTION: "attention alone",
        papers.PAPER: "the papers' tables (each table has a run of its own, listed below them)",
    }
    lines = []
    for name, title in names.items():
        data = result(name)
        files = f"[table](results/{name}.md), [JSON](results/{name}.json)"
        lines.append(f"- {title}: `{data['command']}`, {machine_of(data['facts'])}; {files}")
    facts = result(ARCHITECTURES)["facts"]
    lines.append(
        f"- every architecture against plain `generate`: `{result(ARCHITECTURES)['command']}`,"
        f" {machine_of(facts)}; [JSON](results/{ARCHITECTURES}.json)"
    )
    return "\n".join(lines)


def workloads_section() -> str:
    """Section of benchmarks/README.md, from the code of the workloads."""
    lines = [f"- {name}: {workload.title}" for name, workload in WORKLOADS.items()]
    shares = ", ".join(f"{share:g}" for share in arrivals.SHARES)
    lines.append(
        f"- arrivals: ShareGPT-like lengths (on a CPU an eighth of them), Poisson, at {shares} of"
        " the rate that the engine reaches when all requests wait; plain batches those that have"
        f" arrived, at most {arrivals.MAX_BATCH}"
    )
    return "\n".join(lines)


def gpu_day_section() -> str:
    """Section of benchmarks/gpu_day.md."""
    names = [name for name in gpu_day.NAMES if (report.RESULTS / f"{name}.json").exists()]
    return gpu_day.outcomes({name.rpartition("-")[2]: result(name) for name in names})


SECTIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {
        "badges": badges_section,
        "gain": gain_section,
        "headline": headline_section,
    },
    ROOT / "docs" / "benchmarks.md": {"benchmarks": benchmarks_section},
    ROOT / "docs" / "guide" / "compatibility.md": {"architectures": architectures_section},
    ROOT / "benchmarks" / "gpu_day.md": {"outcomes": gpu_day_section},
    ROOT / "docs" / "guide" / "other-engines.md": {"engines": engines_section},
    ROOT / "benchmarks" / "README.md": {"workloads": workloads_section, "results": results_section},
}


PICTURES: dict[str, Callable[[Any, Path], Any]] = {
    calls.WHOLE_CALLS: lambda data, stem: generate_tables.draw_all(data, stem),
    papers.PAPER: lambda data, stem: plots.draw_all(data, stem),
}
"""What draws the pictures of a result, beside its JSON file."""


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
        "--pictures": runner.flag("draw the pictures in benchmarks/results instead"),
    }
    arguments = runner.parser_of(__doc__, options).parse_args(argv)
    check, status = arguments.check, 0
    if arguments.pictures:
        for name, draw in PICTURES.items():
            draw(result(name), report.RESULTS / name)
        return 0
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
