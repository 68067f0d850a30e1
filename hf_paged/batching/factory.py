"""Chooses the layout of a model's forwards (packed if possible, else rectangles) and builds the
`StepLoop`."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..adapters.mixing import Adapters
from ..adapters.pages import AdapterPages
from ..cache.block_manager import BlockManager
from ..cache.groups import StateSpec
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.states import state_layers
from ..cache.swap import BlockSwapper
from ..config import PagedConfig, PrefixTiers
from ..model import capability
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.weights import WeightsGuard
from ..rooms import room
from ..seams import DEFAULT_PARTS, Drafter, EngineParts
from ..tiers.store import PrefixStore
from ..topics import Topic
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.rectangles import RectangleRunner
from .execution.runner import Runner
from .loop import StepLoop
from .scheduling.drafts import Drafting
from .scheduling.preemption import CostModel, Preemption
from .scheduling.scheduler import Scheduler

UNLIMITED = 1 << 60
MANY_BLOCKS = 1 << 40  # more than memory holds; pages are committed when touched
# prefill tokens beside decodes: as many as a CPU computes in a few decode steps' time
CPU_CHUNK_TOKENS = 256


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """Returns the cache that `generate` would build for the model, empty."""
    config = model.config.get_text_config(decoder=True)
    cache = PagedCache.from_empty(DynamicCache(config=config), memory)
    if model.config.is_encoder_decoder:
        cache.cross = PagedCache.from_empty(DynamicCache(config=config), memory, "cross")
    return cache


def make_loop(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: Layout,
    config: PagedConfig,
    *,
    max_num_seqs: int,
    parts: EngineParts = DEFAULT_PARTS,
    leader: Any = None,
) -> StepLoop:
    """Makes a loop that runs forwards in this layout, on the memory of `cache`, the model's empty
    cache. `config` is passed because calls of other threads may replace the memory's. With a model
    sharded over several processes, each process has a loop with the same generations, or one
    process has it with a `leader` (`batching.ranks`)."""
    memory = cache.memory
    blocks, runner = make_runner(model, cache, layout, config.batch_invariant)
    is_packed = layout.unsupported_reason is None
    # the manager outlives the call whose config this is
    blocks.prefix_caching = config.prefix_caching and (is_packed or layout.continues)
    reason = set_tier(model, memory, blocks, config, layout)
    guard = WeightsGuard(model, memory, blocks)
    swapper = BlockSwapper(memory.groups_of(blocks), blocks.flush_copies)
    preemption = Preemption(
        blocks,
        config.preemption,
        swapper,
        guard.vouch,
        chunks=is_packed,
        replays=layout.replays,
        encoder_blocks=runner.encoder_blocks,
        cost=CostModel() if config.preemption == "auto" else None,
    )
    max_tokens = config.max_num_batched_tokens if is_packed else UNLIMITED

    def make_drafter() -> Drafter:
        # the room has been asked for a call's own options already (`reason_against`)
        make = parts.drafter or room("speculation", "`speculation`").Speculator
        return make(model, config, memory, runner, proxy)

    drafting = Drafting(make_drafter)
    adapters = AdapterPages(blocks)
    scheduler = Scheduler(
        preemption,
        max_tokens,
        max_num_seqs,
        max_chunk_tokens(model, config) if is_packed else None,
        rope=runner.rope if isinstance(runner, PackedRunner) else None,
        reclaim=drafting.reclaim,
        adapters=adapters,
    )
    # it holds the drafter: a cycle would keep the model and its memory alive
    proxy = weakref.proxy(scheduler)
    executor = Executor(model, memory, runner, scheduler, guard)
    ranks = executor.ranks
    executor.adapters = Adapters(model, cache, make_runner, adapters)
    if leader is not None and isinstance(runner, PackedRunner):
        runner.mirror = executor.adapters.mirror = leader
        guard.fingerprint, executor.together = leader.fingerprint, leader.forward
    elif ranks is not None:
        guard.fingerprint = ranks.fingerprint
        executor.together = ranks.forward
        preemption.agree = ranks.of_first
    if reason is not None:
        executor.slowed_by.add(f"`prefix_tiers` has no effect: {reason}")
    return StepLoop(
        executor,
        memory,
        blocks,
        scheduler,
        drafting,
        ranks if leader is None else None,
    )


def max_chunk_tokens(model: PreTrainedModel, config: PagedConfig) -> int | None:
    """Returns how many prefill tokens a step with decodes may have; `None`: as many as fit."""
    if config.max_chunk_tokens is None and compute_device(model).type == "cpu":
        return CPU_CHUNK_TOKENS
    return config.max_chunk_tokens


def set_tier(
    model: PreTrainedModel,
    memory: PagedMemory,
    blocks: BlockManager,
    config: PagedConfig,
    layout: Layout,
) -> str | None:
    """Sets the tier that keeps blocks evicted from the prefix cache, by `config.prefix_tiers`.
    Returns why a requested tier cannot be set, else `None`."""
    requested = PrefixTiers.coerce(config.prefix_tiers)
    if requested is None:
        blocks.set_tier(None)
        return None
    reason = reason_against_saving(memory, blocks)
    if requested.disk_path is None and compute_device(model).type == "cpu":
        reason = Topic.PREFIX_TIERS(
            "the pool is in host memory already, so only a disk tier helps: set `disk_path`"
        )
    tier = blocks.tier
    if reason is not None:
        blocks.set_tier(None)
    elif (
        not isinstance(tier, PrefixStore)
        or tier.config != requested
        or tier.expected != layout.layers
    ):
        blocks.set_tier(make_store(model, memory, blocks, requested, layout))
    return reason


def reason_against_saving(memory: PagedMemory, blocks: BlockManager) -> str | None:
    """Returns why cached prefixes cannot leave the pool; `None` if they can."""
    if not blocks.prefix_caching:
        return Topic.PREFIX_TIERS("prompts of this model are not cached")
    if memory.least is not None:
        return Topic.PREFIX_TIERS("their keys and values are in several processes")
    if blocks.keeps_states:
        return Topic.PREFIX_TIERS("snapshots of the model's states stay in the pool")
    return None


def make_store(
    model: PreTrainedModel,
    memory: PagedMemory,
    blocks: BlockManager,
    tiers: PrefixTiers,
    layout: Layout,
) -> PrefixStore:
    """Makes the store that copies and names this manager's cached blocks."""
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    # those of layers on several are known from the first forward
    device = compute_device(model) if len(devices) < 2 else None
    return PrefixStore(tiers, memory, memory.groups_of(blocks), device, layout.layers)


