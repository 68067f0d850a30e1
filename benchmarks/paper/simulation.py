"""The engine's scheduler and block manager on traces of lengths, without a model: the memory that
holds tokens, the requests that run at a time, and the blocks that samples share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks import runner
from benchmarks.paper import PAGED_ATTENTION, published, ranged
from benchmarks.paper.traces import ALPACA, SHAREGPT, SIGMA, SIGMAS, Lengths, Trace, make_trace
from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

MAX_SEQS, MAX_TOKENS = 256, 2048
BLOCK_SIZE = 16
OPT_13B_SLOTS = 15_700
"""K/V slots on an A100 of 40 GB (arXiv 2309.06180, table 1)."""
SPREAD = "the spread of the lengths is ours, since the paper gives only their means"
WHY_SHARED = (
    "the prompt's share of the tokens depends on the spread of the lengths and on how the two go"
    " together, which the paper does not give"
)
SAMPLES = {
    "Alpaca-like": {2: "6.09", 4: "8.53", 6: "9.79"},
    "ShareGPT-like": dict.fromkeys((2, 4, 6), "16.2 to 30.5 over 2, 4, 6"),
}
"""Figure 15a: percent of the blocks saved, by data set and number of samples."""


class Step(NamedTuple):
    """A step: its rows, their tokens, and the slots of their blocks."""

    rows: int
    held: int
    taken: int


def serve(trace: Trace, num_slots: int = OPT_13B_SLOTS) -> Iterator[Step]:
    """Our scheduler and block manager, as the engine runs them; only the forward is left out. All
    requests arrive at the start; yields the steps while some of them wait for room."""
    pool = BlockPool(num_slots // BLOCK_SIZE)
    blocks = manager_of([PoolGroup(pool)], BLOCK_SIZE, prefix_caching=False)
    options = {"max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": MAX_SEQS}
    scheduler = Scheduler(Preemption(blocks), **options)
    for number, (prompt, output) in enumerate(trace):
        scheduler.add(Request(number, [Sequence([0] * prompt)], prompt + output))
    while scheduler.queue.waiting:
        batch = scheduler.schedule()
        scheduler.commit(batch)
        held = sum(table.num_tokens for table in blocks.tables(0))
        if scheduler.queue.waiting:
            yield Step(len(batch), held, pool.num_used * BLOCK_SIZE)
        for sequence in batch.sequences:
            token_ids = sequence.token_ids
            if sequence.num_computed_tokens == len(token_ids):
                token_ids.append(0)
                if len(token_ids) >= sequence.request.max_num_tokens:
                    scheduler.finish(sequence.request)


@lru_cache(maxsize=1)
def steps_by_spread(requests: int, seeds: int) -> dict[float, list[list[Step]]]:
    """The steps of a trace for each seed, by the spread of its lengths."""
    return {
        sigma: [list(serve(make_trace(SHAREGPT, requests, seed, sigma))) for seed in range(seeds)]
        for sigma in SIGMAS
    }


def by_spread(args: argparse.Namespace, figure: Callable[[list[Step]], float]) -> str:
    """Median and range of a figure at `SIGMA`, and the medians at the other spreads."""
    found = steps_by_spread(max(60, args.requests // 4), args.seeds)
    values = {sigma: list(map(figure, traces)) for sigma, traces in found.items()}
    others = ", ".join(
        f"{statistics.median(values[one]):.1f} at spread {one:g}" for one in SIGMAS if one != SIGMA
    )
    return f"{ranged(values[SIGMA], '.1f')}; {others}"


def simulated(case: str, ours: str, columns: dict[str, Any]) -> runner.Case:
    """A case that takes no time."""
    arm = {"ours": lambda turn: runner.Turn(0.0)}
    return runner.Case(case, arm, turns=1, figures={"ours": ours, **columns})


def used_percent(steps: list[Step]) -> float:
    return 100 * sum(step.held for step in steps) / (OPT_13B_SLOTS * len(steps))


def empty_percent(steps: list[Step]) -> float:
    return 100 * (1 - sum(step.held for step in steps) / sum(step.taken for step in steps))


def waste(args: argparse.Namespace) -> Iterator[runner.Case]:
    """PagedAttention (arXiv 2309.06180), figure 2 and section 6.2: shares of the memory while
    requests wait for room.

    The same: OPT-13B's 15.7K slots, the data set's mean lengths, blocks of 16. Different:
    log-normal lengths instead of the data set; their spread is a free parameter, so medians and
    ranges are over several seeds at spread 1, with the medians at 0.5 and 1.5 beside them; averages
    over steps, not over time. Ours is the engine's scheduler and block manager.
    """
    source = f"{PAGED_ATTENTION}, figure 2"
    why = f"{SPREAD}; the 1 % that admission leaves to running requests is not used"
    there = published("96.3; with reservations 20.4 (longest) to 38.2 (exact)", source, why)
    yield simulated("waste: memory that holds tokens, %", by_spread(args, used_percent), there)
    there = published("under 4", source, SPREAD)
    title = f"waste: slots allocated and empty, blocks of {BLOCK_SIZE}, %"
    yield simulated(title, by_spread(args, empty_percent), there)


def batch_size(args: argparse.Namespace) -> Iterator[runner.Case]:
    """PagedAttention (arXiv 2309.06180), figure 13a: running requests in OPT-13B's 15.7K slots.

    The same: slots, mean lengths. Different: log-normal lengths of a free spread, as in `waste`;
    memory is always short, while the paper's trace has 2 requests per second.
    """
    ours = by_spread(args, lambda steps: statistics.mean(step.rows for step in steps))
    figure = "30.42; with reservations 7.00 (longest) to 13.62 (exact)"
    columns = published(figure, f"{PAGED_ATTENTION}, figure 13a", SPREAD)
    yield simulated(f"requests at a time in {OPT_13B_SLOTS} slots", ours, columns)


def grow(manager: BlockManager, count: int, prompt: int, output: int) -> tuple[int, int, int]:
    """Grows `count` samples of one prompt token by token. Returns the blocks named in their tables
    and the blocks in use, each summed over the steps, and the peak in use."""
    pool = manager.groups[0].pool
    first = manager.new()
    if not first.append(prompt):
        raise ValueError(
            f"a pool of {pool.num_blocks} blocks has no room for a prompt of {prompt} tokens"
        )
    rows = [first, *(first.fork() for _ in range(count - 1))]
    named = taken = peak = 0
    for _ in range(output):
        for row in rows:
            if not row.append(1):
                raise ValueError(
                    f"a pool of {pool.num_blocks} blocks has no room for {count} samples"
                )
        manager.flush_copies()
        named += sum(len(row.tables[0].block_ids) for row in rows)
        taken += pool.num_used
        peak = max(peak, pool.num_used)
    for row in rows:
        row.free()
    return named, taken, peak


def saved_percent(lengths: Lengths, count: int, requests: int, seed: int) -> float:
    """Percent of the blocks saved by sharing over all steps of a trace; samples of a request are
    equally long."""
    pool = BlockPool((count + 1) * 2048 // BLOCK_SIZE)
    manager = manager_of([PoolGroup(pool)], BLOCK_SIZE, prefix_caching=False)
    named = taken = 0
    for prompt, output in make_trace(lengths, requests, seed):
        more = grow(manager, count, prompt, output)
        named, taken = named + more[0], taken + more[1]
    manager.check_integrity()
    return 100 * (1 - taken / named)


def sharing(args: argparse.Namespace) -> Iterator[runner.Case]:
    """PagedAttention (arXiv 2309.06180), section 6.3 and figure 15a: blocks saved by sharing over
    blocks without it.

    The same: mean lengths, blocks of 16, equally long samples, the average over all steps.
    Different: log-normal lengths, medians and ranges over several seeds. Ours is the engine's block
    manager with its forks and copy-on-write; the savings depend only on lengths, so no model runs.
    """
    requests, source = max(4, args.requests // 125), f"{PAGED_ATTENTION}, figure 15a, section 6.3"
    for lengths in (ALPACA, SHAREGPT):
        for count, figure in SAMPLES[lengths.name].items():
            seeds = range(args.seeds)
            saved = ranged([saved_percent(lengths, count, requests, seed) for seed in seeds])
            name = f"blocks saved by sharing, {count} samples, {lengths.name}, %"
            yield simulated(name, saved, published(figure, source, WHY_SHARED))
