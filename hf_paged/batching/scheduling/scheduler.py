"""Schedules each step: which sequences run, with how many tokens. Plain Python: no tensors."""

from __future__ import annotations

import logging
import sys
from bisect import insort
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ...cache.adapter_pages import AdapterPages
from ...cache.block_manager import NO_BLOCKS, UNCACHED
from ...cache.block_pool import OutOfBlocksError
from ..request import Request, Sequence, Status
from .preemption import Preemption
from .timeline import Timeline

logger = logging.getLogger(__name__)

NUM_NEXT = 16  # waiting requests whose adapters may be loaded before they are admitted
AGING = 256.0  # one unit of priority weighs as much as this many arrivals
_by_key = attrgetter("key")


@dataclass
class StepPlan:
    """One step. `num_computed_tokens` already counts its tokens, and the block tables have room for them."""

    decodes: list[tuple[Sequence, int]] = field(default_factory=list)  # one token to compute, plus a draft
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # chunks of prefill or recomputation
    preempted: list[Request] = field(default_factory=list)  # preempted in this step
    admitted: list[Request] = field(default_factory=list)

    @property
    def items(self) -> list[tuple[Sequence, int]]:
        """All sequences of the step with their `query_len`, decodes first."""
        return self.decodes + self.chunks

    def __str__(self) -> str:
        """A list of (request id, sequence index, tokens to compute, logits wanted, adapter)."""
        rows = ((s.request, s.index, count, int(not s.num_to_compute)) for s, count in self.items)
        return str([(request.request_id, *row, request.adapter) for request, *row in rows])


class NeverFits(OutOfBlocksError):
    """`request` needs more blocks than there are, and no other request holds any."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfBlocksError, (str(self),)  # a copy needs no request, which holds blocks


class Rope(Protocol):
    """Rotary factors that depend on the sequence's length (`model.rope.LengthRope`)."""

    restarts: bool  # whether a sequence is recomputed when its factors change

    def factors(self, length: int) -> int: ...


class RopeNamespace(NamedTuple):
    """The namespace of prefixes computed with other rotary factors than usual."""

    own: Hashable
    factors: int


