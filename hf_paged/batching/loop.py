"""The loop that `PagedEngine` and `generate` share: schedule, compute, sample, update."""

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
from .execution.executor import Executor, Window
from .generation import Generation
from .ledger import Ledger, Ready
from .progress import Progress
from .request import RowsError
from .scheduling.queue import NeverFits
from .scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_RUNS_CALLERS_CODE = operator.attrgetter("runs_callers_code")
_IS_STREAMED = operator.attrgetter("is_streamed")
_LOGITS = operator.itemgetter(1)
_INTERRUPTED = "interrupted by {!r} while its token was chosen"


@dataclass(eq=False, repr=False)
class StepLoop:
    """Runs generations on one model. An exception that splits a step's bookkeeping, such as an
    interrupt, makes the loop `recover`."""

    executor: Executor
    memory: PagedMemory  # its lock guards the block tables
    blocks: BlockManager  # owner of the block tables that the runner reads
    scheduler: Scheduler
    drafter: OnDemand[Drafter]
    num_steps: int = 0
    seconds: float = 0.0  # spent in steps

    def __post_init__(self) -> None:
        # generations that advanced or failed and are not reported yet; callers remove those that
        # they have reported
        self.untold: deque[Generation] = deque()
        self.ledger = Ledger(self.blocks, self.memory, self.scheduler)
        self._progress = Progress()
        # in a step, while an exception would leave its bookkeeping half done
        self._is_split = False
        self._is_recovery_due = False  # `recover` has begun, and not come to its end

    def counts(self) -> dict[str, float]:
        """What the loop has done so far: the fields of [`EngineStats`] that only grow."""
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
                asks = part.assistance is not None and part.is_single and not part.is_done
                if asks and self.executor.runner.takes_drafts:
                    part.draft_by(self.drafter())
            self._add(generation)
        except BaseException:
            for part in generation.parts or [generation]:
                part.end_drafts()
            raise

    def _add(self, generation: Generation) -> None:
        try:
            self._end_recovery()
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
        """The generation whose request is to be admitted next."""
        request = self.scheduler.queue.first_waiting
        return None if request is None else self.ledger.rows[request][0][0]

    def blamed_for(self, error: Exception) -> list[Generation]:
        """The generations to end when steps raise `error` again and again: those of running
        requests; if none runs, or if blocks are short, the one that is to be admitted next."""
        first = self.first_waiting
        running = self.ledger.generations_of(self.scheduler.queue.running)
        if first is not None and (not running or isinstance(error, OutOfBlocksError)):
            return [first]
        return running or self.ledger.generations()

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
            self.ledger.close(generation)
            for blocks, _ in generation.kept.values():
                self.blocks.free(blocks)
        generation.kept.clear()

    def change_weights(self, recompute: bool) -> None:
        """Between steps: notes that the weights changed; `recompute` drops the K/V of unfinished
        requests."""
        try:
            if self.drafter.instance is not None:
                self.drafter.instance.change_weights()
            with self.executor.lock:
                self.executor.change_weights()
                if recompute:
                    for generation in self.ledger.generations():
                        generation.forget_logits()
                    with self.memory.lock:
                        self.ledger.split_preempted(self.scheduler.recompute())
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
            self.propose()
            with self.executor.attention():
                ready = self.compute()
                fetch = self.executor.fetch_while_running_ahead(ready)
                interrupt = self.sample(ready, window, fetch)
            self._is_split = False
            if not self.scheduler.has_unfinished:
                self.executor.clear_ahead()
            self.num_steps += 1
            self.seconds += time.perf_counter() - start
            if interrupt is not None:
                raise interrupt
            if self.untold or not window.is_call:
                self.executor.settle(window)
        except BaseException:
            try:
                if self._is_split:
                    self.recover(self.ledger.generations())
            finally:
                self.executor.leave(window)
            raise

    def propose(self) -> None:
        """Drafts tokens for the rows that speculate, before `compute` and outside of
        `executor.attention`. Adds generations whose source fails to `untold`."""
        drafter = self.drafter.instance
        if drafter is None:
            return
        num_rows = self.scheduler.queue.num_rows
        # a drafter locks only the model that it runs: two models may be each other's assistants
        for generation, draft in drafter.propose(self.executor.num_embeddings, num_rows):
            if isinstance(draft, Exception):
                self._fail(generation, draft)
            else:
                generation.take_draft(draft)

    def compute(self) -> Ready:
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
                plan, logits = self._compute()
                self.ledger.deliver(plan, logits, ready)
            self._progress.note(plan, bool(ready or self.untold), self)
            return ready
        except BaseException:
            if self._is_split:
                self.recover(generation for generation, _ in ready)
            raise

    def sample(
        self, ready: Ready, window: Window, fetch: Fetch | None = None
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
                        result = unknown_token(result, self.executor.num_embeddings) or result
                    applied = generation
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
                        self.untold.append(generation)
                    generation.is_sampling = False
            self._repeat(repeated)
        except BaseException as cause:
            self._end_lost(ready, repeated, applied, cause, bool(results))
            raise
        finally:
            self.executor.is_unchecked |= runs_callers_code
            if lets_code_run:
                self.executor.doubt_model()
        return interrupt

    def _compute(self) -> tuple[StepPlan, Tensor | None]:
        """Returns the scheduled step and its logits; `None` if there was nothing to compute or the
        forward failed. Holds the executor's lock."""
        with self.executor.runner.ordered():
            self.executor.check_model()
            self.memory.free_abandoned()
            with self.memory.lock:
                # no other thread changes tables until their pending copies are made
                if self.ledger.outgrown:
                    self._end_outgrown()
                try:
                    plan = self.scheduler.schedule()
                except NeverFits as error:  # the requests behind it go on
                    for generation in self.ledger.generations_of([error.request]):
                        self._fail(generation, error)
                    return StepPlan.of([]), None
                except OutOfBlocksError:
                    self._is_split = False
                    raise
                self.blocks.flush_copies()
                self.memory.note_peak()
            # a prefix cache hit may have taken the model's fingerprint
            self.executor.notice_model()
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
                self._is_split = False
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
        """Ends the generations to which a forward's error belongs; of several together, the next
        steps find out which. `num_unsized`: groups whose blocks had no known size before it."""
        cause: BaseException = error
        if isinstance(error, RowsError) and error.cause is not None:
            cause = error.cause
        if isinstance(cause, OutOfBlocksError) and self.blocks.num_unsized < num_unsized:
            # the forward showed the blocks' true size, so that fewer fit: the step is repeated
            return
        failed = self.ledger.generations_of(sequence.request for sequence in plan.sequences)
        wholes = list(dict.fromkeys(generation.whole or generation for generation in failed))
        if isinstance(error, RowsError):
            failed = [
                generation for generation in failed if any(map(error.concerns, generation.requests))
            ]
        elif len(wholes) > 1:
            self.scheduler.queue.suspects.halve([whole.requests for whole in wholes])
            logger.debug(
                "a forward for %d requests failed, its halves are computed: %s",
                len(wholes),
                error,
            )
            return
        for generation in failed:
            self._fail(generation, cause)

    def _end_outgrown(self) -> None:
        """Ends generations before a forward that would read past the model's table of positions."""
        outgrown = self.ledger.outgrown
        while outgrown:
            generation, request = outgrown.popleft()
            if request.has_outgrown and not generation.is_closed:
                most = request.max_positions
                error = IndexError(
                    f"request {request.request_id!r} cannot go on: the model's table of positions"
                    f" ends after {most} of its tokens. Lower `max_new_tokens` to"
                    f" {most + 1 - request.num_prompt_tokens}, or shorten the prompt"
                )
                self._fail(generation, error)

    def undo_step(self) -> None:
        """Undoes the scheduled step: blocks are already named for tokens not computed, and states
        may have advanced."""
        with self.memory.lock:
            self.scheduler.fail_step()
            if self.executor.runner.has_states:
                # blocks are not short: no need to split rows
                self.ledger.num_preemptions += len(self.scheduler.recompute())
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
            self.scheduler.reclaim()
            self.ledger.recover()
            self.scheduler.recover(self.ledger.rows)
            self.ledger.drop_finished()
            self.executor.forget_model()
        self._is_split = self._is_recovery_due = False

    def _end_recovery(self) -> None:
        """Recovers, if an earlier exception has left that to do."""
        if self._is_recovery_due:
            self.recover()

    def _fail(self, generation: Generation, error: BaseException) -> BaseException | None:
        """Ends a generation with an error and adds it to `untold`. Returns `error` for the caller
        to raise if it is an interrupt."""
        interrupt: BaseException | None = None
        if isinstance(error, Exception) and not is_interrupt(error):
            generation.error = error
        else:
            interrupt = error
            generation.error = RuntimeError(_INTERRUPTED.format(error))
        self.drop(generation)
        self.untold.append(generation)  # another thread may read the error from now on
        return interrupt

    def _repeat(self, generations: list[Generation]) -> None:
        """Makes the next steps compute and sample these generations as if the last step had not."""
        for generation in generations:
            generation.take_back()
        if generations:
            self.recover(generations)

    def _end_lost(
        self,
        ready: Ready,
        repeated: list[Generation],
        applied: Generation | None,
        cause: BaseException,
        is_split: bool,
    ) -> None:
        """Ends generations of `ready` whose sampling `cause` interrupted, since their progress is
        unknown; those in `repeated` are sampled again, after an interrupt also all others that can
        be, but the one whose token was being `applied`. `is_split`: whether tokens were."""
        for generation in self.untold:  # they have their tokens, whether or not that was noted
            generation.is_sampling = False
        lost = [
            generation
            for generation, _ in ready
            if generation.is_sampling and generation not in self.untold
        ]
        if is_interrupt(cause):
            repeated = [g for g in lost if g.can_repeat and g is not applied]
        try:
            self._repeat(repeated)
            if is_split:
                self.recover()
        finally:
            for generation in lost:
                if generation not in repeated and generation not in self.untold:
                    self._fail(generation, RuntimeError(_INTERRUPTED.format(cause)))
