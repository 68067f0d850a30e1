"""The thread of a continuous-batching manager: takes requests, steps an engine, delivers
transformers' outputs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat, forks
from ..batching.arguments import prompt_ids
from ..batching.engine import PagedEngine
from ..batching.results import RequestOutput, RequestResult
from ..config import PagedConfig
from ..interrupts import restoring
from ..model.forwards import compute_device
from ..threads import begin, make, wait
from ..topics import Topic

logger = logging.getLogger(__name__)

MAX_NEW = 32  # requests that the engine gets between two steps: the running ones wait meanwhile
QUEUE_SECONDS = 10.0  # how long `add` waits for room in a full queue, as in transformers
POLL_SECONDS = 0.25  # how often the engine's thread checks whether its manager was collected
EXIT_SECONDS = 10.0  # how long the interpreter's exit waits for the step in progress
OWN_ATTENTION = "paged|"  # prefix of attention functions that only transformers' own loop can call


@dataclass(eq=False)
class Pending:
    """An unfinished request of a manager; `names` are the ids of its outputs, `names[-1]` is the
    engine's id."""

    names: list[str]
    prompt: Any
    # run in the engine's thread: its errors end this request
    make_config: Callable[[], GenerationConfig]
    seed: int | None
    is_streaming: bool
    records_times: bool
    tokenizer: Any = None  # for stop strings; the engine's if None
    # further arguments of `PagedEngine.add_request`
    options: Mapping[str, Any] = field(default_factory=dict)
    # called in the engine's thread, before its last outputs
    on_result: Callable[[RequestResult], None] | None = None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1.0
    # generated so far, by row of the engine's request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.prompt_ids = prompt_ids(self.prompt, None)
        except Exception:  # the engine reports the error
            self.prompt_ids = []

    def add(self, output: RequestOutput) -> list[GenerationOutput]:
        """Records a step's output and returns the outputs to deliver."""
        now = time.perf_counter()
        if self.started < 0:
            self.started = now
        for row, token in output.new_tokens.items():
            self.tokens.setdefault(row, []).append(token)
            self.times.setdefault(row, []).append(now)
        if output.result is not None:
            return self.end(output.result)
        outputs = []
        if self.is_streaming:
            for row in range(len(self.names)):
                if self._row(row) in output.new_tokens:
                    outputs.append(self._output(row, RequestStatus.DECODING))
        return outputs

    def end(self, result: RequestResult) -> list[GenerationOutput]:
        if self.on_result is not None:
            try:
                self.on_result(result)
            except Exception as caught:  # the outputs are delivered all the same
                logger.error(Topic.CONTINUOUS_BATCHING("`on_result` raised"), exc_info=caught)
        now = time.perf_counter()
        error = result.error
        if error is None and result.finish_reason == "cancelled":
            error = RuntimeError("the request was cancelled")
        if result.timings.queued is not None:
            self.started = self.created + result.timings.queued
        status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        outputs = []
        for row in range(len(self.names)):
            output = self._output(row, status)
            if error is not None:
                output.error = str(error)
            output.lifespan = (self.started, now)
            if result.sequences:
                last = len(result.sequences) - 1
                sequence = result.sequences[min(row, last)]
                # tokens of beams are final only now
                output.generated_tokens = list(sequence.token_ids)
                output.logprobs = [processed for _, processed in sequence.logprobs or ()]
            outputs.append(output)
        return outputs

    def _row(self, row: int) -> int:
        """The row of the engine's request, which has only row 0 where all rows would be equal
        (greedy search)."""
        return row if row in self.tokens else 0

    def _output(self, row: int, status: RequestStatus) -> GenerationOutput:
        engine_row = self._row(row)
        timestamps = None
        if self.records_times:
            timestamps = list(self.times.get(engine_row, ()))
        return GenerationOutput(
            self.names[row],
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens.get(engine_row, ())),
            status=status,
            created_time=self.created,
            lifespan=(self.started, -1),
            timestamps=timestamps,
        )


