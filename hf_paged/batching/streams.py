"""Callers of `generate` and `stream`: they queue requests, take steps until these end, and cancel the rest on exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from tqdm.auto import tqdm

from ..interrupts import held, let_in
from .arguments import RequestOptions, meant, prompt_ids, split_inputs, split_prompts
from .engine_core import EngineCore
from .execution.executor import Window
from .results import RequestOutput, RequestResult

# options that may be lists with one value a prompt
_ONE_EACH = ("adapter", "cache_salt", "grammar", "priority", "regex", "schema", "seed")


class RequestStream:
    """One call of `PagedEngine.generate`, `stream` or `astream`, which takes steps until its requests end."""

    def __init__(self, engine: EngineCore, tokenizer: Any, options: dict[str, Any], *prompts: Any) -> None:
        unknown = sorted(set(options) - {field.name for field in dataclasses.fields(RequestOptions)})
        if unknown:
            raise TypeError(
                f"unknown arguments {unknown}: generation options go into `generation_config`, a dict for instance"
                + meant(unknown)
            )
        self.engine, self.tokenizer = engine, tokenizer
        queue = split_prompts(*prompts)
        count = len(queue)
        for name in ("request_id", "streamer", "inputs"):
            if count > 1 and options.get(name) is not None:
                raise ValueError(f"`{name}` is one request's, and there are {count} prompts: use `add_request`")
        each = {name: options[name] for name in _ONE_EACH if isinstance(options.get(name), (list, tuple))}
        for name, values in each.items():
            if len(values) != count:
                raise ValueError(f"{len(values)} values of `{name}` were passed for {count} prompts")
        rows = [{name: values[place] for name, values in each.items()} for place in range(count)]
        self._queue = [(*given, RequestOptions(**{**options, **own})) for given, own in zip(queue, rows)]
        self.outbox: deque[RequestOutput] = deque()  # the engine adds the requests' outputs here
        self.window = Window()
        self.places: dict[str, int] = {}  # by request id, its position among the prompts
        self.unfinished: set[str] = set()

    def _run(self) -> Iterator[RequestOutput | None]:
        """Yields `None` once all requests are added, then their outputs."""
        for place, (prompt, config, options) in enumerate(self._queue):
            try:
                name = self.engine.add(self.tokenizer, prompt, config, options, self.outbox)
            except Exception as error:
                given, ids = options.request_id, list[int]()
                name = given if isinstance(given, str) else self.engine.make_id()
                with contextlib.suppress(Exception):  # an invalid prompt may raise anything
                    ids = prompt_ids(split_inputs(prompt, None)[0], None)
                self.outbox.append(RequestOutput(name, result=RequestResult(name, ids, error=error)))
            self.places[name] = place
        self.unfinished.update(self.places)
        yield None
        while self.unfinished or self.outbox:
            while self.outbox:
                output = self.outbox.popleft()
                if output.finished:
                    self.unfinished.discard(output.request_id)
                yield output
            if self.unfinished:
                window = self.window if self.window.is_call else Window()
                self.engine.step_for(self.outbox, self.unfinished, window)

    def _closing(self) -> Generator[RequestOutput | None, None, None]:
        try:
            yield from self._run()
        finally:
            self.engine.close(self.outbox, self.window)

    def stream(self) -> Generator[RequestOutput, None, None]:
        """Yields all outputs; closing the generator cancels unfinished requests."""
        with contextlib.closing(self._closing()) as outputs:
            yield from filter(None, outputs)

    def results(self, progress: bool) -> list[RequestResult]:
        self.window.is_call = True
        results: dict[int, RequestResult] = {}
        # no bar if it is not shown: tqdm takes a lock, which a forked child may find held
        shown = tqdm(unit="request", total=len(self._queue)) if progress else contextlib.nullcontext()
        with shown as bar, held():
            try:
                with let_in():
                    for output in self._run():
                        if output is not None and output.result is not None:
                            results[self.places[output.request_id]] = output.result
                            if bar is not None:
                                bar.update(1)
            finally:
                self.engine.close(self.outbox, self.window)
        return [results[place] for place in sorted(results)]

    async def astream(self) -> AsyncGenerator[RequestOutput, None]:
        """`stream` with each step in a worker thread. Readers of one event loop take one step at a time, which fills
        the outboxes of all. A cancelled reader does not wait for the step's end."""
        outputs, nothing = self._closing(), object()
        reading = threading.Lock()  # a generator cannot be closed while it runs
        steps = self.engine.readers.setdefault(asyncio.get_running_loop(), asyncio.Lock())

        def locked(function: Callable[..., Any], *args: Any) -> Any:
            with reading:
                return function(*args)

        async def read() -> Any:
            async with steps if self.unfinished else contextlib.nullcontext():  # to add requests, or end, needs no step
                return None if self.outbox else await asyncio.to_thread(locked, next, outputs, nothing)

        pending: asyncio.Task[Any] | None = None
        try:
            while True:
                if self.outbox:
                    output = next(outputs)  # does not wait
                else:
                    pending = asyncio.ensure_future(read())
                    output = await asyncio.shield(pending)  # cancellation cannot stop the thread
                if output is nothing:
                    return
                if output is not None:
                    yield output
        finally:
            closing = asyncio.get_running_loop().run_in_executor(None, locked, outputs.close)
            if pending is None or pending.done():
                await asyncio.shield(closing)
            else:  # retrieves the step's exception, which no reader awaits
                pending.add_done_callback(lambda task: task.cancelled() or task.exception())
