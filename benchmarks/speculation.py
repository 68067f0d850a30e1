"""Speculation: `PagedEngine` with drafts by n-grams against the same engine without, in turns, on a
model that the benchmark trains first. W7 and W8: 32 rows and 1 row that copy the text of their
prompt and replace some words. In float32 on the CPU, greedy, with new prompts in every turn, from
texts that the training did not have. The seconds of a turn are also shown by stage. A step that
verifies drafts computes more tokens than one without, and takes proportionally longer where
arithmetic is the bottleneck."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

import hf_paged
from benchmarks import runner, trained
from benchmarks.generate import timed
from benchmarks.systems import Answer, Engine, Generate
from benchmarks.workloads import Batch, Workload
from hf_paged.batching.execution.executor import Executor
from hf_paged.plan import StepPlan

LONGEST_DRAFT = 40  # tokens per row; prompts are longer
LENGTH = trained.TEXT_LENGTH
OFF, NGRAMS = "off", "n-grams"


@dataclass(frozen=True)
class Edits(Workload):
    """Texts of random words, to be edited."""

    @property
    def title(self) -> str:
        return f"{self.name}: {ROWS[self.name]}, edit a text of {LENGTH} words"

    def batch(self, repeat: int, vocab: int) -> Batch:
        words = random.Random(f"{self.name} {repeat}")
        prompts = [trained.edit(words, vocab)[0] for _ in range(self.num_prompts)]
        return Batch(prompts, [self.new_tokens[0]] * len(prompts))


ROWS = {"W7": "32 rows", "W8": "1 row"}
SIZES = (LENGTH + 2, LENGTH + 2), (LENGTH, LENGTH)
EDITS = {
    "W7": Edits("W7", 32, *SIZES, target=1 / 0.75),
    "W8": Edits("W8", 1, *SIZES, target=1 / 0.6),
}


def accepted_a_step(answer: Answer) -> list[float]:
    """Tokens per step of each row beyond the one that every step yields, after the prompt's
    step."""
    found = []
    for times in answer.times:
        later = [time for time in times if time > times[0]]
        found.append(len(later) / max(1, len(set(later))) - 1)
    return found


@contextlib.contextmanager
def stages() -> Iterator[dict[str, float]]:
    """Within it, seconds of the forwards: of prompts, and of steps."""
    spent: dict[str, float] = {}
    run = Executor.run

    def timed_run(self: Executor, plan: StepPlan) -> Any:
        seconds, logits = runner.clocked(lambda: run(self, plan))
        is_long = max(plan.counts, default=0) > LONGEST_DRAFT
        name = f"target, {'prompts' if is_long else 'steps'}, s"
        spent[name] = spent.get(name, 0.0) + seconds
        return logits

    with unittest.mock.patch.object(Executor, "run", timed_run):
        yield spent


def case_of(model: Any, workload: Workload, turns: int) -> Iterator[runner.Case]:
    """Turns of both, after warm-up turns in which steps of many sizes are recorded."""
    shape = trained.EDITOR
    systems = {OFF: Engine(), NGRAMS: Engine(hf_paged.PagedConfig(speculation="ngram"))}
    counts = dict.fromkeys(systems, (0, 0))

    def work(turn: int, name: str) -> runner.Turn:
        with stages() as spent:
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

    arms = runner.each(work, list(systems))
    yield runner.Case(workload.title, arms, {OFF: {NGRAMS: workload.target}})
    for system in systems.values():
        system.free()
    hf_paged.check_integrity(model)
    hf_paged.free(model)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = trained.editor(Path(folder), args.steps)
        for name in args.only:
            workload = EDITS[name]
            rows = min(args.rows, workload.num_prompts)
            yield from case_of(model, replace(workload, num_prompts=rows), args.turns)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Several tokens per step",
    results=(("speculation-cpu",),),
    turns=15,
    only="parts, by commas (all)",
    known=tuple(EDITS),
    is_exact=True,
    fixed={"warm_ups": 10, "steps": trained.STEPS, "rows": 32},
    quick={"turns": 1, "warm_ups": 1, "steps": 2, "rows": 3},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
