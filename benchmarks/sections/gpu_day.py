"""What was predicted of a GPU, and what `benchmarks.gpu_day` found there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report, tables
from benchmarks.report import machine_of
from benchmarks.runner import Data

NAME = "gpu_day"  # of the file that lists the stages
NOT_RUN = "not run yet"
LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"

Rows = Sequence[Data]
Outcome = Callable[[Rows], "str | None"]


class Prediction(NamedTuple):
    """
    Args:
        outcome (`Callable`): From the rows of the stage, the text of the cell; `None` if they do
            not have it.
    """

    stage: str
    what: str
    predicted: str
    outcome: Outcome


def milliseconds(case: str, system: str) -> Outcome:
    """Of a turn of a system."""

    def read(rows: Rows) -> str | None:
        row = tables.base_of(rows, case, system)
        return row and f"{report.text(1e3 * statistics.median(row['seconds']))} ms"

    return read


def figure(case: str, system: str, key: str, unit: str) -> Outcome:
    """A figure of a system."""

    def read(rows: Rows) -> str | None:
        row = tables.base_of(rows, case, system)
        found = None if row is None else row["figures"].get(key)
        return None if found is None else f"{report.text(found)} {unit}"

    return read


def ratio(case: str, base: str, system: str) -> Outcome:
    """The time of `base` over a system's."""

    def read(rows: Rows) -> str | None:
        pair = [tables.base_of(rows, case, name) for name in (base, system)]
        return None if None in pair else report.text(tables.ratio_of(*pair).value)  # type: ignore[arg-type]

    return read


def tokens(rows: Rows) -> str | None:
    equal = [row["equal"] == 1 for row in rows if "equal" in row]
    return f"{sum(equal)} of {len(equal)} equal" if equal else None


def tests(rows: Rows) -> str | None:
    counts = [row["figures"] for row in rows if "passed" in row["figures"]]
    lost = sum("problem" in row and row["system"] != "a test" for row in rows)
    passed, failed = (sum(one[key] for one in counts) for key in ("passed", "failed"))
    return f"{passed} passed, {failed + lost} failed" if counts else None


def bandwidth(rows: Rows) -> str | None:
    units = {"GB/s": "GB/s", "of bandwidth, %": "% of a copy's"}
    found = [figure(DECODE, "ours", key, unit)(rows) for key, unit in units.items()]
    return None if None in found else ", ".join(map(str, found))


DECODE = f"{LLAMA} decode 64 x 8192 16 bf16"
CHUNKS = f"{LLAMA} chunk 8 x 512 of 4096 16 bf16"
PREFILL = f"{LLAMA} prefill 8 x 1024 16 bf16"
PREDICTIONS = (
    Prediction("a", "kernels that give their reference's numbers", "all", tests),
    Prediction("b", "tokens of plain `generate` in float32", "all equal", tokens),
    Prediction(
        "c",
        f"decode kernel, 64 rows of 8192 tokens, heads of {LLAMA}",
        "3.8 of 4.3 TB/s",
        bandwidth,
    ),
    Prediction(
        "c",
        "8 chunks of 512 behind 3584 tokens, over contiguous SDPA",
        "at most 1",
        ratio(CHUNKS, "ours", "contiguous sdpa"),
    ),
    Prediction(
        "c",
        "8 prompts of 1024, over contiguous SDPA",
        "at most 1",
        ratio(PREFILL, "ours", "contiguous sdpa"),
    ),
    Prediction(
        "d",
        f"a token of one row, {QWEN}",
        "2.5 to 3 ms (56 launches a layer)",
        figure(f"{QWEN}, 1 x 16, ours", "ours", "TPOT p50, ms", "ms"),
    ),
    Prediction(
        "d",
        f"a token of one row, {LLAMA}",
        "6 to 6.5 ms (40 launches a layer)",
        figure(f"{LLAMA}, 1 x 16, ours", "ours", "TPOT p50, ms", "ms"),
    ),
    Prediction(
        "d",
        f"a step of 64 rows of 2048 tokens, {LLAMA}",
        "8.5 to 9.2 ms with small operations fused, as then (22 to 24 with rows of 8192)",
        figure(f"{LLAMA}, 64 x 2048, ours", "ours", "TPOT p50, ms", "ms"),
    ),
    Prediction(
        "d",
        f"the weights' fingerprint, {LLAMA}",
        "5 to 6 ms",
        milliseconds(f"{LLAMA}, a step", "fingerprint"),
    ),
    Prediction(
        "e",
        "W6, plain's time over ours",
        "at least 1",
        ratio(f"{LLAMA}, W6, engine", "plain", "ours"),
    ),
    Prediction(
        "e",
        "W1, plain's time over ours",
        "at least 1.3",
        ratio(f"{LLAMA}, W1, engine", "plain", "ours"),
    ),
    Prediction(
        "e",
        "W3, plain's time over ours",
        "at least 3",
        ratio(f"{LLAMA}, W3, engine", "plain", "ours"),
    ),
    Prediction(
        "e",
        "W3 with chunks as graphs, over without",
        "0.8 to 0.95",
        ratio(f"{QWEN}, W3, ours, chunks not recorded", "ours", "ours, chunks not recorded"),
    ),
    Prediction("f", "`pytest -m gpu`", "all pass", tests),
)


def outcomes(folder: Path) -> str:
    """The table, with the machine above it, and why stages failed: of the files of a run."""
    found, listed = {}, folder / f"{NAME}.json"
    for stage in dict.fromkeys(one.stage for one in PREDICTIONS):
        path = folder / f"{NAME}-{stage}.json"
        found |= {stage: report.read(path)} if path.exists() else {}
    facts = next((data["facts"] for data in found.values()), None)
    said = [f"{NOT_RUN.capitalize()}."]
    if facts:
        gpu = f"{facts.get('gpu', 'no GPU')}, driver {facts.get('driver', 'unknown')}"
        said = [f"{gpu}; {machine_of(facts)}"]
    rows = []
    for stage, what, predicted, outcome in PREDICTIONS:
        value = outcome(found[stage].get("rows", [])) if stage in found else None
        row = {"stage": stage, "what": what, "prediction": predicted}
        rows.append(row | {"outcome": value or NOT_RUN})
    entries = report.read(listed)["stages"] if listed.exists() else []
    failed = [f"- {one['name']}: {one['reason']}" for one in entries if one["reason"]]
    return "\n\n".join([*said, report.markdown(rows), *(["\n".join(failed)] if failed else [])])
