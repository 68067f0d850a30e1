"""Blocks shared by the samples of a prompt."""

from __future__ import annotations

from benchmarks.paper.rows import NONE, PAPER, READ, TOLD, Published, Row, Size, ranged
from benchmarks.paper.serving import BLOCK_SIZE, OPT_13B_KV_BYTES
from benchmarks.paper.traces import ALPACA, SHAREGPT, Lengths, make_trace
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

SAMPLES = {
    "Alpaca-like": {2: "6.09", 4: "8.53", 6: "9.79"},
    "ShareGPT-like": {2: "16.2 to 30.5 over 2, 4, 6"},
}


def grow(manager: BlockManager, count: int, prompt: int, output: int) -> tuple[int, int, int]:
    """Grows `count` samples of one prompt token by token. Returns the blocks named in their tables
    and the blocks in use, each summed over the steps, and the peak in use.
    """
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


def sampling_saving(lengths: Lengths, count: int, requests: int, seed: int = 0) -> float:
    """Percent of the blocks saved by sharing over all steps of a trace; samples of a request are
    equally long."""
    trace = make_trace(lengths, requests, seed=seed)
    manager = manager_of(
        [PoolGroup(BlockPool((count + 1) * 2048 // BLOCK_SIZE))], BLOCK_SIZE, prefix_caching=False
    )
    named = taken = 0
    for prompt, output in zip(trace.prompts, trace.outputs):
        more = grow(manager, count, prompt, output)
        named, taken = named + more[0], taken + more[1]
    manager.check_integrity()
    return 100 * (1 - taken / named)


def sampling(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 6.3 and figure 15a: blocks saved by sharing over
    blocks without it.

    The same: mean lengths, blocks of 16, equally long samples, the average over all steps.
    Different: log-normal lengths, medians and ranges over several seeds. Ours is the engine's block
    manager with its forks and copy-on-write; the savings depend only on lengths, so no model runs.
    """
    rows = []
    requests = max(4, size.short // 125)
    for lengths in (ALPACA, SHAREGPT):
        for count in (2, 4, 6):
            seeds = range(size.seeds)
            saved = ranged([sampling_saving(lengths, count, requests, seed) for seed in seeds])
            found = SAMPLES[lengths.name].get(count)
            source = f"{PAPER}, figure 15a, section 6.3 ({READ})"
            published = Published(found, source, _WHY) if found else NONE
            name = f"saved by sharing, {count} samples, {lengths.name}"
            rows.append(Row(name, saved, "% of the blocks", *published))
    return rows


_WHY = (
    "the prompt's share of the tokens depends on the spread of the lengths and on how the two go"
    " together, which the paper does not give"
)


def example(size: Size) -> list[Row]:
    """16 samples of a prompt of 2048 tokens with 128 new tokens each, in gigabytes of OPT-13B's
    K/V, beside S4's figures for an unnamed model: 26.4 without sharing, 4.8 with it. The paper has
    neither figure, nor the 82 %: sharing among samples saves at most 30.5 % there (section 6.3,
    ShareGPT).

    Computed twice: by arithmetic, and from the blocks that the block manager of the engine takes.
    """
    count, prompt, output = 16, 2048, 128
    apart, together = count * (prompt + output), prompt + count * output
    manager = manager_of(
        [PoolGroup(BlockPool(count * 2048 // 4))], BLOCK_SIZE, prefix_caching=False
    )
    _, _, peak = grow(manager, count, prompt, output)
    gib = OPT_13B_KV_BYTES / 2**30
    why_apart = f"{apart} tokens of {OPT_13B_KV_BYTES} bytes; S4 does not name its model"
    ratio = (
        f"{apart / together:.3g} times less by S4's own formula, P + N O tokens against N (P + O)"
    )
    why_together = f"{together} tokens: {ratio}; S4's two figures are {26.4 / 4.8:.3g} times apart"
    prompt_shared = "the same, prompt shared, "
    together_there = Published("4.8", TOLD, why_together)
    saved, taken = 100 * (1 - peak * BLOCK_SIZE / apart), peak * BLOCK_SIZE * gib
    own = "16 samples of 2048 + 128, each with its own copy"
    return [
        Row(own, apart * gib, "GiB", "26.4", TOLD, why_apart),
        Row(f"{prompt_shared}by arithmetic", together * gib, "GiB", *together_there),
        Row(f"{prompt_shared}blocks that ours takes", taken, "GiB", *together_there),
        Row("saved", saved, "%", "82", TOLD, why_together),
    ]
