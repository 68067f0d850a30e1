"""Speculation: `PagedEngine` with it against the same engine without, in turns, on models that the
benchmark trains first.

    python -m benchmarks.speculation [--only W7,W8,random,assistants,stages] [--turns 15] [--quick]
                                     [--json PATH]

W7 and W8: 32 rows and 1 row that copy the text of their prompt and replace some words (n-grams).
random: the same row counts, with text that never repeats. assistants: 8 rows of a model of 25
million parameters, with assistants of several sizes trained on the same text. stages: time by stage
of a turn with the assistant of a tenth of the size. All in float32 on the CPU, greedy, with new
prompts in every turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import GenerationConfig

import hf_paged
from benchmarks import paired, trained
from benchmarks.generate import timed
from benchmarks.machine import facts
from benchmarks.models import PAD, SHAPES, Shape, build
from benchmarks.report import markdown
from benchmarks.systems import Answer, Engine, Generate, quiet
from benchmarks.workloads import GREEDY, Batch, Workload
from hf_paged.batching.execution.executor import Executor
from hf_paged.plan import StepPlan

PARTS = ("W7", "W8", "random", "assistants", "stages")
TURNS, WARM_UPS = 15, 10
ACCEPTED, NO_COST, FASTER = 2.0, 1.02, 1.2
"""Targets: accepted tokens per row and step; ratio without repeats; speedup with an assistant of a
tenth of the size."""
TENTH = "language-2.5m"
LONGEST_DRAFT = 40  # tokens per row; prompts are longer
OFF = "off"
UNLIKE = replace(SHAPES["llama-tiny"], name="llama-tiny-8k", layers=4, vocab=8192)
"""Random weights over a vocabulary so large that practically no pair of words repeats."""
COLUMNS = {
    "case": "case",
    "speculation": "speculation",
    "turns": "turns",
    "off_s": "off, s",
    "on_s": "on, s",
    "ratio": "on / off",
    "interval": "95% interval",
    "proposed": "proposed",
    "accepted": "accepted",
    "acceptance": "acceptance",
    "per_step": "accepted a row and step",
    "rows": "of the rows",
    "equal": "tokens as off",
    "plain": "tokens as plain",
    "target": "targets",
}


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
    return Edits(name, title, rows, (length + 2, length + 2), (length, length), 0, GREEDY, target)


EDITS = {"W7": edits("W7", 32, 0.75), "W8": edits("W8", 1, 0.6)}
RANDOM = (
    Workload(
        "random 32",
        "32 rows of random text, 32..256 words, 64 new",
        32,
        (32, 256),
        (64, 64),
        0,
        GREEDY,
        NO_COST,
    ),
    Workload(
        "random 1",
        "one row of random text, 64 words, 64 new",
        1,
        (64, 64),
        (64, 64),
        0,
        GREEDY,
        NO_COST,
    ),
)
SPEECH = Speech(
    "assistants", "8 rows of a language, 48 words, 64 new", 8, (48, 48), (64, 64), 0, GREEDY
)


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


@dataclass
class Turns:
    """
    Results of one system in each turn.

    Args:
        proposed, accepted (`list[int]`): Draft tokens computed, and accepted.
        per_step (`list[list[float]]`): Accepted tokens per step of each row; steps without drafts
            count.
        equal (`bool`): Whether all tokens equal those without speculation.
    """

    seconds: list[float] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    per_step: list[list[float]] = field(default_factory=list)
    equal: bool = True


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
) -> tuple[dict[str, Turns], bool]:
    """Runs turns of every system, in alternating order, after warm-up turns in which steps of many
    sizes are recorded; also returns whether the tokens without speculation are plain
    `generate`'s."""
    found = {name: Turns() for name in systems}
    names = list(systems)
    plain = Generate()(model, shape, workload, workload.batch(-1, shape.vocab)).rows
    is_plain = True
    for turn in tqdm(
        range(-1 if turns == 1 else -WARM_UPS, turns), desc=workload.name, disable=None
    ):
        rows: dict[str, list[list[int]]] = {}
        for name in names[::-1] if turn % 2 else names:
            seconds, answer, _ = timed(systems[name], model, shape, workload, turn)
            rows[name], mine = answer.rows, found[name]
            stats = systems[name].engine.stats()
            if turn >= -1:
                mine.proposed.append(stats.num_draft_tokens)
                mine.accepted.append(stats.num_accepted_tokens)
            if turn >= 0:
                mine.seconds.append(seconds[0])
                mine.per_step.append(accepted_a_step(answer))
        for name in names:
            found[name].equal &= rows[name] == rows[OFF]
        if turn == -1:
            is_plain = rows[OFF] == plain
    for name, engine in systems.items():
        mine = found[name]  # the engine's counters up to here
        mine.proposed = [b - a for a, b in zip(mine.proposed, mine.proposed[1:])]
        mine.accepted = [b - a for a, b in zip(mine.accepted, mine.accepted[1:])]
        engine.free()
    hf_paged.check_integrity(model)
    hf_paged.free(model)
    return found, is_plain


