"""The loop that `PagedEngine` and `generate` share: schedule, compute, sample, update."""

from __future__ import annotations

import logging
import operator
import sys
import time
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.memory import PagedMemory
from ..interrupts import is_interrupt
from ..model.ranks import RankLostError, Ranks
from ..plan import StepPlan
from ..topics import Topic, TopicError
from .decoding.base import Fetch, LogitRows, Result, SampledTokens
from .decoding.sampler import sample_step
from .execution.adapters import AdapterError
from .execution.executor import Executor, Window
from .execution.prompts import Prompts, PromptsError
from .generation import Generation
from .request import Request, Sequence
from .scheduling.drafts import settle_draft
from .scheduling.scheduler import Scheduler
from .scheduling.shortage import NeverFits
from .speculator import Speculator

logger = logging.getLogger(__name__)

MAX_IDLE_STEPS = 8  # steps in a row that neither computed nor sampled
MAX_FRUITLESS_STEPS = 10_000  # steps in a row that preempted and produced no token
_RUNS_CALLERS_CODE = operator.attrgetter("runs_callers_code")
_IS_STREAMED = operator.attrgetter("is_streamed")
_LOGITS = operator.itemgetter(1)
_INTERRUPTED = "interrupted by {!r} while its token was chosen"

Ready = list[tuple[Generation, LogitRows]]
"""Generations with the logits of all their open rows, in order."""


class EngineStalledError(TopicError, RuntimeError):
    """Several steps in a row produced no token. The message holds the scheduler's state."""

    topic = Topic.STALLED


