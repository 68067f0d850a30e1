"""Chooses the layout of a model's forwards (packed if possible, else rectangles) and builds the
`StepLoop`. The checks behind the choice are in `model/capability.py`."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from transformers import PreTrainedModel

from ..cache.block_manager import BlockManager
from ..cache.groups import StateSpec
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.states import state_layers
from ..cache.swap import BlockSwapper
from ..config import PagedConfig
from ..model.capability import Capability
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.sharding import is_sharded
from ..model.trial import stock_cache
from ..model.weights import WeightsGuard
from ..rooms import OnDemand, TapeRoom, is_installed, room
from ..seams import DEFAULT_PARTS, Adapters, Drafter, EngineParts, MakeRecorder, Processes, Recorder
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.rectangles import RectangleRunner
from .execution.runner import Runner
from .loop import StepLoop
from .scheduling.preemption import CostModel, Preemption
from .scheduling.scheduler import Scheduler
from .scheduling.timeline import Timeline

UNLIMITED = 1 << 60
MANY_BLOCKS = 1 << 40  # more than memory holds; pages are committed when touched
# prefill tokens beside decodes: as many as a CPU computes in a few decode steps' time
CPU_CHUNK_TOKENS = 256


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """Returns the cache that `generate` would build for the model, empty."""
    cache = PagedCache.from_empty(stock_cache(model), memory)
    if model.config.is_encoder_decoder:
        cache.cross = PagedCache.from_empty(stock_cache(model), memory, "cross")
    return cache


def make_loop(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: Layout,
    config: PagedConfig,
    *,
    max_num_seqs: int,
    parts: EngineParts = DEFAULT_PARTS,
    timeline: Timeline | None = None,
) -> StepLoop:
    """Makes a loop that runs forwards in this layout, on the memory of `cache`, the model's empty
    cache. `config` is passed since calls of other threads may replace the memory's config."""
    memory = cache.memory
    processes = memory.processes
    make_recorder = parts.recorder
    if make_recorder is None:
        make_recorder = functools.partial(find_recorder, capture=config.capture)
    blocks, runner = make_runner(
        model, cache, layout, config.batch_invariant, make_recorder, processes
    )
    is_packed = layout.unsupported_reason is None
    # the manager outlives the call whose config this is
    blocks.prefix_caching = config.prefix_caching and (is_packed or layout.can_chunk)
    make_tier = parts.tier
    if make_tier is None and config.prefix_tiers is not None:
        make_tier = room("tiers", "`prefix_tiers`").make_tier
    tier, reason = None, None
    if make_tier is not None:
        tier, reason = make_tier(model, memory, blocks, config, layout)
    blocks.set_tier(tier)
    guard = WeightsGuard(model, memory, blocks)
    swapper = BlockSwapper(blocks)
    preemption = Preemption(
        blocks,
        config.preemption,
        swapper,
        guard.verify,
        chunks=is_packed,
        replays=layout.depends_on_splits,
        encoder_blocks=runner.encoder_blocks,
        cost=CostModel() if config.preemption == "auto" else None,
        agree=int if processes is None else processes.agree,
    )
    max_tokens = config.max_num_batched_tokens if is_packed else UNLIMITED

    def make_drafter() -> Drafter:
        # a call's own options have loaded the room before (`reason_against`)
        make = parts.drafter or room("speculation", "`speculation`").Speculator
        make_assistants = functools.partial(make_runner, make_recorder=make_recorder)
        return make(model, config, memory, runner, proxy, make_assistants)

    drafter = OnDemand(make_drafter)
    adapters: OnDemand[Adapters] = OnDemand(
        lambda: room("adapters", "`adapter`").make_adapters(model, cache, make_runner, blocks)
    )
    scheduler = Scheduler(
        preemption,
        max_tokens,
        max_num_seqs,
        max_chunk_tokens(model, config) if is_packed else None,
        rope=runner.rope if isinstance(runner, PackedRunner) else None,
        timeline=timeline or Timeline(),
        drafter=drafter,
        adapters=adapters,
    )
    # weak, since the scheduler holds the drafter: a cycle would keep the model and its memory alive
    proxy = weakref.proxy(scheduler)
    executor = Executor(model, memory, runner, scheduler, guard, adapters)
    if reason is not None:
        executor.slowed_by.add(f"`prefix_tiers` has no effect: {reason}")
    return StepLoop(executor, memory, blocks, scheduler, drafter)


def max_chunk_tokens(model: PreTrainedModel, config: PagedConfig) -> int | None:
    """Returns how many prefill tokens a step with decodes may have; `None`: as many as fit."""
    if config.max_chunk_tokens is None and compute_device(model).type == "cpu":
        return CPU_CHUNK_TOKENS
    return config.max_chunk_tokens


def choose_layout(
    model: PreTrainedModel, cache: PagedCache, batch_invariant: bool = False
) -> Layout:
    """Returns `Capability.choose_layout`. Raises `ValueError` if `batch_invariant` is requested and
    the model cannot run invariantly."""
    layout = Capability(model, cache, make_runner).choose_layout()
    if batch_invariant:
        room("tape", "`batch_invariant`")  # computes rows in a fixed order
        make = functools.partial(make_runner, is_invariant=True)
        reason = layout.unsupported_reason
        if not reason:
            reason = Capability(model, cache, make).reason_against_invariance()
        if reason is not None:
            raise not_invariant(model, reason)
    return layout


def not_invariant(model: PreTrainedModel, reason: str) -> ValueError:
    """Returns the error for `batch_invariant` if rows depend on one another; `reason` says why."""
    return ValueError(
        f"`batch_invariant` is True, but rows of {type(model).__name__} would depend on one"
        f" another: {reason}. Leave it out: it needs packed forwards of token ids on the CPU, with"
        " the C++ kernels"
    )


def find_recorder(
    model: PreTrainedModel, cache: PagedCache, capture: bool = True
) -> Recorder | None:
    """Returns the recorder of the model's steps; `None` if `capture` is `False` or no recorder is
    available."""
    # communication between processes cannot be recorded
    if not capture or is_sharded(model) or not is_installed("tape"):
        return None
    tape: TapeRoom = room("tape", "`capture`")
    return tape.recorder(model, cache)


def make_runner(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: Layout,
    is_invariant: bool = False,
    make_recorder: MakeRecorder | None = None,
    processes: Processes | None = None,
) -> tuple[BlockManager, Runner]:
    """Makes the block manager and the runner of sequences for this layout. Without `make_recorder`
    no step is a replay, as in checks, which are short. `processes`: the processes that compute its
    steps together; the forwards of a check need none."""
    recorder = None if make_recorder is None else make_recorder(model, cache)
    if layout.unsupported_reason is None:
        runner = PackedRunner(
            model, cache, layout.can_mix_lengths, recorder, is_invariant, processes
        )
        return cache.memory.manager(cache.groups), runner
    states = StateSpec(is_empty=not state_layers(cache))
    blocks = cache.memory.manager([*cache.groups, states])
    slots: Any = cache.memory.group(states).storage
    return blocks, RectangleRunner(model, cache, slots, layout, recorder)
