"""The seams of the core: the protocols of the objects through which it calls optional features, and
`EngineParts`, which passes implementations to an engine. This module contains no implementation.
`hf_paged.rooms` has the protocols of the features' modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
    from .cache.memory_stats import TierCounts
    from .cache.paged_cache import PagedCache
    from .config import PagedConfig
    from .model.layout import Layout
    from .model.state import ModelState
    from .rooms import RectangleRecorder
    from .step import StepMetadata


# Drafts


class Drafter(Protocol):
    """Drafts the next tokens of a loop's rows; each row is a separate `Generation`. Drafts do not
    change a row's tokens, but drawn ones (`Draft.is_drawn`) keep only their distribution. To guess
    in another way, write a `speculation.sources.Source` and a branch in `Speculator.attach`."""

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        """Begins to draft for a row, before its request is queued. Returns whether the row's first
        new token is also drafted, and the namespace in which the request shares prefixes, usually
        the request's own."""

    def detach(self, generation: Generation) -> None:
        """Stops drafting for a row, which need not be attached. May be called while another thread
        runs a step."""

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> Iterable[tuple[Generation, Draft | Exception]]:
        """Called before each step. Returns drafts (`decoding.base.Draft`) of token ids below
        `num_embeddings`, for attached rows that have a `Generation.sequence_to_draft`. `num_rows`:
        the number of unfinished rows of running requests, attached or not. An error returned for a
        row ends it. A raised error ends the step and, after recovery, reaches the step's caller."""

    def note_verified(
        self, generation: Generation, num_draft_tokens: int, num_accepted: int
    ) -> None:
        """Called after a step has verified a row's draft and appended the new tokens."""

    def note_decode_time(self, num_tokens: int, seconds: float) -> None:
        """Called after the forward of each step that has only decodes and drafts."""

    def reclaim(self) -> bool:
        """Frees the drafter's own blocks for other uses; returns whether it had any."""

    def handle_weight_change(self) -> None:
        """Called between steps after weights have changed: drops state that depends on them."""


MakeDrafter = Callable[..., Drafter]
"""Takes a loop's model, `PagedConfig`, `PagedMemory`, `Runner` and `Scheduler`, and the function
that makes the runners of other models. Returns a drafter. The scheduler is a weak proxy, so that
the drafter does not keep the loop alive."""


# Properties of the tokens of one forward


class ForwardContext(Protocol):
    """A property of a packed forward's tokens beyond their ids and positions, such as their
    adapters. It applies while the context manager that returned this object is open. A key stands
    for a value of the property, such as one adapter, and has ranges of tokens."""

    variant: Hashable  # a recorded step serves only contexts with an equal variant
    names: Any  # data from which another process makes the same context
    num_keys: int = 0  # number of keys whose token ranges recorded steps read on the device
    is_fixed: bool = False  # whether a recorded step is valid only for this context's ranges
    takes_chunks: bool = True  # whether recorded steps may have chunks of prompts
    tensors: Sequence[Tensor] = ()  # tensors that forwards read besides the model's

    def begin(self, num_tokens: int, head_tokens: list[int] | None) -> None:
        """Called before the model's forward of `num_tokens` tokens. `head_tokens`: the indices of
        the tokens for which the head computes logits; `None` if for all; an empty list in a
        recorded step, where only the device knows them."""
        return None

    def ranges(
        self, keys: Sequence[Hashable], num_decodes: int, num_tokens: int
    ) -> list[tuple[Bounds, Bounds]]:
        """Returns two ranges `[start, end)` of this step's tokens for each of a recorded step's
        `keys`: the decodes with this key, and the other tokens with this key."""
        return []

    def record(self, ranges: Tensor, max_tokens: int, has_chunks: bool) -> RecordedContext | None:
        """Called before a step of up to `max_tokens` tokens is recorded. The step reads `ranges`
        `(n, 2)` on the device: for each key the range of its decodes and, with `has_chunks`, the
        range of its other tokens. Returns the step's `RecordedContext`; `None` if it needs none."""
        return None


class RecordedContext(Protocol):
    """The part of a `ForwardContext` that a recorded step keeps alive."""

    keys: Sequence[Hashable]  # for `ForwardContext.ranges`

    def reading(self) -> AbstractContextManager[None]:
        """A context around each run of the forward while the step is recorded."""


# Adapters of requests


