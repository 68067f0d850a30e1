"""One `generate` call: the caches that it builds, the attention that it switches, and its rows on
the engine."""

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
from ..attention.switch import (
    compiled_layers,
    foreign_attention,
    switchable_configs,
    use_paged_attention,
)
from ..batching.decoding.base import Decoding, LoopInputs
from ..batching.decoding.beam import BeamDecoding
from ..batching.decoding.prepare import capturing
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import are_row_wise
from ..batching.decoding.speculation import Assistance
from ..batching.execution.adapters import adapter_names, without_adapter_names
from ..batching.execution.prompt_inputs import is_unset
from ..batching.execution.prompts import Prompts, prompts_of, unshared
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
from ..cache.waits import Shortage, claimed
from ..compiled import running_eagerly
from ..config import PagedConfig
from ..interrupts import ends_with_calls, restoring
from ..model.capability import TOGETHER, Layout, is_stock, overridden
from ..model.forwards import compute_device
from ..model.own_loop import cache_parts, mismatched_rows
from ..model.ranks import is_sharded
from ..model.registry import note_route, route_of, warn_once
from ..model.rope import find_length_rope
from ..plan import StepPlan
from ..step import ReadCounters
from ..timing import counted
from ..topics import Topic

logger = logging.getLogger(__name__)

# Computing fewer tokens takes about as long as fingerprinting all weights, which the prefix cache
# needs.
MIN_CACHED_TOKENS = 128
# Running fewer steps without replay takes no longer than reading the model's state, which replays
# need.
MIN_REPLAYED_STEPS = 16
# Model inputs that the engine handles or ignores; `labels` too, where transformers' stock code
# drops them.
RIGHT_PADDED = Topic.RIGHT_PADDING(
    "the batch is right-padded: set `tokenizer.padding_side = 'left'`"
)
_KNOWN_INPUTS = {
    *compat.CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "attention_mask",
    "position_ids",
}