class ManagerThread:
    """The engine's thread and the state that it shares with callers. Holds no reference to the
    manager, which can be garbage-collected."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        max_queue_size: int,
        return_logprobs: bool,
    ) -> None:
        self.engine = PagedEngine(model, config)
        self.max_queue_size = max_queue_size
        self.return_logprobs = return_logprobs
        self.lock = forks.rlock()
        # Signals everything below, which the lock guards. `with` takes the lock itself: a
        # condition's `__enter__` and `__exit__` are Python code, in which a signal would leave the
        # lock taken.
        self.changed = threading.Condition(self.lock)
        self.thread: threading.Thread | None = None
        self.fatal_error: BaseException | None = None  # the error that ended the thread
        self.pending: dict[str, Pending] = {}  # unfinished requests, by the ids of their outputs
        self.inbox: deque[Pending] = deque()  # requests not yet given to the engine
        self.cancelled: deque[str] = deque()
        self.outputs: OrderedDict[str, deque[GenerationOutput]] = OrderedDict()  # not read yet
        self.handlers: dict[
            str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]
        ] = {}
        self.is_flushing = self.is_stopping = self.keeps_memory = False
        self.pausing: list[int] = []  # ids of threads that pause the engine
        self.is_paused = False
        # set by the manager's finalizer, which thus holds no model
        self.is_abandoned = threading.Event()
        forks.in_child(self)

    # -- in callers' threads ----------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def _has_vanished(self) -> bool:
        """Whether the thread ended without a word, as one that lacks memory does."""
        return self.thread is not None and not self.thread.is_alive() and not self.is_stopping

    def start(self) -> None:
        """Raises `RuntimeError` if the process may have no more threads."""
        with self.lock:
            self.is_flushing = self.is_stopping = self.is_paused = False
            self.fatal_error = None
            self.thread = None  # an earlier one, which has ended
        _running.add(self)
        self.thread = make(self._run, "hf_paged-continuous-batching")
        error = begin(self.thread)
        if error is not None:
            self.is_stopping = True  # should it begin later
            self.thread = None
            raise RuntimeError(
                "can't start new thread: the process is at its limit of threads or memory"
            ) from error

    def stop(self, is_hard: bool, keeps_memory: bool = False) -> None:
        with self.lock:
            self.is_flushing, self.keeps_memory = True, keeps_memory
            self.is_stopping |= is_hard
            self.changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread's end, at most `timeout` seconds; whether it has ended."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return not self.is_alive

    def add(self, request: Pending) -> None:
        def has_room() -> bool:
            is_over = self.is_flushing or self._has_vanished
            return is_over or not self.max_queue_size or len(self.inbox) < self.max_queue_size

        with self.lock:
            is_in_time = self._wait_for(has_room, QUEUE_SECONDS)
            used = [name for name in request.names if name in self.pending]
            if used:
                raise ValueError(
                    f"request id {used[-1]!r} is in use by an unfinished request: choose another"
                )
            is_over = self.is_flushing or self._has_vanished
            if is_over or not is_in_time:
                for name in request.names:  # registered before the request, which is refused
                    self.handlers.pop(name, None)
            if not is_in_time:
                raise queue.Full(
                    f"{len(self.inbox)} requests wait, the limit of `max_queue_size`: raise it, or"
                    " retry later"
                )
            if is_over:
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
            here = (lambda: self.outputs) if name is None else (lambda: name in self.outputs)
            # a caller with a timeout may wait for a request that is not added yet
            needs_request = name is not None and timeout is None

            def is_over() -> bool:
                return not self.is_alive or (needs_request and name not in self.pending)

            if self.is_alive and is_over() and not here():
                raise ValueError(
                    f"no unfinished request has the id {name!r}, and no output of it is unread"
                )
            self._wait_for(lambda: bool(here()) or is_over(), timeout)
            if not here():
                return None
            if name is None:
                name = next(iter(self.outputs))
            output = self.outputs[name].popleft()
            if not self.outputs[name]:
                del self.outputs[name]
            return output

    def _wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits, with `lock` held, until `predicate()`, at most `timeout` seconds; whether it
        holds. Looks every `POLL_SECONDS`: a thread that lacks memory ends without a word."""
        end = None if timeout is None else time.monotonic() + timeout
        while not predicate():
            left = POLL_SECONDS
            if end is not None:
                left = min(POLL_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            wait(self.changed, self.lock, left)
        return True

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        with self.lock:
            for output in outputs:
                callback, loop = self.handlers.get(output.request_id, (None, None))
                if callback is None or loop is None:
                    self.outputs.setdefault(output.request_id, deque()).append(output)
                    continue
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
        me = threading.get_ident()
        with self.lock:
            self.pausing.append(me)
        try:
            with self.lock:
                self.changed.notify_all()
                self._wait_for(lambda: self.is_paused or self.is_stopping or not self.is_alive)
                if not self.is_paused:
                    raise RuntimeError(
                        "the engine's thread ended before it could pause"
                    ) from self.fatal_error
            yield
        finally:
            with self.lock:
                self.pausing.remove(me)
                self.changed.notify_all()

    def after_fork(self, freed: set[Any]) -> None:
        """Resets the state in a child process, which has neither the thread nor its requests."""
        self.changed = threading.Condition(self.lock)
        self.pending.clear()
        self.inbox.clear()
        self.cancelled.clear()
        self.outputs.clear()
        self.handlers.clear()
        self.pausing.clear()
        self.thread = None
        self.engine = PagedEngine(self.engine.model, self.engine.config)

    # -- in the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with served(self.engine.model), torch.no_grad():
                has_failed = False
                while True:
                    try:
                        if not self._wait_for_work():
                            break
                        self._take_requests()
                        self._tell(self._outputs(self.engine.step()))
                        has_failed = False
                    except Exception as caught:
                        # the engine repeats the step, then ends the requests that it computes
                        logger.error(
                            Topic.FAILED_REQUESTS("a step of the engine raised"), exc_info=caught
                        )
                        if has_failed:
                            self._drop_requests(caught)
                        else:
                            self._fail_lost(caught)
                        has_failed = not has_failed
        except BaseException as caught:
            error = caught
            logger.error(Topic.CONTINUOUS_BATCHING("the engine's thread died"), exc_info=caught)
        finally:
            self._end(error)

    def _wait_for_work(self) -> bool:
        """Waits for requests and pauses. Returns False when the thread must end."""
        with self.lock:
            was_paused = False
            # wait for the end of a pause even when stopping: the model must not be restored before
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
            self.is_paused = False
            if self.is_stopping or self.is_abandoned.is_set():
                return False
            if was_paused:
                _served[self.engine.model].evaluate(self.engine.model)
            return True

    def _take_requests(self) -> None:
        """Gives new requests to the engine, up to `MAX_NEW`, and cancels requests, in the engine or
        before."""
        with self.lock:
            num_new = min(len(self.inbox), MAX_NEW)
            cancelled = set(self.cancelled)
            dropped = list[Pending]()
            self.cancelled.clear()
            requests = [self.inbox.popleft() for _ in range(num_new)]
            if cancelled and self.inbox:
                dropped = [request for request in self.inbox if request.names[-1] in cancelled]
                self.inbox = deque(
                    request for request in self.inbox if request.names[-1] not in cancelled
                )
            self.changed.notify_all()  # the queue has room
        for request in dropped:
            self._fail(request, RuntimeError("the request was cancelled"))
        for request in requests:
            if request.tokenizer is not None:
                self.engine.tokenizer = request.tokenizer
            try:
                config = request.make_config()
                options = {"return_logprobs": self.return_logprobs, **request.options}
                self.engine.add_request(
                    request.prompt,
                    config,
                    request_id=request.names[-1],
                    seed=request.seed,
                    **options,
                )
            except Exception as error:
                self._fail(request, error)
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
                outputs += request.end(RequestResult(step.request_id, [], error=error))
        return outputs

    def _fail(self, request: Pending, error: Exception) -> None:
        result = RequestResult(request.names[-1], [], error=error)
        self._tell(request.end(result))

    def _fail_given(self, error: Exception, kept: Container[Hashable] = ()) -> None:
        """Fails the requests that do not wait in the inbox, except those with the ids `kept`."""
        with self.lock:
            waiting = set(self.inbox)
            requests = dict.fromkeys(self.pending.values())
        for request in requests:
            if request not in waiting and request.names[-1] not in kept:
                if request.started < 0:  # it was not refused
                    request.started = time.perf_counter()
                self._fail(request, error)

    def _fail_lost(self, error: Exception) -> None:
        """Fails requests that the engine does not have and whose result it will not output."""
        core = self.engine._core
        with core.lock:
            unread = [output.request_id for output in core.unread]
            kept = {*core.requests, *unread}
        self._fail_given(error, kept)

    def _drop_requests(self, error: Exception) -> None:
        """Fails all requests that the engine has, which could not end them, and frees it."""
        self._fail_given(error)
        try:
            self.engine.free()
        except Exception as caught:
            logger.error(
                Topic.CONTINUOUS_BATCHING("the engine raised while it was freed"), exc_info=caught
            )
        with self.lock:
            # if all steps raise, they do not follow one another at once
            self.changed.wait(POLL_SECONDS)

    def _tell(self, outputs: list[GenerationOutput]) -> None:
        if outputs:
            with self.lock:
                for output in outputs:
                    self.deliver([output])
                    if output.is_finished():
                        self.pending.pop(output.request_id, None)

    def _end(self, error: BaseException | None) -> None:
        with self.lock:
            self.is_flushing = self.is_stopping = True
            self.fatal_error = error
            self.inbox.clear()
            self.cancelled.clear()
            why: Exception = RuntimeError("the manager was stopped before its end")
            if isinstance(error, Exception):
                why = error
            elif error is not None:
                why = RuntimeError(f"the engine's thread died: {error!r}")
            requests = list(dict.fromkeys(self.pending.values()))
            for request in requests:
                self._fail(request, why)
            self.handlers.clear()  # the rest are for ids without a request
        try:
            if error is None and self.keeps_memory:
                for request in requests:
                    with contextlib.suppress(ValueError):  # the engine does not have it
                        self.engine.cancel(request.names[-1])
                while self.engine.has_unfinished:  # cancelled requests; their outputs are dropped
                    self.engine.step()
            else:
                self.engine.free()
        finally:
            with self.lock:
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
        configs = {}
        for module in model.modules():
            if hasattr(module, "config"):
                configs[id(module.config)] = module.config
        self.attention = []
        for config in configs.values():
            if isinstance(config, PreTrainedConfig):
                name = compat.attention_of(config)
                if isinstance(name, str) and name.startswith(OWN_ATTENTION):
                    self.attention.append((config, name))

    def evaluate(self, model: PreTrainedModel) -> None:
        """Sets evaluation mode; remembers the modules that were in training mode."""
        self.training = _training(model) or self.training
        model.eval()


def _training(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module.training]


_served: weakref.WeakKeyDictionary[PreTrainedModel, _Served] = weakref.WeakKeyDictionary()
_served_lock = forks.lock()


@restoring
def served(model: PreTrainedModel) -> Iterator[None]:
    """Prepares a model as transformers' continuous batching does: evaluation mode, and attention
    implementations named `paged|...`, which only its own loop can call, replaced by their base. The
    last context to exit restores both."""
    device = compute_device(model)
    mine = list[_Served]()
    try:
        with _served_lock:
            before = _served.setdefault(model, _Served(model))
            before.count += 1
            mine.append(before)
            before.evaluate(model)
            for config, name in before.attention:
                compat.set_attention(config, name.removeprefix(OWN_ATTENTION))
        # set per thread
        on_device: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            on_device = torch.cuda.device(device)
        with on_device:
            yield
    finally:
        with _served_lock:
            for before in mine:
                before.count -= 1
                if not before.count:
                    del _served[model]
                    if not _training(model):
                        # a mode set by a caller stays
                        for module in before.training:
                            module.training = True
                    for config, name in before.attention:
                        compat.set_attention(config, name)
