"""`PagedEngine`: continuous batching of many requests on one model. `engine_core.py` manages the
requests, and `arguments.py` checks most arguments."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncGenerator, Generator, Hashable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from transformers import GenerationConfig, PreTrainedModel

from ..cache.free_memory import trim
from ..cache.storage import fit_blocks
from ..config import PagedConfig
from ..interrupts import ensure_done, guarded, restoring
from ..model.forwards import compute_device
from ..model.registry import check_tiers
from ..model.wrappers import resolve_adapter, unwrap_model
from ..rooms import TiersRoom, room
from ..seams import DEFAULT_PARTS, EngineParts
from .arguments import (
    RequestOptions,
    check_generates,
    check_path,
    check_tokenizer,
    reject_engine_arguments,
    reject_request_arguments,
    reject_tokenizer_as_config,
)
from .engine_core import EngineCore
from .engine_reports import EngineReports
from .pauses import Pause
from .prompt_forms import Prompt
from .results import RequestOutput, RequestResult
from .streams import RequestStream

_ONE_TOKEN = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}


class PagedEngine(EngineReports, contextlib.AbstractContextManager["PagedEngine", None]):
    """Runs many requests at once, with iteration-level scheduling (Orca, OSDI'22) over blocks of
    K/V (PagedAttention, arXiv 2309.06180). Each request gets the tokens that `model.generate` gives
    for its prompt alone.

    You may change the model between calls and between steps: later requests reuse no K/V computed
    with other weights. Unfinished requests keep their K/V; `weights_update` can recompute them. Add
    forward hooks, dropout, attention functions, or code that depends on shapes, only while no
    request is unfinished: when the first request is added, the engine decides whether the model
    runs packed, and a later change may give wrong tokens to unfinished and new requests. The engine
    is thread-safe. A thread that changes the model while other threads take steps must do so within
    `weights_update` or `pause`.

    Args:
        model ([`PreTrainedModel`] or a wrapper of one): A decoder-only or encoder-decoder model.
            For a wrapper (PEFT, `torch.compile`, `DataParallel`, `DistributedDataParallel`), the
            engine runs the wrapped model.
        config ([`PagedConfig`] or `dict`, *optional*): Block size, budgets, preemption.
        tokenizer (*optional*): Needed for text prompts, stop strings, and text in the results.
        parts ([`hf_paged.seams.EngineParts`], *optional*): Your own parts, which replace those that
            the config selects.

    Raises:
        ValueError: for a model that cannot generate, is on the meta device, or was sharded by FSDP;
            for a model that only `generate` serves (an encoder-decoder model with a custom cache, a
            model with states in its modules, PEFT's prompt learning and X-LoRA); for a sharded
            model in any process except process 0 (`hf_paged.serve_rank`); for a tokenizer's name
            instead of a tokenizer; for a tokenizer as `config`.
        TypeError: for unknown arguments, such as config options passed outside the config. Pickling
            or copying an engine also raises it.
        OSError: if the folder of `prefix_tiers` cannot be created, listed or entered.

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
        parts: EngineParts = DEFAULT_PARTS,
        **unknown: Any,
    ) -> None:
        reject_engine_arguments(unknown)
        reject_tokenizer_as_config(config)
        self.model: PreTrainedModel = unwrap_model(model)
        check_generates(self.model)
        check_tokenizer(tokenizer)
        requested = PagedConfig.coerce(config, "config")
        self.config = fit_blocks(requested, self.model.config, compute_device(self.model))
        check_tiers(self.config)
        self.tokenizer = tokenizer
        self._core = EngineCore(self.model, self.config, parts)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        config: PagedConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        **load_kwargs: Any,
    ) -> PagedEngine:
        """Loads a model from a folder or the Hub, through transformers, and makes its engine.

        Args:
            name_or_path (`str` or path): A model, or a PEFT adapter, which is loaded with its base
                model.
            config ([`PagedConfig`] or `dict`, *optional*): The engine's config.
            tokenizer (*optional*): Default: the tokenizer that is saved with the model, if any.
            load_kwargs: Arguments of the model's `from_pretrained`: `dtype`, `device_map`,
                `quantization_config`, `revision`, `attn_implementation`, ...

        Raises:
            OSError, TypeError, ValueError: as transformers' `from_pretrained` and [`PagedEngine`]
                do.
        """
        # all checks that need no model come before the load
        fields = PagedConfig.__annotations__
        reject_engine_arguments(
            {name: value for name, value in load_kwargs.items() if name in fields}
        )
        reject_tokenizer_as_config(config)
        config = PagedConfig.coerce(config, "config")
        check_tokenizer(tokenizer)
        check_path(name_or_path)
        tools = room("tools", "`PagedEngine.from_pretrained`")
        model = tools.load_model(name_or_path, **load_kwargs)
        if tokenizer is None:
            tokenizer = tools.load_tokenizer(name_or_path, model, **load_kwargs)
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
        **unknown: Any,
    ) -> str:
        """Queues a request, which later steps compute, and returns its id. In this call, the model
        runs only for checks (if it is new or has changed), and to encode some `inputs`.

        Args:
            input_ids (`list[int]`, `torch.Tensor`, `str`, `list[dict]`, or a mapping): The prompt,
                which goes to the encoder if the model has one. A tensor has shape `(length,)` or
                `(1, length)`. A list of dicts is a chat, `[{"role": "user", "content": ...},
                ...]`, rendered with the tokenizer's chat template. A mapping is the output of a
                tokenizer or processor for one text, with its images or audio.
            inputs (`dict`, *optional*): The inputs of one prompt, besides or instead of token ids,
                as the model's `generate` takes them: `{"pixel_values": ..., "image_grid_thw": ...}`
                for images, `{"input_features": ...}` for audio. This call runs the encoder of an
                encoder-decoder model; vision towers run with the prefill, or in this call if the
                model does not run packed. Prompts that differ only in text, length and float inputs
                can share one prefill forward.
            generation_config ([`GenerationConfig`] or `dict`, *optional*): Overrides the model's
                own, as in `generate`. A dict acts as `generate`'s keyword arguments:
                `{"eos_token_id": None}` disables EOS. `max_time` (seconds) counts from the first
                step that runs the request.
            request_id (`str`, *optional*): An id that no unfinished request has. Default: a
                generated id.
            priority (`int`, at most 2**31 - 1 in absolute value): Lower runs earlier. A request
                whose priority is lower by 1 overtakes up to 256 earlier arrivals.
            logits_processor, stopping_criteria (lists, *optional*): As in `generate`, over this
                request's rows.
            streamer (*optional*): As in `generate`. It gets the prompt in this call. Its `end` is
                called when the request ends, even with an error.
            adapter (`str` or path, *optional*): The PEFT adapter to run with: the name of a loaded
                adapter, `"__base__"` for none, or a folder with a LoRA adapter, whose weights are
                loaded on demand into memory of the block pool. Default: the active adapter. Rows
                with different LoRA adapters share forwards.
            seed (`int` from -2**63 to 2**64 - 1, *optional*): Draws as `generate` does after
                `torch.manual_seed(seed)`.
            return_logprobs (`bool`): Records log-probabilities of the new tokens, under the model
                and under the distribution from which they were chosen ([`SequenceResult`]).
            top_logprobs (`int`): Number of the most probable tokens to record at each position, for
                `return_logprobs` and `prompt_logprobs`.
            prompt_logprobs (`bool`): Records log-probabilities of the prompt's tokens
                ([`RequestResult`]). The whole prompt is then computed: the request neither uses nor
                fills the prefix cache.
            cache_salt (`str`, *optional*): Replaces the `cache_salt` of [`PagedConfig`] for this
                request. Requests with different salts share no cached prefix.
            schema (`dict`, JSON as `str`, or a pydantic model's class, *optional*): Restricts the
                new tokens to JSON that this schema allows, followed by EOS. Like `regex` and
                `grammar`, needs xgrammar, which the extra `structured` installs.
            regex, grammar (`str`, *optional*): Restricts the new tokens to text that this regular
                expression matches, or that this grammar (GBNF, start rule `root`) derives. A
                request has at most one of `schema`, `regex` and `grammar`.
            assistant_model ([`PreTrainedModel`], *optional*): As in `generate`: a smaller model
                drafts tokens, and one forward verifies several of them. Rows with the same
                assistant are drafted together, in blocks of this engine's memory, and share steps
                with rows that have no assistant. The assistant does not change the tokens of greedy
                requests, nor the distribution of sampled ones (speculative sampling, arXiv
                2211.17192). `prompt_lookup_num_tokens` and `assistant_early_exit` of the generation
                config also work.
            assistant_tokenizer (*optional*): The assistant's tokenizer, if its tokens differ from
                the model's; the engine then needs its own `tokenizer`.

        Raises:
            ValueError: for an empty prompt, ids outside the vocabulary (except the config's ids for
                images and other media, if `inputs` has media), messages without a chat template, an
                id in use, an unknown adapter, or an adapter that only PEFT's own `generate`
                computes (aLoRA, Poly); for arguments of the wrong type or outside their limits; for
                options that contradict each other, that only `generate` serves or that the engine's
                config decides; if the autocast dtype or the layers' windows have changed while
                requests are unfinished; for a schema, expression or grammar that cannot be
                compiled, or if the model has no EOS token to end its text.
            TypeError: for unknown arguments, such as generation options outside
                `generation_config`.
            ImportError: for a schema, expression or grammar, if xgrammar is not installed.
            OutOfBlocksError: if the request needs more blocks than there can ever be.
            IndexError: for a prompt that is longer than the table of positions of the model (such
                as GPT-2 or OPT).
        """
        reject_request_arguments(unknown)
        options = RequestOptions(
            request_id=request_id,
            priority=priority,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            adapter=adapter,
            seed=seed,
            return_logprobs=return_logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            cache_salt=cache_salt,
            inputs=inputs,
            schema=schema,
            regex=regex,
            grammar=grammar,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
        )
        return self._core.add(self.tokenizer, input_ids, generation_config, options)

    @guarded
    def cancel(self, request_id: str) -> None:
        """Ends a request and frees its blocks. The request's last output holds the result, with the
        tokens so far. Raises `ValueError` if no unfinished request has that id."""
        core = self._core
        with core.lock:
            state = core.requests.get(request_id)
            if state is None:
                unfinished_ids = ", ".join(map(repr, core.requests)) or "none"
                raise ValueError(
                    f"no unfinished request has the id {request_id!r}; unfinished ids:"
                    f" {unfinished_ids}"
                )
            core.cancel(state)

    def step(self) -> list[RequestOutput]:
        """Takes a step: computes the requests that fit, and samples the next token of each sequence
        whose prompt is computed (several tokens with drafts). Returns the outputs of requests added
        with `add_request`; `generate` and `stream` read their own requests' outputs. Also returns
        the outputs of steps that other threads have taken since the last call: all outputs with a
        result, and the last 16,384 others (the results hold the tokens of dropped outputs).

        You may change the model between two steps. A quick check in each step notices changes of
        attributes, hooks, forwards, adapters and whole weights. Before cached blocks of earlier
        steps are reused, a fingerprint (which takes about as long as a decode step) notices changes
        of a few elements. Both may miss a change of weights that is undone while requests are
        unfinished: use `weights_update`.

        Waits while another thread has paused the engine. Raises `RuntimeError` if this thread has
        paused it. Raises the error of a step that cannot be completed, such as `OutOfBlocksError`
        while other calls or models hold the blocks, or `EngineStalledError`; the next call repeats
        that step. If the step fails again, the call raises nothing: the requests that the step
        would compute (the running ones; if none runs or blocks are too few, the first waiting one)
        end with the error, and the others continue.
        """
        return self._core.take_step()

    def generate(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[RequestResult]:
        """Returns the results of all prompts, in order. The result of a failed request holds its
        error, and one warning gives the number of failed requests and the first error. A step that
        raises is repeated once, with a warning; if it raises again, its requests end with the
        error, as in `step`.

        Args:
            prompts (iterable of prompts, or a mapping): Each as in `add_request`. Rows of a 2-D
                tensor are used as they are, padding included, unless a mask is given. A mapping is
                a tokenizer's output for several texts: `input_ids`, and an optional
                `attention_mask` that marks their padding. With images or audio, pass a list of
                mappings, one per prompt.
            generation_config ([`GenerationConfig`], `dict`, or a list of them, *optional*): One for
                all prompts, or a list with one per prompt.
            attention_mask (`torch.Tensor`, *optional*): For `prompts` as a 2-D tensor, a mask of
                the same shape. Zeros mark padding on the left or right, which is removed.
            progress (`bool`, *optional*): Whether to show a progress bar (tqdm). `None`: in a
                terminal or notebook, once the call has taken 2 seconds.
            options: Arguments of `add_request`, for all prompts: `priority`, `logits_processor`,
                `stopping_criteria`, `adapter`, `seed`, `return_logprobs`, `top_logprobs`,
                `prompt_logprobs`, `cache_salt`, `schema`, `regex`, `grammar`, `assistant_model`,
                `assistant_tokenizer`; with a single prompt also `request_id`, `streamer` and
                `inputs`. `adapter`, `cache_salt`, `grammar`, `priority`, `regex`, `schema` and
                `seed` may be lists with one value per prompt; with a single seed `s`, prompt `i`
                draws with `s + i`.

        Raises:
            TypeError: for options that `add_request` does not have.
            ValueError: for a single prompt instead of a list; for a wrong number of configs or of
                an option's values; for a mask of another shape, or with zeros between tokens; for a
                mapping of several rows with inputs besides token ids; for `request_id`, `streamer`
                or `inputs` with several prompts.
            RuntimeError: if this thread has paused the engine, or another one has freed it during
                the call.
            RankLostError: if a process that holds a shard of the model has ended.
        """
        return RequestStream(
            self._core, self.tokenizer, options, prompts, generation_config, attention_mask
        ).results(progress)

    def stream(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        **options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """Yields the outputs of all prompts as they become available. Generated request ids are
        numbered in the order of the prompts. Closing the iterator cancels unfinished requests,
        after the step in progress, if any. The arguments and errors are as in `generate`; there
        is no progress bar."""
        return RequestStream(
            self._core, self.tokenizer, options, prompts, generation_config, attention_mask
        ).stream()

    def astream(
        self,
        prompts: Iterable[Prompt],
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The asynchronous version of `stream`: steps run in worker threads, and several streams
        share them. A cancelled reader returns at once; its requests end after the step in
        progress."""
        return RequestStream(
            self._core, self.tokenizer, options, prompts, generation_config, attention_mask
        ).astream()

    def pause(self) -> Pause:
        """Waits for the step in progress, then blocks further steps until `resume` or the end of
        `with engine.pause():`. Requests may be added meanwhile. `step`, `generate` and `stream`
        wait in other threads, and raise `RuntimeError` in this one; `astream`, whose steps run in
        worker threads, always waits. If several threads pause, steps continue once all of them have
        resumed."""
        return self._core.pauses.begin(is_persistent=True)

    def resume(self) -> None:
        """Ends one pause, preferably of this thread. Raises `RuntimeError` if there is none."""
        self._core.pauses.end()

    @restoring
    def weights_update(self, policy: str = "recompute") -> Iterator[None]:
        """A context that pauses the engine, so that any thread may change the model. When the
        context ends, even with an exception, earlier cached blocks are dropped. If `step` detects
        changes made outside of this context, it acts as with `"keep"`.

        Args:
            policy (`str`): How unfinished requests continue. They always keep their tokens.
                `"recompute"`: their K/V are computed again with the new weights, as after a
                preemption. `"keep"`: they keep their K/V, and only tokens computed later use the
                new weights. Any other value raises `ValueError`.
        """
        if policy not in ("recompute", "keep"):
            raise ValueError(f"`policy` is {policy!r}: it must be one of 'recompute', 'keep'")
        change = functools.partial(self._core.handle_weight_change, policy == "recompute")
        with self._core.pauses.begin():
            try:
                yield
            finally:
                ensure_done(change)

    @guarded
    def save_prefix(
        self,
        prompt: Prompt,
        path: str | os.PathLike[str],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Writes the K/V of a prompt to a safetensors file that only its owner can read (mode
        600). `load_prefix` loads the file into this engine, or into an engine of the same model in
        another process. First generates one token, to compute the blocks that are not cached.
        Returns the number of tokens in the file, which holds the prompt's full blocks.

        Args:
            prompt (as in `add_request`): Token ids, text, or the messages of a chat.
            path (`str` or path): The file; an existing file is replaced atomically.
            adapter, cache_salt (`str`, *optional*): As in `add_request`, for the requests that will
                use the prefix.

        Raises:
            ValueError: for a prompt shorter than a block, with inputs besides token ids, or with
                rotary factors that depend on its length; for a model whose prefixes are not cached,
                with states (linear attention), or in shards; as in `add_request`.
            OutOfBlocksError: if the pool cannot hold the prompt.
            OSError: if the file cannot be written.
        """
        tiers: TiersRoom = room("tiers", "`save_prefix`")

        def compute(ids: list[int]) -> tuple[Hashable, ...]:
            (result,) = self.generate(
                [ids], _ONE_TOKEN, progress=False, adapter=adapter, cache_salt=cache_salt
            )
            if result.error is not None:
                raise result.error
            namespace = resolve_adapter(self.model, adapter).namespace
            return namespace, cache_salt or self.config.cache_salt

        return tiers.save(self._core, prompt, self.tokenizer, compute, path)

    @guarded
    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Loads the blocks of a `save_prefix` file into the prefix cache. Later requests with the
        same adapter and cache salt reuse them if their prompts begin with the saved tokens. Returns
        how many tokens the blocks hold.

        No code in the file is run (it is safetensors, not pickle). The file's size is checked
        against this model before its blocks are read; its layers, shapes, dtypes, tokens and hash
        are checked before the blocks are used. The checks detect damage, not forgery: someone who
        can write the file can cause wrong tokens, for any prompt, adapter and cache salt. Load only
        files that you trust.

        Raises:
            ValueError: for an incomplete file or another kind of file; for a prefix computed by
                another model (other weights, code, dtype, adapters, `block_size`, `kv_dtype` or
                `batch_invariant`); for a model whose prefixes `save_prefix` rejects; with
                `idle_release_seconds=0`, no tier and no unfinished request, since the pool would be
                freed at once.
            OutOfBlocksError: if the pool has too few free blocks.
            OSError: if the file cannot be read.
        """
        tiers: TiersRoom = room("tiers", "`load_prefix`")
        return tiers.load(self._core, path)

    @guarded
    def reset_prefix_cache(self) -> None:
        """Empties the pool's prefix cache; `prefix_tiers` keep their verified blocks. Unfinished
        requests keep their blocks, which later requests do not reuse."""
        with self._core.lock, self.memory.changing():
            if self._core.loop is not None:
                self._core.loop.blocks.drop_cached()

    @guarded
    def free(self) -> None:
        """Cancels every request and frees the engine's memory. The engine can be used again."""
        ensure_done(self._core.free)
        trim()

    @guarded
    def __exit__(self, *error: object) -> None:
        try:
            self.free()
        finally:
            if self._core.leader is not None:
                self._core.leader.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a `PagedEngine` cannot be pickled or copied, since its blocks and locks belong to this"
            " process: make an engine in each process, from the model"
        )
