"""One `generate` call: the caches that it builds, the attention that it switches, and its rows on the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .. import compat
from ..attention.backends import obstacles
from ..attention.latent import wrap_expansions
from ..attention.masks import PagedMask, mask_observer
from ..attention.switch import compiled_layers, foreign_attention, switchable_configs, use_paged_attention
from ..batching.decoding.base import Decoding, LoopInputs
from ..batching.decoding.beam import BeamDecoding
from ..batching.decoding.prepare import capturing
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import are_row_wise
from ..batching.decoding.speculation import Assistance
from ..batching.execution.adapters import adapter_names, without_adapter_names
from ..batching.execution.prompts import Prompts, is_unset, prompts_of, unshared
from ..batching.factory import (
    UNLIMITED,
    check_prompts,
    choose_layout,
    empty_cache,
    how_rows_join,
    make_loop,
    max_positions,
    not_invariant,
    reason_against_assistance,
    reason_against_rows,
)
from ..batching.generation import Generation
from ..batching.loop import StepLoop
from ..batching.request import Request, Sequence
from ..batching.shared_loop import shared_loop
from ..cache.block_manager import UNCACHED
from ..cache.block_pool import OutOfBlocksError
from ..cache.idle import end_use
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..compiled import running_eagerly
from ..config import PagedConfig
from ..model.capability import TOGETHER, Layout, is_stock
from ..model.forwards import compute_device
from ..model.own_loop import cache_parts
from ..model.ranks import is_sharded
from ..model.registry import note_route, route_of, warn_once
from ..model.rope import find_length_rope
from ..step import ReadCounters

logger = logging.getLogger(__name__)

# Computing fewer tokens takes about as long as fingerprinting all weights, which the prefix cache needs.
MIN_CACHED_TOKENS = 128
# Running fewer steps without replay takes no longer than reading the model's state, which replays need.
MIN_REPLAYED_STEPS = 16
# Model inputs that the engine handles or ignores; `labels` too, where transformers' stock code drops them.
_KNOWN_INPUTS = {*compat.CACHE_NAMES, "use_cache", "logits_to_keep", "tokenizer", "attention_mask", "position_ids"}


def rows_per_prompt(config: GenerationConfig) -> int:
    """The number of rows that `generate` expands each prompt to."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


def first_rows(value: Any, repeats: int) -> Any:
    """Every `repeats`-th row of a tensor, or of the tensors in a `ModelOutput`; `None` if the rows between differ."""
    if isinstance(value, ModelOutput):
        parts = {name: first_rows(part, repeats) for name, part in value.items()}
        return None if any(part is None for part in parts.values()) else type(value)(**parts)
    if not isinstance(value, torch.Tensor) or value.shape[0] % repeats:
        return None
    groups = value.unflatten(0, (-1, repeats))
    return groups[:, 0].contiguous() if bool((groups == groups[:, :1]).all()) else None


