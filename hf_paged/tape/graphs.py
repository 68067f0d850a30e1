"""Records steps as graphs, one per `GraphKey` (sizes and options), and replays them with new
inputs, which are first copied to the buffers that the graph reads."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import forks
from ..attention.switch import model_attention
from ..batching.execution.inputs import Bounds, PackedTokens
from ..batching.scheduling.scheduler import Scheduler
from ..cache.free_memory import is_out_of_memory
from ..cache.group_memory import GroupMemory
from ..cache.kv_blocks import KVBlocks
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..interrupts import is_interrupt
from ..kernels import BACKEND_VARIABLE
from ..model.state import ModelState
from ..seams import ForwardContext, RecordedContext
from ..step import KeysReadError
from ..switches import NOTHING
from ..timing import timed
from .checks import Checks
from .graph_keys import MAX_CHUNK_TOKENS, MAX_GRAPHS, GraphKey, Prefixes, key_of, limit_below
from .inputs import StaticInputs, StaticOutputs
from .length import LengthRange
from .live import LiveModules, LiveRefused
from .misses import MIN_REPLAYS, Misses
from .recorders import (
    GraphBackend,
    RecordedStep,
    check_replay,
    exclusive_recording,
    graph_backend,
    note_unrecorded,
    reason_of,
    storage_addresses,
    uncached_autocast,
    undoing_writes,
)
from .run_ahead import GraphRunAhead
from .shared_prefixes import SharedPrefixes
from .torch_options import reason_against_replays, step_options, torch_options

logger = logging.getLogger(__name__)

Forward = Callable[..., Tensor]
"""Takes token ids and positions `(1, n)`, the step of each layer group, the indices of the `m`
tokens that get logits (`None`: all), the context and, as keywords, `StaticInputs.arguments`;
returns logits `(m, vocab_size)`."""


def make_recorder(model: PreTrainedModel, cache: PagedCache) -> StepGraphs | None:
    """Returns the `StepGraphs` of `model`, kept between calls in the memory of `cache`, the model's
    empty cache; `None` if the model is on several devices, or its device has no backend."""
    memory = cache.memory
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices - {torch.device("meta")}) > 1:
        return None  # a graph runs on one device
    caches = [cache] if cache.cross is None else [cache, cache.cross]
    specs = tuple(spec for sub_cache in caches for spec in sub_cache.groups)
    groups = [group.group_memory for sub_cache in caches for group in sub_cache.groups.values()]
    graphs: Any = memory.recorders.get(specs)
    identity = (weakref.ref(model), model.device, groups)
    if not isinstance(graphs, StepGraphs) or graphs.identity != identity:
        backend = graph_backend(model.device)
        if backend is None:
            return None
        graphs = memory.recorders[specs] = StepGraphs(model, groups, memory.lock, backend)
    return graphs


class StepGraphs:
    """The graphs of one model over one memory (`seams.Recorder`). Refers to the model weakly, and
    not to the `PagedMemory`, but keeps the memory's `groups` alive."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: list[GroupMemory],
        lock: threading.RLock,
        backend: GraphBackend,
    ) -> None:
        """`groups`: those of the memory with this `lock`; empty if the model has only states."""
        # why no step is recorded or replayed until the model or torch's options change, or `None`
        self.unsupported_reason: str | None = None
        # whether the model's own code computes attention, over all slots of the block tables
        self.reads_keys = False
        self.lengths = LengthRange()  # cache lengths for which recorded rectangle steps are valid
        self.checks = Checks()
        self.is_checked = True  # as in `Recorder`
        # why changes of the model cannot be detected, so that no graph is used
        self._untracked_reason: str | None = None
        self.identity = weakref.ref(model), model.device, groups
        self._model, self._device, self._groups = self.identity
        self._lock = lock
        self._backend = backend
        self.in_order = backend.in_order
        # the state of the model and torch for which graphs are valid; the addresses of the model's
        # tensors and of their storages are in `_addresses` and `_storages`
        self._signature: Hashable = None
        self._state: Callable[[], ModelState | None] = lambda: None  # the state that was read last
        self._addresses: list[int] = []
        self._storages: list[int] = []
        self._graphs: dict[GraphKey, RecordedStep] = {}  # in LRU order, the last used at the end
        self._blocks: list[weakref.ref[KVBlocks]] = []  # the blocks whose addresses the graphs use
        self._shared_prefixes = SharedPrefixes(self._model, groups)
        self._misses = Misses()
        self._live = LiveModules()
        # limits that failed recordings have set, by quantity: "decodes", "chunk tokens" or
        # "prefixes", whose limit is always 0
        self._limits: dict[str, int] = {}
        self._reason_against_decodes = ""  # why steps over the limit of decodes are not recorded
        self._outputs = StaticOutputs()  # shared by graphs
        # of the running step:
        self._forward: Forward | None = None
        self._context: ForwardContext | None = None
        self._states: Sequence[Any] = ()

    def needs_state(self, slowed_by: set[str]) -> bool:
        """As in `Recorder`."""
        return self.checks.needs_state(self.unsupported_reason, slowed_by)

    def begin(self, state: ModelState, reads_keys: bool = False) -> None:
        """Drops the graphs that are no longer valid. These are all graphs if the state of the model
        (apart from the content and addresses of its tensors) or the options of torch have changed,
        or if `reads_keys` is true and was not before. Otherwise they are the graphs that may read a
        tensor whose address has changed. `self.reads_keys` stays set until the model or the options
        change."""
        model = self._model()
        assert model is not None
        description, addresses = state.addresses()
        signature = (
            description,
            torch_options(),
            model_attention(model.config.get_text_config(decoder=True)),
            os.environ.get(BACKEND_VARIABLE),
        )
        self._untracked_reason = state.undetectable
        self._state = weakref.ref(state)
        if addresses != self._addresses:
            self._drop_readers(addresses)
            tensors = (*state.tensors, *state.overwritten)
            self._storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
            self._addresses = addresses
        if signature != self._signature:
            self._misses.restart([*self._graphs.values()])
            self.clear()
            self._signature, self.unsupported_reason, self._limits = signature, None, {}
            self.checks.clear()
            self._live.clear()
            self.reads_keys = False
            self.lengths = LengthRange()
        if reads_keys and not self.reads_keys:
            self.clear()  # they were recorded with larger block tables
            self.reads_keys = True

    def run_ahead(self, memory: PagedMemory, scheduler: Scheduler) -> GraphRunAhead | None:
        """As `Recorder.run_ahead`."""
        return GraphRunAhead(memory, scheduler) if self._backend.on_device else None

    def _drop_readers(self, addresses: list[int]) -> None:
        """Drops the graphs that may read a tensor of the model that has moved. `addresses`: the
        tensors' current addresses."""
        tensors = zip(self._storages, self._addresses, addresses)
        moved = {storage for storage, before, after in tensors if before != after}
        graphs = [*self._graphs.items()]  # `release` may drop them in another thread
        stale = {key: step for key, step in graphs if step.may_read(moved)}
        if stale:
            self._misses.restart(stale.values())
            for key in stale:
                self._graphs.pop(key, None)

    def clear(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()
        self._outputs.clear()

    def release(self) -> None:
        """As `Recorder.release`: if all blocks of the recorded steps were released, keeps those
        steps that can give their memory back (`RecordedStep.discard`); otherwise drops all."""
        if self._released_blocks() != self._blocks:
            self.clear()
        for key, step in list(self._graphs.items()):  # `begin` may clear them in another thread
            if not step.discard():
                self._graphs.pop(key, None)
        if not (self._graphs and self._outputs.discard()):
            self._outputs.clear()

    def run(
        self,
        tokens: PackedTokens,
        context: ForwardContext | None,
        forward: Forward,
        token_ids: Tensor | None = None,
        keeps_hidden: bool = False,
        kind: Hashable = None,
        states: Sequence[Any] = (),
        checked_as: Hashable = None,
    ) -> Tensor | None:
        """As `Recorder.run`: replays a step, after recording its graph if that is due. Returns
        logits `(len(tokens.last), vocab_size)`, which the caller owns, or `None` if no graph serves
        the step. `token_ids` `(n,)`, int64, on the device, replace those of a step of only decodes.
        A step with `token_ids` is never recorded, and not replayed if it must be checked. After a
        replay, the layers in `states` hold views of the recording's buffers. But a replay that must
        be checked changes copies of the states."""
        self.is_checked = True
        can_differ = checked_as is not None or self.reads_keys
        reason = self.unsupported_reason
        if reason is None and can_differ:
            reason = self.checks.begin_step(checked_as)
        if reason is not None:
            note_unrecorded(reason)
            return None
        if not self._is_recordable(tokens, context) or self._must_run_eagerly(context):
            return None
        # the lock keeps other threads from moving blocks until the replay is launched
        with self._lock:
            if not self._check_blocks():
                return None
            self._forward = forward
            self._context = context
            self._states = states
            try:
                prefixes: Prefixes = ()
                if self._backend.on_device and "prefixes" not in self._limits:
                    prefixes = self._shared_prefixes.find(tokens)
                requested = self._key_of(tokens, prefixes, (keeps_hidden, kind))
                key: GraphKey | None = requested
                if requested not in self._graphs:
                    if token_ids is not None:
                        return None
                    key = self._find_or_record(requested, tokens, prefixes)
                if key is None:
                    return None
                if can_differ:
                    self.checks.choose(checked_as, key.widths, tokens)
                    self.is_checked = self.checks.pending is None
                if not self.is_checked:
                    if token_ids is not None:
                        return None
                    self._states = self.checks.copy(states, len(tokens.last))
                return self._replay(key, tokens, prefixes, token_ids)
            finally:
                self._forward = self._context = None
                self._states = ()

    def check(self, results: Iterable[tuple[Tensor, Tensor]], reason: str | None = None) -> None:
        """As in `Recorder`."""
        self.checks.compare(results, getattr(self._model(), "dtype", None), reason)

    def rectangles(self, model: PreTrainedModel, cache: PagedCache) -> Any:
        """As `Recorder.rectangles`. Only the optional package `rectangles` calls this method."""
        with forks.imports:
            from .rectangles import RectangleReplays

        return RectangleReplays(model, cache, self)

    def _must_run_eagerly(self, context: ForwardContext | None) -> bool:
        """Whether the running step must not be a replay; if so, notes why."""
        reason = reason_against_replays(self._untracked_reason)
        if context is not None and self._live.classes:
            reason = self._live.reason_against_adapters()
        if reason is not None:
            note_unrecorded(reason)
        return reason is not None

    def _is_recordable(self, tokens: PackedTokens, context: ForwardContext | None) -> bool:
        """Whether a step of these tokens may be recorded. It may if it has only decodes and each
        gets logits. On a GPU, it may also have a few chunk tokens, if the context allows chunks.
        `_limits` bounds the numbers of decodes and of chunk tokens. Steps with `rope_factors` are
        not recorded."""
        num_chunk_tokens = len(tokens.token_ids) - tokens.num_decodes
        limits = self._limits
        if tokens.rope_factors:
            if not num_chunk_tokens:
                note_unrecorded("its rotary factors depend on the length of each row")
            return False
        if not num_chunk_tokens:
            if tokens.num_decodes > limits.get("decodes", tokens.num_decodes):
                note_unrecorded(self._reason_against_decodes)
                return False
            return len(tokens.last) == tokens.num_decodes
        if not self._backend.on_device:
            return False
        if context is not None and not context.takes_chunks:
            return False
        return num_chunk_tokens <= limits.get("chunk tokens", MAX_CHUNK_TOKENS)

    def _key_of(self, tokens: PackedTokens, prefixes: Prefixes, kind: Hashable) -> GraphKey:
        """Returns the key of the smallest graph that could serve the running step."""
        variant, num_keys = None, 0
        if self._context is not None:
            variant, num_keys = self._context.variant, self._context.num_keys
        options = kind, step_options(self._device, self._model())
        key = key_of(tokens, prefixes, self._groups, num_keys, variant, options, self.reads_keys)
        return key.without_unused_rows(tokens.num_decodes) if self._live.classes else key

    def _find_or_record(
        self, requested: GraphKey, tokens: PackedTokens, prefixes: Prefixes
    ) -> GraphKey | None:
        """Once enough steps have missed the graph `requested`, records it and returns its key, or
        `None` if that fails. Until then, returns the key of the best larger graph, or `None`."""
        candidates = (key for key in self._graphs if key.serves(requested))
        best = min(candidates, key=GraphKey.waste, default=None)
        parts = (self._context, *self._states)
        is_fixed = any(getattr(part, "is_fixed", False) for part in parts)
        if self._misses.is_due(requested, is_fixed, has_larger=best is not None):
            return self._try_record(requested, tokens, prefixes)
        self._misses.add(requested)
        return best

    def _replay(
        self,
        key: GraphKey,
        tokens: PackedTokens,
        prefixes: Prefixes,
        token_ids: Tensor | None,
    ) -> Tensor | None:
        """Replays the graph of `key` for a step; returns a copy of the step's logits. If a live
        module returns a result unlike the recorded one, drops the graph and returns `None`."""
        step = self._graphs[key] = self._graphs.pop(key)  # now the last used
        step.num_replays += 1
        if step.num_replays == MIN_REPLAYS:
            self._misses.note_paid()
        with self.in_order():
            step.inputs.fill(tokens, prefixes, self._ranges(step.context, tokens))
            if token_ids is not None:
                target = step.inputs.token_ids[0, : len(token_ids)]
                target.copy_(token_ids)
            step.inputs.move_in(self._states)
            try:
                step.replay()
            except LiveRefused as error:
                self._live.learn(error)
                self._graphs.pop(key, None)
                return None
            step.inputs.grow(self._states)
            return step.logits[: len(tokens.last)].clone()  # the next replay overwrites them

    def _try_record(
        self,
        key: GraphKey,
        tokens: PackedTokens,
        prefixes: Prefixes,
    ) -> GraphKey | None:
        """Records a graph and returns its key; returns `None` if that fails, or while another
        thread records. Logs a failure, and limits which graphs are recorded from then on; but the
        first `KeysReadError` sets `reads_keys` and drops all graphs. If an interrupt leaves a mode
        of torch active, the guarded call around this one ends it (`interrupts.guarded`)."""
        handled_error = sys.exc_info()[1]
        with timed("record"), exclusive_recording(self._device) as is_exclusive:
            if not is_exclusive:
                return None
            try:
                step = self._record(key, tokens, prefixes)
            except Exception as error:
                if is_interrupt(error):
                    raise
                if isinstance(error, KeysReadError) and not self.reads_keys:
                    self.reads_keys = True
                    self.clear()  # graphs are recorded again, with smaller block tables
                    return None
                if not self._backend.on_device and self._live.learn(error):
                    return None  # the next step tries again
                logger.debug("capturing %s failed", key, exc_info=True)
                self._handle_failure(key, error, reason_of(error, handled_error))
                return None
            self._misses.note_recorded()
            while len(self._graphs) >= MAX_GRAPHS:
                oldest = next(iter(self._graphs))
                del self._graphs[oldest]
                self._misses.forget(oldest)
            self._graphs[key] = step
            logger.debug("captured %s", key)
            return key

    def _record(self, key: GraphKey, tokens: PackedTokens, prefixes: Prefixes) -> RecordedStep:
        """Records a graph for steps of `key`. Raises the errors of the forward, and `NotCapturable`
        if the forward cannot be recorded, or if the results of a tape differ."""
        inputs = StaticInputs(key, self._groups, self._device, self._states)
        prepare = functools.partial(inputs.copy_in, self._states)
        context = self._context
        recorded_context = None
        buffers = storage_addresses([inputs.token_ids, *inputs.state_buffers])
        storages = buffers.union(self._storages)
        if context is not None:
            recorded_context = context.record(inputs.ranges, key.num_tokens, key.num_chunks > 0)
            storages |= storage_addresses(context.tensors)
        outputs: list[Tensor] = []
        run = functools.partial(_run_forward, weakref.ref(self), inputs, outputs, recorded_context)
        model = self._model()
        with self.in_order():
            inputs.fill(tokens, prefixes, self._ranges(recorded_context, tokens))
            undoing = undoing_writes(model, self._state())
            with uncached_autocast(self._device), undoing, self._live.calling():
                graph = self._backend.capture(run, storages, prepare)
                if not self._backend.on_device:
                    # a tape runs other kernels than the modules do
                    num_rows = max(1, len(tokens.last))
                    results = [outputs[0], *inputs.state_buffers]
                    dtypes = {autocast_dtype(self._device), getattr(model, "dtype", None)}
                    check_replay(graph.replay, [x[:num_rows] for x in results], dtypes, prepare)
        return RecordedStep(inputs, outputs[0], graph, recorded_context)

    def _handle_failure(self, key: GraphKey, error: Exception, reason: str) -> None:
        """If memory ran out, only delays the next attempt. Otherwise limits what is recorded:
        shared prefixes if the step has them, else chunk tokens if it has chunks, else decodes. But
        if a step of decodes alone, without shared prefixes, fails while there is no graph of
        decodes, stops recording altogether."""
        if is_out_of_memory(error):
            self._misses.delay(key)
            note_unrecorded(f"there is not enough free memory to record more steps ({reason})")
            return
        if key.prefixes:  # the next attempt records the step without a cascade
            self._limits["prefixes"] = 0
            self._graphs = {
                graph_key: step
                for graph_key, step in self._graphs.items()
                if not graph_key.prefixes
            }
            logger.info("steps are recorded without cascades over shared prefixes: %s", reason)
            return
        quantity, limit = limit_below(key)
        has_decodes = any(not graph_key.num_chunks for graph_key in self._graphs)
        if quantity == "decodes" and not has_decodes:
            self.unsupported_reason = reason
            self.clear()
            note_unrecorded(reason)
            return
        self._limits[quantity] = limit
        if quantity == "decodes":
            self._reason_against_decodes = f"with more than {limit} rows, {reason}"
        logger.info("steps with more than %d %s are not recorded: %s", limit, quantity, reason)

    def _ranges(
        self, recorded_context: RecordedContext | None, tokens: PackedTokens
    ) -> list[tuple[Bounds, Bounds]]:
        """Returns the token ranges of the running step's context, in the recorded step's order."""
        if recorded_context is None or self._context is None:
            return []
        keys = recorded_context.keys
        return self._context.ranges(keys, tokens.num_decodes, len(tokens.token_ids))

    def _released_blocks(self) -> list[weakref.ref[KVBlocks]]:
        layers = (layer for group in self._groups for layer in group.storage.released.values())
        return [*map(weakref.ref, layers)]

    def _check_blocks(self) -> bool:
        """Drops all graphs if a layer's blocks were replaced or added, as happens when the pool
        grows or is rebuilt, but not while the same blocks are released. Returns whether there are
        blocks, or the model needs none."""
        blocks: list[weakref.ref[KVBlocks]] = []
        for group in self._groups:
            blocks += map(weakref.ref, group.storage.layers.values())
        if blocks != self._blocks and (blocks or self._released_blocks() != self._blocks):
            self._graphs.clear()
            self._blocks = blocks
            self._shared_prefixes = SharedPrefixes(self._model, self._groups)
        return bool(blocks) or not self._groups


def _run_forward(
    owner: weakref.ref[StepGraphs],
    inputs: StaticInputs,
    outputs: list[Tensor],
    recorded_context: RecordedContext | None,
) -> None:
    """Runs the forward to record, from `inputs` to `outputs`; the first run appends the output
    buffer. `owner` is weak, so that a recording does not keep the `StepGraphs` alive."""
    graphs = owner()
    assert graphs is not None and graphs._forward is not None
    # an autocast context of the caller may have cached converted weights before the recording
    torch.clear_autocast_cache()
    reading = NOTHING if recorded_context is None else recorded_context.reading()
    with reading:
        logits = graphs._forward(
            inputs.token_ids,
            inputs.positions,
            inputs.steps(),
            inputs.logit_indices,
            graphs._context,
            **inputs.arguments,
        )
    torch.clear_autocast_cache()
    if not outputs:
        outputs.append(graphs._outputs.like(logits))
    outputs[0].copy_(logits)
