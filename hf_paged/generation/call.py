"""`Call`: one `generate` call with the caches that it builds, the attention that it switches, and
its route. This module runs no forward."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .. import compat
from ..attention.backends import unsupported_reasons
from ..attention.masks import PagedMask, mask_observer
from ..attention.switch import compiled_modules, foreign_attention, switch_attention
from ..batching.decoding.prepare import capturing
from ..batching.execution.prompts import copy_nested_dicts
from ..cache.idle import end_use
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.waits import claiming
from ..compiled import running_eagerly
from ..config import PagedConfig
from ..interrupts import register_for_cleanup, restoring
from ..model.own_loop import map_tensors, tensors_of
from ..model.registry import memory_for, note_route, reads_are_in_place, route_of, warn_once
from ..model.sharding import reserving
from ..step import ReadCounters
from ..timing import setup_seconds
from ..topics import Topic

logger = logging.getLogger(__name__)


def caches_in(model_kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the caches among a forward's arguments."""
    values = [model_kwargs.get(name) for name in compat.CACHE_NAMES]
    return [value for value in values if value is not None]


def rows_per_prompt(config: GenerationConfig) -> int:
    """Returns the number of rows to which `generate` expands each prompt."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


def first_rows(value: Any, repeats: int) -> Any:
    """Returns a model's input with only the first of every `repeats` rows of its tensors; `None` if
    the other rows are not copies of the first."""
    for tensor in tensors_of(value):
        if len(tensor) % repeats:
            return None
        groups = tensor.unflatten(0, (-1, repeats))
        if not (groups == groups[:, :1]).all():
            return None
    return map_tensors(lambda tensor: tensor[::repeats].contiguous(), value)


# calls of all threads that may still join the decoding loop of another call
starting_calls = set[Any]()


class Call:
    """One `generate` call: its caches, its route, and what it switches in the model (attention
    functions, compiled layers), which is switched back when it ends."""

    def __init__(self, model: PreTrainedModel, has_custom_loop: bool = False) -> None:
        """`has_custom_loop`: whether user code calls the decoding loop, because `custom_generate`
        is a function or the model's `generate` is user code."""
        self.model = model
        self.has_custom_loop = has_custom_loop
        self.stack = contextlib.ExitStack()
        # holds the claim on blocks; closed after the caches are dropped
        self.claim_stack = contextlib.ExitStack()
        self.memory: PagedMemory | None = None  # the model's memory, if the call uses it
        self.built_caches: list[PagedCache] = []
        self.caches: list[PagedCache] = []  # `built_caches`, or the caller's
        # before `running`, in a call that may never run: `caches`, and whether each was built
        self._released_caches: list[tuple[weakref.ref[PagedCache], bool]] = []
        self.counters: list[ReadCounters] = []  # of the caches, and of the engine's runner
        self.repeats = 1  # number of rows per prompt
        # token ids and inputs before they are expanded to rows
        self.unexpanded: tuple[torch.Tensor, dict[str, Any]] | None = None
        self.has_misassigned_images = (
            False  # whether the expansion gave rows the images of other rows
        )
        self.route_name = "plain"
        self.reason = "cache_implementation is not 'paged'"
        # how the call could get the paged cache that it requested, for the warning if it has none
        self.remedy: str | None = None
        self.reads_in_place = False  # whether attention is switched to read blocks in place
        self.is_running = False  # whether `running` has begun
        self.has_prepared_cache = False  # whether the model has prepared its cache in this call
        # whether code that this call ran, such as `custom_generate`, has requested a paged cache in
        # an inner call
        self.is_delegated = False
        self.own_code_reason: str | None = None  # why attention other than ours runs
        self.slowed_by: set[str] = set()  # reasons why the call was slower than possible
        # in a call on the engine, by kind of cache: (rows, positions per row)
        self.cache_sizes: dict[str, tuple[int, int]] = {}
        # other fields for `route_of`
        self.route_fields: dict[str, Any] = {"is_packed": False, "setup_seconds": {}}

    @restoring
    def running(self) -> Iterator[None]:
        """A context for the call: switches the model back at the end and, if the call fails, frees
        the caches that it built."""
        variables: dict[ContextVar[Any], Any] = {
            current_call: self,
            mask_observer: None,
            unsupported_reasons: self.slowed_by,
            setup_seconds: self.route_fields["setup_seconds"],
        }
        plain_bytes = None
        self.thread, self.started_at = threading.get_ident(), time.perf_counter()
        register_for_cleanup(self)
        if capturing.get() is None:
            starting_calls.add(self)
        try:
            with self.stack:
                for variable, value in variables.items():
                    self.stack.callback(variable.reset, variable.set(value))
                self.is_running = True
                self._regain_caches()
                if self.memory is not None:
                    self.memory.begin_call(self)
                if self.caches:
                    self._switch()
                yield
            plain_bytes = sum(
                cache.plain_bytes(*self.cache_sizes.get(cache.kind, ())) for cache in self.caches
            )
            if self._lacks_cache and self._is_noted:
                warn_once(
                    self.model,
                    Topic.NOT_PAGED(
                        "did not use a paged cache, although one was requested:"
                        f" {self.reason}. {self.remedy}, or leave out the option that requests it"
                        ' (cache_implementation="paged", or `by_default=True` of `install`)'
                    ),
                )
        except BaseException:
            # freed here, since the traceback keeps frames alive that hold these caches
            for cache in self.built_caches:
                cache.discard()
            raise
        finally:
            starting_calls.discard(self)
            self.stack.close()  # a no-op, unless an interrupt prevented its end above
            route = route_of(
                self.route_name,
                self._full_reason(),
                self.counters,
                self.slowed_by,
                **self.route_fields,
            )
            if self._is_noted:
                note_route(self.model, route)
            # dropped before the claim ends, since they may hold blocks
            self.built_caches = []
            self.caches = []
            self.claim_stack.close()
            if self.memory is not None:
                self.memory.end_call(self, plain_bytes)
                end_use(self.memory)
            logger.debug("%s.generate: %s", type(self.model).__name__, route)

    def clean_up_after_error(self) -> None:
        if self.thread == threading.get_ident():
            starting_calls.discard(self)
            for cache in self.built_caches:
                cache.discard()

    @property
    def _is_noted(self) -> bool:
        """Whether the call sets the route noted for the model: its loop runs, instead of being
        captured for another call, and no inner call has taken its place."""
        is_replaced = self.is_delegated and not self.has_prepared_cache
        return capturing.get() is None and not is_replaced

    @property
    def _lacks_cache(self) -> bool:
        """Whether the call requested a paged cache but had none."""
        return self.route_name == "plain" and self.remedy is not None

    def _full_reason(self) -> str:
        """Returns the reason and, if attention other than ours ran, how it got keys and values."""
        if self._lacks_cache:
            return Topic.NOT_PAGED(self.reason)
        if self.own_code_reason is None or self.route_name != "hf_loop":
            return self.reason
        are_views = reads_are_in_place(self.counters)
        access = "read in place as contiguous rows" if are_views else "gathered"
        return Topic.MODEL_CODE(
            f"{self.reason}; keys and values are {access}: {self.own_code_reason}"
        )

    def use_caches(
        self, caches: list[PagedCache], config: GenerationConfig, are_built: bool
    ) -> None:
        """Notes that the call stores keys and values in `caches`. Attention is switched to read
        them in place, unless `config` asks for attention weights. `are_built`: whether the caches
        were built for the call, which then drops them when it ends."""
        self.route_name = "hf_loop"
        self.repeats = rows_per_prompt(config)
        self.reason = "paged cache under the model's own decoding loop"
        is_first = not self.caches
        self.caches += caches
        self.counters += [cache.counters for cache in caches]
        if are_built:
            self.built_caches += caches
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

    def release_caches(self) -> None:
        """Keeps only weak references to the caches until `running`, so that their blocks are freed
        with them if a loop of the model's own never runs the call."""
        self._released_caches = [
            (weakref.ref(cache), cache in self.built_caches) for cache in self.caches
        ]
        self.caches, self.built_caches = [], []
        if self.memory is not None:
            end_use(self.memory)

    def _regain_caches(self) -> None:
        for reference, is_built in self._released_caches:
            cache = reference()
            if cache is not None:
                self.caches.append(cache)
                if is_built:
                    self.built_caches.append(cache)

    def page_caches(self, config: PagedConfig, arguments: dict[str, Any]) -> None:
        """Sets the call's memory, and replaces each `DynamicCache` that the model has just built by
        a `PagedCache` in this memory. `arguments`: the arguments of the method that prepared the
        model's cache."""
        generation_config = arguments["generation_config"]
        model_kwargs = arguments["model_kwargs"]
        length = math.ceil(arguments.get("max_cache_length") or 0)
        num_prompts = arguments.get("batch_size") or 1
        num_rows = num_prompts * rows_per_prompt(generation_config)
        if self.is_running:
            self.stack.enter_context(reserving(self.model))
        lengths = [length] * num_rows if length else []
        self.memory = memory = memory_for(self.model, config, lengths)
        if self.is_running:
            memory.begin_call(self)

        def to_paged(cache: Any, kind: str) -> Any:
            if type(cache) is not DynamicCache:
                return cache
            paged_cache = PagedCache.from_empty(cache, memory, kind)
            if kind == "self":
                blocks_per_row = length // memory.block_size + 1
                paged_cache.reserve(num_rows * blocks_per_row, num_rows)
            if generation_config.is_assistant:
                paged_cache.activate_past_recording()
            return paged_cache

        for name in compat.CACHE_NAMES:
            cache = model_kwargs.get(name)
            if isinstance(cache, EncoderDecoderCache):
                cache.self_attention_cache = to_paged(cache.self_attention_cache, "self")
                cache.cross_attention_cache = to_paged(cache.cross_attention_cache, "cross")
            elif cache is not None:
                model_kwargs[name] = to_paged(cache, "self")

    def note_missing_cache(self, reason: str, remedy: str) -> None:
        """Notes why the call lacks the paged cache that it requested, and how it could get one."""
        self.reason, self.remedy = reason, remedy

    def claim_blocks(self, arguments: dict[str, Any]) -> None:
        """Claims blocks for all rows of a decoding loop with these arguments, in the caches that
        the call built, until the call ends. First waits until the blocks fit alongside the claims
        of earlier calls, or until no other call progresses."""
        model_kwargs = arguments.get("model_kwargs", {})
        embeds = model_kwargs.get("inputs_embeds")
        encoder_outputs = model_kwargs.get("encoder_outputs")
        num_rows = len(arguments["input_ids"])
        lengths = {"self": math.ceil(arguments["generation_config"].max_length), "cross": 0}
        if embeds is not None:
            lengths["self"] += embeds.shape[1]
        if encoder_outputs is not None:
            lengths["cross"] = encoder_outputs[0].shape[1]
        num_needed = 0
        for cache in self.built_caches:
            length = lengths[cache.kind]
            num_blocks = cache.rows.manager.num_spanned(0, length, length)
            num_needed += num_rows * sum(num_blocks)
        manager = self.built_caches[0].rows.manager
        claim = claiming(self.built_caches[0].memory, num_needed, lambda: manager.num_total)
        self.claim_stack.enter_context(claim)

    def note_inputs(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Any = None,
        **model_kwargs: Any,
    ) -> None:
        """Stores the inputs that `generate` is about to expand to rows; only the first, outermost
        expansion counts."""
        if isinstance(input_ids, torch.Tensor) and self.unexpanded is None:
            inputs = {name: copy_nested_dicts(value) for name, value in model_kwargs.items()}
            self.unexpanded = (input_ids, inputs)

    def _switch(self) -> None:
        modules = list(self.model.modules())
        self.stack.enter_context(running_eagerly(compiled_modules(modules)))
        if not self.reads_in_place:
            return
        self.stack.enter_context(switch_attention(modules))
        self.own_code_reason = foreign_attention(modules)
        if self.own_code_reason:
            return  # the model's own code may attend to padding, so padding must be stored
        self.stack.callback(mask_observer.reset, mask_observer.set(self._expect_padding))

    def _expect_padding(self, mask: PagedMask) -> None:
        """Finds the left padding in the model's causal mask, and tells the call's empty caches not
        to store it."""
        arguments = mask.arguments
        if not mask.pattern.causal or arguments.get("q_offset", 0) != 0:
            return
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "cross_attention_layers", None):
            # cross-attention layers store the image's positions, to which the text's padding does
            # not apply
            return
        columns = mask.unpadded_columns
        if columns is None:
            return
        paddings, ends = columns
        if any(end != arguments["kv_length"] for end in ends):
            return
        for cache in self.built_caches:
            if cache.kind == "self" and cache.is_empty:
                cache.expect_padding(paddings, arguments["kv_length"])


current_call: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
# The call of a model whose own `generate` bypasses ours: it is created when the model prepares its
# cache, and runs around the model's decoding loop.
prepared_call: ContextVar[Call | None] = ContextVar("hf_paged_prepared_call", default=None)
