"""An engine over several processes, each with a shard of the model's weights and the K/V heads of
that shard. Process 0 schedules and samples; the others compute its steps (`serve_rank`) and
schedule nothing."""

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
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.sharding import RankLostError, is_sharded
from ..model.state import ModelState
from ..model.wrappers import base_model
from ..plan import StepPlan
from ..switches import NOTHING
from ..topics import Topic
from .processes import Ranks, processes_of
from .signals import PatientLock, deferring_signals

logger = logging.getLogger(__name__)

Changes = list[tuple[int, list[int]]]
"""For each block table of a step: the number of leading block ids that it shares with the previous
table of its row, and the block ids after them."""


class RemoteHostBlocks(NamedTuple):
    """Stands in a message for `HostBlocks`, which each process keeps in its own host memory."""

    number: int


class TableHistory:
    """Encodes a step's block tables as changes since the previous step, since most tables only
    grow."""

    def __init__(self) -> None:
        self._tables: list[list[int]] = []

    def changes(self, tables: Sequence[list[int]]) -> Changes:
        changes: Changes = []
        for row, ids in enumerate(tables):
            previous = self._tables[row] if row < len(self._tables) else []
            count = len(previous) if previous == ids[: len(previous)] else 0
            changes.append((count, ids[count:]))
        self._tables[: len(tables)] = map(list, tables)
        return changes

    def tables(self, changes: Changes) -> list[list[int]]:
        """Decodes the tables that the other process passed to `changes`."""
        tables = [
            [*self._tables[row][:count], *new] if count else new
            for row, (count, new) in enumerate(changes)
        ]
        self._tables[: len(changes)] = map(list, tables)
        return tables