def rows_per_prompt(config: GenerationConfig) -> int:
    """The number of rows that `generate` expands each prompt to."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


def first_rows(value: Any, repeats: int) -> Any:
    """Every `repeats`-th row of a tensor, or of the tensors in a `ModelOutput`; `None` if the rows
    between differ."""
    if isinstance(value, ModelOutput):
        parts = {name: first_rows(part, repeats) for name, part in value.items()}
        if any(part is None for part in parts.values()):
            return None
        return type(value)(**parts)
    if not isinstance(value, torch.Tensor) or value.shape[0] % repeats:
        return None
    groups = value.unflatten(0, (-1, repeats))
    are_equal = groups == groups[:, :1]
    if not bool(are_equal.all()):
        return None
    return groups[:, 0].contiguous()


class Call:
    """Caches and settings of one `generate` call, undone when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stack = contextlib.ExitStack()
        self.claim = contextlib.ExitStack()  # on blocks, as long as its caches hold any
        self.memory: PagedMemory | None = None  # the model's, if the call uses it
        self.built: list[PagedCache] = []
        self.caches: list[PagedCache] = []  # those in `built`, or the caller's
        self.counters: list[ReadCounters] = []  # how keys and values of the caches were read
        self.repeats = 1
        # ids and inputs before rows were repeated
        self.unexpanded: tuple[torch.Tensor, dict[str, Any]] | None = None
        self.swaps_pictures = False  # whether repeated rows got images of other rows
        self.road = "plain"
        self.reason = "cache_implementation is not 'paged'"
        self.remedy: str | None = None  # if a paged cache was asked for: how the call gets one
        self.reads_in_place = False
        self.is_running = False
        self.foreign: str | None = None  # why the model's own code reads keys and values
        self.slowed_by: set[str] = set()  # reasons from the kernels
        # on the engine, by a cache's kind: rows, positions of each
        self.sizes: dict[str, tuple[int, int]] = {}
        self.details: dict[str, Any] = {"is_packed": False, "setup_seconds": {}}  # for `route_of`

    @restoring
    def running(self) -> Iterator[None]:
        """Runs the call: undoes its switches at the end, and frees its caches if it fails."""
        variables: dict[ContextVar[Any], Any] = {
            current: self,
            mask_observer: None,
            obstacles: self.slowed_by,
            counted: self.details["setup_seconds"],
        }
        plain_bytes = None
        self.thread = threading.get_ident()
        ends_with_calls(self)
        try:
            with self.stack:
                for variable, value in variables.items():
                    self.stack.callback(variable.reset, variable.set(value))
                self.is_running = True
                if self.memory is not None:
                    self.memory.begin_call(self)
                if self.caches:
                    self._switch()
                yield
            num_bytes = 0
            for cache in self.caches:
                size = self.sizes.get(cache.kind, ())
                num_bytes += cache.plain_bytes(*size)
            plain_bytes = num_bytes
            lacks_cache = self.road == "plain" and self.remedy is not None
            if lacks_cache and capturing.get() is None:
                warn_once(
                    self.model,
                    Topic.NOT_PAGED(
                        'did not use the paged cache that cache_implementation="paged" asks for:'
                        f" {self.reason}. {self.remedy}, or leave `cache_implementation` out"
                    ),
                )
        except BaseException:
            # free the caches now: the traceback keeps the frames alive that hold them
            for cache in self.built:
                cache.discard()
            raise
        finally:
            self.stack.close()  # unless an interrupt kept it from beginning to, this is done
            route = route_of(
                self.road,
                self._full_reason(),
                self.counters,
                self.slowed_by,
                **self.details,
            )
            if capturing.get() is None:
                note_route(self.model, route)
            self.built, self.caches = [], []  # they may hold blocks
            self.claim.close()
            if self.memory is not None:
                self.memory.end_call(self, plain_bytes)
                end_use(self.memory)
            logger.debug("%s.generate: %s", type(self.model).__name__, route)

    def end_calls(self) -> None:
        if self.thread == threading.get_ident():
            for cache in self.built:
                cache.discard()

    def _full_reason(self) -> str:
        """The reason, with how the model's own code got keys and values if it read them."""
        if self.road == "plain" and self.remedy is not None:
            return Topic.NOT_PAGED(self.reason)
        if self.foreign is None or self.road != "hf_loop":
            return self.reason
        is_in_place = any(counter.in_place for counter in self.counters)
        is_gathered = any(counter.gathered for counter in self.counters)
        are_views = is_in_place and not is_gathered
        how = "read where rows lie side by side" if are_views else "gathered"
        return Topic.MODEL_CODE(f"{self.reason}; keys and values are {how}: {self.foreign}")

    def ask(self, reason: str, remedy: str) -> None:
        """Notes that a paged cache was asked for, why the call has none (yet), and what to change
        to get one."""
        self.reason, self.remedy = reason, remedy

    def use(self, caches: list[PagedCache], config: GenerationConfig, is_built: bool) -> None:
        """Makes the call store keys and values in `caches`, which attention reads in place; caches
        built for the call end with it."""
        repeats = rows_per_prompt(config)
        self.road, self.repeats = "hf_loop", repeats
        self.reason = "paged cache under the model's own decoding loop"
        is_first = not self.caches
        self.caches += caches
        self.counters += [cache.counters for cache in caches]
        if is_built:
            self.built += caches
        else:
            self.reason = "the caller's PagedCache is used"
        if config.output_attentions:
            self.reason += Topic.OPTIONS(
                "; the model's own attention runs, since only that returns attention weights"
            )
        else:
            self.reads_in_place = True
        if is_first and self.is_running:
            self._switch()

    def claim_blocks(
        self,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Waits until the caches that the call built can hold all its rows beside those of other
        calls that cannot be preempted."""
        embeds = model_kwargs.get("inputs_embeds")
        encoded = model_kwargs.get("encoder_outputs")
        lengths = {"self": config.max_length, "cross": 0}
        if embeds is not None:
            lengths["self"] += embeds.shape[1]
        if encoded is not None:
            lengths["cross"] = encoded[0].shape[1]
        needed = 0
        for cache in self.built:
            length = lengths[cache.kind]
            spanned = cache.rows.manager.num_spanned(0, length, length)
            needed += len(input_ids) * sum(spanned)
        first = self.built[0]
        manager = first.rows.manager
        claim = claimed(first.memory, needed, lambda: manager.num_total)
        self.claim.enter_context(claim)

    def note_inputs(
        self,
        input_ids: torch.Tensor | None,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Notes the inputs that `generate` prepared before it repeats rows; only the first,
        outermost call counts."""
        if isinstance(input_ids, torch.Tensor) and self.unexpanded is None:
            inputs = {name: unshared(value) for name, value in model_kwargs.items()}
            self.unexpanded = (input_ids, inputs)

    def _switch(self) -> None:
        modules = list(self.model.modules())
        self.stack.enter_context(running_eagerly(compiled_layers(modules)))
        if not self.reads_in_place:
            return
        wrap_expansions(modules)
        self.stack.enter_context(use_paged_attention(switchable_configs(modules)))
        foreign = foreign_attention(modules)
        if foreign:
            self.foreign = foreign
            return  # that code may attend to padding, so padding is stored, too
        self.stack.callback(mask_observer.reset, mask_observer.set(self._observe))

    def _observe(self, mask: PagedMask) -> None:
        """Finds the left padding in the model's causal mask: those positions need not be stored."""
        arguments = mask.arguments
        if not mask.pattern.causal or arguments.get("q_offset", 0) != 0:
            return
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "cross_attention_layers", None):
            # these layers do not hold the padded text
            return
        columns = mask.visible_columns
        if columns is None:
            return
        paddings, ends = columns
        if any(end != arguments["kv_length"] for end in ends):
            return
        for cache in self.built:
            if cache.kind == "self" and cache.is_empty:
                cache.expect_padding(paddings, arguments["kv_length"])


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
# A call prepared by a model with an overridden `generate` that bypasses ours, to run with its
# decoding loop.
prepared: ContextVar[Call | None] = ContextVar("hf_paged_prepared_call", default=None)


