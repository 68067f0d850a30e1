"""The state of a request to `transformers serve`: its client, its fields and its result.
`serving.py` makes the app answer the request."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..batching.results import RequestResult
from ..grammar import NoTokenError
from .openai_answers import chat_logprobs, completion_logprobs
from .openai_fields import CHAT, Translation

CACHE_SALT = "x-cache-salt"  # header with the `cache_salt` of a request
MAX_BODY_BYTES = 32 << 20  # parsing a longer JSON body would block the event loop for too long


class ClientDisconnected(Exception):
    """The client has disconnected, so nobody would read the answer."""


@dataclass(eq=False)
class Client:
    """The client of an HTTP request, and the state of its connection."""

    cache_salt: str | None
    num_bytes: int = 0  # of the body, as received so far
    is_disconnected: bool = False
    cancel_callbacks: list[Callable[[], None]] = field(default_factory=list)

    def disconnect(self) -> None:
        """Notes that the client has disconnected, and calls the callbacks."""
        self.is_disconnected = True
        for cancel in self.cancel_callbacks:
            cancel()

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        """Calls `cancel` when the client disconnects, or now if it has disconnected."""
        self.cancel_callbacks.append(cancel)
        if self.is_disconnected:
            cancel()


@dataclass(eq=False)
class ServedRequest:
    """A client's request. The engine computes all of its choices as one request."""

    endpoint: str  # a key of `openai_fields.SERVED_HERE`
    fields: Translation
    is_plain: bool = False  # whether plain `generate` serves it
    # id in the engine; unlike the client's, it is always unique
    engine_request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    seed: int | None = None
    tokenizer: Any = None
    inputs: dict[str, Any] | None = None  # images and audio of the prompt
    generation_options: dict[str, Any] = field(default_factory=dict)  # for the generation config
    # whether an error would now be the server's fault: the input is accepted, or a model is loading
    errors_are_internal: bool = False
    is_added: bool = False  # whether the engine has the request
    # set at the engine's first output
    first_output_event: asyncio.Event = field(default_factory=asyncio.Event)
    has_run: bool = False  # whether at least one step has run it
    result: RequestResult | None = None

    @property
    def refusal(self) -> Exception | None:
        """The engine's error if the request never ran or no token was allowed; otherwise `None`."""
        error = None if self.result is None else self.result.error
        return error if not self.has_run or isinstance(error, NoTokenError) else None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `PagedEngine.add_request` that come from the fields and headers."""
        cache_salt = current_client.get().cache_salt
        return {**self.fields.options, **({} if cache_salt is None else {"cache_salt": cache_salt})}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which a model is loaded. Until it ends, errors are the server's fault."""
        self.errors_are_internal = True
        yield
        self.errors_are_internal = False  # the app has yet to validate the rest of the request

    def prepare(self, tokenizer: Any, generation_options: dict[str, Any]) -> None:
        """Sets the tokenizer and the generation options, before the engine gets the request."""
        self.tokenizer, self.generation_options = tokenizer, generation_options

    def mark_added(self) -> None:
        """Notes that the engine has the request, whose input is therefore accepted."""
        self.is_added = self.errors_are_internal = True

    def mark_plain(self) -> None:
        """Notes that plain `generate` serves the request, whose input is therefore accepted."""
        self.is_plain = self.errors_are_internal = True

    def note_output(self, was_started: bool) -> None:
        """Notes an output of the engine. `was_started`: whether a step has run the request."""
        self.has_run |= was_started
        self.first_output_event.set()

    def set_result(self, result: RequestResult) -> None:
        self.result = result

    def logprobs(self, choice: int) -> dict[str, Any] | None:
        """Returns the log-probabilities of the choice with this index, in the endpoint's format;
        `None` if they were not requested or the request has no result."""
        # greedy search returns one sequence, which all choices share
        sequences = self.result.sequences if self.result is not None else []
        if "return_logprobs" not in self.fields.options or not sequences:
            return None
        make_logprobs = chat_logprobs if self.endpoint == CHAT else completion_logprobs
        return make_logprobs(self.tokenizer, sequences[min(choice, len(sequences) - 1)])


