"""Callers that wait for requests: they queue them, take the steps that these need, and cancel what is left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from tqdm.auto import tqdm

from ..interrupts import held, let_in
from .arguments import RequestOptions, meant, prompt_ids, split_inputs, split_prompts
from .engine_core import EngineCore
from .execution.executor import Window
from .results import RequestOutput, RequestResult


class RequestStream:
    """One caller of `PagedEngine.generate` or `stream`, who takes the steps that its requests need."""

    def __init__(self, engine: EngineCore, tokenizer: Any, options: dict[str, Any], *prompts: Any) -> None:
        unknown = sorted(set(options) - {field.name for field in dataclasses.fields(RequestOptions)})
        if unknown:
            raise TypeError(
                f"unknown arguments {unknown}: generation options go into `generation_config`, a dict for instance"
                + meant(unknown)
            )
        self.engine, self.tokenizer, self.options = engine, tokenizer, RequestOptions(**options)
        self._queue = split_prompts(*prompts)  # with their configs
        count = len(self._queue)
        for name in ("request_id", "streamer", "inputs"):
            if count > 1 and options.get(name) is not None:
                raise ValueError(f"`{name}` is one request's, and there are {count} prompts: use `add_request`")
        self.outbox: deque[RequestOutput] = deque()  # where the engine puts what the requests' steps brought
        self.window = Window()
        self.places: dict[str, int] = {}  # among the prompts, by request id

    def _run(self) -> Iterator[RequestOutput]:
        for place, (prompt, config) in enumerate(self._queue):
            try:
                name = self.engine.add(self.tokenizer, prompt, config, self.options, self.outbox)
            except Exception as error:
                given, ids = self.options.request_id, list[int]()
                name = given if isinstance(given, str) else self.engine.make_id()
                with contextlib.suppress(Exception):  # whatever a prompt that is none may raise
                    ids = prompt_ids(split_inputs(prompt, None)[0], None)
                self.outbox.append(RequestOutput(name, result=RequestResult(name, ids, error=error)))
            self.places[name] = place
        unfinished = set(self.places)
        while unfinished or self.outbox:
            while self.outbox:
                output = self.outbox.popleft()
                if output.finished:
                    unfinished.discard(output.request_id)
                yield output
            if unfinished:
                window = self.window if self.window.is_call else Window()
                self.engine.step_for(self.outbox, unfinished, window)

    def stream(self) -> Generator[RequestOutput, None, None]:
        """All outputs; closing the generator cancels what is left."""
        try:
            yield from self._run()
        finally:
            self.engine.close(self.outbox, self.window)

    def results(self, progress: bool) -> list[RequestResult]:
        self.window.is_call = True
        results: dict[int, RequestResult] = {}
        # none where it is not shown: a bar takes a lock, which a child process may find held
        shown = tqdm(unit="request", total=len(self._queue)) if progress else contextlib.nullcontext()
        with shown as bar, held():
            try:
                with let_in():
                    for output in self._run():
                        if output.result is not None:
                            results[self.places[output.request_id]] = output.result
                            if bar is not None:
                                bar.update(1)
            finally:
                self.engine.close(self.outbox, self.window)
        return [results[place] for place in sorted(results)]


async def read_in_thread(stream: Generator[RequestOutput, None, None]) -> AsyncIterator[RequestOutput]:
    """The outputs, each waited for in a worker thread. A reader that is cancelled does not wait for a step to end."""
    nothing = object()
    reading = threading.Lock()  # a generator cannot be closed while it runs

    def locked(function: Callable[..., Any], *args: Any) -> Any:
        with reading:
            return function(*args)

    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(asyncio.to_thread(locked, next, stream, nothing))
            output = await asyncio.shield(pending)  # a cancelled thread would run on unseen
            if output is nothing:
                return
            yield output
    finally:
        closing = asyncio.get_running_loop().run_in_executor(None, locked, stream.close)
        if pending is None or pending.done():
            await asyncio.shield(closing)
        else:  # no reader waits for what the step brings or raises
            pending.add_done_callback(lambda task: task.cancelled() or task.exception())
