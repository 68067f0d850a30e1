"""Chooses the layout of a model's forwards (packed if possible, else rectangles) and builds the
`StepLoop`."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import compat
from ..cache.block_manager import BlockManager
from ..cache.free_memory import commits_when_touched
from ..cache.groups import StateSpec
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.states import state_layers
from ..cache.swap import BlockSwapper
from ..config import PagedConfig
from ..model import capability
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.sharding import is_sharded
from ..model.structure import overridden
from ..model.weights import WeightsGuard
from ..rooms import OnDemand, is_installed, room
from ..seams import (
    DEFAULT_PARTS,
    Adapters,
    EngineParts,
    MakeRecorder,
    Processes,
    Recorder,
    TapeRoom,
)
from ..speculation.assistant import Assistant, assistant_cache
from ..speculation.mtp import MtpHeads, MtpRunner, reason_against_mtp
from ..speculation.sources import Assistance
from ..speculation.speculator import Speculator
from ..topics import Topic
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.rectangles import RectangleRunner
from .execution.runner import Runner
from .loop import StepLoop
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
) -> StepLoop:
    """Makes a loop that runs forwards in this layout, on the memory of `cache`, the model's empty
    cache. `config` is passed because calls of other threads may replace the memory's."""
    memory = cache.memory
    processes = memory.processes
    make_recorder = parts.recorder or find_recorder
    blocks, runner = make_runner(
        model, cache, layout, config.batch_invariant, make_recorder, processes
    )
    is_packed = layout.unsupported_reason is None
    # the manager outlives the call whose config this is
    blocks.prefix_caching = config.prefix_caching and (is_packed or layout.continues)
    make_tier = parts.tier
    if make_tier is None and config.prefix_tiers is not None:
        make_tier = room("tiers", "`prefix_tiers`").make_tier
    tier, reason = None, None
    if make_tier is not None:
        tier, reason = make_tier(model, memory, blocks, config, layout)
    blocks.set_tier(tier)
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
        agree=int if processes is None else processes.agree,
    )
    max_tokens = config.max_num_batched_tokens if is_packed else UNLIMITED
    max_chunk = config.max_chunk_tokens
    if max_chunk is None and compute_device(model).type == "cpu":
        max_chunk = CPU_CHUNK_TOKENS

    def make_assistant(assistant: PreTrainedModel) -> Assistant:
        draft_cache = assistant_cache(assistant, memory)
        draft_layout = capability.choose_layout(assistant, draft_cache, make_runner)
        draft_runner = make_runner(
            assistant, draft_cache, draft_layout, make_recorder=make_recorder
        )
        if commits_when_touched(compute_device(assistant)):
            # growing would copy, and need new graphs
            draft_cache.reserve(config.num_blocks or MANY_BLOCKS, config.max_num_seqs)
        most = min(max_tokens, max_chunk or max_tokens)
        return Assistant(
            assistant,
            draft_cache,
            draft_runner,
            proxy,
            most,
            draft_layout.max_positions,
        )

    @functools.cache
    def heads() -> MtpHeads:
        assert isinstance(runner, PackedRunner)
        heads_model = compat.load_mtp(model)
        heads_cache = assistant_cache(heads_model, memory)
        heads_blocks = memory.manager(heads_cache.groups)
        heads_runner = MtpRunner(heads_model, heads_cache)
        return MtpHeads(
            runner,
            heads_cache,
            (heads_blocks, heads_runner),
            proxy,
            max_tokens,
        )

    speculator = Speculator(model, make_assistant, heads)

    def make_adapters() -> Adapters:
        adapters: Adapters = room("adapters", "`adapter`").make_adapters(
            model, cache, make_runner, blocks
        )
        return adapters

    adapters = OnDemand(make_adapters)
    scheduler = Scheduler(
        preemption,
        max_tokens,
        max_num_seqs,
        max_chunk if is_packed else None,
        rope=runner.rope if isinstance(runner, PackedRunner) else None,
        reclaim=speculator.reclaim,
        adapters=adapters,
    )
    # it holds the speculator: a cycle would keep the model and its memory alive
    proxy = weakref.proxy(scheduler)
    executor = Executor(model, memory, runner, scheduler, guard, adapters)
    if reason is not None:
        executor.slowed_by.add(f"`prefix_tiers` has no effect: {reason}")
    return StepLoop(
        executor,
        memory,
        blocks,
        scheduler,
        speculator,
    )


def reason_against_assistance(
    model: PreTrainedModel, config: Any, assistance: Assistance
) -> str | None:
    """Returns why the engine cannot assist rows with this generation config, layout aside; `None`
    if it can."""
    assistant = assistance.model
    method = overridden(model, compat.ASSISTED_DECODING)
    if method is not None:
        return Topic.ASSISTED(f"it overrides `{method}`")
    if config.speculation_type is not None:
        return Topic.ASSISTED("`speculation_type` drafts from hidden states, one row a call")
    if config.assistant_ensemble_weight is not None:
        return Topic.ASSISTED("`assistant_ensemble_weight` changes which drafts are accepted")
    if assistance.by_heads(config):
        return reason_against_mtp(model)
    if assistant is None:
        return None
    if type(assistant).__name__.startswith(compat.READS_TARGETS_CACHE):
        return Topic.ASSISTED("the assistant reads the target's keys and values")
    if assistant.config.is_encoder_decoder:
        return Topic.ASSISTED("the assistant has an encoder")
    if not assistance.is_joint or config.assistant_early_exit is not None:
        return None
    cache = assistant_cache(assistant, PagedMemory(PagedConfig()))
    layout = capability.choose_layout(assistant, cache, make_runner)
    if layout.unsupported_reason is None:
        return None
    return Topic.ASSISTED(f"the assistant: {layout.unsupported_reason}")


def choose_layout(
    model: PreTrainedModel, cache: PagedCache, batch_invariant: bool = False
) -> Layout:
    """`capability.choose_layout`; raises `ValueError` if `batch_invariant` is wanted and the model
    cannot be."""
    layout = capability.choose_layout(model, cache, make_runner)
    if batch_invariant:
        room("tape", "`batch_invariant`")  # computes rows in a fixed order
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


def find_recorder(model: PreTrainedModel, cache: PagedCache) -> Recorder | None:
    """What records the model's steps; `None` if the config turns that off or nothing can."""
    # communication between processes cannot be recorded
    if not cache.memory.config.capture or is_sharded(model) or not is_installed("tape"):
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
    no step is a replay, as in checks, which are short. `processes`: those that compute its steps
    together; forwards of a check need none."""
    if layout.unsupported_reason is None:
        recorder = None if make_recorder is None else make_recorder(model, cache)
        runner = PackedRunner(model, cache, layout.mixed_lengths, recorder, is_invariant, processes)
        return cache.memory.manager(cache.groups), runner
    states = StateSpec(is_empty=not state_layers(cache))
    blocks = cache.memory.manager([*cache.groups, states])
    slots: Any = cache.memory.group(states).storage
    return blocks, RectangleRunner(model, cache, slots, layout)


reason_against_rows = functools.partial(capability.reason_against_rows, make=make_runner)
how_rows_join = functools.partial(capability.how_rows_join, make=make_runner)
how_prompts_merge = functools.partial(capability.how_prompts_merge, make=make_runner)
max_positions = functools.partial(capability.max_positions, make=make_runner)
check_prompts = functools.partial(capability.check_prompts, make=make_runner)
