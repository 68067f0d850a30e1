"""The step loop that fits an engine's model as it is now, and what all loops before it counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..model.registry import Route, note_route, route_of
from .factory import choose_layout, empty_cache, make_loop
from .loop import StepLoop
from .scheduling.timeline import Timeline

MANY_BLOCKS = 1 << 40  # as many as there is memory for; it is taken when it is touched
_MEMORY = ("used_blocks", "shared_blocks", "cached_blocks", "peak_blocks", "used_bytes", "peak_bytes")
# of a loop
_COUNTS = ("num_captured_steps", "num_generated_tokens", "num_preemptions", "num_steps", "num_swaps", "seconds")


class CurrentLoop:
    """
    Args:
        model ([`PreTrainedModel`]): The model.
        config ([`PagedConfig`]): The engine's.

    Attributes:
        loop ([`StepLoop`], *optional*): `None` while no memory is taken.
        memory ([`PagedMemory`]): The loop's.
        timeline ([`Timeline`]): Of all loops.
        shares_prefills (`bool`): Whether a request had several rows.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig) -> None:
        self.model, self.config = model, config
        self.loop: StepLoop | None = None
        self.memory = PagedMemory(config)
        self.timeline = Timeline()
        self.shares_prefills = False
        self._made_for: tuple[Any, ...] = ()  # what the loop depends on; first, the layout of the cache
        self._config_text = ""  # of the model's config then
        self._past: dict[str, Any] = {}  # what loops before it counted

    def get(self) -> StepLoop:
        """While nothing is in flight: the loop, another one if the model is no longer what it was made for."""
        model = self.model
        empty = empty_cache(model, self.memory)
        layout = choose_layout(model, empty)
        made_for = (_layout(empty), layout, model.dtype, model.device, autocast_dtype(model.device))
        if self.loop is None or made_for != self._made_for:
            self.retire()
            cache = empty_cache(model, self.memory)
            cache.reserve(self.config.num_blocks or MANY_BLOCKS)  # growing step by step would copy what is there
            self.loop = make_loop(model, cache, layout, max_num_seqs=self.config.max_num_seqs)
            self.memory, self.loop.scheduler.timeline = self.loop.memory, self.timeline
            self._made_for, self._config_text = made_for, _config_text(model)
            self.note_route()
        return self.loop

    def check_layout(self, num_unfinished: int) -> None:
        """Raises `ValueError` if the model now asks for other layer groups than its unfinished requests have."""
        if not num_unfinished or _config_text(self.model) == self._config_text:
            return  # as nearly always, and quickly known
        before, now = self._made_for[0], _layout(empty_cache(self.model, self.memory))
        if now != before:
            raise ValueError(
                f"the config of {type(self.model).__name__} now asks for {_words(now)}, and the {num_unfinished} "
                f"unfinished requests began with {_words(before)}: change `sliding_window` and `layer_types` while no "
                "request is unfinished"
            )

    def retire(self) -> None:
        """Gives the loop and its memory up; what it counted stays."""
        self._past = {name: self.count(name) for name in _COUNTS}
        self.memory.graphs = None  # a cache that is held has no use for graphs
        self.loop, self.memory = None, PagedMemory(self.config)

    def count(self, name: str) -> Any:
        """What an attribute of all loops adds up to."""
        return self._past.get(name, 0) + getattr(self.loop, name, 0)

    @property
    def route(self) -> Route | None:
        """How requests are served and why so; `None` before the first."""
        if self.loop is None:
            return None
        layout, slowed_by = self.loop.layout, self.loop.executor.slowed_by
        reason = layout.unsupported_reason
        if not layout.sides.rows:
            slowed_by = {*slowed_by, f"sequences run one by one, not packed: {reason}"}
        return route_of(
            "engine" if layout.sides.rows else "rows",
            layout.reason if layout.sides.rows else str(reason),
            [self.loop.counters],
            slowed_by,
            is_packed=reason is None,
            prefills_shared=self.shares_prefills,
            num_captured_steps=self.count("num_captured_steps"),
        )

    def note_route(self) -> None:
        """`last_route` of the model tells of it."""
        if self.route is not None:
            note_route(self.model, self.route)

    def stats(self) -> dict[str, Any]:
        """The fields of [`EngineStats`] that are of loops and memory."""
        memory, counts = self.memory.stats(), {name: self.count(name) for name in _COUNTS}
        scheduler = self.loop.scheduler if self.loop is not None else None
        return dict(
            num_blocks=self.config.num_blocks,
            waste_percent=100 * memory.waste,
            num_running=scheduler.num_running if scheduler else 0,
            num_waiting=scheduler.num_waiting if scheduler else 0,
            tokens_per_second=counts["num_generated_tokens"] / counts["seconds"] if counts["seconds"] else 0.0,
            route=self.route,
            **{name: getattr(memory, name) for name in _MEMORY},
            **counts,
        )


def _config_text(model: PreTrainedModel) -> str:
    return repr(vars(model.config.get_text_config(decoder=True)))


def _layout(cache: PagedCache) -> tuple[tuple[type, int | None], ...]:
    """The kind of each layer of the cache, and its window in tokens."""
    return tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)


def _words(layout: tuple[tuple[type, int | None], ...]) -> str:
    counts = Counter("full attention" if window is None else f"a window of {window} tokens" for _, window in layout)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
