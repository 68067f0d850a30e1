"""Speculation: `PagedEngine` with it against the same engine without, in turns, on models that the
benchmark trains first.

    python -m benchmarks.speculation [--only W7,W8,random,assistants] [--turns 15] [--quick]
                                     [--json PATH]

W7 and W8: 32 rows and 1 row that copy the text of their prompt and replace some words (n-grams).
random: the same row counts, with text that never repeats. assistants: 8 rows of a model of 25
million parameters, with assistants of several sizes trained on the same text. All in float32 on the
CPU, greedy, with new prompts in every turn, from texts that the training did not have; 95%
intervals. A target is met where the interval reaches it. The seconds of a turn are also told by
stage. A step of the target that verifies candidates computes more tokens than one without, and
takes proportionally longer where arithmetic is the bottleneck.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import re
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

import hf_paged
from benchmarks import runner, tables, trained
from benchmarks.generate import timed
from benchmarks.models import SHAPES, Shape, build
from benchmarks.systems import Answer, Engine, Generate
from benchmarks.workloads import Batch, Workload
from hf_paged.batching.execution.executor import Executor
from hf_paged.plan import StepPlan

NO_COST, FASTER = 1.02, 1.2
"""Targets: ratio without repeats; speedup with an assistant of a tenth of the size."""
LONGEST_DRAFT = 40  # tokens per row; prompts are longer
OFF, NGRAMS, TENTH = "off", "n-grams", "assistant of 2.49M"
UNLIKE = replace(SHAPES["llama-tiny"], name="llama-tiny-8k", layers=4, vocab=8192)
"""Random weights over a vocabulary so large that practically no pair of words repeats."""


@dataclass(frozen=True)
class Texts(Workload):
    """Prompts that the training set did not have: `text` draws one from a vocabulary."""

    text: Callable[[random.Random, int], list[int]] | None = None

    def batch(self, repeat: int, vocab: int) -> Batch:
        words = random.Random(f"{self.name} {repeat}")
        assert self.text is not None
        prompts = [self.text(words, vocab) for _ in range(self.num_prompts)]
        return Batch(prompts, [self.new_tokens[0]] * len(prompts))


def edits(name: str, rows: int, target: float) -> Workload:
    length = trained.TEXT_LENGTH
    title = f"{name}: {rows} row{'s' * (rows > 1)}, edit a text of {length} words"
    sizes = (length + 2, length + 2), (length, length)
    options = {"target": target, "text": lambda *draw: trained.edit(*draw)[0]}
    return Texts(name, title, rows, *sizes, **options)


EDITS = {"W7": edits("W7", 32, 0.75), "W8": edits("W8", 1, 0.6)}
_MANY = "32 rows of random text, 32..256 words, 64 new"
_ONE = "one row of random text, 64 words, 64 new"
RANDOM = (
    Workload("random 32", _MANY, 32, (32, 256), (64, 64), target=NO_COST),
    Workload("random 1", _ONE, 1, (64, 64), (64, 64), target=NO_COST),
)
SPEECH = Texts(
    "assistants",
    "8 rows of a language, 48 words, 64 new",
    8,
    (48, 48),
    (64, 64),
    target=1 / FASTER,
    text=lambda words, vocab: trained.language(words, vocab, 48),
)


def accepted_a_step(answer: Answer) -> list[float]:
    """Tokens per step of each row beyond the one that every step yields, after the prompt's
    step."""
    found = []
    for times in answer.times:
        later = [time for time in times if time > times[0]]
        found.append(len(later) / max(1, len(set(later))) - 1)
    return found


@contextlib.contextmanager
def stages(target: Any) -> Iterator[dict[str, float]]:
    """Within it, seconds of the forwards: of the assistant, of the target's prompts, of its
    steps."""
    spent: dict[str, float] = {}
    run = Executor.run

    def timed_run(self: Executor, plan: StepPlan) -> Any:
        start = time.perf_counter()
        logits = run(self, plan)
        is_long = max(plan.counts, default=0) > LONGEST_DRAFT
        name = f"target, {'prompts' if is_long else 'steps'}, s"
        name = name if self.model is target else "assistant, s"
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
        return logits

    with unittest.mock.patch.object(Executor, "run", timed_run):
        yield spent


def case(
    model: Any, shape: Shape, workload: Workload, systems: Mapping[str, Engine], turns: int
) -> Iterator[runner.Case]:
    """Turns of every system, after warm-up turns in which steps of many sizes are recorded."""
    counts = dict.fromkeys(systems, (0, 0))
    least = 1 / workload.target if workload.target else None

    def work(turn: int, name: str) -> runner.Turn:
        with stages(model) as spent:
            seconds, answer, _ = timed(systems[name], model, shape, workload, turn)
        if name == OFF and turn == turns - 1:
            batch = workload.batch(turn, shape.vocab)
            if answer.rows != Generate()(model, shape, workload, batch).rows:
                raise RuntimeError("other tokens than plain generate's without speculation")
        stats, before = systems[name].engine.stats(), counts[name]
        counts[name] = stats.num_draft_tokens, stats.num_accepted_tokens
        proposed, accepted = (now - then for now, then in zip(counts[name], before))
        figures: dict[str, float] = {"all else, s": seconds - sum(spent.values()), **spent}
        if name != OFF:
            figures["acceptance, %"] = 100 * accepted / max(1, proposed)
            figures["accepted a row and step"] = statistics.mean(accepted_a_step(answer))
        return runner.Turn(seconds, answer.rows, figures)

    targets = {name: least for name in systems if least and (name == NGRAMS or name == TENTH)}
    yield runner.Case(workload.title, runner.each(work, list(systems)), {OFF: targets})
    for system in systems.values():
        system.free()
    hf_paged.check_integrity(model)
    hf_paged.free(model)


def break_even(sizes: Sequence[int], ratios: Sequence[float]) -> str:
    """Size at which an assistant breaks even, interpolated between two measured sizes over the
    logarithm of the size. `ratios`: times with over times without, from the smallest to the
    largest."""
    for size, larger, ratio, next_ratio in zip(sizes, sizes[1:], ratios, ratios[1:]):
        if (ratio <= 1) != (next_ratio <= 1):
            share = (1 - ratio) / (next_ratio - ratio)
            even = math.exp(math.log(size) + share * (math.log(larger) - math.log(size)))
            measured = f"computed between the measured {size / 1e6:.3g}M and {larger / 1e6:.3g}M"
            return f"break-even at an assistant of {even / 1e6:.3g}M: {measured}"
    kind = "all of the measured sizes are" if ratios[0] <= 1 else "none of the measured sizes is"
    return f"no break-even size: {kind} faster"


def notes(rows: Sequence[runner.Data]) -> Iterator[str]:
    """The break-even size, from the names of the assistants."""
    sizes: dict[int, runner.Data] = {}
    for row in rows:
        if size := re.search(r"assistant of ([\d.]+)M", row["system"]):
            sizes[round(1e6 * float(size[1]))] = row
    for off in rows:
        if off["system"] == OFF and sizes and off["case"] == next(iter(sizes.values()))["case"]:
            ratios = [1 / tables.ratio_of(off, row).value for row in sizes.values()]
            yield f"{break_even(list(sizes), ratios)}."


def few(workload: Workload, quick: bool) -> Workload:
    """The workload, with few rows if `quick`."""
    return replace(workload, num_prompts=min(3, workload.num_prompts)) if quick else workload


def ngrams(args: argparse.Namespace, model: Any, shape: Shape, workload: Workload) -> Any:
    systems = {OFF: Engine(), NGRAMS: Engine(hf_paged.PagedConfig(speculation="ngram"))}
    return case(model, shape, few(workload, args.quick), systems, args.turns)


def assistants(args: argparse.Namespace, folder: Path) -> Iterator[runner.Case]:
    """All assistants of one target, from the smallest to the largest; `quick`: two small models."""
    others, shape, steps = trained.ASSISTANTS, trained.TARGET, trained.SPEAKER_STEPS
    if args.quick:
        others, shape, steps = (trained.ASSISTANTS[0],), trained.ASSISTANTS[1], 2
    target, *helpers = (trained.speaker(each, folder, steps) for each in (shape, *others))
    systems: dict[str, Engine] = {OFF: Engine()}
    for helper in helpers:
        name = f"assistant of {helper.num_parameters() / 1e6:.3g}M"
        systems[name] = Engine(options={"assistant_model": helper})
    yield from case(target, shape, few(SPEECH, args.quick), systems, args.turns)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), 2 if args.quick else trained.EDITOR_STEPS
        if edited := [EDITS[part] for part in args.only if part in EDITS]:
            editor = trained.editor(trained.EDITOR, folder, steps)
            for workload in edited:
                yield from ngrams(args, editor, trained.EDITOR, workload)
        if "random" in args.only:
            unlike = build(UNLIKE)
            for workload in RANDOM:
                yield from ngrams(args, unlike, UNLIKE, workload)
        if "assistants" in args.only:
            yield from assistants(args, folder)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Several tokens per step",
    results=(("speculation-cpu",),),
    notes=notes,
    turns=15,
    only="parts, by commas (all)",
    known=("W7", "W8", "random", "assistants"),
    is_exact=True,
    fixed={"warm_ups": 10},
    quick={"turns": 1, "warm_ups": 1},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