class Adapters(Protocol):
    """The adapters of a loop's requests (`Request.adapter`). A loop makes this object when a
    request first names an adapter."""

    def admit(self, request: Request, allocate_blocks: Callable[[], bool]) -> bool:
        """Admits a waiting request that has `adapter_bytes`: reserves these bytes in the pool, then
        calls `allocate_blocks` for the request's own blocks. Returns whether both fit; if not,
        reserves nothing. `admit` and `release` are called with the memory's lock held."""

    def release(self, request: Request) -> None:
        """Called when an admitted request stops running: it has ended or is preempted."""

    def prefetch(self, waiting: Sequence[Request]) -> None:
        """Called in each step, after scheduling: may load adapters of `waiting` requests."""

    def run(self, plan: StepPlan, executor: Executor) -> Tensor:
        """Like `Runner.run`, but with the adapter of each row, in as few forwards
        (`Executor.compute`) as possible. Raises `RowsError` if an adapter cannot be used."""

    def using(self, adapter: Hashable) -> AbstractContextManager[ForwardContext | None]:
        """A context for a forward of rows with one adapter. Raises the errors of `run`."""

    def forget_model(self) -> None:
        """Drops all state that depends on the model, since the model may have changed."""

    def counts(self) -> dict[str, int]:
        """Returns the values of some fields of `EngineStats`, by name."""


# Steps that run again, or ahead


class Recorder(Protocol):
    """Records the packed steps of a model in one memory, and replays them. The memory holds the
    recorder, which therefore outlives the runner of the steps."""

    is_checked: bool
    """Whether the last replay needs no comparison with the model's own forward. If it needs one,
    the replay has changed no states: the caller also runs that forward, then calls `check`."""

    def needs_state(self, slowed_by: set[str]) -> bool:
        """Called when work on the model begins: returns whether to read the model's state and call
        `begin` with it. If no step so far could be recorded, usually returns `False` and adds the
        reason to `slowed_by`: only a change of the model could make steps recordable, and reading
        the state takes longer than a step."""

    def begin(self, state: ModelState, reads_keys: bool = False) -> None:
        """Called before steps of the model in this state: drops recordings of other states.
        `reads_keys`: whether the model's own code computes attention, over as many keys as the
        block tables have slots."""

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
        """Replays a step, and returns its logits `(len(tokens.last), vocab_size)`, which the caller
        owns; `None` if no recording can serve it. The recorder records `forward`, which takes token
        ids and positions `(1, n)`, the step of each layer group, the tokens whose logits are
        computed, the context and other model inputs. `token_ids` `(n,)`, int64, on the device,
        replace the ids in `tokens`, which must then hold only decodes. `keeps_hidden`: whether the
        forward also stores hidden states. `kind`: steps of different kinds have separate
        recordings. `states`: cache layers with the rows' states, which the step changes; their
        tensors then belong to the recording until it runs other rows. `checked_as`: identifies the
        steps that one check covers; `None`: only steps that read keys are checked."""

    def check(self, results: Iterable[tuple[Tensor, Tensor]], reason: str | None = None) -> None:
        """Compares results `(rows, ...)` of the model's own forward, each with that of the last
        replay. If any pair differs by more than rounding, or if there is a `reason` against
        replays, steps of the replay's kind run eagerly from then on."""

    def rectangles(self, model: PreTrainedModel, cache: PagedCache) -> RectangleRecorder:
        """Returns the part that records decode steps of padded batches (`rectangles.rectangle`).
        `cache`: an empty cache of the model. Only the optional package `rectangles` calls this."""

    def in_order(self) -> AbstractContextManager[None]:
        """A context for a step: its work on the device follows the previous step's, even across
        streams."""

    def run_ahead(self, memory: PagedMemory, scheduler: Scheduler) -> RunAhead | None:
        """Returns the part that launches steps before their input tokens are on the host; `None` if
        replays run on the host."""

    def release(self) -> None:
        """Called after the memory has released its layer groups (`GroupMemory.release`): also
        releases the memory of recordings, and drops recordings that are no longer valid."""


class RunAhead(Protocol):
    """Launches the next step while its input tokens are still being copied to the host."""

    def fetch(
        self,
        ready: list[tuple[Generation, LogitRows]],
        launch: Callable[[list[request.Sequence], Tensor], Tensor | None],
    ) -> Fetch | None:
        """Returns a function that copies the tokens `(n,)` of all unfinished rows, in the order of
        `ready`, to the host and meanwhile launches the next step; `None` if the host must work
        before that step. `launch` takes sequences and their next tokens `(n,)`. It returns logits
        `(n, vocab_size)`, or `None` if it cannot launch the step."""

    def take(self, plan: StepPlan) -> tuple[Tensor | None, int]:
        """Returns the logits `(n, vocab_size)` of a step's `n` leading rows that were launched
        ahead, and `n`; `(None, 0)` if the first row was not."""

    def clear(self) -> None:
        """Drops the launched step."""