class Call:
    """Caches and settings of one `generate` call, undone when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stack = contextlib.ExitStack()
        self.memory: PagedMemory | None = None  # the model's, if the call uses it
        self.built: list[PagedCache] = []
        self.caches: list[PagedCache] = []  # those in `built`, or the caller's
        self.counters: list[ReadCounters] = []  # how keys and values of the caches were read
        self.repeats = 1
        self.unexpanded: tuple[torch.Tensor, dict[str, Any]] | None = None  # ids and inputs before rows were repeated
        self.swaps_pictures = False  # whether repeated rows got images of other rows
        self.road, self.reason = "plain", "cache_implementation is not 'paged'"
        self.remedy: str | None = None  # if a paged cache was asked for: how the call gets one
        self.reads_in_place = self.is_running = False
        self.foreign: str | None = None  # why the model's own code reads keys and values
        self.slowed_by: set[str] = set()  # reasons from the kernels
        self.details: dict[str, Any] = {"is_packed": False}  # for `route_of`

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the call: undoes its switches at the end, and frees its caches if it fails. For use within `held`."""
        variables: dict[ContextVar[Any], Any] = {current: self, mask_observer: None, obstacles: self.slowed_by}
        try:
            with self.stack:
                for variable, value in variables.items():
                    self.stack.callback(variable.reset, variable.set(value))
                self.is_running = True
                if self.caches:
                    self._switch()
                yield
            if self.road == "plain" and self.remedy is not None and capturing.get() is None:
                warn_once(
                    self.model,
                    f'ran on another cache although cache_implementation="paged" was asked for: {self.reason}. '
                    f"{self.remedy}, or name no cache_implementation",
                )
        except BaseException:
            # free the caches now: the traceback keeps the frames alive that hold them
            for cache in self.built:
                cache.discard()
            raise
        finally:
            route = route_of(self.road, self._full_reason(), self.counters, self.slowed_by, **self.details)
            if capturing.get() is None:
                note_route(self.model, route)
            self.built, self.caches = [], []  # they may hold blocks
            if self.memory is not None:
                end_use(self.memory)
            logger.debug("%s.generate: %s", type(self.model).__name__, route)

    def _full_reason(self) -> str:
        """The reason, with how the model's own code got keys and values if it read them."""
        if self.foreign is None or self.road != "hf_loop":
            return self.reason
        are_views = any(x.in_place for x in self.counters) and not any(x.gathered for x in self.counters)
        how = "read where rows lie side by side" if are_views else "gathered"
        return f"{self.reason}; keys and values are {how}: {self.foreign}"

    def ask(self, reason: str, remedy: str) -> None:
        """Notes that a paged cache was asked for, why the call has none (yet), and what to change to get one."""
        self.reason, self.remedy = reason, remedy

    def use(self, caches: list[PagedCache], config: GenerationConfig, is_built: bool) -> None:
        """Makes the call store keys and values in `caches`, which attention reads in place; caches built for the call
        end with it."""
        self.road, self.repeats = "hf_loop", rows_per_prompt(config)
        self.reason = "paged cache under the model's own decoding loop"
        is_first = not self.caches
        self.caches += caches
        self.counters += [cache.counters for cache in caches]
        if is_built:
            self.built += caches
        else:
            self.reason = "the caller's PagedCache is used"
        if config.output_attentions:
            self.reason += "; the model's own attention runs, since only that returns its weights"
        else:
            self.reads_in_place = True
        if is_first and self.is_running:
            self._switch()

    def note_inputs(self, input_ids: torch.Tensor | None, model_kwargs: dict[str, Any]) -> None:
        """Notes the inputs that `generate` prepared before it repeats rows; only the first, outermost call counts."""
        if isinstance(input_ids, torch.Tensor) and self.unexpanded is None:
            self.unexpanded = input_ids, {name: unshared(value) for name, value in model_kwargs.items()}

    def _switch(self) -> None:
        modules = list(self.model.modules())
        self.stack.enter_context(running_eagerly(compiled_layers(modules)))
        if not self.reads_in_place:
            return
        wrap_expansions(modules)
        self.stack.enter_context(use_paged_attention(switchable_configs(modules)))
        if foreign := foreign_attention(modules):
            self.foreign = foreign
            return  # that code may attend to padding, so padding is stored, too
        self.stack.callback(mask_observer.reset, mask_observer.set(self._observe))

    def _observe(self, mask: PagedMask) -> None:
        """Finds the left padding in the model's causal mask: those positions need not be stored."""
        if not mask.pattern.causal or mask.arguments.get("q_offset", 0) != 0:
            return
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "cross_attention_layers", None):  # these layers do not hold the padded text
            return
        if (columns := mask.visible_columns) is None or any(end != mask.arguments["kv_length"] for end in columns[1]):
            return
        for cache in self.built:
            if cache.kind == "self" and cache.is_empty:
                cache.expect_padding(columns[0], mask.arguments["kv_length"])


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
# A call prepared by a model with an overridden `generate` that bypasses ours, to run with its decoding loop.
prepared: ContextVar[Call | None] = ContextVar("hf_paged_prepared_call", default=None)


