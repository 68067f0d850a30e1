"""`EngineCore` adds, steps, reports and ends an engine's requests under one lock. The step loop
schedules and computes the requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from .. import forks
from ..cache.block_pool import OutOfBlocksError
from ..cache.idle import begin_use, end_use
from ..cache.waits import Shortage
from ..config import PagedConfig
from ..forks import lazy_property
from ..interrupts import guarded, is_interrupt, register_for_cleanup, restoring, setting
from ..model.sharding import lead
from ..model.wrappers import adapters_room_for
from ..rooms import room
from ..seams import EngineParts, Grammars
from ..timing import setup_seconds
from .arguments import RequestOptions, as_list, checked_options, num_requested_tokens
from .engine_loop import EngineLoop
from .execution.executor import StableSpan
from .generation import Generation, RequestState
from .loop import StepLoop
from .pauses import Pauses
from .prompt_forms import Prompt, prompt_ids, split_inputs
from .request import Request, RowsError, Sequence
from .results import RequestOutput, RequestTotals, trim_pending


class EngineCore(EngineLoop):
    """The requests of an engine: adds them, takes steps with the loop of `EngineLoop`, and ends
    them."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, parts: EngineParts) -> None:
        # guards changes of the attributes; a method, or its caller, acquires it through `lock`
        self.inner_lock = forks.rlock()
        super().__init__(model, config, parts, lead(model, config, self), self.inner_lock)
        self.lock: AbstractContextManager[Any] = self.inner_lock
        if self.leader is not None:
            self.lock = self.leader.locked(self.inner_lock)
        self.requests: dict[Hashable, RequestState] = {}  # unfinished requests, by id
        self.pending_outputs: list[RequestOutput] = []  # returned by the next `PagedEngine.step`
        # by event loop: the lock under which its `astream` readers take one step at a time; an
        # entry lasts as long as a reader refers to the lock
        self.reader_locks = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
        self.pauses = Pauses(self.inner_lock)
        self.totals = RequestTotals()
        # requests to end: the step in progress ends them when it finishes, otherwise the next
        # `settle` does; finalizers append without the lock
        self.cancelled_requests: deque[RequestState] = deque()
        self._stepping_thread_id: int | None = None  # id of the thread that is taking a step
        # by open `keeping_pool` context: the id of the thread that opened it
        self._pool_thread_ids: dict[object, int] = {}
        self._last_step_failed = False  # if so, another failure ends the step's requests
        # set while steps wait for memory that other models hold
        self._shortage: Shortage | None = None
        self._id_numbers = itertools.count()  # for generated request ids
        forks.add_listener(self)
        register_for_cleanup(self)

    @lazy_property
    def grammars(self) -> Grammars:
        compiler: Grammars = room("grammar", "`schema`, `regex` or `grammar`").GrammarCompiler()
        return compiler

    def make_id(self) -> str:
        """Returns a new request id, which no unfinished request has."""
        ids = (f"request-{number}" for number in self._id_numbers)
        return next(request_id for request_id in ids if request_id not in self.requests)

    @guarded
    def add(
        self,
        tokenizer: Any,
        prompt: Prompt,
        generation_config: Any,
        options: RequestOptions,
        output_queue: deque[RequestOutput] | None = None,
        reports_tokens: bool = True,
    ) -> str:
        """Queues a request and returns its id. Its outputs go to `output_queue` (default:
        `pending_outputs`); without `reports_tokens`, only the one with the result does. Raises
        the errors of `PagedEngine.add_request`."""
        # without the lock, so that other threads can take steps meanwhile: tokenizing a prompt and
        # compiling a grammar may take long
        has_encoder = self.model.config.is_encoder_decoder
        prompt, inputs = split_inputs(prompt, options.inputs, has_encoder)
        ids: list[int] = []
        if prompt is not None or inputs is None:
            ids = prompt_ids(prompt, tokenizer)
        options = dataclasses.replace(options, inputs=inputs)
        if inputs is None:
            self.check_length(ids, options.request_id, num_requested_tokens(generation_config))
        if (options.schema, options.regex, options.grammar) != (None, None, None):
            constraint = self.grammars.processor(options, tokenizer, self.model)
            processors = as_list("logits_processor", options.logits_processor)
            options = dataclasses.replace(options, logits_processor=[*processors, constraint])
        make_state = functools.partial(
            RequestState,
            self.model,
            tokenizer,
            ids,
            generation_config,
            output_queue=self.pending_outputs if output_queue is None else output_queue,
            reports_tokens=reports_tokens,
        )
        return self._check_and_add(options, make_state)

    def _check_and_add(
        self,
        options: RequestOptions,
        make_state: Callable[[RequestOptions], RequestState],
    ) -> str:
        """Checks a request's options, makes the request's state and adds it to the loop. Returns
        the request's id."""
        state: RequestState | None = None
        try:
            with self.lock, setting(setup_seconds, self.setup_seconds):
                if self.cancelled_requests:
                    self.settle()
                if self.loop is None:
                    self._end_orphaned_requests()
                new_state = make_state(self._check_options(options))
                loop = self.get_loop()  # may allocate memory, hence after the checks
                self.prepare(new_state)
                if not self.requests:
                    loop.executor.begin()
                    begin_use(self.memory)
                    if self.leader is not None:
                        self.leader.begin()
                state = new_state
                loop.add(state)
                self.requests[state.request_id] = state
                self.has_shared_prefills |= state.request.num_rows > 1
                if options.streamer is not None:
                    options.streamer.put(state.decoding.input_ids.cpu())
                return state.request_id
        except BaseException:  # a failed check, an error of the streamer, or an interrupt
            with self.lock:
                if state is not None and self.requests.get(state.request_id) is state:
                    self.remove(state)
                    state.end_streamer()
                else:  # not in `requests` yet
                    if state is not None and self.loop is not None:
                        self.loop.drop(state)
                    self._release_if_idle()
            raise

    def _check_options(self, options: RequestOptions) -> RequestOptions:
        """Returns the options as from `checked_options`, with an id. Raises `ValueError` for an
        invalid id, adapter or assistant, an id in use, or a model that no longer fits the
        unfinished requests, and the errors of `Leader.check_request`."""
        options = checked_options(options, self.config.cache_salt)
        if self.requests:
            self.check_unchanged()
        if self.leader is not None:
            self.leader.check_request(options)
        request_id = options.request_id
        if request_id in self.requests:
            raise ValueError(
                f"request id {request_id!r} is in use by an unfinished request: choose another"
            )
        if request_id is None:
            request_id = self.make_id()
        return dataclasses.replace(options, request_id=request_id)

    def check_length(self, ids: list[int], request_id: Hashable, num_new_tokens: int = 1) -> None:
        """Raises `IndexError` if a prompt of token ids is longer than the model's table of
        positions, unless `add` can make the table longer, and `OutOfBlocksError` if the prompt and
        `num_new_tokens` new tokens can never fit into the memory. Does not wait for a forward in
        progress. Checks nothing if no request is unfinished, or if the model has an encoder."""
        loop = self.loop
        if loop is None or not self.requests or self.model.config.is_encoder_decoder:
            return
        if request_id is None:
            request_id = "request"
        max_length = len(ids) + max(1, num_new_tokens)
        request = Request(request_id, [Sequence(ids)], max_length)
        if not self.layout.can_grow_unpacked:
            request.limit_positions(self.layout.max_positions)
        with loop.memory.lock:
            loop.scheduler.preemption.check_fits(request)

    def end(
        self,
        state: RequestState,
        last_outputs: list[RequestOutput] | None = None,
        reason: str = "error",
    ) -> None:
        """Removes a request, frees its blocks, and queues `last_outputs` (default: outputs of all
        tokens that no output has reported). The last output gets the request's result. `reason` as
        in `RequestState.result`. Raises an interrupt that came while the tokenizer decoded the
        result."""
        result = state.result(reason)
        if last_outputs is None:
            last_outputs = state.remaining_outputs(result)
        # a result without tokens also needs an output
        outputs = last_outputs or [RequestOutput(state.request_id)]
        outputs[-1].result = result
        self.totals.add(result)
        self.totals.counts.update(state.draft_counts)
        try:
            try:
                self.remove(state)
            finally:  # the caller gets the result even if the cleanup raises
                self._report(state, outputs)
        finally:
            if not state.is_reported:  # an interrupt came before `_report` began
                self._report(state, outputs)
            self.requests.pop(state.request_id, None)
            state.end_streamer()
            if state.interrupt is not None:
                raise state.interrupt

    @staticmethod
    def _report(state: RequestState, outputs: list[RequestOutput]) -> None:
        """Queues a request's last outputs for its reader, and sets `is_reported`."""
        # `set_reported` yields nothing: `extend`, one call of C code, queues the outputs and then
        # sets the flag. Between two calls, an interrupt could cause the outputs to be queued twice.
        set_reported: Iterator[Any]
        set_reported = iter(functools.partial(setattr, state, "is_reported", True), None)
        state.output_queue.extend(itertools.chain(outputs, set_reported))

    def cancel(self, *states: RequestState) -> None:
        """Ends requests early. If this is called during a step (from a caller's code or a
        finalizer), they end after the step."""
        self.cancelled_requests.extend(states)
        self.settle()

    def free(self) -> None:
        """Cancels every request and drops the loop. After an interrupt, call it again."""
        with self.lock:
            try:
                self.cancel(*reversed(self.requests.values()))
            finally:
                self.retire()

    def _end_orphaned_requests(self) -> None:
        """Ends requests whose loop is gone, because `free` was interrupted or called during a
        step."""
        self.cancelled_requests.extend(reversed(self.requests.values()))  # the stack reverses them
        self._end_cancelled_requests()

    def settle(self) -> None:
        """Ends the requests in `cancelled_requests`. If a step is in progress, leaves that to the
        end of the step. The caller holds the lock."""
        if self._stepping_thread_id is None:
            self._end_cancelled_requests()

    def _end_cancelled_requests(self) -> None:
        with contextlib.ExitStack() as stack:  # ends all requests, even if ending one raises
            for state in self.cancelled_requests.copy():
                stack.callback(self._end_if_unfinished, state)
        while self.cancelled_requests and self.cancelled_requests[0] not in self.requests.values():
            self.cancelled_requests.popleft()

    def _end_if_unfinished(self, state: RequestState) -> None:
        if self.requests.get(state.request_id) is state:
            self.end(state, reason="cancelled")

    def clean_up_after_error(self) -> None:
        """Drops the state of a step that an interrupt left open in this thread (see
        `interrupts.register_for_cleanup`)."""
        if self._stepping_thread_id == threading.get_ident():
            with self.lock:
                self._end_cancelled_requests()
                setup_seconds.set(None)
                self._stepping_thread_id = None

    def remove(self, state: RequestState) -> None:
        """Removes a request without queueing an output. After the last request, releases the
        executor's state, and marks the memory as unused unless a `keeping_pool` context is
        open."""
        try:
            if self.loop is not None:
                self.loop.drop(state)
        finally:
            self.requests.pop(state.request_id, None)
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        if self.loop is not None and not self.requests:
            self._last_step_failed = False
            self._shortage = None
            try:
                self.loop.executor.go_idle()
            finally:
                self._end_use()

    def _end_use(self) -> None:
        if not self.requests and not self._pool_thread_ids:
            end_use(self.memory)

    @restoring
    def keeping_pool(self) -> Iterator[None]:
        """A context that keeps the pool allocated, even without requests."""
        context = object()
        try:
            with self.lock:
                self._pool_thread_ids[context] = threading.get_ident()
                begin_use(self.memory)
            yield
        finally:
            with self.lock:
                self._pool_thread_ids.pop(context, None)
                self._end_use()

    @guarded
    def handle_weight_change(self, recompute: bool) -> None:
        """Calls `StepLoop.handle_weight_change`. With `recompute`, also prepares the requests'
        inputs again, and ends the requests for which that fails."""
        with self.lock:
            if self.loop is not None:
                self.loop.handle_weight_change(recompute)
            if recompute:
                for state in list(self.requests.values()):
                    try:
                        state.prepare_again(self.model)
                    except Exception as error:
                        if is_interrupt(error):
                            raise
                        self._fail(state, error)

    def after_fork(self, freed: set[Any]) -> None:
        """Called in a forked child, where only this thread exists: drops what other threads left in
        the engine, and all requests if another thread held the lock."""
        self.pauses.after_fork()
        thread_id = threading.get_ident()
        self._pool_thread_ids = {
            context: user_id
            for context, user_id in self._pool_thread_ids.items()
            if user_id == thread_id
        }
        if self.inner_lock in freed:
            self.requests = {}
            self.pending_outputs.clear()
            self.cancelled_requests, self._stepping_thread_id = deque(), None
            self.retire()

    def _end_unsupported_requests(self) -> None:
        """Ends requests whose adapter only PEFT's own `generate` can compute. `add` rejects such
        adapters, but the caller may have activated one since."""
        adapters = adapters_room_for(self.model)
        if adapters is None or not adapters.has_activated_lora(self.model):
            return
        for state in list(self.requests.values()):
            try:
                adapters.check_served(self.model, state.request.adapter)
            except RowsError as error:
                self._fail(state, error)

    def take_step(self) -> list[RequestOutput]:
        """Waits while the engine is paused, takes a step, and returns all pending outputs. Raises
        the errors of `PagedEngine.step`."""
        pending = self.pending_outputs
        outputs: list[RequestOutput] = []
        try:
            with self.lock:
                self.pauses.wait()
                trim_pending(pending)
                if self.requests:
                    self.step(StableSpan())
                outputs = pending.copy()
                pending.clear()
            return outputs
        except BaseException:  # the next step returns these outputs
            with self.lock:
                # whether `clear` has run: `lock` may raise a deferred interrupt after it
                if outputs and (not pending or pending[0] is not outputs[0]):
                    pending[:0] = outputs
            raise

    @guarded
    def step(self, span: StableSpan) -> None:
        """Takes a step and queues its outputs. Raises interrupts, and the error of a step that
        cannot be completed; the next call repeats that step. If the step fails again, raises
        nothing: the requests that the step would compute end with the error. While other models
        hold the memory that a step needs, returns without an error, for up to `budget.PATIENCE`
        seconds. Does not wait for pauses."""
        if self.loop is None:
            self._end_orphaned_requests()
        loop = self.get_loop()
        if not self.requests:
            return
        num_slowdowns = len(loop.executor.slowed_by)
        is_outermost = self._stepping_thread_id != threading.get_ident()
        self._stepping_thread_id = threading.get_ident()
        # cheaper than a context in every step
        reset_token = setup_seconds.set(self.setup_seconds)
        try:
            self._end_unsupported_requests()
            try:
                if self.requests:
                    loop.step(span)
                self._shortage = None
            except OutOfBlocksError:
                self._shortage = self._shortage or Shortage(loop.memory)
                if not self._shortage.should_await_other_models:
                    self._shortage = None
                    raise
                time.sleep(0.01)
            self._queue_outputs(loop)
            self._last_step_failed = False
        except Exception as error:
            if is_interrupt(error):
                raise
            has_failed_twice, self._last_step_failed = self._last_step_failed, bool(self.requests)
            if not has_failed_twice:
                raise
            self._fail_requests(loop, error)
            self._last_step_failed = False  # the next step computes other requests
        finally:
            setup_seconds.reset(reset_token)
            if is_outermost:
                if self.cancelled_requests:
                    self._end_cancelled_requests()
                self._stepping_thread_id = None
        if not self.requests or len(loop.executor.slowed_by) > num_slowdowns:
            self.note_route()

    def _fail_requests(self, loop: StepLoop, error: Exception) -> None:
        """Ends the requests of a step that failed twice, the second time with `error`
        (`StepLoop.generations_to_fail`). If none of them is left, ends all requests."""
        failing_generations = loop.generations_to_fail(error)
        states = [state for state in self.requests.values() if state in failing_generations]
        for state in states or list(self.requests.values()):
            self._fail(state, error)

    def _fail(self, state: RequestState, error: Exception) -> None:
        state.fail(error)
        self.end(state)

    def _queue_outputs(self, loop: StepLoop) -> None:
        """Queues the outputs of requests that advanced, and the results of requests that ended."""
        while loop.unreported:
            state = loop.unreported[0]  # removed last: after an interrupt, it is still in front
            if isinstance(state, RequestState) and self.requests.get(state.request_id) is state:
                self._queue_step_outputs(state, loop.unreported)
            else:  # the request has ended already
                loop.unreported.popleft()

    def _queue_step_outputs(self, state: RequestState, unreported: deque[Generation]) -> None:
        """Queues the outputs of a request's last step, and its result if it ended. Removes the
        request from `unreported`; if it ended, `_queue_outputs` does so afterwards."""
        step_outputs: list[RequestOutput] | None = None  # `None`: `end` reports unreported tokens
        if state.error is None:
            try:
                step_outputs = state.outputs()
            except Exception as error:
                if is_interrupt(error):
                    raise
                state.fail(error)
        if state.error is not None or state.is_closed:
            self.end(state, step_outputs)
        elif not step_outputs:
            unreported.popleft()
        else:
            # `pop_state` yields nothing: `extend`, one call of C code, queues the outputs and then
            # pops the state. Between two calls, an interrupt could cause the tokens to be queued
            # twice.
            pop_state: Iterator[Any] = iter(unreported.popleft, state)
            state.output_queue.extend(itertools.chain(step_outputs, pop_state))

    def get_loop(self) -> StepLoop:
        """Calls `settle` and returns the loop. If there is no loop or no unfinished request, calls
        `renew` first."""
        if self.cancelled_requests:
            self.settle()
        if self.loop is None or not self.requests:
            return self.renew(keeps_block_sizes=bool(self._pool_thread_ids))
        return self.loop

    def counts(self) -> Counter[str]:
        """Returns the cumulative counters of [`EngineStats`]."""
        counts = self.loop_counts()
        counts.update(self.totals.counts)
        for state in self.requests.values():
            counts.update(state.draft_counts)
            if state.request.first_step_started_at is not None:
                counts["num_prompt_tokens"] += len(state.prompt_ids)
                counts["num_prefix_hit_tokens"] += state.request.num_hit_tokens
        return counts