# set in each asyncio task that serves a request
current_client: ContextVar[Client] = ContextVar("client")
request_or_none: ContextVar[ServedRequest | None] = ContextVar("request", default=None)
current_choice: ContextVar[int] = ContextVar("choice")  # index of the choice in the request


def current_request() -> ServedRequest:
    """Returns the request that the current asyncio task serves; there must be one."""
    request = request_or_none.get()
    assert request is not None
    return request


def _make_client(headers: Any) -> Client:
    """Returns the client of a request with these headers (`starlette.datastructures.Headers`)."""
    salts = headers.getlist(CACHE_SALT)
    # all headers together form the salt: a client whose proxy sets this header cannot choose
    # another tenant's salt by adding a header of its own
    return Client(",".join(salts) if salts else None)


def _content_length(headers: Any) -> int:
    """Returns the largest content length in these headers; 0 if there is none."""
    lengths = filter(str.isdecimal, headers.getlist("content-length"))
    return max(map(int, lengths), default=0)


class _MessageQueue:
    """A queue of at most one message, between the server's `receive` and the app, for an HTTP
    request. Cancels the client's requests when the client disconnects, when `receive` raises, and
    when the body has more than `max_bytes`."""

    def __init__(self, receive: Any, client: Client, max_bytes: float) -> None:
        self._receive = receive
        self._client = client
        self._max_bytes = max_bytes
        self._messages: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue(maxsize=1)

    @property
    def is_too_long(self) -> bool:
        """Whether the body received so far has more than `max_bytes`. Unlike the content-length
        header, this also covers a body that is sent in chunks."""
        return self._client.num_bytes > self._max_bytes

    async def fill(self) -> None:
        """Reads messages into the queue; runs until it is cancelled."""
        last_message: dict[str, Any] | Exception = {"type": "http.disconnect"}
        try:
            while True:
                message = await self._receive()
                self._client.num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or self.is_too_long:
                    break
                await self._messages.put(message)
        except Exception as error:
            last_message = error
        self._client.disconnect()
        while True:  # each later call of `get` returns or raises `last_message`
            await self._messages.put(last_message)

    async def get(self) -> dict[str, Any]:
        """Returns the next message, or raises the error of `receive`. The app calls this as its
        `receive`."""
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


class ClientMiddleware:
    """ASGI middleware that reads the cache salt, calls the callbacks of a client that disconnects,
    and refuses bodies of more than `MAX_BODY_BYTES` with status 413, except uploaded audio."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = _make_client(headers)
        current_client.set(client)
        max_bytes = float("inf") if scope["path"].startswith("/v1/audio/") else MAX_BODY_BYTES
        # the refusal closes the connection, since the rest of the body is not read
        refusal = error_response(
            413, f"the body has more than {MAX_BODY_BYTES} bytes: shorten it", connection="close"
        )
        if _content_length(headers) > max_bytes:
            await refusal(scope, receive, send)
            return
        messages = _MessageQueue(receive, client, max_bytes)
        has_response = False

        async def send_unless_refused(message: dict[str, Any]) -> None:
            nonlocal has_response
            # To the app, a client whose body is too long seems to have disconnected. The refusal
            # replaces the app's answer.
            if has_response or not messages.is_too_long:
                has_response = True
                await send(message)

        reader = asyncio.ensure_future(messages.fill())
        try:
            await self.app(scope, messages.get, send_unless_refused)
        finally:
            reader.cancel()
        if not has_response and messages.is_too_long:
            await refusal(scope, receive, send)


def error_response(status: int, message: str, **headers: str) -> Any:
    """Returns a response that refuses a request, in OpenAI's format. `headers`: the response's HTTP
    headers."""
    from starlette.responses import JSONResponse

    error = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": error}, status, headers)
