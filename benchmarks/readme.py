"""
Renders the figures of README.md, docs and benchmarks/README.md from the committed JSON files, between their marks.

    python -m benchmarks.readme [--check]

No figure there is written by hand: `tests/regressions/test_truth.py` renders the text again and compares.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import arrivals, report
from benchmarks.sections import calls, features, flow, machine_of, papers, read, read_those
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "architectures"
STEPS = ("decode_step-cpu", "decode_step-cpu-1x512")


def headline_section() -> str:
    """Section of README.md: speed and memory in one table."""
    data = read(calls.WHOLE_CALLS)
    facts, titles = data["facts"], data["workloads"]
    peaks = {
        row["what"].split()[0]: f"{row['value']:.0f}%"
        for row in data["memory"]
        if "peak" in row["what"] and row["system"] == "ours" and not row["problem"]
    }
    rows = [
        {
            "call": titles[row["workload"]],
            "plain's time / ours": report.text(row["plain_over"]),
            "peak of K/V bytes, ours / plain's": peaks.get(row["workload"], ""),
        }
        for row in data["rows"]
        if row["system"] == "ours" and "plain_over" in row
    ]
    said = flow(
        f"""A random `{data["model"]["name"]}` in bfloat16 on {facts["cores"]} cores ({facts["cpu"]}),
        `{data["command"]}`, revision {facts["revision"]}:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def benchmarks_section() -> str:
    """Section of docs/benchmarks.md."""
    parts = [
        flow(
            """Every figure from here to the end of this section is rendered by `python -m benchmarks.readme` from the
            JSON files in `benchmarks/results`; a test compares the two."""
        ),
        calls.whole_calls(read(calls.WHOLE_CALLS)),
        calls.processors(list(map(read, calls.PEERS))),
        calls.stages([read(name) for name in calls.PEERS if "int8" not in name]),
        calls.invariance(read(calls.INVARIANT)),
        features.threads(read(features.THREADS)),
        *(features.products(read(name)) for name in features.LINEARS),
        features.rollouts(read(features.GRPO)),
        features.rollouts(read(features.BATCHES)),
        features.speculation([read(name) for name in features.SPECULATION]),
        features.draft_stages(read(features.DRAFT_STAGES)),
        features.tiers([read(name) for name in features.TIERS]),
        papers.quantized([read(name) for name in papers.QUANTIZED]),
        features.lora(read_those(features.LORA)),
        features.parallel(read_those(features.PARALLEL)),
        features.virtual(read_those(features.VIRTUAL)),
        features.side_by_side(read(features.SIDE_BY_SIDE)),
        papers.paper(read(papers.PAPER)),
        *papers.paper_turns(read(papers.PAPER)),
        papers.attention(read(papers.ATTENTION)),
    ]
    return "\n\n".join(filter(None, parts))


def architectures_section() -> str:
    """Section of docs/guide/compatibility.md."""
    from tests.support.architectures import section

    return section(read(ARCHITECTURES))


def results_section() -> str:
    """Section of benchmarks/README.md."""
    names = {
        calls.WHOLE_CALLS: "whole calls, arrivals, memory",
        papers.ATTENTION: "attention alone",
        papers.PAPER: "the papers' tables (each table has a run of its own, listed below them)",
    }
    lines = []
    for name, title in names.items():
        data = read(name)
        files = f"[table](results/{name}.md), [JSON](results/{name}.json)"
        lines.append(f"- {title}: `{data['command']}`, {machine_of(data['facts'])}; {files}")
    facts = read(ARCHITECTURES)["facts"]
    lines.append(
        f"- every architecture against plain `generate`: `{read(ARCHITECTURES)['command']}`, {machine_of(facts)}; "
        f"[JSON](results/{ARCHITECTURES}.json)"
    )
    for name in STEPS:
        facts = read(name)["machine"]
        lines.append(
            f"- one decode step through transformers' own loop, before there was an engine: {facts['date']}, revision "
            f"{facts['revision']}, {facts['cpu']}; [JSON](results/{name}.json)"
        )
    return "\n".join(lines)


def workloads_section() -> str:
    """Section of benchmarks/README.md, from the code of the workloads."""
    lines = [f"- {name}: {workload.title}" for name, workload in WORKLOADS.items()]
    shares = ", ".join(f"{share:g}" for share in arrivals.SHARES)
    lines.append(
        f"- arrivals: ShareGPT-like lengths (on a CPU an eighth of them), Poisson, at {shares} of the rate that the "
        f"engine serves when all wait; plain takes what has arrived, at most {arrivals.MAX_BATCH} prompts at a time"
    )
    return "\n".join(lines)


SECTIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"headline": headline_section},
    ROOT / "docs" / "benchmarks.md": {"benchmarks": benchmarks_section},
    ROOT / "docs" / "guide" / "compatibility.md": {"architectures": architectures_section},
    ROOT / "benchmarks" / "README.md": {"workloads": workloads_section, "results": results_section},
}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what it should be")
    check = parser.parse_args(argv).check
    status = 0
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