def row_of(workload: Workload, name: str, off: Turns, on: Turns, is_plain: bool) -> dict[str, Any]:
    """A row of the table; the caller adds targets."""
    slower = paired.ratios(on.seconds, off.seconds)
    by_row = [value for values in on.per_step for value in values]
    proposed, accepted = sum(on.proposed), sum(on.accepted)
    return {
        "case": workload.title,
        "speculation": name,
        "turns": len(slower),
        "off_s": statistics.median(off.seconds),
        "on_s": statistics.median(on.seconds),
        "ratio": statistics.median(slower),
        "interval": paired.span(paired.interval(slower) or (min(slower), max(slower))),
        "ratios": slower,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": f"{accepted / proposed:.1%}" if proposed else "none proposed",
        "acceptance_by_turn": [a / max(1, p) for a, p in zip(on.accepted, on.proposed)],
        "per_step": statistics.mean(by_row),
        "rows": paired.span(by_row),
        "equal": on.equal,
        "plain": is_plain,
    }


def ngrams(model: Any, shape: Shape, workload: Workload, turns: int) -> dict[str, Any]:
    """A row of the table, with the issue's targets."""
    systems = {OFF: Engine(), "n-grams": Engine(hf_paged.PagedConfig(speculation="ngram"))}
    found, is_plain = run(model, shape, workload, systems, turns)
    row = row_of(workload, "n-grams", found[OFF], found["n-grams"], is_plain)
    assert workload.target is not None
    row["limit"] = workload.target
    if not isinstance(workload, Edits):
        least = (paired.interval(row["ratios"]) or (min(row["ratios"]),))[0]
        row["target"] = f"interval of the ratio includes {paired.at_most(least, workload.target)}"
    else:
        accepted = f"accepted {paired.verdict([row['per_step']], ACCEPTED)}"
        row["target"] = f"{paired.at_most(row['ratio'], workload.target)}; {accepted}"
    return row


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
    found, is_plain = run(target, shape, workload, systems, turns)
    rows, sizes = [], []
    for name, helper in helpers.items():
        sizes.append(helper.num_parameters())
        label = (
            f"assistant of {sizes[-1] / 1e6:.3g}M, target of {target.num_parameters() / 1e6:.3g}M"
        )
        row = row_of(workload, label, found[OFF], found[name], is_plain)
        row["parameters"] = sizes[-1], target.num_parameters()
        if name == TENTH:
            row["limit"] = 1 / FASTER
            faster = paired.verdict([1 / ratio for ratio in row["ratios"]], FASTER)
            row["target"] = f"off / on {faster}"
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

    rows = []
    for name, system in {OFF: Engine(), "assistant of a tenth": Assisted(assistant=helper)}.items():
        found: dict[str, list[tuple[int, int, float]]] = {}
        Executor.run = timed_run  # type: ignore[method-assign]
        try:
            for turn in range(-min(turns, WARM_UPS), turns):
                spans.clear()
                seconds, _, _ = timed(system, target, shape, workload, turn)
                if turn < 0:
                    continue
                times = {stage: (len(some), *map(sum, zip(*some))) for stage, some in spans.items()}
                rest = seconds[0] - sum(spent for _, _, spent in times.values())
                for stage, numbers in {
                    **times,
                    "all else": (0, 0, rest),
                    "whole": (0, 0, seconds[0]),
                }.items():
                    found.setdefault(stage, []).append(numbers)
        finally:
            Executor.run = run  # type: ignore[method-assign]
            system.free()
        medians = {
            stage: [statistics.median(column) for column in zip(*numbers)]
            for stage, numbers in sorted(found.items())
        }
        for stage, (runs, tokens, spent) in medians.items():
            rows.append(
                {
                    "stage": f"{name}: {stage}",
                    "runs": runs or None,
                    "tokens": tokens / runs if runs else None,
                    "ms": 1e3 * spent / runs if runs else None,
                    "seconds": spent,
                    "share": f"{spent / medians['whole'][2]:.0%}",
                }
            )
    hf_paged.free(target)
    return rows


