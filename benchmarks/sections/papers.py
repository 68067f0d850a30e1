"""The papers' tables (`benchmarks.paper`), and attention alone (`benchmarks.attention`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import paired, report
from benchmarks.paper.article import TABLES as S4_TABLES
from benchmarks.paper.rows import TOLD, TOLD_S1, TOLD_S2
from benchmarks.paper.vattention import TABLES as S1_TABLES
from benchmarks.report import Row as Data
from benchmarks.report import flow, machine_of

ATTENTION, PAPER = "attention-cpu", "paper-cpu"
QUANTIZED = ("kv-int8-cpu-1", "kv-int8-cpu-2")
COLUMNS = {
    "name": "what",
    "published": "published",
    "ours": "ours",
    "unit": "unit",
    "source": "published in",
}


def paper(data: Data) -> str:
    """The excerpt of `benchmarks.paper`."""
    tables = ("waste", "batch_size")
    rows = [row for row in data["rows"] if row["table"] in tables]
    made = "; ".join(dict.fromkeys(machine_of(data["runs"][name]["facts"]) for name in tables))
    said = flow(
        f"""**The papers' tables**, repeated with hf_paged: `{data["command"]}` simulates with the engine's own
        scheduler and block manager, so the machine hardly matters ({made}). Medians and ranges over seeds; the paper
        does not state the spread of the lengths' logarithms, so it is a constant here. "{TOLD}": the figure is not in
        the paper but in an article about it, one of the documents that this project started from. Every row, and why it
        differs:
        [{PAPER}.md](../benchmarks/results/{PAPER}.md)."""
    )
    picture = (
        "![Memory by use: reservation against blocks, published and"
        f" here](../benchmarks/results/{PAPER}-waste.png)"
    )
    return f"{said}\n\n{report.markdown(rows, COLUMNS)}\n\n{picture}"


def paper_turns(data: Data) -> list[str]:
    """The tables of S1 and of S4 in `benchmarks.paper`, as far as they were run: rows that have a
    published figure."""
    columns = COLUMNS | {"why": "what differs"}
    parts = []
    for names, title in (
        (
            S1_TABLES,
            f"""**vAttention's tables** (arXiv 2405.04437), repeated with hf_paged: rows at contiguous addresses
            (`storage="virtual"`), which code that knows nothing of blocks reads in place, against blocks with the
            kernel written for them, and against contiguous tensors. "{TOLD_S1}": the figure is from an article about
            that paper, one of the documents that this project started from.""",
        ),
        (
            S4_TABLES,
            f"""**S4's tables**, an article on the PagedAttention paper, and the figure of S2 for beams
            ("{TOLD_S2}"). Rows called computed were not measured: a roofline gives the time of each step.""",
        ),
    ):
        rows = [row for row in data["rows"] if row["table"] in names and row["published"]]
        if not rows:
            continue
        there = [name for name in names if name in data["runs"]]
        made = "; ".join(dict.fromkeys(machine_of(data["runs"][name]["facts"]) for name in there))
        said = flow(
            f"""{title} `{data["command"]} --only {" ".join(there)}` ({made}); medians, 95% intervals over turns of two
            processes. All rows: [{PAPER}.md](../benchmarks/results/{PAPER}.md)."""
        )
        parts.append(f"{said}\n\n{report.markdown(rows, columns)}")
    return parts


def attention(data: Data) -> str:
    """The excerpt of `benchmarks.attention`."""
    titles = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "llama-3.1-8b": "Llama-3.1-8B"}
    found: dict[tuple[str, str, str], dict[str, Data]] = {}
    for row in data["rows"]:
        if row["heads"] in titles and (row["block_size"], row["dtype"]) == (16, "bf16"):
            found.setdefault((row["heads"], row["phase"], row["case"]), {})[row["contender"]] = row
    rows = []
    for (heads, phase, case), by_name in found.items():
        line: dict[str, Any] = {"heads of": titles[heads], "phase": phase, "rows x tokens": case}
        for name, title in (("contiguous sdpa", "contiguous SDPA, µs"), ("ours", "ours, µs")):
            line[title] = round(statistics.median(by_name[name]["us"]))
        line["ours / contiguous"] = f"{by_name['ours']['over_contiguous']:.2f}"
        for name in ("HF sdpa", "HF eager", "flex_attention"):
            over = by_name.get(name, {}).get("over_contiguous")
            line[name] = "" if over is None else f"{over:.2f}"
        rows.append(line)
    said = flow(
        f"""**Attention alone** over a model's worth of layers, `{data["command"]}`, {machine_of(data["facts"])};
        medians in microseconds a layer. "Contiguous" is SDPA over contiguous keys and values at its best, the ideal
        without paging; the last four columns are times relative to it: above 1 is slower than the ideal:"""
    )
    more = flow(f"""More shapes, block sizes, the portable path and float32:
        [{ATTENTION}.md](../benchmarks/results/{ATTENTION}.md).
        The target for chunks and prompts is at most 1.02.""")
    return f"{said}\n\n{report.markdown(rows)}\n\n{more}"


def quantized(runs: Sequence[Data]) -> str:
    """The rows of `benchmarks.attention` for `kv_dtype="int8"`, of the turns of all runs."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for run in runs:
        for row in run["rows"]:
            if row["contender"] in ("ours", "ours: int8") and "us" in row:
                setting = row["heads"], row["case"], row["block_size"], row["dtype"]
                times.setdefault(setting, {}).setdefault(row["contender"], []).extend(row["us"])
    rows = []
    for (heads, case, block, dtype), found in times.items():
        ratios = paired.ratios(found["ours: int8"], found["ours"])
        ratio = paired.estimate(ratios)
        rows.append(
            {
                "heads": heads,
                "rows x tokens": case,
                "block": block,
                "blocks of the dtype": dtype,
                "their time, µs": statistics.median(found["ours"]),
                "int8, µs": statistics.median(found["ours: int8"]),
                "int8 / theirs": ratio.text(2),
                "turns": len(ratios),
                "target": paired.at_most(ratio.low, 0.8),
            }
        )
    said = flow(
        f"""**Attention of decodes over int8 blocks** (`kv_dtype="int8"`), a layer, `{runs[0]["command"]}`,
        {machine_of(runs[0]["facts"])}; turns of {len(runs)} processes, 95% intervals. A target is met where the
        interval reaches it:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"
