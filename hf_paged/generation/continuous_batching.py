"""transformers' continuous-batching names on `PagedEngine`: what `generate_batch`, `init_continuous_batching` and
`continuous_batching_context_manager` of a model become after `hf_paged.install(continuous_batching=True)`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from .. import compat, forks
from ..batching.arguments import as_config, prompt_ids
from ..batching.engine import PagedEngine
from ..batching.results import RequestOutput, RequestResult
from ..config import PagedConfig
from ..model.forwards import compute_device

logger = logging.getLogger(__name__)

QUEUE_SECONDS = 10.0  # that `add_request` waits for room in a full queue, as transformers does
POLL_SECONDS = 0.25  # after which the engine's thread looks whether its manager is gone
OWN_ATTENTION = "paged|"  # begins the names of attention functions that only transformers' own loop can call

MAPPED: dict[str, str] = {
    "page_size": "`block_size`, if it is not the default or `num_blocks` is given",
    "block_size": "`block_size`; the name before transformers 5.18, and deprecated since",
    "num_blocks": "`num_blocks`",
    "max_batch_tokens": "`max_num_batched_tokens`",
    "max_memory_percent": "`memory_fraction`",
    "max_requests_per_batch": "`max_num_seqs`",
    "allow_block_sharing": "`prefix_caching`",
    "use_cuda_graph": "`capture`: off if it is False for both paths",
    "scheduler_type": '"fifo"; "prefill_first" lifts the limit of prompts beside decodes (`max_chunk_tokens`)',
    "return_logprobs": "`return_logprobs` of every request",
    "seed": "request number i draws as `generate` does after `torch.manual_seed(seed + i)`",
    "cpu_offload_space": '`preemption="swap"` unless it is 0; memory is taken when requests are preempted',
    "max_queue_size": "requests that may wait for the engine's thread",
}
"""Fields of `ContinuousBatchingConfig` that have a meaning here, and which."""

LEFT: dict[str, str] = {
    "max_blocks_per_request": "sizes a block table of a flash kernel; here tables grow",
    "use_async_batching": "the engine prepares the next step ahead by itself where that can be done",
    "q_padding_interval_size": "pads the inputs of CUDA graphs; the engine chooses its own sizes",
    "kv_padding_interval_size": "pads the inputs of CUDA graphs; the engine reads block tables",
    "varlen_compile_config": "compiles transformers' own forward; tokens do not depend on it",
    "decode_compile_config": "compiles transformers' own forward; tokens do not depend on it",
    "default_compile_level": "compiles transformers' own forward; tokens do not depend on it",
    "use_default_compile_configs": "deprecated name of `default_compile_level`",
    "safety_margin": "blocks that transformers' scheduler keeps free; here requests that need blocks preempt others",
    "auto_switch_to_flash": "no attention implementation is switched but to ours, which is put back",
    "cpu_offload_space_safety_threshold": "bounds a buffer that is not allocated here",
    "per_request_processors": "every request takes its own options always",
    "drop_unsupported_processors": "no processor is dropped: all work as in `generate`",
    "disable_nccl_graph_mixing": "of tensor parallelism, which is not served here",
    "cpu_group_timeout": "of tensor parallelism, which is not served here",
    "max_cached_graphs": "deprecated, without a use in transformers",
}
"""Fields that tune transformers' own implementation and change no token, and why they may be left."""

_defaults: list[PagedConfig] = [PagedConfig()]  # what `install` was given


def set_default(config: PagedConfig) -> None:
    """The `PagedConfig` of managers, under what a model's `cache_config` and a `ContinuousBatchingConfig` say."""
    _defaults[:] = [config]


