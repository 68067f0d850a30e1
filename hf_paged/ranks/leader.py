"""An engine over several processes, each with a shard of the model's weights and the K/V heads of
that shard. Process 0 schedules and samples. The others only compute its steps (`serve_rank`)."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..batching.arguments import RequestOptions, check_generates
from ..batching.execution.inputs import PackedTokens
from ..batching.factory import UNLIMITED_BLOCKS, choose_layout, empty_cache, make_loop
from ..batching.loop import StepLoop
from ..batching.request import RowsError
from ..cache import budget
from ..cache.group_memory import GroupMemory
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.swap import HostBlocks
from ..config import PagedConfig
from ..interrupts import is_interrupt
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.sharding import RankLostError, is_sharded
from ..model.state import ModelState
from ..model.wrappers import unwrap_model
from ..plan import StepPlan
from ..switches import NOTHING
from ..topics import Topic
from .processes import Ranks, processes_of
from .signals import DeferringLock, deferring_signals

logger = logging.getLogger(__name__)

Changes = list[tuple[int, list[int]]]
"""For each block table of a step: the number of leading block ids that are taken from the previous
step's table of the same row (all ids of that table, or 0), and the block ids after these."""


class RemoteHostBlocks(NamedTuple):
    """Stands for the leader's `HostBlocks` in a message. Each process swaps its own blocks to host
    memory, so every follower has `HostBlocks` for this number."""

    number: int  # `id` of the leader's `HostBlocks`


class TableHistory:
    """Encodes the block tables of each step as changes since the previous step, since most tables
    only grow."""

    def __init__(self) -> None:
        self._tables: list[list[int]] = []

    def encode(self, tables: Sequence[list[int]]) -> Changes:
        """Returns the changes from which `decode` in another process restores a step's tables."""
        changes: Changes = []
        for row, ids in enumerate(tables):
            previous = self._tables[row] if row < len(self._tables) else []
            count = len(previous) if previous == ids[: len(previous)] else 0
            changes.append((count, ids[count:]))
        self._tables[: len(tables)] = map(list, tables)
        return changes

    def decode(self, changes: Changes) -> list[list[int]]:
        """Returns the tables for which `encode` in another process returned these changes."""
        tables = [
            [*self._tables[row][:count], *new_ids] if count else new_ids
            for row, (count, new_ids) in enumerate(changes)
        ]
        self._tables[: len(changes)] = map(list, tables)
        return tables


