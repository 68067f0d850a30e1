"""`PagedEngine`: continuous batching of many requests on one model."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import forks
from ..attention.backends import obstacles
from ..attention.masks import mask_observer
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig, check_cache_salt
from ..interrupts import held, let_in
from ..locks import PatientLock
from ..model.capability import packable
from ..model.registry import Route, note_route
from ..tools.pictures.block_map import plot_block_map
from ..tools.pictures.html import engine_html
from ..tools.pictures.timeline import MAX_REQUESTS, plot_intervals
from .arguments import check_names, shown
from .assembly import empty_cache, make_core
from .entries import Entry, new_entry
from .execution.adapters import base_model, check_adapter
from .job import Job
from .loop import Core
from .prompts import Prompt
from .request import Request
from .results import EngineStats, RequestOutput, RequestResult, Unread
from .runner import PackedRunner
from .scheduling.timeline import Timeline
from .streams import Reader, Window, read_in_thread

# of a core
_COUNTS = ("num_captured_steps", "num_generated_tokens", "num_preemptions", "num_steps", "num_swaps", "seconds")
POLICIES = ("recompute", "keep")
MANY_BLOCKS = 1 << 40  # as many as there is memory for; it is taken when it is touched


class PagedEngine:
    """
    Generates for many requests at the same time (iteration-level scheduling, Orca, OSDI'22; blocks, PagedAttention,
    arXiv 2309.06180). A request's tokens are those of `model.generate` on its prompt alone.

    The model may be trained or changed between calls and between steps: requests that come later are served nothing
    that other weights computed. Unfinished ones go on with the keys and values that they have, unless the change is
    made within `weights_update`. Whether the model runs packed is decided while no request is unfinished: add forward
    hooks, dropout, attention functions and code that acts on shapes then, since unfinished requests, and those that
    join them, may get other tokens otherwise. Methods may be called from several threads; one that changes the model
    while others take steps does so within `weights_update` or `pause`.

    Args:
        model ([`PreTrainedModel`] or `PeftModel`): A decoder-only model.
        config ([`PagedConfig`] or `dict`, *optional*): Block size, budgets, preemption.
        tokenizer (*optional*): For prompts and stop strings that are text, and for text in the results.

    Raises:
        ValueError: for what is no model or cannot generate; for an encoder-decoder model, or prompt learning, both of
            which `generate` serves.

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
        _check_generates(inner)
        if getattr(inner.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(inner).__name__} is an encoder-decoder model: call `model.generate(..., "
                'cache_implementation="paged")`; the engine takes decoder-only models'
            )
        self.model: PreTrainedModel = inner
        self.config = PagedConfig.coerce(config)
        self.tokenizer = tokenizer
        self._lock = PatientLock()
        self._resumed = self._lock.condition()
        self._pauses: list[int] = []  # the threads that asked for one
        self._entries: dict[str, Entry] = {}
        self._unstarted: list[Entry] = []  # whose `max_time` does not run yet
        self._unread = Unread()  # of steps that others took or that raised, and of what ended outside a step
        self._unreported: deque[Job] = deque()  # of the last step
        self._numbers = itertools.count()  # of the ids that are made up
        self._num_finished = self._num_prompt_tokens = self._num_hit_tokens = 0
        self._core: Core | None = None
        self._made_for: Any = None  # what the core depends on
        self._config_text = ""  # of the model's config then
        self._past: dict[str, Any] = {}  # what cores before it counted
        self._obstacles: set[str] = set()  # that kernels met under this core
        self._shares_prefills = False
        self.memory = PagedMemory(self.config)
        self.timeline = Timeline()
        forks.in_child(self)

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
        cache_salt: str | None = None,
    ) -> str:
        """
        Queues a request and returns its id. Nothing is computed before the next `step`.

        Args:
            input_ids (`list[int]`, `torch.Tensor` of shape `(length,)` or `(1, length)`, `str`, or a mapping): The
                prompt; a mapping is what a tokenizer makes of one text, `input_ids` and `attention_mask`.
            generation_config ([`GenerationConfig`] or `dict`, *optional*): Over the model's own, as in `generate`.
                `max_time` counts from the step that first runs the request.
            request_id (`str`, *optional*): A name; one is made up otherwise.
            priority (`int`, within 2**31): Lower runs earlier; waiting makes up for any difference in the end.
            logits_processor, stopping_criteria (lists, *optional*): As in `generate`, over this request's rows.
            streamer (*optional*): As in `generate`; gets the prompt at once. It is ended however the request ends.
            adapter (`str`, *optional*): The PEFT adapter to run with, `"__base__"` for none; else the active one.
            seed (`int` from -2**63 to 2**64 - 1, *optional*): Draws as `generate` does after `torch.manual_seed(seed)`.
            return_logprobs (`bool`): Record log-probabilities of the new tokens.
            cache_salt (`str`, *optional*): As in [`PagedConfig`], for this request; else the config's. Requests with
                different salts share no cached prefix.

        Raises:
            ValueError: for a prompt that is empty or holds ids outside the vocabulary, an id in use, an adapter that
                does not exist, arguments of another type or outside their limits, options that contradict each other,
                that only `generate` serves or that the engine's config decides.
            OutOfBlocksError: if the request can never fit into the budget.
        """
        with _Adding(self) as adding, held(), self._lock:
            check_names(request_id, adapter)
            self._check_layout()
            if request_id is None:
                request_id = self._make_id()
            if request_id in self._entries:
                raise ValueError(f"request id {request_id!r} is in use by an unfinished request: choose another")
            if adapter is not None:
                check_adapter(self.model, adapter)
            check_cache_salt(cache_salt)
            entry = new_entry(
                self.model,
                self.tokenizer,
                request_id,
                input_ids,
                generation_config,
                priority=priority,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                streamer=streamer,
                adapter=adapter,
                seed=seed,
                return_logprobs=return_logprobs,
                cache_salt=self.config.cache_salt if cache_salt is None else cache_salt,
            )
            core = self._get_core()  # takes memory: not for what is refused
            if not self._entries:
                core.begin()
            core.add(entry.job)
            self._entries[request_id] = adding.entry = entry
            self._shares_prefills |= entry.request.num_rows > 1
            if entry.limits:
                self._unstarted.append(entry)
            if streamer is not None:
                with let_in(waiting=False):
                    streamer.put(entry.job.decoding.input_ids.cpu())
            self._num_prompt_tokens += len(entry.prompt_ids)
            return request_id

    def cancel(self, request_id: str) -> None:
        """
        Ends a request at any point and gives its blocks back; its result, with what it has, comes with the next step.
        Raises `ValueError` if no unfinished request has that id.
        """
        with held(), self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            self._emit(RequestOutput(request_id, result=self._end(entry, "cancelled")), entry, self._unread)
            entry.close("cancelled")

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or the end of a request to report."""
        return bool(self._entries or self._unread)

    # -- running --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """
        One forward over whatever fits, and one token for each sequence that is ready. Requests that `generate` or
        `stream` wait for report to those.

        Where other threads take the steps, outputs of the requests that were added here wait for the next call: all
        results, and the last 16,384 outputs without one; the tokens of older ones are in the results.

        The model may change between two steps. A change of whole weights is seen by a quick look in each step, one of a
        few elements by a fingerprint (about the time of a decode step) when cached blocks of earlier steps are about to
        be served. One that such a look misses, and that is undone while requests are unfinished, needs
        `weights_update`.

        Raises:
            RuntimeError: if this thread has paused the engine. Where another has, it waits.
        """
        return self._take_step(Window())

    def _take_step(self, window: Window) -> list[RequestOutput]:
        outputs: deque[RequestOutput] = deque()
        try:
            with held(), self._lock:
                self._wait_until_resumed()
                outputs = self._unread.take()
                if self._entries:
                    self._step(outputs, window)
                told = list(outputs)
        except BaseException:  # also an interrupt that waited for the end: the next step tells it
            with held(), self._lock:
                self._unread.extend(outputs)
            raise
        return told

    def _step(self, outputs: deque[RequestOutput], window: Window) -> None:
        core = self._get_core()
        if not self._unreported:  # else telling what the last step did was interrupted
            now = time.time()  # as the criteria count
            for entry in self._unstarted:
                for limit in entry.limits:
                    limit.initial_timestamp = now
            if not window.is_open:
                core.open_window()
                window.is_open = True
            tokens = mask_observer.set(None), obstacles.set(self._obstacles)
            known = len(self._obstacles)
            try:
                with torch.no_grad(), core.attention():
                    self._unreported.extend(core.step())
                if not window.is_settled and (self._unreported or not window.is_call):
                    core.settle(window.is_call)
                    window.is_settled = True
            except BaseException:
                core.abandon()
                raise
            finally:
                mask_observer.reset(tokens[0])
                obstacles.reset(tokens[1])
            if len(self._obstacles) > known:
                self._note_route()
            self._note_admitted(core.admitted)
        while self._unreported:
            self._report(self._unreported[0], outputs)
            self._unreported.popleft()
        if not self._entries:
            core.rest()
            self._note_route()

    def _note_admitted(self, requests: list[Request]) -> None:
        now = time.perf_counter()
        for request in requests:
            name: Any = request.request_id
            entry = self._entries.get(name)
            if entry is not None and entry.request is request and entry.queued is None:
                entry.queued = now - entry.added
                if entry.limits:
                    self._unstarted.remove(entry)

    def generate(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestResult]:
        """
        Results of all prompts, in their order. A request that cannot be served has its error in its result; the others
        finish.

        Args:
            prompts (iterable of `list[int]`, `torch.Tensor` or `str`, or a mapping): As in `add_request`. Rows of a 2-D
                tensor are taken as they are, padding included, unless a mask is given. A mapping is what a tokenizer
                makes of several texts: `input_ids`, less the padding that `attention_mask` hides.
            generation_config ([`GenerationConfig`], `dict`, or a list of them, *optional*): One for all, or one each.
            attention_mask (`torch.Tensor`, *optional*): Of the shape of `prompts`, a 2-D tensor; zero where these are
                padding, on the left or right, which is dropped.
            progress (`bool`): Show a progress bar (tqdm).
            options: Other arguments of `add_request`, for all.

        Raises:
            TypeError: for options that `add_request` does not have.
            ValueError: for a single prompt, a wrong number of configs, a mask that does not fit, a mapping with other
                keys, and `request_id` or `streamer` with several prompts.
        """
        return Reader(self, prompts, generation_config, attention_mask, options).results(progress)

    def stream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> Generator[RequestOutput, None, None]:
        """
        Outputs of all prompts as they come. The ids are `add_request`'s, in the order of the prompts; closing the
        iterator cancels what is left. Arguments and errors are those of `generate`.
        """
        return Reader(self, prompts, generation_config, attention_mask, options).stream()

    def astream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """
        `stream` for `async for`: steps run in a worker thread, and several streams share them. A reader that is
        cancelled goes at once; its requests do after the step in progress.
        """
        return read_in_thread(self.stream(prompts, generation_config, attention_mask=attention_mask, **options))

    # -- the model changes ----------------------------------------------------------------------------------------

    def pause(self) -> contextlib.ExitStack:
        """
        Waits until the step in progress is done; then no thread takes a step until `resume`, or until the end of `with
        engine.pause():`. Unfinished requests stay as they are, and more may be added. Other threads wait in `step`,
        `generate`, `stream` and `astream`; in this one they raise, since it would wait for itself. Several threads may
        pause at the same time: steps go on after the last has resumed.
        """
        with held(), self._lock:
            self._pauses.append(threading.get_ident())
        stack = contextlib.ExitStack()
        stack.callback(self.resume)
        return stack

    def resume(self) -> None:
        """Ends a pause, that of this thread first. Raises `RuntimeError` if the engine is not paused."""
        with held(), self._lock:
            if not self._pauses:
                raise RuntimeError("the engine is not paused: every `resume` needs a `pause` before it")
            mine = threading.get_ident()
            self._pauses.remove(mine if mine in self._pauses else self._pauses[-1])
            self._resumed.notify_all()

    @contextlib.contextmanager
    def weights_update(self, policy: str = "recompute") -> Iterator[None]:
        """
        The model may be changed within this context, in any way and from any thread: the engine pauses, and nothing
        that was computed before is served afterwards. It is taken to have changed however the context ends.

        Without this context a change between two steps is found out (`step`), and is as with `"keep"`.

        Args:
            policy (`str`): What becomes of unfinished requests. `"recompute"`: their keys and values are forgotten and
                computed again with the new weights, as after a preemption; the tokens they have stay. `"keep"`: they go
                on with the keys and values they have, and only what is new comes from the new weights.

        Raises:
            ValueError: for another policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"`policy` is {policy!r}: it must be one of {', '.join(map(repr, POLICIES))}")
        with self.pause():
            try:
                yield
            finally:
                with held(), self._lock:
                    if self._core is not None:
                        self._core.change_weights(recompute=policy == "recompute")

    def _wait_until_resumed(self) -> None:
        if threading.get_ident() in self._pauses:
            raise RuntimeError(
                "the engine was paused by this thread, which would wait for itself: call `resume`, or leave the "
                "context of `pause` or `weights_update`, before its next step"
            )
        while self._pauses:
            self._resumed.wait(timeout=0.05)
            with let_in():
                pass

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def route(self) -> Route | None:
        """How requests are served and why so; `None` before the first. `last_route(model)` tells the same."""
        with held(), self._lock:
            core = self._core
            if core is None:
                return None
            slowed_by = sorted(self._obstacles)
            if core.obstacle is not None:
                slowed_by.append(f"sequences run one by one, not packed: {core.obstacle}")
            return Route(
                "engine" if core.obstacle is None else "rows",
                core.obstacle or "packed forwards under the engine's scheduler",
                in_place=core.obstacle is None,
                prefills_shared=core.obstacle is None and self._shares_prefills,
                num_captured_steps=self._count("num_captured_steps"),
                slowed_by=tuple(slowed_by),
            )

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        with held(), self._lock:
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
                num_captured_steps=counts["num_captured_steps"],
                seconds=seconds,
                tokens_per_second=generated / seconds if seconds else 0.0,
                route=self.route,
            )

    def block_map(self) -> dict[int | None, list[int]]:
        """
        For each layer group, by its window (`None`: full attention), what every block of the pool is: 0 free, -1
        cached, else the number of sequences that hold it.
        """
        with held(), self._lock, self.memory.lock:
            if self._core is None:
                return {}
            pools = {group.window: group.pool for group in self._core.blocks.groups}
            return {window: pool.states() for window, pool in pools.items()}

    def plot_memory(self, ax: Any = None) -> Any:
        """
        A matplotlib `Figure` of `block_map`: which blocks are free, used, shared by how many, cached.

        Args:
            ax (`matplotlib.axes.Axes`, *optional*): Draw there; otherwise in a new figure, 800 pixels wide.

        Raises:
            ImportError: without matplotlib, which the extra `viz` brings.
        """
        block_map, total = self.block_map(), self.config.num_blocks
        used = sum(state > 0 for states in block_map.values() for state in states)
        title = f"{type(self.model).__name__}: {used:,} blocks in use"
        if total is not None:
            untouched = total - sum(map(len, block_map.values()))
            title += f" of {total:,}, {untouched:,} never taken so far"
        return plot_block_map(block_map, title, ax)

    def plot_timeline(self, unit: str = "steps", ax: Any = None, max_requests: int = MAX_REQUESTS) -> Any:
        """
        A matplotlib `Figure` of who was in the batch when, a row for each request: prefill, decode, recompute; waiting,
        preempted, swapped out. It is drawn from `timeline.intervals()`, which go back over the last thousands.

        Args:
            unit (`str`): What is on the x axis, `"steps"` or `"seconds"`.
            ax (`matplotlib.axes.Axes`, *optional*): Draw there; otherwise in a new figure, 800 pixels wide.
            max_requests (`int`): Number of requests to draw, the last ones.

        Raises:
            ImportError: without matplotlib, which the extra `viz` brings.
            ValueError: for another unit, or less than one request.
        """
        with held(), self._lock:
            intervals = self.timeline.intervals()
        return plot_intervals(intervals, unit, ax, max_requests)

    def _repr_html_(self) -> str:
        return engine_html(f"PagedEngine({type(self.model).__name__})", self.stats(), self.block_map())

    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values kept of finished requests."""
        with held(), self._lock, self.memory.lock:
            if self._core is not None:
                self._core.blocks.drop_cached()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pools, block tables and reference counts agree."""
        with held(), self._lock, self.memory.lock:
            self.memory.check_integrity()
            if self._core is not None:
                self._core.blocks.check_integrity()

    def free(self) -> None:
        """Cancels every request and gives every byte back. The engine can be used again."""
        with held(), self._lock:
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

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: a step that another thread was taking leaves nothing that can go on."""
        self._resumed = self._lock.condition()
        self._pauses = [thread for thread in self._pauses if thread == threading.get_ident()]
        if self._lock.is_among(freed):
            self._entries, self._unstarted, self._unread = {}, [], Unread()
            self._retire()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _get_core(self) -> Core:
        """The core; while nothing is in flight, another one if the model is no longer what it was made for."""
        if self._core is not None and self._entries:
            return self._core
        autocast = autocast_dtype(self.model.device)
        empty = empty_cache(self.model, self.memory)
        obstacle = packable(self.model, empty, PackedRunner)
        made_for = (_layout(empty), obstacle, self.model.dtype, self.model.device, autocast)
        if self._core is None or made_for != self._made_for:
            self._retire()
            cache = empty_cache(self.model, self.memory)
            cache.reserve(self.config.num_blocks or MANY_BLOCKS)  # growing step by step would copy what is there
            self._core = make_core(self.model, cache, obstacle, max_num_seqs=self.config.max_num_seqs)
            self._config_text = _config_text(self.model)
            self._made_for, self.memory = made_for, self._core.memory
            self._core.scheduler.timeline = self.timeline
            self._note_route()
        return self._core

    def _note_route(self) -> None:
        if self.route is not None:
            note_route(self.model, self.route)

    def _check_layout(self) -> None:
        """Requests that run together share layer groups."""
        if not self._entries or _config_text(self.model) == self._config_text:
            return  # as nearly always, and quickly known
        before, now = self._made_for[0], _layout(empty_cache(self.model, self.memory))
        if now != before:
            raise ValueError(
                f"the config of {type(self.model).__name__} now asks for {_words(now)}, and the {len(self._entries)} "
                f"unfinished requests began with {_words(before)}: change `sliding_window` and `layer_types` while no "
                "request is unfinished"
            )

    def _retire(self) -> None:
        """Gives the core and its memory up; what it counted stays."""
        self._past = {name: self._count(name) for name in _COUNTS}
        self.memory.captured = None  # a cache that is held has no use for graphs
        self._core, self.memory = None, PagedMemory(self.config)
        self._obstacles = set()
        self._unreported.clear()

    def _count(self, name: str) -> Any:
        return self._past.get(name, 0) + getattr(self._core, name, 0)

    def _make_id(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._entries)

    def _add_for(
        self, outbox: deque[RequestOutput], prompt: Prompt, generation_config: Any, options: dict[str, Any]
    ) -> str:
        """Queues a request that reports to `outbox`."""
        with held(), self._lock:
            request_id = self.add_request(prompt, generation_config, **options)
            self._entries[request_id].outbox = outbox
            return request_id

    def _step_for(self, outbox: deque[RequestOutput], request_ids: set[str], window: Window) -> None:
        """A step, unless one of another thread has put something into `outbox`, where these requests report."""
        with held(), self._lock:
            self._wait_until_resumed()
            if outbox:
                return
            entries = {name: self._entries.get(name) for name in request_ids}
            gone = [name for name, entry in entries.items() if entry is None or entry.outbox is not outbox]
            if gone:
                raise RuntimeError(f"requests {sorted(gone)} are gone without a result")
            self._unread.extend(self._take_step(window))

    def _close(self, outbox: deque[RequestOutput], window: Window) -> None:
        """Ends the requests that report to `outbox`, which is not read any more."""
        with held(), self._lock:
            if window.is_open and not window.is_settled and self._core is not None:
                self._core.abandon()
            for entry in list(self._entries.values()):
                if entry.outbox is outbox:
                    self._end(entry, "cancelled")
                    entry.close("cancelled")

    def _report(self, job: Job, outputs: deque[RequestOutput]) -> None:
        """Tells the caller that waits for a request what a job's step brought."""
        entry: Entry | None = job.state
        if entry is None or self._entries.get(entry.request_id) is not entry:
            return
        tokens, text, error = job.new_tokens, None, job.error
        if error is not None:
            tokens = {}  # of an earlier step
        else:
            if entry.first_token is None:
                entry.first_token = time.perf_counter() - entry.added
            if entry.text is not None and 0 in tokens:
                try:
                    text = entry.text.add([tokens[0]], last=job.is_done)
                except Exception as failure:  # the tokenizer's
                    error = failure
        result, reason = None, None if error is None else "error"
        if error is not None or job.is_done:
            result = self._end(entry, reason, error)
        self._emit(RequestOutput(entry.request_id, tokens, text, result), entry, outputs)
        if result is not None:
            entry.close(reason)

    def _emit(self, output: RequestOutput, entry: Entry, default: deque[RequestOutput] | Unread) -> None:
        (default if entry.outbox is None else entry.outbox).append(output)

    def _end(self, entry: Entry, reason: str | None = None, error: Exception | None = None) -> RequestResult:
        """Takes a request out and says how it ended; its blocks go back. Once that is told it is to be closed."""
        result = entry.result(reason, error)
        self._num_finished += 1
        self._num_hit_tokens += result.num_prefix_hit_tokens
        self._remove(entry)
        return result

    def _remove(self, entry: Entry) -> None:
        if self._core is not None:
            self._core.drop(entry.job)
        del self._entries[entry.request_id]
        if entry in self._unstarted:
            self._unstarted.remove(entry)


