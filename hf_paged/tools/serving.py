"""`transformers serve` on `PagedEngine`: `install` replaces parts of the server. The app itself is
transformers'."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving import server, utils
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat
from ..batching.arguments import RequestOptions, ServedByGenerateError
from ..batching.engine import PagedEngine
from ..cache.block_pool import OutOfBlocksError
from ..native.continuous_batching import PagedBatchingManager
from ..native.pending import make_output_ids
from ..threads import start, submit
from ..topics import Topic
from .openai_answers import join_answers, join_streams
from .openai_fields import (
    CHAT,
    SERVED_HERE,
    Refused,
    check_parts,
    translate,
)
from .openai_limits import check_allows_tokens, check_beams, check_extremes
from .served_request import (
    ClientDisconnected,
    ClientWatch,
    ServedRequest,
    current_choice,
    current_client,
    current_request,
    error_response,
    request_or_none,
)

logger = logging.getLogger(__name__)

# JSON schemas compiled at a time, and how long a request waits for its own
MAX_COMPILING, COMPILE_SECONDS = 2, 10.0
_compiling = threading.Semaphore(MAX_COMPILING)
# longer bodies take much memory while they are tokenized, so only one at a time is
LONG_BODY_BYTES = 1 << 20

# options that the app passes as arguments, or that configure its own loop
HOW_TO_RUN = ("max_new_tokens", "eos_token_id", "use_cache", "cache_implementation")
TEXT_INPUTS = ("input_ids", "attention_mask")  # the others are images and audio


class ServedManager(PagedBatchingManager):
    """A manager whose requests take their options from the asyncio task that adds them, since the
    app passes only a few."""

    def add_request(self, input_ids: Any, request_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        request = current_request()
        if not request.is_added:  # the first choice adds the request for all choices
            super().add_request(
                input_ids,
                request.engine_request_id,
                seed=request.seed,
                request_options={**request.options, "inputs": request.inputs},
                on_result=request.take_result,
                **{**request.generation_options, **kwargs},
            )
            request.is_added = request.errors_are_internal = True
            cancel = functools.partial(self.cancel_request, request.engine_request_id)
            current_client.get().on_disconnect(cancel)
        return str(request_id)

    def cancel_request(self, request_id: str) -> None:
        """Cancels the request that a choice belongs to."""
        engine_request_id, _, _ = request_id.partition("__child#")
        super().cancel_request(engine_request_id)

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        request = current_request()

        def record(output: GenerationOutput) -> None:
            request.has_run |= output.lifespan[0] >= 0
            request.first_output_event.set()
            callback(output)

        super().register_result_handler(request_id, record)


class EngineGenerateManager(utils.CBGenerateManager):
    """The app's continuous batching. Its manager depends on the model only, not on the first
    request's options."""

    def __init__(self, cb_config: ContinuousBatchingConfig | None = None) -> None:
        super().__init__(cb_config)
        self.manager: ServedManager | None = None
        self._config = cb_config or ContinuousBatchingConfig()
        self._lock = threading.Lock()  # requests begin in threads

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        with self._lock:
            if self.manager is not None and self.manager.model is not model:
                # the model was unloaded and loaded again
                self.manager.stop(hard_stop=True)
                self.manager = None
            if self.manager is None:
                self.manager = ServedManager(model, model.generation_config, self._config)
                setattr(self, compat.SERVED_MANAGER, self.manager)
                self.manager.start()

    def generate_streaming(self, *arguments: Any, request_id: str, **options: Any) -> Any:
        name = self._begin(*arguments)
        return super().generate_streaming(*arguments, name, **options)

    async def generate_non_streaming(self, *arguments: Any, request_id: str) -> Any:
        name = self._begin(*arguments)
        try:
            return await super().generate_non_streaming(*arguments, name)
        except utils.CBWorkerDeadError:
            raise
        except RuntimeError as error:
            refusal = current_request().refusal
            if refusal is not None:
                raise Refused(str(refusal)) from None
            if current_client.get().is_disconnected:
                raise ClientDisconnected from None
            raise error from None

    def _begin(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig
    ) -> str:
        """Completes this task's request and returns the id of the choice's outputs. Raises
        `Refused` for options that are too extreme or allow no token, for a prompt that never fits,
        and for a schema that cannot be compiled."""
        assert self.manager is not None  # `init_cb` has made it
        request = current_request()
        tokenizer = getattr(processor, "tokenizer", processor)
        request.tokenizer = tokenizer
        self.manager.engine.tokenizer = tokenizer
        defaults = self.manager.generation_config
        num_choices = request.fields.num_choices
        overrides = {
            name: value
            for name, value in vars(gen_config).items()
            if name[0] != "_"
            and name not in HOW_TO_RUN
            and value not in (None, getattr(defaults, name, None))
        }
        request.generation_options = {
            **overrides,
            **request.fields.generation,
            "num_return_sequences": num_choices,
        }
        check_extremes(request.generation_options)
        biases = request.generation_options.get("sequence_bias")
        if isinstance(biases, Mapping):
            # transformers takes floats
            biases = {ids: float(bias) for ids, bias in biases.items()}
            request.generation_options["sequence_bias"] = biases
        check_beams(gen_config, request.generation_options)
        check_allows_tokens(model, gen_config, request.generation_options)
        core = self.manager.engine._core
        options = RequestOptions(schema=request.fields.options.get("schema"))
        try:
            if request.inputs is None:
                core.check_length(inputs["input_ids"], request.engine_request_id)
            if options.schema is not None:  # compiled here, so that the engine's thread need not
                make = core.grammars.processor
                _compile(functools.partial(make, options, request.tokenizer, model))
        except (ImportError, IndexError, OutOfBlocksError, ValueError) as error:
            raise Refused(str(error)) from None
        return make_output_ids(request.engine_request_id, num_choices)[current_choice.get()]