def batch_of(
    call: Call,
    method: str,
    arguments: dict[str, Any],
) -> BatchCall | None:
    """A call of a `GenerationMixin` method (by name) for the engine; `None`, with the reason noted,
    if the engine cannot serve it. Raises `ValueError` if `batch_invariant` is set then: only the
    engine supports it."""
    with contextlib.ExitStack() as stack:
        names = adapter_names(call.model)
        if names is not None:
            # else PEFT would take them as adapters of a forward's rows, which differ from the
            # call's
            stack.enter_context(without_adapter_names(call.model))
        batch = _batch_of(call, method, arguments, names)
        if batch is not None:
            call.stack.push(stack.pop_all())
    if batch is None:
        generation_config = arguments["generation_config"]
        config = PagedConfig.coerce(generation_config.cache_config)
        if config.batch_invariant:
            raise not_invariant(call.model, call.reason)
    return batch


def _batch_of(
    call: Call,
    method: str,
    arguments: dict[str, Any],
    adapters: list[str] | None,
) -> BatchCall | None:
    given = arguments.get("model_kwargs", {})
    cache: Any = None
    for name in compat.CACHE_NAMES:
        if given.get(name) is not None:
            cache = given[name]
            break
    loops = (compat.SAMPLE, compat.BEAM_SEARCH, compat.ASSISTED_DECODING)
    if method not in loops or not call.reads_in_place or cache is None:
        return None
    self_cache, *others = cache_parts(cache)
    if not isinstance(self_cache, PagedCache) or self_cache not in call.built:
        return None
    if not self_cache.is_empty or not all(part.is_empty for part in others):
        return None
    crosses = [part for part in others if isinstance(part, PagedCache)]
    cross = None
    if crosses:
        cross = crosses[0].empty_twin(self_cache.memory, kind="cross")
    self_cache.cross = cross
    inputs = LoopInputs(
        arguments["input_ids"],
        arguments["logits_processor"],
        arguments["stopping_criteria"],
        arguments["generation_config"],
    )
    uses_beams = method == compat.BEAM_SEARCH
    streamer = arguments.get("streamer")
    batch = BatchCall(call, self_cache, uses_beams, inputs, given, streamer)
    batch.adapters = adapters
    if method == compat.ASSISTED_DECODING:
        batch.assistance = Assistance(
            arguments.get("assistant_model"),
            arguments.get("tokenizer"),
            arguments.get("assistant_tokenizer"),
        )
    reason = next(batch.reasons_against(), None)
    if arguments.get("synced_gpus"):
        reason = Topic.OPTIONS("`synced_gpus` is set")
    if RIGHT_PADDED in f"{reason} {batch.layout.unsupported_reason}":
        call.slowed_by.add(RIGHT_PADDED)
    if reason is not None:
        call.reason += f"; not on the engine: {reason}"
        return None
    call.road, call.reason = "engine", batch.layout.reason
    call.details |= dict(
        is_packed=batch.layout.unsupported_reason is None,
        prefills_shared=call.repeats > 1,
    )
    return batch