@dataclass(eq=False, repr=False)
class StepLoop:
    """Runs generations on one model. An exception that splits a step's bookkeeping, such as an
    interrupt, makes the loop `recover`."""

    executor: Executor
    memory: PagedMemory  # its lock guards the block tables
    blocks: BlockManager  # owner of the block tables that the runner reads
    scheduler: Scheduler
    speculator: Speculator
    ranks: Ranks | None = None  # processes that each run the same generations in a loop
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0  # spent in steps

    def __post_init__(self) -> None:
        # generations that advanced or failed and are not reported yet; callers remove those that
        # they have reported
        self.untold: deque[Generation] = deque()
        # by unfinished request, each sequence's row
        self._rows: dict[Request, list[tuple[Generation, int]]] = {}
        self._split: list[Generation] = []  # new parts, which may have their logits already
        # with rows whose next token has no position in the model's table
        self._outgrown: deque[Generation] = deque()
        # groups of requests whose common forward failed: steps compute the first group alone, then
        # the next one
        self._suspects: deque[set[Request]] = deque()
        self._idle_steps = 0
        self._fruitless_steps = 0
        # in a step, while an exception would leave its bookkeeping half done
        self._is_split = False
        self._is_recovery_due = False  # `recover` has begun, and not come to its end

    @property
    def num_adapter_hits(self) -> int:
        return 0 if self.scheduler.adapters is None else self.scheduler.adapters.num_hits

    @property
    def num_adapter_loads(self) -> int:
        return 0 if self.executor.adapters is None else self.executor.adapters.store.num_loads

    @property
    def num_adapter_evictions(self) -> int:
        return 0 if self.scheduler.adapters is None else self.scheduler.adapters.num_evictions

    @property
    def num_drafts(self) -> int:
        return self.speculator.counts()[0]

    @property
    def num_draft_tokens(self) -> int:
        return self.speculator.counts()[1]

    @property
    def num_accepted_tokens(self) -> int:
        return self.speculator.counts()[2]

    def add(self, generation: Generation) -> None:
        """Queues the generation's requests. Raises `OutOfBlocksError`, with none queued, if one can
        never fit."""
        try:
            for part in generation.parts or [generation]:
                if self.executor.runner.takes_drafts:
                    self.speculator.attach(part)
            self._add(generation)
        except BaseException:
            for part in generation.parts or [generation]:
                self.speculator.detach(part)
            raise

    def _add(self, generation: Generation) -> None:
        try:
            self._end_recovery()
            with self.memory.lock:
                self.scheduler.add(
                    *(request for request in generation.requests if not request.is_finished)
                )
                for part in generation.parts or [generation]:
                    for row, (request, _) in enumerate(part.rows):
                        if not request.is_finished:
                            self._rows.setdefault(request, []).append((part, row))
                self._split += generation.parts
        except OutOfBlocksError:
            raise
        except BaseException:
            for request in generation.requests:
                self._rows.pop(request, None)
            self.recover()
            raise

    @property
    def sampling(self) -> list[Generation]:
        """The unfinished generations that have the logits of all open rows, and no tokens yet."""
        every = dict.fromkeys(generation for rows in self._rows.values() for generation, _ in rows)
        return [generation for generation in every if generation.is_sampling]

    @property
    def first_waiting(self) -> Generation | None:
        """The generation whose request is to be admitted next."""
        request = self.scheduler.queue.first_waiting
        return None if request is None else self._rows[request][0][0]

    def blamed_for(self, error: Exception) -> list[Generation]:
        """The generations to end when steps raise `error` again and again: those of running
        requests; if none runs, or if blocks are short, the one that is to be admitted next."""
        first = self.first_waiting
        running = self._generations_of(
            request.sequences[0] for request in self.scheduler.queue.running
        )
        if first is not None and (not running or isinstance(error, OutOfBlocksError)):
            return [first]
        return running or self._generations_of(request.sequences[0] for request in self._rows)

    def drop(self, generation: Generation) -> None:
        try:
            self._end_recovery()
            self._drop(generation)
        except BaseException:
            self.recover()
            self._drop(generation)
            raise

    def _drop(self, generation: Generation) -> None:
        for part in generation.parts:
            self._drop(part)
        with self.memory.lock:
            self._close(generation)
            for blocks, _ in generation.kept.values():
                self.blocks.free(blocks)
        generation.kept.clear()

    def change_weights(self, recompute: bool) -> None:
        """Between steps: notes that the weights changed; `recompute` drops the K/V of unfinished
        requests."""
        try:
            self.speculator.change_weights()
            with self.executor.lock:
                self.executor.change_weights()
                if recompute:
                    for rows in self._rows.values():
                        for generation, _ in rows:
                            generation.forget_logits()
                    with self.memory.lock:
                        self._loosen(self.scheduler.recompute())
        except BaseException:
            self.recover()
            raise

    def step(self, window: Window) -> None:
        """Schedules, computes and samples once, unless `untold` is not empty. An interrupt of the
        forward undoes the step; an interrupt of a caller's code ends that request. Raises
        `OutOfBlocksError` and `EngineStalledError`."""
        if self.untold:
            return
        start = time.perf_counter()
        self._end_recovery()
        self.executor.open(window)
        try:
            self._is_split = True
            self.propose(self.untold)
            with self.executor.attention():
                ready = self.compute(self.untold)
                interrupt = self.sample(
                    ready, self.untold, window, self.executor.fetch_while_running_ahead(ready)
                )
            self._is_split = False
            if not self.scheduler.has_unfinished:
                self.executor.ahead.clear()
            self.num_steps += 1
            self.seconds += time.perf_counter() - start
            if interrupt is not None:
                raise interrupt
            if self.untold or not window.is_call:
                self.executor.settle(window)
        except BaseException:
            try:
                if self._is_split:
                    self.recover(
                        generation for rows in self._rows.values() for generation, _ in rows
                    )
            finally:
                self.executor.leave(window)
            raise

    def propose(self, untold: deque[Generation]) -> None:
        """Drafts tokens for the rows that speculate, before `compute` and outside of
        `executor.attention`. Adds generations whose source fails to `untold`."""
        if not self.speculator.is_due():
            return

        def fail(generation: Generation, error: Exception) -> None:
            self._fail(generation, error, untold)

        # a source locks only the model that it runs: two models may be each other's assistants
        self.speculator.propose(self.executor.num_embeddings, self.scheduler.queue.num_rows, fail)

    def compute(self, untold: deque[Generation]) -> Ready:
        """Schedules and computes once, within `executor.attention`. Returns the generations all of
        whose open rows now have logits. Adds a generation whose forward failed to `untold`; if
        several failed together, the next steps compute them in halves, so that only those end which
        fail alone. Raises as `step`."""
        ready = Ready()
        self._end_recovery()
        self._is_split = True
        try:
            with self.executor.lock:
                # another thread's call may recover the loop only once the logits are delivered
                plan, logits = self._compute(untold)
                self._deliver(plan, logits, ready)
            self._check_progress(plan, has_news=bool(ready or untold))
            return ready
        except BaseException:
            if self._is_split:
                self.recover(generation for generation, _ in ready)
            raise

    def _check_progress(self, plan: StepPlan, has_news: bool) -> None:
        """Counts the steps in a row without progress. Raises `EngineStalledError` after many."""
        self._idle_steps += 1
        if plan.sequences or has_news:
            self._idle_steps = 0
        self._fruitless_steps += 1
        if has_news or not plan.preempted:
            self._fruitless_steps = 0
        if self._idle_steps < MAX_IDLE_STEPS and self._fruitless_steps < MAX_FRUITLESS_STEPS:
            return
        num_steps = max(self._idle_steps, self._fruitless_steps)
        blocks = f"{self.blocks.num_free} of {self.blocks.num_total} blocks available"
        raise EngineStalledError(f"no token for {num_steps} steps: {self.scheduler!r}, {blocks}")

    def sample(
        self, ready: Ready, untold: deque[Generation], window: Window, fetch: Fetch | None = None
    ) -> BaseException | None:
        """Samples the next tokens of generations that `compute` returned, and adds these to
        `untold`; `fetch` as in `sample_step`. Returns an interrupt of a caller's code. Generations
        whose sampling an interrupt ended are computed again, or fail if that cannot be repeated.
        Another thread may compute other generations meanwhile."""
        interrupt: BaseException | None = None
        results: list[Result] = []
        repeated: list[Generation] = []
        applied: Generation | None = None
        decodings = [generation.decoding for generation, _ in ready]
        runs_callers_code = any(map(_RUNS_CALLERS_CODE, decodings))
        # transformers' own streamers may hand the text to a thread of the caller
        lets_code_run = runs_callers_code or any(map(_IS_STREAMED, decodings))
        try:
            if runs_callers_code:
                self.executor.settle(window, runs_code=True)
            if lets_code_run:
                self.executor.doubt_model()
            taken = map(_LOGITS, ready)
            results += sample_step(list(zip(decodings, taken)), fetch)
            # a caller's code may choose any id, the model one past its embedding's
            checks_ids = runs_callers_code or (
                bool(ready) and ready[0][1].logits.shape[-1] > self.executor.num_embeddings
            )
            with self.memory.lock:
                for (generation, _), result in zip(ready, results):
                    if checks_ids:
                        result = self._unknown_token(result) or result
                    applied = generation
                    if type(result) is int:
                        self._append(generation, result)
                    elif type(result) is SampledTokens:
                        self._apply(generation, result)
                    else:
                        assert isinstance(result, BaseException)
                        if generation.can_repeat and is_interrupt(result):
                            repeated.append(generation)
                            interrupt = interrupt or result
                        else:
                            interrupt = self._fail(generation, result, untold) or interrupt
                        continue
                    if not generation.is_quiet or generation.is_closed:
                        untold.append(generation)
                    generation.is_sampling = False
            self._repeat(repeated)
        except BaseException as cause:
            lost = [
                generation
                for generation, _ in ready
                if generation.is_sampling and generation not in untold
            ]
            if is_interrupt(cause):
                repeated = [g for g in lost if g.can_repeat and g is not applied]
            self._end_lost(lost, repeated, cause, bool(results), untold)
            raise
        finally:
            self.executor.is_unchecked |= runs_callers_code
            if lets_code_run:
                self.executor.doubt_model()
        return interrupt

    def _compute(self, untold: deque[Generation]) -> tuple[StepPlan, Tensor | None]:
        """Returns the scheduled step and its logits; `None` if there was nothing to compute or the
        forward failed. Holds the executor's lock."""
        with self.executor.runner.ordered():
            self.executor.check_model()
            self.memory.free_abandoned()
            with self.memory.lock:
                # no other thread changes tables until their pending copies are made
                if self._outgrown:
                    self._end_outgrown(untold)
                if self._suspects or self.scheduler.queue.only is not None:
                    self.scheduler.queue.only = self._first_suspects()
                try:
                    plan = self.scheduler.schedule()
                except NeverFits as error:  # the requests behind it go on
                    for generation in self._generations_of(error.request.sequences):
                        self._fail(generation, error, untold)
                    return StepPlan.of([]), None
                except OutOfBlocksError:
                    self._is_split = False
                    raise
                self.blocks.flush_copies()
                self.memory.note_peak()
            # a prefix cache hit may have taken the model's fingerprint
            self.executor.notice_model()
            if plan.preempted:
                self._loosen(plan.preempted)
            self.executor.prefetch(self.scheduler.queue.next_adapters())
            logits = None
            if plan.sequences:
                logits = self._run(plan, untold)
        now = time.perf_counter()
        for request in plan.admitted:
            if request.admitted_at is None:
                request.admitted_at = now
        return plan, logits

    def _run(self, plan: StepPlan, untold: deque[Generation]) -> Tensor | None:
        start = time.perf_counter()
        num_unsized = self.blocks.num_unsized
        try:
            if self.ranks is not None:
                self.ranks.check_same(hash(tuple(_tokens_of(plan))), "scheduled other tokens")
            logits = self.executor.run(plan)
        except BaseException as error:
            self.undo_step()
            if is_interrupt(error) or isinstance(error, RankLostError):
                self._is_split = False
                raise
            self._end_failed(plan, error, num_unsized, untold)
            return None
        num_tokens = plan.num_tokens
        seconds = time.perf_counter() - start
        with self.memory.lock:
            self.scheduler.commit(plan)
            if self._suspects:
                suspects = self._suspects[0]
                cleared = [request for request in suspects if _has_logits(request)]
                suspects.difference_update(cleared)
        cost = self.scheduler.preemption.cost
        if not plan.has_chunks:
            self.speculator.costs.observe(num_tokens, seconds)
        elif cost is not None:
            cost.observe_prefill(num_tokens, seconds)
        return logits

    def _end_failed(
        self,
        plan: StepPlan,
        error: BaseException,
        num_unsized: int,
        untold: deque[Generation],
    ) -> None:
        """Ends the generations to which a forward's error belongs; of several together, the next
        steps find out which. `num_unsized`: groups whose blocks had no known size before it."""
        cause: BaseException = error
        if isinstance(error, PromptsError):
            cause = error.cause
        if isinstance(cause, OutOfBlocksError) and self.blocks.num_unsized < num_unsized:
            # the forward showed the blocks' true size, so that fewer fit: the step is repeated
            return
        failed = self._generations_of(plan.sequences)
        wholes = list(dict.fromkeys(generation.whole or generation for generation in failed))
        if isinstance(error, AdapterError):  # the other generations repeat the step
            failed = [
                generation for generation in failed if _has_adapter(generation, error.adapter)
            ]
        elif isinstance(error, PromptsError):
            failed = [
                generation for generation in failed if _has_prompts(generation, error.prompts)
            ]
        elif len(wholes) > 1:
            self._halve(wholes)
            logger.debug(
                "a forward for %d requests failed, its halves are computed: %s",
                len(wholes),
                error,
            )
            return
        for generation in failed:
            self._fail(generation, cause, untold)

    def _end_outgrown(self, untold: deque[Generation]) -> None:
        """Ends generations before a forward that would read past the model's table of positions."""
        while self._outgrown:
            generation = self._outgrown.popleft()
            request = next((each for each in generation.requests if each.has_outgrown), None)
            if request is not None and not generation.is_closed:
                most = request.max_positions
                error = IndexError(
                    f"request {request.request_id!r} cannot go on: the model's table of positions"
                    f" ends after {most} of its tokens. Lower `max_new_tokens` to"
                    f" {most + 1 - request.num_prompt_tokens}, or shorten the prompt"
                )
                self._fail(generation, error, untold)

    def _halve(self, generations: list[Generation]) -> None:
        """Makes the next steps compute these generations, whose forward failed, in two halves, one
        after the other."""
        middle = len(generations) // 2
        for half in (generations[middle:], generations[:middle]):
            requests = {
                request
                for generation in half
                for request in generation.requests
                if not request.is_finished
            }
            for group in self._suspects:  # the forward was for requests of the first group
                group -= requests
            self._suspects.appendleft(requests)

    def _first_suspects(self) -> set[Request] | None:
        """Returns the requests to which the next step is limited; `None` if no group of suspects is
        left."""
        while self._suspects and not self._suspects[0]:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def undo_step(self) -> None:
        """Undoes the scheduled step: blocks are already named for tokens not computed, and states
        may have advanced."""
        with self.memory.lock:
            self.scheduler.fail_step()
            if self.executor.runner.has_states:
                # blocks are not short: no need to split rows
                self.num_preemptions += len(self.scheduler.recompute())
            self.executor.forget_model()

    def recover(self, lost: Iterable[Generation] = ()) -> None:
        """After an exception that may have left bookkeeping half done: makes pools and queues agree
        with the unfinished requests, which are computed again from their tokens. `lost`: those
        whose logits no one will sample. If this raises, the next change of the loop begins with
        it."""
        self._is_recovery_due = True
        for generation in lost:
            generation.is_sampling = False
        with self.executor.lock, self.memory.lock:
            self.memory.recover()
            self.speculator.reclaim()
            self._suspects.clear()
            for request, rows in self._rows.items():
                rows[:] = [
                    (part.parts[row], 0) if part.parts else (part, row) for part, row in rows
                ]
                for (generation, _), sequence in zip(rows, request.sequences):
                    generation.forget_logits()
                    sequence.num_answered_tokens = (
                        sequence.num_tokens if generation.is_sampling else 0
                    )
            self.scheduler.recover(self._rows)
            self._rows = {
                request: rows for request, rows in self._rows.items() if not request.is_finished
            }
            self.executor.forget_model()
        self._is_split = self._is_recovery_due = False

    def _end_recovery(self) -> None:
        """Recovers, if an earlier exception has left that to do."""
        if self._is_recovery_due:
            self.recover()

    def _deliver(self, plan: StepPlan, logits: Tensor | None, ready: Ready) -> None:
        """Adds the generations all of whose open rows now have logits to `ready`."""
        found: dict[Generation, dict[int, int]] = {}
        end = 0
        for sequence, num_logits in zip(plan.sequences, plan.num_logits):
            if not num_logits or logits is None:
                continue
            place = end
            end += num_logits
            request = sequence.request
            rows = self._rows[request]
            if request.num_rows > len(request.sequences):  # the prompt, computed once for all rows
                with self.memory.lock:
                    request.fork(self.blocks, len(rows))
            elif len(rows) > 1:
                rows = [rows[sequence.index]]
            for generation, row in rows:
                if not generation.is_single:
                    found.setdefault(generation, {})[row] = place
                elif not generation.is_closed:
                    decoding = generation.decoding
                    if sequence.draft:
                        assert generation.speculation is not None
                        decoding.draft = generation.speculation.draft
                    else:
                        decoding.draft = None  # of a step that failed behind its forward
                    ready.append((generation, LogitRows(logits, place, end)))
        if self._split or found:
            self._gather(logits, found, ready)
        for generation, _ in ready:
            generation.is_sampling = True

    def _gather(
        self,
        logits: Tensor | None,
        found: dict[Generation, dict[int, int]],
        ready: Ready,
    ) -> None:
        """Adds the generations of several rows that now have all logits. `found`: by generation and
        row, the place in the step's `logits`, `(n, vocab)`. Also adds new parts that got their
        logits before they were split."""
        for part in self._split:
            taken = part.take_logits()
            if taken is not None:
                ready.append((part, LogitRows.of(taken)))
        self._split = []
        for generation, places in found.items():
            assert logits is not None
            taken = None if generation.is_closed else generation.add_logits(logits, places)
            if taken is not None:
                ready.append((generation, LogitRows.of(taken)))

    def _unknown_token(self, sampled: Result) -> Exception | None:
        """Returns an error if the next forward would get an id without an embedding."""
        num_embeddings = self.executor.num_embeddings
        if isinstance(sampled, BaseException):
            return None
        if isinstance(sampled, int):
            tokens = [sampled]
        else:
            going = [row for row in sampled.rows if row not in sampled.finished]
            tokens = [sampled.tokens[row] for row in going]
        for token in tokens:
            if not 0 <= token < num_embeddings:
                return IndexError(  # as the embedding raises
                    f"token id {token} was chosen, but ids from 0 to {num_embeddings - 1} have an"
                    " embedding: a logits processor widened the scores, or a stopping criterion"
                    " wrote the id"
                )
        return None

    def _append(self, generation: Generation, token: int) -> None:
        """Appends the token of a single row that continues."""
        ((request, index),) = generation.rows
        token_ids = request.sequences[index].token_ids
        token_ids.append(token)
        self.num_generated_tokens += 1
        generation.new_tokens = [{0: token}]
        if len(token_ids) > request.max_positions:
            self._outgrown.append(generation)

    def _apply(self, generation: Generation, sampled: SampledTokens) -> None:
        """Appends a step's tokens to their sequences, and ends those that they finish."""
        finished = set(sampled.finished)
        if sampled.parents is not None:
            self._apply_beams(generation, sampled, finished)
            return
        generation.new_tokens = []
        outgrows = False
        draft = generation.decoding.draft
        earlier: list[dict[int, int]] = []
        if draft is not None:
            self._settle_draft(generation, sampled.earlier)
            earlier = [{0: token} for token in sampled.earlier]
        new: dict[int, int] = {}
        for row in sampled.rows:
            request, index = generation.rows[row]
            token = sampled.tokens[row]
            new[row] = token
            token_ids = request.sequences[index].token_ids
            token_ids.append(token)
            self.num_generated_tokens += 1
            if row in finished:
                self._end_row(generation, row)
            elif request.max_positions < sys.maxsize:
                outgrows |= len(token_ids) > request.max_positions
        generation.new_tokens = [*earlier, new]
        if draft is not None and generation.speculation is not None:
            ((request, index),) = generation.rows
            token_ids = request.sequences[index].token_ids
            num_accepted = len(sampled.earlier)
            generation.speculation.observe(token_ids, len(draft.tokens), num_accepted)
        if outgrows:
            self._outgrown.append(generation)
        if finished and generation.decoding.is_done:
            self._close_rows(generation)

    def _apply_beams(
        self, generation: Generation, sampled: SampledTokens, finished: set[int]
    ) -> None:
        """Makes each beam its parent's twin, with its new token."""
        assert sampled.parents is not None
        generation.new_tokens = []
        outgrows = False
        for request in generation.requests:
            if request.is_finished:
                continue
            first = self._rows[request][0][1]
            rows = range(first, first + len(self._rows[request]))
            parents = [sampled.parents[row] - first for row in rows]
            tokens = [sampled.tokens[row] for row in rows]
            request.permute(self.blocks, parents, tokens)
            self.num_generated_tokens += len(rows)
            is_over = all(row in finished for row in rows)
            if is_over and not generation.decoding.is_done:
                self._finish(request)
            outgrows |= request.has_outgrown
        if outgrows:
            self._outgrown.append(generation)
        if generation.decoding.is_done:  # beams are given up without a row that ends
            self._close_rows(generation)

    def _close_rows(self, generation: Generation) -> None:
        """Closes a generation that is done, whose rows may be open still."""
        if generation.keep_blocks:
            for row in range(len(generation.rows)):
                if row not in generation.kept:
                    self._end_row(generation, row)
        self._close(generation)

    def _settle_draft(self, generation: Generation, accepted: tuple[int, ...]) -> None:
        """Appends the accepted draft tokens to the row, and drops the rest of the draft."""
        ((request, index),) = generation.rows
        sequence = request.sequences[index]
        # does nothing if it was preempted meanwhile
        settle_draft(self.blocks, sequence, len(accepted))
        assert generation.decoding.draft is not None
        self.scheduler.timeline.verified(
            request, len(generation.decoding.draft.tokens), len(accepted)
        )
        sequence.token_ids += accepted
        self.num_generated_tokens += len(accepted)
        generation.decoding.draft = None

    def _loosen(self, preempted: Collection[Request]) -> None:
        """Splits preempted generations whose rows are independent, so that these need not wait for
        each other."""
        self.num_preemptions += len(preempted)
        for request in preempted:
            with self.memory.lock:  # other threads may end requests
                for generation in self._generations_of(request.sequences):
                    if generation.can_split:
                        generation.split()
                        for part in generation.parts:
                            ((of, index),) = part.rows
                            if of in self._rows:
                                self._rows[of][index] = (part, 0)
                        self._split += generation.parts

    def _generations_of(self, sequences: Iterable[Sequence]) -> list[Generation]:
        requests = dict.fromkeys(sequence.request for sequence in sequences)
        return list(
            dict.fromkeys(
                generation for request in requests for generation, _ in self._rows.get(request, ())
            )
        )

    def _fail(
        self, generation: Generation, error: BaseException, untold: deque[Generation]
    ) -> BaseException | None:
        """Ends a generation with an error and adds it to `untold`. Returns `error` for the caller
        to raise if it is an interrupt."""
        self.drop(generation)
        untold.append(generation)
        if isinstance(error, Exception) and not is_interrupt(error):
            generation.error = error
            return None
        generation.error = RuntimeError(_INTERRUPTED.format(error))
        return error

    def _repeat(self, generations: list[Generation]) -> None:
        """Makes the next steps compute and sample these generations as if the last step had not."""
        for generation in generations:
            generation.take_back()
        if generations:
            self.recover(generations)

    def _end_lost(
        self,
        lost: list[Generation],
        repeated: list[Generation],
        cause: BaseException,
        is_split: bool,
        untold: deque[Generation],
    ) -> None:
        """Ends generations whose sampling `cause` interrupted, since their progress is unknown;
        those in `repeated` are sampled again. `is_split`: whether tokens were being applied."""
        try:
            self._repeat(repeated)
            if is_split:
                self.recover()
        finally:
            for generation in lost:
                if generation not in repeated and generation not in untold:
                    self._fail(generation, RuntimeError(_INTERRUPTED.format(cause)), untold)

    def _end_row(self, generation: Generation, row: int) -> None:
        request, index = generation.rows[row]
        sequence = request.sequences[index]
        if generation.keep_blocks:
            if request.is_swapped:
                self.scheduler.preemption.forget(request)  # blocks on the host cannot be shared
            generation.kept[row] = self.blocks.fork(sequence.blocks), sequence.num_computed_tokens
        self.scheduler.finish_sequence(sequence)

    def _close(self, generation: Generation) -> None:
        for request, index in () if generation.parts else generation.rows:
            # other parts may still have open rows of the request
            if all(
                other is generation or other.is_closed for other, _ in self._rows.get(request, ())
            ):
                self._finish(request)
            elif index < len(request.sequences):
                self.scheduler.finish_sequence(request.sequences[index])
        generation.close()
        self.speculator.detach(generation)

    def _finish(self, request: Request) -> None:
        if request in self._rows:
            self.scheduler.finish(request)
            del self._rows[request]
        for group in self._suspects:
            group.discard(request)


def _tokens_of(plan: StepPlan) -> Iterator[int]:
    """Yields the part of a step that must be equal in every process; block ids may differ."""
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
        num_drafted = len(sequence.draft)
        yield from (
            start,
            count,
            num_drafted,
            zlib.crc32(repr(sequence.request.adapter).encode()),
        )
        yield from sequence.token_ids[start : start + count - num_drafted]


def _has_logits(request: Request) -> bool:
    """Whether its rows have nothing to compute before they get their next tokens."""
    return request.is_finished or request.is_computed or request.is_answered


def _has_adapter(generation: Generation, adapter: Hashable) -> bool:
    return any(request.adapter == adapter for request in generation.requests)


def _has_prompts(generation: Generation, prompts: Prompts) -> bool:
    given = (request.inputs for request in generation.requests)
    return any(inputs is not None and inputs[0] is prompts for inputs in given)
