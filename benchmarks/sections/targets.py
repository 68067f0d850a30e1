"""The roadmap's table: targets that the figures miss, and what would move them most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import report, tables
from benchmarks.peers import TITLES
from benchmarks.sections import overview

BEST = "the fastest other engine"
PROMPTS = "prompts and mixed steps through kernels of our own for many rows"
WEIGHTS = "steps of few rows, which read the weights slower than the memory allows"
THREADS = "a caller's own work between steps, and its wake; then the products of prompts"
PRODUCTS, MIXED = "products of many rows", "products of adapters in float32"
CODES = "products of one row, which take as long with codes as with bfloat16"
PYTHON = "the Python of a step and of its beams, beside which a tiny model computes little"
SHORT = "admission and recording, which cost more than 16 tokens of such a model"
CHECKS = "prompts, and checks of weights that change between calls"
DRAFTS = "drafts for the rows that gain alone: a step of 32 rows is bound by products"
CALLS, ENGINE, PAGED = ("generate", "plain"), ("engine", "plain"), ("paged", "plain")
TRAINER = "`Seq2SeqTrainer`'s evaluation, T5-small and `llama-24m`"
TINY, ADAPTERS = ".*, tiny, .*", "32 rows over 8 adapters"


class Target(NamedTuple):
    """The most that our time should be of another system's."""

    stage: str  # of `benchmarks.all`
    cases: str  # regular expression for the whole name of a case
    most: float  # our time over the other's
    lever: str  # what would move it most
    ours: str = "ours"  # a system of the rows
    other: str = BEST  # the system that it is compared with
    title: str = ""  # of the cases; empty: the workload's


TARGETS = (
    Target("whole", "W1", 1.0, PROMPTS),
    Target("whole", "W2", 1.0, PROMPTS),
    Target("whole", "W3", 1.0, PROMPTS),
    Target("whole", "W4", 0.9, WEIGHTS),
    Target("whole", "W5", 0.4, f"{WEIGHTS}; beams' bookkeeping in Python"),
    Target("whole", "W6", 1.0, WEIGHTS),
    Target("whole", "W9", 1.0, THREADS),
    Target("whole", "W10", 1.0, PRODUCTS),
    Target("whole", "W10", 1 / 1.3, PRODUCTS, other="plain"),
    Target("int8", "W6", 1.2, CODES, "ours", "OpenVINO GenAI", "W6 with 8-bit weights in both"),
    Target("encoders", ".*", 0.95, PYTHON, *CALLS, "T5-small, BART-base, Whisper-tiny"),
    Target("hybrids", ".*", 0.95, PYTHON, *CALLS, "hybrids and other architectures"),
    Target("encoders", TINY, 1.1, SHORT, *ENGINE, "tiny encoder-decoders on a `PagedEngine`"),
    Target("hybrids", TINY, 1.1, SHORT, *ENGINE, "tiny hybrids and others on a `PagedEngine`"),
    Target("trainer", ".*", 1.0, CHECKS, *PAGED, TRAINER),
    Target("rollouts", ".*", 1 / 2.2, CHECKS, *PAGED, "rollouts of TRL's GRPO, `llama-24m`"),
    Target("adapters", ".*", 1 / 3, MIXED, "together", "one adapter a forward", ADAPTERS),
    Target("adapters", ".*", 1 / 0.7, MIXED, "together", "one adapter", ADAPTERS),
    Target(
        "speculation",
        "W7.*",
        0.75,
        DRAFTS,
        "n-grams",
        "off",
        "32 rows of a tiny model with drafts (W7)",
    ),
)


class Measured(NamedTuple):
    """A case of a target: our time over the other system's."""

    share: float
    case: str
    other: str


def measured(target: Target) -> Iterator[Measured]:
    """Yields what the committed file has of a target."""
    systems = TITLES.values() if target.other == BEST else [target.other]
    rows = overview.rows_of(target.stage)
    for row in rows:
        is_meant = row["system"] == target.ours and re.fullmatch(target.cases, row["case"])
        if is_meant and row["seconds"] and (other := overview.fastest(rows, row["case"], systems)):
            share = 1 / tables.ratio_of(other, row).value
            yield Measured(share, row["case"], other["system"])


def missed() -> str:
    """Section of ROADMAP.md: the targets that medians miss, or that were not measured."""
    rows, met = [], []
    for target in TARGETS:
        title = target.title or overview.TITLE_OF[target.cases]
        other = overview.NAMES.get(target.other, target.other)
        cases = sorted(measured(target), reverse=True)
        over = [one for one in cases if one.share > target.most]
        if cases and not over:
            met.append(f"{title} beside {other} ({cases[0].share:.2f})")
            continue
        said = f"{over[0].share:.2f}" if over else "not measured"
        if over and target.other == BEST:
            said += f" ({over[0].other})"
        if len(cases) > 1:
            parts = [f"{one.share:.2f} ({one.case})" for one in over]
            said = f"above in {len(over)} of {len(cases)} cases: {'; '.join(parts)}"
        row = {"call": title, "beside": other, "at most": f"{target.most:.2f}"}
        rows.append(row | {"measured": said, "what would move it most": report.flow(target.lever)})
    data = report.result(overview.WHOLE)
    text = f"""Our time over that of another system, by medians; where a row names neither models nor architectures:
        {overview.hardware(data)} ([all figures](docs/benchmarks.md)). Of {len(TARGETS)} targets
        {len(met)} are met: {"; ".join(met) or "none"}. These are missed, or not measured:"""
    return f"{report.flow(text)}\n\n{report.markdown(rows, right=('at most',))}"
