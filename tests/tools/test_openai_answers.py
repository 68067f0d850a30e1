"""Answers with one choice each, joined into one."""

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
    join_answers,
    join_streams,
)

from ..support import models


def nothing(choice: int) -> None:
    return None


def event(text: str, reason: str | None = None, num_tokens: int | None = None) -> str:
    chunk: dict[str, Any] = {
        "id": "r",
        "choices": [{"index": 0, "text": text, "finish_reason": reason}],
    }
    if num_tokens is not None:
        chunk["usage"] = {
            "prompt_tokens": 5,
            "completion_tokens": num_tokens,
            "total_tokens": 5 + num_tokens,
        }
    return f"data: {json.dumps(chunk)}\n\n"


async def stream(*parts: str) -> AsyncIterator[str]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


def read(parts: list[str]) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("includes_usage", [False, True])
def test_streams_are_joined_with_their_usage(includes_usage: bool) -> None:
    async def run() -> list[str]:
        streams = [
            stream(event("a") + event("b"), event("", "stop", 2)),
            stream(event("c"), event("", "length", 3)),
        ]
        return [
            part
            async for part in join_streams(streams, lambda choice: {"of": choice}, includes_usage)
        ]

    found = read(asyncio.run(run()))
    choices = [choice for chunk in found for choice in chunk["choices"]]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(2)] == ["ab", "c"]
    assert [c["logprobs"] for c in choices if c["finish_reason"]] == [{"of": 0}, {"of": 1}]
    assert not any("logprobs" in c for c in choices if not c["finish_reason"])
    (usage,) = [chunk["usage"] for chunk in found if "usage" in chunk]
    assert (
        usage
        == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
        == found[-1]["usage"]
    )
    assert (found[-1]["choices"] == []) is includes_usage and found[-1]["id"] == "r"


def test_an_error_with_quotes_passes_through() -> None:
    async def run() -> list[str]:
        return [
            part
            async for part in join_streams(
                [stream('data: {"error": "a "b" c"}\n\n')], nothing, True
            )
        ]

    assert asyncio.run(run()) == ['data: {"error": "a "b" c"}\n\n']


def test_an_error_event_is_no_part_of_the_usage_event() -> None:
    async def run() -> list[str]:
        late_error = stream("", "", "", 'data: {"error": "full"}\n\n')
        streams = [stream(event("", "stop", 2)), late_error]
        return [part async for part in join_streams(streams, nothing, True)]

    *_, error, last = read(asyncio.run(run()))
    assert error == {"error": "full"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert last == {"id": "r", "choices": [], "usage": usage}


async def endless(name: str, closed: list[str]) -> AsyncIterator[str]:
    try:
        while True:
            await asyncio.sleep(0)
            yield event("a")
    finally:
        closed.append(name)


def test_closing_the_joined_stream_closes_the_others() -> None:
    closed: list[str] = []

    async def run() -> None:
        events = join_streams([endless("one", closed), endless("two", closed)], nothing, False)
        async for _ in events:
            break
        await events.aclose()
        assert sorted(closed) == ["one", "two"]

    asyncio.run(run())


def test_an_error_of_a_stream_ends_the_joined_stream_and_closes_the_others() -> None:
    closed: list[str] = []

    async def failing() -> AsyncIterator[str]:
        yield event("b")
        raise OSError("on purpose")

    async def run() -> None:
        with pytest.raises(OSError, match="on purpose"):
            async for _ in join_streams([failing(), endless("other", closed)], nothing, True):
                pass
        assert closed == ["other"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_answers_are_joined_with_their_usage() -> None:
    answers = [
        {
            "choices": [{"index": 0}],
            "usage": {"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n},
        }
        for n in (2, 3)
    ]
    assert join_answers(answers, nothing) == {
        "choices": [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
    }


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
    assert (first["token"], first["logprob"], first["bytes"]) == (
        texts[0],
        -1.5,
        list(texts[0].encode()),
    )
    assert [(each["token"], each["logprob"]) for each in first["top_logprobs"]] == [
        (texts[2], -1.0)
    ]
    assert second["logprob"] == MIN_LOGPROB and second["top_logprobs"] == []
    assert completion_logprobs(tokenizer, sequence) == {
        "tokens": texts[:2],
        "token_logprobs": [-1.5, MIN_LOGPROB],
        "top_logprobs": [{texts[2]: -1.0, texts[0]: -1.5}, {texts[1]: MIN_LOGPROB}],
        "text_offset": [0, len(texts[0])],
    }
