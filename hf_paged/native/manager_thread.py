"""The thread of a continuous-batching manager: it takes requests, steps an engine and delivers
transformers' outputs."""

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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat, forks
from ..batching.engine import PagedEngine
from ..batching.results import RequestOutput
from ..config import PagedConfig
from ..interrupts import restoring
from ..model.forwards import compute_device
from ..switches import NOTHING
from ..threads import NO_THREAD, begin, make, wait
from ..topics import Topic
from .pending import Pending

logger = logging.getLogger(__name__)

MAX_NEW = 32  # requests that the engine gets between two steps, while the running ones wait
QUEUE_SECONDS = 10.0  # how long `add` waits for room in a full queue, as in transformers
POLL_SECONDS = 0.25  # how often the engine's thread checks whether its manager was collected
EXIT_SECONDS = 10.0  # how long the interpreter's exit waits for the step in progress
# prefix of attention implementations that only transformers' own loop can call
NATIVE_ATTENTION = "paged|"


class ManagerThread:
    """The engine's thread and the state that it shares with callers. It holds no reference to the
    manager, so that the manager can be garbage-collected."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, max_queue_size: int) -> None:
        self.max_queue_size = max_queue_size
        self.lock = forks.rlock()
        self.fatal_error: BaseException | None = None  # the error that ended the thread
        self.is_flushing = self.is_stopping = self.is_paused = self.keeps_memory = False
        # set by the manager's finalizer, which need not reference the model
        self.is_abandoned = threading.Event()
        self._reset(PagedEngine(model, config))
        forks.in_child(self)

    def _reset(self, engine: PagedEngine) -> None:
        """Sets the initial state: no thread, no requests."""
        self.engine = engine
        # Signals changes of the attributes below, which the lock guards. `with` takes the lock
        # itself: a condition's `__enter__` and `__exit__` are Python code, where a signal could
        # leave the lock held.
        self.changed = threading.Condition(self.lock)
        self.thread: threading.Thread | None = None
        self.start_token: object = None  # of the last start; a thread of another one ends at once
        self.pending: dict[str, Pending] = {}  # unfinished requests, by the ids of their outputs
        self.inbox: deque[Pending] = deque()  # requests not yet given to the engine
        self.cancelled: deque[str] = deque()
        self.outputs: dict[str, deque[GenerationOutput]] = {}  # those that no caller has read
        self.handlers: dict[
            str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]
        ] = {}
        self.pausing: dict[object, int] = {}  # pauses, each with the id of its thread

    def after_fork(self, freed: set[Any]) -> None:
        """Resets the state in a child process, which has neither the thread nor its requests."""
        self._reset(PagedEngine(self.engine.model, self.engine.config))

    # -- in callers' threads ----------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def _has_vanished(self) -> bool:
        """Whether the thread ended without an error, as a thread that lacks memory does."""
        return self.thread is not None and not self.thread.is_alive() and not self.is_stopping

    def start(self) -> None:
        """Starts the thread. Raises `RuntimeError` if the process may have no more threads."""
        with self.lock:
            self.is_flushing = self.is_stopping = self.is_paused = False
            self.fatal_error = None
            self.thread = None  # an earlier one, which has ended
            self.start_token = token = object()
        _running.add(self)
        self.thread = make(
            functools.partial(self._run, token),
            "hf_paged-continuous-batching",
            on_error=functools.partial(self._die, token),
        )
        error = begin(self.thread)
        if error is not None:
            with self.lock:
                self.is_stopping, self.thread = True, None
                self.start_token = None  # should it begin later
            raise RuntimeError(NO_THREAD) from error

    def stop(self, is_hard: bool, keeps_memory: bool = False) -> None:
        with self.lock:
            self.is_flushing, self.keeps_memory = True, keeps_memory
            self.is_stopping |= is_hard
            self.changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread's end, at most `timeout` seconds; returns whether it has ended."""
        thread = self.thread
        # an error may have kept `start` from beginning it
        has_begun = thread is not None and thread.ident is not None
        if thread is not None and has_begun and thread is not threading.current_thread():
            thread.join(timeout)
        return not self.is_alive

    def add(self, request: Pending) -> None:
        def is_over() -> bool:
            return self.is_flushing or self._has_vanished

        def has_room() -> bool:
            limit = self.max_queue_size
            return is_over() or not limit or len(self.inbox) < limit

        with self.lock:
            is_in_time = self._wait_for(has_room, QUEUE_SECONDS)
            used_names = [name for name in request.names if name in self.pending]
            if used_names:
                raise ValueError(
                    f"request id {used_names[-1]!r} is in use by an unfinished request: choose"
                    " another"
                )
            is_refused = is_over()
            if is_refused or not is_in_time:
                for name in request.names:  # handlers may precede the request, which is refused
                    self.handlers.pop(name, None)
            if not is_in_time:
                raise queue.Full(
                    f"{len(self.inbox)} requests wait, the limit of `max_queue_size`: raise it, or"
                    " retry later"
                )
            if is_refused:
                why = "it was stopped"
                if self._has_vanished:
                    why = "its thread vanished, for want of memory"
                elif self.fatal_error is not None:
                    why = f"its thread died: {self.fatal_error!r}"
                raise RuntimeError(
                    f"the manager takes no more requests: {why}"
                ) from self.fatal_error
            self.pending |= dict.fromkeys(request.names, request)
            self.inbox.append(request)
            self.changed.notify_all()

    def cancel(self, name: str) -> None:
        with self.lock:
            request = self.pending.get(name)
            if request is not None and name != request.names[-1]:
                raise ValueError(
                    f"{name!r} is one sequence of a request: cancel the whole request,"
                    f" {request.names[-1]!r}"
                )
            self.cancelled.append(name)
            self.changed.notify_all()

    def get(self, name: str | None, timeout: float | None) -> GenerationOutput | None:
        """Waits for the next output (of `name` if given); `None` after the timeout and once none
        can come."""
        with self.lock:
            has_output = (lambda: self.outputs) if name is None else (lambda: name in self.outputs)
            # a caller with a timeout may wait for a request that is not added yet
            needs_request = name is not None and timeout is None

            def is_over() -> bool:
                return not self.is_alive or (needs_request and name not in self.pending)

            if self.is_alive and is_over() and not has_output():
                raise ValueError(
                    f"no unfinished request has the id {name!r}, and no output of it is unread"
                )
            self._wait_for(lambda: bool(has_output()) or is_over(), timeout)
            if not has_output():
                return None
            if name is None:
                name = next(iter(self.outputs))
            output = self.outputs[name].popleft()
            if not self.outputs[name]:
                del self.outputs[name]
            return output

    def _wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits, with `lock` held, until `predicate()` holds, at most `timeout` seconds; returns
        whether it holds. Polls every `POLL_SECONDS`, since a thread that lacks memory notifies
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
        with self.lock:
            handler = self.handlers.get(output.request_id)
            outputs = self.outputs.get(output.request_id)
            if handler is None and outputs is None:
                # in one statement: if memory ran out between two, an empty queue would stay
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
                except Exception as error:  # the event loop is closed, or refuses the callback
                    if not loop.is_closed():
                        logger.error(
                            Topic.CONTINUOUS_BATCHING("the event loop refused a result handler"),
                            exc_info=error,
                        )
                    self.handlers.pop(output.request_id, None)
                    self.cancelled.append(output.request_id)
            self.changed.notify_all()

    @restoring
    def paused(self) -> Iterator[None]:
        pause = object()
        try:
            with self.lock:
                self.pausing[pause] = threading.get_ident()
                self.changed.notify_all()
                self._wait_for(lambda: self.is_paused or self.is_stopping or not self.is_alive)
                if not self.is_paused:
                    raise RuntimeError(
                        "the engine's thread ended before it could pause"
                    ) from self.fatal_error
            yield
        finally:
            self.pausing.pop(pause, None)
            with self.lock:
                self.changed.notify_all()

    # -- in the engine's thread -------------------------------------------------------------------

    def _run(self, token: object) -> None:
        if self.start_token is not token:
            return
        with served(self.engine.model), torch.no_grad():
            has_failed = False
            while True:
                try:
                    if not self._wait_for_work(token):
                        break
                    self._take_requests()
                    self._deliver_all(self._outputs(self.engine.step()))
                    has_failed = False
                except Exception as error:
                    # the engine repeats the step once, then ends the requests in it
                    logger.error(
                        Topic.FAILED_REQUESTS("a step of the engine raised"), exc_info=error
                    )
                    self._fail_lost(error, has_failed)
                    has_failed = not has_failed
        self._end(token, None)

    def _die(self, token: object, error: BaseException) -> None:
        """Ends all requests with the error that ended the thread."""
        logger.error(Topic.CONTINUOUS_BATCHING("the engine's thread died"), exc_info=error)
        self._end(token, error)

    def _wait_for_work(self, token: object) -> bool:
        """Waits for requests and pauses. Returns False when the thread must end."""
        with self.lock:
            if self.start_token is not token:
                return False
            was_paused = False
            # even a thread that stops waits for the end of a pause: only then may it restore the
            # model
            while (self.is_paused or not self.is_stopping) and not self.is_abandoned.is_set():
                self.is_paused = bool(self.pausing)
                if self.is_paused:
                    was_paused = True
                    self.changed.notify_all()
                elif self.inbox or self.cancelled or self.engine.has_unfinished:
                    break
                elif self.is_flushing:
                    return False
                self.changed.wait(POLL_SECONDS)
                if self.start_token is not token:
                    return False
            self.is_paused = False
            if self.is_stopping or self.is_abandoned.is_set():
                return False
            if was_paused:
                _served[self.engine.model].evaluate(self.engine.model)
            return True

    def _take_requests(self) -> None:
        """Adds up to `MAX_NEW` new requests to the engine, and cancels requests in the engine or in
        the inbox."""
        with self.lock:
            num_new = min(len(self.inbox), MAX_NEW)
            cancelled = set(self.cancelled)
            self.cancelled.clear()
            requests = [self.inbox.popleft() for _ in range(num_new)]
            removed = [request for request in self.inbox if request.names[-1] in cancelled]
            for request in removed:
                self.inbox.remove(request)
            self.changed.notify_all()  # the queue has room
        for request in removed:
            self._deliver_all(request.fail(RuntimeError("the request was cancelled")))
        for request in requests:
            if request.tokenizer is not None:
                self.engine.tokenizer = request.tokenizer
            try:
                self.engine.add_request(
                    request.prompt,
                    request.make_config(),
                    request_id=request.names[-1],
                    seed=request.seed,
                    **request.options,
                )
            except Exception as error:
                self._deliver_all(request.fail(error))
        for name in cancelled:
            with contextlib.suppress(ValueError):  # the request has ended
                self.engine.cancel(name)

    def _outputs(self, steps: list[RequestOutput]) -> list[GenerationOutput]:
        """Converts the engine's outputs. A request whose output raises ends with that error."""
        outputs: list[GenerationOutput] = []
        for step in steps:
            request = self.pending.get(step.request_id)
            if request is None:
                continue
            try:
                outputs += request.add(step)
            except Exception as error:
                self.cancelled.append(step.request_id)
                outputs += request.fail(error)
        return outputs

    def _fail_lost(self, error: Exception, frees: bool) -> None:
        """Fails requests that the engine does not have and whose result it will not output.
        `frees`: the engine could not end its own requests either; then fails all requests but those
        in the inbox, and frees the engine."""
        core = self.engine._core
        kept_ids = set[Hashable]()
        if not frees:
            with core.lock:
                kept_ids = {*core.requests, *(output.request_id for output in core.pending_outputs)}
        with self.lock:
            kept_ids |= {request.names[-1] for request in self.inbox}
            requests = dict.fromkeys(self.pending.values())
        for request in requests:
            if request.names[-1] not in kept_ids:
                if request.started < 0:  # distinguishes it from a refused request
                    request.started = time.perf_counter()
                self._deliver_all(request.fail(error))
        if not frees:
            return
        try:
            self.engine.free()
        except Exception as free_error:
            message = Topic.CONTINUOUS_BATCHING("the engine raised while it was freed")
            logger.error(message, exc_info=free_error)
        with self.lock:
            # a pause between steps, in case all of them raise
            self.changed.wait(POLL_SECONDS)

    def _deliver_all(self, outputs: list[GenerationOutput]) -> None:
        with self.lock:
            for output in outputs:
                self.deliver(output)
                if output.is_finished():
                    self.pending.pop(output.request_id, None)

    def _end(self, token: object, error: BaseException | None) -> None:
        with self.lock:
            if self.start_token is not token:  # it began too late: all is another thread's
                return
            self.is_flushing = self.is_stopping = True
            self.fatal_error = error
            self.inbox.clear()
            self.cancelled.clear()
            cause: Exception = RuntimeError("the manager was stopped before its end")
            if isinstance(error, Exception):
                cause = error
            elif error is not None:
                cause = RuntimeError(f"the engine's thread died: {error!r}")
            requests = list(dict.fromkeys(self.pending.values()))
            for request in requests:
                self._deliver_all(request.fail(cause))
            self.handlers.clear()  # the remaining ids have no request
        try:
            if error is None and self.keeps_memory:
                for request in requests:
                    with contextlib.suppress(ValueError):  # the engine does not have it
                        self.engine.cancel(request.names[-1])
                while (
                    self.engine.has_unfinished
                ):  # ends cancelled requests, and drops their outputs
                    self.engine.step()
            else:
                self.engine.free()
        finally:
            with self.lock:
                if self.start_token is token:
                    self.is_paused, self.thread = False, None
                self.changed.notify_all()


