"""One `generate` call: what it has built and switched."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils import ModelOutput

from ..attention.backends import obstacles
from ..attention.latent import wrap_expansions
from ..attention.masks import PagedMask, mask_observer
from ..attention.switch import foreign_attention, switchable_configs, use_paged_attention
from ..cache.paged_cache import PagedCache
from ..model.registry import note_route, route_of

logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")  # of a model's inputs


def rows_per_prompt(config: GenerationConfig) -> int:
    """Rows that `generate` expands each prompt to."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


def cache_parts(cache: Any) -> list[Any]:
    """The caches of an `EncoderDecoderCache`, or the cache itself."""
    if isinstance(cache, EncoderDecoderCache):
        return [*cache_parts(cache.self_attention_cache), *cache_parts(cache.cross_attention_cache)]
    return [cache]


def first_rows(value: Any, repeats: int) -> Any:
    """Every `repeats`-th row of a tensor, or of all in a `ModelOutput`; `None` unless the rows between are like it."""
    if isinstance(value, ModelOutput):
        parts = {name: first_rows(part, repeats) for name, part in value.items()}
        return None if any(part is None for part in parts.values()) else type(value)(**parts)
    if not isinstance(value, torch.Tensor) or value.shape[0] % repeats:
        return None
    groups = value.unflatten(0, (-1, repeats))
    return groups[:, 0].contiguous() if bool((groups == groups[:, :1]).all()) else None


class Call:
    """What one `generate` call has built and switched, to be undone when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stack = contextlib.ExitStack()
        self.built: list[PagedCache] = []
        self.caches: list[PagedCache] = []  # those built, or the caller's
        self.repeats = 1
        self.road, self.reason = "plain", "cache_implementation is not 'paged'"
        self.reads_in_place = self.is_running = False
        self.slowed_by: set[str] = set()  # what kernels said
        self.details: dict[str, Any] = {"is_packed": False}  # for `route_of`

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """
        The call itself: what it switched is put back at its end, and its caches are freed if it fails. To be entered
        and left within `held`.
        """
        variables: list[tuple[ContextVar[Any], Any]]
        variables = [(current, self), (mask_observer, None), (obstacles, self.slowed_by)]
        try:
            with self.stack:
                for variable, value in variables:
                    self.stack.callback(variable.reset, variable.set(value))
                self.is_running = True
                if self.reads_in_place:
                    self._switch()
                yield
        except BaseException:
            # a traceback keeps the frames alive that hold these caches: do not wait for it
            for cache in self.built:
                cache.discard()
            raise
        finally:
            counters = [cache.counters for cache in self.caches]
            route = route_of(self.road, self.reason, counters, self.slowed_by, **self.details)
            note_route(self.model, route)
            logger.debug("%s.generate: %s", type(self.model).__name__, route)

    def use(self, caches: list[PagedCache], config: GenerationConfig, is_built: bool) -> None:
        """
        The call's keys and values go to `caches`, which attention reads in place while it runs; `is_built` says that
        they go with the call. To be called within `held`.
        """
        self.road, self.repeats = "hf_loop", rows_per_prompt(config)
        self.reason = "paged cache under the model's own decoding loop"
        self.caches += caches
        if is_built:
            self.built += caches
        else:
            self.reason = "the caller's PagedCache is used"
        if config.output_attentions:
            self.reason += "; keys and values are gathered, since only the model's own attention returns its weights"
        elif not self.reads_in_place:
            self.reads_in_place = True
            if self.is_running:
                self._switch()

    def _switch(self) -> None:
        modules = list(self.model.modules())
        wrap_expansions(modules)
        self.stack.enter_context(use_paged_attention(switchable_configs(modules)))
        foreign = foreign_attention(modules)
        if foreign is not None:
            self.reason += f"; keys and values are gathered: {foreign}"
            return  # what it makes of padding is not known either, so that is stored
        self.stack.callback(mask_observer.reset, mask_observer.set(self._observe))

    def _observe(self, mask: PagedMask) -> None:
        """The model's own causal mask says which leading positions are padding: those need not be stored."""
        if mask.pattern is None or not mask.pattern.causal or mask.arguments.get("q_offset", 0) != 0:
            return
        config = self.model.config.get_text_config(decoder=True)
        if getattr(config, "cross_attention_layers", None):  # what those hold is not the text that is padded
            return
        columns = mask.visible_columns()
        if columns is None or any(end != mask.arguments["kv_length"] for end in columns[1]):
            return
        for cache in self.built:
            if cache.kind == "self" and cache.is_empty:
                cache.expect_padding(columns[0], mask.arguments["kv_length"])


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
# Prepared by a model whose own `generate` does not come through ours, to run with its decoding loop.
prepared: ContextVar[Call | None] = ContextVar("hf_paged_prepared_call", default=None)
