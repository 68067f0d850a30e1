"""Runs one model's forwards for the batching loop, one at a time, and handles changes to the model.
The scheduler chooses the rows; decodings sample the tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.backends import unsupported_reasons
from ...attention.masks import mask_observer
from ...attention.switch import compiled_modules, switch_attention
from ...cache.memory import PagedMemory, autocast_dtype
from ...compiled import running_eagerly
from ...interrupts import is_interrupt, restoring
from ...model.forwards import compute_device
from ...model.state import ModelState
from ...model.weights import WeightsGuard
from ...plan import StepPlan
from ...rooms import FingerprintsRoom, OnDemand, TapeRoom, is_installed, room, room_if_installed
from ...seams import Adapters, ForwardContext, RunAhead
from ...step import NotPackable
from ...switches import NOTHING
from ...threads import step_lock
from ...topics import Topic
from ..decoding.base import Fetch, LogitRows
from ..decoding.vocabulary import num_embeddings
from ..generation import Generation
from ..request import Sequence
from ..scheduling.scheduler import Scheduler
from .runner import Runner


@dataclass
class StableSpan:
    """A span of time in which no other code changes the model: one step of an engine, or a call
    that runs its requests to their ends."""

    is_call: bool = False
    is_open: bool = False  # whether `Executor.open` was called, or is not needed
    is_committed: bool = False  # whether `Executor.commit` was called, or is not needed


class Executor:
    """Runs the forwards of one model. Callers of `run` and `run_rows` hold `lock`, the model's
    `step_lock`."""

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedMemory,
        runner: Runner,
        scheduler: Scheduler,
        guard: WeightsGuard,
        adapters: OnDemand[Adapters] | None = None,
    ) -> None:
        self.model = model
        self.runner = runner
        self.guard = guard
        self.lock = step_lock(model)
        self._processes = memory.processes
        self._fingerprints: FingerprintsRoom | None = room_if_installed("fingerprints")
        self.slowed_by: set[str] = set()  # reasons why steps were slower than they could be
        self.checks_weights = False  # whether the prefix cache is used (see `begin`)
        self.allows_replays = False  # whether steps may be replays (see `begin`)
        self.adapters = adapters or OnDemand[Adapters]()
        # launches decode steps before their input tokens are on the host; `None` if no step can be
        # launched so early
        self.run_ahead: RunAhead | None = None
        if runner.recorder is not None:
            self.run_ahead = runner.recorder.run_ahead(memory, scheduler)
        # `runner.num_forwards` when the changes that forwards made to the model's state were last
        # accepted
        self._num_accepted_forwards = 0
        # Two contexts around each step: the first runs compiled layers without compiled code, and
        # the second sets the attention of configs to `"hf_paged"`. `None`: not created yet.
        self._switches: tuple[AbstractContextManager[None], ...] | None = None
        # `guard.num_changes` at the last `forget_model`; -1 if that was interrupted
        self._num_handled_changes = 0
        # whether the model's state must be read before the next decodes or the next `commit`
        self._is_state_due = False
        # the model's state when it was last read; `None` if there is none that still applies
        self._state: ModelState | None = None
        self.runs_user_code = False  # whether user code runs between steps (see `begin`)
        # whether user code may have changed the model since the last step
        self.is_unchecked = False

    def begin(
        self,
        check_weights: bool = True,
        switch_attention: bool = True,
        allow_replays: bool = True,
        runs_user_code: bool = True,
    ) -> None:
        """Starts work on the model; must be called before other methods, and only while no step is
        in flight. `check_weights`: must be set if the prefix cache is used. `switch_attention`:
        whether each step sets the model's attention to `"hf_paged"`; if not, the caller has set it.
        `allow_replays`: whether recorded steps may be replayed, for which the model's state is read
        (never without the optional package `fingerprints`). `runs_user_code`: whether code
        other than transformers' and the model's runs between steps. These options, except
        `switch_attention`, stay set if an earlier call has set them."""
        self._device = compute_device(self.model)
        # the autocast dtype of all forwards, whichever thread runs the steps; `None`: no autocast
        self.autocast_dtype = autocast_dtype(self._device)
        self.checks_weights |= check_weights
        self.allows_replays |= allow_replays and self._fingerprints is not None
        self.runs_user_code |= runs_user_code
        self._switches_attention = switch_attention
        self.guard.begin(self.checks_weights, self.autocast_dtype)
        self.runner.pack()
        self.forget_model()

    def open(self, span: StableSpan) -> None:
        """Called before the first step of a span and, in an engine's call, before each further
        step. Before the first, begins the guard's span and makes the next `check_model` check the
        model; before the others, calls `mark_unchecked`."""
        if span.is_open:
            self.mark_unchecked()  # another thread may change the model without pausing the engine
        else:
            with self.lock:
                self.guard.begin_span()
                self.handle_model_change()
            span.is_open = self.is_unchecked = True

    def commit(self, span: StableSpan, runs_user_code: bool = False) -> None:
        """Called before control returns to user code; in a call, after its first token at the
        latest. If blocks are cached, fingerprints the weights that computed the span's blocks,
        once and only if needed (`WeightsGuard.commit`). Then, if user code may change the model
        before the next step, also takes the reference with which `check_model` compares the model
        (`ModelState.watch`). User code may do so after a step of an engine, or with
        `runs_user_code`."""
        should_watch = runs_user_code or not span.is_call
        is_done = span.is_committed and (not should_watch or self.guard.is_watched)
        if self.guard.is_on and not is_done:
            with self.lock:
                state = None
                if self._is_state_due:
                    with self.attention():
                        self._read_model()
                    state = self._state
                if not span.is_committed:
                    self.guard.commit(span.is_call, state)
                if should_watch and self._state is not None and not self.guard.is_watched:
                    self._state.watch()
                    self.guard.is_watched = True
        span.is_committed = True

    def close(self, span: StableSpan) -> None:
        """Ends the span, even after a failure, so that it can be opened again. Without a `commit`,
        the guard abandons the span."""
        if span.is_open and not span.is_committed:
            self.guard.abandon()
        span.is_open = span.is_committed = False

    def go_idle(self) -> None:
        """Called once all requests have finished: releases the objects held for steps, and calls
        `WeightsGuard.go_idle`, which may fingerprint the weights."""
        self.clear_run_ahead()
        self.runner.go_idle()
        with self.lock:
            self.guard.go_idle()
        self._state = None  # it holds the weights

    def handle_weight_change(self) -> None:
        """Called between steps after the weights have changed: drops the blocks cached until now,
        and everything that `forget_model` drops."""
        self.guard.drop_all()
        self.forget_model()

    def forget_model(self) -> None:
        """Drops everything derived from the model, except its last state if the guard relies on it
        (`is_watched`). No step is replayed until the model's state is read again (if
        `_is_state_due`). The next step collects again the configs whose attention it switches."""
        num_changes = self.guard.num_changes
        self._num_handled_changes, self._switches = -1, None
        recorder = self.runner.recorder
        must_detect_changes = self.guard.is_on or (recorder is not None and self.runs_user_code)
        may_replay = recorder is not None and recorder.needs_state(self.slowed_by)
        self._is_state_due = self.allows_replays and (must_detect_changes or may_replay)
        if not self.guard.is_watched:
            self._state = None
        self.num_embeddings = num_embeddings(self.model)  # valid token ids are smaller
        self.clear_run_ahead()
        if self.adapters.instance is not None:
            self.adapters.instance.forget_model()
        self.runner.begin(None)
        self._num_handled_changes = num_changes  # last, so that an interrupted call is repeated

    def clear_run_ahead(self) -> None:
        """Drops the step launched ahead, if there is one."""
        if self.run_ahead is not None:
            self.run_ahead.clear()

    def handle_model_change(self) -> None:
        """Calls `forget_model` if the guard has detected a change to the model since
        `forget_model` was last called."""
        if self.guard.num_changes != self._num_handled_changes:
            self.forget_model()

    def check_model(self) -> None:
        """Called before a step, within `attention`. If user code may have run since the last step
        (`is_unchecked`) and has changed the model since its state was read, drops cached prefixes,
        recorded steps and the step launched ahead, and stops packing rows if the new structure
        rules packing out. Without the optional package `fingerprints`, user code counts as a
        change."""
        is_due, self.is_unchecked = self.is_unchecked, False
        if not is_due:
            return
        if self._fingerprints is None:
            self.handle_weight_change()
        elif self._state is None or self._state.is_same() or not self._read_model():
            return
        self._unpack()

    def mark_unchecked(self) -> None:
        """Makes the next replay check whether user code has replaced modules or tensors."""
        if self._state is not None:
            self._state.mark_unchecked()

    def _read_model(self) -> bool:
        """Reads the model's state, within `attention`, and returns whether it differs from the
        state read before, if any; if so, drops cached prefixes, recorded steps and the step
        launched ahead."""
        assert self._fingerprints is not None
        previous = self._state
        state: ModelState | None = None
        try:
            state = self._fingerprints.read_state(self.model)
        except Exception as error:  # must not fail a step
            if is_interrupt(error):
                raise
            if self.runner.recorder is not None:
                reason = f"decode steps are not recorded: changes cannot be detected ({error})"
                self.slowed_by.add(Topic.RECORDING(reason))
        has_changed = False
        if previous is not None:
            if state is not None and self.guard.is_watched:
                state.watch()
            has_changed = state is None or not state.is_like(previous)
        if has_changed:
            self.handle_weight_change()
        self._state, self._is_state_due = state, False
        if state is not None:
            if self.runs_user_code:
                state.accept()
            # in a `generate` call, which switches attention itself, replays check the model again
            # only after `mark_unchecked`, so the addresses that they read must stay valid
            if not self._switches_attention:
                state.keep_memory()
        recorded_state = None if self.runner.recorder is None else state
        self.runner.begin(recorded_state)
        return has_changed

    @restoring
    def attention(self) -> Iterator[None]:
        """A context for each step: switches attention to `"hf_paged"` (unless the caller has), runs
        layers that update a cache without compiled code, disables mask observers and gradients, and
        collects the reasons for slow attention in `slowed_by`."""
        switches = self._switches  # read once, since `begin` of another thread may reset it
        if switches is None:
            modules = list(self.model.modules())
            eager_context = running_eagerly(compiled_modules(modules))
            with eager_context:
                if is_installed("tape"):
                    tape: TapeRoom = room("tape", "half-precision products")
                    self.runner.product_context = tape.kernel_products(modules)
            attention_context = switch_attention(modules if self._switches_attention else [])
            switches = self._switches = eager_context, attention_context
        eager_context, attention_context = switches
        reset_tokens = (mask_observer.set(None), unsupported_reasons.set(self.slowed_by))
        has_gradients = torch.is_grad_enabled()
        try:
            # cheaper than `torch.no_grad`, which makes eight Python calls
            torch._C._set_grad_enabled(False)
            with eager_context, attention_context:
                yield
        finally:
            torch._C._set_grad_enabled(has_gradients)
            mask_observer.reset(reset_tokens[0])
            unsupported_reasons.reset(reset_tokens[1])

    def run(self, plan: StepPlan) -> Tensor:
        """Returns the logits of a step, as `Runner.run` does. Leading rows that were launched ahead
        get their logits from that launch; the other rows are computed now."""
        if self._is_state_due and plan.num_decodes:
            self._read_model()
        launched_logits, num_launched = None, 0
        if self.run_ahead is not None:
            launched_logits, num_launched = self.run_ahead.take(plan)
        remaining_plan = plan
        if launched_logits is not None:
            if num_launched == len(plan):
                return launched_logits
            remaining_plan = plan.select(range(num_launched, len(plan)))
        logits = self.run_rows(remaining_plan)
        if self._state is not None and self._num_accepted_forwards != self.runner.num_forwards:
            if self.runs_user_code:
                self._state.accept()
            self._num_accepted_forwards = self.runner.num_forwards
        if launched_logits is None:
            return logits
        return torch.cat([launched_logits, logits])

    def run_rows(self, plan: StepPlan) -> Tensor:
        """Computes all rows of the plan, whether launched ahead or not; returns logits as `run`
        does. If a packed forward raises [`NotPackable`], for instance because user code changed the
        model, computes this and later steps until the next `begin` without packing; raises the
        error if the runner must pack."""
        try:
            return self._run_rows(plan)
        except NotPackable as error:
            if not self._unpack(str(error)):
                raise
        return self._run_rows(plan)

    def _unpack(self, failure: str | None = None) -> bool:
        """Calls `Runner.unpack` with the `failure` of a packed forward, if any; returns whether the
        runner stopped packing rows. If so, adds the reason to `slowed_by`."""
        reason = self.runner.unpack(failure)
        if reason is None:
            return False
        prefix = "a packed forward failed: " if failure else ""
        self.slowed_by.add(
            Topic.HOOKS(
                f"rows are computed side by side from now on, since {prefix}{reason}. Add hooks,"
                " replace code and call `train()` only while no request is running"
            )
        )
        return True

    def _run_rows(self, plan: StepPlan) -> Tensor:
        for sequence in plan.sequences:
            if sequence.request.adapter is not None:
                return self.adapters().run(plan, self)
        return self.compute(self.runner.run, plan, None)

    def compute(self, forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Runs `forward`, a method of a runner, with the autocast of `begin` and together with the
        other processes, if any; returns its result."""
        shared_forward = NOTHING if self._processes is None else self._processes.forward()
        with self._autocast_context(), shared_forward:
            return forward(*arguments)

    @restoring
    def using(self, adapter: Hashable) -> Iterator[None]:
        """A context that holds `lock`, and in which the model runs with an adapter. Raises the
        errors of `Adapters.run`."""
        with self.lock, self.adapters().using(adapter):
            yield

    def fetch_while_running_ahead(self, ready: list[tuple[Generation, LogitRows]]) -> Fetch | None:
        """Returns a function that copies the tokens of these rows to the host and meanwhile tries
        to launch the next step; `None` if no such step can be launched (`RunAhead.fetch`)."""
        if self.run_ahead is None or not self.runner.is_packed:
            return None
        return self.run_ahead.fetch(ready, self._launch_next)

    def _launch_next(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
    ) -> Tensor | None:
        adapter, *other_adapters = {sequence.request.adapter for sequence in sequences}
        if other_adapters:
            return None
        # clamped, since the host detects ids out of range only after this launch
        valid_ids = token_ids.clamp(0, self.num_embeddings - 1)
        adapter_context: AbstractContextManager[ForwardContext | None] = nullcontext()
        if adapter is not None:
            adapter_context = self.adapters().using(adapter)
        with self.lock, self._autocast_context(), adapter_context as context:
            return self.runner.run_ahead(sequences, valid_ids, context)

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None and autocast_dtype(self._device) is None:
            # even a disabled `torch.autocast` clears its weight cache in every step
            return NOTHING
        return torch.autocast(
            self._device.type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
        )