def batch_of(call: Call, method: str, arguments: dict[str, Any]) -> BatchCall | None:
    """A call of a `GenerationMixin` method (by name) for the engine; `None`, with the reason noted, if the engine
    cannot serve it. Raises `ValueError` if `batch_invariant` is set then: only the engine supports it."""
    with contextlib.ExitStack() as stack:
        names = adapter_names(call.model)
        if names is not None:  # else PEFT would take them as adapters of a forward's rows, which differ from the call's
            stack.enter_context(without_adapter_names(call.model))
        batch = _batch_of(call, method, arguments, names)
        if batch is not None:
            call.stack.push(stack.pop_all())
    if batch is None and PagedConfig.coerce(arguments["generation_config"].cache_config).batch_invariant:
        raise not_invariant(call.model, call.reason)
    return batch


def _batch_of(call: Call, method: str, arguments: dict[str, Any], adapters: list[str] | None) -> BatchCall | None:
    given = arguments.get("model_kwargs", {})
    cache = next((given[name] for name in compat.CACHE_NAMES if given.get(name) is not None), None)
    uses_engine = method in (compat.SAMPLE, compat.BEAM_SEARCH, compat.ASSISTED_DECODING) and call.reads_in_place
    if not uses_engine or cache is None or not isinstance(own := cache_parts(cache)[0], PagedCache):
        return None
    if own not in call.built or not all(part.is_empty for part in cache_parts(cache)):
        return None
    crosses = [part for part in cache_parts(cache)[1:] if isinstance(part, PagedCache)]
    own.cross = crosses[0].empty_twin(own.memory, kind="cross") if crosses else None
    names = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
    inputs = LoopInputs(*(arguments[name] for name in names))
    batch = BatchCall(call, own, method == compat.BEAM_SEARCH, inputs, given, arguments.get("streamer"))
    batch.adapters = adapters
    if method == compat.ASSISTED_DECODING:
        model, tokenizer = arguments.get("assistant_model"), arguments.get("tokenizer")
        batch.assistance = Assistance(model, tokenizer, arguments.get("assistant_tokenizer"))
    reason = "synced_gpus" if arguments.get("synced_gpus") else next(batch.reasons_against(), None)
    if reason is not None:
        call.reason += f"; not on the engine: {reason}"
        return None
    call.road, call.reason = "engine", batch.layout.reason
    call.details = dict(is_packed=batch.layout.unsupported_reason is None, prefills_shared=call.repeats > 1)
    return batch


