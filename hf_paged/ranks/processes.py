"""The process group of a model in shards, whose processes compute every forward together, and the
messages between them. `leader` builds an engine on these."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import struct
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import compat, forks
from ..model.sharding import RankLostError
from ..model.state import ModelState, fingerprint
from ..plan import StepPlan

_ENGINE = -1  # user id of an engine, in place of a thread's id
_MESSAGE = 1 << 14  # bytes of a message's first part, into which most messages fit
# How long a process may wait for a message. It notices at once if another process ends.
_IDLE = datetime.timedelta(days=365)
# how long all processes may take to the end of a failed forward
_FAILED = datetime.timedelta(seconds=20)


_lock = forks.lock()


class Ranks:
    """The processes of one sharded model, in a separate process group (gloo, on the CPU), for calls
    that all of them make (`seams.Processes`). All methods except `alone`, `reserve` and `release`
    are collectives: all members call them in the same order."""

    leads = False

    def __init__(self, members: list[int]) -> None:
        self.size = len(members)
        self.world = dist.group.WORLD
        self._first = members[0]
        self._group = dist.new_group(
            members, timeout=_IDLE, backend="gloo", use_local_synchronization=True
        )
        self.rank = dist.get_rank(self._group)
        self._user: int | None = None  # the thread of a call, or `_ENGINE`

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Reserves the model for a call. Raises `RuntimeError` while a call of another thread, or
        an engine, uses it: concurrent forwards could run in a different order in each process."""
        outer = self.reserve(threading.get_ident())
        try:
            yield
        finally:
            self._user = outer

    def reserve(self, user: int = _ENGINE) -> int | None:
        """As `alone`, but until `release`; returns the previous user."""
        with _lock:
            outer = self._user
            if outer is not None and (outer != user or user == _ENGINE):
                raise RuntimeError(
                    "this model is sharded over several processes, and an engine or another"
                    " thread's call uses it: close the engine first, make one call at a time, or"
                    " add requests to one engine"
                )
            self._user = user
        return outer

    def release(self) -> None:
        self._user = None

    def send(self, message: bytes) -> None:
        """Sends a message from the first member to the others, which call `receive`."""
        framed = len(message).to_bytes(8, "little") + message
        self._broadcast(bytearray(framed[:_MESSAGE].ljust(_MESSAGE, b"\0")))
        if len(framed) > _MESSAGE:
            self._broadcast(bytearray(framed[_MESSAGE:]))

    def receive(self) -> bytes:
        framed = bytearray(_MESSAGE)
        self._broadcast(framed)
        end = 8 + int.from_bytes(framed[:8], "little")
        message = bytes(framed[8:end])
        if end > _MESSAGE:
            rest = bytearray(end - _MESSAGE)
            self._broadcast(rest)
            message += rest
        return message

    def _broadcast(self, content: bytearray) -> None:
        """Sends the content from the first member; in the others, replaces it by the content
        sent."""
        with self._reaching():
            shared = torch.frombuffer(content, dtype=torch.uint8)
            dist.broadcast(shared, self._first, group=self._group)

    def gather(self, *numbers: int) -> list[list[int]]:
        """Returns the int64 numbers that each member passes, by rank."""
        passed = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(passed) for _ in range(self.size)]
        with self._reaching():
            dist.all_gather(gathered, passed, group=self._group)
        return [row.tolist() for row in gathered]

    def least(self, number: int) -> int:
        return min(self.gather(number))[0]

    def agree(self, number: int) -> int:
        return self.gather(number)[0][0]

    def run(self, *forward: Any) -> None:
        """Does nothing, like `moved` and `adapters`: all processes make the same calls
        themselves."""

    moved = adapters = run

    def check(self, plan: StepPlan) -> None:
        numbers = self.gather(plan.digest())
        others = [rank for rank, passed in enumerate(numbers) if passed != numbers[0]]
        if others:
            raise RankLostError(
                f"ranks {others} of {self.size} have scheduled other tokens than rank 0: make the"
                " same calls in every process, with the same inputs, options, seeds and weights"
            )

    def fingerprint(self, model: nn.Module, state: ModelState | None = None) -> bytes | None:
        shard = fingerprint(model, state)
        numbers = self.gather(shard is not None, *struct.unpack("<4q", shard or bytes(32)))
        if not all(is_read for is_read, *_ in numbers):
            return None
        return hashlib.blake2b(repr(numbers).encode(), digest_size=32).digest()

    def check_failed(self) -> None:
        """Called after a forward failed here: raises [`RankLostError`] unless it failed in every
        member."""
        with self._reaching():
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self._group, async_op=True).wait(
                _FAILED
            )

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A context for a forward of all members: an error passes through if every member raises
        one."""
        try:
            yield
        except Exception:
            self.check_failed()
            raise

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of gloo
            raise RankLostError(
                f"rank {self.rank} of {self.size} cannot reach the others: one has ended or failed,"
                " and its output says why. Start all of them again"
            ) from error


_ranks: dict[tuple[int, ...], Ranks] = {}


def _check_heads(model: nn.Module) -> None:
    """Raises `ValueError` if the K/V heads do not divide evenly among the processes that share the
    attention."""
    heads, size = compat.split_heads(model) or (0, 1)
    if heads % size == 0:
        return
    counts = " or ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
    raise ValueError(
        f"{type(model).__name__} has {heads} key/value heads, which {size} processes cannot share"
        f" evenly: start {counts} processes (`torchrun --nproc_per_node`)"
    )


def alone(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return processes_of(model).alone()


def processes_of(model: nn.Module) -> Ranks:
    """The processes that share this model in shards, as `model.sharding.processes_of`."""
    members = compat.shard_ranks(model)
    assert members is not None
    _check_heads(model)
    key = tuple(members)
    ranks = _ranks.get(key)
    if ranks is None or ranks.world is not dist.group.WORLD:
        # else it belongs to an earlier `init_process_group`
        ranks = _ranks[key] = Ranks(members)
    return ranks
