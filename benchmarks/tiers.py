"""Prefixes loaded from disk (`prefix_tiers`), against computing them again, in float32. First case:
time to first token in a new process, in turns for a prompt whose blocks another process has left in
the folder and for a new prompt of the same length. Second case: workload W3 a second time, in a
pool of a quarter of the blocks that it needs: evicted blocks are loaded from disk, or computed."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import hf_paged
from benchmarks import runner, workloads
from benchmarks.models import SHAPES, build
from benchmarks.systems import served
from benchmarks.workloads import GREEDY, WORKLOADS, Batch, Workload
from hf_paged.tiers.store import PrefixStore

FOUND = "prompt tokens found"
BLOCK_SIZE = int(hf_paged.PagedConfig.block_size)


def text(length: int, vocab: int, seed: int) -> list[int]:
    return workloads.texts(random.Random(f"tiers {seed}"), [length], vocab)[0]


def engine_of(model: Any, path: str | None, **others: Any) -> hf_paged.PagedEngine:
    return hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_tiers=path, **others))  # type: ignore[arg-type]


def first_token(engine: hf_paged.PagedEngine, prompt: list[int]) -> runner.Turn:
    """A call for a few tokens, with the seconds to the first."""
    _, (result,) = served(engine, [prompt], {**GREEDY, "max_new_tokens": 4})
    seconds = result.timings.first_token
    assert seconds is not None
    return runner.Turn(seconds, [result.token_ids], {FOUND: result.num_prefix_hit_tokens})


def serve(engine: hf_paged.PagedEngine, batch: Batch) -> runner.Turn:
    configs = [{**GREEDY, "max_new_tokens": new} for new in batch.new_tokens]
    seconds, results = served(engine, batch.prompts, configs)
    tokens = [result.token_ids for result in results]
    hits = sum(result.num_prefix_hit_tokens for result in results)
    return runner.Turn(seconds, tokens, {FOUND: hits})


def wait(engine: hf_paged.PagedEngine, evicts: bool = False) -> None:
    """Returns when the blocks that are evicted, all cached ones if `evicts`, are on disk."""
    if evicts:
        engine.memory.evict_cached()
    for manager in engine.memory.managers.values():
        if isinstance(manager.tier, PrefixStore):
            manager.tier.wait()


def leave(name: str, path: str, length: int, turns: int) -> list[Any]:
    """Computes the prompts of all turns, leaves their blocks in the folder and returns their first
    tokens."""
    found = []
    with engine_of(build(SHAPES[name]), path) as engine:
        for turn in range(-1, turns):
            found.append(first_token(engine, text(length, SHAPES[name].vocab, turn)).tokens)
            wait(engine, evicts=True)
    return found


def first_tokens(args: argparse.Namespace) -> Iterator[runner.Case]:
    """In a process that has computed none of these prompts: those on disk and new ones."""
    shape, stored = SHAPES[args.model], (args.tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    with tempfile.TemporaryDirectory() as path:
        settings = args.model, path, args.tokens, args.turns
        (expected,) = runner.in_processes(1, leave, *settings)
        with engine_of(build(shape), path) as engine:
            # checks, compilation, page faults of the weights
            first_token(engine, text(args.tokens, shape.vocab, -2))

            def answer(turn: int, name: str) -> runner.Turn:
                is_new = name == "computed"
                prompt = text(args.tokens, shape.vocab, turn + 1000 * is_new)
                found = first_token(engine, prompt)
                right = expected[turn + 1], {FOUND: stored}
                if not is_new and (found.tokens, found.figures) != right:
                    raise RuntimeError(f"{found}, not {right}")
                return found._replace(tokens=None)

            arms = runner.each(answer, ("computed", "disk"))
            yield runner.Case("first token, new process", arms, {"computed": {"disk": 5.0}})
            wait(engine, evicts=True)


def num_blocks(workload: Workload, batch: Batch) -> int:
    """Blocks of all rows at once; the common prefix counts once."""
    shared = workload.prefix // BLOCK_SIZE
    rows = zip(batch.prompts, batch.new_tokens)
    return shared + sum(-(-(len(prompt) + new) // BLOCK_SIZE) - shared for prompt, new in rows)


def small_pool(args: argparse.Namespace) -> Iterator[runner.Case]:
    shape, workload = SHAPES[args.model], WORKLOADS["W3"].scaled(*args.scale)
    model = build(shape)
    limit = num_blocks(workload, workload.batch(0, shape.vocab)) // 4
    with tempfile.TemporaryDirectory() as path:
        engines = {
            "computed": engine_of(model, None, num_blocks=limit, preemption="recompute"),
            "disk": engine_of(model, path, num_blocks=limit),
        }

        def again(turn: int, name: str) -> runner.Turn:
            batch = workload.batch(turn + 1, shape.vocab)
            before = serve(engines[name], batch)
            wait(engines[name])
            answer = serve(engines[name], batch)
            if answer.tokens != before.tokens:
                raise RuntimeError(f"{name}: other tokens the second time")
            return answer

        arms = runner.each(again, list(engines))
        case = f"{workload.name} again, a pool of {limit} blocks"
        yield runner.Case(case, arms, {"computed": {"disk": 1.0}})
        for engine in engines.values():
            wait(engine, evicts=True)
            engine.free()


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    for name, more in {"prefix": first_tokens, "W3": small_pool}.items():
        if name in args.only:
            yield from more(args)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Prefixes from disk",
    results=(("tiers-cpu",), ("tiers-w3-cpu",)),
    said=lambda args: f"{args.model}, a prompt of {args.tokens} tokens",
    options={"--model": runner.MODEL | {"default": "qwen2.5-0.5b"}},
    turns=5,
    only="the first or the second case alone",
    known=("prefix", "W3"),
    is_exact=True,
    fixed={"tokens": 2001, "scale": (1.0, 1.0)},
    quick={"model": "llama-tiny", "tokens": 201, "turns": 1, "scale": (0.5, 0.25)},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
