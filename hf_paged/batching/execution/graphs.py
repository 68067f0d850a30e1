"""Steps as graphs: captured once per size of rows and tokens, replayed with other inputs. A graph
reads and writes the addresses it was recorded with, so a step's inputs are copied to buffers at
fixed addresses."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
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
from torch.utils._device import DeviceContext
from transformers import PreTrainedModel

from ... import compat
from ...attention.backends import cpp, obstacles
from ...attention.switch import model_attention
from ...cache.free_memory import is_out_of_memory
from ...cache.group_memory import GroupMemory
from ...cache.memory import autocast_dtype
from ...cache.paged_cache import PagedCache
from ...cache.storage import KVBlocks
from ...interrupts import is_interrupt, restoring
from ...kernels import VARIABLE, forced, uses_triton
from ...kernels.cpp.build import batch_invariant
from ...kernels.triton.cascade import CascadeCosts, SharedPrefix, default_costs, plan_cascade
from ...model.capability import TOLERANCE, first_line, half_tolerance
from ...model.ranks import is_sharded
from ...model.state import ModelState, plain_tensors
from ...model.writes import taken_back
from ...step import NotCapturable, StepMetadata
from ...switches import NOTHING
from ...tape.tape import Tape
from ...timing import timed
from ...topics import Topic
from .cuda_graphs import CudaGraphs
from .inputs import Bounds, PackedTokens, Sizes, StaticInputs
from .mixing import mixed, recorded

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, list[StepMetadata], Tensor | None], Tensor]
"""From token ids and positions `(1, n)`, each group's step and the tokens whose logits are wanted
(`None`: all), logits `(kept, vocab_size)`."""

Prefixes = tuple[tuple[SharedPrefix, ...], ...]
"""The prefixes that a step's decodes share, by layer group; empty if the step shares nothing."""

Check = Callable[[Callable[[], None]], None]
"""Runs a replay; raises `NotCapturable` unless it gives what the recorded forward just gave."""

# steps of a size before it is recorded; a recording takes about as long as three steps (an
# estimate, not measured)
MIN_USES = 3
# same, for a step with several adapters in a fixed order, which may soon change: about as many
# replays as pay for it
MIN_MIXED_USES = 64
# kept graphs: up to 256 decodes there are 27 sizes; the rest is for chunks, wider tables, adapters
MAX_GRAPHS = 64
# least capacity of block tables: short sequences need no new graph when they grow
MIN_TABLE_TOKENS = 1024
# Most tokens of chunks in a recorded step. With more, the GPU computes for longer than the host
# takes to launch (vLLM records up to 512 tokens): an estimate, not a measurement
MAX_CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS, MIN_CHUNKS, MIN_PREFIXES = 16, 4, 4

# Global options of torch that decide which kernels a forward launches: attributes and functions
# below `torch`. The settings by backend and operation follow the options that they inherit from and
# the legacy ones (`set_float32_matmul_precision`, `allow_tf32`), whose reading raises once a
# setting by backend was used.
_OPTIONS = (
    *(
        "backends.cuda.matmul.fp32_precision",
        "backends.cudnn.conv.fp32_precision",
        "backends.cudnn.rnn.fp32_precision",
    ),
    *(f"backends.mkldnn.{operation}.fp32_precision" for operation in ("matmul", "conv", "rnn")),
    *(
        f"backends.cuda.matmul.allow_{name}"
        for dtype in ("fp16", "bf16")
        for name in (
            f"{dtype}_reduced_precision_reduction",
            f"{dtype}_reduced_precision_reduction_split_k",
        )
    ),
    *("backends.cuda.matmul.allow_fp16_accumulation", "backends.cuda.preferred_blas_library"),
    *(f"backends.cuda.{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn")),
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    *(f"backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic")),
    *(
        "backends.mkldnn.enabled",
        "backends.mkldnn.deterministic",
        "backends.mha.get_fastpath_enabled",
    ),
    *("backends.opt_einsum.enabled", "backends.opt_einsum.strategy"),
    *(
        "are_deterministic_algorithms_enabled",
        "get_default_device",
        "get_default_dtype",
        "get_num_threads",
    ),
)


def torch_options() -> tuple[Any, ...]:
    """The values of torch's global options that a recorded step depends on; `None` for those that
    this torch lacks."""
    return tuple(map(_option, _OPTIONS))


