"""Effect of the block size on throughput, and on recompute against swap."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, Shape
from benchmarks.paper.measured import A100, OPT_13B_SLOTS, model_of, serve, timed_steps
from benchmarks.paper.rows import PAPER, READ, Row, Size
from benchmarks.paper.serving import serve_paged
from benchmarks.paper.traces import ALPACA, SHAREGPT, make_trace
from hf_paged.batching.scheduling.preemption import CostModel
from hf_paged.cache.block_pool import BlockTable
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.swap import BlockSwapper
from hf_paged.config import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE

SIMULATED = (4, 8, 16, 32, 64, 128, 256)
ENGINE_SLOTS = 1024
SUPPORTED = tuple(size for size in SIMULATED if MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE)


def block_sizes(size: Size) -> list[Row]:
    """
    PagedAttention (arXiv 2309.06180), section 7.2 and figure 18b: performance over block sizes.

    The same: OPT-13B's slots and the data sets' mean lengths in the simulated rows. Different: the
    paper plots latency at one request rate; ours is requests (or tokens) per second relative to
    block size 16, with memory always short. Simulated rows include the waste of large blocks but
    not the kernel cost of small ones; measured rows include both: the engine on a real model in a
    fixed memory, with the sizes that `PagedConfig` accepts.
    """
    rows = []
    for lengths, said in (
        (SHAREGPT, "16 to 128 are best"),
        (ALPACA, "16 and 32 work well, larger ones degrade it"),
    ):
        trace = make_trace(lengths, size.short // 8)
        rates = {block: serve_paged(trace, A100, OPT_13B_SLOTS, block).rate for block in SIMULATED}
        rows += _relative(rates, f"simulated, {lengths.name}", said, _WHY)
    rows += _relative(
        engine_rates(size), f"measured, engine in {ENGINE_SLOTS} slots, {size.engine_shape}", "", ""
    )
    return rows


_WHY = (
    "the paper plots latency at one rate, which explodes once capacity falls below that; ours is"
    " the capacity itself, and a simulated step costs the same at any block size"
)


def _relative(rates: dict[int, float], name: str, said: str, why: str) -> list[Row]:
    source = f"{PAPER}, section 7.2 ({READ})" if said else ""
    return [
        Row(
            f"throughput at block size {block}, {name}",
            said,
            rate / rates[16],
            "of block size 16",
            source,
            why,
            {"block_size": block, "rate": rate, "series": name},
        )
        for block, rate in rates.items()
    ]


def sharegpt_pairs(size: Size) -> list[tuple[int, int]]:
    """Prompt and output lengths like ShareGPT's, cut so that a run takes about a second."""
    trace = make_trace(SHAREGPT, size.engine_requests, seed=2)
    return [
        (min(256, prompt), max(2, min(48, output // 16)))
        for prompt, output in zip(trace.prompts, trace.outputs)
    ]


def engine_rates(size: Size) -> dict[int, float]:
    """Tokens per second of the engine by block size, with equally many slots: medians of turns."""
    shape, model = SHAPES[size.engine_shape], model_of(size.engine_shape)
    pairs = sharegpt_pairs(size)

    def arm(block: int) -> Callable[[int], float]:
        config = {"block_size": block, "num_blocks": ENGINE_SLOTS // block}
        return lambda turn: serve(model, shape, pairs, config, seed=turn)[0]

    arms = {block: arm(block) for block in SUPPORTED}
    seconds = runner.take_turns(arms, max(1, size.repeats // 4))
    tokens = sum(output for _, output in pairs)
    return {block: tokens / statistics.median(taken) for block, taken in seconds.items()}


def preemption(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 7.3 and figure 19a: recomputing a preempted
    request's tokens against swapping its blocks out and in, over block sizes.

    The same: both in one unit; recompute does not depend on the block size. Different: the paper
    copies over PCIe between GPU and host; on a CPU both sides are host memory. Recompute is
    `CostModel`'s estimate after prefill steps of several sizes; swap is the measured time of
    `BlockSwapper` over all layers; `CostModel.choose` gives the engine's choice.
    """
    shape, model = SHAPES[size.shape], model_of(size.shape)
    cost = CostModel(1e9)
    timed_steps(model, shape, 1, 32, 1)  # warm-up
    for tokens in (32, 64, 128, 256, 64, 128, 256, 512)[: None if size.repeats > 1 else 3]:
        cost.observe_prefill(tokens, timed_steps(model, shape, 1, tokens, 1)[0][2])
    per_token = cost.seconds_per_token
    assert per_token is not None
    recompute = 1e3 * per_token * size.context
    rows = []
    for block, (out, back, num_bytes) in swap_seconds(shape, size).items():
        cost.observe_swap(num_bytes, out)
        swap = 1e3 * (out + back)
        figures = ((16, "swap far slower"), (65, "comparable"), (math.inf, "swap faster"))
        figure = next(said for least, said in figures if block < least)
        name = f"swap over recompute of {size.context} tokens, block size {block}"
        details = {"block_size": block, "swap_out_ms": 1e3 * out, "swap_in_ms": 1e3 * back}
        details["recompute_ms"] = recompute
        details["chosen"] = cost.choose(size.context, num_bytes)
        source = f"{PAPER}, section 7.3 ({READ})"
        rows.append(Row(name, figure, swap / recompute, "times", source, WHY_SWAP, details))
    return rows


WHY_SWAP = (
    "a copy within host memory has no PCIe transfers to set up, and a CPU computes a prompt slowly"
)


def swap_seconds(shape: Shape, size: Size) -> dict[int, tuple[float, float, int]]:
    """Median seconds to swap a request of `size.context` tokens out and in, and its bytes, by block
    size."""
    found: dict[int, tuple[float, float, int]] = {}
    state = torch.zeros(1, shape.kv_heads, 0, shape.head_dim, dtype=torch.bfloat16)
    for block in SUPPORTED:
        count = -(-size.context // block)
        memory = PagedMemory(hf_paged.PagedConfig(block_size=block))
        manager = memory.manager([GroupSpec()])
        (group,) = manager.groups
        group.make_room(4 * count)  # so that blocks return to other places
        for layer in range(shape.layers):
            for tensor in group.storage.make(layer, state, state).data:
                tensor.zero_()
        table = BlockTable(group.pool, block)
        table.append(size.context)
        request = SimpleNamespace(
            sequences=[SimpleNamespace(blocks=SimpleNamespace(tables=(table,)), swapped=None)]
        )
        swapper = BlockSwapper(manager)
        outs, backs = [], []
        for _ in range(size.repeats + 1):
            times = [time.perf_counter()]
            if not swapper.swap_out(request):
                raise MemoryError(f"the host has no room for {count} blocks of {block} tokens")
            times.append(time.perf_counter())
            swapper.swap_in(request)
            times.append(time.perf_counter())
            outs.append(times[1] - times[0])
            backs.append(times[2] - times[1])
        num_bytes = count * group.storage.block_bytes
        # the first is a warm-up
        found[block] = statistics.median(outs[1:]), statistics.median(backs[1:]), num_bytes
        table.free()
    return found
