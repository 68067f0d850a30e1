"""Stage (c): attention alone, at the heads of real models, by the code of
`benchmarks.attention`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import attention_data, ceilings
from benchmarks.attention import admit, measure, rows_of
from benchmarks.attention_data import Setting
from benchmarks.attention_peers import (
    CONTIGUOUS,
    AtenFlash,
    Contiguous,
    Ours,
    Peer,
    Quantized,
    Transformers,
    Varlen,
)
from benchmarks.ceilings import Ceilings
from benchmarks.gpu_day.record import Record

CASES = (
    ("llama-3.1-8b", "64 x 8192"),
    ("llama-3.1-8b", "8 x 1024"),
    ("llama-3.1-8b", "8 x 512 of 4096"),
    ("qwen3-0.6b", "64 x 1024"),
    ("llama-3.1-8b", "1 x 32768"),
)
"""Heads and rows x tokens, of `attention_data.settings`."""
NEEDED = (CONTIGUOUS, "ours")
REPEATS, SECONDS = 5, 0.03
COLUMNS = ("heads", "phase", "case", "contender")
FIGURES = (
    "gb_per_s",
    "bandwidth_share",
    "tflop_per_s",
    "matmul_share",
    "over_contiguous",
    "ours_over",
    "over_ours",
)


def run(record: Record) -> None:
    """A row for each contender of each case; medians of turns, by events around a graph of the
    calls."""
    limits = ceilings.measure(record.torch_device, record.is_fake)
    record.note_machine(ceilings=str(limits))
    settings = attention_data.settings("cpu" if record.is_fake else "cuda", record.is_fake)
    if not record.is_fake:
        known = {
            (one.shape.name, one.case.name): one
            for one in reversed(settings)
            if one.dtype == "bf16"
        }
        settings = [known[case] for case in CASES]
    missing: dict[str, str] = {}
    for setting in settings:
        if record.left < 4:
            record.add(case=setting.case.name, note="no time left")
            continue
        with record.guard(heads=setting.shape.name, case=setting.case.name), torch.no_grad():
            missing |= compare(record, setting, limits)
    record.add(missing="; ".join(f"{name}: {problem}" for name, problem in missing.items()))


def compare(record: Record, setting: Setting, limits: Ceilings) -> dict[str, str]:
    """Adds the rows of a case. Returns the contenders that did not run, with the reason of each."""
    data = attention_data.make(setting, record.is_fake)
    functions, problems = admit(contenders(), data)
    repeats, seconds = (2, 0.002) if record.is_fake else (REPEATS, SECONDS)
    times, recorded = measure(functions, data.layers, setting.device, repeats, seconds)
    for row in rows_of(setting, times, problems, limits):
        if row["contender"] in times or row["contender"] in NEEDED:
            record.add(**of_interest(row, recorded))
    return {name: problem for name, problem in problems.items() if name not in NEEDED}


def contenders() -> list[Peer]:
    """The contiguous ideal, ours, transformers' own, and the kernels that may be installed."""
    others = [Transformers("sdpa"), Varlen(), AtenFlash()]
    return [Contiguous(), Ours(""), Quantized(), *others]


def of_interest(row: dict[str, Any], recorded: set[str]) -> dict[str, Any]:
    """The row of the record: ours must give the reference's numbers, another contender may be
    missing."""
    name = row["contender"]
    found = {key: row[key] for key in COLUMNS} | {"us": row["time"]}
    found |= {key: row[key] for key in FIGURES if key in row}
    if "us" not in row:
        return found | ({"problem": row["time"]} if name in NEEDED else {})
    return found | {"timed": "a graph" if name in recorded else "calls"}
