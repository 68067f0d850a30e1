"""`Ledger` records which generation each row of an unfinished request belongs to, and updates
requests and generations with the results of a step. It chooses no tokens and schedules nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ..cache.memory import PagedMemory
from ..cache.sequence_blocks import NO_BLOCKS
from ..plan import StepPlan
from .decoding.base import Draft, LogitRows, SampledTokens
from .generation import Generation
from .request import Request
from .scheduling.scheduler import Scheduler

Ready = list[tuple[Generation, LogitRows]]
"""Generations that can be sampled, each with the logits of all its open rows, in order. A row with
a draft also has the logits after each draft token."""


@dataclass(eq=False, repr=False)
class Ledger:
    """The unfinished generations of a loop, and their rows. Appends sampled tokens, and ends rows,
    requests and generations. Changes of sequences need the memory's lock: `deliver` and
    `split_preempted` take it, and callers of `recover`, `append`, `apply` and `close` hold it."""

    memory: PagedMemory
    scheduler: Scheduler
    num_generated_tokens: int = 0
    # by unfinished request: the generation and the row of each of its sequences
    rows: dict[Request, list[tuple[Generation, int]]] = field(default_factory=dict)
    # parts of generations that were split since the last step; some may already have logits
    pending_parts: list[Generation] = field(default_factory=list)
    # requests whose next forward would read past the model's table of positions, each after its
    # generation
    overlong_requests: deque[tuple[Generation, Request]] = field(default_factory=deque)

    def add(self, generation: Generation) -> None:
        """Adds a generation whose requests the scheduler has queued."""
        for part in generation.parts or [generation]:
            for row, (request, _) in enumerate(part.rows):
                self.rows.setdefault(request, []).append((part, row))

    def generations(self) -> list[Generation]:
        """Returns all unfinished generations, without duplicates."""
        return self.generations_of(self.rows)

    def recover(self) -> None:
        """Called after an exception that may have interrupted an update of rows: completes the
        assignment of rows to parts, drops all logits that are not being sampled, calls
        `Scheduler.recover` with all requests, and removes finished ones."""
        self._assign_rows_to_parts()
        for request, rows in self.rows.items():
            for (generation, _), sequence in zip(rows, request.sequences):
                generation.drop_logits()
                sequence.note_logits(generation.is_sampling)
        self.scheduler.recover(self.rows)
        self.rows = {
            request: rows for request, rows in self.rows.items() if not request.is_finished
        }

    def deliver(self, plan: StepPlan, logits: Tensor | None, ready: Ready) -> None:
        """Gives a step's logits `(n, vocab)` to the step's generations, and adds to `ready` the
        generations whose open rows all have logits now. Forks the sequence of a prompt that was
        computed once for several rows. `logits`: `None` if the step had no forward, or if the
        forward failed."""
        indices: dict[Generation, dict[int, int]] = {}
        end = 0
        for sequence, num_logits in zip(plan.sequences, plan.num_logits):
            if not num_logits or logits is None:
                continue
            first = end
            end += num_logits
            request = sequence.request
            rows = self.rows[request]
            if request.num_rows > len(request.sequences):  # the prompt was computed for all rows
                with self.memory.lock:
                    request.fork(len(rows))
            elif len(rows) > 1:
                rows = [rows[sequence.index]]
            for generation, row in rows:
                if not generation.is_single:
                    indices.setdefault(generation, {})[row] = first
                elif not generation.is_closed:
                    if not sequence.draft:
                        # the draft was dropped, or its step was undone
                        generation.decoding.draft = None
                    ready.append((generation, LogitRows(logits, first, end)))
        if self.pending_parts or indices:
            self._add_ready(logits, indices, ready)
        for generation, _ in ready:
            generation.is_sampling = True

    def _add_ready(
        self,
        logits: Tensor | None,
        indices: dict[Generation, dict[int, int]],
        ready: Ready,
    ) -> None:
        """Adds to `ready` the generations of several rows whose open rows all have logits now, and
        parts whose logits were computed before the split. `indices` holds, by generation and row,
        the row's index in the step's `logits`, `(n, vocab)`."""
        parts: dict[Generation, dict[int, int]] = {part: {} for part in self.pending_parts}
        self.pending_parts = []
        for generation, index_by_row in {**parts, **indices}.items():
            gathered_logits = generation.take_logits(logits, index_by_row)
            if gathered_logits is not None:
                ready.append((generation, LogitRows.of(gathered_logits)))

    def append(self, generation: Generation, token: int) -> None:
        """Appends the next token of a generation whose only row continues."""
        ((request, index),) = generation.rows
        token_ids = request.sequences[index].token_ids
        token_ids.append(token)
        self.num_generated_tokens += 1
        if len(token_ids) > request.max_computable_length:
            self.overlong_requests.append((generation, request))

    def apply(self, generation: Generation, result: SampledTokens) -> None:
        """Appends a step's tokens to the generation's sequences, and ends its finished rows."""
        finished_rows = set(result.finished)
        if result.parents is not None:
            self._apply_beams(generation, result, finished_rows)
            return
        draft = generation.decoding.draft
        if draft is not None:
            self._commit_draft(generation, draft, result.earlier_tokens)
        self.num_generated_tokens += len(result.rows) - result.num_ended
        for row in result.rows:
            sequence = generation.sequence(row)
            sequence.token_ids.append(result.tokens[row])
            if row in finished_rows:
                self._end_row(generation, row)
            elif sequence.num_tokens > sequence.request.max_computable_length:
                self.overlong_requests.append((generation, sequence.request))
        if draft is not None and generation.drafter is not None:
            num_accepted = len(result.earlier_tokens)
            generation.drafter.note_verified(generation, len(draft.tokens), num_accepted)
        if finished_rows and generation.decoding.is_done:
            self._close_rows(generation)

    def _apply_beams(
        self, generation: Generation, result: SampledTokens, finished_rows: set[int]
    ) -> None:
        """Makes each beam a fork of its parent beam, and appends the beam's new token."""
        assert result.parents is not None
        for request in generation.requests:
            if request.is_finished:
                continue
            first_row = self.rows[request][0][1]
            rows = range(first_row, first_row + len(self.rows[request]))
            parents = [result.parents[row] - first_row for row in rows]
            tokens = [result.tokens[row] for row in rows]
            request.continue_beams(parents, tokens)
            self.num_generated_tokens += len(rows)
            is_finished = all(row in finished_rows for row in rows)
            if is_finished and not generation.decoding.is_done:
                self._finish(request)
            if request.exceeds_positions:
                self.overlong_requests.append((generation, request))
        if generation.decoding.is_done:  # even if no row is in `finished_rows`
            self._close_rows(generation)

    def _close_rows(self, generation: Generation) -> None:
        """Closes a generation whose decoding is done, and ends any rows that are still open."""
        if generation.keep_blocks:
            for row in range(len(generation.rows)):
                if row not in generation.kept_blocks:
                    self._end_row(generation, row)
        self.close(generation)

    def _commit_draft(
        self, generation: Generation, draft: Draft, accepted_tokens: tuple[int, ...]
    ) -> None:
        """Appends the accepted draft tokens to the row, and drops the draft."""
        sequence = generation.sequence()
        # does nothing if the request has been preempted, which drops the sequence's draft
        sequence.commit_draft(len(accepted_tokens))
        timeline = self.scheduler.timeline
        timeline.record_verification(sequence.request, len(draft.tokens), len(accepted_tokens))
        generation.draft_counts.update(
            num_drafts=1,
            num_draft_tokens=len(draft.tokens),
            num_accepted_tokens=len(accepted_tokens),
        )
        sequence.token_ids.extend(accepted_tokens)
        self.num_generated_tokens += len(accepted_tokens)
        generation.decoding.draft = None

    def split_preempted(self, preempted: Collection[Request]) -> None:
        """Splits generations of preempted requests if their rows are independent, so that the rows
        need not wait for each other."""
        with self.memory.lock:  # other threads may end requests
            for generation in self.generations_of(preempted):
                if generation.can_split:
                    generation.split()
                    self.pending_parts += generation.parts
            self._assign_rows_to_parts()

    def _assign_rows_to_parts(self) -> None:
        """Replaces split generations in `rows` with their parts."""
        for rows in self.rows.values():
            rows[:] = [(part.parts[row], 0) if part.parts else (part, row) for part, row in rows]

    def generations_of(self, requests: Iterable[Request]) -> list[Generation]:
        """Returns the unfinished generations of these requests, without duplicates."""
        rows = (row for request in requests for row in self.rows.get(request, ()))
        return list(dict.fromkeys(generation for generation, _ in rows))

    def _end_row(self, generation: Generation, row: int) -> None:
        sequence = generation.sequence(row)
        if generation.keep_blocks:
            if sequence.request.is_swapped:
                # blocks on the host cannot be forked
                self.scheduler.preemption.reset(sequence.request)
            if sequence.blocks is NO_BLOCKS:
                sequence.begin(self.scheduler.blocks)
            generation.kept_blocks[row] = (
                sequence.blocks.fork(),
                sequence.num_computed_tokens,
            )
        self.scheduler.finish_sequence(sequence)

    def close(self, generation: Generation) -> None:
        """Ends a generation and its rows, and ends the requests that then have no open row."""
        for request, index in () if generation.parts else generation.rows:
            # other parts may still have open rows of the request
            if all(part is generation or part.is_closed for part, _ in self.rows.get(request, ())):
                self._finish(request)
            elif index < len(request.sequences):
                self.scheduler.finish_sequence(request.sequences[index])
        generation.close()
        generation.detach_drafter()

    def _finish(self, request: Request) -> None:
        if request in self.rows:
            self.scheduler.finish(request)
            del self.rows[request]
        self.scheduler.queue.suspects.discard({request})
