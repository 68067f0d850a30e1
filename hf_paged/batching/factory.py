"""Chooses the layout of a model's forwards and builds the `StepLoop`. The choice follows the checks
of `model/capability.py`."""

from __future__ import annotations

import functools
import weakref

from transformers import PreTrainedModel

from ..cache.block_manager import BlockManager
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.swap import BlockSwapper
from ..config import PagedConfig
from ..model.capability import Capability
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.sharding import is_sharded
from ..model.trial import stock_cache
from ..model.weights import WeightsGuard
from ..rooms import OnDemand, RectanglesRoom, TapeRoom, is_installed, room
from ..seams import DEFAULT_PARTS, Adapters, Drafter, EngineParts, MakeRecorder, Processes, Recorder
from .execution.executor import Executor
from .execution.packed import PackedRunner
from .execution.runner import Runner
from .loop import StepLoop
from .request import RequestListener
from .scheduling.scheduler import Scheduler

UNLIMITED = 1 << 60  # more sequences, or tokens per step, than any loop has
# more blocks than any memory holds: a reservation of this size is reduced to the available memory
UNLIMITED_BLOCKS = 1 << 40
# maximum number of prompt tokens in a step that also decodes; a CPU computes them in the time of a
# few decodes
CPU_CHUNK_TOKENS = 256


def empty_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """Returns an empty paged cache with the layers of the cache that `generate` would build. For an
    encoder-decoder model, it has a `cross` cache for the keys and values of the encoder's
    output."""
    cross = None
    if model.config.is_encoder_decoder:
        cross = PagedCache.from_empty(stock_cache(model), memory, "cross")
    return PagedCache.from_empty(stock_cache(model), memory, cross=cross)


def make_loop(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: Layout,
    config: PagedConfig,
    *,
    max_num_seqs: int,
    parts: EngineParts = DEFAULT_PARTS,
    timeline: RequestListener | None = None,
) -> StepLoop:
    """Makes a loop that runs forwards of the model in this layout, on the memory of `cache`, the
    model's empty cache. `config` is a separate argument, since calls of other threads may replace
    the memory's config; `max_num_seqs` overrides the value in `config`. Raises `RoomMissingError`
    if an option needs an optional package that is not installed."""
    memory = cache.memory
    processes = memory.processes
    make_recorder = parts.recorder
    if make_recorder is None:
        make_recorder = functools.partial(find_recorder, capture=config.capture)
    block_manager, runner = make_runner(
        model, cache, layout, config.batch_invariant, make_recorder, processes
    )
    is_packed = layout.unsupported_reason is None
    # set for every loop: the memory keeps its block managers, and the options of calls may differ
    block_manager.prefix_caching = config.prefix_caching and layout.can_chunk
    make_tier = parts.tier
    if make_tier is None and config.prefix_tiers is not None:
        make_tier = room("tiers", "`prefix_tiers`").make_tier
    tier, reason_against_tier = None, None
    if make_tier is not None:
        tier, reason_against_tier = make_tier(model, memory, block_manager, config, layout)
    block_manager.set_tier(tier)
    guard = WeightsGuard(model, memory, block_manager)
    swapper = BlockSwapper(block_manager)
    preemption = runner.make_preemption(
        block_manager,
        config.preemption,
        swapper,
        guard.verify,
        agree=int if processes is None else processes.agree,
    )
    max_tokens = config.max_num_batched_tokens if is_packed else UNLIMITED

    def make_drafter() -> Drafter:
        # if the package is missing, the error names the config's `speculation`: for drafts that a
        # request's own options ask for, `EngineLoop` or `Candidate` has already imported it
        drafter_class = parts.drafter or room("speculation", "`speculation`").Speculator
        make_assistant_runner = functools.partial(make_runner, make_recorder=make_recorder)
        return drafter_class(model, config, memory, runner, weak_scheduler, make_assistant_runner)

    drafter = OnDemand(make_drafter)
    adapters = OnDemand[Adapters](
        lambda: room("adapters", "`adapter`").make_adapters(
            model, cache, make_runner, block_manager
        )
    )
    scheduler = Scheduler(
        preemption,
        max_tokens,
        max_num_seqs,
        max_chunk_tokens(model, config) if is_packed else None,
        rope=runner.rope if isinstance(runner, PackedRunner) else None,
        timeline=timeline or RequestListener(),
        drafter=drafter,
        adapters=adapters,
    )
    # weak, since the scheduler holds the drafter: a cycle would keep the model and its memory alive
    weak_scheduler = weakref.proxy(scheduler)
    executor = Executor(model, memory, runner, scheduler, guard, adapters)
    if reason_against_tier is not None:
        executor.slowed_by.add(f"`prefix_tiers` has no effect: {reason_against_tier}")
    return StepLoop(executor, memory, block_manager, scheduler, drafter)


