"""`transformers serve` on `PagedEngine`: replacements for its parts, set by `install`. The app stays transformers'."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving import server, utils
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat
from ..batching.engine import PagedEngine
from ..generation.continuous_batching import PagedBatchingManager

logger = logging.getLogger(__name__)

HANDLERS = ("chat_handler", "completion_handler", "response_handler")  # arguments of `build_server` that serve text
HOW_TO_RUN = ("max_new_tokens", "eos_token_id", "use_cache")  # options that the app passes itself, or for its loop

# Of the request that the current asyncio task serves:
_options: ContextVar[Mapping[str, Any]] = ContextVar("options")
_seed: ContextVar[int | None] = ContextVar("seed", default=None)
_refusals: ContextVar[list[str]] = ContextVar("refusals")  # the request's error, if it never ran
_is_read: ContextVar[bool] = ContextVar("is_read")  # whether the body was read: later errors are not the client's


class Refused(Exception):
    """The request's body is invalid, or the request cannot be served; answered with status 400."""


class ServedManager(PagedBatchingManager):
    """A manager whose requests take the options of the task that adds them; the app passes only a few."""

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        name = super().add_request(*args, **{**_options.get(), "seed": _seed.get(), **kwargs})
        _is_read.set(True)
        return name

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        refusals = _refusals.get()

        def told(output: GenerationOutput) -> None:
            if output.error is not None and output.lifespan[0] < 0:  # never started: the request cannot be served
                refusals.append(output.error)
            callback(output)

        super().register_result_handler(request_id, told)


class EngineGenerateManager(utils.CBGenerateManager):
    """Continuous batching of the app. The manager depends on the model only, not on the first request's options."""

    def __init__(self, cb_config: ContinuousBatchingConfig | None = None) -> None:
        super().__init__(cb_config)
        self.manager: ServedManager | None = None
        self._config = cb_config or ContinuousBatchingConfig()

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        if self.manager is not None and self.manager.model is not model:  # the model was unloaded and loaded again
            self.manager.stop(hard_stop=True)
            self.manager = None
        if self.manager is None:
            self.manager = ServedManager(model, model.generation_config, self._config)
            setattr(self, compat.SERVED_MANAGER, self.manager)
            self.manager.start()

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        name = self._begin(processor, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, name, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> Any:
        name = self._begin(processor, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, name)
        except utils.CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise Refused(_refusals.get()[0]) if _refusals.get() else error from None

    def _begin(self, processor: Any, gen_config: GenerationConfig) -> str:
        """Stores the options of this task's request and returns a unique id: two clients may send the same id."""
        assert self.manager is not None  # the app calls `init_cb` before
        self.manager.engine.tokenizer = getattr(processor, "tokenizer", processor)  # for stop strings
        shared = self.manager.generation_config
        _options.set(
            {
                name: value
                for name, value in vars(gen_config).items()
                if name[0] != "_" and name not in HOW_TO_RUN and value not in (None, getattr(shared, name, None))
            }
        )
        _refusals.set([])
        return str(uuid.uuid4())


class PlainGenerateManager(utils.GenerateManager):
    """Serves models with more than text by `generate`. Its errors are not taken for bad requests."""

    def generate_streaming(self, *args: Any, **kwargs: Any) -> Any:
        _is_read.set(True)
        return super().generate_streaming(*args, **kwargs)

    async def generate_non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        _is_read.set(True)
        return await super().generate_non_streaming(*args, **kwargs)


class EngineGenerationState(utils.GenerationState):
    """Sends text to an engine, whether continuous batching was requested or not; `engines` returns the current ones."""

    def __init__(self, continuous_batching: bool = True, **kwargs: Any) -> None:
        super().__init__(continuous_batching=True, **kwargs)
        self._served: dict[str, EngineGenerateManager] = {}

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        manager = super().get_manager(model_id, use_cb)
        if use_cb:
            self._served = {model_id: manager}  # the app has one at a time
        return manager

    def engines(self) -> dict[str, PagedEngine]:
        return {name: each.manager.engine for name, each in self._served.items() if each.manager is not None}


def build_server(*args: Any, generation_state: EngineGenerationState, **kwargs: Any) -> Any:
    """Builds the app; it refuses (400) requests that cannot be read or served, and has /metrics if prometheus_client is
    installed."""
    from fastapi import Response
    from fastapi.responses import JSONResponse

    app = _build_server(*args, generation_state=generation_state, **kwargs)
    given = inspect.signature(_build_server).bind(*args, generation_state=generation_state, **kwargs).arguments
    for handler in (given[name] for name in HANDLERS if name in given):
        handler.handle_request = _reading(handler.handle_request)
    given["model_manager"].load_model_and_processor = _loading(given["model_manager"].load_model_and_processor)

    async def refuse(request: Any, error: Exception) -> JSONResponse:
        logger.warning("refused %s: %s", request.url.path, error)
        logger.debug("it was raised here", exc_info=error)  # debug level: clients may send many bad requests
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)

    app.add_exception_handler(Refused, refuse)
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        from .metrics import EngineCollector
    except ImportError:
        logger.warning('no /metrics: pip install "hf_paged[serve]"')
        return app
    registry = CollectorRegistry()
    registry.register(EngineCollector(generation_state.engines))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _reading(handle: Callable[..., Any]) -> Callable[..., Any]:
    async def handle_request(*args: Any) -> Any:
        _is_read.set(False)
        try:
            return await handle(*args)
        except (KeyError, TypeError, ValueError) as error:  # raised by the app for an invalid body
            if _is_read.get():
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error

    return handle_request


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_model_and_processor(*args: Any, **kwargs: Any) -> Any:
        _is_read.set(True)
        loaded = load(*args, **kwargs)
        _is_read.set(False)  # only the model's name has been read
        return loaded

    return load_model_and_processor


def set_seed(seed: int) -> None:
    """Sets the seed of a request, which then draws independently; under `generate` all requests share one generator.
    Raises `ValueError` for seeds of more than 64 bits."""
    _seed.set(seed)
    try:
        _set_torch_seed(seed)
    except RuntimeError as error:  # more than 64 bits
        raise ValueError(f"`seed` is {seed}: {error}") from None


_build_server, _set_torch_seed = server.build_server, utils.set_torch_seed


def install() -> None:
    """Makes `transformers serve` run on [`PagedEngine`] in this process, if called before it starts. Idempotent."""
    server.build_server = build_server
    utils.CBGenerateManager = EngineGenerateManager
    utils.GenerateManager = PlainGenerateManager
    utils.GenerationState = EngineGenerationState
    utils.set_torch_seed = set_seed
