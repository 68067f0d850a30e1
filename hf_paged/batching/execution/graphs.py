"""Steps as graphs: captured once per size of rows and tokens, replayed with other inputs. A graph reads and writes the
addresses it was recorded with, so a step's inputs are copied to buffers at fixed addresses."""

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
from collections.abc import Callable, Hashable, Iterator, Sequence
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
from ...interrupts import held
from ...kernels import VARIABLE, forced, uses_triton
from ...kernels.cpp.build import batch_invariant
from ...kernels.triton.cascade import CascadeCosts, SharedPrefix, default_costs, plan_cascade
from ...model.capability import HALF_TOLERANCE, TOLERANCE, first_line
from ...model.ranks import is_sharded
from ...model.state import ModelState, plain_tensors
from ...step import NotCapturable, StepMetadata
from ...tape.tape import Tape
from .cuda_graphs import CudaGraphs
from .inputs import Bounds, PackedTokens, Sizes, StaticInputs
from .mixing import mixed, recorded

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, list[StepMetadata], Tensor | None], Tensor]
"""From token ids and positions `(1, n)`, each group's step and the tokens whose logits are wanted (`None`: all), logits
`(kept, vocab_size)`."""

Prefixes = tuple[tuple[SharedPrefix, ...], ...]
"""The prefixes that a step's decodes share, by layer group; empty if the step shares nothing."""

Check = Callable[[Callable[[], None]], None]
"""Runs a replay; raises `NotCapturable` unless it gives what the recorded forward just gave."""

# steps of a size before it is recorded; a recording takes about as long as three steps (an estimate, not measured)
MIN_USES = 3
# same, for a step with several adapters in a fixed order, which may soon change: about as many replays as pay for it
MIN_MIXED_USES = 64
MAX_GRAPHS = 64  # kept graphs: up to 256 decodes there are 27 sizes; the rest is for chunks, wider tables, adapters
MIN_TABLE_TOKENS = 1024  # least capacity of block tables: short sequences need no new graph when they grow
# Most tokens of chunks in a recorded step. With more, the GPU computes for longer than the host takes to launch (vLLM
# records up to 512 tokens): an estimate, not a measurement
MAX_CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS, MIN_CHUNKS, MIN_PREFIXES = 16, 4, 4

# Global options of torch that decide which kernels a forward launches: attributes and functions below `torch`. The
# settings by backend and operation follow the options that they inherit from and the legacy ones
# (`set_float32_matmul_precision`, `allow_tf32`), whose reading raises once a setting by backend was used.
_OPTIONS = (
    *("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"),
    *(f"backends.mkldnn.{operation}.fp32_precision" for operation in ("matmul", "conv", "rnn")),
    *(
        f"backends.cuda.matmul.allow_{name}"
        for dtype in ("fp16", "bf16")
        for name in (f"{dtype}_reduced_precision_reduction", f"{dtype}_reduced_precision_reduction_split_k")
    ),
    *("backends.cuda.matmul.allow_fp16_accumulation", "backends.cuda.preferred_blas_library"),
    *(f"backends.cuda.{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn")),
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    *(f"backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic")),
    *("backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mha.get_fastpath_enabled"),
    *("backends.opt_einsum.enabled", "backends.opt_einsum.strategy"),
    *("are_deterministic_algorithms_enabled", "get_default_dtype", "get_num_threads"),
)


def torch_options() -> tuple[Any, ...]:
    """The values of torch's global options that a recorded step depends on; `None` for those that this torch lacks."""
    return tuple(map(_option, _OPTIONS))


def _option(name: str) -> Any:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
    return value() if callable(value) else value


