"""The engine's unfinished requests: adding them, reporting their outputs and ending them, under one
lock. Scheduling and computing are left to the step loop."""

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
from ..interrupts import ends_with_calls, guarded, is_interrupt, restoring
from ..model.sharding import lead
from ..model.wrappers import adapters_for
from ..rooms import room
from ..seams import EngineParts, Grammars
from ..timing import counting, setup_seconds
from .arguments import RequestOptions, as_list, checked_options, requested_new_tokens
from .engine_loop import EngineLoop, check_positions
from .execution.executor import StableSpan
from .generation import Generation, Output, RequestState
from .loop import StepLoop
from .pauses import Pauses
from .prompt_forms import Prompt, prompt_ids, split_inputs
from .request import Request, RowsError, Sequence
from .results import RequestOutput, RequestTotals


class EngineCore(EngineLoop):
    """Adds, runs and ends an engine's requests, in a step loop that fits the model's current
    state."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, parts: EngineParts) -> None:
        # held by every method, and by callers while they read
        self.inner_lock = forks.rlock()
        super().__init__(model, config, parts, lead(model, config, self), self.inner_lock)
        self.lock: AbstractContextManager[Any] = self.inner_lock
        if self.leader is not None:
            self.lock = self.leader.locked(self.inner_lock)
        self.requests: dict[Hashable, RequestState] = {}  # unfinished ones, by id
        self.pending_outputs: list[RequestOutput] = []  # outputs for the next `PagedEngine.step`
        # by event loop, the lock of the reader that waits for a step; the readers keep the lock
        # alive, and the lock keeps the event loop alive
        self.readers = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
        self.pauses = Pauses(self.inner_lock)
        self.totals = RequestTotals()
        self._cancelled: list[RequestState] = []  # cancelled during a step, ended after it
        self._stepping_thread: int | None = None  # the id of the thread that takes a step
        self._num_keepers = 0  # open `keeping_pool` contexts
        self._has_failed = False  # whether the last step raised
        self._shortage: Shortage | None = None  # while steps wait for memory of other models
        self._id_numbers = itertools.count()  # for generated ids
        forks.in_child(self)
        ends_with_calls(self)

    @functools.cached_property
    def grammars(self) -> Grammars:
        compiler: Grammars = room("grammar", "`schema`, `regex` or `grammar`").GrammarCompiler()
        return compiler

    def make_id(self) -> str:
        names = (f"request-{number}" for number in self._id_numbers)
        return next(name for name in names if name not in self.requests)

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
        """Queues a request whose outputs go to `output_queue` (default: `pending_outputs`); without
        `reports_tokens`, only its result does. Raises the errors of `add_request`."""
        # without the lock: tokenizing and compiling may take long, and steps go on meanwhile
        prompt, inputs = split_inputs(prompt, options.inputs)
        ids: list[int] = []
        if prompt is not None or inputs is None:
            ids = prompt_ids(prompt, tokenizer)
        options = dataclasses.replace(options, inputs=inputs)
        if inputs is None:
            self.check_length(ids, options.request_id, requested_new_tokens(generation_config))
        if (options.schema, options.regex, options.grammar) != (None, None, None):
            constraint = self.grammars.processor(options, tokenizer, self.model)
            processors = as_list("logits_processor", options.logits_processor)
            options = dataclasses.replace(options, logits_processor=[*processors, constraint])
        queue = self.pending_outputs if output_queue is None else output_queue

        def make_state(options: RequestOptions) -> RequestState:
            return RequestState(
                self.model, tokenizer, ids, generation_config, options, queue, reports_tokens
            )

        return self._add_checked(options, make_state)

    def _add_checked(
        self,
        options: RequestOptions,
        make_state: Callable[[RequestOptions], RequestState],
    ) -> str:
        """Checks a request's options, makes its state and adds it to the loop; returns its id."""
        state: RequestState | None = None
        try:
            with self.lock, counting(self.setup_seconds):
                if self.loop is None:
                    self._end_freed()
                new = make_state(self._with_id(options))
                loop = self.get_loop(new)  # allocates memory, so only after the checks above
                self.prepare(new)
                if not self.requests:
                    loop.executor.begin()
                    begin_use(self.memory)
                    if self.leader is not None:
                        self.leader.begin()
                state = new
                loop.add(new)
                self.requests[new.request_id] = new
                self.shares_prefills |= new.request.num_rows > 1
                if options.streamer is not None:
                    options.streamer.put(new.decoding.input_ids.cpu())
                self.totals.counts["num_prompt_tokens"] += len(new.prompt_ids)
                return new.request_id
        except BaseException:  # from the streamer, or an interrupt: remove the request again
            with self.lock:
                if state is not None and self.requests.get(state.request_id) is state:
                    self.remove(state)
                    state.end_streamer()
                else:  # refused, or not in `requests` yet
                    if state is not None and self.loop is not None:
                        self.loop.drop(state)
                    self._release_if_idle()
            raise

    def _with_id(self, options: RequestOptions) -> RequestOptions:
        """Returns the checked options with an id. Raises `ValueError` for options that no request
        may have now."""
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

    def check_length(self, ids: list[int], name: Hashable = None, new_tokens: int = 1) -> None:
        """Raises the errors of `add` for a prompt of token ids that, with `new_tokens` more, never
        fits, without waiting for a step. Does nothing while no request is unfinished."""
        loop = self.loop
        if loop is None or not self.requests or self.model.config.is_encoder_decoder:
            return
        if name is None:
            name = "request"
        max_length = len(ids) + max(1, new_tokens)
        request = Request(name, [Sequence(ids)], max_length)
        request.limit_positions(self.layout.max_positions)
        with loop.memory.lock:
            loop.scheduler.preemption.check_fits(request)

    def end(
        self,
        state: RequestState,
        reason: str | None,
        last: list[Output] | None = None,
    ) -> None:
        """Removes a request, frees its blocks and outputs its result with the `last` tokens
        (default: all that no output has reported)."""
        result = state.result(reason)
        if last is None:
            last = state.remaining_outputs(result)
        outputs = [RequestOutput(state.request_id, *output) for output in last or [({}, None)]]
        outputs[-1].result = result
        self.totals.add(result)
        try:
            try:
                self.remove(state)
            finally:  # the caller gets the result even if the cleanup raises
                self._report(state, outputs)
        finally:
            if not state.is_reported:  # an interrupt kept `_report` from beginning
                self._report(state, outputs)
            self.requests.pop(state.request_id, None)
            state.end_streamer()
            if state.interrupt is not None:
                raise state.interrupt

    @staticmethod
    def _report(state: RequestState, outputs: list[RequestOutput]) -> None:
        """Queues a request's last outputs for its reader, and sets `is_reported`."""
        # one call of C: an interrupt between two calls would have the outputs reported twice
        mark: Iterator[Any] = iter(functools.partial(setattr, state, "is_reported", True), None)
        state.output_queue.extend(itertools.chain(outputs, mark))

    def cancel(self, state: RequestState) -> None:
        """Ends a request early; if called in a step (from a caller's code or a finalizer), ends it
        after the step."""
        if self._stepping_thread is None:
            self.end(state, "cancelled")
        else:
            self._cancelled.append(state)

    def free(self) -> None:
        """Cancels every request and drops the loop. Called again, it finishes what an interrupt
        ended."""
        # an `ExitStack` cancels all requests, even if one raises
        with self.lock, contextlib.ExitStack() as stack:
            stack.callback(self.retire)
            for state in reversed(self.requests.values()):
                stack.callback(self.cancel, state)

    def _end_freed(self) -> None:
        """Ends requests that a `free` has left without a loop: it was interrupted, or called in a
        step."""
        for state in list(self.requests.values()):
            self._end_if_unfinished(state)

    def _end_cancelled(self) -> None:
        cancelled = self._cancelled.copy()
        with contextlib.ExitStack() as stack:  # ends all of them, even if one raises
            for state in cancelled:
                stack.callback(self._end_if_unfinished, state)
        del self._cancelled[: len(cancelled)]

    def _end_if_unfinished(self, state: RequestState) -> None:
        if self.requests.get(state.request_id) is state:
            self.end(state, "cancelled")

    def end_calls(self) -> None:
        if self._stepping_thread == threading.get_ident():
            with self.lock:
                self._end_cancelled()
                setup_seconds.set(None)
                self._stepping_thread = None

    def remove(self, state: RequestState) -> None:
        """Removes a request without any output. After the last one, releases what the executor
        holds, and marks the memory as unused."""
        try:
            if self.loop is not None:
                self.loop.drop(state)
        finally:
            self.requests.pop(state.request_id, None)
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        if self.loop is not None and not self.requests:
            self._has_failed = False
            self._shortage = None
            try:
                self.loop.executor.go_idle()
            finally:
                self._end_use()

    def _end_use(self) -> None:
        if not self.requests and not self._num_keepers:
            end_use(self.memory)

    @restoring
    def keeping_pool(self) -> Iterator[None]:
        """Keeps the pool allocated within this context, even without requests."""
        with self.lock:
            self._num_keepers += 1
            begin_use(self.memory)
        try:
            yield
        finally:
            with self.lock:
                self._num_keepers -= 1
                self._end_use()

    @guarded
    def change_weights(self, recompute: bool) -> None:
        """As `StepLoop.change_weights`; `recompute` also prepares the inputs of requests again."""
        with self.lock:
            if self.loop is not None:
                self.loop.change_weights(recompute)
            if recompute:
                for state in self.requests.values():
                    state.prepare_again(self.model)

    def after_fork(self, freed: set[Any]) -> None:
        """In a forked child, where only this thread exists: drops all requests if another thread
        was in a step."""
        self.pauses.after_fork()
        self._num_keepers = 0
        if self.inner_lock in freed:
            self.requests = {}
            self.pending_outputs.clear()
            self._cancelled, self._stepping_thread = [], None
            self.retire()

    def _end_unsupported(self) -> None:
        """Ends requests whose adapter only PEFT's own `generate` computes: the adapter may have
        become active since `add`."""
        adapters = adapters_for(self.model)
        if adapters is None or not adapters.has_activated(self.model):
            return
        for state in list(self.requests.values()):
            try:
                adapters.check_served(self.model, state.request.adapter)
            except RowsError as error:
                state.error = error
                self.end(state, "error")

    @guarded
    def step(self, span: StableSpan) -> None:
        """Takes a step and outputs its tokens. Raises the error of a step that cannot be completed,
        and the next step repeats it; if that raises as well, the requests that it would compute end
        with the error instead."""
        if self.loop is None:
            self._end_freed()
        loop = self.get_loop()
        if not self.requests:
            return
        num_reasons = len(loop.executor.slowed_by)
        is_outermost = self._stepping_thread != threading.get_ident()
        self._stepping_thread = threading.get_ident()
        # in place of `counting`, which would add its calls to every step
        token = setup_seconds.set(self.setup_seconds)
        try:
            self._end_unsupported()
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
            self._output(loop)
            self._has_failed = False
        except Exception as error:
            if is_interrupt(error):
                raise
            has_failed, self._has_failed = self._has_failed, bool(self.requests)
            if not has_failed:
                raise
            self._fail_requests(loop, error)
        finally:
            setup_seconds.reset(token)
            if is_outermost:
                if self._cancelled:
                    self._end_cancelled()
                self._stepping_thread = None
        if not self.requests or len(loop.executor.slowed_by) > num_reasons:
            self.note_route()

    def _fail_requests(self, loop: StepLoop, error: Exception) -> None:
        failing = loop.generations_to_fail(error)
        states = [state for state in self.requests.values() if state in failing]
        for state in states or list(self.requests.values()):
            state.error = error
            self.end(state, "error")

    def _output(self, loop: StepLoop) -> None:
        """Outputs the tokens of the generations that advanced, and the results of those that
        ended."""
        while loop.unreported:  # an interrupt leaves the current one in the queue
            state = loop.unreported[0]
            if isinstance(state, RequestState) and self.requests.get(state.request_id) is state:
                self._output_step(state, loop.unreported)
            else:  # it has ended already
                loop.unreported.popleft()

    def _output_step(self, state: RequestState, unreported: deque[Generation]) -> None:
        """Outputs the last step's tokens of a request and takes it out of `unreported`; outputs its
        result if it ended."""
        last: list[Output] | None = None  # empty if its tokens are not reported
        if state.error is None:
            try:
                last = state.outputs()
            except Exception as error:
                if is_interrupt(error):
                    raise
                state.error = error
        if state.error is not None:
            self.end(state, "error", last)
        elif state.is_closed:
            self.end(state, None, last)
        elif not last:
            unreported.popleft()
        else:
            outputs: list[RequestOutput] = []
            for tokens, text in last:
                outputs.append(RequestOutput(state.request_id, tokens, text))
            # one call of C: an interrupt between two calls would have the tokens reported twice
            removal = iter(unreported.popleft, state)
            state.output_queue.extend(itertools.chain(outputs, removal))  # type: ignore[arg-type]

    def get_loop(self, new: RequestState | None = None) -> StepLoop:
        """Returns the loop, to which the caller adds `new`; between requests, as `renew`."""
        if self.loop is None or not self.requests:
            return self.renew(new, keeps_pool=self._num_keepers > 0)
        if new is not None:
            check_positions(new, self.layout)
        return self.loop

    def counts(self) -> Counter[str]:
        """Returns the fields of [`EngineStats`] that only grow."""
        counts = self.loop_counts()
        counts.update(self.totals.counts)
        return counts