def _compile(function: Callable[[], Any]) -> None:
    """Calls `function` in a thread. Raises its error, or `ValueError` after `COMPILE_SECONDS`.
    Nothing can stop the thread: while it runs on, fewer other schemas can be compiled at a time."""
    if not _compiling.acquire(timeout=COMPILE_SECONDS):
        raise ValueError("other JSON schemas are still being compiled: try again later")
    result: Future[Any] = Future()

    result.add_done_callback(lambda _: _compiling.release())

    def run() -> None:
        if result.set_running_or_notify_cancel():
            result.set_result(function())

    if start(run, "hf_paged-schema", on_error=result.set_exception) is None:
        result.cancel()
        raise ValueError("no thread can be started to compile the JSON schema: try again later")
    try:
        result.result(COMPILE_SECONDS)
    except FutureTimeout:
        raise ValueError(
            f"the JSON schema takes over {COMPILE_SECONDS:g} seconds to compile: shorten it"
        ) from None


class MediaGenerateManager(utils.GenerateManager):
    """Sends requests with more than text to the engine, and those that it does not serve to
    `generate`, whose errors do not count as bad requests."""

    get_engine: Callable[[], EngineGenerateManager]

    def generate_streaming(self, model: Any, *arguments: Any, **options: Any) -> Any:
        manager, arguments = self._manager_of(model, *arguments)
        return manager.generate_streaming(model, *arguments, **options)

    async def generate_non_streaming(self, model: Any, *arguments: Any, **options: Any) -> Any:
        manager, arguments = self._manager_of(model, *arguments)
        return await manager.generate_non_streaming(model, *arguments, **options)

    def _manager_of(
        self, model: Any, processor: Any, inputs: Mapping[str, Any], gen_config: GenerationConfig
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the manager that serves a request, that of the model's engine or of `generate`,
        and its arguments. Raises `Refused` if neither serves the request."""
        request = current_request()
        if not request.is_plain and not hasattr(model, "has_talker"):
            # `generate` of a model with a talker runs several models
            engine = self.get_engine()
            with contextlib.suppress(ServedByGenerateError):
                engine.init_cb(model, gen_config)
                others = {name: value for name, value in inputs.items() if name not in TEXT_INPUTS}
                request.inputs = others or None
                ids = inputs["input_ids"][0].tolist()
                return engine, (processor, {"input_ids": ids}, gen_config)
        if request.fields.num_choices > 1 or request.options:
            raise Refused(
                f"the engine does not serve this request to {type(model).__name__}, and `generate`"
                " serves neither `n`, log-probabilities, a JSON schema nor a cache salt: leave"
                " them out"
            )
        vars(gen_config).update(request.fields.generation)
        request.is_plain = request.errors_are_internal = True
        return super(), (processor, inputs, gen_config)


class EngineGenerationState(utils.GenerationState):
    """Sends text to an engine, whether or not the server was started with continuous batching."""

    def __init__(self, continuous_batching: bool = True, **kwargs: Any) -> None:
        super().__init__(continuous_batching=True, **kwargs)
        self._served: dict[str, EngineGenerateManager] = {}
        self._lock = threading.Lock()  # requests begin in threads
        self.long_bodies = asyncio.Lock()

    def use_continuous_batching(self, model: Any, modality: utils.Modality) -> bool:
        """Whether the app passes lists of token ids; for other models it passes tensors
        (`MediaGenerateManager`). Raises `Refused` for message parts that the model does not read,
        which the app would drop."""
        request = request_or_none.get()
        if request is not None:
            check_parts(modality.value, request.fields.body)
        return bool(modality == utils.Modality.LLM)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        with self._lock:
            manager = super().get_manager(model_id, use_cb)
            if use_cb:
                self._served = {model_id: manager}  # the app has one model at a time
            else:
                manager.get_engine = functools.partial(self.get_manager, model_id, use_cb=True)
            return manager

    def engines(self) -> dict[str, PagedEngine]:
        """The running engines, by the id of their model."""
        return {
            name: served.manager.engine
            for name, served in self._served.items()
            if served.manager is not None
        }


def build_server(model_manager: Any, chat_handler: Any, **others: Any) -> Any:
    """Builds the app. It refuses requests that are invalid or not served (400) or too long (413),
    ends those whose client disconnects, and has /metrics if prometheus_client is installed."""
    from fastapi import Response

    handlers = {CHAT: chat_handler, **others}
    app = _build_server(model_manager, **handlers)
    state: EngineGenerationState = others["generation_state"]
    for endpoint in SERVED_HERE.keys() & handlers.keys():
        handler = handlers[endpoint]
        handler.handle_request = functools.partial(_serve, state, endpoint, handler.handle_request)
    load = model_manager.load_model_and_processor
    model_manager.load_model_and_processor = functools.partial(_load, load)

    async def refuse(request: Any, error: Exception) -> Response:
        logger.warning(Topic.SERVING("refused %s: %s"), request.url.path, error)
        # at debug level, since clients may send many bad requests
        logger.debug("traceback of the refusal:", exc_info=error)
        # the message may quote text with half a surrogate pair
        message = str(error).encode(errors="backslashreplace").decode()
        return error_response(400, message)

    async def drop(request: Any, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's code for this; nobody reads the response

    # A garbage collection over the objects of all libraries takes a third of a second, in which no
    # stream gets a token. Frozen objects are skipped; a model that is already loaded is never
    # unloaded.
    gc.collect()
    gc.freeze()
    app.add_exception_handler(Refused, refuse)
    app.add_exception_handler(ClientDisconnected, drop)
    app.add_middleware(ClientWatch)
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        from .metrics import EngineCollector
    except ImportError:
        logger.warning(Topic.SERVING('no /metrics: pip install "hf_paged[serve]"'))
        return app
    registry = CollectorRegistry()
    registry.register(EngineCollector(state.engines))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _serve(
    state: EngineGenerationState,
    endpoint: str,
    handle: Callable[..., Any],
    body: dict[str, Any],
    request_id: str,
) -> Any:
    """Answers a request through the app's `handle`: on the engine, or by `generate` if only that
    serves it."""
    is_long = current_client.get().num_bytes > LONG_BODY_BYTES
    turn = state.long_bodies if is_long else contextlib.nullcontext()
    translation = await submit(translate, endpoint, body)
    request = ServedRequest(endpoint, translation)
    try:
        return await _answer(request, handle, request_id, turn)
    except Refused:
        if not isinstance(request.refusal, ServedByGenerateError):
            raise
    plain_request = ServedRequest(endpoint, request.fields, is_plain=True)
    return await _answer(plain_request, handle, request_id, turn)


@types.coroutine
def _remainder(coroutine: Coroutine[Any, Any, Any], future: Any) -> Generator[Any, Any, Any]:
    """Runs the remainder of a coroutine that waits for `future`."""
    try:
        while True:
            try:
                yield future
            except BaseException as error:
                future = coroutine.throw(error)
            else:
                future = coroutine.send(None)
    except StopIteration as end:
        return end.value


async def _begin_in_thread(coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
    """Runs a coroutine of the app in a thread up to its first wait, and returns the remainder. Up
    to there the app loads the model, validates, renders the chat template and tokenizes, while the
    event loop goes on with other answers."""
    loop = asyncio.get_running_loop()

    def begin() -> Awaitable[Any]:
        asyncio._set_running_loop(loop)  # the app gets the running loop
        try:
            return _remainder(coroutine, coroutine.send(None))
        except StopIteration as end:
            done: asyncio.Future[Any] = loop.create_future()
            done.set_result(end.value)
            return done
        finally:
            asyncio._set_running_loop(None)

    return await submit(begin)


async def _answer(
    request: ServedRequest, handle: Callable[..., Any], request_id: str, turn: Any
) -> Any:
    """Makes the app answer each choice separately, and joins its answers."""
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse, StreamingResponse

    fields = request.fields
    request_or_none.set(request)

    try:
        remainders = []
        async with turn:
            if current_client.get().is_disconnected:
                raise ClientDisconnected
            for choice in range(fields.num_choices):
                # one after another: the first adds the request
                current_choice.set(choice)
                answer = handle(dict(fields.body), request_id)
                remainders.append(await _begin_in_thread(answer))
        answers = await asyncio.gather(*remainders)
    except (Refused, ClientDisconnected, HTTPException, utils.CBWorkerDeadError):
        raise
    except Exception as error:
        # libraries of templates, images and audio have their own errors for invalid input
        if request.errors_are_internal:
            raise
        raise Refused(f"{type(error).__name__}: {error}") from error
    is_stream = isinstance(answers[0], StreamingResponse)
    if is_stream and not request.is_plain:
        await request.first_output_event.wait()
        if request.refusal is not None:
            raise Refused(str(request.refusal))
    adds_logprobs = "return_logprobs" in fields.options
    adds_usage = is_stream and fields.includes_usage
    if len(answers) == 1 and not adds_logprobs and not adds_usage:
        return answers[0]
    if is_stream:
        streams = [answer.body_iterator for answer in answers]
        events = join_streams(streams, request.logprobs, fields.includes_usage)
        return StreamingResponse(events, media_type=answers[0].media_type)
    bodies = [json.loads(answer.body) for answer in answers]
    return JSONResponse(join_answers(bodies, request.logprobs))


def _load(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Loads a model and its processor through the app's `load`."""
    request = request_or_none.get()
    if request is None:  # not for a request
        return load(*args, **kwargs)
    request.errors_are_internal = True
    try:
        loaded = load(*args, **kwargs)
    except OSError as error:
        if error.errno is None:  # transformers' error, for a model that does not exist
            raise Refused(str(error)) from error
        raise
    request.errors_are_internal = False  # only the model's name has been read
    return loaded


def set_seed(seed: int) -> None:
    """Sets the seed of a request, which then draws from its own random stream; under `generate` all
    requests share one generator. Raises `ValueError` for seeds of more than 64 bits."""
    request = request_or_none.get()
    if request is not None:
        request.seed = seed
    try:
        _set_torch_seed(seed)
    except RuntimeError as error:  # more than 64 bits
        raise ValueError(f"`seed` is {seed}: {error}") from None


_build_server, _set_torch_seed = server.build_server, utils.set_torch_seed


def install() -> None:
    """Makes `transformers serve` run on [`PagedEngine`] in this process, if called before it
    starts. Idempotent."""
    server.build_server = build_server
    utils.CBGenerateManager = EngineGenerateManager
    utils.GenerateManager = MediaGenerateManager
    utils.GenerationState = EngineGenerationState
    utils.set_torch_seed = set_seed