def paged_config(
    cb_config: ContinuousBatchingConfig, cache_config: PagedConfig | dict[str, Any] | None = None
) -> PagedConfig:
    """What the fields of a `ContinuousBatchingConfig` that are not at their defaults mean here, over `cache_config`.
    Raises `ValueError` for what has no meaning here and would change results, and for fields that are not known."""
    given = _given(cb_config)
    unknown = sorted(set(given) - set(MAPPED) - set(LEFT))
    if unknown:
        raise ValueError(f"hf_paged does not know what {unknown} of `ContinuousBatchingConfig` ask for: leave them out")
    scheduler = given.get("scheduler_type", "fifo")
    if scheduler not in ("fifo", "prefill_first"):
        raise ValueError(f"`scheduler_type` is {scheduler!r}: it must be 'fifo' or 'prefill_first'")
    base = (_defaults[0] if cache_config is None else PagedConfig.coerce(cache_config)).to_dict()
    names = {
        "num_blocks": "num_blocks",
        "max_batch_tokens": "max_num_batched_tokens",
        "max_memory_percent": "memory_fraction",
        "max_requests_per_batch": "max_num_seqs",
        "allow_block_sharing": "prefix_caching",
    }
    base |= {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    size = getattr(cb_config, "page_size", None) or getattr(cb_config, "block_size", None)
    if {"page_size", "block_size", "num_blocks"} & set(given):  # a number of blocks counts those of their size
        base["block_size"] = size
    if "use_cuda_graph" in given:
        base["capture"] = any(cb_config.cuda_graph_booleans)
    if "cpu_offload_space" in given:
        base["preemption"] = "recompute" if given["cpu_offload_space"] == 0 else "swap"
    if scheduler == "prefill_first":
        base["max_chunk_tokens"] = base["max_num_batched_tokens"]
    try:
        return PagedConfig(**base)
    except ValueError as error:
        raise ValueError(f"the `ContinuousBatchingConfig` cannot be served: {error}") from None


def _given(cb_config: ContinuousBatchingConfig) -> dict[str, Any]:
    """Fields that are not at their defaults."""
    defaults = {f.name: f.default if f.default is not MISSING else None for f in fields(cb_config)}
    values = {name: getattr(cb_config, name) for name in defaults}
    return {name: value for name, value in values.items() if value != defaults[name]}


@dataclass(eq=False)
class _Pending:
    """An unfinished request of a manager; `names` are those of its outputs, the engine's one is `names[-1]`."""

    names: list[str]
    prompt: Any
    make_config: Callable[[], GenerationConfig]  # run in the engine's thread: what it raises is this request's error
    seed: int | None
    is_streaming: bool
    records_times: bool
    created: float = field(default_factory=time.perf_counter)
    started: float = -1.0
    tokens: dict[int, list[int]] = field(default_factory=dict)  # so far, by row of the engine's request
    times: dict[int, list[float]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> list[GenerationOutput]:
        """What a step brought."""
        now = time.perf_counter()
        self.started = now if self.started < 0 else self.started
        for row, token in output.new_tokens.items():
            self.tokens.setdefault(row, []).append(token)
            self.times.setdefault(row, []).append(now)
        if output.result is not None:
            return self.end(output.result)
        rows = range(len(self.names)) if self.is_streaming else ()
        return [self._output(row, RequestStatus.DECODING) for row in rows if self._row(row) in output.new_tokens]

    def end(self, result: RequestResult) -> list[GenerationOutput]:
        now, error = time.perf_counter(), result.error
        if error is None and result.finish_reason == "cancelled":
            error = RuntimeError("the request was cancelled")
        if result.timings.queued is not None:
            self.started = self.created + result.timings.queued
        status, outputs = RequestStatus.FINISHED if error is None else RequestStatus.FAILED, []
        for row in range(len(self.names)):
            output = self._output(row, status)
            output.error, output.lifespan = None if error is None else str(error), (self.started, now)
            if result.sequences:
                sequence = result.sequences[min(row, len(result.sequences) - 1)]
                output.generated_tokens = list(sequence.token_ids)  # of beams, these are settled only now
                output.logprobs = [processed for _, processed in sequence.logprobs or ()]
            outputs.append(output)
        return outputs

    def _row(self, row: int) -> int:
        """Of the engine's request, which has one where all would be equal (greedy search)."""
        return row if row in self.tokens else 0

    def _output(self, row: int, status: RequestStatus) -> GenerationOutput:
        return GenerationOutput(
            self.names[row],
            prompt_ids=_listed(self.prompt),
            generated_tokens=list(self.tokens.get(self._row(row), ())),
            status=status,
            created_time=self.created,
            lifespan=(self.started, -1),
            timestamps=list(self.times.get(self._row(row), ())) if self.records_times else None,
        )


def _listed(prompt: Any) -> list[int]:
    try:
        return prompt_ids(prompt, None)
    except Exception:  # of what is no prompt, whose error tells so
        return []


class _Worker:
    """The engine's thread, and what it shares with callers. It does not hold the manager, which can be collected."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, max_queue_size: int, return_logprobs: bool) -> None:
        self.engine = PagedEngine(model, config)
        self.max_queue_size, self.return_logprobs = max_queue_size, return_logprobs
        self.lock = forks.rlock()
        self.changed = threading.Condition(self.lock)  # of all below
        self.thread: threading.Thread | None = None
        self.fatal_error: BaseException | None = None  # what ended the thread
        self.pending: dict[str, _Pending] = {}  # unfinished requests, by their engine's id
        self.inbox: deque[_Pending] = deque()  # those that the engine has not got yet
        self.cancelled: deque[str] = deque()
        self.outputs: OrderedDict[str, deque[GenerationOutput]] = OrderedDict()  # that nothing has read yet
        self.handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self.is_flushing = self.is_stopping = self.keeps_memory = False
        self.pausing: list[int] = []  # threads
        self.is_paused = False
        forks.in_child(self)

    # -- in callers' threads --------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self) -> None:
        with self.changed:
            self.is_flushing = self.is_stopping = self.is_paused = False
            self.fatal_error = None
            self.thread = threading.Thread(target=self._run, name="hf_paged-continuous-batching", daemon=True)
            self.thread.start()
            _running.add(self)

    def stop(self, is_hard: bool, keeps_memory: bool = False) -> None:
        with self.changed:
            self.is_flushing, self.keeps_memory = True, keeps_memory
            self.is_stopping |= is_hard
            self.changed.notify_all()

    def abandon(self) -> None:
        """The manager is gone. A finalizer, in any thread at any moment: it waits for no lock."""
        self.is_flushing = self.is_stopping = True  # the thread looks every `POLL_SECONDS`

    def join(self, timeout: float | None = None) -> bool:
        """Whether the thread has ended."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return not self.is_alive

    def add(self, request: _Pending) -> None:
        def has_room() -> bool:
            return self.is_flushing or not self.max_queue_size or len(self.inbox) < self.max_queue_size

        with self.changed:
            if not self.changed.wait_for(has_room, QUEUE_SECONDS):
                raise queue.Full(f"{len(self.inbox)} requests wait, as many as `max_queue_size` allows: raise it")
            if self.is_flushing:
                why = "it was stopped" if self.fatal_error is None else f"its thread died: {self.fatal_error!r}"
                raise RuntimeError(f"the manager takes no more requests: {why}") from self.fatal_error
            if request.names[-1] in self.pending:
                raise ValueError(f"request id {request.names[-1]!r} is in use by an unfinished request: choose another")
            self.pending[request.names[-1]] = request
            self.inbox.append(request)
            self.changed.notify_all()

    def cancel(self, name: str) -> None:
        with self.changed:
            self.cancelled.append(name)
            self.changed.notify_all()

    def get(self, name: str | None, timeout: float | None) -> GenerationOutput | None:
        """The next output, of a request if `name` is given; `None` after the timeout and once none can come."""
        with self.changed:
            here = (lambda: self.outputs) if name is None else (lambda: name in self.outputs)
            self.changed.wait_for(lambda: here() or not self.is_alive, timeout)
            if not here():
                return None
            found = next(iter(self.outputs)) if name is None else name
            output = self.outputs[found].popleft()
            if not self.outputs[found]:
                del self.outputs[found]
            return output

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        with self.changed:
            for output in outputs:
                callback, loop = self.handlers.get(output.request_id, (None, None))
                if callback is None or loop is None:
                    self.outputs.setdefault(output.request_id, deque()).append(output)
                    continue
                if output.is_finished():
                    del self.handlers[output.request_id]
                try:
                    loop.call_soon_threadsafe(callback, output)
                except RuntimeError:  # the loop is closed, nothing waits for the request
                    self.handlers.pop(output.request_id, None)
                    self.cancelled.append(output.request_id)
            self.changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        me = threading.get_ident()
        with self.changed:
            self.pausing.append(me)
        try:
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.is_paused or self.is_stopping or not self.is_alive)
                if not self.is_paused:
                    raise RuntimeError("the engine's thread ended before it could pause") from self.fatal_error
            yield
        finally:
            with self.changed:
                self.pausing.remove(me)
                self.changed.notify_all()

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process, which has neither the thread nor its requests."""
        self.changed = threading.Condition(self.lock)
        for each in (self.pending, self.inbox, self.cancelled, self.outputs, self.handlers, self.pausing):
            each.clear()
        self.engine, self.thread = PagedEngine(self.engine.model, self.engine.config), None

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with _served(self.engine.model), torch.no_grad():
                while self._take_requests():
                    outputs = [(self.pending.get(each.request_id), each) for each in self.engine.step()]
                    self._tell([new for pending, each in outputs if pending is not None for new in pending.add(each)])
        except BaseException as caught:
            error = caught
            logger.error("the engine's thread died", exc_info=caught)
        finally:
            self._end(error)

    def _take_requests(self) -> bool:
        """Waits until there is something to do, and gives new requests to the engine. False: the end has come."""
        with self.changed:
            while not self.is_stopping:
                self.is_paused = bool(self.pausing)
                if self.is_paused:
                    self.changed.notify_all()
                elif self.inbox or self.cancelled or self.engine.has_unfinished:
                    break
                elif self.is_flushing:
                    return False
                self.changed.wait(POLL_SECONDS)
            self.is_paused = False
            if self.is_stopping:
                return False
            requests, cancelled = list(self.inbox), list(self.cancelled)
            self.inbox.clear()
            self.cancelled.clear()
            self.changed.notify_all()  # there is room
        for request in requests:
            try:
                self.engine.add_request(
                    request.prompt,
                    request.make_config(),
                    request_id=request.names[-1],
                    seed=request.seed,
                    return_logprobs=self.return_logprobs,
                )
            except Exception as error:
                self._fail(request, error)
        for name in cancelled:
            with contextlib.suppress(ValueError):  # it has ended
                self.engine.cancel(name)
        return True

    def _fail(self, request: _Pending, error: Exception) -> None:
        self._tell(request.end(RequestResult(request.names[-1], [], error=error)))

    def _tell(self, outputs: list[GenerationOutput]) -> None:
        if outputs:
            with self.changed:
                for output in outputs:
                    if output.is_finished():
                        self.pending.pop(output.request_id, None)
                self.deliver(outputs)

    def _end(self, error: BaseException | None) -> None:
        with self.changed:
            self.is_flushing = self.is_stopping = True
            self.fatal_error = error
            self.inbox.clear()
            self.cancelled.clear()
            why = error if isinstance(error, Exception) else RuntimeError("the manager was stopped before its end")
            for request in list(self.pending.values()):
                with contextlib.suppress(ValueError):
                    self.engine.cancel(request.names[-1])
                self._fail(request, why)
        try:
            if error is None and self.keeps_memory:
                while self.engine.has_unfinished:  # what is cancelled, which is told to nothing
                    self.engine.step()
            else:
                self.engine.free()
        finally:
            with self.changed:
                self.is_paused, self.thread = False, None
                self.changed.notify_all()


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before the interpreter ends: a thread in the middle of a forward may not outlive it."""
    for worker in list(_running):
        if worker.is_alive:
            worker.stop(is_hard=True)
            worker.join()


@contextlib.contextmanager
def _served(model: PreTrainedModel) -> Iterator[None]:
    """As transformers' continuous batching runs it: in evaluation mode. Its own attention implementations, which only
    it can call, are replaced by what they are made of. Both are put back."""
    training = [module for module in model.modules() if module.training]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    named = [
        (config, compat.attention_of(config)) for config in configs.values() if isinstance(config, PreTrainedConfig)
    ]
    named = [(config, name) for config, name in named if isinstance(name, str) and name.startswith(OWN_ATTENTION)]
    device = compute_device(model)
    try:
        model.eval()
        for config, name in named:
            compat.set_attention(config, name.removeprefix(OWN_ATTENTION))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():  # a thread's own
            yield
    finally:
        for module in training:
            module.training = True
        for config, name in named:
            compat.set_attention(config, name)


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
        cache_config = generation_config.cache_config or model.generation_config.cache_config
        config = paged_config(continuous_batching_config, cache_config)
        given = continuous_batching_config.max_queue_size, continuous_batching_config.return_logprobs
        self._worker = _Worker(model, config, *given)
        self._numbers, self._names = itertools.count(), itertools.count()  # of requests, and of names that are made up
        self._lock = forks.lock()
        self.warmed_up = False
        weakref.finalize(self, self._worker.abandon).atexit = False

    def __reduce__(self) -> Any:
        return type(None), ()  # a model that is copied or saved leaves it out, as it leaves its memory

    @property
    def engine(self) -> PagedEngine:
        return self._worker.engine

    @property
    def num_return_sequences(self) -> int:
        return self.generation_config.num_return_sequences or 1

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the engine's thread."""
        return self._worker.fatal_error

    @property
    def background_thread_status(self) -> SimpleNamespace:
        """Under transformers' name: `fatal_error`."""
        return SimpleNamespace(fatal_error=self.fatal_error)

    def warmup(self) -> None:
        """Does nothing: steps are recorded when they first come."""
        self.warmed_up = True

    def is_running(self) -> bool:
        return self._worker.is_alive

    def start(self) -> None:
        if self.is_running():
            logger.warning("the manager is running already")
        else:
            self._worker.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Takes no more requests and ends the thread: once all are finished, or with `hard_stop` after the step in
        progress, which fails those that are not. Memory goes back, unless it is kept for the next session."""
        if threading.get_ident() in self._worker.pausing:
            raise RuntimeError("this thread has paused the manager, which then cannot stop: leave `pause` before")
        was_started = self._worker.thread is not None
        self._worker.stop(hard_stop, keep_for_next_session)
        if keep_for_next_session and was_started:
            setattr(self.model, compat.CACHED_MANAGER, self)
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Waits for the thread's end, at most `timeout` seconds."""
        if not self._worker.join(timeout):
            logger.warning("the engine's thread did not end in %s s: its requests go on", timeout)

    def destroy(self) -> None:
        self.stop()
        self.engine.free()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No step is taken within this context, in which the model may be changed. Unfinished requests go on after it
        with the keys and values that they have; cached prefixes of other weights are dropped. Raises `RuntimeError` if
        the manager is not running, or ends before."""
        if not self.is_running():
            raise RuntimeError("the manager is not running: there is nothing to pause")
        with self._worker.paused():
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
        num_others = given.get("num_return_sequences", self.num_return_sequences) - 1
        request = _Pending(
            [*(f"{name}__child#{i}" for i in range(num_others)), name],
            input_ids,
            functools.partial(_request_config, self.model, self.generation_config, input_ids, given),
            seed,
            streaming,
            record_timestamps,
        )
        self._worker.add(request)
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
        """Ends a request after the step in progress; its last output is `FAILED`, with the tokens so far."""
        self._worker.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, of that request if one is named. `None` after `timeout` seconds, and if none can come any
        more: the manager is not running, having stopped or died (`fatal_error`)."""
        return self._worker.get(request_id, timeout)

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
        """Outputs of a request go to `callback`, run by the event loop that runs now, until its last."""
        with self._worker.changed:
            self._worker.handlers[request_id] = callback, asyncio.get_running_loop()
            waiting = self._worker.outputs.pop(request_id, ())
            self._worker.deliver(waiting)


def _request_config(
    model: PreTrainedModel, config: GenerationConfig, prompt: Any, options: dict[str, Any]
) -> GenerationConfig:
    """The configuration of one request. Raises `ValueError` for options that `GenerationConfig` does not have."""
    as_config(options)
    made = copy.deepcopy(config)
    for name in ("cache_implementation", "cache_config", "compile_config", "continuous_batching_config"):
        if hasattr(made, name):  # how transformers would run it
            setattr(made, name, None)
    for name, value in options.items():
        setattr(made, name, value)
    own = model.generation_config

    def effective(name: str) -> Any:
        value = getattr(made, name)
        return getattr(own, name) if value is None else value

    if not effective("do_sample") and (effective("num_beams") or 1) == 1:
        made.num_return_sequences = 1  # all of greedy search are equal
    else:
        made.num_return_sequences = made.num_return_sequences or 1
    if effective("max_new_tokens") is None and effective("max_length") is None:
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None:
            raise ValueError("no limit is set, and the model's config tells none: pass `max_new_tokens`")
        made.max_length = limit
    return made


# -- what methods of transformers' `ContinuousMixin` become --------------------------------


def _init(
    original: Callable[..., Any],
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> PagedBatchingManager:
    cached = getattr(model, compat.CACHED_MANAGER, None)
    if isinstance(cached, PagedBatchingManager):
        return cached
    config = model.generation_config if generation_config is None else generation_config
    cb_config = continuous_batching_config or getattr(config, "continuous_batching_config", None)
    return PagedBatchingManager(model, config, cb_config or ContinuousBatchingConfig(), workload_hints)


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
    context = model.continuous_batching_context_manager(
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
    )
    outputs: dict[str, GenerationOutput] = {}
    with context as manager:
        names = manager.add_requests(inputs, record_timestamps=record_timestamps, **options)
        num_others = options.get("num_return_sequences", manager.num_return_sequences) - 1
        names = [each for name in names for each in (*(f"{name}__child#{i}" for i in range(num_others)), name)]
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


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": _init,
    "destroy_cached_continuous_batching_manager": _destroy_cached,
    "continuous_batching_context_manager": _context,
    "generate_batch": _generate_batch,
}
"""By the name of the method of `ContinuousMixin`."""
