"""The thread of a continuous-batching manager: takes requests, steps an engine, delivers transformers' outputs."""

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
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
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
from ..interrupts import held
from ..model.forwards import compute_device

logger = logging.getLogger(__name__)

QUEUE_SECONDS = 10.0  # how long `add` waits for room in a full queue, as in transformers
POLL_SECONDS = 0.25  # how often the engine's thread checks whether its manager was collected
EXIT_SECONDS = 10.0  # how long the interpreter's exit waits for the step in progress
OWN_ATTENTION = "paged|"  # prefix of attention functions that only transformers' own loop can call


@dataclass(eq=False)
class Pending:
    """An unfinished request of a manager; `names` are the ids of its outputs, `names[-1]` is the engine's id."""

    names: list[str]
    prompt: Any
    make_config: Callable[[], GenerationConfig]  # run in the engine's thread: its errors end this request
    seed: int | None
    is_streaming: bool
    records_times: bool
    tokenizer: Any = None  # for stop strings; the engine's if None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1.0
    tokens: dict[int, list[int]] = field(default_factory=dict)  # generated so far, by row of the engine's request
    times: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.prompt_ids = prompt_ids(self.prompt, None)
        except Exception:  # the engine reports the error
            self.prompt_ids = []

    def add(self, output: RequestOutput) -> list[GenerationOutput]:
        """Records a step's output and returns the outputs to deliver."""
        now = time.perf_counter()
        self.started = now if self.started < 0 else self.started
        for row, token in output.new_tokens.items():
            self.tokens.setdefault(row, []).append(token)
            self.times.setdefault(row, []).append(now)
        if output.result is not None:
            return self.end(output.result)
        rows = range(len(self.names)) if self.is_streaming else ()
        return [self._output(row, RequestStatus.DECODING) for row in rows if self._row(row) in output.new_tokens]

    def end(self, result: RequestResult) -> list[GenerationOutput]:
        now, error = time.perf_counter(), result.error
        if error is None and result.finish_reason == "cancelled":
            error = RuntimeError("the request was cancelled")
        if result.timings.queued is not None:
            self.started = self.created + result.timings.queued
        status, outputs = RequestStatus.FINISHED if error is None else RequestStatus.FAILED, []
        for row in range(len(self.names)):
            output = self._output(row, status)
            output.error, output.lifespan = None if error is None else str(error), (self.started, now)
            if result.sequences:
                sequence = result.sequences[min(row, len(result.sequences) - 1)]
                output.generated_tokens = list(sequence.token_ids)  # tokens of beams are final only now
                output.logprobs = [processed for _, processed in sequence.logprobs or ()]
            outputs.append(output)
        return outputs

    def _row(self, row: int) -> int:
        """The row of the engine's request, which has only row 0 where all rows would be equal (greedy search)."""
        return row if row in self.tokens else 0

    def _output(self, row: int, status: RequestStatus) -> GenerationOutput:
        return GenerationOutput(
            self.names[row],
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens.get(self._row(row), ())),
            status=status,
            created_time=self.created,
            lifespan=(self.started, -1),
            timestamps=list(self.times.get(self._row(row), ())) if self.records_times else None,
        )


