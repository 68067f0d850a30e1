"""Steps of nothing but decodes as graphs: recorded once for a number of rows, replayed with other inputs. A graph reads
and writes the addresses it was recorded with; what changes from step to step is in buffers at fixed addresses."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.backends import cpp
from ...attention.switch import model_attention
from ...cache.memory import GroupMemory, autocast_dtype
from ...cache.paged_cache import PagedCache
from ...cache.storage import KVBlocks, is_out_of_memory
from ...kernels import VARIABLE, forced, uses_triton
from ...kernels.cpp.build import batch_invariant
from ...kernels.triton.cascade import CascadeCosts, default_costs, plan_cascade
from ...model.capability import HALF_TOLERANCE, TOLERANCE, first_line
from ...model.state import ModelState, plain_tensors
from ...step import NotCapturable, StepMetadata
from ...tape.tape import Tape
from .cuda_graphs import CudaGraphs
from .inputs import GroupTokens, PackedTokens, StaticInputs

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, list[StepMetadata]], Tensor]
"""Token ids and positions `(1, n)` and each group's step to logits `(1, n, vocab_size)`."""

Check = Callable[[Callable[[], None]], None]
"""Raises `NotCapturable` unless what it is given does what the recorded forward just did."""

# steps of a size before it is recorded, which takes about as long as three of them: an estimate, not a measurement
MIN_USES = 3
MAX_GRAPHS = 48  # that are kept: up to 256 rows there are 27 sizes; the rest is for tables that grow, and adapters
MIN_TABLE_TOKENS = 1024  # for which block tables have room at least: short sequences need no new graph when they grow
# what a GPU reads while the host launches one layer, about 0.2 ms at 4 TB/s: an estimate, not a measurement
EAGER_LAYER_BYTES = 800 << 20


class Key(NamedTuple):
    """What a graph was recorded for."""

    num_rows: int
    widths: tuple[int, ...]  # of each group's block tables
    variant: Hashable  # adapter, autocast, mode, whether rows are computed as if each were alone

    def serves(self, other: Key) -> bool:
        return (
            self.variant == other.variant
            and self.num_rows >= other.num_rows
            and all(mine >= needed for mine, needed in zip(self.widths, other.widths))
        )


@dataclass
class RecordedStep:
    """A graph with the buffers it reads and writes; `logits` is `(num_rows, vocab_size)`."""

    inputs: StaticInputs
    logits: Tensor
    graph: Graph


def bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows`: 1, 2, 4, 8, then in steps of 8, from 128 on of an eighth to a sixteenth."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def decode_graphs(model: PreTrainedModel, cache: PagedCache) -> DecodeGraphs | None:
    """The graphs of `model`, kept in the memory of `cache`; `None` where there can be none or the config wants none."""
    memory = cache.memory
    if not memory.config.capture:
        return None
    groups = [group.blocks for group in cache.groups.values()]
    found: DecodeGraphs | None = memory.graphs
    if found is None or found.made_for != (weakref.ref(model), model.device, groups):
        backend = graph_backend(model.device)
        found = memory.graphs = None if backend is None else DecodeGraphs(model, groups, backend)
    return found


class DecodeGraphs:
    """The graphs of one model over one memory. It holds neither, nor anything that does."""

    def __init__(self, model: PreTrainedModel, groups: list[GroupMemory], backend: GraphBackend) -> None:
        self.obstacle: str | None = None  # why nothing is recorded any more, until the model is another
        self._model, self._device, self._groups = self.made_for = weakref.ref(model), model.device, groups
        self._backend = backend
        self.runs_ahead = backend.runs_ahead
        self._windows = [group.spec.window for group in groups]
        self._block_size = groups[0].memory.config.block_size
        self._signature: Hashable = None  # of the model that the graphs were recorded of
        self._graphs: dict[Key, RecordedStep] = {}  # the one used last at the end
        self._blocks: list[weakref.ref[KVBlocks]] = []  # whose addresses the graphs know
        self._costs: list[CascadeCosts] | None = None  # of each group's layers together
        self._uses: Counter[tuple[int, Hashable]] = Counter()  # by bucket and variant; below 0 while memory is short
        self._num_short = 0  # recordings, since the last that succeeded, for which there was no memory
        self._outputs: dict[tuple[int, torch.dtype], Tensor] = {}  # that graphs share, by vocabulary and dtype
        self._forward: Forward | None = None  # of the runner whose step this is

    def begin(self, state: ModelState) -> None:
        """Drops graphs that were recorded of a model in another state; weights may have changed in place."""
        model = self._model()
        assert model is not None
        matmul = torch.backends.cuda.matmul
        found = (
            state.addresses(),
            # what else decides which kernels a forward launches, as far as it is not the model's or the step's
            torch.get_float32_matmul_precision(),
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            torch.are_deterministic_algorithms_enabled(),
            model_attention(model.config.get_text_config(decoder=True)),
            os.environ.get(VARIABLE),
            torch.get_num_threads(),
        )
        if found != self._signature:
            self.clear()
            self._signature, self.obstacle = found, None

    def clear(self) -> None:
        """Drops what was recorded."""
        self._graphs.clear()
        self._outputs.clear()

    def run(
        self, tokens: PackedTokens, adapter: str | None, forward: Forward, token_ids: Tensor | None = None
    ) -> Tensor | None:
        """A step of decodes as a replay: logits `(n, vocab_size)`, the caller's, or `None` if there is no graph for it.
        With `token_ids` `(n,)`, int64, on the device, in place of those of `tokens`, nothing is recorded."""
        if self.obstacle is not None:
            return None
        # No thread may move the blocks between the look at their addresses and the launch.
        with self._groups[0].memory.lock:
            self._follow_blocks()
            if not self._blocks or self._prefers_cascade(tokens.groups):
                return None
            self._forward = forward
            try:
                key = self._find(tokens, adapter, may_record=token_ids is None)
                return None if key is None else self._replay(key, tokens, token_ids)
            finally:
                self._forward = None

    def _find(self, tokens: PackedTokens, adapter: str | None, may_record: bool) -> Key | None:
        """Which graph serves a step: its own, recorded if it is time; else a larger one, or none."""
        is_training = getattr(self._model(), "training", False)
        variant = adapter, autocast_dtype(self._device), is_training, batch_invariant.get()
        # powers of two, so that few graphs serve long sequences; what a graph launches is sized for its widths
        least = -(-MIN_TABLE_TOKENS // self._block_size)
        widths = tuple(max(least, 1 << (max(map(len, group.tables)) - 1).bit_length()) for group in tokens.groups)
        wanted = Key(bucket(len(tokens.token_ids)), widths, variant)
        if wanted in self._graphs or not may_record:
            return wanted if wanted in self._graphs else None
        use = wanted.num_rows, variant
        if self._uses[use] >= MIN_USES:
            return self._capture(wanted, tokens)
        self._uses[use] += 1
        return min((key for key in self._graphs if key.serves(wanted)), key=lambda key: key[:2], default=None)

    def _replay(self, key: Key, tokens: PackedTokens, token_ids: Tensor | None) -> Tensor:
        step = self._graphs[key] = self._graphs.pop(key)
        count = len(tokens.token_ids)
        with self._backend.in_order():
            step.inputs.fill(tokens)
            if token_ids is not None:
                step.inputs.token_ids[0, :count].copy_(token_ids)
            step.graph.replay()
            return step.logits[:count].clone()  # the next replay overwrites them

    def _capture(self, key: Key, tokens: PackedTokens) -> Key | None:
        """Records a graph; if that fails, says why, and records no more of this model, or fewer where memory is short.
        `None`, too, while another thread records."""
        with _alone(self._device) as is_alone:
            return self._capture_alone(key, tokens) if is_alone else None

    def _capture_alone(self, key: Key, tokens: PackedTokens) -> Key | None:
        start = time.perf_counter()
        outputs: list[Tensor] = []
        try:
            inputs = StaticInputs(key.num_rows, key.widths, self._windows, self._block_size, self._device)
            # autocast converts weights in every replay: what its cache holds goes when autocast ends
            dtype = autocast_dtype(self._device)
            uncached = torch.autocast(self._device.type, dtype, enabled=dtype is not None, cache_enabled=False)
            with self._backend.in_order():
                inputs.fill(tokens)
                dtypes = {dtype, getattr(self._model(), "dtype", None)}
                with uncached:
                    graph = self._backend.capture(
                        functools.partial(_record, weakref.ref(self), inputs, outputs),
                        self._model(),
                        lambda replay: _check_replay(replay, outputs[0][: len(tokens.token_ids)], dtypes),
                    )
        except Exception as error:
            logger.debug("capturing %s failed", key, exc_info=True)
            if is_out_of_memory(error):
                self._num_short += 1
                self._uses[key.num_rows, key.variant] = -(MIN_USES << self._num_short)
                _log_once(f"for now no more of them, for want of memory ({_reason(error)})", self._backend.notice)
                return None
            self.obstacle = _reason(error)
            self.clear()
            _log_once(self.obstacle, self._backend.notice)
            return None
        self._num_short = 0
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = RecordedStep(inputs, outputs[0], graph)
        logger.debug("captured %s in %.0f ms", key, 1000 * (time.perf_counter() - start))
        return key

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Work on the device that begins within it comes after that of the last such context, also on other streams."""
        return self._backend.in_order()

    def _output(self, logits: Tensor) -> Tensor:
        num_rows, vocab_size = logits.shape
        kind = vocab_size, logits.dtype
        found = self._outputs.get(kind)
        if found is None or found.shape[0] < num_rows:
            rows = 1 << (num_rows - 1).bit_length()  # those of smaller graphs stay as long as these do
            with torch.inference_mode(False):
                found = self._outputs[kind] = torch.empty(rows, vocab_size, dtype=logits.dtype, device=self._device)
        return found[:num_rows]

    def _follow_blocks(self) -> None:
        """Drops all graphs if any layer's blocks are others than they were: the pool grew, or was made again."""
        blocks = [blocks for group in self._groups for blocks in group.storage.layers.values()]
        if len(blocks) != len(self._blocks) or any(ref() is not now for ref, now in zip(self._blocks, blocks)):
            self._graphs.clear()
            self._blocks = [weakref.ref(now) for now in blocks]
            self._costs = None

    def _prefers_cascade(self, groups: list[GroupTokens]) -> bool:
        """Whether in some group a cascade, which no graph has, saves more than the eager launch of all layers costs."""
        is_distinct = all(len({table[0] for table in group.tables}) == len(group.tables) for group in groups)
        if is_distinct or not self._backend.misses_cascade:
            return False  # no two decodes begin with the same block, as in most steps
        self._costs = self._costs or self._eager_costs()
        for group, window, costs in zip(groups, self._windows, self._costs):
            # as `find_cascade` does: rows whose window ends within them share nothing
            lengths = [length if window is None or length <= window else 0 for length in group.seq_lens]
            if plan_cascade(group.tables, lengths, self._block_size, costs):
                return True
        return False

    def _eager_costs(self) -> list[CascadeCosts]:
        """For each layer group what its layers move together, and what launching all layers of the model takes."""
        model: Any = self._model()
        config = model.config.get_text_config(decoder=True)
        query = torch.empty(1, getattr(config, "num_attention_heads", 1), 1, 1, device="meta")
        layers, found = [list(group.storage.layers.values()) for group in self._groups], []
        for group in layers:
            sums = zip(*(default_costs(query, blocks.keys, blocks.values) for blocks in group))
            token_bytes, state_bytes, rows_per_read, splits, _ = sums
            launches = EAGER_LAYER_BYTES * sum(map(len, layers))
            found.append(CascadeCosts(sum(token_bytes), sum(state_bytes), min(rows_per_read), max(splits), launches))
        return found


def _record(owner: weakref.ref[DecodeGraphs], inputs: StaticInputs, outputs: list[Tensor]) -> None:
    """The recorded forward, which keeps nothing else alive: `inputs` to `outputs`, which its first run fills."""
    graphs = owner()
    assert graphs is not None and graphs._forward is not None
    torch.clear_autocast_cache()  # a forward's own autocast may keep weights that were converted before the recording
    logits = graphs._forward(inputs.token_ids, inputs.positions, inputs.steps())[0]
    torch.clear_autocast_cache()
    if not outputs:
        outputs.append(graphs._output(logits))
    outputs[0].copy_(logits)


def _check_replay(replay: Callable[[], None], logits: Tensor, dtypes: set[torch.dtype | None]) -> None:
    """Raises [`NotCapturable`] unless a replay gives the logits `(n, vocab_size)` that its recording left, computed in
    `dtypes`."""
    expected = logits.float().clone()  # of float32, too, which the next line overwrites
    logits.zero_()
    replay()
    gap = (logits.float() - expected).square().mean(1).sqrt() / expected.std(1).clamp_min(1e-6)
    half = max((HALF_TOLERANCE[x] for x in (logits.dtype, *dtypes) if x in HALF_TOLERANCE), default=None)
    # in half precision a router may choose another expert for a row
    worst = float(gap.max() if half is None else gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):
        raise NotCapturable(f"what was recorded gives logits that are {worst:.1e} standard deviations from its own")


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first: the end of a broken capture fails, too."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[bool]:
    """Whether no other thread records on `device`, which has one stream for that. No garbage is collected meanwhile:
    that may free what waits for the device (pytorch#161037), or run a caller's code."""
    is_alone, collects = False, gc.isenabled()
    try:
        is_alone = _capture_lock(device).acquire(blocking=False)
        gc.disable()
        yield is_alone
    finally:
        if collects:
            gc.enable()
        if is_alone:
            _capture_lock(device).release()


@functools.cache
def _capture_lock(device: torch.device) -> threading.Lock:
    return threading.Lock()


@functools.cache
def _log_once(obstacle: str, level: int) -> None:
    logger.log(level, "Decode steps run operation by operation, which is slower than replaying them: %s", obstacle)


def graph_backend(device: torch.device) -> GraphBackend | None:
    """What records steps on `device`; `None` where there is nothing that does, or our kernels do not serve."""
    if device.type == "cpu":
        return Tapes() if cpp.is_available() and forced() in (None, "cpp") else None
    has_graphs = device.type == "cuda" and uses_triton(torch.empty(0, device=device))
    return CudaGraphs(device) if has_graphs else None


class GraphBackend(Protocol):
    """Records work to run it again."""

    runs_ahead: bool  # whether a replay goes on while the host does something else
    misses_cascade: bool  # whether an eager step reads blocks that rows share once, and a replay for each row
    notice: int  # the level at which the log tells why nothing is recorded

    def capture(self, run: Callable[[], None], model: PreTrainedModel, check: Check) -> Graph:
        """Runs `run` once or twice, and records it. What computes in ways of its own is checked. Raises what `run`
        raised, `NotCapturable` if it does what cannot be recorded."""

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Work that begins within it comes after the work of the last such context."""


class Graph(Protocol):
    def replay(self) -> None:
        """Does again what was recorded."""


class Tapes:
    """[`Tape`]s, on the CPU. Each holds its own memory."""

    runs_ahead, misses_cascade, notice = False, False, logging.INFO

    def capture(self, run: Callable[[], None], model: PreTrainedModel, check: Check) -> Tape:
        run()  # makes what is made on first use, and the memory of its result
        own = (x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor))
        all_of = (part for x in (*model.parameters(), *model.buffers(), *own) for part in plain_tensors(x))
        kept = {part.untyped_storage().data_ptr() for part in all_of}

        def is_kept(tensor: Tensor) -> bool:
            found = tensor.untyped_storage().data_ptr() in kept
            if not found and tensor.is_floating_point() and tensor.numel():
                raise NotCapturable("its forward takes numbers that no recorded operation made, perhaps in a thread")
            return found

        tape = Tape.record(run, is_kept)
        check(tape.replay)
        return tape

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
