"""Schedules each step: which sequences run, with how many tokens. Plain Python: no tensors; blocks
are allocated by `preemption.py`."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from ...cache.sequence_blocks import NO_BLOCKS, UNCACHED
from ...plan import StepPlan
from ...rooms import OnDemand
from ...seams import Adapters, Drafter
from ..request import Request, Rope, Sequence, Status
from .preemption import Preemption
from .queue import RequestQueue
from .scheduled import Budget, Scheduled
from .timeline import Timeline

logger = logging.getLogger(__name__)

ARRIVALS_PER_PRIORITY = 256.0  # a priority lower by 1 counts as this many arrivals earlier


@dataclass(eq=False, repr=False)
class Scheduler:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefills (SARATHI, arXiv
    2308.16369), which do not stall decodes (Sarathi-Serve, arXiv 2403.02310, section 4.2), and
    preemption of whole requests (PagedAttention, arXiv 2309.06180, section 4.5). In the order of
    `arrival + priority * arrivals_per_priority`, running requests get their tokens and may preempt
    later requests; then waiting requests are admitted as long as the first of them fits."""

    preemption: Preemption
    max_num_batched_tokens: int  # per step
    # limit of running sequences; exceeded only by a single large request, or to admit requests that
    # running ones wait for
    max_num_seqs: int
    # limit of prefill tokens in a step with decodes; `None`: as many as fit into the step
    max_chunk_tokens: int | None = None
    watermark: float = 0.01  # share of all blocks that admission leaves to running requests
    arrivals_per_priority: float = ARRIVALS_PER_PRIORITY
    rope: Rope | None = None  # set if keys depend on the sequence's length
    timeline: Timeline = field(default_factory=Timeline)  # records when requests run and wait
    drafter: OnDemand[Drafter] = field(default_factory=OnDemand)
    adapters: OnDemand[Adapters] = field(default_factory=OnDemand)  # as `RequestQueue.adapters`

    def __post_init__(self) -> None:
        self.blocks = self.preemption.blocks
        self._chunks = self.preemption.chunks
        # every running sequence must be able to decode in every step, with one prefill beside them
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        self.queue = RequestQueue(self.preemption, self.arrivals_per_priority, self.adapters)
        # the first waiting request, if this step had no room for it (`max_num_seqs` or blocks)
        self._refused: Request | None = None
        self._scheduled = Scheduled()
        self._is_committed = False  # whether the rows of the last step may have advanced

    @property
    def num_running(self) -> int:
        return len(self.queue.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that do not run: new and preempted ones."""
        return len(self.queue.waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue.running or self.queue.waiting)

    def add(self, *requests: Request) -> None:
        """Queues requests. Raises `OutOfBlocksError`, with none queued, if one can never fit."""
        for request in requests:
            self.preemption.check_fits(request)
        for request in requests:
            if self.rope is not None:
                request.update_factors(self.rope)
            self.queue.add(request)
            self.timeline.waits(request)

    def schedule(self) -> StepPlan:
        """Returns the next step, which `commit` or `fail_step` must end. Raises `OutOfBlocksError`,
        with nothing scheduled, if others hold the blocks that the first request needs,
        `NeverFitsError` if no other request holds any. After any other exception the caller must
        `recover`."""
        self._is_committed = False
        self._scheduled = Scheduled()
        self._schedule(self._scheduled)
        plan = self._scheduled.plan()
        logger.debug("step %d computes %s", self.timeline.num_steps, plan)
        self.timeline.stepped(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Advances the rows of the step, whose K and V are in their blocks now. Rows that another
        thread ended meanwhile have no blocks."""
        self._is_committed = True
        self.blocks.index.end_step()
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
            if sequence.blocks is NO_BLOCKS:
                continue
            if sequence.draft:  # draft tokens are not accepted yet
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
            # frees window blocks that no token after the chunk attends to
            self.blocks.trim(sequence.blocks)

    def _schedule(self, scheduled: Scheduled) -> None:
        self.blocks.index.begin_step()
        self.queue.allowed = self.queue.suspects.first() if self.queue.suspects else None
        if self.preemption.waiting.awaited:
            self.preemption.waiting.awaited.clear()
        self._refused = None
        if self.rope is not None and self.rope.must_recompute:
            for request in list(self.queue.running):
                if request.update_factors(self.rope):
                    self._preempt(request, keeps_kv=False)
                    # not for lack of blocks: this step may admit it again
                    scheduled.preempted.pop()
        left = self._continue_running()
        if self.queue.waiting and not scheduled.preempted:
            self._admit(left)
        if self.queue.waiting and not scheduled:
            self._admit_first()

    def _admit_first(self) -> None:
        """Admits the first waiting request when every running request waits for tokens that depend
        on a request that does not run. Raises `OutOfBlocksError`."""
        is_released = False
        while (first := self.queue.first_waiting) is not None:
            self._admit(self.max_num_batched_tokens, ignores_row_limit=True)
            if self._scheduled:
                return
            latest_first = reversed(self.queue.running)
            may_run = self.queue.may_run
            victims = (one for one in latest_first if one.is_computed or not may_run(one))
            victim = next(victims, None)
            if victim is not None:
                self._preempt(victim)
            elif self._scheduled.preempted:  # the next step can use the blocks that it freed
                return
            elif not is_released and self.blocks.memory.release_unused():
                is_released = True
            else:
                raise self.queue.out_of_blocks(first) from self.blocks.take_error

    def _continue_running(self) -> int:
        """Schedules tokens of running requests; returns the token budget left for prefills."""
        scheduled = self._scheduled
        decodes = scheduled.decodes
        left = self.max_num_batched_tokens
        chunks = left if self.max_chunk_tokens is None else self.max_chunk_tokens
        budget = Budget(left, chunks, drafts=left - self.queue.num_rows)
        allowed = self.queue.allowed
        for request in self.queue.running:  # the body removes only this request or later ones
            if allowed is not None and request not in allowed:
                continue
            for sequence in request.sequences:
                num_tokens = len(sequence.token_ids)
                num_to_compute = num_tokens - sequence.num_computed_tokens
                if not num_to_compute or sequence.is_finished:
                    continue
                blocks = sequence.blocks
                is_decode = num_to_compute == 1 and not sequence.draft
                # a fast path: the tail block has room and is not shared
                if is_decode and num_tokens <= blocks.capacity and budget.left > 0:
                    for table in blocks.tables:
                        table.num_tokens = num_tokens
                    decodes.append(sequence)
                    budget.left -= 1
                    budget.reserved -= 1
                    continue
                if not self._continue(request, sequence, budget):
                    return budget.left
        if decodes or scheduled.drafted:
            return min(budget.left, budget.chunks)
        return budget.left

    def _continue(self, request: Request, sequence: Sequence, budget: Budget) -> bool:
        """Schedules tokens of a running sequence that has a draft, needs a block or has several
        tokens to compute; returns whether later requests may get tokens."""
        scheduled = self._scheduled
        if sequence.num_to_compute == 1:
            if budget.left <= 0:
                return False
            budget.reserved -= 1
            if sequence.draft:
                num_drafted = sequence.append_draft(self.blocks, budget.drafts)
                if num_drafted:
                    scheduled.drafted.append((sequence, 1 + num_drafted))
                    budget.drafts -= num_drafted
                    budget.left -= 1 + num_drafted
                    return True
            limit = budget.left
        else:
            limit = self._chunk_limit(request, budget)
        count = self._catch_up(request, sequence, limit)
        budget.left -= count
        if count > 1:
            budget.chunks -= count
        return request.status is Status.RUNNING

    def _chunk_limit(self, request: Request, budget: Budget) -> int:
        """Returns how many tokens a running request's next chunk may have."""
        scheduled = self._scheduled
        num_scheduled = len(scheduled.decodes) + len(scheduled.drafted)
        if budget.reserved < 0:
            unfinished = (row for running in self.queue.running for row in running.open_sequences)
            budget.reserved = sum(row.num_to_compute == 1 for row in unfinished)
            budget.reserved -= num_scheduled
        limit = budget.left
        if num_scheduled or budget.reserved:
            limit = min(budget.left - budget.reserved, budget.chunks)
        first = self.queue.first_waiting
        if first is not None and first.key < request.key:
            # leaves half of the budget to admit a waiting request that sorts before this one
            limit -= limit // 2
        return limit

    def _catch_up(
        self,
        request: Request,
        sequence: Sequence,
        limit: int,
        may_preempt: bool = True,
    ) -> int:
        """Schedules up to `limit` tokens of `sequence`; returns how many. If blocks are short,
        preempts later requests, then shrinks the chunk, then preempts `request` itself."""
        count = sequence.num_to_compute
        is_whole = sequence.computes_whole_prompt
        if request.num_shared_tokens:
            count = min(count, self.preemption.num_until_shared(request, sequence))
        if count > 1:
            count = self.preemption.limit(request, sequence, count)
        if not is_whole:
            count = min(limit, count)
        elif limit < count and not self._scheduled.shares_forward(request):
            return 0
        if count <= 0:
            return 0
        if sequence.blocks is NO_BLOCKS:
            sequence.blocks = self.blocks.new()
        num_computed = sequence.num_computed_tokens
        self.blocks.register(sequence.blocks, sequence.keys, num_computed, request.namespace)
        skips = is_whole or not self._chunks
        count = self._append(request, sequence, count, skips, may_preempt)
        if not count:
            return 0
        if request.num_shared_tokens:  # no fast path past the end of the shared tokens
            sequence.blocks.capacity = num_computed + count
        if count > 1 or is_whole:
            self._add_chunk(request, sequence, count, skips)
        else:
            self._scheduled.has_parts |= sequence.num_to_compute > 1
            self._scheduled.decodes.append(sequence)
        return count

    def _append(
        self,
        request: Request,
        sequence: Sequence,
        count: int,
        skips: bool,
        may_preempt: bool,
    ) -> int:
        """Appends up to `count` tokens to the sequence's blocks, preempting later requests if it
        `may_preempt`; returns how many, 0 if blocks are short."""
        can_shrink = self.blocks.has_windows and not skips
        while not self.blocks.append(sequence.blocks, count, skips=skips):
            if self.reclaim():
                continue
            if may_preempt and self.queue.running[-1] is not request:
                self._preempt(self.queue.running[-1])
            elif count > 1 and can_shrink:
                count //= 2  # only with windows do fewer tokens need fewer blocks
            else:
                if may_preempt and not self._scheduled.has_rows_of(request):
                    self._preempt_last(request)
                return 0
        return count

    def _preempt_last(self, request: Request) -> None:
        """Preempts the request that needs blocks, since no later one can give any. Raises
        `OutOfBlocksError` if it has made no progress since it was last preempted alone."""
        num_tokens = sum(row.num_tokens for row in request.open_sequences)
        is_alone = not self.blocks.memory.num_held_by_others
        self._preempt(request)
        if self.queue.running or not is_alone:
            return
        if request.num_tokens_alone == num_tokens:
            raise self.queue.out_of_blocks(request) from self.blocks.take_error
        request.num_tokens_alone = num_tokens
        if self.blocks.memory.release_unused() and self.blocks.has_windows:
            # cached window blocks would keep their bytes
            request.namespace = UNCACHED

    def _add_chunk(self, request: Request, sequence: Sequence, count: int, skips: bool) -> None:
        blocks = sequence.blocks
        end = sequence.num_computed_tokens + count
        if blocks.stops:
            stops = [stop for stop in blocks.stops if stop >= end]
            self.preemption.waiting.note_running(request, stops)
        if not skips:
            # later requests of this step may share the blocks, since each layer stores all K and V
            # before attention
            self.blocks.register(blocks, sequence.keys, end, request.namespace)
        self._scheduled.chunks.append((sequence, count))

    def reserve_next(self, sequences: list[Sequence], num_ending: int = 0) -> bool:
        """Allocates blocks for one more token of each sequence (all have their logits), if the next
        step will contain exactly these decodes; `num_ending` other running sequences end before.
        Returns `False` if a waiting request might be admitted, or if blocks are short."""
        if self.queue.num_rows != len(sequences) + num_ending:
            return False
        if self.queue.waiting:
            if num_ending or self._refused is None:
                return False
            if self._refused is not self.queue.first_waiting:
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

    def _admit(self, left: int, ignores_row_limit: bool = False) -> None:
        """Admits waiting requests while there is room, except those that can soon begin after
        tokens that this step computes for another request."""
        num_postponed_rows = 0
        for request in self.queue.waiting.copy():
            if not self.queue.may_begin(request):
                continue
            shares = self._scheduled.chunks and self._scheduled.shares_forward(request)
            if left <= 0 and not shares:
                return
            is_alone = not self.queue.running
            num_rows = self.queue.num_rows + num_postponed_rows + request.num_open_rows
            if not (is_alone or ignores_row_limit) and num_rows > self.max_num_seqs:
                self._refused = request
                return
            if self.preemption.waiting.awaited and self.preemption.waiting.is_awaited(request):
                num_postponed_rows += request.num_open_rows
                continue
            reserve = 0
            if not is_alone:
                reserve = int(self.watermark * self.blocks.num_total)
            # a request alone may shrink its chunks to one token; a sequence computed as a whole
            # skips blocks outside its windows
            chunk = 1 if is_alone or not self._chunks else self.max_num_batched_tokens
            while not self.queue.admit(request, chunk, reserve, is_alone):
                if not self.reclaim():
                    self._refused = request
                    return
            self.queue.start(request)
            num_left = left
            for sequence in request.open_sequences:
                if sequence.num_to_compute:
                    left -= self._catch_up(request, sequence, left, may_preempt=False)
            if left == num_left:  # a single layer group is short of blocks
                self._requeue(request, keeps_kv=True)
                return
            self._scheduled.admitted.append(request)

    def _wait(self, request: Request) -> None:
        self.queue.enqueue(request)
        self.timeline.waits(request)

    def _preempt(self, request: Request, keeps_kv: bool = True) -> None:
        request.num_preemptions += 1
        for sequence in request.open_sequences:
            if not sequence.num_to_compute:
                sequence.logits_length = sequence.num_tokens
        self._scheduled.preempted.append(request)
        self._requeue(request, keeps_kv)

    def reclaim(self) -> bool:
        """Frees the drafter's blocks; returns whether there were any (`Drafter.reclaim`)."""
        return self.drafter.instance is not None and self.drafter.instance.reclaim()

    def recompute(self) -> list[Request]:
        """Between steps: drops the K/V of unfinished requests. Returns the requests that were
        running, which are preempted now."""
        self._scheduled = Scheduled()
        for request in list(self.queue.running):
            self._preempt(request, keeps_kv=False)
        for request in self.queue.waiting:
            self.preemption.reset(request)
        return self._scheduled.preempted

    def _requeue(self, request: Request, keeps_kv: bool = False) -> None:
        """Moves a running request back to the waiting ones: with nothing computed or, with
        `keeps_kv`, with the K/V that `Preemption.swap_out_or_free` keeps."""
        self.queue.remove(request)
        for sequence in request.open_sequences:
            sequence.commit_draft(self.blocks)
        try:
            release = self.preemption.swap_out_or_free if keeps_kv else self.preemption.reset
            release(request)
        finally:
            self._wait(request)

    def fail_step(self) -> None:
        """Undoes the last step: its forward raised, or, in a child process, the thread that took it
        is gone, perhaps while it scheduled the step, or before it delivered the logits."""
        self.blocks.index.undo_step()
        plan = self._scheduled.plan()
        requeued = plan.admitted  # they may share blocks that other rows should have written
        if self._is_committed:  # blocks may have left windows
            requeued = dict.fromkeys(sequence.request for sequence in plan.sequences)
        self._is_committed = False
        self._scheduled = Scheduled()
        for request in requeued:
            if request.status is Status.RUNNING:
                self._requeue(request)
        for sequence in plan.sequences:
            is_running = sequence.request.status is Status.RUNNING
            if is_running and sequence.blocks is not NO_BLOCKS:
                self.blocks.truncate(sequence.blocks, sequence.num_computed_tokens)
                self.blocks.free(sequence.before_draft)
                sequence.draft, sequence.before_draft = [], NO_BLOCKS

    def recover(self, requests: Collection[Request]) -> None:
        """After an exception that may have left anything half changed: the unfinished ones of these
        requests, and no others, wait with nothing computed. The pools agree with the tables
        already."""
        requests_to_reset = dict.fromkeys([*requests, *self.queue.running, *self.queue.waiting])
        self.queue.clear()
        self._refused = None
        self._scheduled = Scheduled()
        for request in requests_to_reset:
            self.preemption.reset(request)
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
        self.queue.end_row(request)

    def finish(self, request: Request) -> None:
        """Ends a request, running or waiting. Must not be called between `schedule` and the end of
        the forward."""
        if request.status is Status.FINISHED:
            return
        # before its blocks are cached: releasing its adapter may evict cached blocks
        self.queue.remove(request)
        request.status = Status.FINISHED
        self.timeline.finished(request)
        for sequence in request.open_sequences:
            self.preemption.end_sequence(sequence)

    def __repr__(self) -> str:
        counts = f"{self.num_running} running, {self.num_waiting} waiting"
        return f"Scheduler({counts}, {self.queue.num_rows} sequences)"
