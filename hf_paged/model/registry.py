"""Keeps the memory pool of each model, and the route of its last call, outside of the model."""

from __future__ import annotations

import logging
import operator
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .. import forks
from ..cache.block_sizes import BlockSizes, Costs
from ..cache.budget import limit
from ..cache.free_memory import trim
from ..cache.idle import begin_use
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.memory_stats import MemoryStats
from ..cache.storage import fit_blocks
from ..config import AUTO, PagedConfig, shown
from ..interrupts import guarded
from ..kernels.costs import find_costs
from ..rooms import NOT_INSTALLED, room
from ..step import ReadCounters
from ..topics import Topic
from .forwards import compute_device
from .sharding import is_sharded, processes_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """
    The execution path of a model's last `generate` call, or of a `PagedEngine`'s requests.

    Args:
        road (`str`): `"engine"`: the engine runs the forwards, packed or with rows side by side,
            and rows leave the batch when they end; `"rows"`: an engine runs a forward for each
            request; `"hf_loop"`: transformers' decoding loop on a paged cache; `"plain"`: the same
            loop without a paged cache; `"undecided"`: `inspect` could not find out.
        reason (`str`): Why this route, with pointers to rows of docs/guide/troubleshooting.md.
        in_place (`bool`): Attention got block tables, or views of cached keys and values, instead
            of copies. (Without a C++ or Triton kernel, attention copies them in parts; `slowed_by`
            says so.)
        latent (`bool`): Attention read the latents of multi-head latent attention.
        prefills_shared (`bool`): Prompts expanded to several rows were each computed once.
        num_captured_steps (`int`): Forwards that were replaced by replays of recorded steps.
        num_draft_tokens, num_accepted_tokens (`int`): Draft tokens that a `generate` call verified,
            and how many of them it accepted. For a `PagedEngine`, `EngineStats` has these counts.
        setup_seconds (`dict[str, float]`): Seconds that the call, or the engine so far, spent on
            work that later calls reuse: `"self_check"` (forwards that decide how the model runs),
            `"build"` (loading or compiling the C++ kernels), `"record"` (recording decode steps
            while they are computed). A key is missing if no such work was done.
        slowed_by (`tuple[str, ...]`): Reasons why the call was slower than possible; each is logged
            as a WARNING, once per model.
    """

    road: str
    reason: str
    in_place: bool
    latent: bool = False
    prefills_shared: bool = False
    num_captured_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    slowed_by: tuple[str, ...] = ()
    setup_seconds: dict[str, float] = field(default_factory=dict, compare=False)


def reads_are_in_place(counters: Sequence[ReadCounters]) -> bool:
    """Whether cached tokens were read, and never gathered."""
    is_gathered = any(counter.gathered for counter in counters)
    return any(counter.in_place for counter in counters) and not is_gathered


def route_of(
    road: str,
    reason: str,
    counters: Sequence[ReadCounters],
    slowed_by: set[str],
    *,
    is_packed: bool,
    **fields: Any,
) -> Route:
    """Makes the [`Route`] of a call or an engine. `counters` count its reads of keys and values;
    `fields` are the other fields of the route."""
    reasons = sorted(slowed_by)
    if any(counter.gathered_decodes for counter in counters):
        reasons.append(Topic.GATHERED(f"keys and values are gathered in decode steps ({reason})"))
    elif NOT_INSTALLED in reason:
        reasons.append(reason)
    return Route(
        road,
        reason,
        in_place=is_packed or reads_are_in_place(counters),
        latent=any(counter.latent for counter in counters),
        slowed_by=tuple(reasons),
        **fields,
    )


# reentrant, since signal handlers and finalizers run at any moment, and may look up or free models
_lock = forks.rlock()
# Weak keys instead of attributes, so that copies and checkpoints of a model leave its pool out.
_memories = weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, PagedMemory]]()
_routes = weakref.WeakKeyDictionary[PreTrainedModel, Route]()
_warned = weakref.WeakKeyDictionary[nn.Module, set[str]]()
if hasattr(os, "register_at_fork"):
    # a child process starts without pools: other threads may have been changing them at the fork
    os.register_at_fork(after_in_child=_memories.clear)


def block_sizes(
    model: PreTrainedModel,
    config: PagedConfig,
    expected: Iterable[int] = (),
    observed: Iterable[int] = (),
) -> BlockSizes:
    """Returns the block sizes of a new memory: the config's or, if that is "auto", sizes chosen by
    the attention kernel's measured times. They suit the `observed` lengths of finished sequences,
    in tokens, or the `expected` ones if there are none. If "auto" must give the same size in other
    processes or calls, all blocks have the default size."""
    if config.block_size != AUTO:
        return BlockSizes(block_size=config.block_size)
    reason = None
    if config.prefix_tiers is not None:
        reason = "processes that saw other lengths must find the blocks of `prefix_tiers`"
    elif config.batch_invariant:
        reason = "`batch_invariant` must give the same bits, whatever lengths came before"
    elif is_sharded(model):
        reason = "several processes hold shards of a block"
    if reason is not None:
        return BlockSizes(Costs({}, reason))
    device = compute_device(model)
    costs = find_costs(device, autocast_dtype(device) or model.dtype, config.kv_dtype)
    return BlockSizes(Costs(*costs), expected, observed)


