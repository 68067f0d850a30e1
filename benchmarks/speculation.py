"""Speculation: `PagedEngine` with it against the same engine without, in turns, on models that the
benchmark trains first.

    python -m benchmarks.speculation [--only W7,W8,random,assistants,stages] [--turns 15] [--quick]
                                     [--json PATH]

W7 and W8: 32 rows and 1 row that copy the text of their prompt and replace some words (n-grams).
random: the same row counts, with text that never repeats. assistants: 8 rows of a model of 25
million parameters, with assistants of several sizes trained on the same text. stages: time by stage
of a turn with the assistant of a tenth of the size. All in float32 on the CPU, greedy, with new
prompts in every turn, from texts that the training did not have; 95% intervals. A target is met
where the interval reaches it. A step of the target that verifies candidates computes more tokens
than one without, and takes proportionally longer where arithmetic is the bottleneck.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from benchmarks import paired, runner, trained
from benchmarks.generate import timed
from benchmarks.models import PAD, SHAPES, Shape, build
from benchmarks.report import markdown
from benchmarks.systems import Answer, Engine, Generate
from benchmarks.workloads import Batch, Workload
from hf_paged.batching.execution.executor import Executor
from hf_paged.plan import StepPlan

WARM_UPS = 10
NO_COST, FASTER = 1.02, 1.2
"""Targets: ratio without repeats; speedup with an assistant of a tenth of the size."""
TENTH = "language-2.5m"
LONGEST_DRAFT = 40  # tokens per row; prompts are longer
OFF = "off"
UNLIKE = replace(SHAPES["llama-tiny"], name="llama-tiny-8k", layers=4, vocab=8192)
"""Random weights over a vocabulary so large that practically no pair of words repeats."""


@dataclass(frozen=True)
class Edits(Workload):
    """Prompts and answers of `trained.edit`, from texts outside the training set."""

    def batch(self, repeat: int, vocab: int) -> Batch:
        words = random.Random(f"{self.name} {repeat}")
        pairs = [trained.edit(words, vocab) for _ in range(self.num_prompts)]
        return Batch([prompt for prompt, _ in pairs], [self.new_tokens[0]] * len(pairs))


@dataclass(frozen=True)
class Speech(Workload):
    """Prefixes of texts of `trained.language`, whose sentence orders the training did not
    contain."""

    def batch(self, repeat: int, vocab: int) -> Batch:
        words = random.Random(f"{self.name} {repeat}")
        prompts = [
            trained.language(words, vocab, self.prompt_lengths[0]) for _ in range(self.num_prompts)
        ]
        return Batch(prompts, [self.new_tokens[0]] * len(prompts))


def edits(name: str, rows: int, target: float) -> Workload:
    length = trained.TEXT_LENGTH
    title = f"{name}: {rows} row{'s' * (rows > 1)}, edit a text of {length} words"
    return Edits(name, title, rows, (length + 2, length + 2), (length, length), target=target)


EDITS = {"W7": edits("W7", 32, 0.75), "W8": edits("W8", 1, 0.6)}
_MANY = "32 rows of random text, 32..256 words, 64 new"
_ONE = "one row of random text, 64 words, 64 new"
RANDOM = (
    Workload("random 32", _MANY, 32, (32, 256), (64, 64), target=NO_COST),
    Workload("random 1", _ONE, 1, (64, 64), (64, 64), target=NO_COST),
)
SPEECH = Speech("assistants", "8 rows of a language, 48 words, 64 new", 8, (48, 48), (64, 64))


@dataclass
class Assisted(Engine):
    """
    An engine whose requests have an assistant.

    Args:
        assistant ([`PreTrainedModel`]): Assistant with the same vocabulary.
    """

    assistant: Any = None

    def add(self, prompt: list[int], new_tokens: int, options: dict[str, Any]) -> str:
        config = GenerationConfig(
            **options, max_new_tokens=new_tokens, pad_token_id=PAD, eos_token_id=None
        )
        return self.engine.add_request(prompt, config, assistant_model=self.assistant)


class Turn(NamedTuple):
    """
    One turn of a system.

    Args:
        proposed, accepted (`int`): Draft tokens computed, and accepted.
        per_step (`list[float]`): Accepted tokens per step of each row; steps without drafts count.
    """

    seconds: float
    proposed: int
    accepted: int
    per_step: list[float]


class Turns(NamedTuple):
    """
    The turns of a system.

    Args:
        equal, plain (`bool`): Whether all tokens equal those without speculation, and those of one
            turn without it plain `generate`'s.
    """

    turns: list[Turn]
    equal: bool
    plain: bool

    @property
    def seconds(self) -> list[float]:
        return [turn.seconds for turn in self.turns]


def accepted_a_step(answer: Answer) -> list[float]:
    """Tokens per step of each row beyond the one that every step yields, after the prompt's
    step."""
    found = []
    for times in answer.times:
        later = [time for time in times if time > times[0]]
        found.append(len(later) / max(1, len(set(later))) - 1)
    return found


def run(
    model: Any, shape: Shape, workload: Workload, systems: Mapping[str, Engine], turns: int
) -> dict[str, Turns]:
    """Turns of every system, after warm-up turns in which steps of many sizes are recorded."""
    plain = Generate()(model, shape, workload, workload.batch(-1, shape.vocab)).rows
    rows: dict[str, dict[int, list[list[int]]]] = {name: {} for name in systems}

    def arm(name: str, system: Engine) -> Callable[[int], Turn]:
        counts = [0, 0]

        def work(turn: int) -> Turn:
            seconds, answer, _ = timed(system, model, shape, workload, turn)
            rows[name][turn] = answer.rows
            stats, before = system.engine.stats(), counts.copy()
            counts[:] = stats.num_draft_tokens, stats.num_accepted_tokens
            proposed, accepted = (now - then for now, then in zip(counts, before))
            return Turn(seconds[0], proposed, accepted, accepted_a_step(answer))

        return work

    arms = {name: arm(name, system) for name, system in systems.items()}
    warm_ups = 1 if turns == 1 else WARM_UPS
    found = runner.take_turns(arms, turns, warm_ups, workload.name)
    for system in systems.values():
        system.free()
    hf_paged.check_integrity(model)
    hf_paged.free(model)
    is_plain = rows[OFF][-1] == plain
    return {name: Turns(mine, rows[name] == rows[OFF], is_plain) for name, mine in found.items()}


def row_of(workload: Workload, name: str, off: Turns, on: Turns) -> dict[str, Any]:
    """A row; the caller adds the limit of the ratio."""
    ratios = paired.ratios(on.seconds, off.seconds)
    by_row = [value for turn in on.turns for value in turn.per_step]
    proposed, accepted = (sum(column) for column in zip(*(turn[1:3] for turn in on.turns)))
    return {
        "case": workload.title,
        "speculation": name,
        "turns": len(ratios),
        "off_s": statistics.median(off.seconds),
        "on_s": statistics.median(on.seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance_by_turn": [turn.accepted / max(1, turn.proposed) for turn in on.turns],
        "per_step": statistics.mean(by_row),
        "equal": on.equal,
        "plain": on.plain,
    }


def share_of(accepted: int, proposed: int) -> str:
    return f"{accepted / proposed:.1%}" if proposed else "none proposed"


def ngrams(model: Any, shape: Shape, workload: Workload, turns: int) -> dict[str, Any]:
    """A row, with the limit that the issue sets."""
    systems = {OFF: Engine(), "n-grams": Engine(hf_paged.PagedConfig(speculation="ngram"))}
    found = run(model, shape, workload, systems, turns)
    row = row_of(workload, "n-grams", found[OFF], found["n-grams"])
    return {**row, "limit": workload.target}


def break_even(sizes: Sequence[int], ratios: Sequence[float]) -> tuple[float | None, str]:
    """Size in parameters at which an assistant breaks even, and how it is known: interpolated
    between two measured sizes over the logarithm of the size. Both inputs go from the smallest to
    the largest."""
    for size, larger, ratio, next_ratio in zip(sizes, sizes[1:], ratios, ratios[1:]):
        if (ratio <= 1) != (next_ratio <= 1):
            share = (1 - ratio) / (next_ratio - ratio)
            even = math.exp(math.log(size) + share * (math.log(larger) - math.log(size)))
            return even, f"computed between the measured {size / 1e6:.3g}M and {larger / 1e6:.3g}M"
    kind = "all of the measured sizes are" if ratios[0] <= 1 else "none of the measured sizes is"
    return None, f"{kind} faster"


def assistants(
    target: Any, shape: Shape, helpers: Mapping[str, Any], workload: Workload, turns: int
) -> list[dict[str, Any]]:
    """A row of the table per assistant, from the smallest to the largest; the last row has the
    break-even size."""
    systems: dict[str, Engine] = {OFF: Engine()}
    systems |= {name: Assisted(assistant=helper) for name, helper in helpers.items()}
    found = run(target, shape, workload, systems, turns)
    rows, sizes = [], []
    for name, helper in helpers.items():
        sizes.append(helper.num_parameters())
        label = (
            f"assistant of {sizes[-1] / 1e6:.3g}M, target of {target.num_parameters() / 1e6:.3g}M"
        )
        row = row_of(workload, label, found[OFF], found[name])
        row["parameters"] = sizes[-1], target.num_parameters()
        if name == TENTH:
            row["limit"] = 1 / FASTER
        rows.append(row)
    rows[-1]["break_even"], rows[-1]["break_even_from"] = break_even(
        sizes, [row["ratio"] for row in rows]
    )
    return rows


STAGES = {
    "stage": "stage of a turn",
    "runs": "forwards",
    "tokens": "tokens a forward",
    "ms": "ms a forward",
    "seconds": "s",
    "share": "share",
}


def stages(
    target: Any, shape: Shape, helper: Any, workload: Workload, turns: int
) -> list[dict[str, Any]]:
    """Time by stage, medians of turns: forwards of both models by number of tokens, and the
    rest."""
    spans: dict[str, list[tuple[int, float]]] = {}
    run = Executor.run

    def timed_run(self: Executor, plan: StepPlan) -> Any:
        start = time.perf_counter()
        logits = run(self, plan)
        kind = "prompts" if max(plan.counts, default=0) > LONGEST_DRAFT else "steps"
        name = f"{'assistant' if self.model is helper else 'target'}, {kind}"
        spans.setdefault(name, []).append((sum(plan.counts), time.perf_counter() - start))
        return logits

    def stages_of(turn: int, system: Engine) -> dict[str, tuple[float, ...]]:
        """Forwards, tokens and seconds of each stage."""
        spans.clear()
        seconds, _, _ = timed(system, target, shape, workload, turn)
        found = {stage: (len(some), *map(sum, zip(*some))) for stage, some in spans.items()}
        rest = seconds[0] - sum(spent for _, _, spent in found.values())
        return {**found, "all else": (0, 0, rest), "whole": (0, 0, seconds[0])}

    rows = []
    for name, system in {OFF: Engine(), "assistant of a tenth": Assisted(assistant=helper)}.items():
        arms = {name: functools.partial(stages_of, system=system)}
        with unittest.mock.patch.object(Executor, "run", timed_run):
            (found,) = runner.take_turns(arms, turns, min(turns, WARM_UPS)).values()
        system.free()
        by_stage = runner.joined({key: [each] for key, each in turn.items()} for turn in found)
        whole = statistics.median(spent for _, _, spent in by_stage["whole"])
        for stage, numbers in sorted(by_stage.items()):
            runs, tokens, spent = map(statistics.median, zip(*numbers))
            row: dict[str, Any] = {"stage": f"{name}: {stage}", "runs": runs or None}
            row["tokens"] = tokens / runs if runs else None
            row["ms"] = 1e3 * spent / runs if runs else None
            rows.append({**row, "seconds": spent, "share": f"{spent / whole:.0%}"})
    hf_paged.free(target)
    return rows


def few(workload: Workload, quick: bool) -> Workload:
    """The workload, with few rows if `quick`."""
    return replace(workload, num_prompts=min(3, workload.num_prompts)) if quick else workload


def trained_in(folder: Path, shape: Shape, train: Callable[..., Any], steps: int) -> Any:
    """The model of this shape in the folder; the first call trains it."""
    path = folder / shape.name
    return trained.load(path) if path.exists() else train(shape, folder, steps)


def edited(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """W7 or W8."""
    shape, workload = trained.EDITOR, few(EDITS[name], args.quick)
    steps = 2 if args.quick else trained.EDITOR_STEPS
    model = trained_in(folder, shape, trained.editor, steps)
    return [ngrams(model, shape, workload, args.turns)]


def unlike(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for text that never repeats."""
    model = build(UNLIKE, "cpu", torch.float32)
    return [ngrams(model, UNLIKE, few(workload, args.quick), args.turns) for workload in RANDOM]


