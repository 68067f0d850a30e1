"""The group of processes that compute every forward of a sharded model together, and the messages
between them. `leader.py` determines the content of messages."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
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

_ENGINE = -1  # identifies an engine that uses a model, in place of the id of a call's thread
_FIRST_PART_BYTES = 1 << 14  # size of the first part of a message; most messages fit into it
# limit on a wait for the next message; the end of a process is noticed at once
_IDLE_TIMEOUT = datetime.timedelta(days=365)
# limit on a wait for the other processes to fail in the same forward
_FAILURE_TIMEOUT = datetime.timedelta(seconds=20)


_lock = forks.lock()


class Ranks:
    """The processes of one sharded model, as a separate process group (gloo, on the CPU).
    Implements `seams.Processes` for calls that all of these processes make.

    Methods that communicate are collective: all members must call them in the same order. If a
    member ends, the others get a [`RankLostError`]. If a member is alive but does not take part,
    the others also get that error, after at most `_FAILURE_TIMEOUT` in `check_all_failed` and
    `_IDLE_TIMEOUT` elsewhere. `forward` communicates only after an error. `reserving`, `reserve`,
    `release`, `announce_step`, `moved` and `call_adapters` do not communicate."""

    leads = False

    def __init__(self, members: list[int]) -> None:
        self.size = len(members)
        self.world = dist.group.WORLD
        self._first = members[0]
        self._group = dist.new_group(
            members, timeout=_IDLE_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        self.rank = dist.get_rank(self._group)
        self._user: int | None = None  # id of a call's thread, or `_ENGINE`

    @contextlib.contextmanager
    def reserving(self) -> Iterator[None]:
        """A context that reserves the model for a call. Raises `RuntimeError` while a call of
        another thread, or an engine, uses the model: the forwards of both could run in a different
        order in each process."""
        outer_user = self.reserve(threading.get_ident())
        try:
            yield
        finally:
            self._user = outer_user

    def reserve(self, user: int = _ENGINE) -> int | None:
        """Reserves the model until `release` is called. Raises `RuntimeError` as `reserving` does.
        Returns the previous user, or `None`."""
        with _lock:
            previous_user = self._user
            if previous_user is not None and (previous_user != user or user == _ENGINE):
                raise RuntimeError(
                    "this model is sharded over several processes, and an engine or another"
                    " thread's call uses it: close the engine first, make one call at a time, or"
                    " add requests to one engine"
                )
            self._user = user
        return previous_user

    def release(self) -> None:
        """Ends a reservation."""
        self._user = None

    def send(self, message: bytes) -> None:
        """Sends a message from the first member to the others, which call `receive`."""
        framed_message = len(message).to_bytes(8, "little") + message
        self._broadcast(
            bytearray(framed_message[:_FIRST_PART_BYTES].ljust(_FIRST_PART_BYTES, b"\0"))
        )
        if len(framed_message) > _FIRST_PART_BYTES:
            self._broadcast(bytearray(framed_message[_FIRST_PART_BYTES:]))

    def receive(self) -> bytes:
        """Returns the message that the first member sends."""
        first_part = bytearray(_FIRST_PART_BYTES)
        self._broadcast(first_part)
        end = 8 + int.from_bytes(first_part[:8], "little")
        message = bytes(first_part[8:end])
        if end > _FIRST_PART_BYTES:
            second_part = bytearray(end - _FIRST_PART_BYTES)
            self._broadcast(second_part)
            message += second_part
        return message

    def _broadcast(self, content: bytearray) -> None:
        """Sends the first member's `content` to the others, and overwrites theirs with it."""
        with self._converting_errors():
            shared_bytes = torch.frombuffer(content, dtype=torch.uint8)
            dist.broadcast(shared_bytes, self._first, group=self._group)

    def gather(self, *numbers: int) -> list[list[int]]:
        """Returns, by rank, the `numbers` (int64) that each member has passed."""
        local_numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered_numbers = [torch.empty_like(local_numbers) for _ in range(self.size)]
        with self._converting_errors():
            dist.all_gather(gathered_numbers, local_numbers, group=self._group)
        return [row.tolist() for row in gathered_numbers]

    def minimum(self, number: int) -> int:
        return min(self.gather(number))[0]

    def agree(self, number: int) -> int:
        return self.gather(number)[0][0]

    def announce_step(self, *arguments: Any) -> None:
        """Does nothing, like `moved` and `call_adapters`: each process makes these calls itself."""

    moved = call_adapters = announce_step

    def check(self, plan: StepPlan) -> None:
        digests = self.gather(plan.digest())
        differing_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing_ranks:
            raise RankLostError(
                f"ranks {differing_ranks} of {self.size} scheduled different tokens from rank 0:"
                " make the same calls in every process, with the same inputs, options, seeds and"
                " weights"
            )

    def fingerprint(self, model: nn.Module, state: ModelState | None = None) -> bytes | None:
        shard_digest = fingerprint(model, state)
        digest_numbers = struct.unpack("<4q", shard_digest or bytes(32))
        gathered_digests = self.gather(shard_digest is not None, *digest_numbers)
        if not all(is_read for is_read, *_ in gathered_digests):
            return None
        return hashlib.blake2b(repr(gathered_digests).encode(), digest_size=32).digest()

    def check_all_failed(self) -> None:
        """Called by each member after its forward has failed. Raises [`RankLostError`] unless all
        other members also call this within `_FAILURE_TIMEOUT`."""
        reason = (
            "one has ended, or did not fail in the forward that failed here; the error above and"
            " the others' output say why"
        )
        with self._converting_errors(reason):
            dist.all_reduce(torch.zeros(1, device="cpu"), group=self._group, async_op=True).wait(
                _FAILURE_TIMEOUT
            )

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Implements `Processes.forward`."""
        try:
            yield
        except RankLostError:
            raise
        except Exception:
            self.check_all_failed()
            raise

    @contextlib.contextmanager
    def _converting_errors(
        self, reason: str = "one has ended or failed, and its output says why"
    ) -> Iterator[None]:
        """A context that raises gloo's errors as [`RankLostError`], for this `reason`."""
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.size} cannot reach the others: {reason}. Start all of"
                " them again"
            ) from error


