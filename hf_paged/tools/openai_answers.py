"""Joins the app's answers, each with one choice, into one answer in OpenAI's form; adds
log-probabilities. It generates nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from typing import Any

from ..batching.results import SequenceResult

# JSON has no minus infinity; OpenAI sends this number for very unlikely tokens
MIN_LOGPROB = -9999.0

Report = Callable[[int], dict[str, Any] | None]
"""Returns the `logprobs` of a choice that has ended; `None` if they were not requested."""


def chat_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Log-probabilities of a choice's tokens under the model, in the form of
    /v1/chat/completions."""
    content = [
        {**_entry(*token), "top_logprobs": [_entry(*other) for other in alternatives]}
        for token, alternatives in _tokens(tokenizer, sequence)
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Log-probabilities of a choice's tokens under the model, in the form of /v1/completions. The
    alternatives include the token itself."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    offset = 0
    for (text, logprob), alternatives in _tokens(tokenizer, sequence):
        columns["tokens"].append(text)
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append({**dict(alternatives), text: logprob})
        columns["text_offset"].append(offset)
        offset += len(text)
    return columns


def _tokens(
    tokenizer: Any, sequence: SequenceResult
) -> Iterator[tuple[tuple[str, float], list[tuple[str, float]]]]:
    """Yields the text and the log-probability of each new token under the model, and those of its
    alternatives."""

    def entry(token: int, logprob: float, _: float) -> tuple[str, float]:
        return str(tokenizer.decode([token])), max(logprob, MIN_LOGPROB)

    logprobs = sequence.logprobs or []
    tops = sequence.top_logprobs or [[] for _ in logprobs]
    for token, pair, top in zip(sequence.token_ids, logprobs, tops):
        yield entry(token, *pair), [entry(*other) for other in top]


def join_answers(answers: Sequence[dict[str, Any]], report: Report) -> dict[str, Any]:
    """Joins answers with one choice each into one answer; adds up their usage, in which the prompt
    counts once."""
    first = answers[0]
    first["choices"] = [choice for answer in answers for choice in answer["choices"]]
    for index, choice in enumerate(first["choices"]):
        choice["index"], choice["logprobs"] = index, report(index)
    first["usage"] = _total([answer["usage"] for answer in answers])
    return first


def _total(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The usage of all choices, which share one prompt."""
    usage = dict(usages[0])
    for other in usages[1:]:
        for name in ("completion_tokens", "total_tokens"):
            usage[name] += other["completion_tokens"]
    return usage


async def join_streams(
    streams: Sequence[AsyncIterable[Any]], report: Report, includes_usage: bool
) -> AsyncGenerator[str, None]:
    """Joins the server-sent events of streams with one choice each. The last choice's last event
    has the usage of all choices; with `includes_usage`, a separate event without choices has it, as
    OpenAI sends it. A choice's last event has its log-probabilities. Closing the generator closes
    the streams."""
    num_open = len(streams)
    usages: list[dict[str, Any]] = []
    last = dict[str, Any]()
    async with contextlib.aclosing(_events(streams)) as events:
        async for index, event in events:
            try:
                chunk = json.loads(event.removeprefix("data: "))
            except ValueError:  # an error, whose quotes the app does not escape
                yield f"{event}\n\n"
                continue
            for choice in chunk.get("choices", ()):
                choice["index"] = index
                if choice.get("finish_reason") is not None:
                    num_open -= 1
                    choice["logprobs"] = report(index)
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages.append(usage)
                if not num_open and not includes_usage:
                    chunk["usage"] = _total(usages)
            last = chunk
            yield f"data: {json.dumps(chunk)}\n\n"
    if includes_usage and usages:
        last = {**last, "choices": [], "usage": _total(usages)}
        yield f"data: {json.dumps(last)}\n\n"


async def _events(streams: Sequence[AsyncIterable[Any]]) -> AsyncGenerator[tuple[int, str], None]:
    """Yields the events of all streams as they come, with the index of their stream."""
    queue: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterable[Any]) -> None:
        try:
            async for part in stream:
                for event in filter(None, part.split("\n\n")):
                    queue.put_nowait((index, event))
        finally:
            queue.put_nowait((index, None))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            index, event = await queue.get()
            if event is None:
                num_open -= 1
            else:
                yield index, event
    finally:
        for reader in readers:
            reader.cancel()
