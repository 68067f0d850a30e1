"""The scheduler alone, without a model: ShareGPT-like requests through schedule, append and finish
on one core.

Lengths are log-normal with ShareGPT's means from the PagedAttention paper (161 tokens in, 338 out;
arXiv 2309.06180, section 6.1). Time is CPU time of everything except adding the requests, over all
scheduled tokens, prompt tokens included. Waste is the share of allocated slots that hold no token,
over all steps.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks import runner
from benchmarks.report import markdown
from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

MEAN_IN, MEAN_OUT, SIGMA, LONGEST = 161, 338, 1.0, 2048
BLOCK_SIZE, MAX_TOKENS, MAX_SEQS = 16, 2048, 256
VOCABULARY = list(range(32000))


def log_normal(generator: random.Random, mean: float) -> int:
    """A length in tokens, at least 1 and at most `LONGEST`."""
    return max(
        1, min(LONGEST, round(generator.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)))
    )


def make_requests(count: int, generator: random.Random) -> list[Request]:
    """Requests with random prompts."""
    requests = []
    for number in range(count):
        prompt = generator.choices(VOCABULARY, k=log_normal(generator, MEAN_IN))
        new_tokens = log_normal(generator, MEAN_OUT)
        requests.append(Request(number, [Sequence(prompt)], len(prompt) + new_tokens))
    return requests


def simulate(
    num_waiting: int, num_blocks: int, num_tokens: int, measure_waste: bool = False
) -> dict[str, Any]:
    """Schedules at least `num_tokens` tokens, or all, with `num_waiting` requests in the queue at
    the start.

    Args:
        num_blocks (`int`): Blocks of the pool.
        measure_waste (`bool`): Whether to count slots and tokens after each step, outside the
            timing.
    """
    generator = random.Random(0)
    blocks = manager_of([PoolGroup(BlockPool(num_blocks))], BLOCK_SIZE)
    scheduler = Scheduler(
        Preemption(blocks), max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS
    )
    for request in make_requests(num_waiting, generator):
        scheduler.add(request)
    gc.collect()
    done = steps = preemptions = 0
    slots = held = 0
    seconds = 0.0
    while done < num_tokens and scheduler.has_unfinished:
        start = time.process_time()
        batch = scheduler.schedule()
        scheduler.commit(batch)
        done += batch.num_tokens
        for sequence in batch.sequences:
            if sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.token_ids.append(7)
                request = sequence.request
                if len(sequence.token_ids) >= request.max_num_tokens:
                    scheduler.finish(request)
        seconds += time.process_time() - start
        steps += 1
        preemptions += len(batch.preempted)
        if measure_waste:
            for table in blocks.tables(0):
                slots += len(table.block_ids) * BLOCK_SIZE
                held += table.num_tokens
    return {
        "waiting": num_waiting,
        "blocks": num_blocks,
        "tokens": done,
        "steps": steps,
        "us_per_token": round(1e6 * seconds / done, 3),
        "preemptions": preemptions,
        "waste_percent": round(100 * (slots - held) / slots, 2) if slots else None,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Best turn of every queue length; then waste, and preemptions in an undersized pool."""
    plenty = MAX_SEQS * 2 * LONGEST // BLOCK_SIZE

    def arm(length: int) -> Callable[[int], dict[str, Any]]:
        return lambda turn: simulate(length, plenty, args.tokens)

    turns = runner.take_turns({str(length): arm(length) for length in args.lengths}, args.turns)
    rows = [min(mine, key=lambda row: row["us_per_token"]) for mine in turns.values()]
    times = [row["us_per_token"] for row in rows]
    return {
        "rows": rows,
        "ratio": round(max(times) / times[0], 3),
        "waste": simulate(1_000, plenty, args.tokens, measure_waste=True),
        "small_pool": simulate(1_000, 2_000, args.tokens),
    }


def show(data: dict[str, Any]) -> list[str]:
    lines = []
    for row in [*data["rows"], data["small_pool"]]:
        blocks = f", {row['blocks']} blocks" if row is data["small_pool"] else ""
        line = {"waiting": f"{row['waiting']}{blocks}", "tokens scheduled": f"{row['tokens']}"}
        line["µs per token"] = f"**{row['us_per_token']}**"
        lines.append({**line, "preemptions": f"{row['preemptions']}"})
    waste = data["waste"]["waste_percent"]
    said = f"slowest / first: {data['ratio']}; waste at block size {BLOCK_SIZE}: {waste} %"
    return [markdown(lines), said]


main = runner.Benchmark(
    __doc__,
    run,
    show,
    turns=3,
    fixed={"lengths": (1_000, 10_000, 100_000, 1_000_000), "tokens": 400_000},
    quick={"lengths": (1_000, 10_000), "tokens": 30_000, "turns": 1},
).main

if __name__ == "__main__":
    raise SystemExit(main())
