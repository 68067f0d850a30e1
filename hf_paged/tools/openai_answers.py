"""Joins the app's answers, with one choice each, into one of OpenAI's form; adds
log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from typing import Any

from ..batching.results import SequenceResult

# JSON has no minus infinity; this is what OpenAI sends for very unlikely tokens
LEAST_LOGPROB = -9999.0

Report = Callable[[int], dict[str, Any] | None]
"""Returns the `logprobs` of a choice that has ended; `None` if they were not requested."""


def chat_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Log-probabilities of a choice's tokens under the model, in the form of
    /v1/chat/completions."""
    content = [
        {
            **_entry(tokenizer, token, logprob),
            "top_logprobs": [_entry(tokenizer, *pair) for pair in top],
        }
        for token, logprob, top in _tokens(sequence)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, sequence: SequenceResult) -> dict[str, Any]:
    """Log-probabilities of a choice's tokens under the model, in the form of /v1/completions. The
    alternatives include the token itself."""
    made: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    offset = 0
    for token, logprob, top in _tokens(sequence):
        text = _text(tokenizer, token)
        value = max(logprob, LEAST_LOGPROB)
        made["tokens"].append(text)
        made["token_logprobs"].append(value)
        alternatives = {_text(tokenizer, other): max(least, LEAST_LOGPROB) for other, least in top}
        made["top_logprobs"].append({**alternatives, text: value})
        made["text_offset"].append(offset)
        offset += len(text)
    return made


def _tokens(sequence: SequenceResult) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Yields each new token with its log-probability under the model, and its alternatives with
    theirs."""
    logprobs = sequence.logprobs or []
    tops = sequence.top_logprobs or [[] for _ in logprobs]
    for token, (logprob, _), top in zip(sequence.token_ids, logprobs, tops):
        yield token, logprob, [(other, raw) for other, raw, _ in top]


def _text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


def _entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}


def joined(answers: Sequence[dict[str, Any]], report: Report) -> dict[str, Any]:
    """Joins answers with one choice each into one answer; adds up the usage, of one prompt."""
    first, *others = answers
    first["choices"] = [choice for answer in answers for choice in answer["choices"]]
    for index, choice in enumerate(first["choices"]):
        choice["index"], choice["logprobs"] = index, report(index)
    for answer in others:
        _add_usage(first["usage"], answer["usage"])
    return first


def _add_usage(usage: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("completion_tokens", "total_tokens"):
        usage[name] += other["completion_tokens"]


async def joined_streams(
    streams: Sequence[AsyncIterable[Any]], report: Report, includes_usage: bool
) -> AsyncGenerator[str, None]:
    """Joins the server-sent events of streams with one choice each. The usage of all choices is in
    the last choice's last event, or with `includes_usage` in an event of its own without choices,
    as OpenAI sends it. Log-probabilities are in a choice's last event. Closing the generator closes
    the streams."""
    queue: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterable[Any]) -> None:
        try:
            async for part in stream:
                queue.put_nowait((index, part))
        finally:
            queue.put_nowait((index, None))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(readers)
    num_choices = len(readers)
    usage = dict[str, Any]()
    last = dict[str, Any]()
    try:
        while num_open:
            index, part = await queue.get()
            if part is None:
                num_open -= 1
                continue
            for event in filter(None, part.split("\n\n")):
                try:
                    chunk = json.loads(event.removeprefix("data: "))
                except ValueError:  # an error, whose quotes the app does not escape
                    yield f"{event}\n\n"
                    continue
                for choice in chunk.get("choices", ()):
                    choice["index"] = index
                    if choice.get("finish_reason") is not None:
                        num_choices -= 1
                        choice["logprobs"] = report(index)
                if (more := chunk.pop("usage", None)) is not None:
                    usage = _sum(usage, more)
                    if not num_choices and not includes_usage:
                        chunk["usage"] = usage
                last = chunk
                yield f"data: {json.dumps(chunk)}\n\n"
        if includes_usage and usage:
            yield f"data: {json.dumps({**last, 'choices': [], 'usage': usage})}\n\n"
    finally:
        for reader in readers:
            reader.cancel()


def _sum(usage: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if usage:
        _add_usage(usage, more)
        return usage
    return dict(more)
