"""Callers that wait for requests: they queue them, take the steps that these need, and cancel what is left."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from ..interrupts import held, let_in
from .arguments import meant
from .engine_core import EngineCore
from .execution.executor import Window
from .prompts import Prompt, plain_ids, split_prompts
from .request_state import RequestState
from .results import RequestOutput, RequestResult

_OPTIONS = {"request_id"} | {
    name
    for name, parameter in inspect.signature(RequestState).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


class RequestStream:
    """
    One caller of `generate` or `stream`. As a context manager it queues the requests, and cancels those that have not
    ended; iterated over, it takes steps and gives the outputs of these requests alone.

    Args:
        engine ([`EngineCore`]): Whose steps it takes, if no other thread does.
        prompts, generation_config, attention_mask: As in `PagedEngine.generate`.
        options (`dict`): Other arguments of `add_request`.

    Raises:
        TypeError: for options that `add_request` does not have.
        ValueError: for arguments that do not go together.

    Attributes:
        outbox (`deque[RequestOutput]`): Where the engine puts what the requests' steps brought.
        places (`dict[str, int]`): Of the requests that were queued, by id.
        refused (`dict[int, RequestResult]`): Of those that could not be, by place.
    """

    def __init__(
        self,
        engine: EngineCore,
        prompts: Iterable[Prompt],
        generation_config: Any,
        attention_mask: Any,
        options: dict[str, Any],
    ) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(
                f"unknown arguments {unknown}: generation options go into `generation_config`, a dict for instance"
                + meant(unknown)
            )
        self.engine, self.options = engine, options
        self.prompts, self.configs = split_prompts(prompts, generation_config, attention_mask)
        for name in ("request_id", "streamer"):
            if len(self.prompts) > 1 and options.get(name) is not None:
                raise ValueError(
                    f"`{name}` is one request's, and there are {len(self.prompts)} prompts: use `add_request`"
                )
        self.outbox: deque[RequestOutput] = deque()
        self.window = Window()
        self.places: dict[str, int] = {}
        self.refused: dict[int, RequestResult] = {}

    def __enter__(self) -> RequestStream:
        try:
            for place, (prompt, config) in enumerate(zip(self.prompts, self.configs)):
                try:
                    self.places[self.engine.add(prompt, config, outbox=self.outbox, **self.options)] = place
                except Exception as error:
                    self.refused[place] = RequestResult(self.engine.make_id(), plain_ids(prompt), error=error)
        except BaseException:
            self.engine.close(self.outbox, self.window)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.close(self.outbox, self.window)

    def __iter__(self) -> Iterator[RequestOutput]:
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
        with self:
            yield from (RequestOutput(result.request_id, result=result) for result in self.refused.values())
            yield from self

    def results(self, progress: bool) -> list[RequestResult]:
        """The results in order."""
        self.window.is_call = True
        # none where it is not shown: a bar takes a lock, which a child process may find held
        shown = tqdm(unit="request", total=len(self.prompts)) if progress else contextlib.nullcontext()
        with shown as bar, held(), self, let_in():
            results = dict(self.refused)
            if bar is not None:
                bar.update(len(results))
            for output in self:
                if output.result is not None:
                    results[self.places[output.request_id]] = output.result
                    if bar is not None:
                        bar.update(1)
        return [results[place] for place in sorted(results)]


async def read_in_thread(stream: Generator[RequestOutput, None, None]) -> AsyncIterator[RequestOutput]:
    """The outputs, each waited for in a worker thread. A reader that is cancelled does not wait for a step to end."""
    nothing = object()
    reading = threading.Lock()  # a generator cannot be closed while it runs

    def read() -> Any:
        with reading:
            return next(stream, nothing)

    def close() -> None:
        with reading:
            stream.close()

    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(asyncio.to_thread(read))
            output = await asyncio.shield(pending)  # a cancelled thread would run on unseen
            if output is nothing:
                return
            yield output
    finally:
        closing = asyncio.get_running_loop().run_in_executor(None, close)
        if pending is None or pending.done():
            await asyncio.shield(closing)
        else:  # no reader waits for what the step brings or raises
            pending.add_done_callback(lambda task: task.cancelled() or task.exception())