@dataclass(eq=False, repr=False)
class Scheduler:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefills (SARATHI, arXiv 2308.16369), which do not
    stall decodes (Sarathi-Serve, arXiv 2403.02310, section 4.2), and preemption of whole requests (PagedAttention,
    arXiv 2309.06180, section 4.5). In the order of `arrival + priority * aging`, running requests get their tokens and
    may preempt later ones; then waiting requests are admitted as long as the first of them fits."""

    preemption: Preemption
    max_num_batched_tokens: int  # per step
    max_num_seqs: int  # running sequences; exceeded only by one large request, or if running requests wait for others
    max_chunk_tokens: int | None = None  # prefill tokens in a step with decodes; `None`: as many as fit into the step
    watermark: float = 0.01  # share of all blocks that admission leaves to running requests
    aging: float = AGING
    rope: Rope | None = None  # set if keys depend on the sequence's length
    timeline: Timeline = field(default_factory=Timeline)  # records when requests run and wait
    reclaim: Callable[[], bool] | None = None  # frees blocks of assistants; returns whether there were any
    num_lent: Callable[[], int] = int  # number of blocks that `reclaim` would free
    adapters: AdapterPages | None = None  # memory in the pool for adapters that are loaded from folders
    only: Set[Request] | None = None  # the only requests that steps may compute; `None`: all

    def __post_init__(self) -> None:
        self.blocks, self._chunks = self.preemption.blocks, self.preemption.chunks
        # every running sequence must be able to decode in every step, and one prefill to advance beside them
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        self._running: list[Request] = []  # sorted by key
        self._waiting: list[Request] = []  # sorted by key; preempted ones may just wait for a token
        self._num_rows = 0  # open rows of running requests
        self._arrivals = 0
        # the first waiting request, if this step had no room for it (`max_num_seqs`, blocks)
        self._refused: Request | None = None
        self._plan = StepPlan()

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_rows(self) -> int:
        """Number of open sequences of running requests."""
        return self._num_rows

    @property
    def num_waiting(self) -> int:
        """Number of requests that do not run: new and preempted ones."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def first_waiting(self) -> Request | None:
        """The request to admit next."""
        return next((each for each in self._waiting if self._may_run(each) and not each.is_answered), None)

    def _may_run(self, request: Request) -> bool:
        return self.only is None or request in self.only

    def add(self, *requests: Request) -> None:
        """Queues requests. Raises `OutOfBlocksError`, with none queued, if one can never fit."""
        for request in requests:
            self.preemption.check_fits(request, self.num_lent())
        for request in requests:
            self._turn(request)
            request.key = (self._arrivals + request.priority * self.aging, self._arrivals)
            self._arrivals += 1
            self._wait(request)

    def schedule(self) -> StepPlan:
        """Returns the next step. Raises `OutOfBlocksError` if others hold the blocks that the first request needs,
        `NeverFits` if no other holds any."""
        try:
            plan = self._schedule()
            logger.debug("step %d computes %s", self.timeline.num_steps, plan)
            self.timeline.stepped(plan.admitted, plan.chunks)
            return plan
        except OutOfBlocksError:  # nothing was scheduled
            raise
        except BaseException:  # the tokens already counted as computed will not be
            self.blocks.index.undo_step()
            self._plan = StepPlan()
            for request in list(self._running):
                self._send_back(request)
            raise

    def _schedule(self) -> StepPlan:
        for sequence, _ in self._plan.chunks:
            if sequence.request.inputs is not None:  # only after its forward may others reuse its blocks
                namespace = sequence.request.namespace
                self.blocks.register(sequence.blocks, sequence.keys, sequence.num_computed_tokens, namespace)
            self.blocks.trim(sequence.blocks)  # frees window blocks that only the chunk's tokens could see
        self.blocks.index.begin_step()
        plan, self._refused = StepPlan(), None
        self._plan = plan
        if self.rope is not None and self.rope.restarts:
            for request in list(self._running):
                if self._turn(request):
                    self._preempt(request, keeps=False)
                    plan.preempted.pop()  # not for lack of blocks: this step may admit it again
        left = self._continue_running()
        if not plan.preempted:
            self._admit(left)
        is_released = False
        while not plan.items and self.first_waiting is not None:
            # every running request waits for a token that depends on a request that does not run
            self._admit(self.max_num_batched_tokens, any_rows=True)
            if plan.items:
                break
            idle = (each for each in reversed(self._running) if each.is_computed or not self._may_run(each))
            victim = next(idle, None)
            if victim is None:
                if plan.preempted:  # the next step can use the blocks that preemption freed
                    break
                if not is_released and self.blocks.release_unused():
                    is_released = True
                    continue
                raise self._out_of_blocks(self.first_waiting) from self.blocks.refusal
            self._preempt(victim)
        return plan

    def _continue_running(self) -> int:
        """Schedules tokens of running requests; returns the token budget left for prefills."""
        decodes = self._plan.decodes
        left = self.max_num_batched_tokens
        beside = left if self.max_chunk_tokens is None else self.max_chunk_tokens  # budget of chunks beside decodes
        reserved = -1  # tokens reserved for later decodes in this loop; counted at the first chunk
        spare = left - self._num_rows  # budget of drafts
        for request in self._running:  # the body removes only this request, or later ones
            if self.only is not None and request not in self.only:
                continue
            for sequence in request.sequences:
                num_tokens = len(sequence.token_ids)
                to_compute = num_tokens - sequence.num_computed_tokens
                if not to_compute or sequence.is_finished:
                    continue
                if to_compute == 1:
                    if left <= 0:
                        return 0
                    reserved -= 1
                    blocks = sequence.blocks
                    if sequence.draft and (num_drafted := self._with_draft(sequence, spare)):
                        spare -= num_drafted
                        left -= 1 + num_drafted
                        continue
                    if num_tokens <= blocks.capacity:  # the tail block has room and is not shared
                        for table in blocks.tables:
                            table.num_tokens = num_tokens
                        sequence.num_computed_tokens = num_tokens
                        decodes.append((sequence, 1))
                        left -= 1
                        continue
                    limit = left
                else:
                    if reserved < 0:
                        unfinished = (each for running in self._running for each in running.open_sequences)
                        reserved = sum(each.num_to_compute == 1 for each in unfinished)
                    limit = min(left - reserved, beside) if decodes or reserved else left
                    if (first := self.first_waiting) is not None and first.key < request.key:
                        limit -= limit // 2  # leaves budget to admit a waiting request that sorts before this one
                query_len = self._catch_up(request, sequence, limit)
                left -= query_len
                beside -= query_len if query_len > 1 else 0
                if request.status is not Status.RUNNING:
                    return left
        return min(left, beside) if decodes else left

    def _with_draft(self, sequence: Sequence, limit: int) -> int:
        """Schedules a sequence's last token with up to `limit` tokens of its draft; returns the number of draft tokens.
        If blocks are short, schedules nothing and returns 0: drafts preempt no request."""
        blocks, num_tokens = sequence.blocks, len(sequence.token_ids)
        del sequence.draft[max(0, limit) :]
        count = len(sequence.draft)
        if count:
            self.blocks.register(blocks, sequence.keys, sequence.num_computed_tokens, sequence.request.namespace)
            before = self.blocks.fork(blocks) if self.blocks.has_states else NO_BLOCKS
            if self.blocks.append(blocks, 1 + count):
                sequence.num_computed_tokens, sequence.before_draft = num_tokens, before
                self._plan.decodes.append((sequence, 1 + count))
                return count
            self.blocks.free(before)
        sequence.draft = []
        return 0

    def settle_draft(self, sequence: Sequence, num_accepted: int = 0) -> None:
        """Drops the K and V of a draft except for its first `num_accepted` tokens. A state cannot be truncated: with
        states, unless all tokens were accepted, restores the state from before the step, whose tokens are then
        recomputed."""
        if not sequence.draft:
            return
        before, sequence.before_draft = sequence.before_draft, NO_BLOCKS
        if before is NO_BLOCKS or num_accepted == len(sequence.draft):
            sequence.num_computed_tokens += num_accepted
            self.blocks.truncate(sequence.blocks, sequence.num_computed_tokens)
        else:
            before, sequence.blocks = sequence.blocks, before
            sequence.num_computed_tokens = sequence.blocks.tables[0].num_tokens
        self.blocks.free(before)
        sequence.draft = []

    def _catch_up(self, request: Request, sequence: Sequence, limit: int, may_preempt: bool = True) -> int:
        """Schedules up to `limit` tokens of `sequence`; returns how many. If blocks are short, preempts later requests,
        then shrinks the chunk, then preempts `request` itself."""
        query_len, is_whole = sequence.num_to_compute, sequence.is_whole
        if request.num_shared_tokens:
            query_len = min(query_len, self.preemption.num_until_shared(request, sequence))
        if is_whole or self.preemption.replays_prompt(request):
            query_len = min(query_len, max(1, request.num_prompt_tokens - sequence.num_computed_tokens))
        if not is_whole:
            query_len = min(limit, query_len)
        elif limit < query_len and not self._shares_forward(request):
            return 0
        if request.num_tokens_alone >= 0 and self._chunks and self.blocks.has_windows:
            # under a limit in bytes, blocks that leave the window can be reused only by layers of that window
            query_len = min(query_len, self.blocks.block_size)
        if sequence.blocks.stops:
            done = sequence.num_computed_tokens
            query_len = min([query_len, *(stop - done for stop in sequence.blocks.stops if stop > done)])
        if request.drafts_first and query_len == sequence.num_to_compute > 1:
            query_len -= 1
        if query_len <= 0:
            return 0
        if sequence.blocks is NO_BLOCKS:
            sequence.blocks = self.blocks.new()
        blocks = sequence.blocks
        self.blocks.register(blocks, sequence.keys, sequence.num_computed_tokens, request.namespace)
        while not self.blocks.append(blocks, query_len, skips=is_whole or not self._chunks):
            if self.reclaim is not None and self.reclaim():
                continue
            if may_preempt and self._running[-1] is not request:
                self._preempt(self._running[-1])
            elif query_len > 1 and self.blocks.has_windows and self._chunks and not is_whole:
                query_len //= 2  # only with windows do fewer tokens need fewer blocks
            else:
                plan = self._plan
                has_started = any(done and done[-1][0].request is request for done in (plan.decodes, plan.chunks))
                if may_preempt and not has_started:
                    num_tokens = sum(each.num_tokens for each in request.open_sequences)
                    is_alone = not self.blocks.num_withheld()
                    self._preempt(request)
                    if not self._running and is_alone:
                        if request.num_tokens_alone == num_tokens:  # no progress since it was last preempted alone
                            raise self._out_of_blocks(request) from self.blocks.refusal
                        request.num_tokens_alone = num_tokens
                        if self.blocks.release_unused() and self.blocks.has_windows:
                            request.namespace = UNCACHED  # cached window blocks would keep their bytes
                return 0
        sequence.num_computed_tokens += query_len
        if request.num_shared_tokens:  # no fast path past the point where the rows diverge
            blocks.capacity = sequence.num_computed_tokens
        if query_len > 1 or is_whole:
            if self._chunks and not is_whole:
                # later requests of this step may share the blocks: each layer stores all K and V before attention
                self.blocks.register(blocks, sequence.keys, sequence.num_computed_tokens, request.namespace)
            self._plan.chunks.append((sequence, query_len))
        else:
            self._plan.decodes.append((sequence, 1))
        return query_len

    def _out_of_blocks(self, request: Request) -> OutOfBlocksError:
        """Makes the error for a step that could schedule nothing for lack of blocks for `request`."""
        manager = self.blocks
        total = "any number of" if manager.num_total >= sys.maxsize else f"{manager.num_free} of {manager.num_total}"
        said = (
            f"nothing can be scheduled: {request!r} needs more blocks, {self.num_waiting} requests wait, "
            f"{self.num_running} run, {total} blocks can be had. "
        )
        if self.num_running or manager.num_used:
            return OutOfBlocksError(said + "Others hold blocks: free their caches, or raise `num_blocks`")
        if manager.num_withheld():
            return OutOfBlocksError(
                said + "Other models hold the rest of `hf_paged.budget`: end what they run, or raise it"
            )
        return NeverFits(
            request,
            said + "No other holds blocks: raise `num_blocks`, `memory_fraction` or `hf_paged.budget`, free memory, or "
            "lower `max_new_tokens`, the prompt length or the number of sequences",
        )

    def _shares_forward(self, request: Request) -> bool:
        """Whether the step's prefills all run in the forward that this prompt needs. Then a prompt computed as a whole
        may exceed the token budget."""
        if request.inputs is None:
            return False
        others = (sequence.request.inputs for sequence, _ in self._plan.chunks)
        return all(inputs is not None and inputs[0] is request.inputs[0] for inputs in others)

    def reserve_next(self, sequences: list[Sequence], num_ending: int = 0) -> bool:
        """Allocates blocks for one more token of each sequence (all have their logits), if the next step will contain
        exactly these decodes. Other running sequences, `num_ending`, end before. Returns `False` if a waiting request
        might be admitted, or if blocks are short."""
        if self._num_rows != len(sequences) + num_ending:
            return False
        if self._waiting and (num_ending or self._refused is None or self._refused is not self.first_waiting):
            return False
        for sequence in sequences:
            blocks, num_tokens = sequence.blocks, len(sequence.token_ids)
            if sequence.num_computed_tokens != num_tokens:
                return False
            if num_tokens < blocks.capacity:
                continue
            self.blocks.register(blocks, sequence.keys, num_tokens, sequence.request.namespace)
            if not self.blocks.reserve_next(blocks):
                return False
        return True

    def _admit(self, left: int, any_rows: bool = False) -> None:
        while (request := self.first_waiting) is not None:
            if left <= 0 and not (self._plan.chunks and self._shares_forward(request)):
                return
            is_alone = not self._running
            if not (is_alone or any_rows) and self._num_rows + request.num_open_rows > self.max_num_seqs:
                self._refused = request
                return
            reserve = 0 if is_alone else int(self.watermark * self.blocks.num_total)
            # a request alone may shrink its chunks to one token; a sequence computed as a whole skips blocks outside
            # its windows
            chunk = 1 if is_alone or not self._chunks else self.max_num_batched_tokens
            needs = request, chunk, reserve, is_alone
            if not self._bring_in(*needs) and not (
                self.reclaim is not None and self.reclaim() and self._bring_in(*needs)
            ):
                self._refused = request
                return
            self._waiting.remove(request)
            request.status = Status.RUNNING
            self._num_rows += request.num_open_rows
            insort(self._running, request, key=_by_key)
            before = left
            for sequence in request.open_sequences:
                if sequence.num_to_compute:
                    left -= self._catch_up(request, sequence, left, may_preempt=False)
            if left == before:  # a single layer group is short of blocks
                self._send_back(request, keeps=True)
                return
            self._plan.admitted.append(request)

    def _bring_in(self, request: Request, chunk: int, reserve: int, is_alone: bool) -> bool:
        """`Preemption.bring_in`, which also pins the adapter's weights in the pool while the request runs."""
        if self.adapters is None or not request.adapter_bytes:
            return self.preemption.bring_in(request, chunk, reserve, is_alone)
        is_in = False
        try:
            if self.adapters.pin(request.adapter, request.adapter_bytes, request):
                is_in = self.preemption.bring_in(request, chunk, reserve, is_alone)
        finally:
            if not is_in:
                self.adapters.unpin(request.adapter, request)
        if is_in:
            self.adapters.use(request.adapter)
        return is_in

    def next_adapters(self) -> list[Hashable]:
        """Returns the adapters of the first `NUM_NEXT` waiting requests that have no place in the pool yet."""
        known, first = self.adapters, self._waiting[:NUM_NEXT]
        found = dict.fromkeys(request.adapter for request in first if request.adapter_bytes)
        return [] if known is None else [adapter for adapter in found if adapter not in known]

    def _turn(self, request: Request) -> bool:
        """Updates the request's rotary factors and namespace; returns whether they changed. Prefixes with different
        factors are not shared."""
        rope, lengths = self.rope, [sequence.num_tokens for sequence in request.open_sequences]
        if rope is None or (factors := rope.factors(max(lengths) if rope.restarts else request.num_prompt_tokens)) == (
            request.rope_factors
        ):
            return False
        own = request.namespace.own if isinstance(request.namespace, RopeNamespace) else request.namespace
        request.rope_factors = factors
        request.namespace = own if own is UNCACHED else RopeNamespace(own, factors)
        return True

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self._waiting, request, key=_by_key)
        self.timeline.waits(request)

    def _preempt(self, request: Request, keeps: bool = True) -> None:
        request.num_preemptions += 1
        for sequence in request.open_sequences:
            if not sequence.num_to_compute:
                sequence.num_answered_tokens = sequence.num_tokens
        self._plan.preempted.append(request)
        self._send_back(request, keeps)

    def recompute(self) -> list[Request]:
        """Between steps: drops the K/V of unfinished requests. Returns those that were running, now preempted."""
        self._plan = StepPlan()
        for request in list(self._running):
            self._preempt(request, keeps=False)
        for request in self._waiting:
            self.preemption.forget(request)
        return self._plan.preempted

    def _send_back(self, request: Request, keeps: bool = False) -> None:
        """Returns a running request to the queue: with nothing computed, or with what `Preemption.send_out` keeps."""
        self._remove(request)
        for sequence in request.open_sequences:
            self.settle_draft(sequence)
        try:
            give_up = self.preemption.send_out if keeps else self.preemption.forget
            give_up(request)
        except BaseException:  # no host memory, or an interrupt: recompute it
            self.preemption.forget(request)
            raise
        finally:
            self._wait(request)

    def fail_step(self) -> None:
        """Undoes the step just scheduled, whose forward raised."""
        self.blocks.index.undo_step()
        plan, self._plan = self._plan, StepPlan()
        for request in plan.admitted:  # they may hold blocks that other requests should have written in this step
            if request.status is Status.RUNNING:
                self._send_back(request)
        for sequence, query_len in plan.items:
            if sequence.request.status is Status.RUNNING and sequence.blocks is not NO_BLOCKS:
                sequence.num_computed_tokens -= query_len - len(sequence.draft)
                self.blocks.truncate(sequence.blocks, sequence.num_computed_tokens)
                self.blocks.free(sequence.before_draft)
                sequence.draft, sequence.before_draft = [], NO_BLOCKS

    def finish_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence, and its request with the last one."""
        if sequence.is_finished:
            return
        request = sequence.request
        if request.num_open_rows == 1:
            self.finish(request)
            return
        self.preemption.end_sequence(sequence)
        request.num_open_rows -= 1
        if request.status is Status.RUNNING:
            self._num_rows -= 1

    def finish(self, request: Request) -> None:
        """Ends a request, running or waiting. Not to be called between `schedule` and the end of the forward."""
        if request.status is Status.FINISHED:
            return
        self._remove(request)  # before its blocks are cached: unpinning its adapter may evict cached blocks
        request.status = Status.FINISHED
        self.timeline.finished(request)
        for sequence in request.open_sequences:
            self.preemption.end_sequence(sequence)

    def _remove(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._num_rows -= request.num_open_rows
            if self.adapters is not None and request.adapter_bytes:
                self.adapters.unpin(request.adapter, request)
        else:
            self._waiting.remove(request)

    def __repr__(self) -> str:
        return f"Scheduler({self.num_running} running, {self.num_waiting} waiting, {self._num_rows} sequences)"
