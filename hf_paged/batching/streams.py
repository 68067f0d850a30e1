"""Callers of `generate` and `stream`: they queue requests, take steps until these end, and cancel
the rest on exit. They never share outputs: a caller reads those of its own requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from tqdm.auto import tqdm

from ..config import is_whole
from ..interrupts import ensure_done, guarded, is_interrupt
from ..model.sharding import RankLostError
from ..threads import submit
from ..topics import Topic
from .arguments import RequestOptions, reject_request_arguments
from .engine_core import EngineCore
from .execution.executor import StableSpan
from .prompt_forms import prompt_ids, split_inputs, split_prompts
from .results import RequestOutput, RequestResult

logger = logging.getLogger(__name__)

# options that may be lists with one value per prompt
_PER_PROMPT = ("adapter", "cache_salt", "grammar", "priority", "regex", "schema", "seed")


MAX_PENDING_OUTPUTS = 1 << 14  # outputs without a result: some megabytes
SLOW_SECONDS = 2.0  # a call that takes longer shows its progress


def _is_interactive() -> bool:
    """Whether a person may be watching: standard error is a terminal, or this is a notebook."""
    if "ipykernel.zmqshell" in sys.modules:
        return True
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):
        # it is None, closed, or replaced by a logging library
        return False


def trim_pending(outputs: list[RequestOutput]) -> None:
    """Drops all but the last `MAX_PENDING_OUTPUTS` outputs without a result; the results will hold
    their tokens."""
    if len(outputs) <= MAX_PENDING_OUTPUTS:
        return
    others = [output for output in outputs if not output.finished]
    dropped = set(map(id, others[:-MAX_PENDING_OUTPUTS]))
    outputs[:] = [output for output in outputs if id(output) not in dropped]


class RequestStream:
    """One call of `PagedEngine.generate`, `stream` or `astream`, which takes steps until its
    requests end."""

    def __init__(
        self, engine: EngineCore, tokenizer: Any, options: dict[str, Any], *prompts: Any
    ) -> None:
        reject_request_arguments(options.keys() - RequestOptions.__annotations__.keys())
        self.engine, self.tokenizer = engine, tokenizer
        queue = split_prompts(*prompts)
        count = len(queue)
        for name in ("request_id", "streamer", "inputs"):
            if count > 1 and options.get(name) is not None:
                raise ValueError(
                    f"`{name}` is for one request, and there are {count} prompts: call"
                    " `add_request` for each"
                )
        seed: Any = options.get("seed")
        if is_whole(seed) and -(2**63) <= seed < 2**64:  # each request refuses other seeds
            # a negative seed draws as its two's complement
            options = {**options, "seed": [(int(seed) + i) % 2**64 for i in range(count)]}
        lists = {}
        for name in _PER_PROMPT:
            values = options.get(name)
            if isinstance(values, (list, tuple)):
                lists[name] = values
                if len(values) != count:
                    raise ValueError(
                        f"{len(values)} values of `{name}` were passed for {count} prompts: pass"
                        " one for each"
                    )
        self._queue = []
        for index, (prompt, config) in enumerate(queue):
            row_options = {name: values[index] for name, values in lists.items()}
            request_options = RequestOptions(**{**options, **row_options})
            self._queue.append((prompt, config, request_options))
        # the engine appends the requests' outputs
        self.output_queue: deque[RequestOutput] = deque()
        self.span = StableSpan()
        self.request_ids: list[str] = []  # in the order of the prompts
        self.unfinished: set[str] = set()

    def _run(self) -> Iterator[RequestOutput | None]:
        """Yields `None` once all requests are added, then their outputs."""
        for prompt, config, options in self._queue:
            try:
                request_id = self.engine.add(
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
                    request_id = self.engine.make_id()
                with contextlib.suppress(Exception):  # an invalid prompt may raise anything
                    text_or_ids, _ = split_inputs(prompt, None)
                    ids = prompt_ids(text_or_ids, None)
                result = RequestResult(request_id, ids, error=error)
                self.output_queue.append(RequestOutput(request_id, result=result))
            self.request_ids.append(request_id)
        self.unfinished.update(self.request_ids)
        yield None
        while self.unfinished or self.output_queue:
            while self.output_queue:
                output = self.output_queue.popleft()
                if output.finished:
                    self.unfinished.discard(output.request_id)
                yield output
            if self.unfinished:
                span = self.span
                if not span.is_call:
                    span = StableSpan()
                self._step(span)

    def _step(self, span: StableSpan) -> None:
        """Takes a step for the requests, unless another thread's step has filled the output queue.
        Warns if the step raises: the next one repeats it, and ends its requests if it raises
        again."""
        engine = self.engine
        with engine.lock:
            engine.pauses.wait()
            if self.output_queue:
                return
            states = engine.requests.items()
            queue = self.output_queue
            reporting = {request_id for request_id, state in states if state.output_queue is queue}
            lost = self.unfinished - reporting
            if lost:
                raise RuntimeError(
                    f"requests {sorted(lost)} ended without a result: another thread has reused"
                    " their ids or freed them"
                )
            try:
                engine.step(span)
            except RankLostError:
                raise
            except Exception as error:
                if is_interrupt(error):
                    raise
                span.is_open = span.is_committed = False  # the failed step has left the span
                logger.warning(
                    Topic.FAILED_REQUESTS("a step raised %r and is repeated once"),
                    error,
                    exc_info=True,
                )
            if len(engine.pending_outputs) > 2 * MAX_PENDING_OUTPUTS:
                trim_pending(engine.pending_outputs)

    @guarded
    def _end(self) -> None:
        """Cancels the requests that report to the output queue, which has no reader any more, and
        ends the span of their steps."""
        engine = self.engine
        with engine.lock, contextlib.ExitStack() as stack:
            # an `ExitStack` cancels all of them, even if one raises
            if engine.loop is not None:
                engine.loop.executor.leave(self.span)
            for state in reversed(engine.requests.values()):
                if state.output_queue is self.output_queue:
                    stack.callback(engine.cancel, state)

    def _closing(self) -> Generator[RequestOutput | None, None, None]:
        try:
            yield from self._run()
        finally:
            ensure_done(self._end)  # even if an interrupt kept it from beginning

    def stream(self) -> Generator[RequestOutput, None, None]:
        """Yields all outputs; closing the generator cancels unfinished requests."""
        outputs = self._closing()
        try:
            yield from filter(None, outputs)
        finally:
            outputs.close()

    def results(self, progress: bool | None) -> list[RequestResult]:
        """Runs the requests to their ends. `progress`: whether to show a bar; `None`: in an
        interactive session, if the call takes long."""
        self.span.is_call = True
        results: dict[str, RequestResult] = {}
        is_shown = _is_interactive() if progress is None else progress
        delay = SLOW_SECONDS if progress is None else 0.0
        start = time.perf_counter()
        bar: Any = None
        outputs = self._closing()
        with contextlib.ExitStack() as stack:
            try:
                for output in outputs:
                    # the bar is made late, since tqdm takes a lock, which a forked child may find
                    # locked
                    if is_shown and bar is None and time.perf_counter() - start >= delay:
                        bar = stack.enter_context(
                            tqdm(
                                unit="request",
                                total=len(self._queue),
                                initial=len(results),
                            )
                        )
                    if output is not None and output.result is not None:
                        results[output.request_id] = output.result
                        if bar is not None:
                            bar.update(1)
            finally:
                outputs.close()
        ordered = [results[key] for key in self.request_ids if key in results]
        errors = [result.error for result in ordered if result.error is not None]
        if errors:
            message = (
                "%d of %d requests failed, and their results hold the errors; the first is %s: %s"
            )
            logger.warning(
                Topic.FAILED_REQUESTS(message),
                len(errors),
                len(ordered),
                type(errors[0]).__name__,
                errors[0],
            )
        return ordered

    async def astream(self) -> AsyncGenerator[RequestOutput, None]:
        """`stream` with each step in a worker thread. Readers of one event loop take one step at a
        time, which fills the output queues of all. A cancelled reader does not wait for the step's
        end."""
        outputs = self._closing()
        end = object()
        reading = threading.Lock()  # a generator cannot be closed while it runs
        event_loop = asyncio.get_running_loop()
        steps = self.engine.reader_locks.setdefault(event_loop, asyncio.Lock())

        def locked(function: Callable[..., Any], *args: Any) -> Any:
            with reading:
                return function(*args)

        async def read() -> Any:
            # adding requests and ending need no step
            turn = steps if self.unfinished else contextlib.nullcontext()
            async with turn:
                if self.output_queue:
                    return None
                return await submit(locked, next, outputs, end)

        pending: asyncio.Task[Any] | None = None
        try:
            while True:
                if self.output_queue:
                    output = next(outputs)  # does not wait
                else:
                    pending = asyncio.ensure_future(read())
                    output = await asyncio.shield(pending)  # cancellation cannot stop the thread
                if output is end:
                    return
                if output is not None:
                    yield output
        finally:
            closing: asyncio.Future[Any] | None = None
            try:
                closing = submit(locked, outputs.close)
            except RuntimeError:  # no thread, or no executor any more: here, behind any step
                locked(outputs.close)
            if closing is not None and (pending is None or pending.done()):
                await asyncio.shield(closing)
            elif pending is not None:  # retrieves the step's exception, for which no reader waits
                pending.add_done_callback(lambda task: task.cancelled() or task.exception())
