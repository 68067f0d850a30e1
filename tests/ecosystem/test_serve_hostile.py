"""Requests to `transformers serve` that would stop others: these go on, and what is too much is
refused."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from transformers.generation.stopping_criteria import StopStringCriteria

from hf_paged.grammar import GrammarCompiler
from hf_paged.tools import served_request, serving

from .served_app import App, save_text_model, served

WAIT = 60.0  # seconds: a longer wait is a hang
JSON = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("served")
    save_text_model(folder)
    with served(folder, num_blocks=64, block_size=16) as app:
        app.chat()
        yield app


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assert_answers(app: App) -> None:
    assert app.chat("other")["usage"]["completion_tokens"] == 6


class Held:
    """A function that waits, while others are answered."""

    def __init__(self, real: Callable[..., Any], is_slow: Callable[..., bool]) -> None:
        self.real, self.is_slow = real, is_slow
        self.began, self.may_end = threading.Event(), threading.Event()
        self.thread_name = ""

    def method(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_slow(*args):
                self.thread_name = self.thread_name or threading.current_thread().name
                self.began.set()
                assert self.may_end.wait(WAIT)
            return self.real(*args, **kwargs)

        return call

    def answer_beside(self, other: Callable[[], Any], slow: Callable[[], Any]) -> Any:
        """Returns the slow answer, which ends after another one."""
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(slow)
            try:
                assert self.began.wait(WAIT)
                pool.submit(other).result(WAIT)
                assert not answer.done()
            finally:
                self.may_end.set()
            return answer.result(WAIT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("endpoint", "field", "length"),
    [
        ("chat/completions", "messages", "max_tokens"),
        ("completions", "prompt", "max_tokens"),
        ("responses", "input", "max_output_tokens"),
    ],
)
def test_others_are_answered_while_a_prompt_is_tokenized(
    app: App,
    endpoint: str,
    field: str,
    length: str,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = type(app.engine.tokenizer)
    name = "__call__" if endpoint == "completions" else "apply_chat_template"
    held = Held(getattr(tokenizer, name), lambda self, text, *others: "slow" in str(text))
    prompt = messages("slow") if field == "messages" else "slow"
    body = {field: prompt, length: 4, "temperature": 0, "stream": stream}
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, name, held.method())
        answer = held.answer_beside(
            functools.partial(assert_answers, app), lambda: app.post(endpoint, **body)
        )
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.json()["usage"] == app.post(endpoint, **body).json()["usage"]


@pytest.fixture
def held_schema(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Compiles each schema to a processor that allows all tokens."""
    held = Held(
        lambda *args: lambda ids, scores: scores,
        lambda self, options, *others: options.schema is not None,
    )
    monkeypatch.setattr(GrammarCompiler, "processor", held.method())
    return held


def test_others_are_answered_while_a_schema_is_compiled(app: App, held_schema: Held) -> None:
    answer = held_schema.answer_beside(
        functools.partial(assert_answers, app), lambda: app.chat("x", **JSON)
    )
    assert answer["usage"]["completion_tokens"] == 6
    assert held_schema.thread_name == "hf_paged-schema"


