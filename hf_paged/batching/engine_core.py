"""What an engine does under its lock: requests are added, stepped, told of and ended."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Hashable
from typing import Any

from transformers import PreTrainedModel

from .. import forks
from ..config import PagedConfig
from ..locks import PatientLock
from .arguments import check_names
from .current_loop import CurrentLoop
from .execution.executor import Window
from .generation import Generation
from .loop import StepLoop
from .pauses import Pauses
from .prompts import Prompt
from .request_state import RequestState
from .results import EngineStats, RequestOutput, RequestResult, Unread


class EngineCore:
    """
    Args:
        model ([`PreTrainedModel`]): The model.
        config ([`PagedConfig`]): The engine's.
        tokenizer (*optional*): The engine's.

    Attributes:
        lock ([`PatientLock`]): Held by all methods, and by others around what they read.
        requests (`dict[Hashable, RequestState]`): Unfinished ones, by id.
        current ([`CurrentLoop`]): The loop that runs them, and its memory.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig, tokenizer: Any) -> None:
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.lock = PatientLock()
        self.pauses = Pauses(self.lock)
        self.requests: dict[Hashable, RequestState] = {}
        self.current = CurrentLoop(model, config)
        self._unstarted: list[RequestState] = []  # whose `max_time` does not run yet
        self._unread = Unread()  # of steps that others took or that raised, and of what ended outside a step
        self._numbers = itertools.count()  # of the ids that are made up
        self._num_finished = self._num_prompt_tokens = self._num_hit_tokens = 0
        forks.in_child(self)

    @property
    def loop(self) -> StepLoop | None:
        """`None` while no memory is taken."""
        return self.current.loop

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to compute or to tell."""
        return bool(self.requests or self._unread)

    def make_id(self) -> str:
        """One that no unfinished request has."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self.requests)

    # -- requests come --------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        generation_config: Any,
        request_id: str | None = None,
        outbox: deque[RequestOutput] | None = None,
        **options: Any,
    ) -> str:
        """Queues a request, which reports to `outbox`, else to `take_step`. Other arguments: [`RequestState`]."""
        state: RequestState | None = None
        try:
            with self.lock:
                check_names(request_id, options.get("adapter"))
                self.current.check_layout(len(self.requests))
                request_id = self.make_id() if request_id is None else request_id
                if request_id in self.requests:
                    raise ValueError(f"request id {request_id!r} is in use by an unfinished request: choose another")
                if options.get("cache_salt") is None:
                    options["cache_salt"] = self.config.cache_salt
                new = RequestState(self.model, self.tokenizer, request_id, prompt, generation_config, **options)
                new.outbox = outbox
                loop = self._get_loop()  # takes memory: not for what is refused
                if not self.requests:
                    loop.executor.begin()
                loop.add(new)
                self.requests[request_id] = state = new
                self.current.shares_prefills |= new.request.num_rows > 1
                if new.limits:
                    self._unstarted.append(new)
                new.put_prompt()
                self._num_prompt_tokens += len(new.prompt_ids)
                return request_id
        except BaseException:  # of the streamer, or an interrupt: the request was never added
            with self.lock:
                if state is not None and self.requests.get(state.request_id) is state:
                    self.remove(state)
                    state.end_streamer("error")
            raise

    def cancel(self, request_id: str) -> None:
        """Ends a request. Raises `ValueError` if there is none of that id."""
        with self.lock:
            state = self.requests.get(request_id)
            if state is None:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            self._tell(RequestOutput(request_id, result=self._end(state, "cancelled")), state, self._unread)
            state.end_streamer("cancelled")

    # -- one step -------------------------------------------------------------------------------------------------

    def take_step(self, window: Window) -> list[RequestOutput]:
        """Runs what fits. Returns the outputs of requests without an outbox, also those that wait since."""
        outputs: deque[RequestOutput] = deque()
        try:
            with self.lock:
                self.pauses.wait()
                outputs = self._unread.take()
                if self.requests:
                    self._step(outputs, window)
                told = list(outputs)
        except BaseException:  # also an interrupt that waited for the end: the next step tells it
            with self.lock:
                self._unread.extend(outputs)
            raise
        return told

    def step_for(self, outbox: deque[RequestOutput], request_ids: set[str], window: Window) -> None:
        """A step, unless one of another thread has put something into `outbox`, where these requests report."""
        with self.lock:
            self.pauses.wait()
            if outbox:
                return
            states = {name: self.requests.get(name) for name in request_ids}
            gone = [name for name, state in states.items() if state is None or state.outbox is not outbox]
            if gone:
                raise RuntimeError(f"requests {sorted(gone)} are gone without a result")
            self._unread.extend(self.take_step(window))

    def _step(self, outputs: deque[RequestOutput], window: Window) -> None:
        loop = self._get_loop()
        now = time.time()  # as the criteria count
        self._unstarted = [state for state in self._unstarted if state.is_unstarted]
        for limit in (limit for state in self._unstarted for limit in state.limits):
            limit.initial_timestamp = now
        known = len(loop.executor.slowed_by)
        loop.step(window)
        if len(loop.executor.slowed_by) > known:
            self.current.note_route()
        while loop.untold:  # one stays there if an interrupt comes while it is told
            self._report(loop.untold[0], outputs)
            loop.untold.popleft()
        if not self.requests:
            self.current.note_route()

    def _report(self, state: Generation, outputs: deque[RequestOutput]) -> None:
        """Tells the caller that waits for a request what its step brought."""
        if not isinstance(state, RequestState) or self.requests.get(state.request_id) is not state:
            return  # it has ended since
        tokens, text = state.output()
        reason = None if state.error is None else "error"
        result = self._end(state, reason) if reason is not None or state.is_done else None
        self._tell(RequestOutput(state.request_id, tokens, text, result), state, outputs)
        if result is not None:
            state.end_streamer(reason)

    def _tell(self, output: RequestOutput, state: RequestState, default: deque[RequestOutput] | Unread) -> None:
        (default if state.outbox is None else state.outbox).append(output)

    def _get_loop(self) -> StepLoop:
        return self.loop if self.loop is not None and self.requests else self.current.get()

    # -- requests go ----------------------------------------------------------------------------------------------

    def _end(self, state: RequestState, reason: str | None) -> RequestResult:
        """Takes a request out, whose blocks go back, and says how it ended; its streamer is still to be ended."""
        result = state.result(reason)
        self._num_finished += 1
        self._num_hit_tokens += result.num_prefix_hit_tokens
        self.remove(state)
        return result

    def remove(self, state: RequestState) -> None:
        """Takes a request out, of which nothing is told. With the last of them nothing is in flight any more."""
        if self.loop is not None:
            self.loop.drop(state)
        del self.requests[state.request_id]
        if self.loop is not None and not self.requests:
            self.loop.executor.rest()

    def close(self, outbox: deque[RequestOutput], window: Window) -> None:
        """Ends the requests that report to `outbox`, which is not read any more, and the window of their steps."""
        with self.lock:
            if self.loop is not None:
                self.loop.executor.leave(window)
            for state in list(self.requests.values()):
                if state.outbox is outbox:
                    self._end(state, "cancelled")
                    state.end_streamer("cancelled")

    def free(self) -> None:
        """Cancels every request and gives every byte back."""
        with self.lock:
            for state in list(self.requests.values()):
                self.cancel(state.request_id)
            self.current.retire()

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: a step that another thread was taking leaves nothing that can go on."""
        self.pauses.after_fork()
        if self.lock.is_among(freed):
            self.requests, self._unstarted, self._unread = {}, [], Unread()
            self.current.retire()

    # -- reports --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        with self.lock:
            return EngineStats(
                num_finished=self._num_finished,
                num_prompt_tokens=self._num_prompt_tokens,
                num_prefix_hit_tokens=self._num_hit_tokens,
                **self.current.stats(),
            )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pools, block tables and reference counts agree."""
        with self.lock, self.current.memory.lock:
            self.current.memory.check_integrity()
            if self.loop is not None:
                self.loop.blocks.check_integrity()