def _option(name: str) -> Any:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
    if callable(value):
        return value()
    return value


def active_mode() -> str | None:
    """The class of a mode that sees this thread's operations, and would see none of a recorded
    step; `None` if there is none. The mode behind `torch.set_default_device` sees only what a
    forward makes."""
    function_places = range(torch._C._len_torch_function_stack())
    functions = [torch._C._get_function_stack_at(place) for place in function_places]
    dispatch_places = range(torch._C._len_torch_dispatch_stack())
    dispatches = [torch._C._get_dispatch_stack_at(place) for place in dispatch_places]
    for mode in (*functions, *dispatches):
        if type(mode) is not DeviceContext:
            return type(mode).__name__
    return None


class Key(NamedTuple):
    """Identifies a recorded graph."""

    sizes: Sizes
    # adapters, autocast dtype, training mode, batch invariance, whether hidden states are kept,
    # options of torch
    variant: Hashable

    def serves(self, other: Key) -> bool:
        """Whether steps of key `other` may run with this graph: padded, with at most twice their
        chunk tokens, or without a cascade over shared prefixes."""
        mine = self.sizes
        needed = other.sizes
        if not _covers(self.variant, other.variant):
            return False
        if mine.decodes < needed.decodes:
            return False
        if any(width < least for width, least in zip(mine.widths, needed.widths)):
            return False
        if bool(mine.chunks) != bool(needed.chunks):
            return False
        if mine.chunks < needed.chunks:
            return False
        most = 2 * needed.chunk_tokens
        if not needed.chunk_tokens <= mine.chunk_tokens <= most:
            return False
        if not mine.prefixes:
            return True
        if not needed.prefixes:
            return False
        return all(map(_has_room, mine.prefixes, needed.prefixes))

    @property
    def use(self) -> Hashable:
        """The key without table widths, whose uses are counted as well: when tables outgrow a
        graph, the next is recorded at once."""
        sizes = self.sizes
        return (
            sizes.decodes,
            sizes.chunks,
            sizes.chunk_tokens,
            bool(sizes.prefixes),
            self.variant,
        )


def _covers(mine: Any, needed: Any) -> bool:
    """Whether the variants are equal, or differ only in adapters that the needed step does not
    use."""
    if isinstance(mine, tuple) and isinstance(needed, tuple):
        if mine[1:] == needed[1:]:
            mine = mine[0]
            needed = needed[0]
    if isinstance(mine, frozenset) and isinstance(needed, frozenset):
        return mine >= needed
    return bool(mine == needed)


def _has_room(mine: tuple[int, int], needed: tuple[int, int]) -> bool:
    """Whether a graph has room for a group's prefixes; not if the group has none, since launches
    would do nothing."""
    num_mine, width = mine
    num_needed, least = needed
    if bool(num_mine) != bool(num_needed):
        return False
    return num_mine >= num_needed and width >= least


@dataclass
class RecordedStep:
    """A graph with the buffers it reads and writes; `logits` is `(num_rows, vocab_size)`."""

    inputs: StaticInputs
    logits: Tensor
    graph: Graph
    held: Any = None  # tensors it reads beside the model, blocks and inputs
    adapters: Sequence[Hashable] | None = None  # keys of the adapters whose ranges are inputs


def bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows`: 1, 2, 4, 8, then in steps of 8, from 128 on in steps of 1/8
    to 1/16 of them."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    power = 1 << ((num_rows - 1).bit_length() - 4)
    step = max(8, power)
    return -(-num_rows // step) * step


def _power(least: int, number: int) -> int:
    """The least power of two that is at least `number`, but no less than `least`."""
    return max(least, 1 << (number - 1).bit_length())


def chunk_bucket(num_tokens: int) -> int:
    """Tokens of chunks in the graph for `num_tokens`: 16, 24, 32, 48, 64, 96, ..."""
    size = _power(MIN_CHUNK_TOKENS, num_tokens)
    smaller = size * 3 // 4
    if size > MIN_CHUNK_TOKENS and num_tokens <= smaller:
        return smaller
    return size


def draft_bucket(num_rows: int) -> int:
    """Rows of the graph for `num_rows` with drafts, when the number changes in every step: 1, 2, 4,
    8, 16, 24, 32, 48, 64, 96, ..."""
    if num_rows <= MIN_CHUNK_TOKENS:
        return bucket(num_rows)
    return chunk_bucket(num_rows)


def step_graphs(model: PreTrainedModel, cache: PagedCache) -> StepGraphs | None:
    """The graphs of `model`, kept in the memory of `cache`; `None` if the config turns them off or
    none can be made."""
    memory = cache.memory
    if not memory.config.capture or is_sharded(model):
        # communication between processes cannot be recorded
        return None
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices - {torch.device("meta")}) > 1:
        return None  # a recording covers one device
    groups = [group.blocks for group in cache.groups.values()]
    specs = tuple(cache.groups)
    found: StepGraphs | None = memory.graphs.get(specs)
    made_for = (weakref.ref(model), model.device, groups)
    if found is None or found.made_for != made_for:
        backend = graph_backend(model.device)
        if backend is None:
            return None
        found = memory.graphs[specs] = StepGraphs(model, groups, backend)
    return found


class StepGraphs:
    """The graphs of one model over one memory. It keeps neither of them alive."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: list[GroupMemory],
        backend: GraphBackend,
    ) -> None:
        # why nothing is recorded any more, until the model changes
        self.obstacle: str | None = None
        self._unseen: str | None = None  # why no graph is used, as the model may change unseen
        self._model, self._device, self._groups = self.made_for = (
            weakref.ref(model),
            model.device,
            groups,
        )
        self._backend = backend
        self.runs_ahead = backend.runs_ahead
        self._windows = [group.spec.window for group in groups]
        self._block_sizes = [group.block_size for group in groups]
        self._signature: Hashable = None  # the recorded model's state, and options of torch
        self._graphs: dict[Key, RecordedStep] = {}  # in LRU order, the last used at the end
        self._blocks: list[weakref.ref[KVBlocks]] = []  # the blocks whose addresses the graphs use
        self._costs: list[CascadeCosts] | None = None  # by group, of all its layers together
        # by key and `Key.use`; below 0 while memory is short
        self._uses: Counter[Hashable] = Counter()
        # the most that is recorded of "decodes", "chunks" (tokens) and "prefixes"
        self._limits: dict[str, int] = {}
        self._num_short = 0  # recordings that ran out of memory since the last success
        # shared by graphs, by vocabulary size and dtype
        self._outputs: dict[tuple[int, torch.dtype], Tensor] = {}
        self._forward: Forward | None = None  # of the runner whose step is running

    def begin(self, state: ModelState) -> None:
        """Drops all graphs if they were recorded with the model in another state; in-place weight
        changes are fine."""
        model = self._model()
        assert model is not None
        text_config = model.config.get_text_config(decoder=True)
        signature = (
            state.addresses(),
            torch_options(),
            model_attention(text_config),
            os.environ.get(VARIABLE),
        )
        self._unseen = state.unseen
        if signature != self._signature:
            self.clear()
            self._uses.clear()  # a model that changes again and again is not recorded each time
            self._signature, self.obstacle, self._limits = signature, None, {}

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
        """Runs a step as a replay; returns logits `(len(tokens.last), vocab_size)`, which the
        caller owns, or `None` if no graph serves it. `token_ids` `(n,)`, int64, on the device,
        replace those of a step of decodes only; nothing is recorded then. `keeps_hidden`: whether
        the forward also stores hidden states."""
        if self.obstacle is not None:
            return None
        if not self._is_recorded(tokens):
            return None
        if self._is_observed():
            return None
        # no thread may move the blocks between the check of their addresses and the launch
        with self._groups[0].memory.lock:
            self._follow_blocks()
            if not self._blocks:
                return None
            self._forward = forward
            try:
                prefixes = self._shared_prefixes(tokens)
                key = self._find(
                    tokens,
                    prefixes,
                    variant,
                    keeps_hidden,
                    may_record=token_ids is None,
                )
                if key is None:
                    return None
                return self._replay(key, tokens, prefixes, token_ids)
            finally:
                self._forward = None

    def _is_observed(self) -> bool:
        """Whether a replay might bypass a mode, or changes that cannot be seen; notes why."""
        has_modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        mode = None
        if has_modes:
            mode = active_mode()
        reason = self._unseen
        if mode is not None:
            reason = f"a replay would bypass the active `{mode}`"
        if reason is None:
            return False
        reasons = obstacles.get()
        if reasons is not None:
            reasons.add(Topic.RECORDING(f"decode steps are not recorded: {reason}"))
        return True

    def _is_recorded(self, tokens: PackedTokens) -> bool:
        """Whether such steps are recorded: decodes that all want logits, and on some backends steps
        with few chunk tokens."""
        num_chunk_tokens = len(tokens.token_ids) - tokens.num_decodes
        limits = self._limits
        if not num_chunk_tokens:
            is_small = tokens.num_decodes <= limits.get("decodes", tokens.num_decodes)
            return is_small and len(tokens.last) == tokens.num_decodes
        if self._backend.decodes_alone:
            return False
        return num_chunk_tokens <= limits.get("chunks", MAX_CHUNK_TOKENS)

    def _find(
        self,
        tokens: PackedTokens,
        prefixes: Prefixes,
        variant: Hashable,
        keeps_hidden: bool,
        may_record: bool,
    ) -> Key | None:
        """Returns the key of the graph for a step: the exact one, recorded once used often enough;
        else a larger one, or `None`."""
        is_training = getattr(self._model(), "training", False)
        options = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch._C._get_deterministic_algorithms(),
        )
        full_variant = (
            variant,
            autocast_dtype(self._device),
            is_training,
            batch_invariant.get(),
            keeps_hidden,
            *options,
        )
        wanted = Key(self._sizes(tokens, prefixes), full_variant)
        if wanted in self._graphs:
            return wanted
        if not may_record:
            return None

        def padding(key: Key) -> tuple[Any, ...]:
            sizes = key.sizes
            loses_cascade = bool(wanted.sizes.prefixes) - bool(sizes.prefixes)
            return loses_cascade, sizes.tokens, sizes.widths

        candidates = (key for key in self._graphs if key.serves(wanted))
        serving = min(candidates, key=padding, default=None)
        mix = mixed.get()
        least = MIN_MIXED_USES
        if mix is None or mix.can_record:
            least = MIN_USES
        is_due = self._uses[wanted] >= least
        if not is_due and serving is None:
            is_due = self._uses[wanted.use] >= least
        if is_due:
            return self._capture(wanted, tokens, prefixes)
        self._uses.update((wanted, wanted.use))
        return serving

    def _sizes(self, tokens: PackedTokens, prefixes: Prefixes) -> Sizes:
        """The step's sizes rounded up to few values, such as powers of two, so that few graphs
        serve many steps."""
        least = [-(-MIN_TABLE_TOKENS // size) for size in self._block_sizes]
        widths = []
        for blocks, group in zip(least, tokens.groups):
            longest = max(map(len, group.tables))
            widths.append(_power(blocks, longest))
        shared = []
        for blocks, group_prefixes in zip(least, prefixes):
            room = (0, 0)
            if group_prefixes:
                most_blocks = max(prefix.num_blocks for prefix in group_prefixes)
                num_prefixes = _power(MIN_PREFIXES, len(group_prefixes))
                room = (num_prefixes, _power(blocks, most_blocks))
            shared.append(room)
        decodes = tokens.num_decodes
        num_tokens = len(tokens.token_ids)
        mix = mixed.get()
        num_adapters = 0
        if mix is not None and mix.can_record:
            num_adapters = len(mix.adapters)
        if num_tokens == decodes:
            rows = draft_bucket(decodes) if tokens.has_drafts else bucket(decodes)
            return Sizes(
                rows,
                tuple(widths),
                prefixes=tuple(shared),
                ranges=num_adapters,
            )
        num_chunks = len(tokens.query_start) - 1 - decodes
        chunks = _power(MIN_CHUNKS, num_chunks)
        # always more tokens than rows: the number of logits then tells whether a forward ignores
        # `logits_to_keep`
        chunk_tokens = chunk_bucket(max(num_tokens - decodes, chunks + 1))
        rows = 0
        if decodes:
            rows = _power(1, decodes)
        return Sizes(
            rows,
            tuple(widths),
            chunks,
            chunk_tokens,
            tuple(shared),
            2 * num_adapters,
        )

    def _replay(
        self,
        key: Key,
        tokens: PackedTokens,
        prefixes: Prefixes,
        token_ids: Tensor | None,
    ) -> Tensor:
        step = self._graphs[key] = self._graphs.pop(key)
        with self._backend.in_order():
            ranges = _ranges(step.adapters, tokens)
            step.inputs.fill(tokens, prefixes, ranges)
            if token_ids is not None:
                replaced = step.inputs.token_ids[0, : len(token_ids)]
                replaced.copy_(token_ids)
            step.graph.replay()
            logits = step.logits[: len(tokens.last)]
            return logits.clone()  # the next replay overwrites them

    def _capture(
        self,
        key: Key,
        tokens: PackedTokens,
        prefixes: Prefixes,
    ) -> Key | None:
        """Records a graph; `None` if that fails, or while another thread records. A failure is
        logged, and then no or fewer such graphs are recorded. Interrupts wait for the end: torch
        pops and pushes the modes of a recording, and an interrupt there would leave a mode
        behind."""
        with timed("record"), _alone(self._device) as is_alone:
            if not is_alone:
                return None
            return self._capture_alone(key, tokens, prefixes)

    def _capture_alone(
        self,
        key: Key,
        tokens: PackedTokens,
        prefixes: Prefixes,
    ) -> Key | None:
        start = time.perf_counter()
        outputs: list[Tensor] = []
        try:
            inputs = StaticInputs(
                key.sizes,
                self._windows,
                self._block_sizes,
                self._device,
            )
            mix = mixed.get()
            deltas = None
            adapters = None
            if mix is not None and key.sizes.ranges:
                has_chunks = key.sizes.chunks > 0
                deltas = mix.record(inputs.ranges, key.sizes.tokens, has_chunks)
                adapters = [adapter.key for adapter in mix.adapters]
            # without autocast's cache each replay converts the weights: cached copies are freed
            # when autocast ends
            dtype = autocast_dtype(self._device)
            uncached = torch.autocast(
                self._device.type,
                dtype,
                enabled=dtype is not None,
                cache_enabled=False,
            )
            with self._backend.in_order():
                inputs.fill(tokens, prefixes, _ranges(adapters, tokens))
                model = self._model()
                dtypes = {dtype, getattr(model, "dtype", None)}
                record = functools.partial(
                    _record,
                    weakref.ref(self),
                    inputs,
                    outputs,
                    deltas,
                )
                num_logits = max(1, len(tokens.last))

                def check(replay: Callable[[], None]) -> None:
                    _check_replay(replay, outputs[0][:num_logits], dtypes)

                with uncached, taken_back(model):
                    graph = self._backend.capture(record, model, check)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.debug("capturing %s failed", key, exc_info=True)
            if is_out_of_memory(error):
                self._num_short += 1
                self._uses[key] = self._uses[key.use] = -(MIN_USES << self._num_short)
                _log_once(
                    f"there is no memory for more of them at present ({_reason(error)})",
                    self._backend.notice,
                )
                return None
            self._refuse(key, _reason(error))
            return None
        self._num_short = 0
        while len(self._graphs) >= MAX_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            # avoids recording evicted graphs again and again
            self._uses[oldest] = self._uses[oldest.use] = 0
        held_too: Any = deltas
        if not deltas and mix is not None:
            held_too = mix.tables
        self._graphs[key] = RecordedStep(
            inputs,
            outputs[0],
            graph,
            held_too,
            adapters,
        )
        milliseconds = 1000 * (time.perf_counter() - start)
        logger.debug("captured %s in %.0f ms", key, milliseconds)
        return key

    def _refuse(self, key: Key, reason: str) -> None:
        """Stops recording such steps of this size or larger; all steps of this model if no decodes
        are recorded."""
        sizes = key.sizes
        kind, size = "decodes", sizes.decodes
        if sizes.prefixes:  # the step is tried again without them
            kind, size = "prefixes", 1
            plain = {}
            for known, step in self._graphs.items():
                if not known.sizes.prefixes:
                    plain[known] = step
            self._graphs = plain
        elif sizes.chunks:
            kind, size = "chunks", sizes.chunk_tokens
        has_decodes = any(not known.sizes.chunks for known in self._graphs)
        if kind == "decodes" and not has_decodes:
            self.obstacle = reason
            self.clear()
            _log_once(reason, self._backend.notice)
            return
        size_for = chunk_bucket if kind == "chunks" else bucket
        smaller = (number for number in range(1, size) if size_for(number) < size)
        limit = max(smaller, default=0)
        self._limits[kind] = limit
        logger.info("steps with %s are not recorded above %d: %s", kind, limit, reason)

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Orders the device work within it after that of the last such context, also across
        streams."""
        return self._backend.in_order()

    def _output(self, logits: Tensor) -> Tensor:
        num_rows, vocab_size = logits.shape
        kind = (vocab_size, logits.dtype)
        output = self._outputs.get(kind)
        if output is None or output.shape[0] < num_rows:
            # smaller graphs keep the outputs they were recorded with
            rows = 1 << (num_rows - 1).bit_length()
            with torch.inference_mode(False):
                output = self._outputs[kind] = torch.empty(
                    rows,
                    vocab_size,
                    dtype=logits.dtype,
                    device=self._device,
                )
        return output[:num_rows]

    def _follow_blocks(self) -> None:
        """Drops all graphs if a layer's blocks were replaced: the pool grew or was rebuilt."""
        blocks: list[KVBlocks] = []
        for group in self._groups:
            blocks += group.storage.layers.values()
        held = list(map(weakref.ref.__call__, self._blocks))
        if len(held) != len(blocks) or not all(map(operator.is_, held, blocks)):
            self._graphs.clear()
            self._blocks = [weakref.ref(now) for now in blocks]
            self._costs = None

    def _shared_prefixes(self, tokens: PackedTokens) -> Prefixes:
        """The prefixes of each layer group that are worth reading once for several decodes; empty
        if there are none."""
        if self._backend.decodes_alone or "prefixes" in self._limits:
            return ()
        num_decodes = tokens.num_decodes
        shared = []
        tables = [group.tables[:num_decodes] for group in tokens.groups]
        num_firsts = (len({table[0] for table in group_tables}) for group_tables in tables)
        if all(number == num_decodes for number in num_firsts):
            return ()  # no two begin with the same block, as in most steps
        self._costs = self._costs or self._cascade_costs()
        groups = zip(
            tokens.groups,
            tables,
            self._windows,
            self._block_sizes,
            self._costs,
        )
        for group, group_tables, window, size, costs in groups:
            # as in `find_cascade`: rows longer than their window share nothing
            lengths = group.seq_lens[:num_decodes]
            if window is not None:
                lengths = [length if length <= window else 0 for length in lengths]
            shared.append(plan_cascade(group_tables, lengths, size, costs))
        return tuple(shared) if any(shared) else ()

    def _cascade_costs(self) -> list[CascadeCosts]:
        """Each layer group's costs, of all its layers together; where kernels have no cascades,
        they save nothing."""
        model: Any = self._model()
        text_config = model.config.get_text_config(decoder=True)
        configs = compat.layer_configs(text_config)
        found = []
        for group in self._groups:
            layers = group.storage.layers
            heads = []
            for index in layers:
                config = configs[index % len(configs)]
                heads.append(getattr(config, "num_attention_heads", None))
            tiles: list[Tensor] = []
            for blocks in layers.values():
                tiles += blocks.tiles
            is_counted = bool(layers) and all(isinstance(count, int) for count in heads)
            if not is_counted or any(tile.shape[3] > 512 for tile in tiles):
                no_savings = CascadeCosts(
                    token_bytes=0,
                    state_bytes=1,
                    rows_per_read=1,
                )
                found.append(no_savings)
                continue
            queries = [torch.empty(1, count, 1, 1, device="meta") for count in heads]
            pairs = zip(queries, layers.values())
            layer_costs = []
            for query, blocks in pairs:
                costs = default_costs(query, blocks.keys, blocks.values)
                layer_costs.append(costs)
            token_bytes, state_bytes, rows_per_read, splits, overhead_bytes = zip(*layer_costs)
            total = (
                sum(token_bytes),
                sum(state_bytes),
                min(rows_per_read),
                max(splits),
                sum(overhead_bytes),
            )
            found.append(CascadeCosts(*total))
        return found


def _ranges(
    adapters: Sequence[Hashable] | None,
    tokens: PackedTokens,
) -> list[tuple[Bounds, Bounds]]:
    """The token ranges of these adapters in this thread's step."""
    mix = mixed.get()
    if adapters is None or mix is None:
        return []
    num_tokens = len(tokens.token_ids)
    return mix.ranges(adapters, tokens.num_decodes, num_tokens)


def _record(
    owner: weakref.ref[StepGraphs],
    inputs: StaticInputs,
    outputs: list[Tensor],
    deltas: Any = None,
) -> None:
    """Runs the forward that is recorded, from `inputs` to `outputs`, which its first run makes.
    `deltas`: what adapters add, if the step reads their token ranges on the device. `owner` is
    weak: a recording keeps nothing else alive."""
    graphs = owner()
    assert graphs is not None and graphs._forward is not None
    # the model's autocast may hold weights that were converted before the recording
    torch.clear_autocast_cache()
    outer = recorded.set(deltas)
    try:
        logits = graphs._forward(
            inputs.token_ids,
            inputs.positions,
            inputs.steps(),
            inputs.kept,
        )
    finally:
        recorded.reset(outer)
    torch.clear_autocast_cache()
    if not outputs:
        outputs.append(graphs._output(logits))
    outputs[0].copy_(logits)


def _check_replay(
    replay: Callable[[], None],
    logits: Tensor,
    dtypes: set[torch.dtype | None],
) -> None:
    """Raises [`NotCapturable`] unless a replay gives the logits `(n, vocab_size)` of the recorded
    run, computed in `dtypes`."""
    # `float` copies no float32, which the next line would overwrite
    expected = logits.float().clone()
    logits.zero_()
    replay()
    errors = (logits.float() - expected).square().mean(1).sqrt()
    gap = errors / expected.std(1).clamp_min(1e-6)
    half = half_tolerance((logits.dtype, *dtypes), logits.device)
    if half is None:
        worst = float(gap.max())
    else:
        # the median in half precision, where a router may choose another expert for a row
        worst = float(gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):
        raise NotCapturable(
            f"what was recorded gives logits that are {worst:.1e} standard deviations from its own"
        )


def _reason(error: BaseException) -> str:
    """The first line of the first error: ending a broken capture raises further ones."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@restoring
def _alone(device: torch.device) -> Iterator[bool]:
    """Yields whether no other thread records on `device`, which has one capture stream. Turns off
    garbage collection meanwhile: it may free objects that wait for the device (pytorch#161037), or
    run a caller's code."""
    is_alone = False
    collects = gc.isenabled()
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
    message = Topic.RECORDING(
        "steps are not recorded, and run operation by operation, which is slower: %s"
    )
    logger.log(level, message, obstacle)


def graph_backend(device: torch.device) -> GraphBackend | None:
    """The backend that records steps on `device`; `None` if there is none, or our kernels are not
    used."""
    if device.type == "cpu":
        if not cpp.is_available() or forced() not in (None, "cpp"):
            return None
        return Tapes()
    if device.type != "cuda":
        return None
    if not uses_triton(torch.empty(0, device=device)):
        return None
    return CudaGraphs(device)


class GraphBackend(Protocol):
    """Records work to run it again."""

    runs_ahead: bool  # whether a replay runs while the host does something else
    # whether it records decodes only: no chunks, whose steps compute for long, and no prefixes
    decodes_alone: bool
    notice: int  # log level of the reason why nothing is recorded

    def capture(
        self,
        run: Callable[[], None],
        model: PreTrainedModel,
        check: Check,
    ) -> Graph:
        """Runs `run` once or twice, and records it. A replay that does not just repeat the same
        kernels must pass `check`. Raises what `run` raises, and `NotCapturable` if it cannot be
        recorded."""

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Orders the work within it after that of the last such context."""


class Graph(Protocol):
    def replay(self) -> None:
        """Runs the recorded work again."""


class Tapes:
    """[`Tape`]s, on the CPU. Each has memory for its intermediate values."""

    runs_ahead = False
    decodes_alone = True
    notice = logging.INFO

    def capture(
        self,
        run: Callable[[], None],
        model: PreTrainedModel,
        check: Check,
    ) -> Tape:
        run()  # initializes lazily built objects, and allocates the result
        values = (value for module in model.modules() for value in vars(module).values())
        attributes = (value for value in values if isinstance(value, Tensor))
        mix = mixed.get()
        added = []
        if mix is not None:
            added = mix.tensors
        parts = (
            part
            for tensor in (*model.parameters(), *model.buffers(), *attributes, *added)
            for part in plain_tensors(tensor)
        )
        kept = {part.untyped_storage().data_ptr() for part in parts}

        def is_kept(tensor: Tensor) -> bool:
            is_known = tensor.untyped_storage().data_ptr() in kept
            if not is_known and tensor.is_floating_point() and tensor.numel():
                raise NotCapturable(
                    "its forward takes numbers that no recorded operation made, perhaps in a thread"
                )
            return is_known

        tape = Tape.record(run, is_kept)
        check(tape.replay)
        return tape

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        return NOTHING