_ranks: dict[tuple[int, ...], Ranks] = {}


def sharded_heads(model: Any) -> tuple[int, int] | None:
    """Returns the number of KV heads (the greatest common divisor, if layers differ) and the number
    of processes over which they are sharded; `None` if the heads are not sharded, or if their
    number is unknown."""
    plan = getattr(model, "tp_plan", None) or {}
    size = getattr(model, "tp_size", None) or 1
    column_sharded = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    if size < 2 or column_sharded.isdisjoint(("k_proj", "qkv_proj", "query_key_value")):
        return None
    counts: list[int] = []
    for layer in compat.layer_configs(model.config.get_text_config(decoder=True)):
        count = getattr(layer, "num_key_value_heads", None)
        if not count:
            count = getattr(layer, "num_attention_heads", None)
        if not count or not isinstance(count, int):
            return None
        counts.append(count)
    return math.gcd(*counts), size


def _check_heads(model: nn.Module) -> None:
    """Raises `ValueError` if the K/V heads cannot be divided evenly among the processes that split
    the attention."""
    num_heads, num_processes = sharded_heads(model) or (0, 1)
    if num_heads % num_processes == 0:
        return
    divisors = (count for count in range(1, num_heads + 1) if num_heads % count == 0)
    allowed = " or ".join(map(str, divisors))
    raise ValueError(
        f"{type(model).__name__} has {num_heads} key/value heads, which {num_processes} processes"
        f" cannot share evenly: start {allowed} processes (`torchrun --nproc_per_node`)"
    )


def reserving(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Implements `model.sharding.reserving` for a sharded model."""
    return processes_of(model).reserving()


def processes_of(model: nn.Module) -> Ranks:
    """Implements `model.sharding.processes_of` for a sharded model."""
    members = compat.shard_ranks(model)
    assert members is not None
    _check_heads(model)
    key = tuple(members)
    ranks = _ranks.get(key)
    # `ranks` may belong to an earlier `init_process_group`
    if ranks is None or ranks.world is not dist.group.WORLD:
        ranks = _ranks[key] = Ranks(members)
    return ranks
