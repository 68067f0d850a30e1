"""The engine's unfinished requests, which enter, report and end under one lock. It never schedules
or computes: the step loop that it keeps does."""

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
from ..timing import counted, counting
from .arguments import RequestOptions, as_list, asked_new_tokens, checked_options
from .engine_loop import EngineLoop, check_positions
from .execution.executor import Window
from .generation import Generation, Output, RequestState
from .loop import StepLoop
from .pauses import Pauses
from .prompt_forms import Prompt, prompt_ids, split_inputs
from .request import Request, RowsError, Sequence
from .results import RequestOutput, RequestTotals


class EngineCore(EngineLoop):
    """Adds, runs and ends an engine's requests, and keeps a step loop that fits the model's current
    state."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, parts: EngineParts) -> None:
        # all methods hold it, and callers while they read
        self.inner_lock = forks.rlock()
        super().__init__(model, config, parts, lead(model, config, self), self.inner_lock)
        self.lock: AbstractContextManager[Any] = self.inner_lock
        if self.leader is not None:
            self.lock = self.leader.locked(self.inner_lock)
        self.requests: dict[Hashable, RequestState] = {}  # unfinished ones, by id
        self.unread: list[RequestOutput] = []  # outputs for the next `PagedEngine.step`
        # by event loop, the lock of the reader that waits for a step; readers keep the lock alive,
        # the lock the loop
        self.readers = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
        self.pauses = Pauses(self.inner_lock)
        self.totals = RequestTotals()
        self._leaving: list[RequestState] = []  # cancelled in a step, to end after it
        self._stepping: int | None = None  # the id of the thread that takes a step
        self._num_keeping = 0  # open `keeping_pool` contexts
        self._has_failed = False  # whether the last step raised
        self._shortage: Shortage | None = None  # while steps wait for memory of other models
        self._numbers = itertools.count()  # for generated ids
        forks.in_child(self)
        ends_with_calls(self)

    @functools.cached_property
    def grammars(self) -> Grammars:
        made: Grammars = room("grammar", "`schema`, `regex` or `grammar`").Grammars()
        return made

    def make_id(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self.requests)

    @guarded
    def add(
        self,
        tokenizer: Any,
        prompt: Prompt,
        generation_config: Any,
        options: RequestOptions,
        outbox: deque[RequestOutput] | None = None,
        tells_tokens: bool = True,
    ) -> str:
        """Queues a request whose outputs go to `outbox`, or to `unread`; without `tells_tokens`
        only its result does. Raises the errors of `add_request`."""
        # tokenizing and compiling may take long: without the lock, steps go on meanwhile
        prompt, inputs = split_inputs(prompt, options.inputs)
        ids: list[int] = []
        if prompt is not None or inputs is None:
            ids = prompt_ids(prompt, tokenizer)
        options = dataclasses.replace(options, inputs=inputs)
        if inputs is None:
            self.check_length(ids, options.request_id, asked_new_tokens(generation_config))
        if (options.schema, options.regex, options.grammar) != (None, None, None):
            constraint = self.grammars.processor(options, tokenizer, self.model)
            processors = as_list("logits_processor", options.logits_processor)
            options = dataclasses.replace(options, logits_processor=[*processors, constraint])
        box = self.unread if outbox is None else outbox

        def make(options: RequestOptions) -> RequestState:
            return RequestState(
                self.model, tokenizer, ids, generation_config, options, box, tells_tokens
            )

        return self._enter(options, make)

    def _enter(
        self,
        options: RequestOptions,
        make: Callable[[RequestOptions], RequestState],
    ) -> str:
        """Checks a request, makes it and gives it to the loop; returns its id."""
        state: RequestState | None = None
        try:
            with self.lock, counting(self.setup_seconds):
                if self.loop is None:
                    self._end_freed()
                new = make(self._named(options))
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
        except BaseException:  # from the streamer, or an interrupt: take the request out again
            with self.lock:
                if state is not None and self.requests.get(state.request_id) is state:
                    self.remove(state)
                    state.end_streamer()
                else:  # refused, or not known here yet
                    if state is not None and self.loop is not None:
                        self.loop.drop(state)
                    self._rest()
            raise

    def _named(self, options: RequestOptions) -> RequestOptions:
        """Returns the checked options with an id. Raises `ValueError` for those that no request may
        have now."""
        options = checked_options(options, self.config.cache_salt)
        if self.requests:
            self.check_unchanged()
        if self.leader is not None:
            self.leader.check_request(options)
        name = options.request_id
        if name in self.requests:
            raise ValueError(
                f"request id {name!r} is in use by an unfinished request: choose another"
            )
        if name is None:
            name = self.make_id()
        return dataclasses.replace(options, request_id=name)

    def check_length(self, ids: list[int], name: Hashable = None, new_tokens: int = 1) -> None:
        """Raises the errors of `add` for a prompt of token ids that never fits with `new_tokens`
        more, without waiting for a step. Does nothing while no request is unfinished."""
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
        (default: those that no output has told)."""
        result = state.result(reason)
        if last is None:
            last = state.remaining_outputs(result)
        outputs = [RequestOutput(state.request_id, *output) for output in last or [({}, None)]]
        outputs[-1].result = result
        self.totals.add(result)
        try:
            try:
                self.remove(state)
            finally:  # whatever raises in cleaning up, the caller gets the result
                self._tell(state, outputs)
        finally:
            if not state.is_told:  # an interrupt came where that began
                self._tell(state, outputs)
            self.requests.pop(state.request_id, None)
            state.end_streamer()
            if state.interrupt is not None:
                raise state.interrupt

    @staticmethod
    def _tell(state: RequestState, outputs: list[RequestOutput]) -> None:
        """Gives a request's last outputs to its reader, and notes that."""
        # one call of C: an interrupt between two would have them told twice
        noted: Iterator[Any] = iter(functools.partial(setattr, state, "is_told", True), None)
        state.outbox.extend(itertools.chain(outputs, noted))

    def cancel(self, state: RequestState) -> None:
        """Ends a request early; in a step (from a caller's code or a finalizer), after it."""
        if self._stepping is None:
            self.end(state, "cancelled")
        else:
            self._leaving.append(state)

    def free(self) -> None:
        """Cancels every request and drops the loop. Called again, it finishes what an interrupt
        ended."""
        with self.lock, contextlib.ExitStack() as stack:
            # one that raises keeps none from the others
            stack.callback(self.retire)
            for state in reversed(self.requests.values()):
                stack.callback(self.cancel, state)

    def _end_freed(self) -> None:
        """Ends requests that a `free` has left without a loop: it was interrupted, or called in a
        step."""
        for state in list(self.requests.values()):
            self._end_left(state)

    def _end_leaving(self) -> None:
        leaving = self._leaving.copy()
        with contextlib.ExitStack() as stack:  # one that raises keeps none from the others
            for state in leaving:
                stack.callback(self._end_left, state)
        del self._leaving[: len(leaving)]

    def _end_left(self, state: RequestState) -> None:
        if self.requests.get(state.request_id) is state:
            self.end(state, "cancelled")

    def end_calls(self) -> None:
        if self._stepping == threading.get_ident():
            with self.lock:
                self._end_leaving()
                counted.set(None)
                self._stepping = None

    def remove(self, state: RequestState) -> None:
        """Removes a request without any output. After the last one the executor rests and the
        memory is unused."""
        try:
            if self.loop is not None:
                self.loop.drop(state)
        finally:
            self.requests.pop(state.request_id, None)
            self._rest()

    def _rest(self) -> None:
        if self.loop is not None and not self.requests:
            self._has_failed = False
            self._shortage = None
            try:
                self.loop.executor.rest()
            finally:
                self._end_use()

    def _end_use(self) -> None:
        if not self.requests and not self._num_keeping:
            end_use(self.memory)

    @restoring
    def keeping_pool(self) -> Iterator[None]:
        """Keeps the pool within this context, even without requests."""
        with self.lock:
            self._num_keeping += 1
            begin_use(self.memory)
        try:
            yield
        finally:
            with self.lock:
                self._num_keeping -= 1
                self._end_use()

    @guarded
    def change_weights(self, recompute: bool) -> None:
        """As `StepLoop.change_weights`; `recompute` prepares the inputs of requests again, too."""
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
        self._num_keeping = 0
        if self.inner_lock in freed:
            self.requests = {}
            self.unread.clear()
            self._leaving, self._stepping = [], None
            self.retire()

    def _end_unserved(self) -> None:
        """Ends requests whose adapter only PEFT's own `generate` computes: it may have become
        active since `add`."""
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
    def step(self, window: Window) -> None:
        """Takes a step and outputs its tokens. Raises the error of a step that cannot be completed,
        which the next step repeats; if that raises as well, ends the requests that it would compute
        with the error instead."""
        if self.loop is None:
            self._end_freed()
        loop = self.get_loop()
        if not self.requests:
            return
        num_known = len(loop.executor.slowed_by)
        is_outermost = self._stepping != threading.get_ident()
        self._stepping = threading.get_ident()
        # not `counting`, whose calls every step would pay for
        token = counted.set(self.setup_seconds)
        try:
            self._end_unserved()
            try:
                if self.requests:
                    loop.step(window)
                self._shortage = None
            except OutOfBlocksError:
                self._shortage = self._shortage or Shortage(loop.memory)
                if not self._shortage.is_of_other_models:
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
            self._end_blamed(loop, error)
        finally:
            counted.reset(token)
            if is_outermost:
                if self._leaving:
                    self._end_leaving()
                self._stepping = None
        if not self.requests or len(loop.executor.slowed_by) > num_known:
            self.note_route()

    def _end_blamed(self, loop: StepLoop, error: Exception) -> None:
        blamed = loop.blamed_for(error)
        states = [state for state in self.requests.values() if state in blamed]
        for state in states or list(self.requests.values()):
            state.error = error
            self.end(state, "error")

    def _output(self, loop: StepLoop) -> None:
        """Outputs the tokens of the generations that advanced, and the results of those that
        ended."""
        while loop.untold:  # an interrupt leaves the current one in the queue
            state = loop.untold[0]
            if isinstance(state, RequestState) and self.requests.get(state.request_id) is state:
                self._output_step(state, loop.untold)
            else:  # it has ended
                loop.untold.popleft()

    def _output_step(self, state: RequestState, untold: deque[Generation]) -> None:
        """Outputs the last step's tokens of a request that advanced, which leaves `untold`, or its
        result if it ended."""
        last: list[Output] | None = None  # empty if its tokens are not told
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
            untold.popleft()
        else:
            name = state.request_id
            outputs: list[RequestOutput] = []
            for tokens, text in last:
                outputs.append(RequestOutput(name, tokens, text))
            # one call of C: an interrupt between two would have them told twice
            taken = iter(untold.popleft, state)
            state.outbox.extend(itertools.chain(outputs, taken))  # type: ignore[arg-type]

    def get_loop(self, new: RequestState | None = None) -> StepLoop:
        """Returns the loop, to add `new` to. While no request is unfinished, as `renew`."""
        if self.loop is None or not self.requests:
            return self.renew(new, keeps_pool=self._num_keeping > 0)
        if new is not None:
            check_positions(new, self.layout)
        return self.loop

    def counts(self) -> Counter[str]:
        """Returns the fields of [`EngineStats`] that only grow."""
        counts = self.loop_counts()
        counts.update(self.totals.counts)
        return counts