class ManagerThread:
    """The engine's thread and the state that it shares with callers. Holds no reference to the manager, which can be
    garbage-collected."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, max_queue_size: int, return_logprobs: bool) -> None:
        self.engine = PagedEngine(model, config)
        self.max_queue_size, self.return_logprobs = max_queue_size, return_logprobs
        self.lock = forks.rlock()
        self.changed = threading.Condition(self.lock)  # guards and signals everything below
        self.thread: threading.Thread | None = None
        self.fatal_error: BaseException | None = None  # the error that ended the thread
        self.pending: dict[str, Pending] = {}  # unfinished requests, by the ids of their outputs
        self.inbox: deque[Pending] = deque()  # requests not yet given to the engine
        self.cancelled: deque[str] = deque()
        self.outputs: OrderedDict[str, deque[GenerationOutput]] = OrderedDict()  # not read yet
        self.handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self.is_flushing = self.is_stopping = self.keeps_memory = False
        self.pausing: list[int] = []  # ids of threads that pause the engine
        self.is_paused = False
        self.is_abandoned = threading.Event()  # set by the manager's finalizer, which thus holds no model
        forks.in_child(self)

    # -- in callers' threads --------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self) -> None:
        with self.changed:
            self.is_flushing = self.is_stopping = self.is_paused = False
            self.fatal_error = None
            name = "hf_paged-continuous-batching"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()  # raises if the process may have no more threads
            self.thread = thread
            _running.add(self)

    def stop(self, is_hard: bool, keeps_memory: bool = False) -> None:
        with self.changed:
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
            return self.is_flushing or not self.max_queue_size or len(self.inbox) < self.max_queue_size

        with self.changed:
            is_in_time = self.changed.wait_for(has_room, QUEUE_SECONDS)
            if used := [name for name in request.names if name in self.pending]:
                raise ValueError(f"request id {used[-1]!r} is in use by an unfinished request: choose another")
            if self.is_flushing or not is_in_time:
                for name in request.names:  # registered before the request, which is refused
                    self.handlers.pop(name, None)
            if not is_in_time:
                raise queue.Full(f"{len(self.inbox)} requests wait, as many as `max_queue_size` allows: raise it")
            if self.is_flushing:
                why = "it was stopped" if self.fatal_error is None else f"its thread died: {self.fatal_error!r}"
                raise RuntimeError(f"the manager takes no more requests: {why}") from self.fatal_error
            self.pending |= dict.fromkeys(request.names, request)
            self.inbox.append(request)
            self.changed.notify_all()

    def cancel(self, name: str) -> None:
        with self.changed:
            request = self.pending.get(name)
            if request is not None and name != request.names[-1]:
                raise ValueError(f"{name!r} ends with its request alone: cancel {request.names[-1]!r}")
            self.cancelled.append(name)
            self.changed.notify_all()

    def get(self, name: str | None, timeout: float | None) -> GenerationOutput | None:
        """Waits for the next output (of `name` if given); `None` after the timeout and once none can come."""
        with self.changed:
            here = (lambda: self.outputs) if name is None else (lambda: name in self.outputs)

            def is_over() -> bool:  # a caller with a timeout may wait for a request that is not added yet
                return not self.is_alive or (name is not None and timeout is None and name not in self.pending)

            if self.is_alive and is_over() and not here():
                raise ValueError(f"no unfinished request has the id {name!r}, and all its outputs were read, if any")
            self.changed.wait_for(lambda: here() or is_over(), timeout)
            if not here():
                return None
            found = next(iter(self.outputs)) if name is None else name
            output = self.outputs[found].popleft()
            if not self.outputs[found]:
                del self.outputs[found]
            return output

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        with self.changed:
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
                        logger.error("the event loop refuses a result handler", exc_info=error)
                    self.handlers.pop(output.request_id, None)
                    self.cancelled.append(output.request_id)
            self.changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        me = threading.get_ident()
        with self.changed:
            self.pausing.append(me)
        try:
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.is_paused or self.is_stopping or not self.is_alive)
                if not self.is_paused:
                    raise RuntimeError("the engine's thread ended before it could pause") from self.fatal_error
            yield
        finally:
            with self.changed:
                self.pausing.remove(me)
                self.changed.notify_all()

    def after_fork(self, freed: set[Any]) -> None:
        """Resets the state in a child process, which has neither the thread nor its requests."""
        self.changed = threading.Condition(self.lock)
        for each in (self.pending, self.inbox, self.cancelled, self.outputs, self.handlers, self.pausing):
            each.clear()
        self.thread = None
        self.engine = PagedEngine(self.engine.model, self.engine.config)

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with served(self.engine.model), torch.no_grad():
                has_failed = False
                while self._wait_for_work():
                    try:
                        self._take_requests()
                        self._tell(self._outputs(self.engine.step()))
                        has_failed = False
                    except Exception as caught:  # the engine repeats the step, then ends the requests that it computes
                        logger.error("a step of the engine raised", exc_info=caught)
                        if has_failed:
                            self._drop_requests(caught)
                        else:
                            self._fail_lost(caught)
                        has_failed = not has_failed
        except BaseException as caught:
            error = caught
            logger.error("the engine's thread died", exc_info=caught)
        finally:
            self._end(error)

    def _wait_for_work(self) -> bool:
        """Waits for requests and pauses. Returns False when the thread must end."""
        with self.changed:
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
        """Gives new requests to the engine, and cancels in it."""
        with self.changed:
            requests, cancelled = list(self.inbox), list(self.cancelled)
            self.inbox.clear()
            self.cancelled.clear()
            self.changed.notify_all()  # the queue has room
        for request in requests:
            if request.tokenizer is not None:
                self.engine.tokenizer = request.tokenizer
            try:
                self.engine.add_request(
                    request.prompt,
                    request.make_config(),
                    request_id=request.names[-1],
                    seed=request.seed,
                    return_logprobs=self.return_logprobs,
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
        self._tell(request.end(RequestResult(request.names[-1], [], error=error)))

    def _fail_given(self, error: Exception, kept: Container[Hashable] = ()) -> None:
        """Fails the requests that do not wait in the inbox, except those with the ids `kept`."""
        with self.changed:
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
            kept = {*core.requests, *(output.request_id for output in core.unread)}
        self._fail_given(error, kept)

    def _drop_requests(self, error: Exception) -> None:
        """Fails all requests that the engine has, which could not end them, and frees it."""
        self._fail_given(error)
        try:
            self.engine.free()
        except Exception as caught:
            logger.error("the engine raised while it was freed", exc_info=caught)
        with self.changed:
            self.changed.wait(POLL_SECONDS)  # if all steps raise, they do not follow one another at once

    def _tell(self, outputs: list[GenerationOutput]) -> None:
        if outputs:
            with self.changed:
                for output in outputs:
                    self.deliver([output])
                    if output.is_finished():
                        self.pending.pop(output.request_id, None)

    def _end(self, error: BaseException | None) -> None:
        with self.changed:
            self.is_flushing = self.is_stopping = True
            self.fatal_error = error
            self.inbox.clear()
            self.cancelled.clear()
            why: Exception = RuntimeError("the manager was stopped before its end")
            if error is not None:
                why = error if isinstance(error, Exception) else RuntimeError(f"the engine's thread died: {error!r}")
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
            with self.changed:
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
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        found = [config for config in configs.values() if isinstance(config, PreTrainedConfig)]
        names = [(config, compat.attention_of(config)) for config in found]
        self.attention = [(c, name) for c, name in names if isinstance(name, str) and name.startswith(OWN_ATTENTION)]

    def evaluate(self, model: PreTrainedModel) -> None:
        """Sets evaluation mode; remembers the modules that were in training mode."""
        self.training = _training(model) or self.training
        model.eval()


def _training(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module.training]


_served: weakref.WeakKeyDictionary[PreTrainedModel, _Served] = weakref.WeakKeyDictionary()
_served_lock = forks.lock()


@contextlib.contextmanager
def served(model: PreTrainedModel) -> Iterator[None]:
    """Prepares a model as transformers' continuous batching does: evaluation mode, and attention implementations named
    `paged|...`, which only its own loop can call, replaced by their base. The last context to exit restores both."""
    device, mine = compute_device(model), list[_Served]()
    try:
        with held(), _served_lock:
            before = _served.setdefault(model, _Served(model))
            before.count += 1
            mine.append(before)
            before.evaluate(model)
            for config, name in before.attention:
                compat.set_attention(config, name.removeprefix(OWN_ATTENTION))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():  # set per thread
            yield
    finally:
        with held(), _served_lock:
            for before in mine:
                before.count -= 1
                if not before.count:
                    del _served[model]
                    for module in () if _training(model) else before.training:  # a mode set by a caller stays
                        module.training = True
                    for config, name in before.attention:
                        compat.set_attention(config, name)