def assisted(part: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for all assistants, or the stages of one; `quick`: two small models."""
    others = [each for each in trained.ASSISTANTS if part != "stages" or each.name == TENTH]
    shape, steps = trained.TARGET, trained.SPEAKER_STEPS
    if args.quick:
        others, shape, steps = [trained.ASSISTANTS[0]], trained.ASSISTANTS[1], 2
    target, *helpers = (
        trained_in(folder, each, trained.speaker, steps) for each in (shape, *others)
    )
    workload = few(SPEECH, args.quick)
    if part == "stages":
        return stages(target, shape, helpers[0], workload, args.turns)
    by_name = {other.name: helper for other, helper in zip(others, helpers)}
    return assistants(target, shape, by_name, workload, args.turns)


def pooled(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs of one revision, a process each; a target is met
    if the interval of the ratio reaches it."""
    rows = []
    for (case, name), parts in runner.grouped(runs, "case", "speculation").items():
        ratios = [ratio for part in parts for ratio in part["ratios"]]
        slower, limit = paired.estimate(ratios), parts[0].get("limit")
        proposed, accepted = (
            sum(part[name] for part in parts) for name in ("proposed", "accepted")
        )
        is_equal = all(part["equal"] and part["plain"] for part in parts)
        rows.append(
            {
                "case": case,
                "speculation": name,
                "turns, processes": f"{len(ratios)}, {len(parts)}",
                "off, s": statistics.median(part["off_s"] for part in parts),
                "on, s": statistics.median(part["on_s"] for part in parts),
                "on / off": slower.text(3),
                "acceptance": share_of(accepted, proposed),
                "accepted a row and step": statistics.mean(part["per_step"] for part in parts),
                "tokens": "equal" if is_equal else "NOT equal",
                "target": "" if limit is None else paired.at_most(slower.low, round(limit, 3)),
            }
        )
    return rows


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines below the table."""
    found = []
    for row in rows:
        if "break_even_from" in row:
            size, told = row["break_even"], "no break-even size"
            if size is not None:
                told = f"break-even at an assistant of {size / 1e6:.3g}M"
            found.append(f"{told}: {row['break_even_from']}")
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    stage_rows: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    transformers.logging.disable_progress_bar()
    with runner.frozen(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in args.only:
            if part in EDITS:
                rows += edited(part, folder, args)
            elif part == "random":
                rows += unlike(args)
            else:
                more = assisted(part, folder, args)
                (stage_rows if part == "stages" else rows).extend(more)
    return {"rows": rows, "notes": notes(rows), "stages": stage_rows}


def show(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    tables = (pooled(runs), None), (runs[0].get("stages", ()), STAGES)
    notes = [f"{note}." for run in runs for note in run["notes"] if "break-even" in note]
    return [*(markdown(rows, columns) for rows, columns in tables if rows), " ".join(notes)]


BENCHMARK = runner.Benchmark(
    __doc__,
    measure,
    show,
    title="Several tokens per step",
    results=(("speculation-cpu-1", "speculation-cpu-2"), ("speculation-stages-cpu",)),
    turns=15,
    only="parts, by commas (all)",
    known=("W7", "W8", "random", "assistants", "stages"),
    quick={"turns": 1},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
