"""`PagedEngine`: continuous batching of many requests on one model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import reprlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..attention.masks import mask_observer
from ..cache.memory import PagedMemory
from ..config import PagedConfig
from .adapters import base_model, check_adapter
from .assembly import empty_cache, make_core
from .beam import BeamDecoding
from .capability import packable
from .core import Core, Job
from .request import Request, Sequence
from .results import EngineStats, RequestOutput, RequestResult, SequenceResult, TextTracker, Timings
from .sampling import request_decoding

_COUNTS = ("num_generated_tokens", "num_preemptions", "num_steps", "num_swaps", "seconds")  # of a core
MANY_BLOCKS = 1 << 40  # as many as there is memory for; it is taken when it is touched
Prompt = Any  # list[int], 1-D or (1, length) tensor, or str where the engine has a tokenizer


@dataclass
class _Entry:
    """What the engine remembers of an unfinished request."""

    request_id: str
    request: Request
    job: Job
    prompt_ids: list[int]
    added: float
    text: TextTracker | None
    record_logprobs: bool
    queued: float | None = None
    first_token: float | None = None
    outbox: deque[RequestOutput] | None = None  # of whoever waits for this request


class PagedEngine:
    """
    Generates for many requests at the same time (iteration-level scheduling, Orca, OSDI'22; blocks, PagedAttention,
    arXiv 2309.06180). A request's tokens are those of `model.generate` on its prompt alone.

    The model may be trained or changed between steps as long as no request is unfinished; keys and values of earlier
    requests are forgotten when its weights changed. Methods may be called from several threads.

    Args:
        model ([`PreTrainedModel`] or `PeftModel`): A decoder-only model.
        config ([`PagedConfig`] or `dict`, *optional*): Block size, budgets, preemption.
        tokenizer (*optional*): For prompts and stop strings that are text, and for text in the results.

    Raises:
        ValueError: for an encoder-decoder model, or prompt learning; both are served by `generate`.

    Example:

    ```python
    with PagedEngine(model, PagedConfig(num_blocks=4096), tokenizer=tokenizer) as engine:
        results = engine.generate(prompts, generation_config, progress=True)
    ```
    """

    def __init__(
        self,
        model: Any,
        config: PagedConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        inner = base_model(model)
        if getattr(inner.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(inner).__name__} is an encoder-decoder model: call `model.generate(..., "
                'cache_implementation="paged")`; the engine takes decoder-only models'
            )
        self.model: PreTrainedModel = inner
        self.config = PagedConfig.coerce(config)
        self.tokenizer = tokenizer
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._done: deque[RequestOutput] = deque()  # ended outside a step
        self._numbers = itertools.count()  # of the ids that are made up
        self._num_finished = self._num_prompt_tokens = self._num_hit_tokens = 0
        self._core: Core | None = None
        self._made_for: Any = None  # what the core depends on
        self._past: dict[str, Any] = {}  # what cores before it counted
        self.memory = PagedMemory(self.config)

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Prompt,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        adapter: str | None = None,
        seed: int | None = None,
        return_logprobs: bool = False,
    ) -> str:
        """
        Queues a request and returns its id. Nothing is computed before the next `step`.

        Args:
            input_ids (`list[int]`, `torch.Tensor` of shape `(length,)` or `(1, length)`, or `str`): The prompt.
            generation_config ([`GenerationConfig`] or `dict`, *optional*): Over the model's own, as in `generate`.
            request_id (`str`, *optional*): A name; one is made up otherwise.
            priority (`int`): Lower runs earlier; waiting makes up for any difference in the end.
            logits_processor, stopping_criteria (*optional*): As in `generate`, over this request's rows.
            streamer (*optional*): As in `generate`.
            adapter (`str`, *optional*): The PEFT adapter to run with, `"__base__"` for none; else the active one.
            seed (`int`, *optional*): Draws as `generate` does after `torch.manual_seed(seed)`.
            return_logprobs (`bool`): Record log-probabilities of the new tokens.

        Raises:
            ValueError: for a prompt that is empty or holds ids outside the vocabulary, an id in use, an adapter that
                does not exist, options that contradict each other or that only `generate` serves.
            OutOfBlocksError: if the request can never fit into the budget.
        """
        with self._lock:
            core = self._get_core()
            if request_id is None:
                names = (f"request-{number}" for number in self._numbers)
                request_id = next(name for name in names if name not in self._entries)
            if request_id in self._entries:
                raise ValueError(f"request id {request_id!r} is in use by an unfinished request: choose another")
            if adapter is not None:
                check_adapter(self.model, adapter)
            prompt = self._token_ids(input_ids)
            generator = None
            if seed is not None:
                generator = torch.Generator(device=self.model.device).manual_seed(seed)
            decoding = request_decoding(
                self.model,
                prompt,
                _as_config(generation_config),
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                streamer=streamer,
                generator=generator,
                tokenizer=self.tokenizer,
                record_logprobs=return_logprobs,
            )
            request = Request(
                request_id=request_id,
                sequences=[Sequence(list(prompt))],
                priority=priority,
                namespace=adapter,
                max_num_tokens=decoding.max_length,
                num_rows=decoding.num_rows,
            )
            job = Job(decoding, [(request, index) for index in range(decoding.num_rows)])
            if not self._entries:
                core.check_weights()
            core.add(job)
            text = TextTracker(self.tokenizer) if self.tokenizer is not None else None
            job.state = _Entry(request_id, request, job, prompt, time.perf_counter(), text, return_logprobs)
            self._entries[request_id] = job.state
            self._num_prompt_tokens += len(prompt)
            return request_id

    def cancel(self, request_id: str) -> None:
        """
        Ends a request at any point and gives its blocks back; its result, with what it has, comes with the next step.
        Raises `ValueError` if no unfinished request has that id.
        """
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            self._emit(RequestOutput(request_id, result=self._end(entry, "cancelled")), entry, self._done)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or the end of a request to report."""
        return bool(self._entries or self._done)

    # -- running --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """
        One forward over whatever fits, and one token for each sequence that is ready. Requests that `generate` or
        `stream` wait for report to those.
        """
        outputs: deque[RequestOutput] = deque()
        with self._lock:
            outputs.extend(self._done)
            self._done.clear()
            if not self._entries:
                return list(outputs)
            core = self._get_core()
            token = mask_observer.set(None)
            try:
                with torch.no_grad(), core.attention():
                    jobs = core.step()
            finally:
                mask_observer.reset(token)
            now = time.perf_counter()
            for request in core.admitted:
                entry: _Entry = request.payload[0][0].state
                if entry.queued is None:
                    entry.queued = now - entry.added
            for job in jobs:
                self._report(job, outputs)
        return list(outputs)

    def generate(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestResult]:
        """
        Results of all prompts, in their order. A request that cannot be served has its error in its result; the others
        finish.

        Args:
            prompts (iterable of `list[int]`, `torch.Tensor` or `str`): As in `add_request`.
            generation_config ([`GenerationConfig`], `dict`, or a list of them, *optional*): One for all, or one each.
            progress (`bool`): Show a progress bar (tqdm).
            options: Other arguments of `add_request`, for all.
        """
        outbox: deque[RequestOutput] = deque()
        results: list[RequestResult | None] = []
        places: dict[str, int] = {}
        with _progress(progress) as bar:
            try:
                self._add_all(prompts, generation_config, options, outbox, results, places)
                bar.reset(len(results))
                bar.update(len(results) - len(places))
                for output in self._outputs(outbox, set(places)):
                    if output.result is not None:
                        results[places.pop(output.request_id)] = output.result
                        bar.update(1)
            finally:
                self._cancel_all(places)
        return [result for result in results if result is not None]

    def stream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, **options: Any
    ) -> Generator[RequestOutput, None, None]:
        """
        Outputs of all prompts as they come. The ids are `add_request`'s, in the order of the prompts; closing the
        iterator cancels what is left. Arguments are those of `generate`.
        """
        outbox: deque[RequestOutput] = deque()
        results: list[RequestResult | None] = []
        places: dict[str, int] = {}
        try:
            self._add_all(prompts, generation_config, options, outbox, results, places)
            yield from (RequestOutput(result.request_id, result=result) for result in results if result is not None)
            for output in self._outputs(outbox, set(places)):
                if output.finished:
                    places.pop(output.request_id)
                yield output
        finally:
            self._cancel_all(places)

    async def astream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for `async for`: steps run in a worker thread, and several streams share them."""
        stream = self.stream(prompts, generation_config, **options)
        nothing = object()
        try:
            while (output := await asyncio.to_thread(next, stream, nothing)) is not nothing:
                assert isinstance(output, RequestOutput)
                yield output
        finally:
            stream.close()

    # -- state ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        with self._lock:
            memory, core = self.memory.stats(), self._core
            counts = {name: self._count(name) for name in _COUNTS}
            seconds, generated = counts["seconds"], counts["num_generated_tokens"]
            return EngineStats(
                num_blocks=self.config.num_blocks,
                used_blocks=memory.used_blocks,
                shared_blocks=memory.shared_blocks,
                cached_blocks=memory.cached_blocks,
                peak_blocks=memory.peak_blocks,
                used_bytes=memory.used_bytes,
                peak_bytes=memory.peak_bytes,
                waste_percent=100 * memory.waste,
                num_running=core.scheduler.num_running if core else 0,
                num_waiting=core.scheduler.num_waiting if core else 0,
                num_finished=self._num_finished,
                num_preemptions=counts["num_preemptions"],
                num_swaps=counts["num_swaps"],
                num_prompt_tokens=self._num_prompt_tokens,
                num_prefix_hit_tokens=self._num_hit_tokens,
                num_generated_tokens=generated,
                num_steps=counts["num_steps"],
                seconds=seconds,
                tokens_per_second=generated / seconds if seconds else 0.0,
            )

    def block_map(self) -> dict[int | None, list[int]]:
        """
        For each layer group, by its window (`None`: full attention), what every block of the pool is: 0 free, -1
        cached, else the number of sequences that hold it.
        """
        with self._lock, self.memory.lock:
            if self._core is None:
                return {}
            pools = {group.window: group.pool for group in self._core.blocks.groups}
            return {window: pool.states() for window, pool in pools.items()}

    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values kept of finished requests."""
        with self._lock, self.memory.lock:
            if self._core is not None:
                self._core.blocks.drop_cached()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pools, block tables and reference counts agree."""
        self.memory.check_integrity()
        if self._core is not None:
            self._core.blocks.check_integrity()

    def free(self) -> None:
        """Cancels every request and gives every byte back. The engine can be used again."""
        with self._lock:
            for request_id in list(self._entries):
                self.cancel(request_id)
            self._retire()

    def __enter__(self) -> PagedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"PagedEngine({type(self.model).__name__}, {stats.num_running} running, {stats.num_waiting} waiting, "
            f"{stats.used_blocks} blocks used)"
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _get_core(self) -> Core:
        """The core; while nothing is in flight, another one if the model is no longer what it was made for."""
        if self._core is not None and self._entries:
            return self._core
        kind = self.model.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        obstacle = packable(self.model, empty_cache(self.model, self.memory))
        made_for = (obstacle, self.model.dtype, self.model.device, autocast)
        if self._core is None or made_for != self._made_for:
            self._retire()
            cache = empty_cache(self.model, self.memory)
            cache.reserve(self.config.num_blocks or MANY_BLOCKS)  # growing step by step would copy what is there
            self._core = make_core(self.model, cache, max_num_seqs=self.config.max_num_seqs)
            self._made_for, self.memory = made_for, self._core.memory
        return self._core

    def _retire(self) -> None:
        """Gives the core and its memory up; what it counted stays."""
        self._past = {name: self._count(name) for name in _COUNTS}
        self._core, self.memory = None, PagedMemory(self.config)

    def _count(self, name: str) -> Any:
        return self._past.get(name, 0) + getattr(self._core, name, 0)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is text: make the engine with `tokenizer=`, or pass token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() == 2 and len(prompt) == 1:
                prompt = prompt[0]
            if prompt.dim() != 1 or prompt.is_floating_point():
                raise ValueError(
                    f"the prompt is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}: pass whole numbers of "
                    "shape (length,) or (1, length), one request for each prompt"
                )
            prompt = prompt.tolist()
        try:
            token_ids = [None if isinstance(token, bool) else operator.index(token) for token in prompt]
        except TypeError:  # not a sequence, or not of whole numbers
            token_ids = [None]
        if None in token_ids:
            shown = reprlib.repr(prompt)
            raise ValueError(f"the prompt is {shown}: pass token ids, one list of whole numbers for each request")
        return cast(list[int], token_ids)

    def _add_all(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any,
        options: dict[str, Any],
        outbox: deque[RequestOutput],
        results: list[RequestResult | None],
        places: dict[str, int],
    ) -> None:
        """Queues requests that report to `outbox`; what cannot be queued has its result at once."""
        if isinstance(prompts, str) or (isinstance(prompts, torch.Tensor) and prompts.dim() < 2):
            raise ValueError("pass a list of prompts, or one prompt to `add_request`")
        prompts = list(prompts)
        configs = generation_config if isinstance(generation_config, (list, tuple)) else [generation_config]
        if len(configs) == 1:
            configs = list(configs) * len(prompts)
        if len(configs) != len(prompts):
            raise ValueError(f"{len(configs)} generation configs were passed for {len(prompts)} prompts")
        for place, (prompt, config) in enumerate(zip(prompts, configs)):
            results.append(None)
            try:
                with self._lock:
                    request_id = self.add_request(prompt, config, **options)
                    self._entries[request_id].outbox = outbox
                places[request_id] = place
            except Exception as error:
                results[place] = RequestResult(f"prompt-{place}", _plain_ids(prompt), error=error)

    def _outputs(self, outbox: deque[RequestOutput], unfinished: set[str]) -> Iterator[RequestOutput]:
        """Steps until the requests `unfinished`, which report to `outbox`, have ended."""
        while unfinished or outbox:
            while outbox:
                output = outbox.popleft()
                if output.finished:
                    unfinished.discard(output.request_id)
                yield output
            if unfinished:
                with self._lock:
                    if not outbox:
                        self._done.extend(self.step())

    def _cancel_all(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in list(request_ids):
                entry = self._entries.get(request_id)
                if entry is not None:
                    self._end(entry, "cancelled")

    def _report(self, job: Job, outputs: deque[RequestOutput]) -> None:
        """What a job's step means for whoever waits for its request."""
        entry: _Entry | None = job.state
        if entry is None or entry.request_id not in self._entries:
            return
        now = time.perf_counter() - entry.added
        if job.error is not None:
            failed = self._end(entry, "error", job.error)
            self._emit(RequestOutput(failed.request_id, result=failed), entry, outputs)
            return
        if entry.first_token is None:
            entry.first_token = now
        tokens = job.new_tokens
        text = None
        if entry.text is not None and 0 in tokens:
            text = entry.text.add([tokens[0]], last=job.is_done)
        result = self._end(entry) if job.is_done else None
        self._emit(RequestOutput(entry.request_id, tokens, text, result), entry, outputs)

    def _emit(self, output: RequestOutput, entry: _Entry, default: deque[RequestOutput]) -> None:
        (default if entry.outbox is None else entry.outbox).append(output)

    def _end(self, entry: _Entry, reason: str | None = None, error: Exception | None = None) -> RequestResult:
        """Takes a request out and says how it ended; its blocks go back."""
        request, job = entry.request, entry.job
        if self._core is not None:
            self._core.drop(job)
        del self._entries[entry.request_id]
        self._num_finished += 1
        self._num_hit_tokens += request.num_hit_tokens
        return RequestResult(
            request_id=entry.request_id,
            prompt_ids=entry.prompt_ids,
            sequences=self._sequences(entry, reason),
            error=error,
            timings=Timings(entry.queued, entry.first_token, time.perf_counter() - entry.added),
            num_prefix_hit_tokens=request.num_hit_tokens,
            num_preemptions=request.num_preemptions,
        )

    def _sequences(self, entry: _Entry, reason: str | None) -> list[SequenceResult]:
        decoding, first = entry.job.decoding, len(entry.prompt_ids)
        scores: list[float] | None = None
        if isinstance(decoding, BeamDecoding):
            if not decoding.is_done:  # nothing is settled
                return [SequenceResult([], reason or "cancelled") for _ in decoding.finish_reasons]
            scores = decoding.sequences_scores
            ids = decoding.sequences[:, : decoding.config.num_return_sequences].flatten(0, 1)
        else:
            ids = decoding.input_ids
        results = []
        for i, (length, ended) in enumerate(zip(decoding.lengths, decoding.finish_reasons)):
            token_ids = ids[i, first:length].tolist()
            text = None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)
            logprobs = decoding.logprobs[i] if entry.record_logprobs else None
            score = None if scores is None else scores[i]
            results.append(SequenceResult(token_ids, ended or reason or "cancelled", text, logprobs, score))
        return results


def _as_config(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    if value is None or isinstance(value, GenerationConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"the generation config is {value!r}: pass a `GenerationConfig` or a dict of its options")
    known = vars(GenerationConfig())
    unknown = sorted(str(name) for name in value if name not in known)
    if unknown:  # transformers would keep them as attributes that nobody reads
        raise ValueError(f"`GenerationConfig` has no options {', '.join(unknown)}")
    return GenerationConfig(**value)


def _plain_ids(prompt: Prompt) -> list[int]:
    with contextlib.suppress(TypeError, ValueError):
        return [int(token) for token in prompt]
    return []


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[Any]:
    if not shown:
        yield _NoBar()
        return
    from tqdm.auto import tqdm  # transformers depends on it

    with tqdm(unit="request") as bar:
        yield bar


class _NoBar:
    def reset(self, total: int) -> None:
        pass

    def update(self, count: int) -> None:
        pass
