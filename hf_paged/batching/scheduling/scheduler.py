"""Schedules each step: which sequences run, and how many tokens of each. `preemption.py` allocates
and frees the blocks of whole requests. Plain Python: no tensors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ...cache.sequence_blocks import NO_BLOCKS, UNCACHED
from ...plan import StepPlan
from ...rooms import OnDemand
from ...seams import Adapters, Drafter
from ..request import Request, RequestListener, Rope, Sequence, Status
from .preemption import Preemption
from .queue import RequestQueue
from .scheduled import ScheduledRows

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Scheduler:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefills (SARATHI, arXiv
    2308.16369), which do not stall decodes (Sarathi-Serve, arXiv 2403.02310, section 4.2), and
    preemption of whole requests (PagedAttention, arXiv 2309.06180, section 4.5). Requests are
    sorted by `arrival + priority * arrivals_per_priority` (`RequestQueue`). In this order, running
    requests get their tokens and may preempt later running ones; then, if none was preempted,
    waiting requests are admitted until one does not fit."""

    preemption: Preemption
    max_num_batched_tokens: int  # per step (whole prompts may exceed it)
    # maximum number of running sequences; exceeded only by a request that runs alone, and by
    # `_admit_past_row_limit`
    max_num_seqs: int
    # prefill tokens in a step that also decodes (whole prompts may exceed it); `None`: no limit
    max_chunk_tokens: int | None = None
    watermark: float = 0.01  # fraction of all blocks that admission keeps free for running requests
    rope: Rope | None = None  # rotary factors, if they depend on the sequence's length
    # told when requests wait, run and end
    timeline: RequestListener = field(default_factory=RequestListener)
    drafter: OnDemand[Drafter] = field(default_factory=OnDemand)
    adapters: OnDemand[Adapters] = field(default_factory=OnDemand)  # as `RequestQueue.adapters`

    def __post_init__(self) -> None:
        self.blocks = self.preemption.blocks
        # so that every running sequence can decode in every step
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        self.queue = RequestQueue(self.preemption, self.timeline, self.adapters)
        # the waiting request at which admission stopped, because rows or blocks were too few
        self._blocked_request: Request | None = None
        self._scheduled = ScheduledRows()
        self._is_committed = False  # whether the rows of the last step may have advanced

    def add(self, *requests: Request) -> None:
        """Queues requests. If one can never fit, queues none and raises `OutOfBlocksError`."""
        for request in requests:
            self.preemption.check_fits(request)
        for request in requests:
            if self.rope is not None:
                request.update_factors(self.rope)
            self.queue.add(request)

    def schedule(self) -> StepPlan:
        """Returns the plan of the next step. Unless the plan is empty, `commit` or `undo_step` must
        follow. Raises `OutOfBlocksError`, with nothing scheduled, if other requests, caches or
        models hold the blocks that the first request needs, and `NeverFitsError` if none of these
        holds any. After any other exception the caller must call `recover`."""
        self._is_committed = False
        scheduled = self._scheduled = ScheduledRows()
        self.blocks.index.begin_step()
        self.queue.allowed_requests = self.queue.suspects.first() if self.queue.suspects else None
        if self.preemption.awaited_prefixes:
            self.preemption.awaited_prefixes.clear()
        self._blocked_request = None
        if self.rope is not None and self.rope.must_recompute:
            for request in list(self.queue.running):
                if request.update_factors(self.rope):
                    self._preempt(request, may_swap=False)
                    # the preemption was not for blocks, so this step may admit the request again
                    scheduled.preempted.pop()
        self._continue_running()
        if self.queue.waiting and not scheduled.preempted:
            self._admit()
        if self.queue.waiting and not scheduled:
            self._admit_past_row_limit()
        plan = scheduled.plan()
        logger.debug("step %d computes %s", self.timeline.num_steps, plan)
        self.timeline.record_step(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Advances the rows of the plan, since their K and V are now in blocks. Skips rows that
        have ended since `schedule`, which have no blocks."""
        self._is_committed = True
        self.blocks.index.end_step()
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
            if sequence.blocks is NO_BLOCKS:
                continue
            if sequence.draft:  # draft tokens count only once they are accepted
                count = 1
            sequence.num_computed_tokens = start + count
        for sequence in plan.sequences[plan.num_decodes :]:
            if sequence.request.inputs is not None:
                # only now has the model's own forward filled the blocks of the prompt
                sequence.register(sequence.num_computed_tokens)
            # frees blocks that are outside the windows of all tokens after the chunk
            if self.blocks.has_windows:
                sequence.blocks.trim()

    def _admit_past_row_limit(self) -> None:
        """Called if nothing is scheduled although requests wait: running requests are idle in this
        step, and their next tokens may depend on a request that does not run. Admits the first
        waiting request regardless of `max_num_seqs`, and preempts idle ones if too few blocks are
        free. Raises `OutOfBlocksError` if the waiting request still does not fit."""
        has_released = False
        while (first := self.queue.first_waiting) is not None:
            self._admit(ignores_row_limit=True)
            if self._scheduled:
                return
            self.timeline.record_waiting(first)  # `_admit` may have freed its swapped blocks
            latest_first = reversed(self.queue.running)
            may_run = self.queue.may_run
            idle_requests = (
                request for request in latest_first if request.is_computed or not may_run(request)
            )
            victim = next(idle_requests, None)
            if victim is not None:
                self._preempt(victim)
            elif self._scheduled.preempted:  # the next step tries again with the freed blocks
                return
            elif not has_released and self.blocks.memory.release_unused():
                has_released = True
            else:
                raise self.queue.out_of_blocks(first) from self.blocks.take_error

    def _continue_running(self) -> None:
        """Schedules tokens of running requests."""
        scheduled = self._scheduled
        decodes = scheduled.decodes
        max_tokens = self.max_num_batched_tokens
        allowed_requests = self.queue.allowed_requests
        for request in self.queue.running:  # the body removes only later ones, or returns
            if allowed_requests is not None and request not in allowed_requests:
                continue
            for sequence in request.sequences:
                num_tokens = len(sequence.token_ids)
                num_to_compute = num_tokens - sequence.num_computed_tokens
                if not num_to_compute or sequence.is_finished:
                    continue
                blocks = sequence.blocks
                is_decode = num_to_compute == 1 and not sequence.draft
                limit = max_tokens - len(decodes) - scheduled.num_other_tokens
                # fast path: the tail block has a free slot and is not shared
                if is_decode and num_tokens <= blocks.capacity and limit > 0:
                    for table in blocks.tables:
                        table.num_tokens = num_tokens
                    decodes.append(sequence)
                    continue
                if not self._continue_row(request, sequence, num_to_compute, limit):
                    return

    def _continue_row(
        self, request: Request, sequence: Sequence, num_to_compute: int, limit: int
    ) -> bool:
        """Schedules up to `limit` tokens of a running sequence that is not on the fast path of
        `_continue_running`. Returns whether later sequences may get tokens."""
        scheduled = self._scheduled
        if num_to_compute > 1:
            limit = self._chunk_limit(scheduled.num_pending_decodes(self.queue.running))
            first = self.queue.first_waiting
            if first is not None and first.sort_key < request.sort_key:
                # leaves half of the tokens to a waiting request that sorts before this one
                limit -= limit // 2
        elif limit <= 0:
            return False
        elif sequence.draft:
            # leaves one token to each row; `limit` also counts the tokens of this step's chunks
            max_drafted = self.max_num_batched_tokens - self.queue.num_rows
            max_drafted -= scheduled.num_draft_tokens
            num_pending_decodes = scheduled.num_pending_decodes(self.queue.running)
            max_drafted = min(max_drafted, limit - num_pending_decodes)
            num_drafted = sequence.append_draft(max_drafted)
            if num_drafted:
                scheduled.add_drafted(sequence, 1 + num_drafted)
                return True
        self._schedule_tokens(request, sequence, limit)
        return request.status is Status.RUNNING

    def _chunk_limit(self, num_reserved: int = 0) -> int:
        """Returns the maximum number of tokens of the next chunk, which leaves `num_reserved` to
        decodes that are not scheduled yet."""
        scheduled = self._scheduled
        limit = self.max_num_batched_tokens - scheduled.num_tokens - num_reserved
        decodes = scheduled.decodes or scheduled.drafted or num_reserved
        if decodes and self.max_chunk_tokens is not None:
            num_scheduled = scheduled.num_chunk_tokens + scheduled.num_partial_decodes
            limit = min(limit, self.max_chunk_tokens - num_scheduled)
        return limit

    def _schedule_tokens(
        self, request: Request, sequence: Sequence, limit: int, may_preempt: bool = True
    ) -> None:
        """Schedules up to `limit` tokens of `sequence`. A whole prompt may exceed `limit`, unless a
        chunk of another forward is scheduled. If too few blocks are free, in turn frees the
        drafter's blocks, preempts later requests, shrinks the chunk (if layers have windows) and
        preempts `request` (if none of its rows is scheduled). Without `may_preempt`, preempts
        nothing."""
        count = num_to_compute = sequence.num_to_compute
        is_whole = sequence.computes_whole_prompt
        if request.num_shared_tokens:
            count = min(count, request.advance_shared_prefix(sequence))
        if count > 1:
            count = self.preemption.limit_tokens(request, sequence, count)
        if not is_whole:
            count = min(limit, count)
        elif limit < count and not self._scheduled.shares_forward(request):
            return
        if count <= 0:
            return
        if sequence.blocks is NO_BLOCKS:
            sequence.begin(self.blocks)
        num_computed = sequence.num_computed_tokens
        sequence.register(num_computed)
        is_unchunked = is_whole or not self.preemption.can_chunk
        count = self._append(request, sequence, count, is_unchunked, may_preempt)
        if not count:
            return
        if request.num_shared_tokens:  # keeps the row off the fast path, which does not fork
            sequence.blocks.capacity = num_computed + count
        if count > 1 or is_whole:
            self._add_chunk(request, sequence, count, is_unchunked)
        else:
            self._scheduled.add_decode(sequence, is_partial=num_to_compute > 1)

    def _append(
        self,
        request: Request,
        sequence: Sequence,
        count: int,
        is_unchunked: bool,
        may_preempt: bool,
    ) -> int:
        """Allocates slots for up to `count` tokens, and returns their number: 0 if too few blocks
        are free. `is_unchunked`: the tokens must be computed in one step, and an empty sequence
        skips blocks that no later token attends to. `may_preempt` as in `_schedule_tokens`."""
        can_shrink = self.blocks.has_windows and not is_unchunked
        while not sequence.blocks.append(count, can_skip=is_unchunked):
            if self.reclaim():
                continue
            if may_preempt and self.queue.running[-1] is not request:
                self._preempt(self.queue.running[-1])
            elif count > 1 and can_shrink:
                count //= 2  # later chunks can reuse blocks that leave the windows
            else:
                scheduled_sequences = self._scheduled.plan().sequences
                if may_preempt and not any(row.request is request for row in scheduled_sequences):
                    self._preempt_last(request)
                return 0
        return count

    def _preempt_last(self, request: Request) -> None:
        """Preempts `request`, which lacks blocks although no later request runs. That is all if
        other requests still run, or if another model holds memory. Otherwise, raises
        `OutOfBlocksError` if `request` had the same total length at its last preemption of this
        kind; if not, releases unused memory."""
        is_only_model = not self.blocks.memory.num_held_by_others
        self._preempt(request)
        if self.queue.running or not is_only_model:
            return
        if not request.note_lone_preemption():
            raise self.queue.out_of_blocks(request) from self.blocks.take_error
        if self.blocks.memory.release_unused() and self.blocks.has_windows:
            # cached blocks of layers with windows would occupy freed memory that other layers need
            request.namespace = UNCACHED

    def _add_chunk(
        self, request: Request, sequence: Sequence, count: int, is_unchunked: bool
    ) -> None:
        blocks = sequence.blocks
        end = sequence.num_computed_tokens + count
        if blocks.stops:
            stops = [stop for stop in blocks.stops if stop >= end]
            self.preemption.announce_stops(request, stops)
        if not is_unchunked:
            # later requests may share the blocks already in this step, since each layer stores all
            # K and V before attention
            sequence.register(end)
        self._scheduled.add_chunk(sequence, count)

    def reserve_next(self, sequences: list[Sequence], num_ending: int = 0) -> bool:
        """Allocates a slot for the next token of each sequence, if the next step will consist of
        exactly these decodes; `num_ending` other running rows end before that step. Returns `False`
        if the step may differ, if too few blocks are free, or if a block must be copied first."""
        if self.queue.num_rows != len(sequences) + num_ending:
            return False
        if self.queue.waiting:
            if num_ending or self._blocked_request is None:
                return False
            if self._blocked_request is not self.queue.first_waiting:
                return False
        for sequence in sequences:
            blocks = sequence.blocks
            num_tokens = len(sequence.token_ids)
            if sequence.num_computed_tokens != num_tokens:
                return False
            if num_tokens < blocks.capacity:
                continue
            sequence.register(num_tokens)
            if not blocks.reserve_next():
                return False
        return True

    def _admit(self, ignores_row_limit: bool = False) -> None:
        """Admits waiting requests while tokens, rows and blocks last; with `ignores_row_limit`, the
        first one may exceed the limit on rows. Postpones requests that can soon reuse a prefix
        which a scheduled request computes (`Preemption.awaited_prefixes`)."""
        num_postponed_rows = 0
        for request in self.queue.waiting.copy():
            if not self.queue.may_begin(request):
                continue
            can_exceed_budget = self._scheduled.chunks and self._scheduled.shares_forward(request)
            if self._chunk_limit() <= 0 and not can_exceed_budget:
                return
            is_alone = not self.queue.running
            num_rows = self.queue.num_rows + num_postponed_rows + request.num_open_rows
            if not (is_alone or ignores_row_limit) and num_rows > self.max_num_seqs:
                self._blocked_request = request
                return
            if self.preemption.awaited_prefixes and self.preemption.awaits_prefix(request):
                num_postponed_rows += request.num_open_rows
                continue
            num_reserved_blocks = 0 if is_alone else int(self.watermark * self.blocks.num_total)
            # a request that runs alone may shrink its chunks, and an unchunked prompt skips blocks
            # outside its windows: neither needs more blocks than it would in chunks of one token
            chunk = 1 if is_alone or not self.preemption.can_chunk else self.max_num_batched_tokens
            was_swapped = request.is_swapped
            admit: Callable[[], bool] = functools.partial(
                self.preemption.admit, request, chunk, num_reserved_blocks, is_alone
            )
            if request.adapter_bytes:
                admit = functools.partial(self.adapters().admit, request, admit)
            while not admit():
                if not self.reclaim():
                    self._blocked_request = request
                    return
            self.queue.start(request)
            num_tokens_before = self._scheduled.num_tokens
            for sequence in request.open_sequences:
                if sequence.num_to_compute:
                    limit = self._chunk_limit()
                    self._schedule_tokens(request, sequence, limit, may_preempt=False)
            if self._scheduled.num_tokens == num_tokens_before:
                # tokens or blocks ran out; a request that was not swapped in may share blocks that
                # this step has yet to compute, so it must not be swapped out
                self._requeue(request, may_swap=was_swapped)
                return
            self._scheduled.admitted.append(request)
            ignores_row_limit = False

    def _preempt(self, request: Request, may_swap: bool = True) -> None:
        request.preempt()
        self.preemption.num_preemptions += 1
        self._scheduled.preempted.append(request)
        self._requeue(request, may_swap)

    def reclaim(self) -> bool:
        """Frees the drafter's blocks, if there is a drafter; returns whether it held any."""
        return self.drafter.instance is not None and self.drafter.instance.reclaim()

    def recompute(self) -> list[Request]:
        """Called between steps: drops the K/V of all unfinished requests. Preempts the running
        requests and returns them."""
        self._scheduled = ScheduledRows()
        for request in list(self.queue.running):
            self._preempt(request, may_swap=False)
        for request in self.queue.waiting:
            self.preemption.reset(request)
            self.timeline.record_waiting(request)
        return self._scheduled.preempted

    def _requeue(self, request: Request, may_swap: bool = False) -> None:
        """Moves a running request back to the waiting ones. Drops its K/V or, with `may_swap`,
        calls `Preemption.swap_out_or_reset`."""
        self.queue.remove(request)
        try:
            release = self.preemption.swap_out_or_reset if may_swap else self.preemption.reset
            release(request)
        finally:
            self.queue.enqueue(request)

    def undo_step(self) -> None:
        """Undoes the last step, because its forward raised an exception or because, in a forked
        child, another thread of the parent was taking it. In the second case the step may be only
        partly scheduled, or already computed, with logits that are not delivered yet."""
        self.blocks.index.undo_step()
        plan = self._scheduled.plan()
        # admitted requests may share blocks that other rows of the step should have written
        requests_to_requeue = plan.admitted
        if self._is_committed:  # blocks that left windows may already have been freed
            requests_to_requeue = dict.fromkeys(sequence.request for sequence in plan.sequences)
        self._is_committed = False
        self._scheduled = ScheduledRows()
        for request in requests_to_requeue:
            if request.status is Status.RUNNING:
                self._requeue(request)
        for sequence in plan.sequences:
            is_running = sequence.request.status is Status.RUNNING
            if is_running and sequence.blocks is not NO_BLOCKS:
                # drops the slots of the step's tokens, and the draft; restores no state
                sequence.blocks.truncate(sequence.num_computed_tokens)
                sequence.before_draft.free()
                sequence.draft, sequence.before_draft = [], NO_BLOCKS

    def recover(self, requests: Collection[Request]) -> None:
        """Called after an exception that may have left bookkeeping partly changed: resets the queue
        to the unfinished requests among `requests`, all waiting with nothing computed. The caller
        must already have made the pools match the tables."""
        requests_to_reset = dict.fromkeys([*requests, *self.queue.running, *self.queue.waiting])
        self.queue.clear()
        self._blocked_request = None
        self._scheduled = ScheduledRows()
        for request in requests_to_reset:
            self.preemption.reset(request)
            if request in requests and not request.is_finished:
                self.queue.enqueue(request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence, and with the last open one also the request."""
        if sequence.is_finished:
            return
        request = sequence.request
        if request.num_open_rows == 1:
            self.finish(request)
            return
        sequence.finish()
        if request.status is Status.RUNNING:
            self.queue.num_rows -= 1

    def finish(self, request: Request) -> None:
        """Ends a running or waiting request. No forward in progress may compute its rows."""
        if request.status is Status.FINISHED:
            return
        # first, so that the release of an adapter cannot evict this request's blocks, cached below
        self.queue.remove(request)
        self.timeline.record_end(request)
        request.finish()
        self.preemption.free_other_blocks(request)

    def __repr__(self) -> str:
        counts = f"{len(self.queue.running)} running, {len(self.queue.waiting)} waiting"
        return f"Scheduler({counts}, {self.queue.num_rows} sequences)"
