"""Schedules each step: which sequences run, with how many tokens. Plain Python: no tensors."""

from __future__ import annotations

import logging
import sys
from bisect import insort
from collections.abc import Callable, Collection, Hashable, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ...cache.adapter_pages import AdapterPages
from ...cache.block_manager import NO_BLOCKS, UNCACHED
from ...cache.block_pool import OutOfBlocksError
from ...plan import StepPlan
from ..request import Request, Sequence, Status
from .preemption import Preemption
from .timeline import Timeline
from .waiting_prompts import WaitingPrompts

logger = logging.getLogger(__name__)

NUM_NEXT = 16  # waiting requests whose adapters may be loaded before they are admitted
AGING = 256.0  # one unit of priority weighs as much as this many arrivals
_by_key = attrgetter("key")


@dataclass
class Scheduled:
    """What is scheduled so far: becomes the step's plan."""

    decodes: list[Sequence] = field(default_factory=list)  # one token of each
    has_parts: bool = False  # whether some of these have more to compute
    drafted: list[tuple[Sequence, int]] = field(default_factory=list)  # a last token and a draft
    # chunks of prefill or recomputation
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    has_inputs: bool = False

    def __bool__(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.decodes or self.drafted or self.chunks)

    def has_rows_of(self, request: Request) -> bool:
        """Whether rows of this request, the last one looked at, are scheduled."""
        decodes = self.decodes[-1:]
        others = [sequence for rows in (self.drafted, self.chunks) for sequence, _ in rows[-1:]]
        return any(sequence.request is request for sequence in [*decodes, *others])

    def plan(self) -> StepPlan:
        sequences = self.decodes
        counts = [1] * len(sequences)
        num_logits = counts
        if self.has_parts:
            num_logits = [int(sequence.num_to_compute == 1) for sequence in sequences]
        others = [*self.drafted, *self.chunks]
        if others:
            sequences = sequences + [sequence for sequence, _ in others]
            counts = counts + [count for _, count in others]
            num_logits = num_logits + [count for _, count in self.drafted]
            for sequence, count in self.chunks:
                num_logits.append(int(count == sequence.num_to_compute))
        return StepPlan(
            sequences,
            [sequence.num_computed_tokens for sequence in sequences],
            counts,
            num_logits,
            num_decodes=len(self.decodes) + len(self.drafted),
            has_chunks=bool(self.chunks),
            has_drafts=bool(self.drafted),
            has_inputs=self.has_inputs,
            admitted=self.admitted,
            preempted=self.preempted,
        )


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
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefills (SARATHI, arXiv
    2308.16369), which do not stall decodes (Sarathi-Serve, arXiv 2403.02310, section 4.2), and
    preemption of whole requests (PagedAttention, arXiv 2309.06180, section 4.5). In the order of
    `arrival + priority * aging`, running requests get their tokens and may preempt later ones; then
    waiting requests are admitted as long as the first of them fits."""

    preemption: Preemption
    max_num_batched_tokens: int  # per step
    # running sequences; exceeded only by one large request, or if running requests wait for others
    max_num_seqs: int
    # prefill tokens in a step with decodes; `None`: as many as fit into the step
    max_chunk_tokens: int | None = None
    watermark: float = 0.01  # share of all blocks that admission leaves to running requests
    aging: float = AGING
    rope: Rope | None = None  # set if keys depend on the sequence's length
    timeline: Timeline = field(default_factory=Timeline)  # records when requests run and wait
    # frees blocks of assistants; returns whether there were any
    reclaim: Callable[[], bool] | None = None
    # memory in the pool for adapters that are loaded from folders
    adapters: AdapterPages | None = None
    only: Set[Request] | None = None  # the only requests that steps may compute; `None`: all

    def __post_init__(self) -> None:
        self.blocks = self.preemption.blocks
        self._chunks = self.preemption.chunks
        self._prompts = self.preemption.waiting
        # every running sequence must be able to decode in every step, and one prefill to advance
        # beside them
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        self._running: list[Request] = []  # sorted by key
        self._waiting: list[Request] = []  # sorted by key; preempted ones may just wait for a token
        self._num_rows = 0  # open rows of running requests
        self._arrivals = 0
        # the first waiting request, if this step had no room for it (`max_num_seqs`, blocks)
        self._refused: Request | None = None
        self._num_with_inputs = 0  # running requests with inputs beside token ids
        self._scheduled = Scheduled()
        self._plan: StepPlan | None = None  # of the last step
        self._is_committed = False  # whether its rows may have advanced

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
        for request in self._waiting:
            if self._may_run(request) and not request.is_answered:
                return request
        return None

    def _may_run(self, request: Request) -> bool:
        return self.only is None or request in self.only

    def add(self, *requests: Request) -> None:
        """Queues requests. Raises `OutOfBlocksError`, with none queued, if one can never fit."""
        for request in requests:
            self.preemption.check_fits(request)
        for request in requests:
            self._turn(request)
            arrival = self._arrivals
            request.key = (arrival + request.priority * self.aging, arrival)
            self._arrivals += 1
            self._wait(request)

    def schedule(self) -> StepPlan:
        """Returns the next step, to be ended by `commit` or `fail_step`. Raises `OutOfBlocksError`,
        with nothing scheduled, if others hold the blocks that the first request needs, `NeverFits`
        if no other holds any. After another exception, `recover` is due."""
        self._plan, self._is_committed, self._scheduled = None, False, Scheduled()
        self._schedule(self._scheduled)
        self._scheduled.has_inputs = self._num_with_inputs > 0
        self._plan = plan = self._scheduled.plan()
        logger.debug("step %d computes %s", self.timeline.num_steps, plan)
        self.timeline.stepped(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Advances the rows of the step, whose tokens are in their blocks now. Rows that another
        thread ended meanwhile have none."""
        self._is_committed = True
        self.blocks.index.end_step()
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
            if sequence.blocks is NO_BLOCKS:
                continue
            if sequence.draft:  # whose tokens are not accepted yet
                count = 1
            sequence.num_computed_tokens = start + count
        if not plan.has_chunks:
            return
        for sequence in plan.sequences[plan.num_decodes :]:
            request = sequence.request
            if request.inputs is not None:
                # only now may others reuse its blocks
                self.blocks.register(
                    sequence.blocks,
                    sequence.keys,
                    sequence.num_computed_tokens,
                    request.namespace,
                )
            # frees window blocks that only the chunk's tokens could see
            self.blocks.trim(sequence.blocks)

    def _schedule(self, scheduled: Scheduled) -> None:
        self.blocks.index.begin_step()
        if self._prompts.awaited:
            self._prompts.awaited.clear()
        self._refused = None
        if self.rope is not None and self.rope.restarts:
            for request in list(self._running):
                if self._turn(request):
                    self._preempt(request, keeps=False)
                    # not for lack of blocks: this step may admit it again
                    scheduled.preempted.pop()
        left = self._continue_running()
        if self._waiting and not scheduled.preempted:
            self._admit(left)
        is_released = False
        while self._waiting and not scheduled and self.first_waiting is not None:
            # every running request waits for a token that depends on a request that does not run
            self._admit(self.max_num_batched_tokens, any_rows=True)
            if scheduled:
                break
            victim: Request | None = None
            for running in reversed(self._running):
                if running.is_computed or not self._may_run(running):
                    victim = running
                    break
            if victim is None:
                if scheduled.preempted:  # the next step can use the blocks that preemption freed
                    break
                if not is_released and self.blocks.release_unused():
                    is_released = True
                    continue
                raise self._out_of_blocks(self.first_waiting) from self.blocks.refusal
            self._preempt(victim)

    def _continue_running(self) -> int:
        """Schedules tokens of running requests; returns the token budget left for prefills."""
        decodes = self._scheduled.decodes
        drafted = self._scheduled.drafted
        left = self.max_num_batched_tokens
        # budget of chunks beside decodes
        beside = left if self.max_chunk_tokens is None else self.max_chunk_tokens
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
                    if sequence.draft:
                        num_drafted = self._with_draft(sequence, spare)
                        if num_drafted:
                            spare -= num_drafted
                            left -= 1 + num_drafted
                            continue
                    if num_tokens <= blocks.capacity:  # the tail block has room and is not shared
                        for table in blocks.tables:
                            table.num_tokens = num_tokens
                        decodes.append(sequence)
                        left -= 1
                        continue
                    limit = left
                else:
                    if reserved < 0:
                        unfinished = (
                            row for running in self._running for row in running.open_sequences
                        )
                        reserved = sum(row.num_to_compute == 1 for row in unfinished)
                        reserved -= len(decodes) + len(drafted)
                    limit = left
                    if decodes or drafted or reserved:
                        limit = min(left - reserved, beside)
                    first = self.first_waiting
                    if first is not None and first.key < request.key:
                        # leaves budget to admit a waiting request that sorts before this one
                        limit -= limit // 2
                query_len = self._catch_up(request, sequence, limit)
                left -= query_len
                if query_len > 1:
                    beside -= query_len
                if request.status is not Status.RUNNING:
                    return left
        if decodes or drafted:
            return min(left, beside)
        return left

    def _with_draft(self, sequence: Sequence, limit: int) -> int:
        """Schedules a sequence's last token with up to `limit` tokens of its draft; returns the
        number of draft tokens. If blocks are short, schedules nothing and returns 0: drafts preempt
        no request."""
        blocks = sequence.blocks
        del sequence.draft[max(0, limit) :]
        count = len(sequence.draft)
        if count:
            self.blocks.register(
                blocks,
                sequence.keys,
                sequence.num_computed_tokens,
                sequence.request.namespace,
            )
            before = NO_BLOCKS
            if self.blocks.has_states:
                before = self.blocks.fork(blocks)
            if self.blocks.append(blocks, 1 + count):
                sequence.before_draft = before
                self._scheduled.drafted.append((sequence, 1 + count))
                return count
            self.blocks.free(before)
        sequence.draft = []
        return 0

    def settle_draft(self, sequence: Sequence, num_accepted: int = 0) -> None:
        """Drops the K and V of a draft except for its first `num_accepted` tokens. A state cannot
        be truncated: with states, unless all tokens were accepted, restores the state from before
        the step, whose tokens are then recomputed."""
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

    def _catch_up(
        self,
        request: Request,
        sequence: Sequence,
        limit: int,
        may_preempt: bool = True,
    ) -> int:
        """Schedules up to `limit` tokens of `sequence`; returns how many. If blocks are short,
        preempts later requests, then shrinks the chunk, then preempts `request` itself."""
        query_len = sequence.num_to_compute
        is_whole = sequence.is_whole
        if request.num_shared_tokens:
            num_unshared = self.preemption.num_until_shared(request, sequence)
            query_len = min(query_len, num_unshared)
        if is_whole or self.preemption.replays_prompt(request):
            num_left = request.num_prompt_tokens - sequence.num_computed_tokens
            query_len = min(query_len, max(1, num_left))
        if not is_whole:
            query_len = min(limit, query_len)
        elif limit < query_len and not self._shares_forward(request):
            return 0
        if request.num_tokens_alone >= 0 and self._chunks and self.blocks.has_windows:
            # under a limit in bytes, blocks that leave the window can be reused only by layers of
            # that window
            query_len = min(query_len, self.blocks.block_size)
        if sequence.blocks.stops:
            done = sequence.num_computed_tokens
            for stop in sequence.blocks.stops:
                if stop > done:
                    query_len = min(query_len, stop - done)
        if request.drafts_first and query_len == sequence.num_to_compute > 1:
            query_len -= 1
        if query_len <= 0:
            return 0
        if sequence.blocks is NO_BLOCKS:
            sequence.blocks = self.blocks.new()
        blocks = sequence.blocks
        self.blocks.register(
            blocks,
            sequence.keys,
            sequence.num_computed_tokens,
            request.namespace,
        )
        skips = is_whole or not self._chunks
        while not self.blocks.append(blocks, query_len, skips=skips):
            if self.reclaim is not None and self.reclaim():
                continue
            if may_preempt and self._running[-1] is not request:
                self._preempt(self._running[-1])
            elif query_len > 1 and self.blocks.has_windows and not skips:
                query_len //= 2  # only with windows do fewer tokens need fewer blocks
            else:
                if may_preempt and not self._scheduled.has_rows_of(request):
                    num_tokens = sum(row.num_tokens for row in request.open_sequences)
                    is_alone = not self.blocks.num_withheld()
                    self._preempt(request)
                    if not self._running and is_alone:
                        if request.num_tokens_alone == num_tokens:
                            # no progress since it was last preempted alone
                            raise self._out_of_blocks(request) from self.blocks.refusal
                        request.num_tokens_alone = num_tokens
                        if self.blocks.release_unused() and self.blocks.has_windows:
                            # cached window blocks would keep their bytes
                            request.namespace = UNCACHED
                return 0
        end = sequence.num_computed_tokens + query_len
        if request.num_shared_tokens:  # no fast path past the point where the rows diverge
            blocks.capacity = end
        if query_len > 1 or is_whole:
            if blocks.stops:
                stops = [stop for stop in blocks.stops if stop >= end]
                self._prompts.begin(request, stops)
            if not skips:
                # later requests of this step may share the blocks: each layer stores all K and V
                # before attention
                self.blocks.register(
                    blocks,
                    sequence.keys,
                    end,
                    request.namespace,
                )
            self._scheduled.chunks.append((sequence, query_len))
        else:
            self._scheduled.has_parts |= sequence.num_to_compute > 1
            self._scheduled.decodes.append(sequence)
        return query_len

    def _out_of_blocks(self, request: Request) -> OutOfBlocksError:
        """Makes the error for a step that could schedule nothing for lack of blocks for
        `request`."""
        manager = self.blocks
        if manager.num_total >= sys.maxsize:
            total = "any number of"
        else:
            total = f"{manager.num_free} of {manager.num_total}"
        said = (
            f"nothing can be scheduled: request {request.request_id!r} needs more blocks,"
            f" {self.num_waiting} requests wait, {self.num_running} run, {total} blocks are"
            " available. "
        )
        if self.num_running or manager.is_used():
            return OutOfBlocksError(
                said + "Others hold blocks: free their caches, or raise `num_blocks`"
            )
        if manager.num_withheld():
            return OutOfBlocksError(
                said
                + "Other models hold the rest of `hf_paged.budget`: end their requests, or raise it"
            )
        return NeverFits(
            request,
            said
            + "No other holds blocks: raise `num_blocks`, `memory_fraction` or `hf_paged.budget`,"
            " free memory, or lower `max_new_tokens`, the prompt length or the number of"
            " sequences",
        )

    def _shares_forward(self, request: Request) -> bool:
        """Whether the step's prefills all run in the forward that this prompt needs. Then a prompt
        computed as a whole may exceed the token budget."""
        if request.inputs is None:
            return False
        for sequence, _ in self._scheduled.chunks:
            others = sequence.request.inputs
            if others is None or others[0] is not request.inputs[0]:
                return False
        return True

    def reserve_next(self, sequences: list[Sequence], num_ending: int = 0) -> bool:
        """Allocates blocks for one more token of each sequence (all have their logits), if the next
        step will contain exactly these decodes. Other running sequences, `num_ending`, end before.
        Returns `False` if a waiting request might be admitted, or if blocks are short."""
        if self._num_rows != len(sequences) + num_ending:
            return False
        if self._waiting:
            if num_ending or self._refused is None:
                return False
            if self._refused is not self.first_waiting:
                return False
        for sequence in sequences:
            blocks = sequence.blocks
            num_tokens = len(sequence.token_ids)
            if sequence.num_computed_tokens != num_tokens:
                return False
            if num_tokens < blocks.capacity:
                continue
            self.blocks.register(blocks, sequence.keys, num_tokens, sequence.request.namespace)
            if not self.blocks.reserve_next(blocks):
                return False
        return True

    def _admit(self, left: int, any_rows: bool = False) -> None:
        """Admits waiting requests while there is room, except those that can begin behind tokens
        that this step computes for another."""
        postponed: list[Request] = []
        try:
            self._admit_others(postponed, left, any_rows)
        finally:
            for request in postponed:
                insort(self._waiting, request, key=_by_key)

    def _admit_others(self, postponed: list[Request], left: int, any_rows: bool) -> None:
        num_postponed_rows = 0
        while (request := self.first_waiting) is not None:
            if left <= 0:
                if not self._scheduled.chunks or not self._shares_forward(request):
                    return
            is_alone = not self._running
            num_rows = self._num_rows + num_postponed_rows + request.num_open_rows
            if not (is_alone or any_rows) and num_rows > self.max_num_seqs:
                self._refused = request
                return
            if self._prompts.awaited and self._prompts.is_awaited(request):
                num_postponed_rows += request.num_open_rows
                self._waiting.remove(request)
                postponed.append(request)
                continue
            reserve = 0
            if not is_alone:
                reserve = int(self.watermark * self.blocks.num_total)
            # a request alone may shrink its chunks to one token; a sequence computed as a whole
            # skips blocks outside its windows
            chunk = 1 if is_alone or not self._chunks else self.max_num_batched_tokens
            needs = request, chunk, reserve, is_alone
            is_in = self._bring_in(*needs)
            if not is_in and self.reclaim is not None and self.reclaim():
                is_in = self._bring_in(*needs)
            if not is_in:
                self._refused = request
                return
            self._waiting.remove(request)
            self._prompts.discard(request)
            request.status = Status.RUNNING
            self._num_rows += request.num_open_rows
            self._num_with_inputs += request.inputs is not None
            insort(self._running, request, key=_by_key)
            before = left
            for sequence in request.open_sequences:
                if sequence.num_to_compute:
                    left -= self._catch_up(request, sequence, left, may_preempt=False)
            if left == before:  # a single layer group is short of blocks
                self._send_back(request, keeps=True)
                return
            self._scheduled.admitted.append(request)

    def _bring_in(
        self,
        request: Request,
        chunk: int,
        reserve: int,
        is_alone: bool,
    ) -> bool:
        """`Preemption.bring_in`, which also pins the adapter's weights in the pool while the
        request runs."""
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
        """Returns the adapters of the first `NUM_NEXT` waiting requests that have no place in the
        pool yet."""
        known = self.adapters
        if known is None or not self._waiting:
            return []
        first = self._waiting[:NUM_NEXT]
        wanted = dict.fromkeys(request.adapter for request in first if request.adapter_bytes)
        return [adapter for adapter in wanted if adapter not in known]

    def _turn(self, request: Request) -> bool:
        """Updates the request's rotary factors and namespace; returns whether they changed.
        Prefixes with different factors are not shared."""
        rope = self.rope
        if rope is None:
            return False
        length = request.num_prompt_tokens
        if rope.restarts:
            length = max(sequence.num_tokens for sequence in request.open_sequences)
        factors = rope.factors(length)
        if factors == request.rope_factors:
            return False
        namespace = request.namespace
        if isinstance(namespace, RopeNamespace):
            namespace = namespace.own
        if namespace is not UNCACHED:
            namespace = RopeNamespace(namespace, factors)
        request.rope_factors = factors
        request.namespace = namespace
        return True

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self._waiting, request, key=_by_key)
        if self.preemption.may_stop(request):
            self._prompts.add(request)
        self.timeline.waits(request)

    def _preempt(self, request: Request, keeps: bool = True) -> None:
        request.num_preemptions += 1
        for sequence in request.open_sequences:
            if not sequence.num_to_compute:
                sequence.num_answered_tokens = sequence.num_tokens
        self._scheduled.preempted.append(request)
        self._send_back(request, keeps)

    def recompute(self) -> list[Request]:
        """Between steps: drops the K/V of unfinished requests. Returns those that were running, now
        preempted."""
        self._plan, self._scheduled = None, Scheduled()
        for request in list(self._running):
            self._preempt(request, keeps=False)
        for request in self._waiting:
            self.preemption.forget(request)
        return self._scheduled.preempted

    def _send_back(self, request: Request, keeps: bool = False) -> None:
        """Returns a running request to the queue: with nothing computed, or with what
        `Preemption.send_out` keeps."""
        self._remove(request)
        for sequence in request.open_sequences:
            self.settle_draft(sequence)
        try:
            give_up = self.preemption.send_out if keeps else self.preemption.forget
            give_up(request)
        finally:
            self._wait(request)

    def fail_step(self) -> None:
        """Undoes the last step: its forward raised, or, in a child process, the thread that took it
        is gone, perhaps while it scheduled the step, or before it gave the logits to anyone."""
        self.blocks.index.undo_step()
        plan = self._scheduled.plan() if self._plan is None else self._plan
        again = plan.admitted  # they may hold blocks that others should have written in this step
        if self._is_committed:  # blocks may have left windows
            again = dict.fromkeys(sequence.request for sequence in plan.sequences)
        self._plan, self._is_committed, self._scheduled = None, False, Scheduled()
        for request in again:
            if request.status is Status.RUNNING:
                self._send_back(request)
        for sequence in plan.sequences:
            is_running = sequence.request.status is Status.RUNNING
            if is_running and sequence.blocks is not NO_BLOCKS:
                self.blocks.truncate(sequence.blocks, sequence.num_computed_tokens)
                self.blocks.free(sequence.before_draft)
                sequence.draft, sequence.before_draft = [], NO_BLOCKS

    def recover(self, requests: Collection[Request]) -> None:
        """Makes the unfinished ones of these requests, and no others, wait with nothing computed,
        whatever an exception left half changed. The pools agree with the tables."""
        known = dict.fromkeys([*requests, *self._running, *self._waiting])
        self._running, self._waiting, self._num_rows, self._refused = [], [], 0, None
        self._num_with_inputs = 0
        self._plan, self._scheduled = None, Scheduled()
        self._prompts = WaitingPrompts(self.blocks.block_size)
        self.preemption.waiting = self._prompts
        for request in known:
            self.preemption.forget(request)
            for sequence in request.sequences:
                sequence.draft = []
            if request in requests and not request.is_finished:
                num_finished = sum(row.is_finished for row in request.sequences)
                request.num_open_rows = request.num_rows - num_finished
                self._wait(request)

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
        """Ends a request, running or waiting. Not to be called between `schedule` and the end of
        the forward."""
        if request.status is Status.FINISHED:
            return
        # before its blocks are cached: unpinning its adapter may evict cached blocks
        self._remove(request)
        request.status = Status.FINISHED
        self.timeline.finished(request)
        for sequence in request.open_sequences:
            self.preemption.end_sequence(sequence)

    def _remove(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._num_rows -= request.num_open_rows
            self._num_with_inputs -= request.inputs is not None
            if self.adapters is not None and request.adapter_bytes:
                self.adapters.unpin(request.adapter, request)
        else:
            self._waiting.remove(request)
            self._prompts.discard(request)

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.num_running} running, {self.num_waiting} waiting, {self._num_rows}"
            " sequences)"
        )
