"""The seams of the core: the protocols that features implement, and `EngineParts`, which passes
implementations to an engine. It contains no code of a feature; the protocols of rooms' modules are
in `hf_paged.rooms`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .plan import StepPlan

if TYPE_CHECKING:  # types of the core alone
    from torch import Tensor, nn
    from transformers import LogitsProcessor, PreTrainedModel

    from .attention.backends.parts import Part, PartPlan
    from .batching import request
    from .batching.arguments import RequestOptions
    from .batching.decoding.base import Draft, Fetch, LogitRows
    from .batching.execution.executor import Executor
    from .batching.execution.inputs import Bounds, PackedTokens
    from .batching.execution.rectangle import Rectangle
    from .batching.generation import Generation
    from .batching.loop import StepLoop
    from .batching.request import Request
    from .batching.scheduling.scheduler import Scheduler
    from .cache.block_manager import BlockManager
    from .cache.block_pool import BlockPool
    from .cache.free_memory import Reservation
    from .cache.group_memory import GroupMemory
    from .cache.groups import GroupSpec
    from .cache.kv_blocks import KVBlocks
    from .cache.memory import PagedMemory
    from .cache.paged_cache import PagedCache
    from .config import PagedConfig
    from .model.layout import Layout
    from .model.state import ModelState
    from .step import StepMetadata


# Drafts


class Drafter(Protocol):
    """Drafts the next tokens of a loop's rows, each a generation with one row. Drafts do not change
    the rows' tokens. `PagedEngine` makes one by `EngineParts.drafter`."""

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        """Begins to draft for a row whose request is not queued yet. Returns whether it also drafts
        the first new token, and the namespace within which the request shares prefixes, usually the
        request's own."""

    def detach(self, generation: Generation) -> None:
        """Ends a row, which need not be attached; also during a step of another thread."""

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> Iterable[tuple[Generation, Draft | Exception]]:
        """Called before each step, which without drafts has `num_rows` rows. Returns drafts of
        token ids below `num_embeddings` (`decoding.base.Draft`) for rows with a
        `Generation.sequence_to_draft`. An error that it returns ends its row; one that it raises
        ends the step, which is then recovered."""

    def accepted(self, generation: Generation, num_draft_tokens: int, num_accepted: int) -> None:
        """Called after a step has verified a row's draft and appended the new tokens."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Called after the forward of a step without prompts."""

    def reclaim(self) -> bool:
        """Frees the drafter's blocks for other rows; returns whether it had any."""

    def change_weights(self) -> None:
        """Called between steps when weights may have changed."""


MakeDrafter = Callable[..., Drafter]
"""Makes a drafter from a loop's model, `PagedConfig`, `PagedMemory`, `Runner`, `Scheduler` (a weak
proxy: nothing of a loop keeps it alive), and the function that makes other models' runners, in this
order."""


# Differences between the tokens of one forward


class ForwardContext(Protocol):
    """Distinguishes the tokens of a packed forward by more than ids and positions, such as their
    adapters, while its context manager is open."""

    variant: Hashable  # part of the keys of recorded steps
    names: Any  # another process makes the same context from these
    num_ranges: int = 0  # ranges of tokens, from `ranges`, that recorded steps read on the device
    is_fixed: bool = False  # whether a recorded step serves these ranges alone
    takes_chunks: bool = True  # whether recorded steps may have chunks
    tensors: Sequence[Tensor] = ()  # tensors that forwards read beside the model's

    def begin(self, num_tokens: int, head_tokens: list[int] | None) -> None:
        """Called before the model's forward of `num_tokens` tokens. `head_tokens`: those whose
        logits the head computes, if not all; in a recorded step, where only the device knows them,
        an empty list."""
        return None

    def ranges(
        self, keys: Sequence[Hashable], num_decodes: int, num_tokens: int
    ) -> list[tuple[Bounds, Bounds]]:
        """This step's ranges for a recorded step, in the order of its `keys`: (range of decodes,
        range of other tokens)."""
        return []

    def record(self, ranges: Tensor, most: int, has_others: bool) -> RecordedContext | None:
        """Called before a step of up to `most` tokens is recorded. The step reads `ranges` `(n, 2)`
        on the device: two for each key, or one if all tokens are decodes."""
        return None


class RecordedContext(Protocol):
    """The `ForwardContext` of a recorded step, which keeps it alive."""

    keys: Sequence[Hashable]  # those of its ranges

    def reading(self) -> AbstractContextManager[None]:
        """A context for each run of the forward that is recorded."""


