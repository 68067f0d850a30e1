"""Renders the figures of README.md, docs and benchmarks/README.md from the committed JSON files,
between their marks.

    python -m benchmarks.readme [--check | --pictures]

With `--pictures` it draws the results' pictures again, from the same files. No figure in the text
is written by hand: `tests/test_truth.py` renders it again and compares.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    arrivals,
    compiled,
    first_call,
    generate,
    grpo,
    linears,
    lora,
    parallel,
    pictures,
    report,
    runner,
    side_by_side,
    speculation,
    threads,
    tiers,
    virtual,
)
from benchmarks.paper import __main__ as paper
from benchmarks.paper import plots
from benchmarks.peers import TITLES
from benchmarks.report import flow, machine_of, picture_of, result
from benchmarks.sections import architectures, attention, gpu_day
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES, PAPER = "architectures", "paper-cpu"
WHOLE_CALLS = "generate-cpu-llama-100m"
PEERS = ("peers-cpu-llama-100m", "peers-cpu-llama-100m-avx2-w1", "peers-cpu-llama-100m-avx2-w6")
PEERS += ("int8-peers-cpu-llama-100m-avx2-w6",)
INVARIANT = "generate-invariant-cpu-llama-100m-avx2-w6"
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


def gain_section() -> str:
    """Section of README.md: two numbers, with the model and the hardware."""
    data = result(WHOLE_CALLS)
    plain, ours, speed = pictures.compared(data["rows"])["W2"]
    return flow(
        f"""For {WORKLOADS["W2"].title}, a paged call is **{speed:.1f} times as fast** as plain `generate`, and its keys
        and values take **{kv_share(plain, ours):.0%} of the memory**: {model_of(data)},
        {processor(data["facts"])}."""
    )


def kv_share(plain: runner.Data, ours: runner.Data) -> float:
    """Ours of plain's peak bytes of K/V."""
    return float(ours["figures"]["K/V, MiB"] / plain["figures"]["K/V, MiB"])


def model_of(data: Mapping[str, Any]) -> str:
    """The model of a run and its weights, from the title."""
    return str(data["title"].partition(". ")[0])


def headline_section() -> str:
    """Section of README.md: speed and memory in one table."""
    data = result(WHOLE_CALLS)
    rows = [
        {
            "one call of `generate`": WORKLOADS[name].title,
            "plain's time / paged": f"{speed:.2f}",
            "paged memory / plain's": f"{kv_share(plain, ours):.0%}",
        }
        for name, (plain, ours, speed) in pictures.compared(data["rows"]).items()
    ]
    said = flow(
        f"""`{data["command"]}`, revision {data["facts"]["revision"]}: {model_of(data)},
        {processor(data["facts"])}. Memory: peak bytes of keys and values."""
    )
    return f"{report.markdown(rows)}\n\n{said}"


def engines_section() -> str:
    """Section of docs/guide/other-engines.md: median seconds of whole calls beside engines for
    CPUs."""
    data, rows = result(PEERS[0]), []
    names = {"plain": "plain `generate`", "ours": "hf_paged", **dict.fromkeys(TITLES.values())}
    ran = {row["system"].partition(", batch")[0] for row in data["rows"]}
    titles = {name: title or name for name, title in names.items() if name in ran}
    for name in WORKLOADS:
        line = {"call": WORKLOADS[name].title}
        for system, title in titles.items():
            row = runner.base_of(data["rows"], name, system)
            line[title] = f"{statistics.median(row['seconds']):.3g}" if row else "not measured"
        rows.append(line)
    said = flow(
        f"""Seconds, less is better: {model_of(data)},
        {processor(data["facts"])}, revision {data["facts"]["revision"]}."""
    )
    table = report.markdown(rows, {key: key for key in rows[0]})
    return f"{table}\n\n{said}"


def other_engines() -> list[str]:
    """Of docs/benchmarks.md: other CPU engines."""
    said = flow(
        """**Other CPU engines** on the same weights (with `--int8` 8-bit weights, torchao's for plain and ours, their
        own for the others) and the same prompts. Each runs in a separate process and environment, in the versions of
        `benchmarks/peers/*.txt`, with as many threads. A run that names no settings had the engines' defaults: OpenVINO
        without its prefix cache, vLLM without tcmalloc, the AVX2 build of llama.cpp, no beams. Above 1, "ours / it" says
        that the engine is faster than ours. llama.cpp gets one turn, also in W6. Time until the last row's first token
        (prompts, and the rows that decode beside them) is TTFT p99; W6's target is 1.5 times the roofline:"""
    )
    parts = [said]
    for name in PEERS:
        parts += generate.BENCHMARK.shown([result(name)])
    parts.append(
        "**The same bits in any batch** (`PagedConfig(batch_invariant=True)`), against the engine without it:"
    )
    return parts + generate.BENCHMARK.shown([result(INVARIANT)])


def benchmarks_section() -> str:
    """Section of docs/benchmarks.md."""
    parts = [
        flow(
            """Every figure from here to the end of this section is rendered by `python -m benchmarks.readme` from the
            JSON files in `benchmarks/results`; a test compares the two."""
        ),
        "\n".join(f"- {name}: {workload.title}" for name, workload in WORKLOADS.items()),
        generate.BENCHMARK.section(),
        *picture_of(WHOLE_CALLS, "Speed of whole calls over plain generate, by workload"),
        *picture_of(f"{WHOLE_CALLS}-memory", "Memory of keys and values beside plain generate's"),
        *picture_of(f"{WHOLE_CALLS}-latency", "Latency by the rate of arrivals"),
        *other_engines(),
        *(module.BENCHMARK.section() for module in BEFORE),
        attention.quantized(list(map(result, attention.QUANTIZED))),
        *(module.BENCHMARK.section() for module in AFTER),
        *paper.sections(result(PAPER)),
        *picture_of(
            f"{PAPER}-waste", "Memory by use: reservation against blocks, published and here"
        ),
        attention.attention(result(attention.ATTENTION)),
        compiled.section(result("compiled")),
    ]
    return "\n\n".join(filter(None, parts))


def architectures_section() -> str:
    """Section of docs/guide/compatibility.md."""
    from tests.support.architecture_media import NOT_GIVEN

    return architectures.architectures(result(ARCHITECTURES), NOT_GIVEN)


def results_section() -> str:
    """Section of benchmarks/README.md."""
    names = {
        WHOLE_CALLS: "whole calls, arrivals, waste",
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
    WHOLE_CALLS: lambda data, stem: pictures.draw_all(data, stem),
    PAPER: lambda data, stem: plots.draw_all(data, stem),
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
