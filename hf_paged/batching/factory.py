"""Puts a `StepLoop` together for a model: packed where it can be, rows side by side where not."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cache.block_manager import BlockManager
from ..cache.groups import StateSpec
from ..cache.memory import GroupMemory, PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.states import state_layers
from ..cache.swap import BlockSwapper
from ..model.capability import packable, side_by_side
from ..model.self_check import Sides
from ..model.weights import WeightsGuard
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.rectangles import RectangleRunner
from .layout import PACKED, Layout
from .loop import StepLoop
from .request import Request
from .scheduling.cost import CostModel
from .scheduling.scheduler import Scheduler

UNLIMITED = 1 << 60


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """The cache that `generate` would build for the model, with nothing in it."""
    return PagedCache.from_empty(DynamicCache(config=model.config.get_text_config(decoder=True)), memory)


def choose_layout(model: PreTrainedModel, cache: PagedCache) -> Layout:
    """The best layout that `model` gives the right logits in; `cache`, built for it and empty, is only looked at."""
    unsupported_reason = packable(model, cache, PackedRunner)
    return (
        PACKED
        if unsupported_reason is None
        else Layout(unsupported_reason, side_by_side(model, cache, make_rectangles))
    )


def make_loop(model: PreTrainedModel, cache: PagedCache, layout: Layout, *, max_num_seqs: int) -> StepLoop:
    """
    A loop that runs forwards in this layout on the cache's memory.

    Args:
        cache ([`PagedCache`]): Built for the model and empty.
        max_num_seqs (`int`): Most sequences at the same time.
    """
    make = packed_loop if layout.unsupported_reason is None else rectangle_loop
    return make(model, cache, layout, max_num_seqs)


def packed_loop(model: PreTrainedModel, cache: PagedCache, layout: Layout, max_num_seqs: int) -> StepLoop:
    """`make_loop` for a model that `capability.packable` allows."""
    memory = cache.memory
    config = memory.config
    blocks = memory.manager(cache.groups)
    blocks.prefix_caching = config.prefix_caching
    groups = [group.blocks for group in cache.groups.values()]
    cost = CostModel(_copy_bandwidth(model.device)) if config.preemption == "auto" else None

    swapper = MeasuredSwapper(groups, blocks, cost)

    def choose(request: Request) -> str:
        assert cost is not None
        tokens = sum(sequence.num_computed_tokens for sequence in request.open_sequences)
        return cost.choose(tokens, swapper.num_held_bytes(request))

    guard = WeightsGuard(model, memory, blocks)
    scheduler = Scheduler(
        blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        preempt=choose if cost is not None else config.preemption,
        swapper=swapper,
        vouch=guard.vouch,
    )
    executor = Executor(model, memory, PackedRunner(model, cache), scheduler, guard)
    return StepLoop(executor, memory, blocks, scheduler, layout, cache.counters, cost, swapper)


class MeasuredSwapper(BlockSwapper):
    """A swapper that counts what it does and tells the cost model how long it took."""

    def __init__(self, groups: Sequence[GroupMemory], blocks: BlockManager, cost: CostModel | None) -> None:
        super().__init__(groups, blocks.flush_copies)
        self.cost, self.num_swaps = cost, 0

    def num_held_bytes(self, request: Request) -> int:
        """Bytes of the request's distinct blocks, over all layers."""
        rows = [sequence.blocks.tables for sequence in request.open_sequences]
        return sum(
            len({block_id for tables in rows for block_id in tables[i].block_ids}) * group.storage.block_bytes
            for i, group in enumerate(self.groups)
        )

    def swap_out(self, request: Request) -> bool:
        """As `BlockSwapper.swap_out`."""
        num_bytes, start = self.num_held_bytes(request), time.perf_counter()
        done = super().swap_out(request)
        if done:
            self.num_swaps += 1
            if self.cost is not None and num_bytes:
                self.cost.observe_swap(num_bytes, time.perf_counter() - start)
        return done


def make_rectangles(model: PreTrainedModel, cache: PagedCache, sides: Sides) -> tuple[BlockManager, RectangleRunner]:
    """What runs rows side by side, and what gives these their blocks."""
    specs, states = list(cache.groups), None
    if not sides.rows or state_layers(cache):
        specs.append(StateSpec())
        states = cache.memory.group(StateSpec()).storage
    blocks = cache.memory.manager(specs)
    blocks.prefix_caching = False  # it would need the states at the end of each block
    return blocks, RectangleRunner(model, cache, states, sides)


def rectangle_loop(model: PreTrainedModel, cache: PagedCache, layout: Layout, max_num_seqs: int) -> StepLoop:
    """`make_loop` for any other decoder-only model."""
    blocks, runner = make_rectangles(model, cache, layout.sides)
    scheduler = Scheduler(
        blocks, max_num_batched_tokens=UNLIMITED, max_num_seqs=max_num_seqs, chunks=False, replays=layout.sides.replays
    )
    executor = Executor(model, cache.memory, runner, scheduler, guard=None)
    return StepLoop(executor, cache.memory, blocks, scheduler, layout, cache.counters)


@functools.lru_cache
def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy between host memory and `device`, by one copy of 8 MB, the first time."""
    source = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    source.to("cpu", copy=True)
    start = time.perf_counter()
    source.to("cpu", copy=True)
    return source.numel() / max(time.perf_counter() - start, 1e-9)
