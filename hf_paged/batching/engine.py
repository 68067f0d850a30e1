"""`PagedEngine`: continuous batching of many requests on one model."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..cache.memory import PagedMemory
from ..cache.storage import trim
from ..cache.virtual import fit_blocks
from ..config import PagedConfig
from ..model.forwards import compute_device
from ..model.loading import load_model, load_tokenizer
from ..model.registry import Route
from ..tools.pictures import MAX_REQUESTS, engine_html, plot_block_map, plot_intervals
from .arguments import Prompt, RequestOptions, check_generates, check_tokenizer, prompt_ids, split_inputs
from .engine_core import EngineCore
from .execution.adapter_files import adapter_namespace, resolve_adapter
from .execution.adapters import base_model
from .execution.executor import Window
from .results import EngineStats, RequestOutput, RequestResult
from .saved_prefixes import load, save, saved_to
from .streams import RequestStream

_MEMORY = (
    *("used_blocks", "shared_blocks", "cached_blocks", "peak_blocks", "used_bytes", "peak_bytes", "budget_bytes"),
    *("tier_host_bytes", "tier_disk_bytes", "tier_kept_blocks", "tier_restored_blocks"),
)


class PagedEngine(contextlib.AbstractContextManager["PagedEngine", None]):
    """
    Generates for many requests at the same time (iteration-level scheduling, Orca, OSDI'22; blocks, PagedAttention,
    arXiv 2309.06180). A request's tokens are those of `model.generate` on its prompt alone.

    The model may be changed between calls and between steps: later requests are served nothing that other weights
    computed. Unfinished ones go on with the keys and values that they have, unless the change is made within
    `weights_update`. Whether the model runs packed is decided while no request is unfinished: add forward hooks,
    dropout, attention functions and code that acts on shapes then, or unfinished requests, and those that join them,
    may get other tokens. Methods may be called from several threads; one that changes the model while others take
    steps does so within `weights_update` or `pause`.

    Args:
        model ([`PreTrainedModel`] or `PeftModel`): A decoder-only model.
        config ([`PagedConfig`] or `dict`, *optional*): Block size, budgets, preemption.
        tokenizer (*optional*): For prompts and stop strings that are text, and for text in the results.

    Raises:
        ValueError: for what cannot generate; for an encoder-decoder model or prompt learning, which `generate` serves;
            for the name of a tokenizer in its place; in another process than the first of those that hold shards of the
            model (`hf_paged.serve_rank`).

    Example:

    ```python
    with PagedEngine(model, PagedConfig(num_blocks=4096), tokenizer=tokenizer) as engine:
        results = engine.generate(prompts, generation_config, progress=True)
    ```
    """

    def __init__(
        self, model: Any, config: PagedConfig | Mapping[str, Any] | None = None, *, tokenizer: Any = None
    ) -> None:
        self.model: PreTrainedModel = base_model(model)
        check_generates(self.model)
        check_tokenizer(tokenizer)
        self.config = fit_blocks(PagedConfig.coerce(config), self.model.config, compute_device(self.model))
        self.tokenizer = tokenizer
        self._core = EngineCore(self.model, self.config)
        self.timeline = self._core.timeline

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        config: PagedConfig | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        **loading: Any,
    ) -> PagedEngine:
        """
        An engine for a saved model, or a name on the Hub, which transformers loads (with accelerate).

        Args:
            name_or_path (`str` or path): A model, or a PEFT adapter, whose base model is then loaded with it.
            config ([`PagedConfig`] or `dict`, *optional*): The engine's.
            tokenizer (*optional*): In place of the one that was saved beside the model, if one was.
            loading: What `from_pretrained` of the model's class takes: `dtype`, `device_map`, `quantization_config`,
                `revision`, `attn_implementation`, ...

        Raises:
            OSError, ValueError: what `from_pretrained` raises, and the errors of [`PagedEngine`].
        """
        config = PagedConfig.coerce(config)  # before anything is loaded
        check_tokenizer(tokenizer)
        model = load_model(name_or_path, **loading)
        tokenizer = load_tokenizer(name_or_path, model, **loading) if tokenizer is None else tokenizer
        return cls(model, config, tokenizer=tokenizer)

    def add_request(
        self,
        input_ids: Prompt = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        adapter: str | None = None,
        seed: int | None = None,
        return_logprobs: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        cache_salt: str | None = None,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
    ) -> str:
        """
        Queues a request and returns its id. Nothing is computed before the next `step`, but for what `inputs` say.

        Args:
            input_ids (`list[int]`, `torch.Tensor` of shape `(length,)` or `(1, length)`, `str`, `list[dict]`, or a
                mapping): The prompt, for the encoder where the model has one; a list of dicts is the messages of a
                chat, `[{"role": "user", "content": ...}, ...]`, which the tokenizer's template puts before the answer;
                a mapping is what a tokenizer or a processor makes of one text, with its images or sound.
            inputs (`dict`, *optional*): What the model's `generate` takes beside or instead of token ids, for one
                prompt, as `{"pixel_values": ..., "image_grid_thw": ...}` of images or `{"input_features": ...}` of
                sound. Encoders of encoder-decoder models run here, in the preparation that is `generate`'s own; vision
                towers with the prompt. Prompts that differ in text, length and floats alone begin in one forward.
            generation_config ([`GenerationConfig`] or `dict`, *optional*): Over the model's own, as in `generate`; a
                dict's are as its keyword arguments: `{"eos_token_id": None}` is without EOS. `max_time` counts from
                the step that first runs the request.
            request_id (`str`, *optional*): A name; one is made up otherwise.
            priority (`int`, within 2**31): Lower runs earlier; waiting makes up for any difference in the end.
            logits_processor, stopping_criteria (lists, *optional*): As in `generate`, over this request's rows.
            streamer (*optional*): As in `generate`; gets the prompt at once. It is ended however the request ends.
            adapter (`str` or path, *optional*): The PEFT adapter to run with: the name of one of the model's,
                `"__base__"` for none, or a folder with a LoRA adapter, whose weights are loaded when they are needed
                and take the place of blocks of the pool; else the active one. Rows with different LoRA adapters share
                forwards.
            seed (`int` from -2**63 to 2**64 - 1, *optional*): Draws as `generate` does after `torch.manual_seed(seed)`.
            return_logprobs (`bool`): Record log-probabilities of the new tokens, under the model and under the
                distribution that they were chosen from ([`SequenceResult`]).
            top_logprobs (`int`): How many alternatives to record beside each of these tokens, the most probable ones.
            prompt_logprobs (`bool`): Record log-probabilities of the prompt's tokens ([`RequestResult`]), all of which
                are computed then: the request neither finds nor leaves cached prefixes.
            cache_salt (`str`, *optional*): As in [`PagedConfig`], for this request; else the config's. Requests with
                different salts share no cached prefix.
            schema (`dict`, JSON as `str`, or a pydantic model's class, *optional*): The new tokens are JSON that this
                schema allows, and then EOS (xgrammar, which the extra `structured` brings).
            regex, grammar (`str`, *optional*): ... text that this regular expression matches, or that this grammar
                (GBNF, from the rule `root` on) derives. Of the three a request has one.
            assistant_model ([`PreTrainedModel`], *optional*): As in `generate`: a smaller model proposes the next
                tokens, which one forward verifies, several a step. Rows of one assistant are computed together, in
                blocks of this engine's memory, and beside rows that have none. Greedy requests get the tokens that they
                get without; sampled ones are distributed as without (speculative sampling, arXiv 2211.17192).
                `prompt_lookup_num_tokens` and `assistant_early_exit` of the generation config are served as well.
            assistant_tokenizer (*optional*): Of an assistant whose tokens are not the model's; the engine then needs
                its own `tokenizer`.

        Raises:
            ValueError: for an empty prompt, ids outside the vocabulary, messages without a chat template, an id in use,
                an unknown adapter, arguments of another type or outside their limits, options that contradict each
                other, that only `generate` serves or that the engine's config decides, and under another autocast than
                unfinished requests have; for a schema, an expression or a grammar that cannot be compiled, or without
                EOS tokens.
            ImportError: for one of these without xgrammar.
            OutOfBlocksError: if the request can never fit into the budget.
        """
        callers_own = logits_processor, stopping_criteria, streamer
        logprobs = return_logprobs, top_logprobs, prompt_logprobs
        others = cache_salt, inputs, schema, regex, grammar, assistant_model, assistant_tokenizer
        options = RequestOptions(request_id, priority, *callers_own, adapter, seed, *logprobs, *others)
        return self._core.add(self.tokenizer, input_ids, generation_config, options)

    def cancel(self, request_id: str) -> None:
        """Ends a request at any point and gives its blocks back; its result, with what it has, comes with the next
        step. Raises `ValueError` if no unfinished request has that id."""
        with self._core.lock:
            state = self._core.requests.get(request_id)
            if state is None:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            self._core.end(state, "cancelled")

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or the end of a request to report."""
        return bool(self._core.requests or self._core.unread)

    def step(self) -> list[RequestOutput]:
        """
        One forward over whatever fits, and one token for each sequence that is ready. Requests that `generate` or
        `stream` wait for report to those. Where other threads take the steps, outputs of the other requests wait for
        the next call: all results, and the last 16,384 outputs without one; tokens of older ones are in the results.

        The model may change between two steps. A change of whole weights is seen by a quick look in each step, one of a
        few elements by a fingerprint (about the time of a decode step) when cached blocks of earlier steps are about to
        be served. One that this misses, and that is undone while requests are unfinished, needs `weights_update`.

        Waits while another thread has paused the engine. Raises `RuntimeError` if this thread has.
        """
        told: list[RequestOutput] = []
        try:
            with self._core.lock:
                self._core.wait_for_resume()
                self._core.trim_unread()
                if self._core.requests:
                    self._core.step(Window())
                told = self._core.unread.copy()
                self._core.unread.clear()
        except BaseException:  # also an interrupt that waited for the end: the next step tells it
            with self._core.lock:
                self._core.unread[:0] = told
            raise
        return told

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
        Results of all prompts, in order. A request that cannot be served has its error in its result.

        Args:
            prompts (iterable of prompts, or a mapping): As in `add_request`. Rows of a 2-D
                tensor are taken as they are, padding included, unless a mask is given. A mapping is what a tokenizer
                makes of several texts: `input_ids`, less the padding that `attention_mask` hides. With images or sound
                pass a list of mappings, one a prompt.
            generation_config ([`GenerationConfig`], `dict`, or a list of them, *optional*): One for all, or one each.
            attention_mask (`torch.Tensor`, *optional*): Of the shape of `prompts`, a 2-D tensor; zero where these are
                padding, on the left or right, which is dropped.
            progress (`bool`): Show a progress bar (tqdm).
            options: `request_id` (of a single prompt), `priority`, `logits_processor`, `stopping_criteria`, `streamer`
                and `inputs` (of a single prompt), `adapter`, `seed`, `return_logprobs`, `top_logprobs`,
                `prompt_logprobs`, `cache_salt`, `schema`, `regex`, `grammar`, `assistant_model` and
                `assistant_tokenizer` of `add_request`, for all; a list of
                `adapter`, `cache_salt`, `grammar`, `priority`, `regex`, `schema` or `seed` has one for each prompt.

        Raises:
            TypeError: for options that `add_request` does not have.
            ValueError: for a single prompt, a wrong number of configs or of an option's values, a mask that does not
                fit, a mapping of several rows with other inputs, and `request_id`, `streamer` or `inputs` with several
                prompts.
        """
        stream = RequestStream(self._core, self.tokenizer, options, prompts, generation_config, attention_mask)
        return stream.results(progress)

    def stream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> Generator[RequestOutput, None, None]:
        """Outputs of all prompts as they come. The ids are `add_request`'s, in the order of the prompts; closing the
        iterator cancels what is left. Arguments, `options` and errors are those of `generate`."""
        return RequestStream(self._core, self.tokenizer, options, prompts, generation_config, attention_mask).stream()

    def astream(
        self, prompts: Iterable[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """`stream` for `async for`: steps run in a worker thread, and several streams share them. A reader that is
        cancelled goes at once; its requests do after the step in progress."""
        stream = RequestStream(self._core, self.tokenizer, options, prompts, generation_config, attention_mask)
        return stream.astream()

    def pause(self) -> contextlib.ExitStack:
        """Waits until the step in progress is done; then no thread takes a step until `resume`, or until the end of
        `with engine.pause():`. Requests may be added meanwhile. Other threads wait in `step`, `generate`, `stream` and
        `astream`, which raise in this one. Several threads may pause: steps go on after the last has resumed."""
        with self._core.lock:
            self._core.paused_by.append(threading.get_ident())
        stack = contextlib.ExitStack()
        stack.callback(self.resume)
        return stack

    def resume(self) -> None:
        """Ends a pause, that of this thread first. Raises `RuntimeError` if the engine is not paused."""
        with self._core.lock:
            threads, mine = self._core.paused_by, threading.get_ident()
            if not threads:
                raise RuntimeError("the engine is not paused: every `resume` needs a `pause` before it")
            threads.remove(mine if mine in threads else threads[-1])
            self._core.resumed.notify_all()

    @contextlib.contextmanager
    def weights_update(self, policy: str = "recompute") -> Iterator[None]:
        """
        The model may be changed within this context, in any way and from any thread: the engine pauses, and nothing
        that was computed before is served afterwards, however the context ends. Without this context a change between
        two steps is found out (`step`), and is as with `"keep"`.

        Args:
            policy (`str`): What becomes of unfinished requests, whose tokens stay. `"recompute"`: their keys and values
                are computed again with the new weights, as after a preemption. `"keep"`: they go on with those that
                they have, and only what is new comes from the new weights. Another raises `ValueError`.
        """
        if policy not in ("recompute", "keep"):
            raise ValueError(f"`policy` is {policy!r}: it must be one of 'recompute', 'keep'")
        with self.pause():
            try:
                yield
            finally:
                with self._core.lock:
                    if self._core.loop is not None:
                        self._core.loop.change_weights(recompute=policy == "recompute")
                    for state in self._core.requests.values() if policy == "recompute" else ():
                        state.prepare_again(self.model)

    @property
    def route(self) -> Route | None:
        """How requests are served and why so; `None` before the first. `last_route(model)` tells the same."""
        with self._core.lock:
            return self._core.route

    def stats(self) -> EngineStats:
        """What the engine holds and has done."""
        core = self._core
        with core.lock:
            memory, counts = self.memory.stats(), core.counts()
            scheduler = core.loop.scheduler if core.loop is not None else None
            return EngineStats(
                num_blocks=self.config.num_blocks,
                waste_percent=100 * memory.waste,
                num_running=scheduler.num_running if scheduler else 0,
                num_waiting=scheduler.num_waiting if scheduler else 0,
                tokens_per_second=counts["num_generated_tokens"] / counts["seconds"] if counts["seconds"] else 0.0,
                first_token_seconds=core.first_token_seconds,
                output_token_seconds=core.output_token_seconds,
                route=core.route,
                kv_dtype=memory.kv_dtype,
                block_sizes=memory.block_sizes,
                **{name: getattr(memory, name) for name in _MEMORY},
                **dict[str, Any](counts),
            )

    @property
    def memory(self) -> PagedMemory:
        """The blocks of the requests; another memory once the model's layers, dtype or device, or block sizes that are
        left to the engine, have changed."""
        return self._core.memory

    def block_map(self) -> dict[int | None, list[int]]:
        """For each layer group, by its window (`None`: full attention), what every block of the pool is: 0 free, -1
        cached, else the number of sequences that hold it."""
        with self._core.lock, self.memory.lock:
            groups = self._core.loop.blocks.groups if self._core.loop is not None else []
            return {group.spec.window: group.pool.states() for group in groups if group.spec.kind == "self"}

    def plot_memory(self, ax: Any = None) -> Any:
        """A matplotlib `Figure` of `block_map`: which blocks are free, used, shared by how many, cached. It is drawn
        into `ax` (`matplotlib.axes.Axes`), otherwise into a new figure, 800 pixels wide. Raises `ImportError` without
        matplotlib, which the extra `viz` brings."""
        block_map, total = self.block_map(), self.config.num_blocks
        used = sum(state > 0 for states in block_map.values() for state in states)
        title = f"{type(self.model).__name__}: {used:,} blocks in use"
        if total is not None:
            untouched = total - sum(map(len, block_map.values()))
            title += f" of {total:,}, {untouched:,} never taken so far"
        return plot_block_map(block_map, title, ax)

    def plot_timeline(self, unit: str = "steps", ax: Any = None, max_requests: int = MAX_REQUESTS) -> Any:
        """As `plot_memory`, who was in the batch when, over `unit` (`"steps"` or `"seconds"`), a row for each of the
        last `max_requests` requests: prefill, decode, recompute; waiting, preempted, swapped out; of each step that
        verified a draft, how many tokens it had and how many were accepted. It is drawn from `timeline.intervals()` and
        `timeline.verifications()`, the last thousands. Raises `ValueError` for another unit or fewer than 1 request."""
        with self._core.lock:
            intervals, verifications = self.timeline.intervals(), self.timeline.verifications()
        return plot_intervals(intervals, unit, ax, max_requests, verifications)

    def _repr_html_(self) -> str:
        return engine_html(f"PagedEngine({type(self.model).__name__})", self.stats(), self.block_map())

    def save_prefix(
        self,
        prompt: Prompt,
        path: str | os.PathLike[str],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """
        Writes the keys and values of a prompt to a safetensors file, for `load_prefix` of this engine or of one on the
        same model in another process. What of them is not cached is computed, with one token behind it. Returns how
        many tokens are in the file, those of the prompt's whole blocks.

        Args:
            prompt (as in `add_request`): Token ids, text, or the messages of a chat.
            path (`str` or path): The file, which is replaced if it is there, in one go.
            adapter, cache_salt (`str`, *optional*): Those of the requests that it is to serve, as in `add_request`.

        Raises:
            ValueError: for a prompt of less than a block, or of more than token ids; for a model whose prefixes are
                not cached, or have states (linear attention).
            OutOfBlocksError: if the pool does not hold the prompt.
            OSError: if the file cannot be written.
        """
        text, inputs = split_inputs(prompt, None)
        if inputs is not None:
            raise ValueError(f"`prompt` has {', '.join(map(str, inputs))} beside token ids: such a prefix is not saved")
        ids = prompt_ids(text, self.tokenizer)
        one = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
        target = saved_to(path)
        with self._core.keeping_pool():
            (result,) = self.generate([ids], one, adapter=adapter, cache_salt=cache_salt)
            if result.error is not None:
                raise result.error
            own = adapter_namespace(resolve_adapter(self.model, adapter))
            return save(self._core, ids, (own, cache_salt or self.config.cache_salt), target)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """
        Brings the blocks of a file of `save_prefix` into the pool, where they are cached like any prefix: later
        requests with its adapter and cache salt that begin with its tokens find them. Returns how many tokens they
        hold.

        Raises:
            ValueError: for a file that is not whole, or that another model computed (other weights, code, dtype,
                adapters, `block_size` or `batch_invariant`).
            OutOfBlocksError: if the pool has no room.
            OSError: if the file cannot be read.
        """
        return load(self._core, path)

    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values kept of finished requests."""
        with self._core.lock, self.memory.lock:
            if self._core.loop is not None:
                self._core.loop.blocks.drop_cached()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pools, block tables and reference counts agree."""
        with self._core.lock, self.memory.lock:
            self.memory.check_integrity()
            if self._core.loop is not None:
                self._core.loop.blocks.check_integrity()

    def free(self) -> None:
        """Cancels every request and gives every byte back. The engine can be used again."""
        with self._core.lock:
            for state in list(self._core.requests.values()):
                self._core.end(state, "cancelled")
            self._core.retire()
        trim()

    def __exit__(self, *error: object) -> None:
        try:
            self.free()
        finally:
            if self._core.leader is not None:
                self._core.leader.close()

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"PagedEngine({type(self.model).__name__}, {stats.num_running} running, {stats.num_waiting} waiting, "
            f"{stats.used_blocks} blocks used)"
        )
