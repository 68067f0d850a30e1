"""
Prefixes loaded from disk, against computing them again.

    python -m benchmarks.tiers [--model qwen2.5-0.5b] [--tokens 2001] [--turns 5] [--only prefix|W3]
                               [--json PATH]

First row: time to first token in a new process, in turns for a prompt whose blocks another process
has left in the folder and for a new prompt of the same length. Second row: workload W3 a second
time, in a pool of a quarter of the blocks that it needs: evicted blocks are loaded from disk, or
computed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hf_paged
from benchmarks import paired
from benchmarks.machine import facts
from benchmarks.models import FIRST_WORD, SHAPES, build
from benchmarks.report import markdown
from benchmarks.workloads import WORKLOADS, Batch, Workload
from hf_paged.tiers.store import stores_of

COLUMNS = ("what", "equal", "found", "disk_s", "computed_s", "ratio", "interval", "turns")
QUICK = "llama-tiny"
GREEDY: dict[str, Any] = {"do_sample": False}


def text(length: int, vocab: int, seed: int) -> list[int]:
    words = random.Random(f"tiers {seed}")
    return [words.randrange(FIRST_WORD, vocab - 1) for _ in range(length)]


def engine_of(model: Any, path: str | None, **others: Any) -> hf_paged.PagedEngine:
    return hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_tiers=path, **others))  # type: ignore[arg-type]


def first_token(engine: hf_paged.PagedEngine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the tokens, and the number of prompt tokens found."""
    (result,) = engine.generate([prompt], {**GREEDY, "max_new_tokens": 4})
    if result.error is not None:
        raise result.error
    seconds = result.timings.first_token
    assert seconds is not None
    return seconds, result.token_ids, result.num_prefix_hit_tokens


def give_up(engine: hf_paged.PagedEngine) -> None:
    """Evicts all cached blocks; returns when they are on disk."""
    engine.memory.give_up_cached()
    for store in stores_of(engine.memory):
        store.wait()


def leave(name: str, path: str, length: int, turns: int) -> list[list[int]]:
    """Computes the prompts of all turns, leaves their blocks in the folder and returns their first
    tokens."""
    model = build(SHAPES[name], "cpu", torch.float32)
    found = []
    with engine_of(model, path) as engine:
        for turn in range(turns + 1):
            found.append(first_token(engine, text(length, SHAPES[name].vocab, turn))[1])
            give_up(engine)
    return found


def measure_first_tokens(name: str, path: str, length: int, turns: int) -> dict[str, Any]:
    """In a process that has computed none of these prompts: seconds for those on disk and for new
    ones."""
    shape = SHAPES[name]
    model = build(shape, "cpu", torch.float32)
    rows: dict[str, Any] = {"disk": [], "computed": [], "tokens": [], "found": []}
    with engine_of(model, path) as engine:
        # warm-up: checks, compilation, page faults of the weights
        first_token(engine, text(length, shape.vocab, -1))
        for turn in range(turns + 1):
            order = ["disk", "computed"] if turn % 2 else ["computed", "disk"]
            for kind in order:
                prompt = text(length, shape.vocab, turn if kind == "disk" else 1000 + turn)
                seconds, tokens, num_found = first_token(engine, prompt)
                rows[kind].append(seconds)
                if kind == "disk":
                    rows["tokens"].append(tokens)
                    rows["found"].append(num_found)
    return rows


