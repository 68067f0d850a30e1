"""Puts a `StepLoop` together for a model: packed where it can be, row by row where not."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cache.block_manager import BlockManager, ManagedGroup
from ..cache.block_pool import BlockPool
from ..cache.memory import GroupMemory, PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.swap import BlockSwapper
from ..model.weights import WeightsGuard
from .execution.executor import Executor
from .loop import StepLoop
from .request import Request
from .row_runner import RowRunner
from .runner import PackedRunner
from .scheduling.cost import CostModel
from .scheduling.scheduler import Scheduler

UNLIMITED = 1 << 60


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """The cache that `generate` would build for the model, with nothing in it."""
    return PagedCache.from_empty(DynamicCache(config=model.config.get_text_config(decoder=True)), memory)


def make_core(model: PreTrainedModel, cache: PagedCache, obstacle: str | None, *, max_num_seqs: int) -> StepLoop:
    """A packed core, or one that runs row by row if `obstacle` (`capability.packable`) says why it cannot be packed."""
    if obstacle is None:
        return packed_core(model, cache, max_num_seqs=max_num_seqs)
    return row_core(model, cache, obstacle, max_num_seqs=max_num_seqs)


def packed_core(model: PreTrainedModel, cache: PagedCache, *, max_num_seqs: int) -> StepLoop:
    """
    A core that runs packed forwards on the cache's memory.

    Args:
        model ([`PreTrainedModel`]): One that `capability.packable` allows.
        cache ([`PagedCache`]): Built for the model and empty.
        max_num_seqs (`int`): Most sequences at the same time.
    """
    memory = cache.memory
    config = memory.config
    with memory.lock:
        blocks = _manager(cache)
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
    return StepLoop(executor, memory, blocks, scheduler, cost, swapper=swapper)


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


def _manager(cache: PagedCache) -> BlockManager:
    """The memory's one manager, whose prefix cache outlives the calls."""
    memory = cache.memory
    keys = tuple(group.key for group in cache.groups.values())
    if memory.manager is None or memory.manager_keys != keys:
        # the manager hangs on the memory: nothing of it may hold the memory itself
        members = [group.blocks for group in cache.groups.values()]
        groups = [
            ManagedGroup(blocks.pool, group.window, blocks.reserve, blocks.copy_on_write)
            for blocks, group in zip(members, cache.groups.values())
        ]
        manager = BlockManager(groups, memory.config.block_size, lambda: members[0].memory.num_obtainable)
        for blocks, table_set in zip(members, manager.table_sets):
            blocks.table_sets.add(table_set)
        memory.manager, memory.manager_keys = manager, keys
    memory.manager.prefix_caching = memory.config.prefix_caching
    return memory.manager


def row_core(model: PreTrainedModel, cache: PagedCache, obstacle: str, *, max_num_seqs: int) -> StepLoop:
    """
    A core that runs each sequence by itself. Blocks are accounted for in pools that only count, under the same budget;
    the sequences' caches take the real ones, of which there are never more.
    """
    config = cache.memory.config
    if config.memory_fraction is not None:
        raise ValueError(
            f"`memory_fraction` ({config.memory_fraction}) is not possible for {type(model).__name__}, whose sequences "
            "run one by one in caches of their own: set `num_blocks`"
        )
    memory = PagedMemory(replace(config, num_blocks=None))
    total = UNLIMITED if config.num_blocks is None else config.num_blocks
    windows = list(cache.groups) or [None]
    pools = [BlockPool() for _ in windows]

    def room(pool: BlockPool) -> Callable[[int], None]:
        return lambda needed: pool.grow(max(0, needed - pool.num_available))

    blocks = BlockManager(
        [ManagedGroup(pool, window, room(pool)) for pool, window in zip(pools, windows)],
        config.block_size,
        lambda: total - sum(pool.num_used for pool in pools),
        prefix_caching=False,
    )
    scheduler = Scheduler(
        blocks, max_num_batched_tokens=UNLIMITED, max_num_seqs=max_num_seqs, preempt="recompute", swapper=None
    )
    runner = RowRunner(model, memory)
    executor = Executor(model, memory, runner, scheduler, guard=None)
    return StepLoop(executor, memory, blocks, scheduler, states=runner, unsupported_reason=obstacle)


@functools.lru_cache
def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy between host memory and `device`, by one copy of 8 MB, the first time."""
    source = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    source.to("cpu", copy=True)
    start = time.perf_counter()
    source.to("cpu", copy=True)
    return source.numel() / max(time.perf_counter() - start, 1e-9)
