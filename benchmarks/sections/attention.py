"""Attention alone (`benchmarks.attention`)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.attention import BENCHMARK as ATTENTION_ALONE
from benchmarks.attention_peers import CONTIGUOUS, INT8
from benchmarks.report import Row as Data
from benchmarks.report import flow

ATTENTION = "attention-cpu"
QUANTIZED = ("kv-int8-cpu-1", "kv-int8-cpu-2")
SHOWN = (
    ("qwen2.5-0.5b", "llama-3.1-8b"),
    (CONTIGUOUS, "ours", "HF sdpa"),
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
        [{ATTENTION}.json](../../benchmarks/results/{ATTENTION}.json)."""
    return "\n\n".join([about, *shown, flow(more)])


def quantized(runs: Sequence[Data]) -> str:
    """The rows of `benchmarks.attention` for `kv_dtype="int8"`, of the turns of all runs."""
    said = f"""**Attention of decodes over int8 blocks** (`kv_dtype="int8"`), a layer, against blocks of
        the model's dtype; turns of {len(runs)} processes:"""
    names = ("ours", INT8)
    ours = [{**run, "rows": [row for row in run["rows"] if row["system"] in names]} for run in runs]
    return "\n\n".join([flow(said), *ATTENTION_ALONE.shown(ours)])
