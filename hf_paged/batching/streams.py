"""The calls of `PagedEngine.generate`, `stream` and `astream`: each call queues requests, takes
steps until these end, and cancels unfinished ones on exit. A call reads only the outputs of its own
requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from tqdm.auto import tqdm

from ..config import is_whole
from ..interrupts import ensure_done, guarded, is_interrupt
from ..model.sharding import RankLostError
from ..threads import attempt, step_lock, submit
from ..topics import Topic
from .arguments import RequestOptions, reject_request_arguments
from .engine_core import EngineCore
from .execution.executor import StableSpan
from .prompt_forms import prompt_ids, split_inputs, split_prompts
from .results import MAX_PENDING_OUTPUTS, RequestOutput, RequestResult, trim_pending

logger = logging.getLogger(__name__)

# options that may be lists with one value per prompt
_PER_PROMPT = ("adapter", "cache_salt", "grammar", "priority", "regex", "schema", "seed")

_is_owned = operator.methodcaller("_is_owned")  # whether this thread holds a lock

SLOW_SECONDS = 2.0  # by default, an interactive call that takes longer shows a progress bar


def _is_interactive() -> bool:
    """Whether a user may be watching: standard error is a terminal, or this is a notebook."""
    if "ipykernel.zmqshell" in sys.modules:
        return True
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):
        # `stderr` is None, closed, or replaced by a logging library
        return False


class RequestStream:
    """One call of `PagedEngine.generate`, `stream` or `astream`. `prompt_arguments` are passed to
    `split_prompts`: prompts, generation configs and an attention mask. The constructor raises
    `TypeError` and `ValueError` as `PagedEngine.generate` does."""

    def __init__(
        self, core: EngineCore, tokenizer: Any, options: dict[str, Any], *prompt_arguments: Any
    ) -> None:
        reject_request_arguments(options.keys() - RequestOptions.__annotations__.keys())
        self.core, self.tokenizer = core, tokenizer
        prompts_and_configs = split_prompts(*prompt_arguments)
        num_prompts = len(prompts_and_configs)
        for name in ("request_id", "streamer", "inputs"):
            if num_prompts > 1 and options.get(name) is not None:
                raise ValueError(
                    f"`{name}` is for one request, and there are {num_prompts} prompts: call"
                    " `add_request` for each"
                )
        seed: Any = options.get("seed")
        if is_whole(seed) and -(2**63) <= seed < 2**64:  # `add` raises for other seeds
            # a negative seed draws as its two's complement
            options = {**options, "seed": [(int(seed) + i) % 2**64 for i in range(num_prompts)]}
        options_by_prompt = [dict(options) for _ in prompts_and_configs]
        for name in _PER_PROMPT:
            values = options.get(name)
            if isinstance(values, (list, tuple)):
                for prompt_options, value in zip(options_by_prompt, values):
                    prompt_options[name] = value
                if len(values) != num_prompts:
                    raise ValueError(
                        f"{len(values)} values of `{name}` were passed for {num_prompts} prompts:"
                        " pass one per prompt"
                    )
        self._requests_to_add = []
        for (prompt, config), prompt_options in zip(prompts_and_configs, options_by_prompt):
            request_options = RequestOptions(**prompt_options)
            self._requests_to_add.append((prompt, config, request_options))
        # the requests' outputs: the engine appends them, and `_run` reads them
        self.output_queue: deque[RequestOutput] = deque()
        self.span = StableSpan()
        self.request_ids: list[str] = []  # in the order of the prompts
        self.unfinished_ids: set[str] = set()  # ids of requests without a result

    def _run(self) -> Generator[RequestOutput | None, None, None]:
        """Yields `None` once all requests are added, then their outputs. A request that cannot be
        added gets a result with the error. Calls `_end` when the generator ends."""
        try:
            for prompt, config, options in self._requests_to_add:
                try:
                    request_id = self.core.add(
                        self.tokenizer,
                        prompt,
                        config,
                        options,
                        self.output_queue,
                        reports_tokens=not self.span.is_call,
                    )
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    ids = list[int]()
                    request_id = options.request_id
                    if not isinstance(request_id, str):
                        request_id = self.core.make_id()
                    try:
                        text_or_ids, _ = split_inputs(prompt, None)
                        ids = prompt_ids(text_or_ids, None)
                    except Exception as prompt_error:  # an invalid prompt may raise anything
                        if is_interrupt(prompt_error):
                            raise
                    result = RequestResult(request_id, ids, error=error)
                    self.output_queue.append(RequestOutput(request_id, result=result))
                self.request_ids.append(request_id)
            self.unfinished_ids.update(self.request_ids)
            yield None
            while self.unfinished_ids or self.output_queue:
                while self.output_queue:
                    output = self.output_queue.popleft()
                    if output.finished:
                        self.unfinished_ids.discard(output.request_id)
                    yield output
                if self.unfinished_ids:
                    span = self.span
                    if not span.is_call:
                        span = StableSpan()
                    self._step(span)
        finally:
            ensure_done(self._end)  # calls it even if an interrupt comes first

    def _step(self, span: StableSpan) -> None:
        """Takes a step, unless another thread's step has filled the output queue. If the step
        raises an error, logs a warning; the next call repeats the step and, if that also fails,
        ends the step's requests. Raises interrupts and `RankLostError`, and `RuntimeError` if this
        thread has paused the engine, or if requests are gone without a result."""
        core = self.core
        with core.lock:
            core.pauses.wait()
            if self.output_queue:
                return
            states = core.requests.items()
            queue = self.output_queue
            reporting_ids = {
                request_id for request_id, state in states if state.output_queue is queue
            }
            missing_ids = self.unfinished_ids - reporting_ids
            if missing_ids:
                raise RuntimeError(
                    f"requests {sorted(missing_ids)} are gone without a result: another thread has"
                    " freed the engine or used their ids for new requests, or this process was"
                    " forked after they had been added"
                )
            try:
                core.step(span)
            except RankLostError:
                raise
            except Exception as error:
                if is_interrupt(error):
                    raise
                logger.warning(
                    Topic.FAILED_REQUESTS("a step raised %r and is repeated once"),
                    error,
                    exc_info=True,
                )
            if len(core.pending_outputs) > 2 * MAX_PENDING_OUTPUTS:
                trim_pending(core.pending_outputs)

    @guarded
    def _end(self) -> None:
        """Closes the span if this is a call of `results`. Cancels requests that still report to the
        output queue, which nobody reads any more. Cancelling waits for no lock, since the finalizer
        of a stream may run in any thread and under any lock: unless all locks are free, the
        requests end after the step in progress, or in the next step or call (`core.settle`)."""
        core = self.core
        if self.span.is_call:  # a call of `results`, which no finalizer ends
            with core.lock:
                if core.loop is not None:
                    core.loop.executor.close(self.span)
        for state in list(core.requests.values()):
            if state.output_queue is self.output_queue:
                core.cancelled_requests.append(state)
        locks = (core.inner_lock, step_lock(core.model), core.memory.lock)
        # if this thread holds a lock, it may be in the middle of a change
        if not core.cancelled_requests or any(map(_is_owned, locks)):
            return
        with contextlib.ExitStack() as stack:
            if all(stack.enter_context(attempt(lock)) for lock in locks):
                stack.enter_context(core.lock)
                core.settle()

    def stream(self) -> Generator[RequestOutput, None, None]:
        """Yields all outputs; closing the generator cancels unfinished requests."""
        outputs = self._run()
        try:
            yield from filter(None, outputs)
        finally:
            outputs.close()

    def results(self, progress: bool | None) -> list[RequestResult]:
        """Runs the requests until they end, and returns their results in the order of the prompts.
        `progress`: whether to show a progress bar; `None`: in an interactive session, once the call
        has taken `SLOW_SECONDS`."""
        self.span.is_call = True
        results: dict[str, RequestResult] = {}
        shows_bar = _is_interactive() if progress is None else progress
        delay = SLOW_SECONDS if progress is None else 0.0
        start = time.perf_counter()
        bar: Any = None
        outputs = self._run()
        with contextlib.ExitStack() as stack:
            try:
                for output in outputs:
                    # only when needed, since tqdm takes a lock, which a fork may leave locked in
                    # the child
                    if shows_bar and bar is None and time.perf_counter() - start >= delay:
                        bar = stack.enter_context(
                            tqdm(
                                unit="request",
                                total=len(self._requests_to_add),
                                initial=len(results),
                            )
                        )
                    if output is not None and output.result is not None:
                        results[output.request_id] = output.result
                        if bar is not None:
                            bar.update(1)
            finally:
                outputs.close()
        ordered_results = [results[key] for key in self.request_ids if key in results]
        errors = [result.error for result in ordered_results if result.error is not None]
        if errors:
            message = (
                "%d of %d requests failed, and their results hold the errors; the first is %s: %s"
            )
            logger.warning(
                Topic.FAILED_REQUESTS(message),
                len(errors),
                len(ordered_results),
                type(errors[0]).__name__,
                errors[0],
            )
        return ordered_results

    async def astream(self) -> AsyncGenerator[RequestOutput, None]:
        """Yields all outputs, like `stream`, but takes each step in a worker thread. The readers in
        one event loop take one step at a time, which fills the output queues of all readers. A
        cancelled reader does not wait for the end of a step in progress."""
        outputs = self._run()
        end_marker = object()
        generator_lock = threading.Lock()  # a generator cannot be closed while it runs
        event_loop = asyncio.get_running_loop()
        reader_lock = self.core.reader_locks.setdefault(event_loop, asyncio.Lock())

        def locked(function: Callable[..., Any], *args: Any) -> Any:
            with generator_lock:
                return function(*args)

        async def read() -> Any:
            # the first `next` adds the requests, and the last one ends the call: neither takes a
            # step
            lock = reader_lock if self.unfinished_ids else contextlib.nullcontext()
            async with lock:
                if self.output_queue:
                    return None
                return await submit(locked, next, outputs, end_marker)

        read_task: asyncio.Task[Any] | None = None
        try:
            while True:
                if self.output_queue:
                    output = next(outputs)  # returns at once
                else:
                    read_task = asyncio.ensure_future(read())
                    output = await asyncio.shield(read_task)  # cancellation cannot stop the thread
                if output is end_marker:
                    return
                if output is not None:
                    yield output
        finally:
            close_future: asyncio.Future[Any] | None = None
            try:
                close_future = submit(locked, outputs.close)
            except RuntimeError:  # no thread or executor is available: close in this thread
                locked(outputs.close)
            if close_future is not None and (read_task is None or read_task.done()):
                await asyncio.shield(close_future)
            elif read_task is not None:
                # retrieve the step's exception, so that asyncio does not log it
                read_task.add_done_callback(lambda task: task.cancelled() or task.exception())
