"""The thread of a continuous-batching manager: adds requests to an engine, runs its steps and
delivers outputs as transformers' `GenerationOutput`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import forks
from ..batching.engine import PagedEngine
from ..batching.results import RequestOutput
from ..config import PagedConfig
from ..interrupts import restoring
from ..threads import NO_THREAD, make, try_start, wait
from ..topics import Topic
from ..weak_sets import members_of
from .pending import PendingRequest
from .serving_mode import serving_mode, set_eval_mode_again

logger = logging.getLogger(__name__)

MAX_NEW_REQUESTS = 32  # per step, since running requests wait while new ones are added
MAX_QUEUE_SECONDS = 10.0  # how long `add` waits while the queue is full, as in transformers
POLL_SECONDS = 0.25  # between checks whether the manager was collected or the thread vanished
MAX_EXIT_SECONDS = 10.0  # how long the interpreter's exit waits for a thread


class ManagerThread:
    """The engine's thread, and the state that it shares with callers. Holds no reference to the
    manager, so that the manager can be garbage-collected."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, max_queue_size: int) -> None:
        self.max_queue_size = max_queue_size
        self.lock = forks.rlock()
        self.fatal_error: BaseException | None = None  # the error that ended the thread
        self.is_draining = False  # refuses further requests, and ends the thread after the last one
        self.is_stopping = False  # ends the thread after the step in progress
        self.is_paused = False
        self.should_keep_memory = False
        # an event, so that the manager's finalizer, which sets it, does not refer to this object
        self.is_abandoned = threading.Event()
        self._reset(PagedEngine(model, config))
        forks.add_listener(self)

    def _reset(self, engine: PagedEngine) -> None:
        """Sets the initial state: no thread, no requests."""
        self.engine = engine
        # Signals changes of the attributes below, which the lock guards. Use it within `with
        # self.lock`, not `with self.changed`: a condition's `__enter__` and `__exit__` are Python
        # code, in which a signal's handler may raise and leave the lock held.
        self.changed = threading.Condition(self.lock)
        self.thread: threading.Thread | None = None
        # identifies the last start; threads of earlier starts end at once
        self.run_id: object = None
        self.pending: dict[str, PendingRequest] = {}  # unfinished requests by output id
        self.waiting: deque[PendingRequest] = deque()  # to be added to the engine
        self.cancelled: deque[PendingRequest] = deque()  # to be ended before the next step
        self.outputs: dict[str, deque[GenerationOutput]] = {}  # unread outputs by output id
        self.handlers: dict[
            str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]
        ] = {}
        self.pauses: dict[object, int] = {}  # the id of the thread that each pause belongs to

    def after_fork(self, freed: set[Any]) -> None:
        """Resets the state in a forked child process, which has neither the thread nor its
        requests."""
        self._reset(PagedEngine(self.engine.model, self.engine.config))

    # In callers' threads

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def _has_vanished(self) -> bool:
        """Whether the thread is gone without having reported an error: it ended for lack of memory,
        or an error interrupted `start`."""
        return self.thread is not None and not self.thread.is_alive() and not self.is_stopping

    def start(self) -> None:
        """Starts the thread. Raises `RuntimeError` if the system allows no more threads."""
        with self.lock:
            self.is_draining = self.is_stopping = self.is_paused = False
            self.fatal_error = None
            self.thread = None  # drops an earlier thread, which has ended
            self.run_id = run_id = object()
        _started_threads.add(self)
        self.thread = make(
            functools.partial(self._run, run_id),
            "hf_paged-continuous-batching",
            on_error=functools.partial(self._die, run_id),
        )
        error = try_start(self.thread)
        if error is not None:
            with self.lock:
                self.is_stopping, self.thread = True, None
                self.run_id = None  # in case the thread begins later, to end it at once
            raise RuntimeError(NO_THREAD) from error

    def stop(self, is_hard: bool, should_keep_memory: bool = False) -> None:
        """Refuses further requests, and makes the thread end once all requests are finished or, if
        `is_hard`, after the step in progress. Does not wait for the thread."""
        with self.lock:
            self.is_draining, self.should_keep_memory = True, should_keep_memory
            self.is_stopping |= is_hard
            self.changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread's end, at most `timeout` seconds; returns whether it has ended."""
        thread = self.thread
        # an error may have interrupted `start` before the thread began
        has_begun = thread is not None and thread.ident is not None
        if thread is not None and has_begun and thread is not threading.current_thread():
            thread.join(timeout)
        return not self.is_alive

    def add(self, request: PendingRequest) -> None:
        """Queues a request. Raises the errors of `PagedBatchingManager.add_request`."""

        def refuses_requests() -> bool:
            return self.is_draining or self._has_vanished

        def need_not_wait() -> bool:
            limit = self.max_queue_size
            return refuses_requests() or not limit or len(self.waiting) < limit

        with self.lock:
            is_in_time = self._wait_for(need_not_wait, MAX_QUEUE_SECONDS)
            used_ids = [output_id for output_id in request.output_ids if output_id in self.pending]
            if used_ids:
                raise ValueError(
                    f"request id {used_ids[-1]!r} is in use by an unfinished request: choose"
                    " another"
                )
            is_refused = refuses_requests()
            if is_refused or not is_in_time:
                # handlers may have been registered before the request
                for output_id in request.output_ids:
                    self.handlers.pop(output_id, None)
            if not is_in_time:
                raise queue.Full(
                    f"{len(self.waiting)} requests are waiting, as many as `max_queue_size` allows:"
                    " raise it, or retry later"
                )
            if is_refused:
                reason = "it was stopped"
                if self._has_vanished:
                    reason = "its thread is not running, perhaps for lack of memory: call `start`"
                elif self.fatal_error is not None:
                    reason = f"its thread died: {self.fatal_error!r}"
                raise RuntimeError(
                    f"the manager takes no more requests: {reason}"
                ) from self.fatal_error
            self.pending |= dict.fromkeys(request.output_ids, request)
            self.waiting.append(request)
            self.changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Ends a request after the step in progress; does nothing if the request has ended. Raises
        `ValueError` for the id of one of its further sequences."""
        with self.lock:
            request = self.pending.get(request_id)
            if request is None:
                return
            if request_id != request.output_ids[-1]:
                raise ValueError(
                    f"{request_id!r} is one sequence of a request: cancel the whole request,"
                    f" {request.output_ids[-1]!r}"
                )
            self.cancelled.append(request)
            self.changed.notify_all()

    def get(self, output_id: str | None, timeout: float | None) -> GenerationOutput | None:
        """Implements `PagedBatchingManager.get_result`."""
        with self.lock:

            def has_output() -> bool:
                return bool(self.outputs) if output_id is None else output_id in self.outputs

            # a caller with a timeout may wait for a request before it is added
            needs_request = output_id is not None and timeout is None

            def has_ended() -> bool:
                return not self.is_alive or (needs_request and output_id not in self.pending)

            if self.is_alive and has_ended() and not has_output():
                raise ValueError(
                    f"no unfinished request has the id {output_id!r}, and no unread output has it:"
                    " it was never added, or its last output has been read"
                )
            self._wait_for(lambda: has_output() or has_ended(), timeout)
            if not has_output():
                return None
            next_id = next(iter(self.outputs)) if output_id is None else output_id
            output = self.outputs[next_id].popleft()
            if not self.outputs[next_id]:
                del self.outputs[next_id]
            return output

    def _wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate()` is true, at most `timeout` seconds; returns whether it is. The
        caller holds `lock`. Polls every `POLL_SECONDS`, since a thread that lacks memory notifies
        nobody of its end."""
        end = None if timeout is None else time.monotonic() + timeout
        while not predicate():
            seconds = POLL_SECONDS
            if end is not None:
                seconds = min(POLL_SECONDS, end - time.monotonic())
            if seconds <= 0:
                return False
            wait(self.changed, self.lock, seconds)
        return True

    def deliver(self, output: GenerationOutput) -> None:
        """Passes an output to its handler or, without one, stores it until a caller reads it. If
        the handler's event loop does not accept it, cancels the request."""
        with self.lock:
            handler = self.handlers.get(output.request_id)
            outputs = self.outputs.get(output.request_id)
            if handler is None and outputs is None:
                # one statement, since running out of memory between two would leave an empty deque
                self.outputs[output.request_id] = deque([output])
            elif handler is None:
                assert outputs is not None
                outputs.append(output)
            else:
                callback, loop = handler
                if output.is_finished():
                    del self.handlers[output.request_id]
                try:
                    loop.call_soon_threadsafe(callback, output)
                except Exception as error:  # the event loop is closed, or rejects the callback
                    if not loop.is_closed():
                        logger.error(
                            Topic.CONTINUOUS_BATCHING("the event loop rejected a result handler"),
                            exc_info=error,
                        )
                    self.handlers.pop(output.request_id, None)
                    request = self.pending.get(output.request_id)
                    if request is not None and not output.is_finished():
                        self.cancelled.append(request)
            self.changed.notify_all()

    @restoring
    def paused(self) -> Iterator[None]:
        """A context in which the thread runs no step. Raises `RuntimeError` if the thread ends
        before it has paused."""
        pause_id = object()
        try:
            with self.lock:
                self.pauses[pause_id] = threading.get_ident()
                self.changed.notify_all()
                self._wait_for(lambda: self.is_paused or self.is_stopping or not self.is_alive)
                if not self.is_paused:
                    raise RuntimeError(
                        "the engine's thread ended before it could pause"
                    ) from self.fatal_error
            yield
        finally:
            self.pauses.pop(pause_id, None)
            with self.lock:
                self.changed.notify_all()

    # In the engine's thread

    def _run(self, run_id: object) -> None:
        if self.run_id is not run_id:
            return
        with serving_mode(self.engine.model), torch.no_grad():
            has_failed = False
            while True:
                try:
                    if not self._wait_for_work(run_id):
                        break
                    self._take_requests()
                    self._deliver_all(self._convert_outputs(self.engine.step()))
                    has_failed = False
                except Exception as error:
                    # the engine repeats the step once, then ends the step's requests
                    logger.error(
                        Topic.FAILED_REQUESTS("a step of the engine raised"), exc_info=error
                    )
                    self._fail_lost_requests(error, has_failed)
                    has_failed = not has_failed
        self._end(run_id, None)

    def _die(self, run_id: object, error: BaseException) -> None:
        """Logs the error that ends the thread, and ends all requests with it."""
        logger.error(Topic.CONTINUOUS_BATCHING("the engine's thread died"), exc_info=error)
        self._end(run_id, error)

    def _wait_for_work(self, run_id: object) -> bool:
        """Waits for requests, and for the end of pauses. Returns whether to run a step; if not, the
        thread must end."""
        with self.lock:
            if self.run_id is not run_id:
                return False
            was_paused = False
            # pauses also delay the thread's end, since leaving `serving_mode` changes the model
            while (self.is_paused or not self.is_stopping) and not self.is_abandoned.is_set():
                self.is_paused = bool(self.pauses)
                if self.is_paused:
                    was_paused = True
                    self.changed.notify_all()
                elif self.waiting or self.cancelled or self.engine.has_unfinished:
                    break
                elif self.is_draining:
                    return False
                self.changed.wait(POLL_SECONDS)
                if self.run_id is not run_id:
                    return False
            self.is_paused = False
            if self.is_stopping or self.is_abandoned.is_set():
                return False
            if was_paused:
                set_eval_mode_again(self.engine.model)
            return True

    def _take_requests(self) -> None:
        """Ends cancelled requests, including those that still wait, and adds up to
        `MAX_NEW_REQUESTS` waiting requests to the engine."""
        with self.lock:
            cancelled_requests = set(self.cancelled)
            self.cancelled.clear()
            removed_requests = [
                request for request in self.waiting if request in cancelled_requests
            ]
            for request in removed_requests:
                self.waiting.remove(request)
        for request in removed_requests:
            self._deliver_all(request.fail(RuntimeError("the request was cancelled")))
        # runs before new requests are added, since they may reuse the ids of cancelled requests
        for request in cancelled_requests:
            with contextlib.suppress(ValueError):  # the request has ended, or was removed
                self.engine.cancel(request.output_ids[-1])
        with self.lock:
            num_new = min(len(self.waiting), MAX_NEW_REQUESTS)
            requests = [self.waiting.popleft() for _ in range(num_new)]
            self.changed.notify_all()  # wakes callers that wait to add requests
        for request in requests:
            if request.tokenizer is not None:
                self.engine.tokenizer = request.tokenizer
            try:
                self.engine.add_request(
                    request.prompt,
                    request.make_config(),
                    request_id=request.output_ids[-1],
                    seed=request.seed,
                    **request.options,
                )
            except Exception as error:
                self._deliver_all(request.fail(error))

    def _convert_outputs(self, engine_outputs: list[RequestOutput]) -> list[GenerationOutput]:
        """Converts the engine's outputs to transformers'. If the conversion of an output raises,
        its request ends with that error."""
        outputs: list[GenerationOutput] = []
        for engine_output in engine_outputs:
            request = self.pending.get(engine_output.request_id)
            if request is None:
                continue
            try:
                outputs += request.add(engine_output)
            except Exception as error:
                self.cancelled.append(request)
                outputs += request.fail(error)
        return outputs

    def _fail_lost_requests(self, error: Exception, should_free: bool) -> None:
        """Fails the requests that the engine has lost: it does not hold them and will not output
        their results. `should_free`: whether the engine raised again when it repeated the step, and
        so failed to end the step's requests; if so, this method fails all requests that were added
        to the engine, and frees the engine."""
        core = self.engine._core
        surviving_ids = set[Hashable]()
        if not should_free:
            with core.lock:
                output_ids = (output.request_id for output in core.pending_outputs)
                surviving_ids = {*core.requests, *output_ids}
        with self.lock:
            surviving_ids |= {request.output_ids[-1] for request in self.waiting}
            requests = dict.fromkeys(self.pending.values())
        for request in requests:
            if request.output_ids[-1] not in surviving_ids:
                # a request that never started would look like a refused one
                if request.started_at < 0:
                    request.started_at = time.perf_counter()
                self._deliver_all(request.fail(error))
        if not should_free:
            return
        try:
            self.engine.free()
        except Exception as free_error:
            message = Topic.CONTINUOUS_BATCHING("the engine raised while it was freed")
            logger.error(message, exc_info=free_error)
        with self.lock:
            # so that a series of failing steps does not keep the processor busy
            self.changed.wait(POLL_SECONDS)

    def _deliver_all(self, outputs: list[GenerationOutput]) -> None:
        """Delivers outputs; an id is no longer pending after its last output."""
        with self.lock:
            for output in outputs:
                self.deliver(output)
                if output.is_finished():
                    self.pending.pop(output.request_id, None)

    def _end(self, run_id: object, error: BaseException | None) -> None:
        """Ends unfinished requests with an error. Then frees the engine or, to keep its memory,
        only its requests."""
        with self.lock:
            if self.run_id is not run_id:  # began too late: another thread owns the state
                return
            self.is_draining = self.is_stopping = True
            self.fatal_error = error
            self.waiting.clear()
            self.cancelled.clear()
            request_error: Exception
            request_error = RuntimeError("the manager was stopped before the request ended")
            if isinstance(error, Exception):
                request_error = error
            elif error is not None:
                request_error = RuntimeError(f"the engine's thread died: {error!r}")
            requests = list(dict.fromkeys(self.pending.values()))
            for request in requests:
                self._deliver_all(request.fail(request_error))
            self.handlers.clear()  # the remaining ones wait for requests that were never added
        try:
            if error is None and self.should_keep_memory:
                for request in requests:
                    with contextlib.suppress(ValueError):  # the request was not added to the engine
                        self.engine.cancel(request.output_ids[-1])
                # a step ends the cancelled requests; their outputs are dropped
                while self.engine.has_unfinished:
                    self.engine.step()
            else:
                self.engine.free()
        finally:
            with self.lock:
                if self.run_id is run_id:
                    self.is_paused, self.thread = False, None
                self.changed.notify_all()


_started_threads: weakref.WeakSet[ManagerThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops all threads before the interpreter exits, since no forward may be running then."""
    for thread in members_of(_started_threads):
        if thread.is_alive:
            thread.stop(is_hard=True)
            thread.join(MAX_EXIT_SECONDS)
