"""One `generate` call: what it has built and switched."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from transformers import GenerationConfig, PreTrainedModel

from ..attention.backends import obstacles
from ..attention.latent import wrap_expansions
from ..attention.masks import PagedMask, mask_observer
from ..attention.switch import foreign_attention, switchable_configs, use_paged_attention
from ..cache.paged_cache import PagedCache
from ..model.registry import Route, note_route, route_of

logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")  # of a model's inputs


def rows_per_prompt(config: GenerationConfig) -> int:
    """Rows that `generate` expands each prompt to."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


class Call:
    """What one `generate` call has built and switched, to be undone when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stack = contextlib.ExitStack()
        self.built: list[PagedCache] = []
        self.caches: list[PagedCache] = []
        self.repeats = 1
        self.route_name, self.reason = "plain", "cache_implementation is not 'paged'"
        self.reads_in_place = self.is_running = self.is_switched = False
        self.prefills_shared = self.is_packed = False
        self.num_captured_steps = 0
        self.slowed_by: set[str] = set()  # what kernels said

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """
        The call itself: what it switched is put back at its end, and its caches are freed if it fails. To be entered
        and left within `held`.
        """
        tokens = current.set(self), mask_observer.set(None), obstacles.set(self.slowed_by)
        try:
            with self.stack:
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
            obstacles.reset(tokens[2])
            mask_observer.reset(tokens[1])
            current.reset(tokens[0])
            note_route(self.model, self.route())
            logger.debug("%s.generate: %s", type(self.model).__name__, self.route())

    def use(self, caches: list[PagedCache], config: GenerationConfig, is_built: bool) -> None:
        """
        The call's keys and values go to `caches`, which attention reads in place while it runs. To be called within
        `held`.

        Args:
            config ([`GenerationConfig`]): The call's.
            is_built (`bool`): Whether the caches were built for this call and go with it.
        """
        self.route_name, self.repeats = "hf_loop", rows_per_prompt(config)
        self.reason = (
            "paged cache under the model's own decoding loop" if is_built else "the caller's PagedCache is used"
        )
        self.caches += caches
        self.built += caches if is_built else []
        if config.output_attentions:
            self.reason += "; keys and values are gathered, since only the model's own attention returns its weights"
            return
        self.reads_in_place = True
        if self.is_running and not self.is_switched:
            self._switch()

    def _switch(self) -> None:
        self.is_switched = True
        modules = list(self.model.modules())
        wrap_expansions(modules)
        self.stack.enter_context(use_paged_attention(switchable_configs(modules)))
        foreign = foreign_attention(modules)
        if foreign is not None:
            self.reason += f"; keys and values are gathered: {foreign}"
            return  # what it makes of padding is not known either, so that is stored
        token = mask_observer.set(self.observe)
        self.stack.callback(mask_observer.reset, token)

    def observe(self, mask: PagedMask) -> None:
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

    def route(self) -> Route:
        """How it went so far."""
        return route_of(
            self.route_name,
            self.reason,
            [cache.counters for cache in self.caches],
            self.slowed_by,
            is_packed=self.is_packed,
            prefills_shared=self.prefills_shared,
            num_captured_steps=self.num_captured_steps,
        )


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
# Prepared by a model whose own `generate` does not come through ours, to run with its decoding loop.
prepared: ContextVar[Call | None] = ContextVar("hf_paged_prepared_call", default=None)