class RankLeader:
    """Process 0's side: makes the other processes repeat its operations on blocks and models in the
    same order (`seams.Leader`). It queues orders that need no answer until the next message; each
    step sends one."""

    leads = True

    def __init__(self, model: PreTrainedModel, config: PagedConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        self._model = model
        self._config = config
        self._pid = os.getpid()
        self._is_open = True
        self._queue: deque[tuple[str, list[int], tuple[Any, ...]]] = deque()
        self._groups: list[GroupMemory] = []
        self._histories: list[TableHistory] = []
        ranks.reserve()

    def locked(self, lock: Any) -> PatientLock:
        return PatientLock(lock)

    def check_request(self, options: RequestOptions) -> None:
        self._check_served()
        if options.inputs is not None:
            raise ValueError(
                "`inputs` beside token ids are not served by an engine whose model is in shards"
                ' over several processes: call `model.generate(..., cache_implementation="paged")`'
                " in each of them"
            )
        if options.assistant_model is not None and is_sharded(options.assistant_model):
            raise ValueError(
                "`assistant_model` is in shards over several processes: load it in process 0 alone"
            )

    def _check_served(self) -> None:
        if not self._is_open:
            raise RuntimeError(
                "the engine was closed, and `serve_rank` has returned in the other processes: make"
                " a new one"
            )
        unsupported = {
            "`batch_invariant`": self._config.batch_invariant,
            "`hf_paged.budget`": budget.limit() is not None,
            "an encoder": self._model.config.is_encoder_decoder,
        }
        for feature, is_requested in unsupported.items():
            if is_requested:
                raise ValueError(
                    f"{feature} is not served by an engine whose model is in shards over"
                    f" {self.ranks.size} processes: leave it out, or call `model.generate(...,"
                    ' cache_implementation="paged")` in each of them'
                )

    def choose_layout(self, choose: Callable[[], Layout]) -> Layout:
        self._check_served()
        self.send("choose_layout", self._config)
        layout = choose()
        if layout.unsupported_reason is not None:
            raise ValueError(
                f"{type(self._model).__name__}, in shards over several processes, is served by an"
                f" engine in packed forwards alone: {layout.unsupported_reason}. Call `generate` in"
                " each of them"
            )
        return layout

    def make(self, loop: StepLoop) -> None:
        self._groups = loop.blocks.groups
        self._histories = [TableHistory() for _ in self._groups]
        self.note("make", self._config)

    def begin(self) -> None:
        self.note("begin", autocast_dtype(compute_device(self._model)))

    def retire(self) -> None:
        self._groups = []
        self.note("retire")

    def run(self, tokens: PackedTokens, others: list[int], names: Any) -> None:
        changes = [
            history.changes(group.tables) for history, group in zip(self._histories, tokens.groups)
        ]
        without_tables = [group._replace(tables=[]) for group in tokens.groups]
        self.send(
            "run",
            tokens._replace(groups=without_tables),
            changes,
            others,
            names,
        )

    def adapters(self, method: str, *arguments: Any) -> str | None:
        if method == "load":
            return self._load_adapter(*arguments)
        if method == "check":  # its forwards follow at once
            self.send("adapters", method, *arguments)
        else:
            self.note("adapters", method, *arguments)
        return None

    def _load_adapter(self, file: Any) -> str | None:
        self.send("load_adapter", file)
        loaded = self.ranks.gather(True)
        failed = [rank for rank, (is_loaded,) in enumerate(loaded) if not is_loaded]
        if not failed:
            return None
        self.note("adapters", "forget", file)
        return (
            f"by processes {failed} of {self.ranks.size} that hold shards of the model, whose"
            " output says why: they read the same folder, under the same path"
        )

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        try:
            yield
        except RankLostError:
            raise
        except Exception:
            self.send("check_failed")
            self.ranks.check_failed()
            raise

    def fingerprint(self, model: nn.Module, state: ModelState | None = None) -> bytes | None:
        self.send("fingerprint")
        return self.ranks.fingerprint(model, state)

    def least(self, number: int) -> int:
        self.send("least")
        return self.ranks.least(number)

    def agree(self, number: int) -> int:
        """Returns `number`: this process decides for all, so `check` need not compare plans."""
        return number

    def check(self, plan: StepPlan) -> None:
        pass

    def moved(
        self, move: Callable[..., Any], group: GroupMemory, arguments: tuple[Any, ...], result: Any
    ) -> None:
        if group not in self._groups:  # the memory of a model in this process alone
            return
        number = self._groups.index(group)
        portable = [RemoteHostBlocks(id(x)) if isinstance(x, HostBlocks) else x for x in arguments]
        self.note("move", move, number, portable, id(result))
        if isinstance(result, HostBlocks):
            weakref.finalize(result, self.note, "forget", id(result)).atexit = False

    def close(self) -> None:
        if self._is_open and self._pid == os.getpid():
            try:
                with contextlib.suppress(RankLostError):
                    self.send("end")
            finally:
                self._is_open, self._groups = False, []
                self.ranks.release()

    def note(self, name: str, *arguments: Any) -> None:
        """Queues an order: the other processes call their method `name` with the arguments."""
        self._queue.append((name, [group.pool.num_blocks for group in self._groups], arguments))

    def send(self, name: str, *arguments: Any) -> None:
        """Sends all queued orders and this one."""
        self.note(name, *arguments)
        orders = [self._queue.popleft() for _ in range(len(self._queue))]
        self.ranks.send(pickle.dumps(orders, protocol=pickle.HIGHEST_PROTOCOL))


def lead(model: PreTrainedModel, config: PagedConfig, owner: Any) -> RankLeader:
    """As `model.sharding.lead`, for a model in shards."""
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
    """The other processes' side. A [`RankLeader`] calls its methods by name."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self._memory: Any
        self._executor: Any
        self._groups: list[GroupMemory]
        self._hosts: dict[int, HostBlocks]  # swapped-out blocks, by the leader's number
        # the last forward's error, until the leader reports that its forward failed, too
        self._failure: Exception | None = None
        self.retire()

    def serve(self) -> None:
        """Executes orders until the leader's engine is closed."""
        while True:
            for name, num_blocks, arguments in pickle.loads(self.ranks.receive()):
                if name == "end":
                    return
                self._grow(num_blocks)
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
        kind = compute_device(self.model).type
        with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            self._executor.begin(check_weights=False, allow_replays=False)

    def retire(self) -> None:
        self._memory = self._executor = None
        self._groups, self._hosts = [], {}

    def run(
        self,
        tokens: PackedTokens,
        changes: list[Changes],
        others: list[int],
        names: Any,
    ) -> None:
        if self._failure is not None:
            # only this process failed, and the others are still in that forward
            raise self._failure
        executor = self._executor
        using = NOTHING
        if names is not None:  # before the forward: a missing adapter ends this process
            using = executor.adapters().repeat(names)
        groups = [
            group._replace(tables=history.tables(changed))
            for group, history, changed in zip(tokens.groups, self._histories, changes)
        ]
        whole = tokens._replace(groups=groups)
        try:
            with executor.attention(), using as context:
                executor.compute(executor.runner.compute, whole, others, None, context or None)
        except Exception as error:
            self._failure = error

    def check_failed(self) -> None:
        self._failure = None
        self.ranks.check_failed()

    def load_adapter(self, file: Any) -> None:
        is_loaded = True
        try:
            self._executor.adapters().load(file)
        except RowsError as error:
            is_loaded = False
            logger.warning(Topic.ADAPTERS(str(error)))
        self.ranks.gather(is_loaded)

    def adapters(self, method: str, *arguments: Any) -> None:
        """Calls a method of this process's `LoopAdapters`."""
        if self._executor is not None:  # else the order is from an earlier loop
            getattr(self._executor.adapters(), method)(*arguments)

    def fingerprint(self) -> None:
        self.ranks.fingerprint(self.model)

    def least(self) -> None:
        self.ranks.least(self._memory.fraction_bytes())

    def move(self, move: Callable[..., Any], group: int, arguments: list[Any], number: int) -> None:
        local = [self._hosts[x.number] if isinstance(x, RemoteHostBlocks) else x for x in arguments]
        result = move(self._groups[group], *local)
        if isinstance(result, HostBlocks):
            self._hosts[number] = result

    def forget(self, number: int) -> None:
        self._hosts.pop(number, None)

    def _grow(self, num_blocks: list[int]) -> None:
        """Grows each pool to at least the leader's number of blocks."""
        for group, count in zip(self._groups, num_blocks):
            missing = count - group.pool.num_blocks
            if missing > 0:
                group.storage.grow(count, most=UNLIMITED_BLOCKS)
                group.pool.grow(missing)


def serve(model: Any) -> None:
    """As `hf_paged.serve_rank`."""
    shard = base_model(model)
    check_generates(shard)
    if not is_sharded(shard):
        raise _not_served(shard, "is all in this process")
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


def _not_served(model: nn.Module, where: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} {where}: make a `PagedEngine` here, others call `serve_rank`"
    )
