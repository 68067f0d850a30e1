"""The reports of a `PagedEngine`: its route, statistics, block map and plots. Reports do not change
the engine."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .. import rooms
from ..cache.memory import PagedMemory
from ..cache.memory_stats import BlockStats
from ..config import PagedConfig
from ..interrupts import guarded
from ..model.registry import Route
from .engine_core import EngineCore
from .results import EngineStats


class EngineReports:
    """The read-only part of `PagedEngine`."""

    model: PreTrainedModel
    config: PagedConfig
    _core: EngineCore

    @property
    def route(self) -> Route | None:
        """How requests are served, and why; `None` before the first request, and after `free` until
        the next one. The engine also records the route for `last_route(model)`."""
        with self._core.lock:
            return self._core.route

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or `step` has outputs to return."""
        return bool(self._core.requests or self._core.pending_outputs)

    @guarded
    def stats(self) -> EngineStats:
        """Returns the current numbers of running requests, waiting requests and blocks, and
        counters since the engine was made."""
        core = self._core
        with core.lock:
            core.settle()
            memory = self.memory.stats()
            block_stats = {name: getattr(memory, name) for name in BlockStats.__annotations__}
            counts = core.counts()
            num_running = 0
            num_waiting = 0
            if core.loop is not None:
                num_running = len(core.loop.scheduler.queue.running)
                num_waiting = len(core.loop.scheduler.queue.waiting)
            tokens_per_second = 0.0
            if counts["seconds"]:
                tokens_per_second = counts["num_generated_tokens"] / counts["seconds"]
            return EngineStats(
                num_blocks=self.config.num_blocks,
                waste_percent=100 * memory.waste,
                num_running=num_running,
                num_waiting=num_waiting,
                tokens_per_second=tokens_per_second,
                first_token_seconds=core.totals.first_token_seconds,
                output_token_seconds=core.totals.output_token_seconds,
                route=core.route,
                **block_stats,
                **dict[str, Any](counts),
            )

    @property
    def memory(self) -> PagedMemory:
        """The memory that holds the requests' blocks. `free` replaces it. So does the first request
        after all earlier ones have ended, if the model's layers, layout, dtype, device or autocast
        dtype have changed, or if other block sizes are better."""
        return self._core.memory

    def block_map(self) -> dict[int | None, list[int]]:
        """Returns the states of all blocks of self-attention, by the attention window of their
        layer group (`None`: full attention). A state is 0 for a free block, -1 for a cached block,
        and otherwise the number of sequences that hold the block."""
        with self._core.lock:
            groups = self.memory.block_map().items()
            return {window: counts for (kind, window), counts in groups if kind == "self"}

    @guarded
    def check_integrity(self) -> None:
        """Frees the blocks of garbage-collected caches and streams, then raises `AssertionError`
        unless pools, block tables and reference counts agree."""
        with self._core.lock:
            self._core.settle()
            self.memory.check_integrity()
            if self._core.loop is not None:
                with self.memory.lock:
                    self._core.loop.blocks.check_integrity()

    @property
    def timeline(self) -> Any:
        """When each request was in prefill, in decode or waiting (`hf_paged.tools.timeline`)."""
        rooms.require("tools", "`timeline`")
        return self._core.timeline

    def plot_memory(self, ax: Any = None) -> Any:
        """Plots `block_map`: free, used and cached blocks, and how many sequences share each block.
        Returns the matplotlib `Figure` of `ax` (`matplotlib.axes.Axes`) or, without `ax`, a new
        figure, 800 pixels wide. Raises `ImportError` without matplotlib, which the extra `viz`
        installs."""
        return rooms.room("tools", "`plot_memory`").plot_engine(self, ax)

    def plot_timeline(self, unit: str = "steps", ax: Any = None, max_requests: int = 40) -> Any:
        """Plots the history of the last `max_requests` requests, one row per request, over `unit`
        (`"steps"` or `"seconds"`): when the request was in prefill, in decode, recomputed, waiting,
        preempted or swapped out. Each step that verified a draft shows the draft's length and the
        number of accepted tokens. Covers only the last 4096 closed `timeline.intervals()`, and the
        last 4096 `timeline.verifications()`. `ax` and the returned figure as in `plot_memory`.
        Raises `ValueError` for another unit, or for `max_requests` below 1."""
        tools = rooms.room("tools", "`plot_timeline`")
        with self._core.lock:
            intervals = self.timeline.intervals()
            verifications = self.timeline.verifications()
        return tools.plot_intervals(intervals, unit, ax, max_requests, verifications)

    def _repr_html_(self) -> str | None:
        return rooms.render("engine_html", self)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"PagedEngine({type(self.model).__name__}, {stats.num_running} running,"
            f" {stats.num_waiting} waiting, {stats.used_blocks} blocks used)"
        )