def first_row(name: str, length: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as path:
        expected = leave(name, path, length, turns)
        arguments = [
            "--child",
            path,
            "--model",
            name,
            "--tokens",
            str(length),
            "--turns",
            str(turns),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tiers", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ,
            cwd=Path(__file__).resolve().parents[1],
        )
        rows = json.loads(done.stdout.splitlines()[-1])
    size = int(hf_paged.PagedConfig.block_size)
    equal = rows["tokens"] == expected and rows["found"] == [(length - 1) // size * size] * (
        turns + 1
    )
    disk, computed = rows["disk"][1:], rows["computed"][1:]  # the first turn is a warm-up
    return row("first token, new process", equal, rows["found"][0], disk, computed)


def row(
    what: str, equal: bool, found: int, disk: list[float], computed: list[float]
) -> dict[str, Any]:
    times_as_fast = paired.ratios(computed, disk)
    return {
        "what": what,
        "equal": "yes" if equal else "NO",
        "found": found,
        "disk_s": round(statistics.median(disk), 4),
        "computed_s": round(statistics.median(computed), 4),
        "ratio": round(statistics.median(times_as_fast), 2),
        "interval": paired.span(
            paired.interval(times_as_fast) or (min(times_as_fast), max(times_as_fast))
        ),
        "turns": len(disk),
        "ratios": times_as_fast,
    }


def num_blocks(workload: Workload, batch: Batch) -> int:
    """Blocks of all rows at once; the common prefix counts once."""
    size = int(hf_paged.PagedConfig.block_size)
    shared = workload.prefix // size
    rows = zip(batch.prompts, batch.new_tokens)
    return shared + sum(-(-(len(prompt) + new) // size) - shared for prompt, new in rows)


def serve(engine: hf_paged.PagedEngine, batch: Batch) -> tuple[float, list[list[int]], int]:
    start = time.perf_counter()
    configs = [{**GREEDY, "max_new_tokens": new} for new in batch.new_tokens]
    results = engine.generate(batch.prompts, configs)
    seconds = time.perf_counter() - start
    for result in results:
        if result.error is not None:
            raise result.error
    return (
        seconds,
        [result.token_ids for result in results],
        sum(result.num_prefix_hit_tokens for result in results),
    )


def second_row(name: str, workload: Workload, turns: int) -> dict[str, Any]:
    shape = SHAPES[name]
    model = build(shape, "cpu", torch.float32)
    times: dict[str, list[float]] = {"disk": [], "computed": []}
    equal, found = True, 0
    with tempfile.TemporaryDirectory() as path:
        limit = num_blocks(workload, workload.batch(0, shape.vocab)) // 4
        engines = {
            "disk": engine_of(model, path, num_blocks=limit),
            "computed": engine_of(model, None, num_blocks=limit, preemption="recompute"),
        }
        for turn in range(turns + 1):
            batch = workload.batch(turn, shape.vocab)
            answers = {}
            for kind in ("disk", "computed") if turn % 2 else ("computed", "disk"):
                engine = engines[kind]
                _, before, _ = serve(engine, batch)
                for store in stores_of(engine.memory):
                    store.wait()
                seconds, answers[kind], num_found = serve(engine, batch)
                equal &= before == answers[kind]
                if turn:  # the first is a warm-up
                    times[kind].append(seconds)
                    found = num_found if kind == "disk" else found
            equal &= answers["disk"] == answers["computed"]
        for engine in engines.values():
            give_up(engine)
            engine.free()
    return row(
        f"{workload.name} again, a pool of {limit} blocks",
        equal,
        found,
        times["disk"],
        times["computed"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if tokens differ, or blocks were not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2.5-0.5b", help="the shape")
    parser.add_argument("--tokens", type=int, default=2001, help="of the prompt of the first row")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--only", choices=("prefix", "W3"), help="the first or the second row alone"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small shape, few tokens, one turn: shows that it runs",
    )
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    name, length, turns = arguments.model, arguments.tokens, arguments.turns
    if arguments.child:
        print(json.dumps(measure_first_tokens(name, arguments.child, length, turns)))
        return 0
    workload = WORKLOADS["W3"]
    if arguments.quick:
        name, length, turns, workload = QUICK, 201, 1, workload.scaled(0.5, 0.25)
    machine = facts()
    rows = []
    if arguments.only != "W3":
        rows.append(first_row(name, length, turns))
    if arguments.only != "prefix":
        rows.append(second_row(name, workload, turns))
    print(
        f"{name}, float32, medians of {turns} turns; {machine['cpu']}, load"
        f" {machine['load_1min']}\n"
    )
    print(markdown(rows, {column: column for column in COLUMNS}))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"facts": machine, "model": name, "tokens": length, "rows": rows}, file, indent=1
            )
            file.write("\n")
    return int(any(each["equal"] != "yes" for each in rows))


if __name__ == "__main__":
    raise SystemExit(main())
