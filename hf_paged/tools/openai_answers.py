"""Joins answers of the `transformers serve` app, each with a single choice, into one answer with
several choices in OpenAI's format, and adds log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from typing import Any

from ..batching.results import SequenceResult

# stands for minus infinity, which JSON lacks; OpenAI sends it for very unlikely tokens
MIN_LOGPROB = -9999.0

MakeLogprobs = Callable[[int], dict[str, Any] | None]
"""Returns the `logprobs` of a choice that has ended, by its index; `None` if they were not
requested."""


def chat_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Returns the log-probabilities of a choice's tokens under the model, in the format of
    /v1/chat/completions."""
    content = [
        {**_entry(*chosen), "top_logprobs": [_entry(*alternative) for alternative in alternatives]}
        for chosen, alternatives in _token_logprobs(tokenizer, sequence)
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Returns the log-probabilities of a choice's tokens under the model, in the format of
    /v1/completions, in which `top_logprobs` also contains the chosen token."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    offset = 0
    for (text, logprob), alternatives in _token_logprobs(tokenizer, sequence):
        columns["tokens"].append(text)
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append({**dict(alternatives), text: logprob})
        columns["text_offset"].append(offset)
        offset += len(text)
    return columns


def _token_logprobs(
    tokenizer: Any, sequence: SequenceResult
) -> Iterator[tuple[tuple[str, float], list[tuple[str, float]]]]:
    """Yields, for each new token, its text and log-probability under the model, and a list of the
    texts and log-probabilities of its alternatives."""

    def to_text_and_logprob(token: int, logprob: float, _: float) -> tuple[str, float]:
        return str(tokenizer.decode([token])), max(logprob, MIN_LOGPROB)

    logprobs = sequence.logprobs or []
    top_logprobs = sequence.top_logprobs or [[] for _ in logprobs]
    for token, token_logprobs, alternatives in zip(sequence.token_ids, logprobs, top_logprobs):
        chosen = to_text_and_logprob(token, *token_logprobs)
        yield chosen, [to_text_and_logprob(*item) for item in alternatives]


def join_answers(answers: Sequence[dict[str, Any]], make_logprobs: MakeLogprobs) -> dict[str, Any]:
    """Moves the choices of all answers, one per answer, to the first answer, adds log-probabilities
    and the total usage to it, and returns it."""
    joined_answer = answers[0]
    joined_answer["choices"] = [choice for answer in answers for choice in answer["choices"]]
    for index, choice in enumerate(joined_answer["choices"]):
        choice["index"] = index
        choice["logprobs"] = make_logprobs(index)
    joined_answer["usage"] = _total_usage([answer["usage"] for answer in answers])
    return joined_answer


def _total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the usage of all choices together. They share a prompt, which counts once."""
    total = dict(usages[0])
    for usage in usages[1:]:
        for name in ("completion_tokens", "total_tokens"):
            total[name] += usage["completion_tokens"]
    return total


async def join_streams(
    streams: Sequence[AsyncIterable[Any]], make_logprobs: MakeLogprobs, has_usage_event: bool
) -> AsyncGenerator[str, None]:
    """Yields the server-sent events of streams with one choice each, joined into one stream. The
    last event of a choice has its log-probabilities. The last event of the stream has the usage of
    all choices; with `has_usage_event`, this is a further event without choices, as in OpenAI's
    streams. If a stream raises an error, so does the generator. When the generator ends or is
    closed, it closes the streams that it has begun to read."""
    num_open = len(streams)
    usages: list[dict[str, Any]] = []
    last_chunk = dict[str, Any]()
    async with contextlib.aclosing(_events(streams)) as events:
        async for index, event in events:
            try:
                chunk = json.loads(event.removeprefix("data: "))
            except ValueError:  # an error event, in which the app does not escape quotes
                yield f"{event}\n\n"
                continue
            choices = chunk.get("choices", ())
            for choice in choices:
                choice["index"] = index
                if choice.get("finish_reason") is not None:
                    num_open -= 1
                    choice["logprobs"] = make_logprobs(index)
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages.append(usage)
                if not num_open and not has_usage_event:
                    chunk["usage"] = _total_usage(usages)
            if choices:  # otherwise the chunk may be an error event
                last_chunk = chunk
            yield f"data: {json.dumps(chunk)}\n\n"
    if has_usage_event and usages:
        usage_chunk = {**last_chunk, "choices": [], "usage": _total_usage(usages)}
        yield f"data: {json.dumps(usage_chunk)}\n\n"


async def _events(streams: Sequence[AsyncIterable[Any]]) -> AsyncGenerator[tuple[int, str], None]:
    """Yields the events of all streams as they come, each with the index of its stream. Raises the
    first error of a stream. Closes all streams at the end."""
    # `None` or an error marks the end of a stream
    queue: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterable[Any]) -> None:
        end: Exception | None = None
        try:
            async for text in stream:
                for event in filter(None, text.split("\n\n")):
                    queue.put_nowait((index, event))
        except Exception as error:
            end = error
        finally:
            queue.put_nowait((index, end))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
            else:
                yield index, event
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)  # a cancelled reader ends once its stream has ended
