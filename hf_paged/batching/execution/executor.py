"""Runs one model's forwards for the batching loop, one at a time, and detects changes of the model.
It chooses no rows and samples nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.backends import unsupported_reasons
from ...attention.latent import wrap_expansions
from ...attention.masks import mask_observer
from ...attention.switch import compiled_layers, switchable_configs, use_paged_attention
from ...cache.memory import PagedMemory, autocast_dtype
from ...compiled import running_eagerly
from ...interrupts import restoring
from ...model.forwards import compute_device
from ...model.state import ModelState, read_state
from ...model.weights import WeightsGuard
from ...plan import StepPlan
from ...rooms import OnDemand
from ...seams import Adapters, ForwardContext, RunAhead
from ...step import NotPackable
from ...switches import NOTHING
from ...threads import step_lock
from ...topics import Topic
from ..decoding.base import Fetch, LogitRows
from ..decoding.prepare import num_embeddings
from ..generation import Generation
from ..request import Sequence
from ..scheduling.scheduler import Scheduler
from .runner import Runner

logger = logging.getLogger(__name__)


@dataclass
class StableSpan:
    """A span of time in which no other code changes the model (`model.weights.WeightsGuard`): a
    step or a `generate` call."""

    is_call: bool = False
    is_open: bool = False
    is_committed: bool = False


class Executor:
    """Runs the model under its `step_lock`."""

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
        self.slowed_by: set[str] = set()  # why kernels did not serve some steps
        self.checks_weights = False  # whether the prefix cache is used (`begin`)
        self.replays = False  # whether graphs are used
        self.adapters = adapters or OnDemand[Adapters]()
        # launches decodes before their tokens are on the host
        self.run_ahead: RunAhead | None = None
        if runner.recorder is not None:
            self.run_ahead = runner.recorder.run_ahead(memory, scheduler)
        self._num_forwards = 0  # the runner's, when the model's state was last accepted
        # contexts around each step: compiled layers run without compiled code, and configs name
        # our attention
        self._switches: tuple[AbstractContextManager[None], ...] | None = None
        self._num_changes = -1  # `guard.num_changes` at the last `handle_model_change`
        self._is_state_due = False  # whether the model's state must be read for the runner
        self._state: ModelState | None = None
        self.runs_code = False  # whether other code runs between steps (`begin`)
        # whether other code may have changed the model since the last step
        self.is_unchecked = False

    def begin(
        self,
        check_weights: bool = True,
        switch_attention: bool = True,
        replays: bool = True,
        runs_code: bool = True,
    ) -> None:
        """Starts work on the model; called first, and only while no step is in flight. Without
        `check_weights` the prefix cache is not used. Without `replays` no graphs are used, and the
        model's state is not read. Without `switch_attention` the caller has set the model's
        attention to `"hf_paged"`. Without `runs_code` only code of transformers and the model runs
        between steps."""
        self._device = compute_device(self.model)
        # the dtype of all forwards, whichever thread runs the steps
        self.autocast = autocast_dtype(self._device)
        self.checks_weights = check_weights
        self.replays = replays
        self.runs_code = runs_code
        self._switches_attention = switch_attention
        self.guard.begin(check_weights, self.autocast)
        self.runner.pack()
        self.forget_model()

    def open(self, span: StableSpan) -> None:
        """Called before a span's first step, where it checks the model, and before an engine's
        other steps."""
        if span.is_open:
            self.doubt_model()  # another thread may change the model without a pause
        else:
            with self.lock:
                self.guard.begin_period()
                self.handle_model_change()
            span.is_open = self.is_unchecked = True

    def commit(self, span: StableSpan, runs_code: bool = False) -> None:
        """Fingerprints the weights of computed blocks before control returns to other code (in a
        call, after its first token). If that code may change the model before the next step, as
        between an engine's steps and, with `runs_code`, within a call, also reads the state with
        which `check_model` compares the model."""
        is_read = runs_code or not span.is_call
        is_done = span.is_committed and (not is_read or self.guard.is_watched)
        if self.guard.is_on and not is_done:
            with self.lock:
                state = None
                if self._is_state_due:
                    with self.attention():
                        self._read_model()
                    state = self._state
                if not span.is_committed:
                    self.guard.commit(span.is_call, state)
                if is_read and self._state is not None and not self.guard.is_watched:
                    self._state.watch()
                    self.guard.is_watched = True
        span.is_committed = True

    def leave(self, span: StableSpan) -> None:
        """Ends the span, perhaps after a failure: blocks computed without a `commit` are not
        reused."""
        if span.is_open and not span.is_committed:
            self.guard.abandon()

    def go_idle(self) -> None:
        """Releases what is held for steps, once no request is unfinished."""
        self.clear_run_ahead()
        self.runner.go_idle()
        with self.lock:
            self.guard.go_idle()
        self._state = None  # it holds the weights

    def change_weights(self) -> None:
        """Between steps: after a change of weights, makes all blocks cached before unusable."""
        self.guard.forget_earlier()
        self.forget_model()

    def forget_model(self) -> None:
        """Drops everything derived from the model: no graph is used before its state is read
        again, and configs may differ."""
        self._num_changes, self._switches, self._is_state_due = -1, None, False
        if not self.guard.is_watched:
            self._state = None
        self.num_embeddings = num_embeddings(self.model)  # valid token ids are below this
        self.clear_run_ahead()
        if self.adapters.instance is not None:
            self.adapters.instance.forget_model()
        self.runner.begin(None)

    def clear_run_ahead(self) -> None:
        """Drops the step launched ahead."""
        if self.run_ahead is not None:
            self.run_ahead.clear()

    def handle_model_change(self) -> None:
        """If the guard has detected a change of the model, drops graphs and the step launched
        ahead."""
        if self.guard.num_changes != self._num_changes:
            self.forget_model()
            self._num_changes = self.guard.num_changes
            is_read = self.runner.recorder is not None or self.guard.is_on
            self._is_state_due = self.replays and is_read

    def check_model(self) -> None:
        """Before a step, within `attention`: if other code may have run since the last step
        (`is_unchecked`) and has changed the model, drops cached prefixes, graphs and the step
        launched ahead. Stops packing rows if the model's structure now rules that out."""
        is_due, self.is_unchecked = self.is_unchecked, False
        if not is_due or self._state is None:
            return
        if not self._state.is_same() and self._read_model():
            self._unpack()

    def doubt_model(self) -> None:
        """Has the next replay check whether other code has replaced modules or tensors."""
        if self._state is not None:
            self._state.mark_unverified()

    def _read_model(self) -> bool:
        """Reads the model's state, within `attention`. If it has changed, drops cached prefixes,
        graphs and the step launched ahead; returns whether it has."""
        previous = self._state
        state = read_state(self.model)
        has_changed = False
        if previous is not None:
            if state is not None and self.guard.is_watched:
                state.watch()
            has_changed = state is None or not state.is_like(previous)
        if has_changed:
            self.change_weights()
            self._num_changes = self.guard.num_changes
        self._state, self._is_state_due = state, False
        if state is not None:
            if self.runs_code:
                state.accept()
            if (
                not self._switches_attention
            ):  # a call, which doubts the state only after its forwards
                state.keep_memory()
        recordable = None if self.runner.recorder is None else state
        self.runner.begin(recordable)
        return has_changed

    @restoring
    def attention(self) -> Iterator[None]:
        """Around each step: switches the model's attention to `"hf_paged"`, runs layers with a
        cache without compiled code, and turns off mask observers."""
        switches = self._switches  # `begin` resets it, perhaps in another call's thread
        if switches is None:
            modules = list(self.model.modules())
            switched = modules if self._switches_attention else []
            wrap_expansions(switched)
            eagerly = running_eagerly(compiled_layers(modules))
            with eagerly:
                self.runner.choose_products(modules)
            paged = use_paged_attention(switchable_configs(switched))
            switches = self._switches = eagerly, paged
        eagerly, paged = switches
        tokens = (mask_observer.set(None), unsupported_reasons.set(self.slowed_by))
        has_gradients = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # `torch.no_grad` takes eight Python calls
            with eagerly, paged:
                yield
        finally:
            torch._C._set_grad_enabled(has_gradients)
            mask_observer.reset(tokens[0])
            unsupported_reasons.reset(tokens[1])

    def run(self, plan: StepPlan) -> Tensor:
        """As `Runner.run`; takes the rows launched ahead, if any, and computes the rest."""
        if self._is_state_due and plan.num_decodes:
            self._read_model()
        launched, num_launched = None, 0
        if self.run_ahead is not None:
            launched, num_launched = self.run_ahead.take(plan)
        rest = plan
        if launched is not None:
            if num_launched == len(plan):
                return launched
            rest = plan.select(range(num_launched, len(plan)))
        logits = self.run_rows(rest)
        if self._state is not None and self._num_forwards != self.runner.num_forwards:
            if self.runs_code:
                self._state.accept()
            self._num_forwards = self.runner.num_forwards
        if launched is None:
            return logits
        return torch.cat([launched, logits])

    def run_rows(self, plan: StepPlan) -> Tensor:
        """As `run`, without rows launched ahead. If a packed forward turns out to be impossible,
        for instance because the caller's code changed the model, this step and all later steps run
        without packing."""
        try:
            return self._run_rows(plan)
        except NotPackable as error:
            if not self._unpack(str(error), "a packed forward failed: "):
                raise
        return self._run_rows(plan)

    def _unpack(self, failure: str | None = None, finding: str = "") -> bool:
        """As `Runner.unpack`, with a warning of the reason, which `finding` introduces; returns
        whether it stopped packing rows."""
        reason = self.runner.unpack(failure)
        if reason is None:
            return False
        self.slowed_by.add(
            Topic.HOOKS(
                f"rows are computed side by side from now on, since {finding}{reason}. Add hooks,"
                " replace code and call `train()` only while no request is running"
            )
        )
        return True

    def _run_rows(self, plan: StepPlan) -> Tensor:
        for sequence in plan.sequences:
            if sequence.request.adapter is not None:
                return self.adapters().run(plan, self)
        return self.compute(self.runner.run, plan, None)

    def compute(self, work: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Runs a forward: `work`, one of the runner's methods."""
        shared_forward = NOTHING if self._processes is None else self._processes.forward()
        with self._cast(), shared_forward:
            return work(*arguments)

    def fetch_while_running_ahead(self, ready: list[tuple[Generation, LogitRows]]) -> Fetch | None:
        """Returns a function that copies tokens to the host while the next step is launched; `None`
        if these rows need the host (`RunAhead.fetch`)."""
        if self.run_ahead is None or not self.runner.is_packed:
            return None
        return self.run_ahead.fetch(ready, self._launch_next)

    def _launch_next(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
    ) -> Tensor | None:
        adapter, *others = {sequence.request.adapter for sequence in sequences}
        if others:
            return None
        # the host raises for ids out of range once it has them
        valid_ids = token_ids.clamp(0, self.num_embeddings - 1)
        using: AbstractContextManager[ForwardContext | None] = nullcontext()
        if adapter is not None:
            using = self.adapters().using(adapter)
        with self.lock, self._cast(), using as context:
            return self.runner.run_ahead(sequences, valid_ids, context)

    def _cast(self) -> AbstractContextManager[Any]:
        if self.autocast is None and autocast_dtype(self._device) is None:
            # `torch.autocast` would clear its weight cache in every step
            return NOTHING
        return torch.autocast(
            self._device.type,
            dtype=self.autocast,
            enabled=self.autocast is not None,
        )