MakeRecorder = Callable[["PreTrainedModel", "PagedCache"], "Recorder | None"]
"""Takes a model and an empty cache of it. Returns the recorder of the model's steps in the cache's
memory; `None` if nothing can be recorded."""


# The memory of blocks


class Storage(Protocol):
    """The memory of one layer group's blocks. `KVBlocks` and `kernels/quantized.py` define the
    format of the blocks' content."""

    pool: BlockPool  # allocates the ids of blocks; the storage may provide its `BlockSelector`
    layers: dict[int, Any]  # `KVBlocks` of the layers made so far, by index
    released: dict[int, Any]  # layers without memory, which `make` returns again if they fit

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, summed over all layers."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for used and unused blocks."""

    @property
    def max_bytes(self) -> int | None:
        """Maximum bytes of all blocks; `None`: the number of blocks times `block_bytes`."""

    @property
    def num_allocated_blocks(self) -> int:
        """Number of blocks for which every layer has allocated memory."""

    @property
    def is_elastic(self) -> bool:
        """Whether a block takes no memory until it is first used."""

    @property
    def growth_step(self) -> int:
        """Minimum number of blocks by which a pool without a limit grows if the storage is elastic;
        0: the memory chooses."""

    def reserve(self, reservation: Reservation, can_drop: bool) -> None:
        """Sets the sizes of layers that are allocated or grown from now on. `can_drop`: whether the
        storage may drop smaller layers; true only while no block is used or cached."""

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        """Returns one block, on the meta device, for K/V `(batch, heads, n, dim)` like these."""

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Allocates layer `index` for K/V like these, and returns its blocks. If memory runs out,
        raises `MemoryError`, or torch's `RuntimeError`."""

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns
        its blocks. Raises `ValueError` if heads, dims or device differ."""

    def grow(self, num_blocks: int, max_blocks: int) -> None:
        """Grows every layer to at least `num_blocks` and at most `max_blocks` blocks. Raises the
        errors of `make`."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair `(source, target)`.
        All sources are read before any target is written."""

    def clear(self) -> None:
        """Frees all memory; may move layers to `released`. No table may hold a block."""


StorageFactory = Callable[["PagedConfig", "GroupSpec", int, Callable[[], None]], Storage]
"""Takes the config, a layer group, the number of tokens per block, and a function that the storage
calls before it moves blocks to other addresses. Returns the group's storage, with an empty
pool."""


class MappedRows(Protocol):
    """The rows of a layer as strided tensors in the memory of its blocks (`KVBlocks.rows`)."""

    def place(self, step: StepMetadata) -> PlacedRows | None:
        """Returns the rows of a step as tensors; `None` if they can be read only in blocks."""

    def strided_view(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as one view `(rows, heads, len(columns), dim)`
        for the model's own code, with zeros for padding; `None` if no single view covers the
        rows. `is_value`: whether to return values instead of keys."""

    def disallow_views(self) -> None:
        """Makes `strided_view` return `None` from now on, since the model's code needs contiguous
        tensors."""

    def preserve_views(self) -> None:
        """Keeps the content of living views. Called before blocks are written to."""


class PlacedRows(Protocol):
    """The rows of a step as tensors, valid while the step and the views are alive."""

    def parts(self, kv_heads: int) -> PartPlan:
        """Returns the parts of the step for the portable attention."""

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a part, each `(rows, kv_heads, length, dim)`."""


# Blocks evicted from the pool


class Tier(Protocol):
    """Keeps the content of blocks that the prefix cache of one block manager evicts. The methods
    are called with the memory's lock held."""

    def keep(self, group: int, block_id: int, digest: bytes, is_verified: bool) -> None:
        """Keeps the content of a block that is being evicted, under its digest
        (`prefix_index.Link`). Unless the weights that computed it are verified, the tier serves it
        only after `confirm`."""

    def num_restorable_tokens(self, sequence: request.Sequence) -> int:
        """Returns how many tokens `SequenceBlocks.match` would find after `restore`. The sequence
        must already have block tables."""

    def restore(self, sequence: request.Sequence) -> bool:
        """Copies kept blocks that prolong the sequence's cached prefix to the pool, and registers
        them for `match`. Returns `False`, and registers nothing, if there are no such blocks, if
        too few blocks are free, or if copying fails; cached blocks may nevertheless have been
        evicted. Called after the current weights have been verified."""

    @property
    def wants_confirmation(self) -> bool:
        """Whether so many kept bytes are unverified that the weights should be fingerprinted."""

    def confirm(self) -> None:
        """Marks all kept blocks as computed by the weights that were fingerprinted last."""

    def discard(self) -> None:
        """Drops kept blocks that are not verified."""

    def counts(self) -> TierCounts: ...


