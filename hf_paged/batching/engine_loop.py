"""The step loop of an engine and its memory, made again when the model or the block sizes have
changed."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from ..cache.block_sizes import BlockSizes
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..config import AUTO, PagedConfig
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.registry import Route, block_sizes, route_of
from ..seams import EngineParts, Leader
from .factory import MANY_BLOCKS, choose_layout, empty_cache, make_loop
from .loop import StepLoop
from .scheduling.timeline import Timeline

COUNTS = (
    "num_generated_tokens",
    "num_preemptions",
    "num_steps",
    "seconds",
    "num_adapter_hits",
    "num_adapter_loads",
    "num_adapter_evictions",
    "num_swaps",
    "num_captured_steps",
)


class EngineLoop:
    """Owns the loop of an engine. `leader` drives the processes that hold other shards of the
    model; `outer_lock` is held by whoever uses the loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        parts: EngineParts,
        leader: Leader | None,
        outer_lock: Any,
    ) -> None:
        self._model = model
        self._config = config
        self._parts = parts
        self._leader = leader
        self._outer_lock = outer_lock
        self.loop: StepLoop | None = None  # `None` while no memory is allocated
        self.memory = self._new_memory()  # the loop's memory
        self.timeline = Timeline()  # shared by successive loops
        self.layout = Layout()  # of the loop's forwards
        self._made_for: tuple[Any, ...] = ()  # the model properties that the loop was made for
        self._config_text = ""  # the model's config when the loop was made
        self._earlier: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))  # of earlier loops

    def choose_layout(self, empty: PagedCache) -> Layout:
        """Returns how the model's forwards are laid out now. Raises `ValueError` if an engine over
        several processes cannot serve the model. `empty`: the model's empty cache."""
        choose = functools.partial(choose_layout, self._model, empty, self._config.batch_invariant)
        if self._leader is None:
            return choose()
        return self._leader.choose_layout(choose)

    def update(self, empty: PagedCache, layout: Layout, keeps_pool: bool) -> bool:
        """Between requests: makes a new loop if there is none, if the model has changed since, or,
        unless the pool is kept, if better block sizes are known. Returns whether it has."""
        model = self._model
        device = compute_device(model)
        made_for = (
            _layers(empty),
            layout,
            model.dtype,
            device,
            autocast_dtype(device),
        )
        sizes = None
        if self.loop is not None and not keeps_pool:
            sizes = self.memory.better_sizes()
        if self.loop is not None and made_for == self._made_for and sizes is None:
            return False
        self.retire()
        config = self._config
        cache = empty_cache(model, self.memory)
        # growing step by step would copy the existing blocks
        cache.reserve(config.num_blocks or MANY_BLOCKS, config.max_num_seqs)
        self.loop = make_loop(
            model,
            cache,
            layout,
            config,
            max_num_seqs=config.max_num_seqs,
            parts=self._parts,
            timeline=self.timeline,
        )
        if self._leader is not None:
            self._leader.make(self.loop)
        self.layout = layout
        self._counters = cache.counters
        self._made_for = made_for
        self._config_text = _config_text(model)
        return True

    def check_unchanged(self) -> None:
        """Raises `ValueError` if layer groups or autocast dtype differ from those that the loop's
        unfinished requests began with."""
        if self.loop is None:
            return
        began = self.loop.executor.autocast
        dtype = autocast_dtype(compute_device(self._model))
        if dtype != began:
            raise ValueError(
                f"autocast is to {dtype} here and to {began} in unfinished requests: add this one"
                " when they have ended"
            )
        if _config_text(self._model) == self._config_text:
            return  # the usual case, checked quickly
        before = self._made_for[0]
        now = _layers(empty_cache(self._model, self.memory))
        if now != before:
            windows = [window for _, window in now]
            windows_before = [window for _, window in before]
            raise ValueError(
                f"the config now asks for layers with the windows {windows}, and unfinished"
                f" requests began with {windows_before}: change `sliding_window` and `layer_types`"
                " while no request is unfinished"
            )

    def _new_memory(self, seen: BlockSizes | None = None) -> PagedMemory:
        sizes = None
        if self._config.block_size == AUTO:
            lengths = () if seen is None else seen.seen
            sizes = block_sizes(self._model, self._config, seen=lengths)
        return PagedMemory(
            self._config,
            sizes=sizes,
            keeps_cached=True,
            make_storage=self._parts.storage,
            processes=self._leader,
            outer_lock=self._outer_lock,
        )

    def retire(self) -> None:
        """Drops the loop and its memory; keeps its counters."""
        self._earlier = self.counts()
        if self._leader is not None:
            self._leader.retire()
        try:
            self.memory.give_up_cached()
        finally:
            self.memory.drop_recorders()
            self.loop, self.memory = None, self._new_memory(self.memory.sizes)

    def counts(self) -> Counter[str]:
        """Returns what all loops have done (`COUNTS`)."""
        counts = self._earlier.copy()
        if self.loop is not None:
            counts.update(self.loop.counts())
        return counts

    def route(self, shares_prefills: bool, setup_seconds: dict[str, float]) -> Route | None:
        if self.loop is None:
            return None
        reason = self.layout.unsupported_reason
        slowed_by = self.loop.executor.slowed_by
        kind = "engine"
        if not self.layout.side_by_side:
            slowed_by = {*slowed_by, f"requests run one by one, not packed: {reason}"}
            kind = "rows"
        return route_of(
            kind,
            self.layout.reason,
            [self._counters],
            slowed_by,
            is_packed=reason is None,
            prefills_shared=shares_prefills,
            num_captured_steps=self.counts()["num_captured_steps"],
            setup_seconds=dict(setup_seconds),
        )


def _config_text(model: PreTrainedModel) -> str:
    return repr(vars(model.config.get_text_config(decoder=True)))


def _layers(cache: PagedCache) -> tuple[tuple[type, int | None], ...]:
    return tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)
