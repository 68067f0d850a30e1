"""
Steps of nothing but decodes as graphs: recorded once for a number of rows, replayed with other inputs.

A small model's decode step takes the host longer to launch than the device to compute. A graph is launched at once. It
reads and writes the addresses it was recorded with, so it is right only while these are what they were; everything
that changes from step to step is in buffers at fixed addresses (`inputs`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ....attention.switch import model_attention
from ....cache.memory import GroupMemory, autocast_dtype
from ....cache.paged_cache import PagedCache
from ....cache.storage import KVBlocks
from ....kernels import VARIABLE
from ....kernels.triton.cascade_plan import CascadeCosts
from ....model.state import ModelState
from ....step import StepMetadata
from . import capture
from .capture import Graph, GraphBackend, no_autocast_cache
from .cascade import eager_costs, has_shared_blocks, prefers_cascade
from .inputs import StaticInputs

if TYPE_CHECKING:
    from ..packed import Layout

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, list[StepMetadata]], torch.Tensor]

MIN_USES = 3
"""Steps of a size before it is recorded, which takes about as long as three of them: an estimate, not a measurement.
Who stops at the right moment never waits more than twice as long as necessary."""

MAX_GRAPHS = 48
"""Graphs that are kept. Up to 256 rows there are 28 sizes; the rest is for tables that grow, and adapters."""

MIN_TABLE_TOKENS = 1024
"""Tokens that block tables have room for at least, so that short sequences need no new graph when they grow."""


class Key(NamedTuple):
    """What a graph was recorded for."""

    num_rows: int
    widths: tuple[int, ...]  # of each group's block tables
    variant: Hashable  # adapter, autocast, mode

    def serves(self, other: Key) -> bool:
        """Whether its graph is right for steps of `other`, with padding."""
        return (
            self.variant == other.variant
            and self.num_rows >= other.num_rows
            and all(mine >= needed for mine, needed in zip(self.widths, other.widths))
        )


@dataclass
class RecordedStep:
    """A graph with the buffers it reads and writes; `logits` is `(num_rows, vocab_size)`."""

    inputs: StaticInputs
    logits: torch.Tensor
    graph: Graph


def bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows`: 1, 2, 4, 8, then in steps of 8, from 128 on of an eighth to a sixteenth."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def decode_graphs(model: PreTrainedModel, cache: PagedCache) -> DecodeGraphs | None:
    """
    The graphs of `model` over the memory of `cache`, which keeps them for the next call; `None` where there can be none
    or the config wants none.
    """
    memory = cache.memory
    if not memory.config.capture:
        return None
    groups = [group.blocks for group in cache.groups.values()]
    found = memory.graphs
    if found is None or not found.belongs_to(model, groups):
        backend = capture.graph_backend(model.device)
        windows = [spec.window for spec in cache.groups]
        found = None if backend is None else DecodeGraphs(model, groups, windows, memory.config.block_size, backend)
        memory.graphs = found
    return found


class DecodeGraphs:
    """
    The graphs of one model over one memory. It holds neither, nor anything that does; graphs and buffers go with it.

    Args:
        model ([`PreTrainedModel`]): Whose forward is recorded.
        groups (`list[GroupMemory]`): Of the layer groups, whose blocks the graphs read and write.
        windows (`list[int | None]`): Of the layer groups.
        block_size (`int`): Tokens in a block.
        backend ([`GraphBackend`]): Records.

    Attributes:
        obstacle (`str`, *optional*): Why nothing is recorded any more, until the model is another.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: list[GroupMemory],
        windows: list[int | None],
        block_size: int,
        backend: GraphBackend,
    ) -> None:
        self.obstacle: str | None = None
        self._model: weakref.ref[PreTrainedModel] = weakref.ref(model)
        config = model.config.get_text_config(decoder=True)
        self._num_heads = getattr(config, "num_attention_heads", 1)
        self._device = model.device
        self._groups, self._windows, self._block_size, self._backend = groups, windows, block_size, backend
        self._signature: Hashable = None  # of the model that the graphs were recorded of
        self._graphs: dict[Key, RecordedStep] = {}  # the one used last at the end
        self._blocks: list[weakref.ref[KVBlocks]] = []  # whose addresses the graphs know
        self._costs: list[CascadeCosts] | None = None  # of each group's layers together
        self._uses: Counter[tuple[int, Hashable]] = Counter()  # by bucket and variant
        self._kinds: dict[Hashable, tuple[int, torch.dtype]] = {}  # of logits, by variant
        self._outputs: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # that graphs share, by kind
        self._eager: Hashable = None  # variant of the step that runs eagerly
        self._forward: Forward | None = None  # of the runner whose step this is

    def belongs_to(self, model: PreTrainedModel, groups: list[GroupMemory]) -> bool:
        """Whether the graphs are those of this model on this memory."""
        return self._device == model.device and self._model() is model and self._groups == groups

    def begin(self, state: ModelState) -> None:
        """
        Work begins on a model in this `state`, which stays as it is until the work ends. Graphs recorded of another are
        dropped; weights may have changed in place.
        """
        model = self._model()
        assert model is not None
        found = (state.addresses(), *_numerics(model))
        if found != self._signature:
            self.clear()
            self._signature, self.obstacle = found, None

    def clear(self) -> None:
        """Frees every graph and buffer."""
        self._graphs.clear()
        self._outputs.clear()

    # -- a step -----------------------------------------------------------------------------------------------------

    def run(self, layout: Layout, adapter: str | None, forward: Forward) -> torch.Tensor | None:
        """
        A step as a replay.

        Args:
            layout ([`Layout`]): Of decodes only, for all of whose rows logits are wanted.
            adapter (`str`, *optional*): That the model runs with now.
            forward (`Callable`): Token ids and positions `(1, n)` and the groups' steps to logits `(1, n, vocab_size)`.

        Returns:
            `torch.Tensor` of shape `(n, vocab_size)`, the caller's; `None` if the step is to run eagerly: `ran_eagerly`
            is told of its logits then.
        """
        self._eager = None
        if self.obstacle is not None:
            return None
        # No thread may move the blocks between the look at their addresses and the launch.
        with self._groups[0].memory.lock:
            self._follow_blocks()
            if not self._blocks or self._prefers_cascade(layout):
                return None
            with self._forwards(forward):
                step = self._find(layout, adapter)
                return None if step is None else self._replay(step, layout)

    def run_ahead(
        self, layout: Layout, token_ids: torch.Tensor, adapter: str | None, forward: Forward
    ) -> torch.Tensor | None:
        """
        As `run`, for a step whose token ids are not on the host yet; nothing is recorded, and there is no eager step.

        Args:
            token_ids (`torch.Tensor` of shape `(n,)`, int64): On the device, in place of those of the layout.
        """
        if self.obstacle is not None:
            return None
        with self._groups[0].memory.lock:
            self._follow_blocks()
            key = self._key(layout, adapter)
            if key not in self._graphs or self._prefers_cascade(layout):
                return None
            step = self._graphs[key] = self._graphs.pop(key)
            with self._forwards(forward):
                return self._replay(step, layout, token_ids)

    @contextlib.contextmanager
    def _forwards(self, forward: Forward) -> Iterator[None]:
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def _replay(self, step: RecordedStep, layout: Layout, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        count = len(layout.token_ids)
        with self._backend.in_order():
            step.inputs.fill(layout)
            if token_ids is not None:
                step.inputs.token_ids[0, :count].copy_(token_ids)
            step.graph.replay()
            return step.logits[:count].clone()  # the next replay overwrites them

    def ran_eagerly(self, logits: torch.Tensor) -> None:
        """The step for which `run` gave nothing has these logits `(n, vocab_size)`."""
        if self._eager is not None:
            self._kinds[self._eager] = logits.shape[1], logits.dtype

    def _find(self, layout: Layout, adapter: str | None) -> RecordedStep | None:
        """The graph for a step, recorded if it is time; else a larger one, or none."""
        wanted = self._key(layout, adapter)
        variant = wanted.variant
        key: Key | None = wanted
        if wanted not in self._graphs:
            use = wanted.num_rows, variant
            if self._uses[use] >= MIN_USES and variant in self._kinds:
                return self._capture(wanted, layout)
            self._uses[use] += 1
            key = min((key for key in self._graphs if key.serves(wanted)), key=lambda key: key[:2], default=None)
        if key is None:
            self._eager = variant
            return None
        step = self._graphs[key] = self._graphs.pop(key)
        return step

    def _key(self, layout: Layout, adapter: str | None) -> Key:
        variant = adapter, autocast_dtype(self._device), getattr(self._model(), "training", False)
        widths = tuple(self._width(share.tables) for share in layout.shares)
        return Key(bucket(len(layout.token_ids)), widths, variant)

    def _width(self, tables: Sequence[list[int]]) -> int:
        """
        Columns of a group's block tables: a power of two, so that few graphs serve long sequences. A graph's loops end
        with the lengths on the device, but what it launches was sized for this width.
        """
        most = max(map(len, tables))
        return max(1 << max(most - 1, 0).bit_length(), -(-MIN_TABLE_TOKENS // self._block_size))

    # -- recording --------------------------------------------------------------------------------------------------

    def _capture(self, key: Key, layout: Layout) -> RecordedStep | None:
        """Records a graph; if that fails, says why, once, and gives up on this model."""
        start = time.perf_counter()
        try:
            inputs = StaticInputs(key.num_rows, key.widths, self._windows, self._block_size, self._device)
            logits = self._output(key)
            with self._backend.in_order():
                inputs.fill(layout)
                with no_autocast_cache():
                    graph = self._backend.capture(_Recording(self, inputs, logits))
        except Exception as error:
            self.obstacle = _reason(error)
            self.clear()
            _log_once(self.obstacle)
            logger.debug("capturing %s failed", key, exc_info=True)
            return None
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = step = RecordedStep(inputs, logits, graph)
        logger.debug("captured %s in %.0f ms", key, 1000 * (time.perf_counter() - start))
        return step

    def record(self, inputs: StaticInputs, logits: torch.Tensor) -> None:
        """The forward that is recorded: from `inputs` to `logits` `(num_rows, vocab_size)`."""
        assert self._forward is not None
        logits.copy_(self._forward(inputs.token_ids, inputs.positions, inputs.steps())[0])

    def _output(self, key: Key) -> torch.Tensor:
        """`(num_rows, vocab_size)` for a graph's logits, memory that the graphs share."""
        kind = self._kinds[key.variant]
        found = self._outputs.get(kind)
        if found is None or found.shape[0] < key.num_rows:
            rows = 1 << (key.num_rows - 1).bit_length()  # those of smaller graphs stay as long as these do
            with torch.inference_mode(False):
                found = self._outputs[kind] = torch.empty(rows, kind[0], dtype=kind[1], device=self._device)
        return found[: key.num_rows]

    # -- what graphs depend on --------------------------------------------------------------------------------------

    def _layers(self) -> list[KVBlocks]:
        return [blocks for group in self._groups for blocks in group.storage.layers.values()]

    def _follow_blocks(self) -> None:
        """Drops all graphs if any layer's blocks are others than they were: the pool grew, or was made again."""
        blocks = self._layers()
        if len(blocks) != len(self._blocks) or any(ref() is not now for ref, now in zip(self._blocks, blocks)):
            self._graphs.clear()
            self._blocks = [weakref.ref(now) for now in blocks]
            self._costs = None

    def _prefers_cascade(self, layout: Layout) -> bool:
        if not has_shared_blocks(layout.shares):
            return False
        if self._costs is None:
            self._costs = eager_costs(self._groups, self._num_heads)
        return prefers_cascade(layout.shares, self._windows, self._block_size, self._costs)


class _Recording:
    """`DecodeGraphs.record` for one graph. A graph that is run again by calling it keeps nothing else alive."""

    def __init__(self, owner: DecodeGraphs, inputs: StaticInputs, logits: torch.Tensor) -> None:
        self._owner, self._inputs, self._logits = weakref.ref(owner), inputs, logits

    def __call__(self) -> None:
        owner = self._owner()
        assert owner is not None
        owner.record(self._inputs, self._logits)


def _numerics(model: PreTrainedModel) -> tuple[Any, ...]:
    """What else decides which kernels a forward launches, as far as it is not the model's or the step's."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        model_attention(model.config.get_text_config(decoder=True)),
        os.environ.get(VARIABLE),
    )


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first: the end of a broken capture fails, too."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.warning("Decode steps are launched kernel by kernel, which is slower than replaying a graph: %s", obstacle)
