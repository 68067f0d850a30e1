"""The layout of a model's forwards, packed where it can be and else rectangles, and the `StepLoop` that runs them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cache.block_manager import BlockManager
from ..cache.groups import StateSpec
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.states import state_layers
from ..cache.swap import BlockSwapper
from ..model import capability
from ..model.capability import Layout
from ..model.weights import WeightsGuard
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.rectangles import RectangleRunner
from .loop import StepLoop
from .request import Request
from .scheduling.preemption import CostModel, Preemption
from .scheduling.scheduler import Scheduler

UNLIMITED = 1 << 60


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """The cache that `generate` would build for the model, with nothing in it."""
    return PagedCache.from_empty(DynamicCache(config=model.config.get_text_config(decoder=True)), memory)


def choose_layout(model: PreTrainedModel, cache: PagedCache) -> Layout:
    """As `capability.choose_layout`."""
    return capability.choose_layout(model, cache, PackedRunner, make_rectangles)


def make_loop(model: PreTrainedModel, cache: PagedCache, layout: Layout, *, max_num_seqs: int) -> StepLoop:
    """
    A loop that runs forwards in this layout, for at most `max_num_seqs` sequences at a time, on the memory of `cache`,
    which was built for the model and is empty.
    """
    memory, config = cache.memory, cache.memory.config
    if layout.unsupported_reason is not None:
        blocks, runner = make_rectangles(model, cache, layout)
        scheduler = Scheduler(
            Preemption(blocks, chunks=False),
            max_num_batched_tokens=UNLIMITED,
            max_num_seqs=max_num_seqs,
            replays=layout.replays,
        )
        return StepLoop(
            Executor(model, memory, runner, scheduler, WeightsGuard(model, memory, blocks)), memory, blocks, scheduler
        )
    blocks = memory.manager(cache.groups)
    blocks.prefix_caching = config.prefix_caching
    cost: CostModel | None = None
    preempt: str | Callable[[Request], str] = config.preemption
    swapper = BlockSwapper([group.blocks for group in cache.groups.values()], blocks.flush_copies)
    if preempt == "auto":
        cost = CostModel(_copy_bandwidth(model.device))
        swapper = measured = MeasuredSwapper(swapper.groups, blocks.flush_copies)
        measured.cost, preempt = cost, measured.choose
    guard = WeightsGuard(model, memory, blocks)
    preemption = Preemption(blocks, preempt, swapper, guard.vouch)
    scheduler = Scheduler(preemption, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=max_num_seqs)
    executor = Executor(model, memory, PackedRunner(model, cache), scheduler, guard)
    return StepLoop(executor, memory, blocks, scheduler, cost)


class MeasuredSwapper(BlockSwapper):
    """A swapper that asks a cost model whether to swap, and tells it how long that took."""

    cost: CostModel

    def choose(self, request: Request) -> str:
        """`"recompute"` or `"swap"`, as the cost model has it."""
        num_tokens = sum(sequence.num_computed_tokens for sequence in request.open_sequences)
        return self.cost.choose(num_tokens, self.num_held_bytes(request))

    def num_held_bytes(self, request: Request) -> int:
        """Bytes of the request's distinct blocks, over all layers."""
        rows = [sequence.blocks.tables for sequence in request.open_sequences]
        return sum(
            len({block_id for tables in rows for block_id in tables[i].block_ids}) * group.storage.block_bytes
            for i, group in enumerate(self.groups)
        )

    def swap_out(self, request: Any) -> bool:
        num_bytes, start = self.num_held_bytes(request), time.perf_counter()
        is_done = super().swap_out(request)
        if is_done and num_bytes:
            self.cost.observe_swap(num_bytes, time.perf_counter() - start)
        return is_done


def make_rectangles(model: PreTrainedModel, cache: PagedCache, layout: Layout) -> tuple[BlockManager, RectangleRunner]:
    """What runs rows side by side, and what gives these their blocks."""
    specs, states = list(cache.groups), None
    if not layout.side_by_side or state_layers(cache):
        specs.append(StateSpec())
        states = cache.memory.group(StateSpec()).storage
    blocks = cache.memory.manager(specs)
    blocks.prefix_caching = False  # it would need the states at the end of each block
    return blocks, RectangleRunner(model, cache, states, layout)


@functools.lru_cache
def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy between host memory and `device`, by one copy of 8 MB, the first time."""
    source = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    source.to("cpu", copy=True)
    start = time.perf_counter()
    source.to("cpu", copy=True)
    return source.numel() / max(time.perf_counter() - start, 1e-9)
