"""The loop that `PagedEngine` and `generate` share: schedule, compute, sample, update. Which tokens
are computed and chosen is up to the scheduler and the decodings."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.memory import PagedMemory
from ..interrupts import is_interrupt
from ..model.sharding import RankLostError
from ..plan import StepPlan
from ..rooms import OnDemand
from ..seams import Drafter
from .decoding.base import Fetch, Result, SampledTokens
from .decoding.sampler import sample_step, unknown_token
from .execution.executor import Executor, StableSpan
from .generation import Generation
from .ledger import Ledger, Ready
from .progress import Progress
from .request import RowsError
from .scheduling.queue import NeverFitsError
from .scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_RUNS_CALLERS_CODE = operator.attrgetter("runs_callers_code")
_IS_STREAMED = operator.attrgetter("is_streamed")
_LOGITS = operator.itemgetter(1)
_INTERRUPTED = "interrupted by {!r} while its token was chosen"


@dataclass(eq=False, repr=False)
class StepLoop:
    """Runs generations on one model. An exception that leaves a step's bookkeeping half done, such
    as an interrupt, makes the loop `recover`."""

    executor: Executor
    memory: PagedMemory  # its lock guards the block tables
    blocks: BlockManager  # allocates the block tables that the runner reads
    scheduler: Scheduler
    drafter: OnDemand[Drafter]
    num_steps: int = 0
    seconds: float = 0.0  # spent in steps

    def __post_init__(self) -> None:
        # generations that advanced or failed and are not reported yet; callers remove the ones that
        # they report
        self.unreported: deque[Generation] = deque()
        self.ledger = Ledger(self.blocks, self.memory, self.scheduler)
        self._progress = Progress()
        # whether an exception would leave the step's bookkeeping half done
        self._is_mid_update = False
        self._is_recovery_due = False  # whether `recover` has begun and not ended

    def counts(self) -> dict[str, float]:
        """Returns the loop's counters: the fields of [`EngineStats`] that only grow."""
        counts = {
            "num_generated_tokens": self.ledger.num_generated_tokens,
            "num_preemptions": self.ledger.num_preemptions,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            **self.ledger.draft_counts,
            "num_swaps": self.scheduler.preemption.num_swaps,
            "num_captured_steps": self.executor.runner.num_captured_steps,
        }
        adapters = self.executor.adapters.instance
        if adapters is not None:
            counts |= adapters.counts()
        return counts

    def __repr__(self) -> str:
        blocks = f"{self.blocks.num_free} of {self.blocks.num_total} blocks available"
        return f"{self.scheduler!r}, {blocks}"

    def add(self, generation: Generation) -> None:
        """Queues the generation's requests. Raises `OutOfBlocksError`, with none queued, if one can
        never fit."""
        try:
            for part in generation.parts or [generation]:
                is_assisted = part.assistance is not None and part.is_single and not part.is_done
                if is_assisted and self.executor.runner.takes_drafts:
                    part.draft_by(self.drafter())
            self._add(generation)
        except BaseException:
            for part in generation.parts or [generation]:
                part.end_drafts()
            raise

    def _add(self, generation: Generation) -> None:
        try:
            self._finish_recovery()
            with self.memory.lock:
                self.scheduler.add(*generation.requests)
                self.ledger.add(generation)
        except OutOfBlocksError:
            raise
        except BaseException:
            self.ledger.remove(generation)
            self.recover()
            raise

    @property
    def first_waiting(self) -> Generation | None:
        """The generation whose request will be admitted next."""
        request = self.scheduler.queue.first_waiting
        return None if request is None else self.ledger.rows[request][0][0]

    def generations_to_fail(self, error: Exception) -> list[Generation]:
        """Returns the generations to end when steps raise `error` again and again: those of running
        requests; if none runs, or if blocks are short, the one that would be admitted next."""
        first = self.first_waiting
        running = self.ledger.generations_of(self.scheduler.queue.running)
        if first is not None and (not running or isinstance(error, OutOfBlocksError)):
            return [first]
        return running or self.ledger.generations()

    def drop(self, generation: Generation) -> None:
        """Ends a generation and frees its blocks."""
        try:
            self._finish_recovery()
            self._drop(generation)
        except BaseException:
            self.recover()
            self._drop(generation)
            raise

    def _drop(self, generation: Generation) -> None:
        for part in generation.parts:
            self._drop(part)
        with self.memory.lock:
            self.ledger.close(generation)
            for blocks, _ in generation.kept_blocks.values():
                self.blocks.free(blocks)
        generation.kept_blocks.clear()

    def change_weights(self, recompute: bool) -> None:
        """Between steps: invalidates what was computed with the old weights; `recompute` also drops
        the K/V of unfinished requests."""
        try:
            if self.drafter.instance is not None:
                self.drafter.instance.change_weights()
            with self.executor.lock:
                self.executor.change_weights()
                if recompute:
                    for generation in self.ledger.generations():
                        generation.drop_logits()
                    with self.memory.lock:
                        self.ledger.split_preempted(self.scheduler.recompute())
        except BaseException:
            self.recover()
            raise

    def step(self, span: StableSpan) -> None:
        """Schedules, computes and samples once; does nothing while `unreported` is not empty. An
        interrupt of the forward undoes the step; an interrupt of a caller's code ends that request.
        Raises `OutOfBlocksError` and `EngineStalledError`."""
        if self.unreported:
            return
        start = time.perf_counter()
        self._finish_recovery()
        self.executor.open(span)
        try:
            self._is_mid_update = True
            self.propose()
            with self.executor.attention():
                ready = self.compute()
                fetch = self.executor.fetch_while_running_ahead(ready)
                interrupt = self.sample(ready, span, fetch)
            self._is_mid_update = False
            if not self.scheduler.has_unfinished:
                self.executor.clear_run_ahead()
            self.num_steps += 1
            self.seconds += time.perf_counter() - start
            if interrupt is not None:
                raise interrupt
            if self.unreported or not span.is_call:
                self.executor.commit(span)
        except BaseException:
            try:
                if self._is_mid_update:
                    self.recover(self.ledger.generations())
            finally:
                self.executor.leave(span)
            raise

    def propose(self) -> None:
        """Drafts tokens for the rows that speculate, before `compute` and outside of
        `executor.attention`. Adds generations whose source fails to `unreported`."""
        drafter = self.drafter.instance
        if drafter is None:
            return
        num_rows = self.scheduler.queue.num_rows
        # outside of the model's lock, since two models may be each other's assistants: a drafter
        # locks only the model that it runs
        for generation, draft in drafter.propose(self.executor.num_embeddings, num_rows):
            if isinstance(draft, Exception):
                self._fail(generation, draft)
            else:
                generation.take_draft(draft)

    def compute(self) -> Ready:
        """Schedules and computes once, within `executor.attention`. Returns the generations whose
        open rows all have logits now. Adds a generation whose forward failed to `unreported`; if
        several failed together, the next steps compute them in halves, so that only generations end
        which fail alone. Raises as `step`."""
        ready = Ready()
        self._finish_recovery()
        self._is_mid_update = True
        try:
            with self.executor.lock:
                # another thread's call may recover the loop only once the logits are delivered
                plan, logits = self._compute()
                self.ledger.deliver(plan, logits, ready)
            self._progress.note(plan, bool(ready or self.unreported), self)
            return ready
        except BaseException:
            if self._is_mid_update:
                self.recover(generation for generation, _ in ready)
            raise

    def sample(
        self, ready: Ready, span: StableSpan, fetch: Fetch | None = None
    ) -> BaseException | None:
        """Samples the next tokens of generations that `compute` returned, and adds these to
        `unreported`; `fetch` as in `sample_step`. Returns an interrupt of a caller's code.
        Generations whose sampling was interrupted are computed again, or fail if sampling cannot be
        repeated. Another thread may compute other generations meanwhile."""
        interrupt: BaseException | None = None
        results: list[Result] = []
        repeated: list[Generation] = []
        applying: Generation | None = None  # whose result is being applied
        decodings = [generation.decoding for generation, _ in ready]
        runs_callers_code = any(map(_RUNS_CALLERS_CODE, decodings))
        # transformers' own streamers may hand the text to a thread of the caller
        runs_foreign_code = runs_callers_code or any(map(_IS_STREAMED, decodings))
        try:
            if runs_callers_code:
                self.executor.commit(span, runs_code=True)
            if runs_foreign_code:
                self.executor.doubt_model()
            logits = map(_LOGITS, ready)
            results += sample_step(list(zip(decodings, logits)), fetch)
            # a caller's code may choose any id, and the model's head may be wider than its
            # embedding
            checks_ids = runs_callers_code or (
                bool(ready) and ready[0][1].logits.shape[-1] > self.executor.num_embeddings
            )
            with self.memory.lock:
                for (generation, _), result in zip(ready, results):
                    if checks_ids:
                        result = unknown_token(result, self.executor.num_embeddings) or result
                    applying = generation
                    if type(result) is int:
                        self.ledger.append(generation, result)
                    elif type(result) is SampledTokens:
                        self.ledger.apply(generation, result)
                    else:
                        assert isinstance(result, BaseException)
                        if generation.can_repeat and is_interrupt(result):
                            repeated.append(generation)
                            interrupt = interrupt or result
                        else:
                            interrupt = self._fail(generation, result) or interrupt
                        continue
                    if not generation.is_quiet or generation.is_closed:
                        self.unreported.append(generation)
                    generation.is_sampling = False
            self._repeat(repeated)
        except BaseException as cause:
            self._fail_interrupted(ready, repeated, applying, cause, bool(results))
            raise
        finally:
            self.executor.is_unchecked |= runs_callers_code
            if runs_foreign_code:
                self.executor.doubt_model()
        return interrupt

    def _compute(self) -> tuple[StepPlan, Tensor | None]:
        """Returns the scheduled step and its logits; `None` if there was nothing to compute or the
        forward failed. Holds the executor's lock."""
        with self.executor.runner.ordered():
            self.executor.check_model()
            self.memory.free_abandoned()
            with self.memory.lock:
                # under the lock, no other thread changes tables before their copies are made
                if self.ledger.past_positions:
                    self._end_past_positions()
                try:
                    plan = self.scheduler.schedule()
                except NeverFitsError as error:  # later requests go on
                    for generation in self.ledger.generations_of([error.request]):
                        self._fail(generation, error)
                    return StepPlan.of([]), None
                except OutOfBlocksError:
                    self._is_mid_update = False
                    raise
                self.blocks.flush_copies()
                self.memory.note_peak()
            # a prefix cache hit may have taken the model's fingerprint
            self.executor.handle_model_change()
            for request in plan.admitted:
                if request.admitted_at is None:
                    request.start_clocks(time.time())
            if plan.preempted:
                self.ledger.split_preempted(plan.preempted)
            adapters = self.executor.adapters.instance
            if adapters is not None:
                adapters.prefetch(self.scheduler.queue.waiting)
            logits = None
            if plan.sequences:
                logits = self._run(plan)
        now = time.perf_counter()
        for request in plan.admitted:
            if request.admitted_at is None:
                request.admitted_at = now
        return plan, logits

    def _run(self, plan: StepPlan) -> Tensor | None:
        start = time.perf_counter()
        num_unsized = self.blocks.num_unsized
        try:
            if self.memory.processes is not None:
                self.memory.processes.check(plan)
            logits = self.executor.run(plan)
        except BaseException as error:
            self.undo_step()
            if is_interrupt(error) or isinstance(error, RankLostError):
                self._is_mid_update = False
                raise
            self._end_failed(plan, error, num_unsized)
            return None
        seconds = time.perf_counter() - start
        with self.memory.lock:
            self.scheduler.commit(plan)
            if self.scheduler.queue.suspects:
                self.scheduler.queue.suspects.clear_computed()
        cost = self.scheduler.preemption.cost
        if not plan.has_chunks:
            if self.drafter.instance is not None:
                self.drafter.instance.computed(plan.num_tokens, seconds)
        elif cost is not None:
            cost.observe_prefill(plan.num_tokens, seconds)
        return logits

    def _end_failed(
        self,
        plan: StepPlan,
        error: BaseException,
        num_unsized: int,
    ) -> None:
        """Ends the generations that a forward's error concerns; if several shared the forward, the
        next steps isolate the failing ones. `num_unsized`: number of groups whose block size was
        unknown before it."""
        cause: BaseException = error
        if isinstance(error, RowsError) and error.cause is not None:
            cause = error.cause
        if isinstance(cause, OutOfBlocksError) and self.blocks.num_unsized < num_unsized:
            # the forward showed the blocks' true size, and fewer fit: the step is repeated
            return
        failed = self.ledger.generations_of(sequence.request for sequence in plan.sequences)
        units = list(dict.fromkeys(generation.parent or generation for generation in failed))
        if isinstance(error, RowsError):
            failed = [
                generation for generation in failed if any(map(error.concerns, generation.requests))
            ]
        elif len(units) > 1:
            self.scheduler.queue.suspects.halve([unit.requests for unit in units])
            logger.debug(
                "a forward for %d requests failed and is repeated in halves: %s",
                len(units),
                error,
            )
            return
        for generation in failed:
            self._fail(generation, cause)

    def _end_past_positions(self) -> None:
        """Ends generations before a forward that would read past the model's table of positions."""
        past_positions = self.ledger.past_positions
        while past_positions:
            generation, request = past_positions.popleft()
            if request.exceeds_positions and not generation.is_closed:
                most = request.max_positions
                error = IndexError(
                    f"request {request.request_id!r} cannot go on: the model's table of positions"
                    f" ends after {most} of its tokens. Lower `max_new_tokens` to"
                    f" {most + 1 - request.num_prompt_tokens}, or shorten the prompt"
                )
                self._fail(generation, error)

    def undo_step(self) -> None:
        """Undoes the scheduled step: the prefix index already names blocks for tokens that were not
        computed, and states may have advanced."""
        with self.memory.lock:
            self.scheduler.fail_step()
            if self.executor.runner.has_states:
                # no `split_preempted`: blocks are not short
                self.ledger.num_preemptions += len(self.scheduler.recompute())
            self.executor.forget_model()

    def recover(self, lost: Iterable[Generation] = ()) -> None:
        """After an exception that may have left bookkeeping half done: makes pools and queues agree
        with the unfinished requests, which are computed again from their tokens. `lost`: the
        generations whose logits will not be sampled. If this raises, the next change of the loop
        repeats it first."""
        self._is_recovery_due = True
        for generation in lost:
            generation.is_sampling = False
        with self.executor.lock, self.memory.lock:
            self.memory.recover()
            self.scheduler.reclaim()
            self.ledger.recover()
            self.scheduler.recover(self.ledger.rows)
            self.ledger.drop_finished()
            self.executor.forget_model()
        self._is_mid_update = self._is_recovery_due = False

    def _finish_recovery(self) -> None:
        """Repeats a `recover` that raised."""
        if self._is_recovery_due:
            self.recover()

    def _fail(self, generation: Generation, error: BaseException) -> BaseException | None:
        """Ends a generation with an error and adds it to `unreported`. Returns `error` for the
        caller to raise if it is an interrupt."""
        interrupt: BaseException | None = None
        if isinstance(error, Exception) and not is_interrupt(error):
            generation.error = error
        else:
            interrupt = error
            generation.error = RuntimeError(_INTERRUPTED.format(error))
        self.drop(generation)
        self.unreported.append(generation)  # another thread may read the error from now on
        return interrupt

    def _repeat(self, generations: list[Generation]) -> None:
        """Undoes these generations' last step; the next steps compute and sample it again."""
        for generation in generations:
            generation.rewind()
        if generations:
            self.recover(generations)

    def _fail_interrupted(
        self,
        ready: Ready,
        repeated: list[Generation],
        applying: Generation | None,
        cause: BaseException,
        is_mid_update: bool,
    ) -> None:
        """Ends generations of `ready` whose sampling `cause` interrupted, since their progress is
        unknown. Those in `repeated` are sampled again; after an interrupt, so are all others that
        can be repeated, except `applying`, whose token was being appended. `is_mid_update`: whether
        results were being applied."""
        for generation in self.unreported:  # they have their tokens, even if `is_sampling` is set
            generation.is_sampling = False
        lost = [
            generation
            for generation, _ in ready
            if generation.is_sampling and generation not in self.unreported
        ]
        if is_interrupt(cause):
            repeated = [part for part in lost if part.can_repeat and part is not applying]
        try:
            self._repeat(repeated)
            if is_mid_update:
                self.recover()
        finally:
            for generation in lost:
                if generation not in repeated and generation not in self.unreported:
                    self._fail(generation, RuntimeError(_INTERRUPTED.format(cause)))