@dataclass
class BatchCall:
    """The arguments of `GenerationMixin._sample` or `_beam_search`, and how the engine serves
    them."""

    call: Call
    cache: PagedCache  # empty, built for the call
    uses_beams: bool
    inputs: LoopInputs  # each prompt `call.repeats` times
    model_kwargs: dict[str, Any]  # for the model's forward
    streamer: Any
    layout: Layout = field(default_factory=Layout)
    # left padding of each row, once known to be supported
    paddings: list[int] = field(default_factory=list)
    has_inputs: bool = False  # whether prompts are more than token ids with consecutive positions
    can_reuse: bool = True  # whether prompts may begin with cached prefixes
    begins_behind_text: bool = False  # whether these may be just the text before a picture
    prompts: Prompts | None = None  # the prompts with their other inputs, once prepared
    assistance: Assistance | None = None  # of a call of transformers' `_assisted_decoding`
    adapters: list[str] | None = None  # one per row or per prompt, if the call names them

    def _find_prompts(self) -> Prompts | None:
        """Each prompt once; `None` if the model overrides how rows are repeated."""
        unexpanded = self.call.unexpanded
        if unexpanded is None and self.call.repeats == 1:
            unexpanded = self.inputs.input_ids, self.model_kwargs
        is_decoder = bool(self.call.model.config.is_encoder_decoder)
        if unexpanded is None:
            return None
        return prompts_of(unexpanded, self.model_kwargs, is_decoder)

    def reasons_against(self) -> Iterator[str]:
        """Yields why the engine cannot serve the call: the first counts. If none, `paddings` and
        `layout` are set."""
        yield from self._reasons_against_batch()
        if self.adapters is not None:
            if self.layout.unsupported_reason is not None or self.has_inputs:
                yield Topic.ADAPTERS("`adapter_names` needs packed forwards of token ids")
            num_rows = len(self.paddings)
            num_prompts = num_rows // self.call.repeats
            if len(self.adapters) not in (num_rows, num_prompts):
                yield Topic.ADAPTERS("`adapter_names` needs one name per prompt")
        if self.assistance is not None:
            reason = self._reason_against_drafts()
            if reason is not None:
                yield reason

    def _reason_against_drafts(self) -> str | None:
        """Why rows of a call that the engine serves cannot use assisted decoding."""
        config = self.inputs.generation_config
        num_rows = len(self.paddings)
        if is_sharded(self.call.model):
            return Topic.RANKS("each rank would time the drafts by its own clock")
        if num_rows == 1 and (config.do_sample or self.streamer is not None):
            return Topic.ASSISTED(
                "a single row is sampled or streamed as transformers' own loop does it"
            )
        if num_rows == 1 and not are_row_wise(self.inputs.logits_processor, num_rows):
            # such as guidance, whose cache then holds them
            return Topic.ASSISTED(
                "a stateful processor must see rejected drafts too, as in transformers' own loop"
            )
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return Topic.ASSISTED("`output_scores` or `output_logits` is set")
        if self.layout.reason_against_drafts is not None or self.has_inputs:
            return self.layout.reason_against_drafts or Topic.INPUTS(
                "prompts are more than token ids"
            )
        model = self.call.model
        if find_length_rope(model, model.modules()) is not None:
            return Topic.ASSISTED("rotary factors depend on a row's length")
        if num_rows > 1:
            decoding = SampleDecoding(self.inputs, self.streamer)
            if not decoding.can_split:
                return Topic.ASSISTED(
                    "a processor or criterion of the caller sees all rows at once"
                )
        assistance = self.assistance or Assistance()
        return reason_against_assistance(model, config, assistance)

    def _reasons_against_batch(self) -> Iterator[str]:
        model = self.call.model
        config = self.inputs.generation_config
        given = self.model_kwargs
        repeats = self.call.repeats
        if self.uses_beams:
            method = overridden(model, compat.BEAM_SEARCH)
            if method is not None:
                yield Topic.MODEL_CODE(f"it overrides `{method}`")
        if torch.is_grad_enabled():  # in `generate` without its decorators
            yield Topic.OPTIONS("gradients are recorded")
        reports = config.output_attentions or config.output_hidden_states
        if config.return_dict_in_generate and reports:
            yield Topic.OPTIONS("`output_attentions` or `output_hidden_states` is set")
        if not given.get("use_cache", True):
            # transformers' loop then sends all tokens in every step
            yield Topic.OPTIONS(f"`use_cache` is {given['use_cache']!r}")
        is_chunked = config.prefill_chunk_size is not None
        if config.is_assistant or is_chunked or config.low_memory:
            yield Topic.OPTIONS("`is_assistant`, `prefill_chunk_size` or `low_memory` is set")
        if config.max_time is not None and is_sharded(model):
            yield Topic.RANKS("`max_time` would end rows by each rank's own clock")
        if self.call.swaps_pictures:
            yield Topic.INPUTS("transformers repeats images one by one instead of per row")
        num_rows = len(self.inputs.input_ids)
        mismatch = mismatched_rows(given, num_rows)
        # encoder-decoder models may have fewer rows in the encoder (Dia)
        if mismatch is not None and not model.config.is_encoder_decoder:
            yield Topic.INPUTS(mismatch)
        reason = next(self._reasons_against_joining(), None)
        if reason is None:
            if self.has_inputs and self._config.batch_invariant:
                yield Topic.INPUTS("prompts are more than token ids")
            return
        if self._config.batch_invariant:
            yield reason
        self.prompts = prompts = self.prompts or self._find_prompts()
        if prompts is None:
            yield Topic.MODEL_CODE(f"{reason}, and the model overrides how rows are repeated")
            return
        if config.return_dict_in_generate:
            yield Topic.OPTIONS(f"the cache is returned (`return_dict_in_generate`), and {reason}")
        num_prompts = prompts.input_ids.shape[0]
        if repeats > 1 and num_prompts * repeats != num_rows:
            yield Topic.INPUTS(f"{reason}, and it is unknown which rows belong to which prompt")
        positions = prompts.position_ids
        if positions is not None and positions.shape[-1] != prompts.length:
            yield Topic.INPUTS(f"{reason}, and there is not one position id per token")
        why = reason_against_rows(model, self.cache, prompts)
        if why and any(prompts.paddings):  # a model may attend to padding
            prompts.paddings = [0] * len(prompts.paddings)
            why = reason_against_rows(model, self.cache, prompts)
        if why:
            if why in reason:
                yield why
            else:
                yield f"{reason}, and {why}"
        prompts.set_joins(how_rows_join(model, self.cache, prompts))
        count = max_positions(model, self.cache, prompts)
        layout = TOGETHER._replace(unsupported_reason=reason, max_positions=count)
        self.has_inputs, self.layout = True, layout
        self.paddings = [padding for padding in prompts.paddings for _ in range(repeats)]

    def _reasons_against_joining(self) -> Iterator[str]:
        """Yields why rows can neither be packed nor run beside those of other calls. If none,
        `paddings`, `layout` and `has_inputs` are set."""
        yield from self._reasons_against_prompts()
        what = self._other_inputs()
        model = self.call.model
        layout = choose_layout(model, self.cache, self._config.batch_invariant)
        self.layout = layout
        reason = layout.unsupported_reason
        if what is not None:
            self.prompts = prompts = self._find_prompts()
            if prompts is None:
                yield what
            elif reason is None:
                prompts.find_positions(model)
                reason, self.can_reuse, self.begins_behind_text = check_prompts(
                    model,
                    self.cache,
                    prompts,
                )
            self.has_inputs = True
            if reason is not None:
                yield f"{what}, and {reason}"
        if reason is None:
            if not layout.mixed_lengths and any(self.paddings):
                yield Topic.PADDING("padding changes the rows' results")
            if self._outgrows_table():
                yield Topic.POSITIONS(
                    "its table of positions grows only in forwards that are not packed"
                )
            if self._shares_factors():
                yield Topic.BATCH("the longest row decides the rotary factors of all")
            return
        if not layout.side_by_side:
            yield reason
        if self.inputs.generation_config.return_dict_in_generate:
            yield reason
        if not layout.mixed_lengths and any(self.paddings):
            yield Topic.PADDING(f"padding changes the rows' results, and {reason}")

    def _reasons_against_prompts(self) -> Iterator[str]:
        """Yields why the prompts are not rows of tokens with left padding alone. If none,
        `paddings` is set."""
        given = self.model_kwargs
        repeats = self.call.repeats
        if self.call.model.config.is_encoder_decoder:
            yield Topic.ENCODER("the model has an encoder")
        keep = given.get("logits_to_keep")
        if keep is not None:
            keeps_last = isinstance(keep, int) and keep == 1
            if not keeps_last:
                yield Topic.OPTIONS("`logits_to_keep` is set")
        ids = self.inputs.input_ids
        mask = given.get("attention_mask")
        positions = given.get("position_ids")
        if ids.dim() != 2 or not ids.shape[1] + self.num_unseen:
            yield Topic.INPUTS("there are no token ids")
        if self.num_unseen and ids.shape[1]:
            yield Topic.INPUTS("`inputs_embeds` and token ids differ in length")
        num_tokens = ids.shape[1] + self.num_unseen
        shape = torch.Size((len(ids), num_tokens))
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=ids.device)
        else:
            mask = mask != 0
        if mask.shape != shape:
            yield Topic.INPUTS("the attention mask has another shape than the token ids")
        if not bool(mask[:, -1].all()):
            yield RIGHT_PADDED
        before_hidden = mask[:, :-1] & ~mask[:, 1:]
        if bool(before_hidden.any()):
            yield Topic.INPUTS("the attention mask hides tokens inside a row")
        if positions is not None:
            has_rows = positions.dim() in (2, 3)
            if not has_rows or positions.shape[-1] != num_tokens:
                yield Topic.INPUTS("there is not one position id per token")
        if repeats > 1:
            firsts = (first_rows(value, repeats) for value in (ids, mask))
            if any(first is None for first in firsts):
                yield Topic.INPUTS("the rows expanded from one prompt differ")
        hidden = ~mask
        self.paddings = hidden.sum(-1).tolist()

    def _other_inputs(self) -> str | None:
        """What the prompts have beyond token ids with consecutive positions; `None` if nothing."""
        given = self.model_kwargs
        known = _KNOWN_INPUTS
        if is_stock(self.call.model, "prepare_inputs_for_generation"):
            known = known | {"labels"}
        other: list[str] = []
        for name, value in given.items():
            if name not in known and not is_unset(value):
                other.append(name)
        if other:
            return Topic.INPUTS(f"model inputs other than token ids: {', '.join(sorted(other))}")
        positions = given.get("position_ids")
        if positions is not None:
            # (rows, length), or with axes in front
            device = positions.device
            columns = torch.arange(positions.shape[-1], device=device)
            paddings = torch.tensor(self.paddings, device=device)
            consecutive = columns - paddings[:, None]
            differs = (positions != consecutive) & (consecutive >= 0)
            if bool(differs.any()):
                return Topic.INPUTS("the position ids are not 0, 1, 2, ... in each row")
        return None

    def _outgrows_table(self) -> bool:
        """Whether a row may need more positions than the model's table has in packed forwards."""
        most = self.layout.max_positions
        if most is None or not self.layout.grows_unpacked:
            return False
        max_length = self.inputs.generation_config.max_length
        longest = max_length + self.num_unseen - min(self.paddings)
        return longest > most + 1

    def _shares_factors(self) -> bool:
        """Whether rows of different lengths would get other rotary factors than each gets alone."""
        if not any(self.paddings):
            return False
        model = self.call.model
        rope = find_length_rope(model, model.modules())
        if rope is None:
            return False
        inputs = self.inputs
        max_length = inputs.generation_config.max_length + self.num_unseen
        num_tokens = inputs.input_ids.shape[1] + self.num_unseen
        shortest = num_tokens - max(self.paddings)
        return rope.factors(shortest) != rope.factors(max_length)

    @property
    def num_unseen(self) -> int:
        """The number of tokens of each prompt that are given as embeddings only, without token
        ids."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if embeds is None or self.call.model.config.is_encoder_decoder:
            return 0
        num_tokens = self.inputs.input_ids.shape[1]
        return int(embeds.shape[1] - num_tokens)

    def _tokens(self, ids: torch.Tensor, row: int) -> list[int]:
        """Token ids of a row of `ids` without padding, 0 for each token given as an embedding."""
        unseen = self.num_unseen
        padding = self.paddings[row]
        first = max(0, padding - unseen)
        tokens: list[int] = ids[row, first:].tolist()
        num_embedded = max(0, unseen - padding)
        return [0] * num_embedded + tokens

    def run(self) -> Any:
        """Returns or raises what `_sample` or `_beam_search` would have."""
        call = self.call
        inputs = self.inputs
        memory = self.cache.memory
        decoding: Decoding
        if self.uses_beams:
            decoding = BeamDecoding(call.model, inputs)
        else:
            decoding = SampleDecoding(inputs, self.streamer)
        # the prefix cache pays off if it can save more time than fingerprinting the weights takes
        num_tokens = len(self.paddings) * decoding.max_length
        num_steps = decoding.max_length - decoding.length
        keeps_prefixes = num_tokens >= MIN_CACHED_TOKENS
        replays = keeps_prefixes or num_steps >= MIN_REPLAYED_STEPS
        generation = self._generation(decoding, keeps_prefixes)
        self._let_speculate(generation)
        call.built.clear()  # the loop may take over these caches
        make = functools.partial(self._make_loop, self.cache)
        with shared_loop(memory, self._loop_key(), make) as shared:
            executor = shared.loop.executor
            finish = functools.partial(self._result, generation)
            claim: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if generation.keep_blocks:  # rows that ended keep theirs until the whole call ends
                preemption = shared.loop.scheduler.preemption
                needed = sum(map(preemption.num_needed, generation.requests))
                claim = claimed(memory, needed, lambda: shared.loop.blocks.num_total)
            try:
                with claim:
                    return shared.run(
                        generation,
                        keeps_prefixes,
                        replays,
                        finish,
                        self._make_loop,
                    )
            finally:
                call.details["num_captured_steps"] = executor.runner.num_captured_steps
                num_drafted = 0
                num_accepted = 0
                for part in generation.parts or [generation]:
                    if part.speculation is not None:
                        num_drafted += part.speculation.num_proposed
                        num_accepted += part.speculation.num_accepted
                call.details["num_draft_tokens"] = num_drafted
                call.details["num_accepted_tokens"] = num_accepted
                call.counters.append(executor.runner.counters)
                call.slowed_by |= executor.slowed_by

    def _let_speculate(self, generation: Generation) -> None:
        """Sets up speculation: rows with drafts are split to advance separately. N-grams are used
        only where that changes no random draw."""
        decoding = generation.decoding
        is_alone = len(generation.rows) == 1
        assistance = self.assistance
        if is_sharded(self.call.model):  # its processes would measure different times
            return
        may_use_ngrams = assistance is None and self._config.speculation == "ngram"
        if may_use_ngrams and self.layout.reason_against_drafts is None:
            if isinstance(decoding, SampleDecoding) and not self.has_inputs:
                if is_alone or (generation.can_split and not decoding.do_sample):
                    assistance = Assistance(ngrams=True)
        generation.assistance = assistance
        if assistance is not None and not is_alone:
            generation.split()

    def _make_loop(self, cache: PagedCache | None = None) -> StepLoop:
        if cache is None:
            cache = self.cache.empty_twin(self.cache.memory)
        return make_loop(
            self.call.model,
            cache,
            self.layout,
            self._config,
            max_num_seqs=UNLIMITED,
        )

    @property
    def _config(self) -> PagedConfig:
        """The config of this call: the memory's config may be that of another thread's call."""
        return PagedConfig.coerce(self.inputs.generation_config.cache_config)

    def _loop_key(self) -> Hashable:
        """A key: calls with equal keys can share a forward, whichever thread computes it."""
        device = compute_device(self.call.model)
        num_function_modes = torch._C._len_torch_function_stack()
        num_dispatch_modes = torch._C._len_torch_dispatch_stack()
        config = dataclasses.replace(
            self._config,
            cache_salt=None,
            idle_release_seconds=None,
        )
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        # modes of torch's overrides belong to a thread
        thread = None
        if num_function_modes + num_dispatch_modes:
            thread = threading.get_ident()
        return (
            config,
            self.layout,
            tuple(self.cache.groups),
            self.call.model.training,
            autocast_dtype(device),
            torch.is_inference_mode_enabled(),
            stream,
            thread,
        )

    def _generation(self, decoding: Decoding, keeps_prefixes: bool) -> Generation:
        inputs = self.inputs
        repeats = self.call.repeats
        layout = self.layout
        prompts = self.prompts if self.has_inputs else None
        keys = None
        may_reuse = keeps_prefixes and self.can_reuse
        if may_reuse and prompts is not None:
            keys = prompts.keys(self.call.model.config)
        rows: list[tuple[Request, int]] = []
        for row in range(0, len(self.paddings), repeats):
            tokens = self._tokens(inputs.input_ids, row)
            max_num_tokens = decoding.max_length + self.num_unseen - self.paddings[row]
            adapter = self._adapter(row)
            # as for engine requests
            namespace: Hashable = UNCACHED
            if keeps_prefixes:
                namespace = (adapter, self._config.cache_salt)
            request = Request(
                f"row {row}",
                [Sequence(tokens)],
                max_num_tokens,
                num_rows=repeats,
                namespace=namespace,
            )
            request.adapter = adapter
            prompt = row // repeats
            shift = 0
            if prompts is not None:
                shift = prompts.shift(prompt, layout.replays)
            request.limit_positions(layout.max_positions, shift)
            if prompts is not None:
                prompts.give(request, prompt, keys, self.begins_behind_text)
            rows += [(request, index) for index in range(repeats)]
        keep_blocks = bool(inputs.generation_config.return_dict_in_generate)
        return Generation(decoding, rows, keep_blocks=keep_blocks)

    def _adapter(self, row: int) -> str | None:
        """The adapter of a row. `adapters` has a name per row (PEFT repeats names if the arguments
        ask for beams) or per prompt."""
        names = self.adapters
        if names is None:
            return None
        if len(names) == len(self.paddings):
            return names[row]
        return names[row // self.call.repeats]

    def _result(self, generation: Generation, loop: StepLoop) -> Any:
        decoding = generation.decoding
        parts = generation.parts
        num_rows = len(self.paddings)
        if parts:
            decoding = decoding.join([part.decoding for part in parts])
        length = self.num_unseen + decoding.length - 1  # nothing computes the last token
        self.call.sizes = {"self": (num_rows, length)}
        if self.prompts is not None:
            self.call.sizes["cross"] = num_rows, self.prompts.num_encoder_tokens
        if not generation.keep_blocks:
            return decoding.result()
        # the returned cache is as plain `generate` leaves it: rows that ended early get K/V of the
        # padding that follows
        kept = [part.kept[0] for part in parts]
        if not kept:
            kept = [generation.kept[row] for row in range(num_rows)]
        ids = decoding.input_ids  # (rows, cached tokens + 1)
        sequences = []
        for row, (blocks, num_tokens) in enumerate(kept):
            sequence = Sequence(self._tokens(ids, row))
            sequence.request = generation.rows[row][0]
            sequence.blocks = blocks
            sequence.num_computed_tokens = num_tokens
            sequences.append(sequence)
        executor = loop.executor
        shortage = Shortage(loop.memory)
        while True:
            late = [row for row in sequences if row.num_computed_tokens < row.num_tokens - 1]
            if not late:
                break
            with executor.lock, executor.attention():
                executor.check_model()
                plan = _schedule(loop, late)
                if len(plan):
                    executor.run_by_adapter(plan)
                    for sequence, count in zip(plan.sequences, plan.counts):
                        sequence.num_computed_tokens += count
            if not len(plan) and not shortage.wait():
                first = late[0]
                count = first.num_tokens - 1 - first.num_computed_tokens
                needed = sum(table.num_needed(count) for table in first.blocks.tables)
                raise OutOfBlocksError(
                    f"the returned cache needs {needed} blocks, {loop.blocks.num_free} are free:"
                    " raise `num_blocks`, or leave `return_dict_in_generate` out"
                )
        cache = empty_cache(self.call.model, loop.memory)
        # transformers' frames hold it, too, and an exception keeps these
        self.call.built.append(cache)
        with loop.memory.changing():
            cache.take(
                [loop.blocks.fork(blocks) for blocks, _ in kept],
                tuple(self.paddings),
                length,
            )
        return decoding.result(cache)


def _schedule(loop: StepLoop, sequences: list[Sequence]) -> StepPlan:
    """Plans one step towards computing all tokens but the last of each sequence, as far as
    there are blocks."""
    items = []
    left = loop.scheduler.max_num_batched_tokens
    with loop.memory.changing():
        for sequence in sequences:
            num_left = sequence.num_tokens - 1 - sequence.num_computed_tokens
            count = min(left, num_left)
            if not count:
                break
            has_room = loop.blocks.append(sequence.blocks, count)
            if not has_room and loop.speculator.reclaim():
                has_room = loop.blocks.append(sequence.blocks, count)
            if not has_room:
                count = 1  # token by token, blocks leave windows
                if not loop.blocks.append(sequence.blocks, count):
                    break
            items.append((sequence, count))
            left -= count
        loop.blocks.flush_copies()
        loop.memory.note_peak()
    return StepPlan.of(sorted(items, key=lambda item: item[1] != 1))