def memory_for(
    model: PreTrainedModel, config: PagedConfig, expected: Iterable[int] = ()
) -> PagedMemory:
    """Returns the memory of `model`. It is a new one if the block size, limits, storage, dtypes,
    device, processes or `batch_invariant` have changed. With `block_size="auto"`, it is also new if
    other sizes are better (`PagedMemory.better_sizes`), or if `prefix_tiers` has been set or unset.
    `expected`: lengths of this call's rows in tokens. The memory counts as in use until
    `idle.end_use`. Raises `ValueError` for a storage that the device does not support, and
    `OSError` if the folder of new `prefix_tiers` cannot be used."""
    device = compute_device(model)
    config = fit_blocks(config, model.config, device)
    has_tiers = config.block_size == AUTO and config.prefix_tiers is not None
    processes = processes_of(model)
    dtypes = model.dtype, autocast_dtype(device)
    key = (_memory_options(config), has_tiers, dtypes, device, processes)
    with _lock:
        old_key, old_memory = _memories.get(model, (None, None))
        if old_memory is None or old_memory.config.prefix_tiers != config.prefix_tiers:
            check_tiers(config)
        memory = old_memory if old_key == key else None
        sizes = None if memory is None else memory.better_sizes()
        if memory is None or sizes is not None:
            sizes = sizes or block_sizes(model, config, expected)
            memory = PagedMemory(config, sizes=sizes, processes=processes)
        _memories[model] = key, memory
        memory.config = config
        begin_use(memory)
    if old_memory is not None and old_memory is not memory:
        old_memory.evict_cached()
    return memory


# the options that a memory keeps as long as it exists
_memory_options = operator.attrgetter(
    "block_size", "num_blocks", "memory_fraction", "kv_dtype", "batch_invariant", "storage"
)


def check_options(model: PreTrainedModel, caches: Iterable[Any], options: Any) -> None:
    """Warns if the memory of one of the [`PagedCache`]s was made with other options than `options`,
    the `cache_config` of the call that gets the caches."""
    for cache in caches:
        memory = cache.memory
        config = PagedConfig.coerce(options)
        if config.storage == memory.config.storage:
            config = fit_blocks(config, model.config, compute_device(model))
        if _memory_options(config) != _memory_options(memory.config):
            warn_once(
                model,
                Topic.NOT_PAGED(
                    "the passed `PagedCache` keeps its own options, so `cache_config` has no"
                    " effect: leave it out, or pass these options to the `PagedCache`"
                ),
            )


def check_tiers(config: PagedConfig) -> None:
    """If `prefix_tiers` of a new pool is set, creates the folder that it names, unless it exists.
    Raises `OSError` if the folder cannot be used."""
    if config.prefix_tiers is not None:
        room("tiers", "`prefix_tiers`").check(config)


def note_route(model: PreTrainedModel, route: Route) -> None:
    """Stores the route of a call, and logs each reason why it was slow, once per model."""
    with _lock:
        _routes[model] = route
    for reason in route.slowed_by:
        warn_once(model, f"runs slower than it could: {reason}")


def warn_once(model: nn.Module, message: str, distinguishes_numbers: bool = True) -> None:
    """Logs a WARNING that begins with the model's class, once per model and message. Unless
    `distinguishes_numbers`, messages that differ only in numbers, such as bytes, count as one."""
    key = message if distinguishes_numbers else re.sub(r"[\d.,]+", "", message)
    with _lock:
        messages = _warned.setdefault(model, set())
        is_new = key not in messages
        messages.add(key)
    if is_new:
        logger.warning("%s %s", type(model).__name__, message)


def _modules(owner: Any) -> Iterator[Any]:
    """The modules of a model, of a wrapper such as PEFT's, or of an engine's or a pipeline's model.
    Raises `ValueError` for anything else."""
    model = owner if isinstance(owner, nn.Module) else getattr(owner, "model", None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"`model` is {shown(owner)}: pass a model, or an object that has one as `.model`, such"
            " as an engine or a pipeline"
        )
    return model.modules()


def _memories_of(owner: Any) -> list[PagedMemory]:
    """The pools of a model and its submodules, or of an object with a model as `.model`."""
    memory = getattr(owner, "memory", None)
    if isinstance(memory, PagedMemory):  # an engine has its own pool
        return [memory]
    with _lock:
        return [_memories[module][1] for module in _modules(owner) if module in _memories]


@guarded
def free(model: Any) -> None:
    """Frees the pool of a model, or of an object that has a model as `.model`, such as a pipeline
    or an engine; an engine's requests are cancelled. Caches that a caller holds keep their blocks
    until they are garbage-collected."""
    if isinstance(getattr(model, "memory", None), PagedMemory):
        return model.free()  # an engine has its own pool
    with _lock:
        memories = [_memories.pop(module)[1] for module in _modules(model) if module in _memories]
    for memory in memories:
        memory.evict_cached()
        memory.drop_recorders()
    trim()


def last_route(model: Any) -> Route | None:
    """The route, with its reason, of the last `generate` call or engine that used the model; `None`
    if there was none."""
    with _lock:
        return next((_routes[module] for module in _modules(model) if module in _routes), None)


@guarded
def memory_stats(model: Any, reset: bool = False) -> MemoryStats:
    """
    Statistics of the pool of a model, or of an object that has a model as `.model`, such as an
    engine or a pipeline. Without a pool, only `budget_bytes` is set.

    Args:
        reset (`bool`, defaults to `False`): Reset the peaks after reading them.
    """
    memories = _memories_of(model)
    if not memories:
        return MemoryStats(budget_bytes=limit())
    memory = memories[0]
    stats = memory.stats()
    if reset:
        memory.reset_peak()
    return stats


@guarded
def check_integrity(model: Any) -> None:
    """Raises `AssertionError` if the model has a pool that disagrees with live block tables."""
    for memory in _memories_of(model):
        memory.check_integrity()