# Adapters of requests


class Adapters(Protocol):
    """The adapters of a loop's requests (`Request.adapter`), made when the first request names
    one."""

    def admit(self, request: Request, bring_in: Callable[[], bool]) -> bool:
        """Admits a waiting request, with the memory that its adapter takes in the pool; returns
        whether it fits. Called with the memory's lock held, like `release`."""

    def release(self, request: Request) -> None:
        """Called after the request has left the running ones."""

    def prefetch(self, waiting: Sequence[Request]) -> None:
        """Called before each forward, with the requests to be admitted next."""

    def run(self, plan: StepPlan, executor: Executor) -> Tensor:
        """As `Runner.run`, each row with its adapter, in as few forwards (`Executor.compute`) as
        possible. Raises `RowsError` if an adapter cannot be used."""

    def using(self, adapter: Hashable) -> AbstractContextManager[ForwardContext | None]:
        """A context for a forward of rows with one adapter. Raises as `run`."""

    def forget_model(self) -> None:
        """Drops all state that depends on the model, which may have changed."""

    def counts(self) -> dict[str, int]:
        """Returns fields of `EngineStats`."""


# Steps that run again, or ahead


class Recorder(Protocol):
    """Records the packed steps of a model over one memory and replays them. The memory keeps the
    recorder, which outlives the runner of the steps."""

    def begin(self, state: ModelState, reads_keys: bool = False) -> None:
        """Called before steps of the model in this state: drops recordings of another state.
        `reads_keys`: whether the model's own code computes attention, with as many keys as block
        tables have room for."""

    def run(
        self,
        tokens: PackedTokens,
        context: ForwardContext | None,
        forward: Callable[..., Tensor],
        token_ids: Tensor | None = None,
        keeps_hidden: bool = False,
        kind: Hashable = None,
        states: Sequence[Any] = (),
        checked_as: Hashable = None,
    ) -> Tensor | None:
        """Runs a step as a replay; returns logits `(len(tokens.last), vocab_size)`, which the
        caller owns, or `None` if no recording serves it: `forward` then computes it, from token ids
        and positions `(1, n)`, the step of each layer group, the tokens whose logits are computed,
        and the context. `token_ids` `(n,)`, int64, on the device, replace those of `tokens`.
        `keeps_hidden`: whether the forward also stores hidden states. `kind`: steps of other kinds
        need a recording of their own. `states`: the layers of the rows' states, which the step
        changes; their tensors then belong to the recording, until other rows use it. `checked_as`:
        the kind of step for which a check holds; `None`: only steps whose forward reads keys are
        checked."""

    @property
    def is_checked(self) -> bool:
        """Whether the last replay is known to give the results of the model's own forward; else it
        has changed no states, and the caller runs that forward, too, and calls `check`."""

    def check(self, results: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Compares results of the model's own forward `(rows, ...)` with those of the last replay;
        if any differ, steps of its kind are no longer replayed."""

    def rectangles(self, model: PreTrainedModel, cache: PagedCache) -> RectangleRecorder:
        """Returns the part that records decode steps of rectangles of the model; `cache` is its
        empty cache."""

    def in_order(self) -> AbstractContextManager[None]:
        """A context for a step: orders its device work after the previous step's, also across
        streams."""

    def run_ahead(self, memory: PagedMemory, scheduler: Scheduler) -> RunAhead | None:
        """Returns the part that launches steps before their tokens are on the host; `None` if the
        host computes replays."""

    def clear(self) -> None:
        """Drops all recordings: their addresses are no longer valid, or their memory is needed."""


class RectangleRecorder(Protocol):
    """Records decode steps of rectangles and replays them."""

    def begin(self, state: ModelState | None) -> None:
        """As `Runner.begin`."""

    def run(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """Replays a step with the model inputs `prepared`; returns logits `(rows, vocab_size)`, or
        `None` if no recording serves the step. Until `is_checked`, the replay changes no states."""

    @property
    def is_checked(self) -> bool:
        """As `Recorder.is_checked`."""

    def check(self, rectangle: Rectangle, replayed: Tensor, expected: Tensor) -> None:
        """Compares the logits `(rows, vocab_size)` of the last step, a replay, and its states with
        those of the model's own forward; if they differ, no step of this kind is replayed."""


class RunAhead(Protocol):
    """Launches the next step while its input tokens are still being copied to the host."""

    def fetch(
        self,
        ready: list[tuple[Generation, LogitRows]],
        launch: Callable[[list[request.Sequence], Tensor], Tensor | None],
    ) -> Fetch | None:
        """Returns a function that copies the tokens of all open rows, `(n,)` in order, to the host
        and meanwhile launches the next step; `None` if these rows need the host. `launch` takes
        sequences and their next tokens `(n,)`, and returns logits `(n, vocab)` or `None`."""

    def take(self, plan: StepPlan) -> tuple[Tensor | None, int]:
        """Returns the logits `(n, vocab)` of the first `n` rows of a step, which were launched
        ahead, and `n`."""

    def clear(self) -> None:
        """Drops the step that was launched."""


MakeRecorder = Callable[["PreTrainedModel", "PagedCache"], "Recorder | None"]
"""Makes the recorder of a model's steps over the memory of `cache`, the model's empty cache. `None`
if nothing can be recorded."""


# The memory of blocks


class Storage(Protocol):
    """The memory behind the blocks of one layer group. A pool gives out their ids. The format of a
    block's content is that of `KVBlocks` and `kernels/quantized.py`."""

    pool: BlockPool  # of this storage, which orders the free blocks
    layers: dict[int, Any]  # `KVBlocks` of the layers made so far, by index

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes, of used and unused blocks."""

    @property
    def most_bytes(self) -> int | None:
        """Maximum bytes of the pool's blocks; `None`: `block_bytes` for each block."""

    @property
    def num_rows(self) -> int:
        """Blocks for which every layer has allocated memory."""

    @property
    def is_elastic(self) -> bool:
        """Whether blocks take no memory until first used."""

    @property
    def growth_step(self) -> int:
        """Minimum number of blocks by which a pool without a limit grows, where blocks take no
        memory until first used; 0: the memory chooses."""

    def reserve(self, reservation: Reservation, drops: bool) -> None:
        """Sets the sizes of layers that are made or grown from now on. `drops`: drops smaller
        layers, which is allowed only while no block is used or cached."""

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        """Returns a block of a layer with K/V like these, `(batch, heads, n, dim)`, on the meta
        device."""

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Allocates layer `index`, for K/V like these, and returns its blocks. Raises
        `MemoryError`, or `RuntimeError` of torch."""

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns
        its blocks. Raises `ValueError` if heads, dims or device differ."""

    def grow(self, num_blocks: int, most: int) -> None:
        """Grows every layer to at least `num_blocks` blocks, and at most `most`. Raises as
        `make`."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair; all are read
        before one is written."""

    def clear(self) -> None:
        """Frees all memory. No table may hold a block."""


StorageFactory = Callable[["PagedConfig", "GroupSpec", int, Callable[[], None]], Storage]
"""Makes the storage of a layer group, with an empty pool, from the config, the group, the tokens
per block and a function that the storage calls before it moves blocks to other addresses."""


class MappedRows(Protocol):
    """The rows of a layer as strided tensors, beside its blocks (`KVBlocks.rows`)."""

    def place(self, step: StepMetadata) -> PlacedRows | None:
        """Returns where the rows of a step can be read; `None`: only in blocks."""

    def strided_view(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as a view `(rows, heads, len(columns), dim)` for
        the model's own code, with zeros for padding; `None` if no single view covers the rows."""

    def disallow_views(self) -> None:
        """Makes `strided_view` return `None` from now on, since the model's code needs contiguous
        tensors."""

    def preserve_views(self) -> None:
        """Preserves borrowed views that are still alive. Call before writing to blocks."""


class PlacedRows(Protocol):
    """The rows of a step, which can be read while the step and these views live."""

    def parts(self, kv_heads: int) -> PartPlan:
        """Returns the parts of the step for the portable attention."""

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a part, each `(rows, kv_heads, length, dim)`."""


# Blocks evicted from the pool


class TierCounts(NamedTuple):
    """Figures of a tier, for `memory_stats`: bytes that it holds now, and counts of blocks so
    far."""

    host_bytes: int = 0
    disk_bytes: int = 0  # of the folder, as far as this process knows
    num_kept: int = 0
    num_restored: int = 0


class Tier(Protocol):
    """Keeps the content of blocks that the prefix cache of one block manager evicts. Its methods
    are called with the memory's lock held."""

    def keep(self, group: int, block_id: int, digest: bytes, is_verified: bool) -> None:
        """Keeps a block that is being evicted, by its digest (`prefix_index.Link`). Unless the
        weights that computed it are verified, the tier serves it only after `confirm`."""

    def reach(self, blocks: BlockManager, sequence: request.Sequence) -> int:
        """Returns how many tokens of a sequence `BlockManager.match` would find after
        `restore`."""

    def restore(self, blocks: BlockManager, sequence: request.Sequence) -> bool:
        """Registers kept blocks in the pool, for `match` to find, if that gives a longer prefix
        than the sequence has. `False`, with nothing changed, if there are no such blocks or too few
        free ones, or if they cannot be copied. The caller has verified the current weights."""

    @property
    def wants_confirmation(self) -> bool:
        """Whether many kept bytes are not verified."""

    def confirm(self) -> None:
        """Marks all kept blocks as computed with the last fingerprinted weights."""

    def discard(self) -> None:
        """Drops kept blocks that are not verified."""

    def counts(self) -> TierCounts: ...


MakeTier = Callable[
    ["PreTrainedModel", "PagedMemory", "BlockManager", "PagedConfig", "Layout"],
    tuple[Tier | None, str | None],
]
"""Returns the tier for a new loop of a model on these blocks, which may be that of an earlier loop;
or `None` and why there is none."""


# Several processes


class Processes(Protocol):
    """The processes that compute each forward of a model together, each with a shard of its weights
    and the K/V heads of that shard. Either all make the same calls, or one leads: it schedules and
    samples, and the others execute its orders."""

    leads: bool

    def minimum(self, number: int) -> int:
        """Returns the minimum of a number over all processes."""

    def agree(self, number: int) -> int:
        """Returns the first process's number, for decisions that must be equal although each
        process measures its own times."""

    def fingerprint(self, model: nn.Module, state: ModelState | None) -> bytes | None:
        """`model.state.fingerprint` over the shards of all processes; `None` if one cannot be
        read."""

    def check(self, plan: StepPlan) -> None:
        """Called before a step's forward. Raises `RankLostError` if another process has scheduled
        other tokens."""

    def run(self, tokens: PackedTokens, others: list[int], names: Any) -> None:
        """Announces the next `PackedRunner.compute`, with the context that has these `names`."""

    def forward(self) -> AbstractContextManager[None]:
        """A context for a forward of all processes: an error passes through if all of them raise
        one, else it becomes a `RankLostError`."""

    def moved(
        self, move: Callable[..., Any], group: GroupMemory, arguments: tuple[Any, ...], result: Any
    ) -> None:
        """Called after `move(group, *arguments)`, which is `group_memory.mirrored`, has returned
        `result`. Moves, in order, make all changes to the content of blocks, except the writes of
        forwards."""

    def adapters(self, method: str, *arguments: Any) -> str | None:
        """Makes the others call this method of their loop's `Adapters` before the next forward.
        For `"load"`, returns which of them cannot load an adapter, and why."""
        return None


class Leader(Processes, Protocol):
    """The processes that an engine leads."""

    def locked(self, lock: Any) -> AbstractContextManager[Any]:
        """Returns a context that holds the engine's lock and defers interrupts: one between two
        messages would leave the processes waiting for each other."""

    def check_request(self, options: RequestOptions) -> None:
        """Raises `ValueError` for options that an engine over several processes does not serve,
        `RuntimeError` once the engine is closed."""

    def choose_layout(self, choose: Callable[[], Layout]) -> Layout:
        """Calls `factory.choose_layout` in all processes, in this one through `choose`. Raises
        `ValueError` for a layout that is not packed."""

    def make(self, loop: StepLoop) -> None:
        """Makes the others create a loop's memory and executor."""

    def begin(self) -> None:
        """Makes the others begin work on the model's current state."""

    def retire(self) -> None:
        """Makes the others drop their memory and executor."""

    def close(self) -> None:
        """Makes `serve_rank` return in the others."""


# Grammars


class Grammars(Protocol):
    """Compiles the grammars of an engine's requests (`hf_paged.grammar`). Thread-safe."""

    def processor(
        self, options: RequestOptions, tokenizer: Any, model: PreTrainedModel
    ) -> LogitsProcessor:
        """Returns the logits processor for a request's `schema`, `regex` or `grammar`. Raises
        `ValueError` and `ImportError`."""


# All of them


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that a caller provides. For a field that is `None`, the engine makes
    the part that its config selects."""

    recorder: MakeRecorder | None = None
    tier: MakeTier | None = None
    storage: StorageFactory | None = None
    drafter: MakeDrafter | None = None


DEFAULT_PARTS = EngineParts()
