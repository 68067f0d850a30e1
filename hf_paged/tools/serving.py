"""`transformers serve` on `PagedEngine`: `install` replaces parts of transformers' server, whose
app serves the requests."""

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
from ..interrupts import is_interrupt
from ..native.continuous_batching import PagedBatchingManager
from ..native.pending import make_output_ids
from ..threads import start, submit
from ..topics import Topic
from .openai_answers import join_answers, join_streams
from .openai_fields import (
    CHAT,
    SERVED_HERE,
    RefusedError,
    check_parts,
    translate,
)
from .openai_limits import check_allows_tokens, check_beams, check_option_limits, set_max_new_tokens
from .served_request import (
    ClientDisconnected,
    ClientMiddleware,
    ServedRequest,
    current_choice,
    current_client,
    current_request,
    error_response,
    request_or_none,
)

logger = logging.getLogger(__name__)

MAX_COMPILING = 2  # JSON schemas that are compiled at the same time
COMPILE_SECONDS = 10.0  # how long a request waits for its turn, and again for its own schema
_compile_slots = threading.Semaphore(MAX_COMPILING)
# longer bodies are tokenized one at a time, since tokenizing them takes much memory
LONG_BODY_BYTES = 1 << 20

# Options of a request's generation config that `EngineGenerateManager` does not pass to the engine:
# the app passes the first two itself; the others concern transformers' cache.
SKIPPED_OPTIONS = ("max_new_tokens", "eos_token_id", "use_cache", "cache_implementation")
TEXT_INPUTS = ("input_ids", "attention_mask")  # other inputs are images and audio