_running: weakref.WeakSet[ManagerThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops all threads before the interpreter exits: a thread in a forward must not outlive it."""
    for thread in list(_running):
        if thread.is_alive:
            thread.stop(is_hard=True)
            thread.join(EXIT_SECONDS)


class _Served:
    """Training modes and attention names of a model, restored when its last manager ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        self.training: list[torch.nn.Module] = []
        self.attention: list[tuple[PreTrainedConfig, str]] = []
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                name = compat.attention_of(config)
                if isinstance(name, str) and name.startswith(NATIVE_ATTENTION):
                    self.attention.append((config, name))

    def evaluate(self, model: PreTrainedModel) -> None:
        """Sets evaluation mode, and stores the modules that were in training mode."""
        self.training = _training(model) or self.training
        model.eval()


def _training(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module.training]


_served: weakref.WeakKeyDictionary[PreTrainedModel, _Served] = weakref.WeakKeyDictionary()
_served_lock = forks.lock()


@restoring
def served(model: PreTrainedModel) -> Iterator[None]:
    """A context that prepares a model as transformers' continuous batching does: it sets evaluation
    mode, and replaces attention implementations named `paged|...`, which only transformers' own
    loop can call, by their base. The last context to exit restores both."""
    device = compute_device(model)
    entered = list[_Served]()
    try:
        with _served_lock:
            state = _served.setdefault(model, _Served(model))
            state.count += 1
            entered.append(state)
            state.evaluate(model)
            for config, name in state.attention:
                compat.set_attention(config, name.removeprefix(NATIVE_ATTENTION))
        # the current device is a thread's own
        with torch.cuda.device(device) if device.type == "cuda" else NOTHING:
            yield
    finally:
        with _served_lock:
            for state in entered:
                state.count -= 1
                if not state.count:
                    del _served[model]
                    if not _training(model):
                        # a training mode that a caller has set stays
                        for module in state.training:
                            module.training = True
                    for config, name in state.attention:
                        compat.set_attention(config, name)
