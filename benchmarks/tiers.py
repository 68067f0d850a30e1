"""
Prefixes loaded from disk (`prefix_tiers`), against computing them again, in float32; 95% intervals.
A target is met where the interval reaches it.

    python -m benchmarks.tiers [--model qwen2.5-0.5b] [--tokens 2001] [--turns 5] [--only prefix|W3]
                               [--json PATH]

First row: time to first token in a new process, in turns for a prompt whose blocks another process
has left in the folder and for a new prompt of the same length. Second row: workload W3 a second
time, in a pool of a quarter of the blocks that it needs: evicted blocks are loaded from disk, or
computed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import hf_paged
from benchmarks import paired, runner, workloads
from benchmarks.models import SHAPES, build
from benchmarks.report import markdown
from benchmarks.systems import checked
from benchmarks.workloads import GREEDY, WORKLOADS, Batch, Workload
from hf_paged.tiers.store import PrefixStore


class Answer(NamedTuple):
    """`found`: prompt tokens whose blocks were there."""

    seconds: float
    tokens: list[list[int]]
    found: int


def text(length: int, vocab: int, seed: int) -> list[int]:
    return workloads.texts(random.Random(f"tiers {seed}"), [length], vocab)[0]


def engine_of(model: Any, path: str | None, **others: Any) -> hf_paged.PagedEngine:
    return hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_tiers=path, **others))  # type: ignore[arg-type]


def first_token(engine: hf_paged.PagedEngine, prompt: list[int]) -> Answer:
    """A call for a few tokens, with the seconds to the first."""
    (result,) = checked(engine.generate([prompt], {**GREEDY, "max_new_tokens": 4}))
    seconds = result.timings.first_token
    assert seconds is not None
    return Answer(seconds, [result.token_ids], result.num_prefix_hit_tokens)


def serve(engine: hf_paged.PagedEngine, batch: Batch) -> Answer:
    configs = [{**GREEDY, "max_new_tokens": new} for new in batch.new_tokens]
    results: list[Any] = []
    seconds = runner.seconds_of(lambda: results.extend(engine.generate(batch.prompts, configs)))
    tokens = [result.token_ids for result in checked(results)]
    return Answer(seconds, tokens, sum(result.num_prefix_hit_tokens for result in results))


def give_up(engine: hf_paged.PagedEngine) -> None:
    """Evicts all cached blocks; returns when they are on disk."""
    engine.memory.evict_cached()
    wait(engine)


def wait(engine: hf_paged.PagedEngine) -> None:
    for manager in engine.memory.managers.values():
        if isinstance(manager.tier, PrefixStore):
            manager.tier.wait()


def leave(name: str, path: str, length: int, turns: int) -> list[list[list[int]]]:
    """Computes the prompts of all turns, leaves their blocks in the folder and returns their first
    tokens."""
    found = []
    with engine_of(build(SHAPES[name], "cpu", torch.float32), path) as engine:
        for turn in range(-1, turns):
            found.append(first_token(engine, text(length, SHAPES[name].vocab, turn)).tokens)
            give_up(engine)
    return found


def first_tokens(name: str, path: str, length: int, turns: int) -> dict[str, list[Answer]]:
    """In a process that has computed none of these prompts: those on disk and new ones, with a
    warm-up turn."""
    vocab = SHAPES[name].vocab
    with engine_of(build(SHAPES[name], "cpu", torch.float32), path) as engine:
        # warm-up: checks, compilation, page faults of the weights
        first_token(engine, text(length, vocab, -2))
        arms = {
            "disk": lambda turn: first_token(engine, text(length, vocab, turn - 1)),
            "computed": lambda turn: first_token(engine, text(length, vocab, 1000 + turn)),
        }
        return runner.take_turns(arms, turns + 1)


def first_row(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as path:
        settings = args.model, path, args.tokens, args.turns
        expected = leave(*settings)
        (answers,) = runner.in_processes(1, first_tokens, *settings)
    size = int(hf_paged.PagedConfig.block_size)
    stored = (args.tokens - 1) // size * size
    equal = [answer.tokens for answer in answers["disk"]] == expected
    equal &= {answer.found for answer in answers["disk"]} == {stored}
    timed = {name: mine[1:] for name, mine in answers.items()}  # the first turn is a warm-up
    return row("first token, new process", equal, timed)


def row(what: str, equal: bool, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    seconds = {name: [answer.seconds for answer in mine] for name, mine in answers.items()}
    return {
        "what": what,
        "equal": "yes" if equal else "NO",
        "found": answers["disk"][-1].found,
        "disk_s": round(statistics.median(seconds["disk"]), 4),
        "computed_s": round(statistics.median(seconds["computed"]), 4),
        "ratios": paired.ratios(seconds["computed"], seconds["disk"]),
    }


def num_blocks(workload: Workload, batch: Batch) -> int:
    """Blocks of all rows at once; the common prefix counts once."""
    size = int(hf_paged.PagedConfig.block_size)
    shared = workload.prefix // size
    rows = zip(batch.prompts, batch.new_tokens)
    return shared + sum(-(-(len(prompt) + new) // size) - shared for prompt, new in rows)


def second_row(args: argparse.Namespace) -> dict[str, Any]:
    shape, workload = SHAPES[args.model], WORKLOADS["W3"].scaled(*args.scale)
    model = build(shape, "cpu", torch.float32)
    tokens: dict[int, list[list[list[int]]]] = {}
    with tempfile.TemporaryDirectory() as path:
        limit = num_blocks(workload, workload.batch(0, shape.vocab)) // 4
        engines = {
            "disk": engine_of(model, path, num_blocks=limit),
            "computed": engine_of(model, None, num_blocks=limit, preemption="recompute"),
        }

        def again(name: str, turn: int) -> Answer:
            batch = workload.batch(turn + 1, shape.vocab)
            before = serve(engines[name], batch)
            wait(engines[name])
            answer = serve(engines[name], batch)
            tokens.setdefault(turn, []).extend([before.tokens, answer.tokens])
            return answer

        arms = {name: (lambda turn, name=name: again(name, turn)) for name in engines}
        answers = runner.take_turns(arms, args.turns, warm_ups=1)
        for engine in engines.values():
            give_up(engine)
            engine.free()
    equal = all(mine[0] == other for mine in tokens.values() for other in mine)
    return row(f"{workload.name} again, a pool of {limit} blocks", equal, answers)


def run(args: argparse.Namespace) -> dict[str, Any]:
    made = {"prefix": first_row, "W3": second_row}
    rows = [make(args) for name, make in made.items() if name in args.only]
    return {"model": args.model, "tokens": args.tokens, "rows": rows}


def pooled(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs, a process each."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for run in runs:
        for row in run["rows"]:
            groups.setdefault((run["model"], row["what"], run["facts"]["revision"]), []).append(row)
    rows = []
    for (model, what, revision), parts in groups.items():
        ratios = [ratio for part in parts for ratio in part["ratios"]]
        faster = paired.estimate(ratios)
        limit = 5.0 if what.startswith("first token") else 1.0
        is_equal = all(part["equal"] == "yes" for part in parts)
        rows.append(
            {
                "model": model,
                "what": what,
                "revision": revision,
                "turns, processes": f"{len(ratios)}, {len(parts)}",
                "from the disk, s": statistics.median(part["disk_s"] for part in parts),
                "computed, s": statistics.median(part["computed_s"] for part in parts),
                "computed / from the disk": faster.text(2),
                "tokens, blocks found": "equal, all" if is_equal else "NOT equal",
                "target": f"at least {limit:g}: {paired.said(faster.high >= limit)}",
            }
        )
    return rows


BENCHMARK = runner.Benchmark(
    __doc__,
    run,
    lambda runs: [markdown(pooled(runs))],
    title="Prefixes from disk",
    results=(("tiers-cpu-1", "tiers-cpu-2", "tiers-w3-cpu-1", "tiers-w3-cpu-2"),),
    options={
        "--model": runner.MODEL | {"default": "qwen2.5-0.5b"},
        "--tokens": runner.option("of the prompt of the first row", type=int, default=2001),
    },
    turns=5,
    only="the first or the second row alone",
    known=("prefix", "W3"),
    fixed={"scale": (1.0, 1.0)},
    quick={"model": "llama-tiny", "tokens": 201, "turns": 1, "scale": (0.5, 0.25)},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
