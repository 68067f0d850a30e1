"""transformers' continuous-batching API on `PagedEngine`: the manager, and the functions
(`replacements`) that replace `generate_batch`, `init_continuous_batching` and related methods of
models after `hf_paged.install(continuous_batching=True)`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat, forks
from ..attention.switch import NAME
from ..batching.engine import PagedEngine
from ..batching.results import RequestResult
from ..interrupts import guarded, restoring
from ..model.wrappers import adapters_room_for, unwrap_model
from ..topics import Topic
from ..weak_sets import members_of
from .manager_config import make_paged_config, make_request_config
from .manager_thread import ManagerThread
from .one_call import EffectiveOptions, sample_together
from .pending import PendingRequest, make_output_ids

logger = logging.getLogger(__name__)


_session_lock = forks.rlock()  # guards `compat.CACHED_MANAGER` of models
_models_with_kept_managers: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class PagedBatchingManager(ContinuousBatchingManager):
    """
    transformers' `ContinuousBatchingManager` on a [`PagedEngine`] that runs in a separate thread;
    `model.init_continuous_batching` returns such a manager.

    A request gets the same tokens as `model.generate` with this prompt alone and the same options;
    requests that sample without a `seed` draw from torch's global generator in turn. A request that
    cannot be served ends with the error in its output. A step that raises is logged and repeated;
    if it raises again, its requests end with that error, and other requests continue. If the thread
    still dies, for instance from `SystemExit`, `fatal_error` holds the error, all unfinished
    requests end with it, and waiting methods return.

    Args:
        model ([`PreTrainedModel`]): Any model that [`PagedEngine`] serves.
        generation_config ([`GenerationConfig`]): The default options of requests. They override the
            model's options, and each request may override them.
        continuous_batching_config ([`ContinuousBatchingConfig`]): `manager_config.MAPPED_FIELDS`
            lists the fields that have an effect, `IGNORED_FIELDS` the others.
        workload_hints: Ignored.

    Raises:
        ValueError: for a config that cannot be served, and for models that only `generate` serves.
    """

    batch_processor = None  # transformers' loop, which this class does not use

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        self.model = model
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        cache_config = _find_cache_config(model, generation_config)
        self.paged_config = make_paged_config(continuous_batching_config, cache_config)
        max_queue_size = continuous_batching_config.max_queue_size
        self._thread = ManagerThread(model, self.paged_config, max_queue_size)
        self._seed_offsets = itertools.count()  # of requests without a `seed`
        self._default_ids = itertools.count()  # of requests without a `request_id`
        self.warmed_up = False
        weakref.finalize(self, self._thread.is_abandoned.set).atexit = False

    def __reduce__(self) -> Any:
        # copies and pickles of a model hold `None` instead of its manager
        return type(None), ()

    @property
    def num_return_sequences(self) -> int:
        """The default number of sequences of a request."""
        return self.generation_config.num_return_sequences or 1

    @property
    def engine(self) -> PagedEngine:
        return self._thread.engine

    @property
    def fatal_error(self) -> BaseException | None:
        """The error that ended the engine's thread; `None` if no error did."""
        return self._thread.fatal_error

    @property
    def background_thread_status(self) -> Any:
        """The object whose `fatal_error` transformers' callers read."""
        return self._thread

    def warmup(self) -> None:
        """Sets `warmed_up` and does nothing else: the engine captures each graph when it first
        needs it."""
        self.warmed_up = True

    def is_running(self) -> bool:
        return self._thread.is_alive

    def start(self) -> None:
        """Starts the engine's thread; if it is running, logs a warning. Raises `RuntimeError` if
        the system allows no more threads."""
        if self.is_running():
            logger.warning(
                Topic.CONTINUOUS_BATCHING("the manager is already running, so `start` does nothing")
            )
        else:
            with _session_lock:  # `init_continuous_batching` must not return a running manager
                if getattr(self.model, compat.CACHED_MANAGER, None) is self:
                    delattr(self.model, compat.CACHED_MANAGER)
                self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Refuses further requests at once. The thread ends when all requests are finished or, with
        `hard_stop`, after the step in progress, but not during a pause. It then fails unfinished
        requests and frees the memory. With `keep_for_next_session`, it frees only the requests, and
        the model keeps the manager, if it was started, for the next session. With `block`, waits
        for the thread's end, at most `timeout` seconds. Raises `RuntimeError` in a thread that has
        paused the manager."""
        if threading.get_ident() in self._thread.pauses.values():
            raise RuntimeError(
                "this thread has paused the manager, which cannot stop before the pause ends: leave"
                " the `pause` context first"
            )
        was_started = self._thread.thread is not None
        self._thread.stop(hard_stop, keep_for_next_session)
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session and was_started:
            with _session_lock:
                # a concurrent session may have kept its manager
                former_manager = getattr(self.model, compat.CACHED_MANAGER, None)
                setattr(self.model, compat.CACHED_MANAGER, self)
                _models_with_kept_managers.add(self.model)
            if former_manager is not None and former_manager is not self:
                former_manager.destroy()

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Waits for the thread's end, at most `timeout` seconds; logs a warning if it has not ended
        then. Ignores `stop_trigger_time`, an argument of transformers' method."""
        if not self._thread.join(timeout):
            message = "the engine's thread did not end within %s s, and its requests continue"
            logger.warning(Topic.CONTINUOUS_BATCHING(message), timeout)

    def destroy(self) -> None:
        """Stops the manager once all requests are finished, and frees its memory."""
        self.stop()
        self.engine.free()

    @restoring
    def pause(self) -> Iterator[None]:
        """A context in which no step runs, so that the caller may change the model. Afterwards
        unfinished requests continue with the keys and values that they have, and cached prefixes
        that other weights computed are dropped. Steps run in evaluation mode; if the caller sets
        training mode within the context, the manager restores that mode when its thread ends.
        Raises `RuntimeError` if the manager is not running, or if its thread ends before the pause
        begins."""
        if not self.is_running():
            raise RuntimeError("the manager is not running, so it cannot pause: call `start` first")
        with self._thread.paused():
            yield

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        seed: int | None = None,
        tokenizer: Any = None,
        request_options: Mapping[str, Any] | None = None,
        on_result: Callable[[RequestResult], None] | None = None,
        **options: Any,
    ) -> str:
        """Queues a request and returns its id. `get_result`, iteration or a handler delivers its
        outputs; if the request cannot be served, its last output holds the error. With
        `num_return_sequences` n, the last sequence has the request's id, and the other n - 1 have
        the ids `"{request_id}__child#{i}"`.

        Args:
            input_ids (`list[int]`): The prompt.
            request_id (`str`, *optional*): The id, by default `"req_{number}"`.
            max_new_tokens (`int`, *optional*): The maximum number of tokens to generate.
            streaming (`bool`): Whether to deliver an output after each new token, with all tokens
                so far; log-probabilities come with the last output.
            record_timestamps (`bool`): Whether to record the `time.perf_counter()` of each token.
            eos_token_id (`int` or `list[int]`, *optional*): Replaces the configuration's. A
                negative id never ends a sequence.
            seed (`int`, *optional*): As in `PagedEngine.add_request`. The i-th request without a
                `seed` gets the `seed` of the manager's config plus i, if the config has one.
            tokenizer (*optional*): For `stop_strings`, as in `generate`. Also serves later requests
                that pass none.
            request_options (`dict`, *optional*): Further arguments of `PagedEngine.add_request`:
                `inputs`, `schema`, `cache_salt`, `top_logprobs`, ...
            on_result (callable, *optional*): Called in the engine's thread with the engine's
                [`RequestResult`] when the request has ended, before its last outputs are delivered.
            options: Options of [`GenerationConfig`] for this request.

        Raises:
            ValueError: if an unfinished request has that id.
            RuntimeError: after `stop`, or once the thread has died (chained to the thread's error).
            queue.Full: if the queue stays full (`max_queue_size` requests) for 10 seconds.
        """
        if request_id is None:
            request_id = f"req_{next(self._default_ids)}"
        cb_config = self.continuous_batching_config
        if seed is None and cb_config.seed is not None:
            seed = cb_config.seed + next(self._seed_offsets)
        options |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options = {option: value for option, value in options.items() if value is not None}
        num_sequences = options.setdefault("num_return_sequences", self.num_return_sequences)
        make_config = functools.partial(
            make_request_config, self.model, self.generation_config, options
        )
        request = PendingRequest(
            output_ids=make_output_ids(request_id, num_sequences),
            prompt=input_ids,
            make_config=make_config,
            seed=seed,
            is_streaming=streaming,
            has_timestamps=record_timestamps,
            tokenizer=tokenizer,
            options={"return_logprobs": cb_config.return_logprobs, **(request_options or {})},
            on_result=on_result,
        )
        self._thread.add(request)
        return request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Queues requests in order and returns their ids. Takes the arguments of `add_request`,
        except `request_id`, and raises its errors; requests queued before an error stay queued."""
        return [
            self.add_request(
                input_ids,
                None,
                max_new_tokens,
                streaming,
                record_timestamps,
                **options,
            )
            for input_ids in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request after the step in progress; its last output is `FAILED` and has the tokens
        so far. Raises `ValueError` for the id of a further sequence (`"...__child#{i}"`): the
        sequences of a request can only be cancelled together, by the request's id."""
        self._thread.cancel(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Waits for the next output (of `request_id`, if given) and returns it. Returns `None`
        after `timeout` seconds, or if the manager is not running and no such output is unread.
        Without a timeout, also returns `None` if another reader or a handler gets the request's
        last output, and raises `ValueError` if a running manager has neither an unfinished request
        nor an unread output with this id."""
        return self._thread.get(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yields outputs as they come, until the manager is no longer running."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Yields the outputs of one request as they come, until its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        """Makes the running event loop call `callback` with each output of a request, including
        unread ones. The request may also be added later, but before the manager stops. Raises
        `RuntimeError` if no event loop is running in this thread."""
        with self._thread.lock:
            self._thread.handlers[request_id] = callback, asyncio.get_running_loop()
            for output in self._thread.outputs.pop(request_id, ()):
                self._thread.deliver(output)


# Replacements of methods of transformers' `ContinuousMixin`


def _choose_cb_config(
    config: GenerationConfig, argument: ContinuousBatchingConfig | None
) -> ContinuousBatchingConfig:
    from_config = getattr(config, "continuous_batching_config", None)
    return argument or from_config or ContinuousBatchingConfig()


def _find_cache_config(model: PreTrainedModel, config: GenerationConfig) -> Any:
    """Returns the `cache_config` of a generation config or, if that sets none, of the model's.
    Returns `None` if neither sets one, or if they select another cache implementation."""
    effective = EffectiveOptions(model, config)
    if effective.cache_implementation not in (None, "paged", NAME):
        return None
    return effective.cache_config


def _init_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> PagedBatchingManager:
    config = generation_config or model.generation_config
    cb_config = _choose_cb_config(config, continuous_batching_config)
    cached_manager = getattr(model, compat.CACHED_MANAGER, None)
    if isinstance(cached_manager, PagedBatchingManager) and not cached_manager.is_running():
        if continuous_batching_config is None:
            cb_config = cached_manager.continuous_batching_config
        paged_config, cache_config = cached_manager.paged_config, _find_cache_config(model, config)
        if cache_config is not None:
            paged_config = make_paged_config(cb_config, cache_config)
        is_same_engine = paged_config == cached_manager.paged_config
        if is_same_engine and cb_config == cached_manager.continuous_batching_config:
            cached_manager.generation_config = config
            return cached_manager
        model.destroy_cached_continuous_batching_manager()  # it has another config
    return PagedBatchingManager(model, config, cb_config, workload_hints)


def _destroy_cached_manager(model: Any) -> None:
    cached_manager = getattr(model, compat.CACHED_MANAGER, None)
    if cached_manager is not None:
        delattr(model, compat.CACHED_MANAGER)
        cached_manager.destroy()


@restoring
def _manager_context(
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
) -> Iterator[PagedBatchingManager]:
    manager: PagedBatchingManager | None = None
    has_raised = True
    try:
        with _session_lock:  # concurrent calls must not get the same kept manager
            manager = model.init_continuous_batching(generation_config, continuous_batching_config)
            manager.start()
        yield manager
        has_raised = False
    finally:
        if manager is not None:
            # an error in the caller's code ends unfinished requests
            manager.stop(block, timeout, persistent_manager, hard_stop=has_raised)


@guarded
def _generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **options: Any,
) -> dict[str, GenerationOutput]:
    if not len(inputs):
        return {}
    # raises for active adapters that need more than PEFT's layers in the model
    adapters_package = adapters_room_for(unwrap_model(model))
    if adapters_package is not None:
        adapters_package.check_served(unwrap_model(model), None)
    default_config = generation_config or model.generation_config
    options = {name: value for name, value in options.items() if value is not None}
    generation_options = {name: value for name, value in options.items() if name != "tokenizer"}
    config = make_request_config(model, default_config, generation_options)
    effective = EffectiveOptions(model, config)
    # a `generate` call does not report where a stop string ended a row
    needs_requests = record_timestamps or persistent_manager or effective.stop_strings
    if not needs_requests and (effective.num_beams or 1) == 1 and effective.do_sample:
        cb_config = _choose_cb_config(default_config, continuous_batching_config)
        paged_config = make_paged_config(cb_config, _find_cache_config(model, default_config))
        sampled_outputs = sample_together(model, inputs, config, cb_config, paged_config)
        if sampled_outputs is not None:
            return sampled_outputs
    context = model.continuous_batching_context_manager(
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
    )
    outputs: dict[str, GenerationOutput] = {}
    with context as manager:
        request_ids = manager.add_requests(inputs, record_timestamps=record_timestamps, **options)
        num_sequences = options.get("num_return_sequences", manager.num_return_sequences)
        output_ids: Iterable[str] = [
            output_id
            for request_id in request_ids
            for output_id in make_output_ids(request_id, num_sequences)
        ]
        # only on request, since tqdm takes a lock, which a fork may leave locked in a child
        if progress_bar:
            output_ids = tqdm(output_ids, unit="request")
        for output_id in output_ids:
            output = manager.get_result(output_id)
            if output is None:
                raise RuntimeError(
                    f"the manager ended before it finished request {output_id!r}"
                ) from manager.fatal_error
            outputs[output_id] = output
        if manager.fatal_error is not None:
            raise RuntimeError("the engine's thread died") from manager.fatal_error
    errors = [output.error for output in outputs.values() if output.error is not None]
    if errors:
        message = "%d of %d sequences failed, and their outputs hold the errors; the first is: %s"
        logger.error(Topic.FAILED_REQUESTS(message), len(errors), len(outputs), errors[0])
    return outputs


def destroy_kept_managers() -> None:
    """Destroys the managers that models keep for the next session, which transformers' own methods
    would otherwise use after an uninstall."""
    for model in members_of(_models_with_kept_managers):
        if isinstance(getattr(model, compat.CACHED_MANAGER, None), PagedBatchingManager):
            _destroy_cached_manager(model)
    _models_with_kept_managers.clear()


replacements: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": _init_manager,
    "destroy_cached_continuous_batching_manager": _destroy_cached_manager,
    "continuous_batching_context_manager": _manager_context,
    "generate_batch": _generate_batch,
}
"""The replacements of methods of `ContinuousMixin`, by the method's name."""


def _make_wrapper_method(name: str) -> Callable[..., Any]:
    def method(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(unwrap_model(wrapper), name)(*args, **kwargs)

    method.__name__ = name
    return method


wrapper_methods = {
    name: _make_wrapper_method(name)
    for name in (
        "init_continuous_batching",
        "continuous_batching_context_manager",
        "generate_batch",
    )
}
"""Methods for PEFT's wrappers of models, by name. They call the wrapped model's method, and raise
`ValueError` for adapters that only the wrapper's own `generate` computes."""