def test_schemas_that_take_long_are_refused(
    app: App, held_schema: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... those of others, too, once they take all threads; then they are compiled again."""
    monkeypatch.setattr(serving, "COMPILE_SECONDS", 0.05)
    body = {"messages": messages("x"), "max_tokens": 4, **JSON}
    try:
        refusals = [app.post(**body, stream=stream) for stream in (False, True, False)]
        assert [answer.status_code for answer in refusals] == [400] * 3
        first, second, third = (answer.json()["error"]["message"] for answer in refusals)
        assert "takes more than 0.05 seconds" in first and first == second
        assert "try again later" in third
        assert_answers(app)
    finally:
        held_schema.may_end.set()
    monkeypatch.setattr(serving, "COMPILE_SECONDS", WAIT)
    assert app.post(**body).status_code == 200


def test_a_loading_model_stops_no_other(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(lambda *args, **kwargs: 1 / 0, lambda *args: True)
    # in place of the app's own, which loads in the request's thread
    load = functools.partial(serving._load, held.method())
    monkeypatch.setattr(app.manager, "load_model_and_processor", load)
    with pytest.raises(ZeroDivisionError):
        held.answer_beside(
            lambda: app.client.get("/health").raise_for_status(),
            lambda: app.post(messages=messages("x"), max_tokens=2),
        )


def test_requests_that_begin_at_once_share_an_engine(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    with served(tmp_path) as app, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: app.chat(f"text {i}"), range(8)))
        assert all(answer["usage"]["completion_tokens"] == 6 for answer in answers)
        assert app.engine.stats().num_finished == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_prompt_that_never_fits_is_refused(app: App, is_busy: bool, stream: bool) -> None:
    name = None
    if is_busy:
        name = app.engine.add_request([5, 6, 7], {"max_new_tokens": 500, "eos_token_id": None})
    try:
        for choices in ({}, {"n": 3, "temperature": 1}):  # of 5000 tokens, in a pool of 1024
            body = {"messages": messages("a" * 5000), "max_tokens": 4, **choices}
            answer = app.post(**body, stream=stream)
            assert answer.status_code == 400
            assert "blocks of 16 tokens" in answer.json()["error"]["message"]
    finally:
        if name is not None and name in app.engine._core.requests:
            app.engine.cancel(name)
    assert_answers(app)


def test_bodies_that_are_too_long_are_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_request, "MAX_BODY_BYTES", 2000)
    body = json.dumps({"model": app.model, "messages": messages("a" * 2000)}).encode()
    path, form = "/v1/chat/completions", {"content-type": "application/json"}
    chunks = (body[i : i + 100] for i in range(0, len(body), 100))  # sent without a length
    for content in (body, chunks):
        answer = app.client.post(path, content=content, headers=form)
        assert answer.status_code == 413 and answer.headers["connection"] == "close"
        error = answer.json()["error"]
        assert "more than 2000 bytes" in error["message"]
        assert error["type"] == "invalid_request_error"
    assert_answers(app)


def test_an_error_of_the_connection_ends_its_request() -> None:
    """The app gets the error from its next `receive`, instead of waiting forever."""
    received: list[bytes] = []
    cancelled: list[bool] = []

    async def app(scope: Any, receive: Callable[[], Any], send: Any) -> None:
        served_request.current_client.get().on_disconnect(lambda: cancelled.append(True))
        received.append((await receive())["body"])
        for _ in range(2):
            with pytest.raises(ConnectionError, match="reset"):
                await receive()

    parts: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        if not parts:
            raise ConnectionError("reset by the client")
        return parts.pop()

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
    watched = served_request.ClientMiddleware(app)
    asyncio.run(asyncio.wait_for(watched(scope, receive, send), WAIT))
    assert received == [b"{"] and cancelled == [True]


def test_stop_strings_up_to_the_limit_make_no_table(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopStringCriteria, "__init__", None)
    expected = app.chat()["choices"][0]["message"]["content"]
    stop = [expected[2:4], "a" * 4033, *"b" * 60]
    answer = app.chat(stop=stop)["choices"][0]["message"]["content"]
    assert stop[0] in answer and expected.startswith(answer) and answer != expected


@pytest.mark.parametrize(
    "body",
    [
        {"stop": "a" * 4097},
        {"generation_config": '{"num_beams": 100}', "max_tokens": 10**9},
        {"generation_config": '{"num_beams": 100, "max_length": 1000000000}', "max_tokens": None},
        {"tools": json.loads("[" * 400 + "]" * 400)},
    ],
    ids=["stop", "beams", "beams up to a length", "deep tools"],
)
def test_extreme_requests_are_refused(app: App, body: dict[str, Any]) -> None:
    """More of them in tests/tools/test_openai_fields.py."""
    answer = app.post(**{"messages": messages("x"), "max_tokens": 4, **body})
    assert 400 <= answer.status_code < 500 and answer.text
    assert_answers(app)
