"""transformers' continuous-batching names on `PagedEngine`: what `generate_batch`, `init_continuous_batching` and
`continuous_batching_context_manager` of a model become after `hf_paged.install(continuous_batching=True)`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat, forks
from ..attention.switch import NAME
from ..batching.arguments import as_config, prompt_ids
from ..batching.decoding.prepare import num_embeddings
from ..batching.engine import PagedEngine
from ..config import PagedConfig
from ..model.forwards import compute_device
from .manager_config import paged_config
from .manager_thread import ManagerThread, Pending, served

logger = logging.getLogger(__name__)


_session_lock = forks.rlock()  # while a kept manager is taken from its model, or put there
_kept: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models on which a manager has been kept


class PagedBatchingManager(ContinuousBatchingManager):
    """
    transformers' `ContinuousBatchingManager` on a [`PagedEngine`] with a thread of its own: one is made by
    `model.init_continuous_batching`.

    A request's tokens are those of `model.generate` on its prompt alone with its options; those that sample without a
    `seed` draw in turn from torch's global generator. A request that cannot be served ends with its error in its
    output. If the thread dies, `fatal_error` is what ended it, all unfinished requests end with it, and methods that
    wait return.

    Args:
        model ([`PreTrainedModel`]): Any that [`PagedEngine`] serves.
        generation_config ([`GenerationConfig`]): For all requests, over the model's own; each may change options.
        continuous_batching_config ([`ContinuousBatchingConfig`]): What is mapped is in `MAPPED`, what is not in `LEFT`.

    Raises:
        ValueError: for a config that cannot be served, and models that only `generate` serves.
    """

    batch_processor = None  # transformers' own loop, of which there is none

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        self.model, self.generation_config = model, generation_config
        self.continuous_batching_config = continuous_batching_config
        config = paged_config(continuous_batching_config, _cache_config(model, generation_config))
        given = continuous_batching_config.max_queue_size, continuous_batching_config.return_logprobs
        self._thread = ManagerThread(model, config, *given)
        self._numbers, self._names = itertools.count(), itertools.count()  # of requests, and of names that are made up
        self.num_return_sequences = generation_config.num_return_sequences or 1  # unless a request says otherwise
        self.warmed_up = False
        weakref.finalize(self, self._thread.is_abandoned.set).atexit = False

    def __reduce__(self) -> Any:
        return type(None), ()  # a model that is copied or saved leaves it out, as it leaves its memory

    @property
    def engine(self) -> PagedEngine:
        return self._thread.engine

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the engine's thread."""
        return self._thread.fatal_error

    @property
    def background_thread_status(self) -> SimpleNamespace:
        """Under transformers' name: `fatal_error`."""
        return SimpleNamespace(fatal_error=self.fatal_error)

    def warmup(self) -> None:
        """Does nothing: steps are recorded when they first come."""
        self.warmed_up = True

    def is_running(self) -> bool:
        return self._thread.is_alive

    def start(self) -> None:
        if self.is_running():
            logger.warning("the manager is running already")
        else:
            with _session_lock:  # it has a session: none of another call
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
        """Takes no more requests and ends the thread: once all are finished, or with `hard_stop` after the step in
        progress, which fails those that are not. It does not end within a pause: other threads' are waited for. Memory
        goes back, unless it is kept for the next session. Raises `RuntimeError` in a thread that pauses the manager."""
        if threading.get_ident() in self._thread.pausing:
            raise RuntimeError("this thread has paused the manager, which then cannot stop: leave `pause` before")
        was_started = self._thread.thread is not None
        self._thread.stop(hard_stop, keep_for_next_session)
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session and was_started:
            with _session_lock:
                other = getattr(self.model, compat.CACHED_MANAGER, None)  # of a session at the same time
                setattr(self.model, compat.CACHED_MANAGER, self)
                _kept.add(self.model)
            if other is not None and other is not self:
                other.destroy()

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Waits for the thread's end, at most `timeout` seconds."""
        if not self._thread.join(timeout):
            logger.warning("the engine's thread did not end in %s s: its requests go on", timeout)

    def destroy(self) -> None:
        self.stop()
        self.engine.free()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No step is taken within this context, in which the model may be changed. Unfinished requests go on after it
        with the keys and values that they have; cached prefixes of other weights are dropped. Steps go on in evaluation
        mode; a model that is set to training here is so again when the manager ends. Raises `RuntimeError` if the
        manager is not running, or ends before."""
        if not self.is_running():
            raise RuntimeError("the manager is not running: there is nothing to pause")
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
        **options: Any,
    ) -> str:
        """
        Queues a request and returns its id. Its outputs come by `get_result`, iteration or a handler; what it cannot
        be served for is the error of the last. With `num_return_sequences` n, n - 1 more have the ids
        `"{request_id}__child#{i}"`.

        Args:
            input_ids (`list[int]`): The prompt.
            streaming (`bool`): An output for each new token, with all so far; log-probabilities come with the last.
            record_timestamps (`bool`): `time.perf_counter()` of every token.
            eos_token_id (`int` or `list[int]`, *optional*): Instead of the configuration's; negative ones are none.
            seed (`int`, *optional*): As in `PagedEngine.add_request`, instead of the configuration's.
            tokenizer (*optional*): Of `stop_strings`, as in `generate`; for later requests as well, until another.
            options: Any of [`GenerationConfig`], of this request.

        Raises:
            ValueError: if an unfinished request has that id.
            RuntimeError: after `stop`, and once the thread has died, from its error.
            queue.Full: if `max_queue_size` requests have waited for 10 seconds.
        """
        name = self._make_name() if request_id is None else request_id
        if seed is None and (first := self.continuous_batching_config.seed) is not None:
            seed = first + next(self._numbers)
        options |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        given = {option: value for option, value in options.items() if value is not None}
        given.setdefault("num_return_sequences", self.num_return_sequences)
        request = Pending(
            _output_names(name, given["num_return_sequences"]),
            input_ids,
            functools.partial(_request_config, self.model, self.generation_config, given),
            seed,
            streaming,
            record_timestamps,
            tokenizer,
        )
        self._thread.add(request)
        return name

    def _make_name(self) -> str:
        return f"req_{next(self._names)}"

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Queues requests, in order, and returns their ids. Arguments and errors are those of `add_request`."""
        given: tuple[Any, ...] = (None, max_new_tokens, streaming, record_timestamps)
        return [self.add_request(input_ids, *given, **options) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request after the step in progress; its last output is `FAILED`, with the tokens so far. Raises
        `ValueError` for a `"...__child#{i}"`: the sequences of a request end together, under the request's own id."""
        self._thread.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, of that request if one is named. `None` after `timeout` seconds, and if none can come any
        more: the manager is not running, having stopped or died (`fatal_error`). Without a timeout, raises `ValueError`
        for an id that was never added, or whose last output has been read."""
        return self._thread.get(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager has stopped."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Outputs of one request as they come, until its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Outputs of a request go to `callback`, run by the event loop that runs now, until its last. The request may
        be added later, to this manager while it runs."""
        with self._thread.changed:
            self._thread.handlers[request_id] = callback, asyncio.get_running_loop()
            waiting = self._thread.outputs.pop(request_id, ())
            self._thread.deliver(waiting)


def _output_names(request_id: str, num_sequences: int) -> list[str]:
    return [*(f"{request_id}__child#{i}" for i in range(num_sequences - 1)), request_id]


def _effective(model: PreTrainedModel, config: GenerationConfig, name: str) -> Any:
    """What `generate` makes of an option that may be left to the model's own configuration."""
    value = getattr(config, name)
    return getattr(model.generation_config, name) if value is None else value


def _request_config(model: PreTrainedModel, config: GenerationConfig, options: dict[str, Any]) -> GenerationConfig:
    """The configuration of one request. Raises `ValueError` for options that `GenerationConfig` does not have."""
    # of one option alone: how many sequences there may be depends on others
    as_config({name: value for name, value in options.items() if name != "num_return_sequences"})
    made = copy.deepcopy(config)
    for name in ("cache_implementation", "cache_config", "compile_config", "continuous_batching_config"):
        if hasattr(made, name):  # how transformers would run it
            setattr(made, name, None)
    for name, value in options.items():
        setattr(made, name, value)
    if not _effective(model, made, "do_sample") and (_effective(model, made, "num_beams") or 1) == 1:
        made.num_return_sequences = 1  # all of greedy search are equal
    else:
        made.num_return_sequences = made.num_return_sequences or 1
    if _effective(model, made, "max_new_tokens") is None and _effective(model, made, "max_length") is None:
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None:
            raise ValueError("no limit is set, and the model's config tells none: pass `max_new_tokens`")
        made.max_length = limit
    return made


# -- what methods of transformers' `ContinuousMixin` become --------------------------------


def _cb_config(config: GenerationConfig, given: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    return given or getattr(config, "continuous_batching_config", None) or ContinuousBatchingConfig()


def _cache_config(model: PreTrainedModel, config: GenerationConfig) -> Any:
    is_ours = _effective(model, config, "cache_implementation") in (None, "paged", NAME)
    return _effective(model, config, "cache_config") if is_ours else None


def _init(
    original: Callable[..., Any],
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> PagedBatchingManager:
    config = model.generation_config if generation_config is None else generation_config
    cb_config = _cb_config(config, continuous_batching_config)
    cached = getattr(model, compat.CACHED_MANAGER, None)
    if isinstance(cached, PagedBatchingManager) and not cached.is_running():
        if continuous_batching_config is None or cb_config == cached.continuous_batching_config:
            cached.generation_config, cached.num_return_sequences = config, config.num_return_sequences or 1
            return cached
        model.destroy_cached_continuous_batching_manager()  # what it was sized by is not what is asked for
    return PagedBatchingManager(model, config, cb_config, workload_hints)


def _destroy_cached(original: Callable[..., Any], model: Any) -> None:
    cached = getattr(model, compat.CACHED_MANAGER, None)
    if cached is not None:
        cached.destroy()
        delattr(model, compat.CACHED_MANAGER)


@contextlib.contextmanager
def _context(
    original: Callable[..., Any],
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
) -> Iterator[PagedBatchingManager]:
    with _session_lock:  # calls in several threads do not begin with one manager
        manager = model.init_continuous_batching(generation_config, continuous_batching_config)
        manager.start()
    is_hard = True
    try:
        yield manager
        is_hard = False
    finally:  # where the caller's code raised, nothing waits for what is left
        manager.stop(block, timeout, persistent_manager, hard_stop=is_hard)


def _generate_batch(
    original: Callable[..., Any],
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
    base = model.generation_config if generation_config is None else generation_config
    given = {name: value for name, value in options.items() if value is not None}
    config = _request_config(model, base, {name: value for name, value in given.items() if name != "tokenizer"})
    # where a stop string ends a row of one call is not told
    is_plain = not (record_timestamps or persistent_manager or _effective(model, config, "stop_strings"))
    if is_plain and _effective(model, config, "do_sample") and (_effective(model, config, "num_beams") or 1) == 1:
        cb_config = _cb_config(base, continuous_batching_config)
        paged = paged_config(cb_config, _cache_config(model, base))
        if _fits_one_call(model, inputs, config, cb_config, paged):
            return _sample_together(model, inputs, config, paged)
    context = model.continuous_batching_context_manager(
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
    )
    outputs: dict[str, GenerationOutput] = {}
    with context as manager:
        added = manager.add_requests(inputs, record_timestamps=record_timestamps, **given)
        num_sequences = given.get("num_return_sequences", manager.num_return_sequences)
        names = [name for each in added for name in _output_names(each, num_sequences)]
        # no bar where none is shown: one takes a lock, which a child process may find held
        for name in tqdm(names, unit="request") if progress_bar else names:
            output = manager.get_result(name)
            if output is None:
                raise RuntimeError(f"the manager ended before request {name!r}") from manager.fatal_error
            outputs[name] = output
        if manager.fatal_error is not None:
            raise RuntimeError("the engine's thread died") from manager.fatal_error
    if failed := [name for name, output in outputs.items() if output.error is not None]:
        logger.error("requests %s ended with an error: %s", failed, outputs[failed[0]].error)
    return outputs


def _fits_one_call(
    model: PreTrainedModel,
    inputs: Sequence[Any],
    config: GenerationConfig,
    cb_config: ContinuousBatchingConfig,
    paged: PagedConfig,
) -> bool:
    """Whether these prompts can be the rows of one `generate` call, that gives all that is asked for."""
    if cb_config.return_logprobs or cb_config.seed is not None or model.config.is_encoder_decoder:
        return False
    num_rows = len(inputs) * (config.num_return_sequences or 1)
    if num_rows > paged.max_num_seqs or _effective(model, config, "max_new_tokens") is None:
        return False
    try:  # else those that can be served are, and the others have their errors
        prompts, size = [prompt_ids(prompt, None) for prompt in inputs], num_embeddings(model)
    except ValueError:
        return False
    return all(prompt and min(prompt) >= 0 and max(prompt) < size for prompt in prompts)


def _sample_together(
    model: PreTrainedModel, inputs: Sequence[Any], config: GenerationConfig, paged: PagedConfig
) -> dict[str, GenerationOutput]:
    """As rows of one `generate` call, which draw from one stream of random numbers: a seed gives plain's tokens."""
    created, device = time.perf_counter(), compute_device(model)
    prompts = [prompt_ids(prompt, None) for prompt in inputs]
    pad, width = _effective(model, config, "pad_token_id") or 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config.cache_implementation, config.cache_config = NAME, paged.to_dict()
    with served(model):
        rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    ended, num_sequences = time.perf_counter(), config.num_return_sequences or 1
    eos = _effective(model, config, "eos_token_id")
    ends = set(eos) if isinstance(eos, (list, tuple)) else {eos}
    outputs: dict[str, GenerationOutput] = {}
    for place, prompt in enumerate(prompts):
        for name in _output_names(f"req_{place}", num_sequences):
            tokens = rows[len(outputs)]
            length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            outputs[name] = GenerationOutput(
                name,
                prompt,
                tokens[:length],
                status=RequestStatus.FINISHED,
                created_time=created,
                lifespan=(created, ended),
            )
    return outputs


def destroy_kept() -> None:
    """Managers that models keep for a next session, which transformers' own names would take for theirs."""
    for model in list(_kept):
        cached = getattr(model, compat.CACHED_MANAGER, None)
        if isinstance(cached, PagedBatchingManager):
            delattr(model, compat.CACHED_MANAGER)
            cached.destroy()
    _kept.clear()


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": _init,
    "destroy_cached_continuous_batching_manager": _destroy_cached,
    "continuous_batching_context_manager": _context,
    "generate_batch": _generate_batch,
}
"""By the name of the method of `ContinuousMixin`."""