MakeTier = Callable[
    ["PreTrainedModel", "PagedMemory", "BlockManager", "PagedConfig", "Layout"],
    tuple[Tier | None, str | None],
]
"""Returns the tier for a model's new loop, and `None`. The tier may come from an earlier loop with
this block manager. If there can be no tier, returns `None` and the reason."""


# Several processes


class Processes(Protocol):
    """The processes that compute each forward of a model together, each with a shard of its weights
    and the K/V heads of that shard. Either all of them make the same calls; then `announce_step`,
    `moved` and `call_adapters` do nothing. Or one process leads: it schedules and samples, and the
    others execute its steps; then `check` does nothing."""

    leads: bool  # whether this process leads

    def minimum(self, number: int) -> int:
        """Returns the minimum of a number over all processes."""

    def agree(self, number: int) -> int:
        """Returns the `number` that the first process passed, for decisions that must be the same
        in all processes although their measured times differ."""

    def fingerprint(self, model: nn.Module, state: ModelState | None) -> bytes | None:
        """Like `model.state.fingerprint`, over the shards of all processes; `None` if a shard
        cannot be read."""

    def check(self, plan: StepPlan) -> None:
        """Called before a step's forward. Raises `RankLostError` if another process has scheduled
        other tokens."""

    def announce_step(self, tokens: PackedTokens, extra_indices: list[int], names: Any) -> None:
        """Announces to the other processes the next `PackedRunner.compute` with these arguments.
        `names`: `ForwardContext.names`; `None` if the forward has no context."""

    def forward(self) -> AbstractContextManager[None]:
        """A context for a forward of all processes: an error passes through if each of them raises
        one; if only some do, it becomes a `RankLostError`."""

    def moved(
        self, move: Callable[..., Any], group: GroupMemory, arguments: tuple[Any, ...], result: Any
    ) -> None:
        """Called after `move(group, *arguments)` has returned `result`. `move` is a function with
        the decorator `group_memory.mirrored`. Only forwards and calls of these functions change the
        content of blocks, so a process that repeats them in order has the same content."""

    def call_adapters(self, method: str, *arguments: Any) -> str | None:
        """Makes the other processes call this method of their adapters, at the latest before the
        next forward. For `"load"`, returns the end of a message if some cannot load the adapter."""
        return None


class Leader(Processes, Protocol):
    """The processes that compute an engine's forwards, for the process that leads them."""

    def locked(self, lock: Any) -> AbstractContextManager[Any]:
        """Returns a context that holds the engine's lock and defers interrupts: an interrupt
        between two messages would leave the processes waiting for each other."""

    def check_request(self, options: RequestOptions) -> None:
        """Raises `ValueError` if an engine over several processes does not support these options,
        its config or its model, or if `hf_paged.budget` is set. Raises `RuntimeError` after the
        engine has been closed."""

    def choose_layout(self, choose: Callable[[], Layout]) -> Layout:
        """Calls `factory.choose_layout` in all processes, in this one through `choose`. Raises
        `ValueError` if the layout is not packed, and the errors of `check_request`."""

    def make(self, loop: StepLoop) -> None:
        """Makes the other processes create the memory and the executor of a loop."""

    def begin(self) -> None:
        """Makes the other processes begin work on the current state of the model."""

    def retire(self) -> None:
        """Makes the other processes drop their memory and executor."""

    def close(self) -> None:
        """Makes `serve_rank` return in the other processes."""


# Grammars


class Grammars(Protocol):
    """Compiles the grammars of an engine's requests (`hf_paged.grammar`). Thread-safe."""

    def processor(
        self, options: RequestOptions, tokenizer: Any, model: PreTrainedModel
    ) -> LogitsProcessor:
        """Returns the logits processor for a request's `schema`, `regex` or `grammar`. The
        processor computes each row from that row alone. Raises `ValueError` if several constraints
        are set, if the constraint cannot be compiled, or without a suitable tokenizer; and
        `ImportError` if the compiler is not installed."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that its caller provides. For each field that is `None`, the engine
    makes the part that its config selects."""

    recorder: MakeRecorder | None = None
    tier: MakeTier | None = None
    storage: StorageFactory | None = None
    drafter: MakeDrafter | None = None


DEFAULT_PARTS = EngineParts()
