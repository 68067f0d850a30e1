"""Stage (c): attention alone, at the heads of real models, by the code of
`benchmarks.attention`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import attention_data, ceilings, paired, runner
from benchmarks.attention import case_of
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
TURNS, SECONDS = 5, 0.03


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
        about = {"heads": setting.shape.name, "case": setting.case.name}
        if record.left < 4:
            record.add(**about, note="no time left")
            continue
        with record.guard(**about):
            for row in compare(setting, limits, record.is_fake):
                if "problem" in row and row["contender"] not in NEEDED:
                    missing[row["contender"]] = row["problem"]
                else:
                    record.add(**about, **row)
    record.add(missing="; ".join(f"{name}: {problem}" for name, problem in missing.items()))


def compare(setting: Setting, limits: Ceilings, is_fake: bool) -> list[dict[str, Any]]:
    """The rows of a case. Ours must give the reference's numbers, another contender may be
    missing."""
    turns, seconds = (2, 0.002) if is_fake else (TURNS, SECONDS)
    case = case_of(setting, contenders(), limits, is_fake, seconds)
    rows = {row["system"]: row for row in runner.rows_of_case(case, turns)}
    found = []
    for name, row in rows.items():
        line = {"phase": setting.case.phase, "contender": name}
        if "problem" in row:
            found.append(line | {"problem": row["problem"]})
            continue
        line |= {"us": 1e6 * statistics.median(row["seconds"]), **row["figures"]}
        for base, key in {CONTIGUOUS: "over_contiguous", "ours": "over_ours"}.items():
            if base != name and base in rows:
                over = paired.ratios(row["seconds"], rows[base]["seconds"])
                line |= {key: statistics.median(over)} if over else {}
        found.append(line)
    return found


def contenders() -> list[Peer]:
    """The contiguous ideal, ours, transformers' own, and the kernels that may be installed."""
    others = [Transformers("sdpa"), Varlen(), AtenFlash()]
    return [Contiguous(), Ours(""), Quantized(), *others]
