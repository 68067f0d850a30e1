"""Answers with one choice each, joined into one: their errors and ends. tests/ecosystem has their
texts and usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hf_paged.batching.results import SequenceResult
from hf_paged.tools.openai_answers import (
    MIN_LOGPROB,
    chat_logprobs,
    completion_logprobs,
    join_streams,
)

from ..support import models

CHOICE = {"id": "r", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}


async def stream(*parts: str) -> AsyncIterator[str]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


def joined(*streams: Any) -> list[str]:
    async def run() -> list[str]:
        return [part async for part in join_streams(streams, lambda choice: None, True)]

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_error_events_pass_through() -> None:
    """With quotes that the app does not escape, and behind the last choice."""
    quoted = 'data: {"error": "a "b" c"}\n\n'
    assert joined(stream(quoted)) == [quoted]
    late_error = stream("", "", "", 'data: {"error": "full"}\n\n')
    last_choice = stream(f"data: {json.dumps({**CHOICE, **USAGE})}\n\n")
    *_, error, last = joined(last_choice, late_error)
    assert error == 'data: {"error": "full"}\n\n'
    assert json.loads(last.removeprefix("data: ")) == {"id": "r", "choices": [], **USAGE}


async def endless(name: str, closed: list[str]) -> AsyncIterator[str]:
    try:
        while True:
            await asyncio.sleep(0)
            yield f"data: {json.dumps(CHOICE)}\n\n"
    finally:
        closed.append(name)


def test_the_end_of_the_joined_stream_closes_the_others() -> None:
    """It is closed, or one of them raises."""
    closed: list[str] = []

    async def close() -> None:
        streams = [endless("one", closed), endless("two", closed)]
        events = join_streams(streams, lambda choice: None, False)
        await anext(events)
        await events.aclose()
        assert sorted(closed) == ["one", "two"]

    async def failing() -> AsyncIterator[str]:
        yield f"data: {json.dumps(CHOICE)}\n\n"
        raise OSError("on purpose")

    asyncio.run(close())
    with pytest.raises(OSError, match="on purpose"):
        joined(failing(), endless("other", closed))
    assert sorted(closed) == ["one", "other", "two"]


def test_logprobs_have_openais_forms() -> None:
    tokenizer, unlikely = models.tokenizer(), float("-inf")
    sequence = SequenceResult(
        [40, 41],
        "length",
        logprobs=[(-1.5, -9.0), (unlikely, unlikely)],
        top_logprobs=[[(50, -1.0, -9.0)], []],
    )
    texts = [tokenizer.decode([token]) for token in (40, 41, 50)]
    first, second = chat_logprobs(tokenizer, sequence)["content"]
    (top,) = first["top_logprobs"]
    assert (first["token"], first["logprob"]) == (texts[0], -1.5)
    assert bytes(first["bytes"]).decode() == texts[0]
    assert (top["token"], top["logprob"]) == (texts[2], -1.0)
    assert second["logprob"] == MIN_LOGPROB and second["top_logprobs"] == []
    assert completion_logprobs(tokenizer, sequence) == {
        "tokens": texts[:2],
        "token_logprobs": [-1.5, MIN_LOGPROB],
        "top_logprobs": [{texts[2]: -1.0, texts[0]: -1.5}, {texts[1]: MIN_LOGPROB}],
        "text_offset": [0, len(texts[0])],
    }