@dataclass
class BatchCall:
    """The arguments of `GenerationMixin._sample` or `_beam_search`, and how the engine serves them."""

    call: Call
    cache: PagedCache  # empty, built for the call
    uses_beams: bool
    inputs: LoopInputs  # each prompt `call.repeats` times
    model_kwargs: dict[str, Any]  # for the model's forward
    streamer: Any
    layout: Layout = field(default_factory=Layout)
    paddings: list[int] = field(default_factory=list)  # left padding of each row, once known to be supported
    has_inputs: bool = False  # whether prompts are more than token ids with consecutive positions
    can_reuse: bool = True  # whether prompts may begin with cached prefixes
    prompts: Prompts | None = None  # the prompts with their other inputs, once prepared
    assistance: Assistance | None = None  # of a call of transformers' `_assisted_decoding`
    adapters: list[str] | None = None  # one per row or per prompt, if the call names them

    def _find_prompts(self) -> Prompts | None:
        """Each prompt once; `None` if the model overrides how rows are repeated."""
        unexpanded = self.call.unexpanded
        if unexpanded is None and self.call.repeats == 1:
            unexpanded = self.inputs.input_ids, self.model_kwargs
        is_decoder = bool(self.call.model.config.is_encoder_decoder)
        return None if unexpanded is None else prompts_of(unexpanded, self.model_kwargs, is_decoder)

    def reasons_against(self) -> Iterator[str]:
        """Yields why the engine cannot serve the call: the first counts. If none, `paddings` and `layout` are set."""
        yield from self._reasons_against_batch()
        if self.adapters is not None:
            if self.layout.unsupported_reason is not None or self.has_inputs:
                yield "rows with adapters of their own are packed, or PEFT's"
            if len(self.adapters) not in (len(self.paddings), len(self.paddings) // self.call.repeats):
                yield "there is not one of `adapter_names` for each prompt"
        if self.assistance is not None and (reason := self._reason_against_drafts()) is not None:
            yield reason

    def _reason_against_drafts(self) -> str | None:
        """Why rows of a call that the engine serves cannot use assisted decoding."""
        config, num_rows = self.inputs.generation_config, len(self.paddings)
        if is_sharded(self.call.model):
            return "what proposes tokens would take its time by the clock of each process that holds a shard"
        if num_rows == 1 and (config.do_sample or self.streamer is not None):
            return "one row that draws, or streams several tokens at a time, as transformers' own loop does"
        if num_rows == 1 and not are_row_wise(self.inputs.logits_processor, num_rows):
            # such as guidance, whose cache then holds them
            return "a processor that may keep a state sees refused candidates too, as in transformers' own loop"
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return "scores are kept"
        if self.layout.reason_against_drafts is not None or self.has_inputs:
            return self.layout.reason_against_drafts or "prompts are more than token ids"
        if find_length_rope(self.call.model, self.call.model.modules()) is not None:
            return "rotary factors depend on a row's length"
        if num_rows > 1 and not SampleDecoding(self.inputs, self.streamer).can_split:
            return "a caller's own code sees all rows at once"
        return reason_against_assistance(self.call.model, config, self.assistance or Assistance())

    def _reasons_against_batch(self) -> Iterator[str]:
        config, given, repeats = self.inputs.generation_config, self.model_kwargs, self.call.repeats
        if torch.is_grad_enabled():  # in `generate` without its decorators
            yield "gradients are recorded"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            yield "attentions or hidden states are asked for"
        if not given.get("use_cache", True):  # transformers' loop then sends all tokens in every step
            yield f"use_cache is {given['use_cache']!r}"
        if config.is_assistant or config.prefill_chunk_size is not None or config.low_memory:
            yield "is_assistant, prefill_chunk_size or low_memory is set"
        if config.max_time is not None and is_sharded(self.call.model):
            yield "`max_time` ends rows by the clock of each process that holds a shard"
        if self.call.swaps_pictures:
            yield "transformers repeats each picture by itself, and not each row's pictures together"
        reason = next(self._reasons_against_joining(), None)
        if reason is None:
            if self.has_inputs and self._config.batch_invariant:
                yield "prompts are more than token ids"
            return
        if self._config.batch_invariant:
            yield reason
        self.prompts = prompts = self.prompts or self._find_prompts()
        if prompts is None:
            yield f"{reason}, and the model repeats rows in a way of its own"
            return
        if config.return_dict_in_generate:
            yield f"the cache is returned, and {reason}"
        if repeats > 1 and prompts.input_ids.shape[0] * repeats != self.inputs.input_ids.shape[0]:
            yield f"{reason}, and the rows of a prompt are not told apart"
        why = reason_against_rows(self.call.model, self.cache, prompts)
        if why and any(prompts.paddings):  # a model may attend to padding
            prompts.paddings = [0] * len(prompts.paddings)
            why = reason_against_rows(self.call.model, self.cache, prompts)
        if why:
            yield why if why in reason else f"{reason}, and {why}"
        prompts.set_joins(how_rows_join(self.call.model, self.cache, prompts))
        count = max_positions(self.call.model, self.cache, prompts)
        self.has_inputs, self.layout = True, TOGETHER._replace(unsupported_reason=reason, max_positions=count)
        self.paddings = [padding for padding in prompts.paddings for _ in range(repeats)]

    def _reasons_against_joining(self) -> Iterator[str]:
        """Yields why rows can neither be packed nor run beside those of other calls. If none, `paddings`, `layout` and
        `has_inputs` are set."""
        yield from self._reasons_against_prompts()
        what = self._other_inputs()
        self.layout = choose_layout(self.call.model, self.cache, self._config.batch_invariant)
        reason = self.layout.unsupported_reason
        if what is not None:
            self.prompts = prompts = self._find_prompts()
            if prompts is None:
                yield what
            elif reason is None:
                prompts.find_positions(self.call.model)
                reason, self.can_reuse = check_prompts(self.call.model, self.cache, prompts)
            self.has_inputs = True
            if reason is not None:
                yield f"{what}, and {reason}"
        if reason is None:
            if not self.layout.mixed_lengths and any(self.paddings):
                yield "padding changes what its rows give"
            if self._outgrows_table():
                yield "only forwards that are not packed make its table of positions longer"
            if self._shares_factors():
                yield "the longest row decides the rotary factors of all"
            return
        if not self.layout.side_by_side:
            yield reason
        if self.inputs.generation_config.return_dict_in_generate:
            yield reason
        if not self.layout.mixed_lengths and any(self.paddings):
            yield f"padding changes what its rows give, and {reason}"

    def _reasons_against_prompts(self) -> Iterator[str]:
        """Yields why the prompts are not rows of tokens with left padding alone. If none, `paddings` is set."""
        given, repeats = self.model_kwargs, self.call.repeats
        if self.call.model.config.is_encoder_decoder:
            yield "the model has an encoder"
        if (keep := given.get("logits_to_keep")) is not None and not (isinstance(keep, int) and keep == 1):
            yield "logits_to_keep is set"
        ids, mask, positions = self.inputs.input_ids, given.get("attention_mask"), given.get("position_ids")
        if ids.dim() != 2 or not ids.shape[1] + self.num_unseen:
            yield "there are no token ids"
        if self.num_unseen and ids.shape[1]:
            yield "there is not one token id for each of the `inputs_embeds`"
        shape = torch.Size((len(ids), ids.shape[1] + self.num_unseen))
        mask = torch.ones(shape, dtype=torch.bool, device=ids.device) if mask is None else mask != 0
        if mask.shape != shape:
            yield "the attention mask has another shape than the token ids"
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
            yield "the attention mask hides more than padding on the left"
        if positions is not None and (positions.dim() not in (2, 3) or positions.shape[-1] != shape[1]):
            yield "the position ids are not one a token"
        if repeats > 1 and any(first_rows(value, repeats) is None for value in (ids, mask)):
            yield "the rows of a prompt differ"
        self.paddings = (~mask).sum(-1).tolist()

    def _other_inputs(self) -> str | None:
        """What the prompts have beyond token ids with consecutive positions; `None` if nothing."""
        given = self.model_kwargs
        known = _KNOWN_INPUTS | ({"labels"} if is_stock(self.call.model, "prepare_inputs_for_generation") else set())
        if other := [name for name, value in given.items() if name not in known and not is_unset(value)]:
            return f"model inputs other than token ids: {', '.join(sorted(other))}"
        if (positions := given.get("position_ids")) is not None:  # (rows, length), or with axes in front
            columns = torch.arange(positions.shape[-1], device=positions.device)
            counted = columns - torch.tensor(self.paddings, device=positions.device)[:, None]
            if bool(((positions != counted) & (counted >= 0)).any()):
                return "the position ids do not count a row's tokens"
        return None

    def _outgrows_table(self) -> bool:
        """Whether a row may need more positions than the model's table has in packed forwards."""
        most = self.layout.max_positions
        if most is None or not self.layout.grows_unpacked:
            return False
        longest = self.inputs.generation_config.max_length + self.num_unseen - min(self.paddings)
        return longest > most + 1

    def _shares_factors(self) -> bool:
        """Whether rows of different lengths would get other rotary factors than each gets alone."""
        rope = find_length_rope(self.call.model, self.call.model.modules()) if any(self.paddings) else None
        if rope is None:
            return False
        max_length = self.inputs.generation_config.max_length + self.num_unseen
        shortest = self.inputs.input_ids.shape[1] + self.num_unseen - max(self.paddings)
        return rope.factors(shortest) != rope.factors(max_length)

    @property
    def num_unseen(self) -> int:
        """The number of tokens of each prompt that are given as embeddings only, without token ids."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if embeds is None or self.call.model.config.is_encoder_decoder:
            return 0
        return int(embeds.shape[1] - self.inputs.input_ids.shape[1])

    def _tokens(self, ids: torch.Tensor, row: int) -> list[int]:
        """Token ids of a row of `ids` without padding, 0 for each token given as an embedding."""
        unseen, padding = self.num_unseen, self.paddings[row]
        return [0] * max(0, unseen - padding) + ids[row, max(0, padding - unseen) :].tolist()

    def run(self) -> Any:
        """Returns or raises what `_sample` or `_beam_search` would have. For use within `interrupts.held`."""
        model, inputs = self.call.model, self.inputs
        decoding: Decoding = BeamDecoding(model, inputs) if self.uses_beams else SampleDecoding(inputs, self.streamer)
        # the prefix cache pays off if it can save more time than fingerprinting the weights takes
        keeps_prefixes = len(self.paddings) * decoding.max_length >= MIN_CACHED_TOKENS
        replays = keeps_prefixes or decoding.max_length - decoding.length >= MIN_REPLAYED_STEPS
        generation = self._generation(decoding, keeps_prefixes)
        self._let_speculate(generation)
        self.call.built.clear()  # the loop may take over these caches
        make = functools.partial(self._make_loop, self.cache)
        with shared_loop(self.cache.memory, self._loop_key(), make) as shared:
            executor, finish = shared.loop.executor, functools.partial(self._result, generation)
            try:
                return shared.run(generation, keeps_prefixes, replays, finish, self._make_loop)
            finally:
                self.call.details["num_captured_steps"] = executor.runner.num_captured_steps
                found = [part.speculation for part in generation.parts or [generation] if part.speculation is not None]
                self.call.details["num_draft_tokens"] = sum(each.num_proposed for each in found)
                self.call.details["num_accepted_tokens"] = sum(each.num_accepted for each in found)
                self.call.counters.append(executor.runner.counters)
                self.call.slowed_by |= executor.slowed_by

    def _let_speculate(self, generation: Generation) -> None:
        """Sets up speculation: rows with drafts are split to advance separately. N-grams are used only where that
        changes no random draw."""
        decoding, is_alone = generation.decoding, len(generation.rows) == 1
        assistance = self.assistance
        if is_sharded(self.call.model):  # its processes would measure different times
            return
        if assistance is None and self._config.speculation == "ngram" and self.layout.reason_against_drafts is None:
            can_speculate = isinstance(decoding, SampleDecoding) and not self.has_inputs
            if can_speculate and (is_alone or (generation.can_split and not decoding.do_sample)):
                assistance = Assistance(ngrams=True)
        generation.assistance = assistance
        if assistance is not None and not is_alone:
            generation.split()

    def _make_loop(self, cache: PagedCache | None = None) -> StepLoop:
        cache = self.cache.empty_twin(self.cache.memory) if cache is None else cache
        return make_loop(self.call.model, cache, self.layout, self._config, max_num_seqs=UNLIMITED)

    @property
    def _config(self) -> PagedConfig:
        """The config of this call: the memory's config may be that of another thread's call."""
        return PagedConfig.coerce(self.inputs.generation_config.cache_config)

    def _loop_key(self) -> Hashable:
        """A key: calls with equal keys can share a forward, whichever thread computes it."""
        device = compute_device(self.call.model)
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        return (
            dataclasses.replace(self._config, cache_salt=None, idle_release_seconds=None),
            self.layout,
            tuple(self.cache.groups),
            self.call.model.training,
            autocast_dtype(device),
            torch.is_inference_mode_enabled(),
            torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None,
            threading.get_ident() if modes else None,  # modes of torch's overrides belong to a thread
        )

    def _generation(self, decoding: Decoding, keeps_prefixes: bool) -> Generation:
        inputs, repeats, prompts = self.inputs, self.call.repeats, self.prompts if self.has_inputs else None
        keys = None
        if keeps_prefixes and self.has_inputs and self.can_reuse and self.prompts is not None:
            keys = self.prompts.keys(self.call.model.config)
        rows: list[tuple[Request, int]] = []
        for row in range(0, len(self.paddings), repeats):
            tokens = self._tokens(inputs.input_ids, row)
            max_num_tokens = decoding.max_length + self.num_unseen - self.paddings[row]
            adapter = self._adapter(row)
            namespace = (adapter, self._config.cache_salt) if keeps_prefixes else UNCACHED  # as for engine requests
            request = Request(f"row {row}", [Sequence(tokens)], max_num_tokens, num_rows=repeats, namespace=namespace)
            request.adapter = adapter
            shift = 0 if prompts is None else prompts.shift(row // repeats, self.layout.replays)
            request.limit_positions(self.layout.max_positions, shift)
            if prompts is not None:
                prompts.give(request, row // repeats, keys)
            rows += [(request, index) for index in range(repeats)]
        return Generation(decoding, rows, keep_blocks=bool(inputs.generation_config.return_dict_in_generate))

    def _adapter(self, row: int) -> str | None:
        """The adapter of a row. `adapters` has a name per row (PEFT repeats names if the arguments ask for beams) or
        per prompt."""
        names = self.adapters
        if names is None:
            return None
        return names[row if len(names) == len(self.paddings) else row // self.call.repeats]

    def _result(self, generation: Generation, loop: StepLoop) -> Any:
        decoding, parts = generation.decoding, generation.parts
        if parts:
            decoding = decoding.join([part.decoding for part in parts])
        if not generation.keep_blocks:
            return decoding.result()
        # the returned cache is as plain `generate` leaves it: rows that ended early get K/V of the padding that follows
        kept = [part.kept[0] for part in parts] or [generation.kept[row] for row in range(len(self.paddings))]
        ids = decoding.input_ids  # (rows, cached tokens + 1)
        sequences = []
        for row, (blocks, num_tokens) in enumerate(kept):
            sequence = Sequence(self._tokens(ids, row))
            sequence.request = generation.rows[row][0]
            sequence.blocks, sequence.num_computed_tokens = blocks, num_tokens
            sequences.append(sequence)
        while late := [each for each in sequences if each.num_computed_tokens < each.num_tokens - 1]:
            with loop.executor.lock, loop.executor.attention():
                loop.executor.run_by_adapter(_schedule(loop, late))
        cache = empty_cache(self.call.model, loop.memory)
        with loop.memory.lock:
            cache.take(
                [loop.blocks.fork(blocks) for blocks, _ in kept],
                tuple(self.paddings),
                self.num_unseen + ids.shape[1] - 1,
            )
        return decoding.result(cache)


def _schedule(loop: StepLoop, sequences: list[Sequence]) -> list[tuple[Sequence, int]]:
    """Schedules one step towards computing all tokens but the last of each sequence. Raises `OutOfBlocksError`."""
    items, left = [], loop.scheduler.max_num_batched_tokens
    with loop.memory.lock:
        for sequence in sequences:
            count = min(left, sequence.num_tokens - 1 - sequence.num_computed_tokens)
            if not count:
                break
            has_room = loop.blocks.append(sequence.blocks, count)
            if not has_room and not (loop.speculator.reclaim() and loop.blocks.append(sequence.blocks, count)):
                needed = sum(table.num_needed(count) for table in sequence.blocks.tables)
                raise OutOfBlocksError(
                    f"needs {needed} blocks for the cache that is returned, {loop.blocks.num_free} are free: raise "
                    "`num_blocks`"
                )
            sequence.num_computed_tokens += count
            items.append((sequence, count))
            left -= count
        loop.blocks.flush_copies()
        loop.memory.note_peak()
    return sorted(items, key=lambda item: item[1] != 1)
