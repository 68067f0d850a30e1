"""What was predicted of a GPU, and what `benchmarks.gpu_day` found there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.gpu_day.runner import STAGES
from benchmarks.report import Row as Data
from benchmarks.report import flow, machine_of

NAMES = tuple(f"gpu_day-{stage.name}" for stage in STAGES)
NOT_RUN = "not run yet"
LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"

Rows = Sequence[Mapping[str, Any]]


class Prediction(NamedTuple):
    """
    Args:
        outcome (`Callable`): From the rows of the stage, the text of the cell; `None` if they do
            not have it.
    """

    stage: str
    what: str
    predicted: str
    outcome: Callable[[Rows], str | None]


def value(key: str, unit: str = "", **match: Any) -> Callable[[Rows], str | None]:
    """The value of a key in the first row with these others."""

    def read(rows: Rows) -> str | None:
        row = next(
            (row for row in rows if key in row and all(row.get(k) == v for k, v in match.items())),
            None,
        )
        return None if row is None else f"{report.text(row[key])} {unit}".strip()

    return read


def tokens(rows: Rows) -> str | None:
    equal = [bool(row["equal"]) for row in rows if "equal" in row]
    return f"{sum(equal)} of {len(equal)} equal" if equal else None


def kernels(rows: Rows) -> str | None:
    found = [row for row in rows if "kernel" in row and "note" not in row]
    return f"{sum(not row['problem'] for row in found)} of {len(found)}" if found else None


def bandwidth(rows: Rows) -> str | None:
    ours = dict(case="64 x 8192", contender="ours", heads=LLAMA)
    found = value("GB/s", "GB/s", **ours)(rows), value("of bandwidth, %", "%", **ours)(rows)
    return f"{found[0]}, {found[1]} of a copy's" if None not in found else None


def chunks(rows: Rows) -> str | None:
    speeds = {
        row.get("system"): row.get("plain_over") for row in rows if row.get("workload") == "W3"
    }
    without, ours = speeds.get("ours, chunks not recorded"), speeds.get("ours")
    return None if without is None or ours is None else f"{without / ours:.3g}"


def suite(rows: Rows) -> str | None:
    for row in rows:
        if "counts" in row:
            return ", ".join(f"{number} {name}" for name, number in row["counts"].items())
    return None


def step(model: str, rows: int, length: int) -> Callable[[Rows], str | None]:
    return value("ms", "ms", model=model, case=f"{rows}x{length}", system="paged")


def call(name: str) -> Callable[[Rows], str | None]:
    return value("plain_over", model=LLAMA, workload=name, system="ours")


PREDICTIONS = (
    Prediction("a", "kernels that give their reference's numbers", "all", kernels),
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
        value("over_contiguous", case="8 x 512 of 4096", contender="ours", heads=LLAMA),
    ),
    Prediction(
        "c",
        "8 prompts of 1024, over contiguous SDPA",
        "at most 1",
        value("over_contiguous", case="8 x 1024", contender="ours", heads=LLAMA),
    ),
    Prediction(
        "d",
        f"a token of one row, {QWEN}",
        "2.5 to 3 ms (56 launches a layer)",
        step(QWEN, 1, 16),
    ),
    Prediction(
        "d",
        f"a token of one row, {LLAMA}",
        "6 to 6.5 ms (40 launches a layer)",
        step(LLAMA, 1, 16),
    ),
    Prediction(
        "d",
        f"a step of 64 rows of 2048 tokens, {LLAMA}",
        "8.5 to 9.2 ms with small operations fused, as then (22 to 24 with rows of 8192)",
        step(LLAMA, 64, 2048),
    ),
    Prediction(
        "d",
        f"the weights' fingerprint, {LLAMA}",
        "5 to 6 ms",
        value("fingerprint_ms", "ms", model=LLAMA),
    ),
    Prediction("e", "W6, plain's time over ours", "at least 1", call("W6")),
    Prediction("e", "W1, plain's time over ours", "at least 1.3", call("W1")),
    Prediction("e", "W3, plain's time over ours", "at least 3", call("W3")),
    Prediction("e", "W3 with chunks as graphs, over without", "0.8 to 0.95", chunks),
    Prediction("f", "`pytest -m gpu`", "all pass", suite),
)


def outcomes(results: Mapping[str, Data]) -> str:
    """
    The table, with the machine above it.

    Args:
        results (`Mapping`): The content of the JSON files that there are, by stage.
    """
    facts = {name: fact for data in results.values() for name, fact in data["facts"].items()}
    said = NOT_RUN.capitalize() + "."
    if facts:
        said = flow(
            f"""{facts.get("gpu", "no GPU")}, driver {facts.get("driver", "unknown")}; {machine_of(facts)}"""
        )
    rows = []
    for stage, what, predicted, outcome in PREDICTIONS:
        data = results.get(stage)
        found = None if data is None else outcome(data["rows"]) or data["status"]
        rows.append(
            {"stage": stage, "what": what, "prediction": predicted, "outcome": found or NOT_RUN}
        )
    return f"{said}\n\n{report.markdown(rows)}"
