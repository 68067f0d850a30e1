"""The papers' tables (`benchmarks.paper`), and attention alone (`benchmarks.attention`)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.attention import BENCHMARK as ATTENTION_ALONE
from benchmarks.attention_peers import CONTIGUOUS, INT8
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


SHOWN = (
    ("qwen2.5-0.5b", "llama-3.1-8b"),
    (CONTIGUOUS, "ours", "HF sdpa", "HF eager", "flex_attention"),
)
"""Heads and contenders of `benchmarks.attention` in the documentation."""


def attention(data: Data) -> str:
    """The excerpt of `benchmarks.attention`: blocks of 16 in bfloat16."""
    heads, contenders = SHOWN
    rows = [
        {**row, "figures": {}}
        for row in data["rows"]
        if row["case"].startswith(heads)
        and row["case"].endswith(" 16 bf16")
        and row["system"] in contenders
    ]
    about, *shown = ATTENTION_ALONE.section(), *ATTENTION_ALONE.shown([{**data, "rows": rows}])
    more = f"""Other heads, block sizes and contenders, the portable path and float32:
        [{ATTENTION}.json](../benchmarks/results/{ATTENTION}.json)."""
    return "\n\n".join([about, *shown, flow(more)])


def quantized(runs: Sequence[Data]) -> str:
    """The rows of `benchmarks.attention` for `kv_dtype="int8"`, of the turns of all runs."""
    said = f"""**Attention of decodes over int8 blocks** (`kv_dtype="int8"`), a layer, against blocks of
        the model's dtype; turns of {len(runs)} processes:"""
    names = ("ours", INT8)
    ours = [{**run, "rows": [row for row in run["rows"] if row["system"] in names]} for run in runs]
    return "\n\n".join([flow(said), *ATTENTION_ALONE.shown(ours)])