class RankLeader:
    """The engine's link from process 0 to the other processes (`seams.Leader`): makes them repeat
    its operations on blocks and models in the same order. Orders that need no answer are queued and
    sent with the next message, no later than in the next step."""

    leads = True

    def __init__(self, model: PreTrainedModel, config: PagedConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        self._model = model
        self._config = config
        self._pid = os.getpid()
        self._is_open = True
        # for each order: the name of a method of `Follower`, or "end"; the number of blocks of each
        # pool; the method's arguments
        self._queued_orders: deque[tuple[str, list[int], tuple[Any, ...]]] = deque()
        self._groups: list[GroupMemory] = []
        self._histories: list[TableHistory] = []
        ranks.reserve()

    def locked(self, lock: Any) -> DeferringLock:
        return DeferringLock(lock)

    def check_request(self, options: RequestOptions) -> None:
        self._check_supported()
        if options.inputs is not None:
            raise ValueError(
                "`inputs` besides token ids are not supported by an engine whose model is sharded"
                ' over several processes: call `model.generate(..., cache_implementation="paged")`'
                " in each of them"
            )
        if options.assistant_model is not None and is_sharded(options.assistant_model):
            raise ValueError(
                "`assistant_model` is in shards over several processes: load it in process 0 alone"
            )

    def _check_supported(self) -> None:
        """Raises `RuntimeError` if the engine is closed, and `ValueError` for unsupported
        features."""
        if not self._is_open:
            raise RuntimeError(
                "the engine was closed, and `serve_rank` has returned in the other processes: make"
                " a new engine, and call `serve_rank` there again"
            )
        unsupported_features = {
            "`batch_invariant`": self._config.batch_invariant,
            "`hf_paged.budget`": budget.limit() is not None,
            "an encoder": self._model.config.is_encoder_decoder,
        }
        for feature, is_requested in unsupported_features.items():
            if is_requested:
                raise ValueError(
                    f"{feature} is not supported by an engine whose model is in shards over"
                    f" {self.ranks.size} processes: leave it out, or call `model.generate(...,"
                    ' cache_implementation="paged")` in each of them'
                )

    def choose_layout(self, choose: Callable[[], Layout]) -> Layout:
        self._check_supported()
        self.send_order("choose_layout", self._config)
        layout = choose()
        if layout.unsupported_reason is not None:
            raise ValueError(
                f"{type(self._model).__name__} is in shards over several processes, so an engine"
                f" serves it only in packed forwards: {layout.unsupported_reason}. Call `generate`"
                " in each process"
            )
        return layout

    def make(self, loop: StepLoop) -> None:
        self._groups = loop.blocks.groups
        self._histories = [TableHistory() for _ in self._groups]
        self.queue_order("make", self._config)

    def begin(self) -> None:
        self.queue_order("begin", autocast_dtype(compute_device(self._model)))

    def retire(self) -> None:
        self._groups = []
        self.queue_order("retire")

    def announce_step(self, tokens: PackedTokens, extra_indices: list[int], names: Any) -> None:
        changes = [
            history.encode(group.tables) for history, group in zip(self._histories, tokens.groups)
        ]
        without_tables = [group._replace(tables=[]) for group in tokens.groups]
        self.send_order(
            "run",
            tokens._replace(groups=without_tables),
            changes,
            extra_indices,
            names,
        )

    def call_adapters(self, method: str, *arguments: Any) -> str | None:
        if method == "load":
            return self._load_adapter(*arguments)
        if method == "check_mixing":  # the check runs forwards in all processes now
            self.send_order("call_adapters", method, *arguments)
        else:
            self.queue_order("call_adapters", method, *arguments)
        return None

    def _load_adapter(self, file: Any) -> str | None:
        self.send_order("load_adapter", file)
        results = self.ranks.gather(True)
        failed_ranks = [rank for rank, (is_loaded,) in enumerate(results) if not is_loaded]
        if not failed_ranks:
            return None
        self.queue_order("call_adapters", "forget", file)
        return (
            f"by processes {failed_ranks} of {self.ranks.size} that hold shards of the model (see"
            " the output of these processes): every process reads the adapter's folder under this"
            " path"
        )

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        try:
            yield
        except RankLostError:
            raise
        except Exception:
            self.send_order("check_all_failed")
            self.ranks.check_all_failed()
            raise

    def fingerprint(self, model: nn.Module, state: ModelState | None = None) -> bytes | None:
        self.send_order("fingerprint")
        return self.ranks.fingerprint(model, state)

    def minimum(self, number: int) -> int:
        self.send_order("minimum")
        return self.ranks.minimum(number)

    def agree(self, number: int) -> int:
        """Returns `number`: this process decides for all."""
        return number

    def check(self, plan: StepPlan) -> None:
        """Does nothing: the other processes execute this process's plan."""

    def moved(
        self, move: Callable[..., Any], group: GroupMemory, arguments: tuple[Any, ...], result: Any
    ) -> None:
        if group not in self._groups:  # the memory of a model in this process alone
            return
        number = self._groups.index(group)
        portable_arguments = [
            RemoteHostBlocks(id(value)) if isinstance(value, HostBlocks) else value
            for value in arguments
        ]
        self.queue_order("move", move, number, portable_arguments, id(result))
        if isinstance(result, HostBlocks):
            weakref.finalize(result, self.queue_order, "forget", id(result)).atexit = False

    def close(self) -> None:
        if self._is_open and self._pid == os.getpid():
            try:
                with contextlib.suppress(RankLostError):
                    self.send_order("end")
            finally:
                self._is_open, self._groups = False, []
                self.ranks.release()

    def queue_order(self, name: str, *arguments: Any) -> None:
        """Queues an order: each follower grows its pools to the sizes of the leader's, then calls
        its method `name` with `arguments`. At the order `"end"`, `Follower.serve` returns."""
        block_counts = [group.pool.num_blocks for group in self._groups]
        self._queued_orders.append((name, block_counts, arguments))

    def send_order(self, name: str, *arguments: Any) -> None:
        """Sends all queued orders and this one."""
        self.queue_order(name, *arguments)
        orders = [self._queued_orders.popleft() for _ in range(len(self._queued_orders))]
        self.ranks.send(pickle.dumps(orders, protocol=pickle.HIGHEST_PROTOCOL))


def lead(model: PreTrainedModel, config: PagedConfig, owner: Any) -> RankLeader:
    """Implements `model.sharding.lead` for a model in shards."""
    ranks = processes_of(model)
    if ranks.rank:
        raise ValueError(
            f"this is process {ranks.rank} of the {ranks.size} that hold shards of the model, and"
            " an engine is driven from process 0: call `hf_paged.serve_rank(model)` here, which"
            " returns when that engine is closed"
        )
    leader = RankLeader(model, config, ranks)
    weakref.finalize(owner, leader.close)
    return leader


class Follower:
    """Executes the orders of a [`RankLeader`] in a process other than 0. An order names a method of
    this class."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self._memory: Any
        self._executor: Any
        self._groups: list[GroupMemory]
        self._host_blocks: dict[int, HostBlocks]  # by `RemoteHostBlocks.number`
        # the error of the last forward, until the leader reports that its own forward failed, too
        self._failure: Exception | None = None
        self.retire()

    def serve(self) -> None:
        """Executes orders until the leader's engine is closed."""
        while True:
            for name, block_counts, arguments in pickle.loads(self.ranks.receive()):
                if name == "end":
                    return
                self._grow(block_counts)
                getattr(self, name)(*arguments)

    def choose_layout(self, config: PagedConfig) -> None:
        self._layout = choose_layout(
            self.model, empty_cache(self.model, PagedMemory(config, is_bounded=False))
        )

    def make(self, config: PagedConfig) -> None:
        self._memory = PagedMemory(config, is_bounded=False)
        cache = empty_cache(self.model, self._memory)
        cache.reserve(config.num_blocks or UNLIMITED_BLOCKS, config.max_num_seqs)
        loop = make_loop(self.model, cache, self._layout, config, max_num_seqs=config.max_num_seqs)
        self._executor = loop.executor
        self._groups = loop.blocks.groups
        self._histories = [TableHistory() for _ in self._groups]

    def begin(self, autocast: torch.dtype | None) -> None:
        device_type = compute_device(self.model).type
        with torch.autocast(device_type, dtype=autocast, enabled=autocast is not None):
            self._executor.begin(check_weights=False, allow_replays=False)

    def retire(self) -> None:
        self._memory = self._executor = None
        self._groups, self._host_blocks = [], {}

    def run(
        self,
        tokens: PackedTokens,
        changes: list[Changes],
        extra_indices: list[int],
        names: Any,
    ) -> None:
        if self._failure is not None:
            # the leader's forward did not fail, so the processes no longer compute the same steps
            raise self._failure
        executor = self._executor
        forward_context = NOTHING
        if names is not None:  # outside the `try`: a missing adapter ends this process
            forward_context = executor.adapters().context_of(names)
        groups = [
            group._replace(tables=history.decode(group_changes))
            for group, history, group_changes in zip(tokens.groups, self._histories, changes)
        ]
        tokens = tokens._replace(groups=groups)
        try:
            with executor.attention(), forward_context as context:
                compute = executor.runner.compute
                executor.compute(compute, tokens, extra_indices, None, context or None)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._failure = error

    def check_all_failed(self) -> None:
        self._failure = None
        self.ranks.check_all_failed()

    def load_adapter(self, file: Any) -> None:
        is_loaded = True
        try:
            self._executor.adapters().load(file)
        except RowsError as error:
            is_loaded = False
            logger.warning(Topic.ADAPTERS(str(error)))
        self.ranks.gather(is_loaded)

    def call_adapters(self, method: str, *arguments: Any) -> None:
        """Calls a method of this process's `LoopAdapters`."""
        if self._executor is not None:  # otherwise the order belongs to a loop that was retired
            getattr(self._executor.adapters(), method)(*arguments)

    def fingerprint(self) -> None:
        self.ranks.fingerprint(self.model)

    def minimum(self) -> None:
        """Takes part in `RankLeader.minimum`. Only `PagedMemory` calls that method, for the minimum
        of `fraction_bytes` over all processes."""
        self.ranks.minimum(self._memory.fraction_bytes())

    def move(self, move: Callable[..., Any], group: int, arguments: list[Any], number: int) -> None:
        """Repeats the leader's move of blocks. `number` identifies the result if that is
        `HostBlocks`."""
        local_arguments = [
            self._host_blocks[value.number] if isinstance(value, RemoteHostBlocks) else value
            for value in arguments
        ]
        result = move(self._groups[group], *local_arguments)
        if isinstance(result, HostBlocks):
            self._host_blocks[number] = result

    def forget(self, number: int) -> None:
        """Frees the blocks in host memory that `number` identifies."""
        self._host_blocks.pop(number, None)

    def _grow(self, block_counts: list[int]) -> None:
        """Grows each pool to at least the leader's number of blocks."""
        for group, num_blocks in zip(self._groups, block_counts):
            num_missing = num_blocks - group.pool.num_blocks
            if num_missing > 0:
                group.storage.grow(num_blocks, max_blocks=UNLIMITED_BLOCKS)
                group.pool.grow(num_missing)


def serve(model: Any) -> None:
    """Implements `hf_paged.serve_rank`."""
    shard = unwrap_model(model)
    check_generates(shard)
    if not is_sharded(shard):
        raise _not_served(shard, "is not in shards")
    ranks = processes_of(shard)
    if not ranks.rank:
        raise _not_served(shard, "is led by this process, number 0")
    with deferring_signals(), torch.no_grad():
        ranks.reserve()
        follower = Follower(shard, ranks)
        try:
            follower.serve()
        finally:
            follower.retire()
            ranks.release()


def _not_served(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} {reason}: make a `PagedEngine` here. `serve_rank` is for the other"
        " processes that hold shards of a model"
    )