class Key(NamedTuple):
    """Identifies a recorded graph."""

    sizes: Sizes
    variant: Hashable  # adapters, autocast dtype, training mode, batch invariance, whether hidden states are kept

    def serves(self, other: Key) -> bool:
        """Whether steps of key `other` may run with this graph: padded, with at most twice their chunk tokens, or
        without a cascade over shared prefixes."""
        mine, needed = self.sizes, other.sizes
        return bool(
            _covers(self.variant, other.variant)
            and mine.decodes >= needed.decodes
            and all(width >= least for width, least in zip(mine.widths, needed.widths))
            and bool(mine.chunks) == bool(needed.chunks)
            and mine.chunks >= needed.chunks
            and needed.chunk_tokens <= mine.chunk_tokens <= 2 * needed.chunk_tokens
            and (not mine.prefixes or (needed.prefixes and all(map(_has_room, mine.prefixes, needed.prefixes))))
        )

    @property
    def use(self) -> Hashable:
        """The key without table widths, whose uses are counted as well: when tables outgrow a graph, the next is
        recorded at once."""
        sizes = self.sizes
        return sizes.decodes, sizes.chunks, sizes.chunk_tokens, bool(sizes.prefixes), self.variant


def _covers(mine: Any, needed: Any) -> bool:
    """Whether the variants are equal, or differ only in adapters that the needed step does not use."""
    if isinstance(mine, tuple) and isinstance(needed, tuple) and mine[1:] == needed[1:]:
        mine, needed = mine[0], needed[0]
    return bool(mine >= needed if isinstance(mine, frozenset) and isinstance(needed, frozenset) else mine == needed)


def _has_room(mine: tuple[int, int], needed: tuple[int, int]) -> bool:
    """Whether a graph has room for a group's prefixes; not if the group has none, since launches would do nothing."""
    return bool(mine[0]) == bool(needed[0]) and mine[0] >= needed[0] and mine[1] >= needed[1]


@dataclass
class RecordedStep:
    """A graph with the buffers it reads and writes; `logits` is `(num_rows, vocab_size)`."""

    inputs: StaticInputs
    logits: Tensor
    graph: Graph
    held: Any = None  # tensors it reads beside the model, blocks and inputs
    adapters: Sequence[Hashable] | None = None  # keys of the adapters whose ranges are inputs


def bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows`: 1, 2, 4, 8, then in steps of 8, from 128 on in steps of 1/8 to 1/16 of them."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def _power(least: int, number: int) -> int:
    """The least power of two that is at least `number`, but no less than `least`."""
    return max(least, 1 << (number - 1).bit_length())


def chunk_bucket(num_tokens: int) -> int:
    """Tokens of chunks in the graph for `num_tokens`: 16, 24, 32, 48, 64, 96, ..."""
    size = _power(MIN_CHUNK_TOKENS, num_tokens)
    return size * 3 // 4 if size > MIN_CHUNK_TOKENS and num_tokens <= size * 3 // 4 else size


def draft_bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows` with drafts, when the number changes in every step: 1, 2, 4, 8, 16, 24, 32, 48,
    64, 96, ..."""
    return bucket(num_rows) if num_rows <= MIN_CHUNK_TOKENS else chunk_bucket(num_rows)


def step_graphs(model: PreTrainedModel, cache: PagedCache) -> StepGraphs | None:
    """The graphs of `model`, kept in the memory of `cache`; `None` if the config turns them off or none can be made."""
    memory = cache.memory
    if not memory.config.capture or is_sharded(model):  # communication between processes cannot be recorded
        return None
    if len({parameter.device for parameter in model.parameters()} - {torch.device("meta")}) > 1:
        return None  # a recording covers one device
    groups = [group.blocks for group in cache.groups.values()]
    specs = tuple(cache.groups)
    found: StepGraphs | None = memory.graphs.get(specs)
    if found is None or found.made_for != (weakref.ref(model), model.device, groups):
        backend = graph_backend(model.device)
        if backend is None:
            return None
        found = memory.graphs[specs] = StepGraphs(model, groups, backend)
    return found


class StepGraphs:
    """The graphs of one model over one memory. It keeps neither of them alive."""

    def __init__(self, model: PreTrainedModel, groups: list[GroupMemory], backend: GraphBackend) -> None:
        self.obstacle: str | None = None  # why nothing is recorded any more, until the model changes
        self._model, self._device, self._groups = self.made_for = weakref.ref(model), model.device, groups
        self._backend = backend
        self.runs_ahead = backend.runs_ahead
        self._windows = [group.spec.window for group in groups]
        self._block_sizes = [group.block_size for group in groups]
        self._signature: Hashable = None  # the recorded model's state, and options of torch
        self._graphs: dict[Key, RecordedStep] = {}  # in LRU order, the last used at the end
        self._blocks: list[weakref.ref[KVBlocks]] = []  # the blocks whose addresses the graphs use
        self._costs: list[CascadeCosts] | None = None  # by group, of all its layers together
        self._uses: Counter[Hashable] = Counter()  # by key and `Key.use`; below 0 while memory is short
        self._limits: dict[str, int] = {}  # the most that is recorded of "decodes", "chunks" (tokens) and "prefixes"
        self._num_short = 0  # recordings that ran out of memory since the last success
        self._outputs: dict[tuple[int, torch.dtype], Tensor] = {}  # shared by graphs, by vocabulary size and dtype
        self._forward: Forward | None = None  # of the runner whose step is running

    def begin(self, state: ModelState) -> None:
        """Drops all graphs if they were recorded with the model in another state; in-place weight changes are fine."""
        model = self._model()
        assert model is not None
        found = (
            state.addresses(),
            torch_options(),
            model_attention(model.config.get_text_config(decoder=True)),
            os.environ.get(VARIABLE),
        )
        if found != self._signature:
            self.clear()
            self._signature, self.obstacle, self._limits = found, None, {}

    def clear(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()
        self._outputs.clear()

    def run(
        self,
        tokens: PackedTokens,
        variant: Hashable,
        forward: Forward,
        token_ids: Tensor | None = None,
        keeps_hidden: bool = False,
    ) -> Tensor | None:
        """Runs a step as a replay; returns logits `(len(tokens.last), vocab_size)`, which the caller owns, or `None` if
        no graph serves it. `token_ids` `(n,)`, int64, on the device, replace those of a step of decodes only; nothing
        is recorded then. `keeps_hidden`: whether the forward also stores hidden states."""
        if self.obstacle is not None or not self._is_recorded(tokens):
            return None
        # no thread may move the blocks between the check of their addresses and the launch
        with self._groups[0].memory.lock:
            self._follow_blocks()
            if not self._blocks:
                return None
            self._forward = forward
            try:
                prefixes = self._shared_prefixes(tokens)
                key = self._find(tokens, prefixes, variant, keeps_hidden, may_record=token_ids is None)
                return None if key is None else self._replay(key, tokens, prefixes, token_ids)
            finally:
                self._forward = None

    def _is_recorded(self, tokens: PackedTokens) -> bool:
        """Whether such steps are recorded: decodes that all want logits, and on some backends steps with few chunk
        tokens."""
        num_chunk_tokens, limits = len(tokens.token_ids) - tokens.num_decodes, self._limits
        if not num_chunk_tokens:
            is_small = tokens.num_decodes <= limits.get("decodes", tokens.num_decodes)
            return is_small and len(tokens.last) == tokens.num_decodes
        return not self._backend.decodes_alone and num_chunk_tokens <= limits.get("chunks", MAX_CHUNK_TOKENS)

    def _find(
        self, tokens: PackedTokens, prefixes: Prefixes, variant: Hashable, keeps_hidden: bool, may_record: bool
    ) -> Key | None:
        """Returns the key of the graph for a step: the exact one, recorded once used often enough; else a larger one,
        or `None`."""
        is_training = getattr(self._model(), "training", False)
        own = variant, autocast_dtype(self._device), is_training, batch_invariant.get(), keeps_hidden
        wanted = Key(self._sizes(tokens, prefixes), own)
        if wanted in self._graphs or not may_record:
            return wanted if wanted in self._graphs else None

        def padding(key: Key) -> tuple[Any, ...]:
            return bool(wanted.sizes.prefixes) - bool(key.sizes.prefixes), key.sizes.tokens, key.sizes.widths

        serving = min((key for key in self._graphs if key.serves(wanted)), key=padding, default=None)
        mix = mixed.get()
        least = MIN_USES if mix is None or mix.can_record else MIN_MIXED_USES
        if self._uses[wanted] >= least or (serving is None and self._uses[wanted.use] >= least):
            return self._capture(wanted, tokens, prefixes)
        self._uses.update((wanted, wanted.use))
        return serving

    def _sizes(self, tokens: PackedTokens, prefixes: Prefixes) -> Sizes:
        """The step's sizes rounded up to few values, such as powers of two, so that few graphs serve many steps."""
        least = [-(-MIN_TABLE_TOKENS // size) for size in self._block_sizes]
        widths = tuple(_power(each, max(map(len, group.tables))) for each, group in zip(least, tokens.groups))
        shared = tuple(
            (_power(MIN_PREFIXES, len(found)), _power(each, max(prefix.num_blocks for prefix in found)))
            if found
            else (0, 0)
            for each, found in zip(least, prefixes)
        )
        decodes, num_tokens, mix = tokens.num_decodes, len(tokens.token_ids), mixed.get()
        num_adapters = len(mix.adapters) if mix is not None and mix.can_record else 0
        if num_tokens == decodes:
            rows = draft_bucket(decodes) if tokens.has_drafts else bucket(decodes)
            return Sizes(rows, widths, prefixes=shared, ranges=num_adapters)
        chunks = _power(MIN_CHUNKS, len(tokens.query_start) - 1 - decodes)
        # always more tokens than rows: the number of logits then tells whether a forward ignores `logits_to_keep`
        chunk_tokens = chunk_bucket(max(num_tokens - decodes, chunks + 1))
        return Sizes(_power(1, decodes) if decodes else 0, widths, chunks, chunk_tokens, shared, 2 * num_adapters)

    def _replay(self, key: Key, tokens: PackedTokens, prefixes: Prefixes, token_ids: Tensor | None) -> Tensor:
        step = self._graphs[key] = self._graphs.pop(key)
        with self._backend.in_order():
            step.inputs.fill(tokens, prefixes, _ranges(step.adapters, tokens))
            if token_ids is not None:
                step.inputs.token_ids[0, : len(token_ids)].copy_(token_ids)
            step.graph.replay()
            return step.logits[: len(tokens.last)].clone()  # the next replay overwrites them

    def _capture(self, key: Key, tokens: PackedTokens, prefixes: Prefixes) -> Key | None:
        """Records a graph; `None` if that fails, or while another thread records. A failure is logged, and then no or
        fewer such graphs are recorded. Interrupts wait for the end: torch pops and pushes the modes of a recording, and
        an interrupt there would leave a mode behind."""
        with held(), _alone(self._device) as is_alone:
            return self._capture_alone(key, tokens, prefixes) if is_alone else None

    def _capture_alone(self, key: Key, tokens: PackedTokens, prefixes: Prefixes) -> Key | None:
        start = time.perf_counter()
        outputs: list[Tensor] = []
        try:
            inputs = StaticInputs(key.sizes, self._windows, self._block_sizes, self._device)
            mix, deltas, adapters = mixed.get(), None, None
            if mix is not None and key.sizes.ranges:
                deltas = mix.record(inputs.ranges, key.sizes.tokens, key.sizes.chunks > 0)
                adapters = [each.key for each in mix.adapters]
            # without autocast's cache each replay converts the weights: cached copies are freed when autocast ends
            dtype = autocast_dtype(self._device)
            uncached = torch.autocast(self._device.type, dtype, enabled=dtype is not None, cache_enabled=False)
            with self._backend.in_order():
                inputs.fill(tokens, prefixes, _ranges(adapters, tokens))
                dtypes = {dtype, getattr(self._model(), "dtype", None)}
                with uncached:
                    graph = self._backend.capture(
                        functools.partial(_record, weakref.ref(self), inputs, outputs, deltas),
                        self._model(),
                        lambda replay: _check_replay(replay, outputs[0][: max(1, len(tokens.last))], dtypes),
                    )
        except Exception as error:
            logger.debug("capturing %s failed", key, exc_info=True)
            if is_out_of_memory(error):
                self._num_short += 1
                self._uses[key] = self._uses[key.use] = -(MIN_USES << self._num_short)
                _log_once(f"for now no more of them, for want of memory ({_reason(error)})", self._backend.notice)
                return None
            self._refuse(key, _reason(error))
            return None
        self._num_short = 0
        while len(self._graphs) >= MAX_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            self._uses[oldest] = self._uses[oldest.use] = 0  # avoids recording evicted graphs again and again
        held_too = deltas if deltas or mix is None else mix.tables
        self._graphs[key] = RecordedStep(inputs, outputs[0], graph, held_too, adapters)
        logger.debug("captured %s in %.0f ms", key, 1000 * (time.perf_counter() - start))
        return key

    def _refuse(self, key: Key, reason: str) -> None:
        """Stops recording such steps of this size or larger; all steps of this model if no decodes are recorded."""
        sizes = key.sizes
        kind, size = "decodes", sizes.decodes
        if sizes.prefixes:  # the step is tried again without them
            kind, size = "prefixes", 1
            self._graphs = {key: step for key, step in self._graphs.items() if not key.sizes.prefixes}
        elif sizes.chunks:
            kind, size = "chunks", sizes.chunk_tokens
        if kind == "decodes" and not any(not known.sizes.chunks for known in self._graphs):
            self.obstacle = reason
            self.clear()
            _log_once(reason, self._backend.notice)
            return
        size_for = chunk_bucket if kind == "chunks" else bucket
        self._limits[kind] = max((n for n in range(1, size) if size_for(n) < size), default=0)
        logger.info("Steps with %s are not recorded above %d: %s", kind, self._limits[kind], reason)

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Orders the device work within it after that of the last such context, also across streams."""
        return self._backend.in_order()

    def _output(self, logits: Tensor) -> Tensor:
        num_rows, vocab_size = logits.shape
        kind = vocab_size, logits.dtype
        found = self._outputs.get(kind)
        if found is None or found.shape[0] < num_rows:
            rows = 1 << (num_rows - 1).bit_length()  # smaller graphs keep the outputs they were recorded with
            with torch.inference_mode(False):
                found = self._outputs[kind] = torch.empty(rows, vocab_size, dtype=logits.dtype, device=self._device)
        return found[:num_rows]

    def _follow_blocks(self) -> None:
        """Drops all graphs if a layer's blocks were replaced: the pool grew or was rebuilt."""
        blocks = [blocks for group in self._groups for blocks in group.storage.layers.values()]
        if len(blocks) != len(self._blocks) or any(ref() is not now for ref, now in zip(self._blocks, blocks)):
            self._graphs.clear()
            self._blocks = [weakref.ref(now) for now in blocks]
            self._costs = None

    def _shared_prefixes(self, tokens: PackedTokens) -> Prefixes:
        """The prefixes of each layer group that are worth reading once for several decodes; empty if there are none."""
        if self._backend.decodes_alone or "prefixes" in self._limits:
            return ()
        num_decodes, found = tokens.num_decodes, []
        tables = [group.tables[:num_decodes] for group in tokens.groups]
        if all(len({table[0] for table in group}) == num_decodes for group in tables):
            return ()  # no two begin with the same block, as in most steps
        self._costs = self._costs or self._cascade_costs()
        groups = zip(tokens.groups, tables, self._windows, self._block_sizes, self._costs)
        for group, own, window, size, costs in groups:
            # as in `find_cascade`: rows longer than their window share nothing
            lengths = [length if window is None or length <= window else 0 for length in group.seq_lens[:num_decodes]]
            found.append(plan_cascade(own, lengths, size, costs))
        return tuple(found) if any(found) else ()

    def _cascade_costs(self) -> list[CascadeCosts]:
        """Each layer group's costs, of all its layers together; where kernels have no cascades, they save nothing."""
        model: Any = self._model()
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
        found = []
        for group in self._groups:
            layers = list(group.storage.layers.values())
            if not layers or not isinstance(heads, int) or any(x.shape[3] > 512 for each in layers for x in each.tiles):
                found.append(CascadeCosts(token_bytes=0, state_bytes=1, rows_per_read=1))
                continue
            query = torch.empty(1, heads, 1, 1, device="meta")
            sums = zip(*(default_costs(query, blocks.keys, blocks.values) for blocks in layers))
            token_bytes, state_bytes, rows_per_read, splits, overhead_bytes = sums
            total = sum(token_bytes), sum(state_bytes), min(rows_per_read), max(splits), sum(overhead_bytes)
            found.append(CascadeCosts(*total))
        return found


def _ranges(adapters: Sequence[Hashable] | None, tokens: PackedTokens) -> list[tuple[Bounds, Bounds]]:
    """The token ranges of these adapters in this thread's step."""
    mix = mixed.get()
    if adapters is None or mix is None:
        return []
    return mix.ranges(adapters, tokens.num_decodes, len(tokens.token_ids))


def _record(owner: weakref.ref[StepGraphs], inputs: StaticInputs, outputs: list[Tensor], deltas: Any = None) -> None:
    """Runs the forward that is recorded, from `inputs` to `outputs`, which its first run makes. `deltas`: what adapters
    add, if the step reads their token ranges on the device. `owner` is weak: a recording keeps nothing else alive."""
    graphs = owner()
    assert graphs is not None and graphs._forward is not None
    torch.clear_autocast_cache()  # the model's autocast may hold weights that were converted before the recording
    outer = recorded.set(deltas)
    try:
        logits = graphs._forward(inputs.token_ids, inputs.positions, inputs.steps(), inputs.kept)
    finally:
        recorded.reset(outer)
    torch.clear_autocast_cache()
    if not outputs:
        outputs.append(graphs._output(logits))
    outputs[0].copy_(logits)


def _check_replay(replay: Callable[[], None], logits: Tensor, dtypes: set[torch.dtype | None]) -> None:
    """Raises [`NotCapturable`] unless a replay gives the logits `(n, vocab_size)` of the recorded run, computed in
    `dtypes`."""
    expected = logits.float().clone()  # `float` copies no float32, which the next line would overwrite
    logits.zero_()
    replay()
    gap = (logits.float() - expected).square().mean(1).sqrt() / expected.std(1).clamp_min(1e-6)
    half = max((HALF_TOLERANCE[x] for x in (logits.dtype, *dtypes) if x in HALF_TOLERANCE), default=None)
    # the median in half precision, where a router may choose another expert for a row
    worst = float(gap.max() if half is None else gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):
        raise NotCapturable(f"what was recorded gives logits that are {worst:.1e} standard deviations from its own")


def _reason(error: BaseException) -> str:
    """The first line of the first error: ending a broken capture raises further ones."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[bool]:
    """Yields whether no other thread records on `device`, which has one capture stream. Turns off garbage collection
    meanwhile: it may free objects that wait for the device (pytorch#161037), or run a caller's code."""
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
    logger.log(level, "Steps run operation by operation, which is slower than replaying them: %s", obstacle)


def graph_backend(device: torch.device) -> GraphBackend | None:
    """The backend that records steps on `device`; `None` if there is none, or our kernels are not used."""
    if device.type == "cpu":
        return Tapes() if cpp.is_available() and forced() in (None, "cpp") else None
    has_graphs = device.type == "cuda" and uses_triton(torch.empty(0, device=device))
    return CudaGraphs(device) if has_graphs else None


class GraphBackend(Protocol):
    """Records work to run it again."""

    runs_ahead: bool  # whether a replay runs while the host does something else
    decodes_alone: bool  # whether it records decodes only: no chunks, whose steps compute for long, and no prefixes
    notice: int  # log level of the reason why nothing is recorded

    def capture(self, run: Callable[[], None], model: PreTrainedModel, check: Check) -> Graph:
        """Runs `run` once or twice, and records it. A replay that does not just repeat the same kernels must pass
        `check`. Raises what `run` raises, and `NotCapturable` if it cannot be recorded."""

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Orders the work within it after that of the last such context."""


class Graph(Protocol):
    def replay(self) -> None:
        """Runs the recorded work again."""


class Tapes:
    """[`Tape`]s, on the CPU. Each has memory for its intermediate values."""

    runs_ahead, decodes_alone, notice = False, True, logging.INFO

    def capture(self, run: Callable[[], None], model: PreTrainedModel, check: Check) -> Tape:
        run()  # initializes lazily built objects, and allocates the result
        own = (x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor))
        mix = mixed.get()
        added = [] if mix is None else mix.tensors
        all_of = (part for x in (*model.parameters(), *model.buffers(), *own, *added) for part in plain_tensors(x))
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