def max_chunk_tokens(model: PreTrainedModel, config: PagedConfig) -> int | None:
    """Returns how many prompt tokens a step that also decodes may compute; `None`: as many as
    `max_num_batched_tokens` leaves after the decodes."""
    if config.max_chunk_tokens is None and compute_device(model).type == "cpu":
        return CPU_CHUNK_TOKENS
    return config.max_chunk_tokens


def choose_layout(
    model: PreTrainedModel,
    cache: PagedCache,
    batch_invariant: bool = False,
    capability: Capability | None = None,
) -> Layout:
    """Returns the best layout in which each sequence gets the same results as alone. With
    `batch_invariant`, raises `ValueError` if the bits of a row's logits would still depend on other
    rows, and `RoomMissingError` without the optional package `tape`, which computes rows in a fixed
    order. `capability`: the `Capability` of the model and `cache`, if the caller has one."""
    layout = (capability or Capability(model, cache, make_runner)).choose_layout()
    if batch_invariant:
        room("tape", "`batch_invariant`")
        make_invariant_runner = functools.partial(make_runner, batch_invariant=True)
        reason = layout.unsupported_reason
        if not reason:
            capability = Capability(model, cache, make_invariant_runner)
            reason = capability.reason_against_invariance()
        if reason is not None:
            raise batch_invariant_error(model, reason)
    return layout


def batch_invariant_error(model: PreTrainedModel, reason: str) -> ValueError:
    """Returns the error for a model that cannot serve `batch_invariant`; `reason` says why rows
    would depend on one another."""
    return ValueError(
        f"`batch_invariant` is True, but rows of {type(model).__name__} would depend on one"
        f" another: {reason}. Leave the option out: it needs packed forwards of token ids on the"
        " CPU, with the C++ kernels"
    )


def find_recorder(model: PreTrainedModel, cache: PagedCache, capture: bool) -> Recorder | None:
    """Returns the recorder of the model's steps; `None` if `capture` is `False`, if the optional
    package `tape` or `fingerprints` is not installed, or if the steps cannot be recorded."""
    # communication between the processes of a sharded model cannot be recorded
    if not capture or is_sharded(model):
        return None
    if not is_installed("tape") or not is_installed("fingerprints"):
        return None
    tape: TapeRoom = room("tape", "`capture`")
    return tape.make_recorder(model, cache)


def make_runner(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: Layout,
    batch_invariant: bool = False,
    make_recorder: MakeRecorder | None = None,
    processes: Processes | None = None,
) -> tuple[BlockManager, Runner]:
    """Returns the block manager of the model's sequences in this layout, and the runner that
    computes their steps. Only packed layouts use `batch_invariant` and `processes`; the processes
    compute each step together. `Capability` passes neither `make_recorder`, since its checks take
    too few steps to replay any, nor `processes`."""
    recorder = None if make_recorder is None else make_recorder(model, cache)
    if layout.unsupported_reason is None:
        runner = PackedRunner(
            model, cache, layout.can_mix_lengths, recorder, batch_invariant, processes
        )
        return cache.memory.manager(cache.groups), runner
    return find_rectangles().make_runner(model, cache, layout, recorder)


def find_rectangles() -> RectanglesRoom:
    """Returns the optional package `rectangles`. Raises `RoomMissingError` if it is not
    installed."""
    rectangles: RectanglesRoom = room("rectangles", "serving rows that cannot be packed")
    return rectangles