def few(workload: Workload, quick: bool) -> Workload:
    """The workload, with few rows if `quick`."""
    return replace(workload, num_prompts=min(3, workload.num_prompts)) if quick else workload


def edited(name: str, folder: Path, turns: int, quick: bool) -> list[dict[str, Any]]:
    """W7 or W8 with the editor in `folder`; the first call trains it."""
    shape, workload = trained.EDITOR, few(EDITS[name], quick)
    path = folder / shape.name
    model = (
        trained.load(path)
        if path.exists()
        else trained.editor(shape, folder, 2 if quick else trained.EDITOR_STEPS)
    )
    return [ngrams(model, shape, workload, turns)]


def unlike(turns: int, quick: bool) -> list[dict[str, Any]]:
    """Rows for text that never repeats."""
    model = build(UNLIKE, "cpu", torch.float32)
    return [ngrams(model, UNLIKE, few(workload, quick), turns) for workload in RANDOM]


def assisted(part: str, folder: Path, turns: int, quick: bool) -> list[dict[str, Any]]:
    """Rows for all assistants, or the stages of one; `quick`: two small models."""
    shape, others, steps = trained.TARGET, trained.ASSISTANTS, trained.SPEAKER_STEPS
    if part == "stages":
        others = tuple(other for other in others if other.name == TENTH)
    if quick:
        shape, others, steps = trained.ASSISTANTS[1], trained.ASSISTANTS[:1], 2
    made = {each.name: folder / each.name for each in (shape, *others)}
    models = {
        each.name: trained.load(made[each.name])
        if made[each.name].exists()
        else trained.speaker(each, folder, steps)
        for each in (shape, *others)
    }
    target = models.pop(shape.name)
    if part == "stages":
        return stages(target, shape, *models.values(), few(SPEECH, quick), turns)
    return assistants(target, shape, models, few(SPEECH, quick), turns)


def pooled(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs of one revision, a process each; a target is met
    if the interval of the ratio reaches it."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for each in runs for row in each["rows"]):
        found.setdefault((row["case"], row["speculation"]), []).append(row)
    rows = []
    for parts in found.values():
        first, slower = parts[0], [ratio for part in parts for ratio in part["ratios"]]
        span = paired.interval(slower) or (min(slower), max(slower))
        proposed, accepted = (
            sum(part[name] for part in parts) for name in ("proposed", "accepted")
        )
        limit = first.get("limit")
        rows.append(
            {
                "case": first["case"],
                "speculation": first["speculation"],
                "turns, processes": f"{len(slower)}, {len(parts)}",
                "off, s": statistics.median(part["off_s"] for part in parts),
                "on, s": statistics.median(part["on_s"] for part in parts),
                "on / off": f"{statistics.median(slower):.3f} ({span[0]:.3f} to {span[1]:.3f})",
                "acceptance": f"{accepted / proposed:.1%}" if proposed else "none proposed",
                "accepted a row and step": statistics.mean(part["per_step"] for part in parts),
                "tokens": "equal"
                if all(part["equal"] and part["plain"] for part in parts)
                else "NOT equal",
                "target": "" if limit is None else paired.at_most(span[0], round(limit, 3)),
            }
        )
    return rows


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines below the table."""
    found = [
        f"{row['case']}, {row['speculation']}: {row['target']}" for row in rows if "target" in row
    ]
    for row in rows:
        if "break_even_from" in row:
            size = row["break_even"]
            told = (
                "no break-even size"
                if size is None
                else f"break-even at an assistant of {size / 1e6:.3g}M"
            )
            found.append(f"{told}: {row['break_even_from']}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas (all)")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="hardly trained, few rows, one turn: only to see that it runs",
    )
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if unknown := [name for name in only if name not in PARTS]:
        parser.error(
            f"argument --only: invalid choice: {unknown[0]!r} (choose from {', '.join(PARTS)})"
        )
    found, turns = facts(), 1 if args.quick else args.turns
    stage_rows: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    transformers.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # exempt existing objects from garbage collection before every turn
    try:
        with quiet(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for part in only:
                if part in EDITS:
                    rows += edited(part, folder, turns, args.quick)
                elif part == "random":
                    rows += unlike(turns, args.quick)
                elif part == "stages":
                    stage_rows = assisted(part, folder, turns, args.quick)
                else:
                    rows += assisted(part, folder, turns, args.quick)
    finally:
        gc.unfreeze()
    tables = [
        markdown(some, columns) for some, columns in ((rows, COLUMNS), (stage_rows, STAGES)) if some
    ]
    print(*tables, *notes(rows), sep="\n\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"machine": found, "rows": rows, "notes": notes(rows), "stages": stage_rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
