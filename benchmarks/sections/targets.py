"""The roadmap's table: targets that the figures miss, and what would move them most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import report, tables
from benchmarks.sections import overview

BEST = "the fastest other engine"
PROMPTS = "prompts and mixed steps through kernels of our own for many rows"
WEIGHTS = """steps of few rows, which read the weights slower than the memory allows; huge pages
    (`MADV_COLLAPSE`) help"""
PYTHON = "the Python of a step and of its beams, beside which a tiny model computes little"
SHORT = "admission and recording cost more than 16 tokens of such a model"


class Target(NamedTuple):
    """
    The most that our time should be of another system's.

    Args:
        stage (`str`): Of `benchmarks.all`.
        cases (`str`): Regular expression for the whole name of a case.
        ours, other (`str`): Systems of the rows; [`BEST`]: of other engines the fastest.
        most (`float`): Our time over the other's.
        lever (`str`): What would move it most.
        title (`str`): Of the cases; empty: the workload's.
    """

    stage: str
    cases: str
    ours: str
    other: str
    most: float
    lever: str
    title: str = ""


TARGETS = (
    Target("whole", "W1", "ours", BEST, 1.0, PROMPTS),
    Target("whole", "W2", "ours", BEST, 1.0, PROMPTS),
    Target("whole", "W3", "ours", BEST, 1.0, PROMPTS),
    Target("whole", "W4", "ours", BEST, 0.9, WEIGHTS),
    Target("whole", "W5", "ours", BEST, 0.4, f"{WEIGHTS}; beams' bookkeeping in Python"),
    Target("whole", "W6", "ours", BEST, 1.0, WEIGHTS),
    Target(
        "whole",
        "W9",
        "ours",
        BEST,
        1.0,
        """prompts that share a forward: calls wait for the model's lock while a step runs, so that
        eight prompts take several steps""",
    ),
    Target("whole", "W10", "ours", BEST, 1.0, "products of many rows"),
    Target("whole", "W10", "ours", "plain", 1 / 1.3, "products of many rows"),
    Target(
        "int8",
        "W6",
        "ours",
        "OpenVINO GenAI",
        1.2,
        """recorded steps that read the codes in place, as the code after revision bf2fe4f3 does
        ([changes](CHANGELOG.md)); then the speed of these products""",
        "W6 with 8-bit weights in both",
    ),
    Target(
        "encoders", ".*", "generate", "plain", 0.95, PYTHON, "T5-small, BART-base, Whisper-tiny"
    ),
    Target("hybrids", ".*", "generate", "plain", 0.95, PYTHON, "hybrids and other architectures"),
    Target(
        "encoders",
        ".*, tiny, .*",
        "engine",
        "plain",
        1.1,
        SHORT,
        "tiny encoder-decoders on a `PagedEngine`",
    ),
    Target(
        "hybrids",
        ".*, tiny, .*",
        "engine",
        "plain",
        1.1,
        SHORT,
        "tiny hybrids and others on a `PagedEngine`",
    ),
    Target(
        "trainer",
        ".*",
        "paged",
        "plain",
        1.0,
        "checks of weights that change between evaluations",
        "`Seq2SeqTrainer`'s evaluation",
    ),
    Target(
        "rollouts",
        ".*",
        "paged",
        "plain",
        1 / 2.2,
        "prompts, and checks of weights that change in each step",
        "rollouts of TRL's GRPO, `llama-24m`",
    ),
    Target(
        "adapters",
        ".*",
        "together",
        "one adapter a forward",
        1 / 3,
        "products of adapters in float32",
        "32 rows over 8 adapters",
    ),
    Target(
        "adapters",
        ".*",
        "together",
        "one adapter",
        1 / 0.7,
        "products of adapters in float32",
        "32 rows over 8 adapters",
    ),
    Target(
        "speculation",
        "W7.*",
        "n-grams",
        "off",
        0.75,
        "drafts for the rows that gain alone: a step of 32 rows is bound by products",
        "drafts by n-grams for 32 rows (W7)",
    ),
)


class Measured(NamedTuple):
    """A case of a target: our time over the other system's."""

    share: float
    case: str
    other: str


def measured(target: Target) -> Iterator[Measured]:
    """Yields what the committed file has of a target."""
    name = overview.FILES[target.stage]
    for row in report.result(name)["rows"] if report.exists(name) else ():
        is_meant = row["system"] == target.ours and re.fullmatch(target.cases, row["case"])
        if not (is_meant and row["seconds"]):
            continue
        rows, case = report.result(name)["rows"], row["case"]
        is_best = target.other == BEST
        other = (
            overview.fastest(rows, case) if is_best else tables.base_of(rows, case, target.other)
        )
        if other is not None:
            yield Measured(1 / tables.ratio_of(other, row).value, case, other["system"])


def missed() -> str:
    """Section of ROADMAP.md: the targets that medians miss, or that were not measured."""
    rows, met = [], []
    for target in TARGETS:
        title = target.title or overview.TITLE_OF[target.cases]
        found = sorted(measured(target), reverse=True)
        over = [one for one in found if one.share > target.most]
        if found and not over:
            met.append(f"{title} beside {target.other} ({found[0].share:.2f})")
            continue
        said = f"{over[0].share:.2f} ({over[0].other})" if over else "not measured"
        if len(found) > 1:
            parts = [f"{one.share:.2f} ({one.case})" for one in over]
            said = f"above in {len(over)} of {len(found)} cases: {'; '.join(parts)}"
        row = {"call": title, "beside": target.other, "at most": f"{target.most:.2f}"}
        rows.append(row | {"measured": said, "what would move it most": report.flow(target.lever)})
    data = report.result(overview.WHOLE)
    text = f"""Our time over that of another system, by medians; where a row names no model:
        {overview.hardware(data)} ([all figures](docs/benchmarks.md)). Of {len(TARGETS)} targets
        {len(met)} are met: {"; ".join(met) or "none"}. These are missed, or not measured:"""
    return f"{report.flow(text)}\n\n{report.markdown(rows, right=('at most',))}"