class ServedManager(PagedBatchingManager):
    """A manager that reads the options of a request from `current_request()`, since the app passes
    only a few of them to `add_request`."""

    def add_request(self, input_ids: Any, request_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        request = current_request()
        # the app calls this for each choice; the first call adds the request with all choices
        if not request.is_added:
            super().add_request(
                input_ids,
                request.engine_request_id,
                seed=request.seed,
                request_options={**request.options, "inputs": request.inputs},
                on_result=request.set_result,
                **{**request.generation_options, **kwargs},
            )
            request.mark_added()
            cancel = functools.partial(self.cancel_request, request.engine_request_id)
            current_client.get().on_disconnect(cancel)
        return str(request_id)

    def cancel_request(self, request_id: str) -> None:
        """Cancels the whole request to which a choice belongs."""
        engine_request_id, _, _ = request_id.partition("__child#")
        super().cancel_request(engine_request_id)

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        request = current_request()

        def record(output: GenerationOutput) -> None:
            request.note_output(was_started=output.lifespan[0] >= 0)
            callback(output)

        super().register_result_handler(request_id, record)


class EngineGenerateManager(utils.CBGenerateManager):
    """The app's continuous batching, with a [`ServedManager`]. The manager's default options come
    from the model's generation config; the app would take them from the first request."""

    def __init__(self, cb_config: ContinuousBatchingConfig | None = None) -> None:
        super().__init__(cb_config)
        self.manager: ServedManager | None = None
        self._config = cb_config or ContinuousBatchingConfig()
        self._lock = threading.Lock()  # `init_cb` is called in several threads

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Starts a manager for the model, unless it has one; ignores `gen_config`."""
        with self._lock:
            if self.manager is not None and self.manager.model is not model:
                # the app has loaded the model again
                self.manager.stop(hard_stop=True)
                self.manager = None
            if self.manager is None:
                manager = ServedManager(model, model.generation_config, self._config)
                manager.start()  # if this raises, the next request tries again
                self.manager = manager
                setattr(self, compat.SERVED_MANAGER, manager)

    def generate_streaming(self, *arguments: Any, request_id: str, **options: Any) -> Any:
        output_id = self._prepare_request(*arguments)
        return super().generate_streaming(*arguments, output_id, **options)

    async def generate_non_streaming(self, *arguments: Any, request_id: str) -> Any:
        output_id = self._prepare_request(*arguments)
        try:
            return await super().generate_non_streaming(*arguments, output_id)
        except utils.CBWorkerDeadError:
            raise
        except RuntimeError as error:
            refusal = current_request().refusal
            if refusal is not None:
                raise RefusedError(str(refusal)) from None
            if current_client.get().is_disconnected:
                raise ClientDisconnected from None
            raise error from None

    def _prepare_request(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig
    ) -> str:
        """Sets the options of this task's request, and returns the id of the choice's outputs.
        Raises `RefusedError` for options that exceed the limits or allow no token, for a text
        prompt that is too long for the model's positions or the memory, and for a schema that
        cannot be compiled."""
        assert self.manager is not None  # created by `init_cb`
        request = current_request()
        tokenizer = getattr(processor, "tokenizer", processor)
        self.manager.engine.tokenizer = tokenizer
        defaults = self.manager.generation_config
        num_choices = request.fields.num_choices
        overrides = {
            name: value
            for name, value in vars(gen_config).items()
            if name[0] != "_"
            and name not in SKIPPED_OPTIONS
            and value not in (None, getattr(defaults, name, None))
        }
        generation_options = {
            **overrides,
            **request.fields.generation_options,
            "num_return_sequences": num_choices,
        }
        request.prepare(tokenizer, generation_options)
        check_option_limits(request.generation_options)
        set_max_new_tokens(model, gen_config, len(inputs["input_ids"]))
        biases = request.generation_options.get("sequence_bias")
        if isinstance(biases, Mapping):
            # transformers accepts only floats
            biases = {ids: float(bias) for ids, bias in biases.items()}
            request.generation_options["sequence_bias"] = biases
        check_beams(gen_config, request.generation_options, len(inputs["input_ids"]))
        check_allows_tokens(model, gen_config, request.generation_options)
        core = self.manager.engine._core
        options = RequestOptions(schema=request.fields.options.get("schema"))
        try:
            if request.inputs is None:
                core.check_length(inputs["input_ids"], request.engine_request_id)
            if options.schema is not None and not request.is_added:
                # compiled here: in the engine's thread, it would delay the steps of all requests
                make_processor = core.grammars.processor
                _compile(functools.partial(make_processor, options, request.tokenizer, model))
        except (ImportError, IndexError, OutOfBlocksError, ValueError) as error:
            raise RefusedError(str(error)) from None
        return make_output_ids(request.engine_request_id, num_choices)[current_choice.get()]


def _compile(function: Callable[[], Any]) -> None:
    """Calls `function`, which compiles a schema, in a thread. Raises the function's error, and
    `ValueError` if no thread is available or if the wait for other schemas, or the function, takes
    more than `COMPILE_SECONDS`. A function that takes longer continues in its thread, and counts
    towards `MAX_COMPILING` until it ends."""
    if not _compile_slots.acquire(timeout=COMPILE_SECONDS):
        raise ValueError("other JSON schemas are still being compiled: try again later")
    result: Future[Any] = Future()

    result.add_done_callback(lambda _: _compile_slots.release())

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
            f"the JSON schema takes more than {COMPILE_SECONDS:g} seconds to compile: shorten it"
        ) from None


class MediaGenerateManager(utils.GenerateManager):
    """Sends requests with images or audio to the engine or, if the engine does not serve them, to
    `generate`. Reports errors of `generate` as the server's, not as bad requests."""

    get_engine_manager: Callable[[], EngineGenerateManager]

    def generate_streaming(self, model: Any, *arguments: Any, **options: Any) -> Any:
        manager, arguments = self._choose_manager(model, *arguments)
        return manager.generate_streaming(model, *arguments, **options)

    async def generate_non_streaming(self, model: Any, *arguments: Any, **options: Any) -> Any:
        manager, arguments = self._choose_manager(model, *arguments)
        return await manager.generate_non_streaming(model, *arguments, **options)

    def _choose_manager(
        self, model: Any, processor: Any, inputs: Mapping[str, Any], gen_config: GenerationConfig
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the manager that serves a request (the engine's or `generate`'s), and the
        arguments for it. Raises `RefusedError` if neither serves the request."""
        request = current_request()
        # the `generate` of a model with a talker runs several models, and an engine runs one
        if not request.is_plain and not hasattr(model, "has_talker"):
            engine_manager = self.get_engine_manager()
            with contextlib.suppress(ServedByGenerateError):
                engine_manager.init_cb(model, gen_config)
                media = {name: value for name, value in inputs.items() if name not in TEXT_INPUTS}
                request.inputs = media or None
                input_ids = inputs["input_ids"][0].tolist()
                return engine_manager, (processor, {"input_ids": input_ids}, gen_config)
        if request.fields.num_choices > 1 or request.options:
            raise RefusedError(
                f"the engine does not serve this request to {type(model).__name__}, and `generate`"
                " does not serve `n`, log-probabilities, JSON schemas or cache salts: leave them"
                " out"
            )
        vars(gen_config).update(request.fields.generation_options)
        request.mark_plain()
        return super(), (processor, inputs, gen_config)


class EngineGenerationState(utils.GenerationState):
    """Sends text requests to an engine, even if the server was started without continuous
    batching."""

    def __init__(self, continuous_batching: bool = True, **kwargs: Any) -> None:
        super().__init__(continuous_batching=True, **kwargs)
        self._managers: dict[str, EngineGenerateManager] = {}
        self._lock = threading.Lock()  # `get_manager` is called in several threads
        self.long_body_lock = asyncio.Lock()

    def use_continuous_batching(self, model: Any, modality: utils.Modality) -> bool:
        """Whether the app must pass lists of token ids: true for text models. For other models it
        passes tensors to a `MediaGenerateManager`. Raises `RefusedError` for message parts that the
        model cannot read, which the app would drop."""
        request = request_or_none.get()
        if request is not None:
            check_parts(modality.value, request.fields.body)
        return bool(modality == utils.Modality.LLM)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        with self._lock:
            manager = super().get_manager(model_id, use_cb)
            if use_cb:
                self._managers = {model_id: manager}  # the app has one such manager at a time
            else:
                manager.get_engine_manager = functools.partial(
                    self.get_manager, model_id, use_cb=True
                )
            return manager

    def engines(self) -> dict[str, PagedEngine]:
        """Returns the running engines by the id of their model."""
        return {
            model_id: engine_manager.manager.engine
            for model_id, engine_manager in self._managers.items()
            if engine_manager.manager is not None
        }


def build_server(model_manager: Any, chat_handler: Any, **arguments: Any) -> Any:
    """Returns the app. It refuses requests that are invalid or not served (status 400) or too long
    (413), cancels requests whose client disconnects, and has /metrics if prometheus_client is
    installed."""
    from fastapi import Response

    arguments = {CHAT: chat_handler, **arguments}
    app = _build_server(model_manager, **arguments)
    state: EngineGenerationState = arguments["generation_state"]
    for endpoint in SERVED_HERE.keys() & arguments.keys():
        handler = arguments[endpoint]
        handler.handle_request = functools.partial(_serve, state, endpoint, handler.handle_request)
    load = model_manager.load_model_and_processor
    model_manager.load_model_and_processor = functools.partial(_load, load)
    model_manager.shutdown = functools.partial(_unload, model_manager.shutdown)

    async def answer_refused(request: Any, error: Exception) -> Response:
        logger.warning(Topic.SERVING("refused %s: %s"), request.url.path, error)
        # at debug level, since clients may send many bad requests
        logger.debug("traceback of the refusal:", exc_info=error)
        # the message may quote text with half a surrogate pair
        message = str(error).encode(errors="backslashreplace").decode()
        return error_response(400, message)

    async def answer_disconnected(request: Any, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's status for this; nobody reads the response

    # A garbage collection over the objects of all libraries takes a third of a second, in which no
    # stream gets a token. Collections skip frozen objects, among them a preloaded model, which
    # the app unloads only for `POST /reset`.
    gc.collect()
    gc.freeze()
    app.add_exception_handler(RefusedError, answer_refused)
    app.add_exception_handler(ClientDisconnected, answer_disconnected)
    app.add_middleware(ClientMiddleware)
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
    """Answers a request through the app's `handle`: on the engine, or by `generate` if only
    `generate` serves it."""
    is_long = current_client.get().num_bytes > LONG_BODY_BYTES
    lock = state.long_body_lock if is_long else contextlib.nullcontext()
    translation = await submit(translate, endpoint, body)
    request = ServedRequest(endpoint, translation)
    try:
        return await _answer(request, handle, request_id, lock)
    except RefusedError:
        if not isinstance(request.refusal, ServedByGenerateError):
            raise
    plain_request = ServedRequest(endpoint, request.fields, is_plain=True)
    return await _answer(plain_request, handle, request_id, lock)


@types.coroutine
def _run_remainder(coroutine: Coroutine[Any, Any, Any], future: Any) -> Generator[Any, Any, Any]:
    """Runs the remainder of a coroutine that waits for `future`, and returns its result."""
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
    """Runs a coroutine of the app in a thread up to its first wait, and returns the remainder.
    Before that wait the app loads the model, validates, renders the chat template and tokenizes,
    while the event loop continues with other answers."""
    loop = asyncio.get_running_loop()

    def begin() -> Awaitable[Any]:
        asyncio._set_running_loop(loop)  # since the app calls `get_running_loop`
        try:
            return _run_remainder(coroutine, coroutine.send(None))
        except StopIteration as end:  # the coroutine has returned without a wait
            finished_future: asyncio.Future[Any] = loop.create_future()
            finished_future.set_result(end.value)
            return finished_future
        finally:
            asyncio._set_running_loop(None)

    return await submit(begin)


async def _answer(
    request: ServedRequest, handle: Callable[..., Any], request_id: str, lock: Any
) -> Any:
    """Makes the app answer each choice separately, and joins the answers. Holds `lock` while the
    answers begin. Raises `RefusedError`, `ClientDisconnected` and the app's errors."""
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse, StreamingResponse

    fields = request.fields
    request_or_none.set(request)

    try:
        remainders = []
        async with lock:
            if current_client.get().is_disconnected:
                raise ClientDisconnected
            for choice in range(fields.num_choices):
                # in order, since the first choice adds the request for all
                current_choice.set(choice)
                coroutine = handle(dict(fields.body), request_id)
                remainders.append(await _begin_in_thread(coroutine))
        answers = await asyncio.gather(*remainders)
    except (RefusedError, ClientDisconnected, HTTPException, utils.CBWorkerDeadError):
        raise
    except Exception as error:
        # libraries for templates, images and audio raise errors of many types for invalid input
        if request.errors_are_internal or is_interrupt(error):
            raise
        raise RefusedError(f"{type(error).__name__}: {error}") from error
    is_stream = isinstance(answers[0], StreamingResponse)
    if is_stream and not request.is_plain:
        await request.first_output_event.wait()
        if request.refusal is not None:
            raise RefusedError(str(request.refusal))
    should_send_logprobs = "return_logprobs" in fields.options
    should_send_usage = is_stream and fields.should_send_usage
    if len(answers) == 1 and not should_send_logprobs and not should_send_usage:
        return answers[0]
    if is_stream:
        streams = [answer.body_iterator for answer in answers]
        events = join_streams(streams, request.logprobs, fields.should_send_usage)
        return StreamingResponse(events, media_type=answers[0].media_type)
    bodies = [json.loads(answer.body) for answer in answers]
    return JSONResponse(join_answers(bodies, request.logprobs))


def _unload(shutdown: Callable[[], None]) -> None:
    """Unloads all models through the app's `shutdown`. Unfreezes objects first, so that the garbage
    collector can free a preloaded model."""
    gc.unfreeze()
    shutdown()


def _load(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Loads a model and its processor through the app's `load`. Raises `RefusedError` if a request
    names a model that does not exist."""
    request = request_or_none.get()
    if request is None:  # the app loads a model when it starts
        return load(*args, **kwargs)
    with request.loading():
        try:
            return load(*args, **kwargs)
        except OSError as error:
            if error.errno is None:  # transformers' error for a model that does not exist
                raise RefusedError(str(error)) from error
            raise


def set_seed(seed: int) -> None:
    """Sets the seed of the current request, which selects a separate random stream in the engine,
    and the seed of torch's generator, which all requests of `generate` share. Raises `ValueError`
    for seeds of more than 64 bits."""
    request = request_or_none.get()
    if request is not None:
        request.seed = seed
    try:
        _set_torch_seed(seed)
    except RuntimeError as error:  # more than 64 bits
        raise ValueError(f"`seed` is {seed}: {error}") from None


_build_server, _set_torch_seed = server.build_server, utils.set_torch_seed


def install() -> None:
    """Makes `transformers serve` run on [`PagedEngine`] in this process. Must be called before the
    server starts; may be called again."""
    server.build_server = build_server
    utils.CBGenerateManager = EngineGenerateManager
    utils.GenerateManager = MediaGenerateManager
    utils.GenerationState = EngineGenerationState
    utils.set_torch_seed = set_seed
