"""Answers with one choice each, joined into one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from hf_paged.batching.results import SequenceResult
from hf_paged.tools.openai_answers import (
    MIN_LOGPROB,
    chat_logprobs,
    completion_logprobs,
    join_answers,
    join_streams,
)

from ..support import models


def nothing(choice: int) -> None:
    return None


def usage(num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": 5,
        "completion_tokens": num_tokens,
        "total_tokens": 5 + num_tokens,
    }


def event(text: str, reason: str | None = None, num_tokens: int | None = None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    chunk: dict[str, Any] = {"id": "r", "choices": [choice]}
    if num_tokens is not None:
        chunk["usage"] = usage(num_tokens)
    return f"data: {json.dumps(chunk)}\n\n"


async def stream(*parts: str) -> AsyncIterator[str]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


def joined(*streams: Any, logprobs: Callable[[int], Any] = nothing, usage: bool = True) -> Any:
    async def run() -> list[str]:
        return [part async for part in join_streams(streams, logprobs, usage)]

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("includes_usage", [False, True])
def test_streams_are_joined_with_their_usage(includes_usage: bool) -> None:
    parts = joined(
        stream(event("a") + event("b"), event("", "stop", 2)),
        stream(event("c"), event("", "length", 3)),
        logprobs=lambda choice: {"of": choice},
        usage=includes_usage,
    )
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(2)] == ["ab", "c"]
    assert [c["logprobs"] for c in choices if c["finish_reason"]] == [{"of": 0}, {"of": 1}]
    assert not any("logprobs" in c for c in choices if not c["finish_reason"])
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == [usage(5)]
    assert chunks[-1]["usage"] == usage(5) and chunks[-1]["id"] == "r"
    assert (chunks[-1]["choices"] == []) is includes_usage


def test_error_events_pass_through() -> None:
    """With quotes that the app does not escape, and behind the last choice."""
    quoted = 'data: {"error": "a "b" c"}\n\n'
    assert joined(stream(quoted)) == [quoted]
    late_error = stream("", "", "", 'data: {"error": "full"}\n\n')
    *_, error, last = joined(stream(event("", "stop", 2)), late_error)
    assert error == 'data: {"error": "full"}\n\n'
    assert json.loads(last.removeprefix("data: ")) == {"id": "r", "choices": [], "usage": usage(2)}


async def endless(name: str, closed: list[str]) -> AsyncIterator[str]:
    try:
        while True:
            await asyncio.sleep(0)
            yield event("a")
    finally:
        closed.append(name)


def test_the_end_of_the_joined_stream_closes_the_others() -> None:
    """It is closed, or one of them raises."""
    closed: list[str] = []

    async def close() -> None:
        events = join_streams([endless("one", closed), endless("two", closed)], nothing, False)
        await anext(events)
        await events.aclose()
        assert sorted(closed) == ["one", "two"]

    async def failing() -> AsyncIterator[str]:
        yield event("b")
        raise OSError("on purpose")

    asyncio.run(close())
    with pytest.raises(OSError, match="on purpose"):
        joined(failing(), endless("other", closed))
    assert sorted(closed) == ["one", "other", "two"]


def test_answers_are_joined_with_their_usage() -> None:
    answers = [{"choices": [{"index": 0}], "usage": usage(count)} for count in (2, 3)]
    choices = [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": None}]
    assert join_answers(answers, nothing) == {"choices": choices, "usage": usage(5)}


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