def _check_generates(model: Any) -> None:
    """Raises `ValueError` for what is no model, and for one without a head."""
    if not callable(getattr(model, "can_generate", None)):
        raise ValueError(
            f"`model` is {shown(model)}: it must be a model, from `AutoModelForCausalLM.from_pretrained` for instance"
        )
    if not model.can_generate():
        raise ValueError(
            f"`model` is a {type(model).__name__}, which cannot generate: pass the model with its head, "
            "a `...ForCausalLM`"
        )


def _config_text(model: PreTrainedModel) -> str:
    return repr(vars(model.config.get_text_config(decoder=True)))


def _layout(cache: PagedCache) -> tuple[tuple[type, int | None], ...]:
    """The kind of each layer of the cache, and its window in tokens."""
    return tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)


def _words(layout: tuple[tuple[type, int | None], ...]) -> str:
    counts = Counter("full attention" if window is None else f"a window of {window} tokens" for _, window in layout)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


class _Adding:
    """A request that is being added. If its streamer fails, or an interrupt comes, it was never added."""

    def __init__(self, engine: PagedEngine) -> None:
        self.engine = engine
        self.entry: Entry | None = None

    def __enter__(self) -> _Adding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine, entry = self.engine, self.entry
        if error is not None and entry is not None:
            with held(), engine._lock:
                if engine._entries.get(entry.request_id) is entry:
                    engine._remove(entry)
                    entry.close("error")