def choose_layout(
    model: PreTrainedModel, cache: PagedCache, batch_invariant: bool = False
) -> Layout:
    """`capability.choose_layout`; raises `ValueError` if `batch_invariant` is wanted and the model
    cannot be."""
    layout = capability.choose_layout(model, cache, make_runner)
    if batch_invariant:
        make = functools.partial(make_runner, is_invariant=True)
        reason = layout.unsupported_reason
        if not reason:
            reason = capability.reason_against_invariance(model, cache, make)
        if reason is not None:
            raise not_invariant(model, reason)
    return layout


def not_invariant(model: PreTrainedModel, reason: str) -> ValueError:
    """Makes the error for `batch_invariant` where rows depend on one another; `reason` says why."""
    return ValueError(
        f"`batch_invariant` is True, but rows of {type(model).__name__} would depend on one"
        f" another: {reason}. Leave it out: it needs packed forwards of token ids on the CPU, with"
        " the C++ kernels"
    )


def make_runner(
    model: PreTrainedModel, cache: PagedCache, layout: Layout, is_invariant: bool = False
) -> tuple[BlockManager, Runner]:
    """Makes the block manager and the runner of sequences for this layout."""
    if layout.unsupported_reason is None:
        runner = PackedRunner(model, cache, layout.mixed_lengths)
        runner.is_invariant = is_invariant
        return cache.memory.manager(cache.groups), runner
    states = StateSpec(is_empty=not state_layers(cache))
    blocks = cache.memory.manager([*cache.groups, states])
    return blocks, RectangleRunner(model, cache, cache.memory.group(states).storage, layout)


reason_against_rows = functools.partial(capability.reason_against_rows, make=make_runner)
how_rows_join = functools.partial(capability.how_rows_join, make=make_runner)
how_prompts_merge = functools.partial(capability.how_prompts_merge, make=make_runner)
max_positions = functools.partial(capability.max_positions, make=make_runner)
check_prompts = functools.partial(capability.check_prompts, make=make_runner)
