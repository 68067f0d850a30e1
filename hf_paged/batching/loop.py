"""`StepLoop`, the loop of `PagedEngine` and `generate`: schedule, compute, sample, update. The
scheduler chooses the rows of a step, and the decodings choose the tokens."""

from __future__ import annotations

import functools
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
from .decoding.sampler import sample_step, unknown_token_error
from .execution.executor import Executor, StableSpan
from .generation import Generation, interruption_error
from .ledger import Ledger, Ready
from .progress import Progress
from .request import RowsError
from .scheduling.queue import NeverFitsError
from .scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_RUNS_CALLERS_CODE = operator.attrgetter("runs_callers_code")
_IS_STREAMED = operator.attrgetter("is_streamed")
_LOGITS = operator.itemgetter(1)


@dataclass(eq=False, repr=False)
class StepLoop:
    """Runs generations on one model. After an exception in the middle of a step's bookkeeping, such
    as an interrupt, the loop recovers (`recover`)."""

    executor: Executor
    memory: PagedMemory  # its lock guards the block tables
    blocks: BlockManager  # manages the block tables that the runner reads
    scheduler: Scheduler
    drafter: OnDemand[Drafter]
    num_steps: int = 0
    seconds: float = 0.0  # spent in completed steps

    def __post_init__(self) -> None:
        # generations that advanced or ended and are not reported yet; callers remove them
        self.unreported: deque[Generation] = deque()
        self.ledger = Ledger(self.memory, self.scheduler)
        self._progress = Progress()
        self._is_mid_update = False  # whether an exception may leave bookkeeping half changed
        self._is_recovery_due = False  # whether the last `recover` raised

    def counts(self) -> dict[str, float]:
        """Returns the loop's counters by their names in [`EngineStats`]."""
        counts = {
            "num_generated_tokens": self.ledger.num_generated_tokens,
            "num_preemptions": self.scheduler.preemption.num_preemptions,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
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
        """Queues the generation's requests. If one of them can never fit, queues none and raises
        `OutOfBlocksError`."""
        parts = generation.parts or [generation]
        requests = generation.requests
        adapter, *other_adapters = {request.adapter for request in requests}
        if generation.decoding.may_run_model and not other_adapters and adapter is not None:
            generation.decoding.running_model = functools.partial(self.executor.using, adapter)
        try:
            for part in parts:
                is_assisted = part.assistance is not None and part.is_single and not part.is_done
                if is_assisted and self.executor.runner.supports_drafts:
                    part.attach_drafter(self.drafter())
            self._finish_recovery()
            try:
                with self.memory.lock:
                    self.scheduler.add(*requests)
                    self.ledger.add(generation)
            except OutOfBlocksError:
                raise
            except BaseException:
                for request in requests:
                    self.ledger.rows.pop(request, None)
                self.recover()
                raise
        except BaseException:
            for part in parts:
                part.detach_drafter()
            raise

    @property
    def first_waiting_generation(self) -> Generation | None:
        """The generation of the request to admit next; `None` if no waiting request may begin."""
        request = self.scheduler.queue.first_waiting
        return None if request is None else self.ledger.rows[request][0][0]

    def generations_to_fail(self, error: Exception) -> list[Generation]:
        """Returns the generations to end when a repeated step raises `error`. These are the
        generations of running requests. If no request runs, or if `error` is an `OutOfBlocksError`,
        it is instead the generation of the first waiting request that may begin, if there is
        one."""
        first = self.first_waiting_generation
        running_generations = self.ledger.generations_of(self.scheduler.queue.running)
        if first is not None and (not running_generations or isinstance(error, OutOfBlocksError)):
            return [first]
        return running_generations

    def drop(self, generation: Generation) -> None:
        """Ends a generation and frees its blocks. If an exception stops this, recovers, ends the
        generation again, and raises the exception."""
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
                blocks.free()
        generation.kept_blocks.clear()

    def handle_weight_change(self, recompute: bool) -> None:
        """Called between steps after the weights changed: invalidates the prefix cache and the
        drafter's state. With `recompute`, also drops the K/V of unfinished requests, which are then
        recomputed."""
        try:
            self._finish_recovery()
            if self.drafter.instance is not None:
                self.drafter.instance.handle_weight_change()
            with self.executor.lock:
                self.executor.handle_weight_change()
                if recompute:
                    for generation in self.ledger.generations():
                        generation.drop_logits()
                    with self.memory.lock:
                        self.ledger.split_preempted(self.scheduler.recompute())
        except BaseException:
            self.recover()
            raise

    def step(self, span: StableSpan) -> None:
        """Schedules, computes and samples once, unless `unreported` still holds generations. An
        interrupt of the forward undoes the step; an interrupt of sampling ends the generations that
        cannot repeat it. Raises interrupts, `OutOfBlocksError`, `EngineStalledError`,
        `RankLostError`, and the errors of a drafter."""
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
            if not self.ledger.rows:
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
                self.executor.close(span)
            raise

    def propose(self) -> None:
        """Drafts tokens for the rows that speculate. Called before `compute`, outside of
        `executor.attention`. Ends generations for which drafting fails, and adds them to
        `unreported`."""
        drafter = self.drafter.instance
        if drafter is None:
            return
        num_rows = self.scheduler.queue.num_rows
        # without the model's lock: since two models may be each other's assistants, a drafter may
        # hold only the lock of the model that it runs
        for generation, draft in drafter.propose(self.executor.num_embeddings, num_rows):
            if isinstance(draft, Exception):
                self._fail(generation, draft)
            else:
                generation.set_draft(draft)

    def compute(self) -> Ready:
        """Schedules and computes once. Called within `executor.attention`. Returns the generations
        whose open rows all have logits now. A generation that fails alone in a forward ends, and is
        added to `unreported`. If several generations fail together, the next steps compute them in
        halves, until each failing one is alone. Raises the errors of `step`."""
        ready = Ready()
        self._finish_recovery()
        self._is_mid_update = True
        try:
            with self.executor.lock:
                # the lock is held until the logits are delivered, so that another thread's
                # `recover`, which also takes it, cannot come in between
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
        """Samples the next tokens of generations that `compute` returned (`fetch` as in
        `sample_step`). Adds to `unreported` the generations that ended, and all others without
        `skips_reports`. Interrupted sampling is repeated in a later step; generations that cannot
        repeat it end. Returns an interrupt that stopped the sampling of one generation; raises an
        exception that stopped the sampling of all. Another thread may compute other generations
        meanwhile."""
        interrupt: BaseException | None = None
        results: list[Result] = []
        to_repeat: list[Generation] = []
        current_generation: Generation | None = None  # whose result is being applied
        decodings = [generation.decoding for generation, _ in ready]
        runs_callers_code = any(map(_RUNS_CALLERS_CODE, decodings))
        # transformers' own streamers may pass the text to another thread of the caller
        runs_foreign_code = runs_callers_code or any(map(_IS_STREAMED, decodings))
        try:
            if runs_callers_code:
                self.executor.commit(span, runs_user_code=True)
            if runs_foreign_code:
                self.executor.mark_unchecked()
            results += sample_step(list(zip(decodings, map(_LOGITS, ready))), fetch)
            # a caller's code may choose any id, and the head may be wider than the embedding
            must_check_ids = runs_callers_code or (
                bool(ready) and ready[0][1].logits.shape[-1] > self.executor.num_embeddings
            )
            with self.memory.lock:
                for (generation, _), result in zip(ready, results):
                    if must_check_ids:
                        result = unknown_token_error(result, self.executor.num_embeddings) or result
                    current_generation = generation
                    if type(result) is int:
                        self.ledger.append(generation, result)
                    elif type(result) is SampledTokens:
                        self.ledger.apply(generation, result)
                    else:
                        assert isinstance(result, BaseException)
                        if is_interrupt(result):
                            interrupt = interrupt or result
                            if generation.can_repeat:
                                to_repeat.append(generation)
                                continue
                        self._fail(generation, result)
                        continue
                    if not generation.skips_reports or generation.is_closed:
                        self.unreported.append(generation)
                    generation.is_sampling = False
            self._rewind(to_repeat)
        except BaseException as cause:
            self._fail_interrupted(ready, to_repeat, current_generation, cause, bool(results))
            raise
        finally:
            self.executor.is_unchecked |= runs_callers_code
            if runs_foreign_code:
                self.executor.mark_unchecked()
        return interrupt

    def _compute(self) -> tuple[StepPlan, Tensor | None]:
        """Schedules a step and computes it. Returns the plan and its logits, which are `None` if
        there was nothing to compute or the forward failed. The caller holds the executor's lock."""
        with self.executor.runner.ordered():
            self.executor.check_model()
            self.memory.free_abandoned()
            with self.memory.lock:
                # the lock is held until the copies are made, since other threads may change tables
                if self.ledger.overlong_requests:
                    self._end_overlong_generations()
                try:
                    plan = self.scheduler.schedule()
                except NeverFitsError as error:  # ends the request that does not fit
                    for generation in self.ledger.generations_of([error.request]):
                        self._fail(generation, error)
                    return StepPlan.of([]), None
                except OutOfBlocksError:
                    self._is_mid_update = False
                    raise
                self.blocks.flush_copies()
                self.memory.note_progress()
            # `schedule` may have fingerprinted the model, for a cached prefix, and found it changed
            self.executor.handle_model_change()
            for request in plan.admitted:
                if request.first_step_started_at is None:
                    request.start_clocks(time.time())
            if plan.preempted:
                self.ledger.split_preempted(plan.preempted)
            adapters = self.executor.adapters.instance
            if adapters is not None:
                adapters.prefetch(self.scheduler.queue.waiting)
            logits = None
            if plan.sequences:
                logits = self._run(plan)
        return plan, logits

    def _run(self, plan: StepPlan) -> Tensor | None:
        """Runs a step's forward and commits the step. If the forward fails, undoes the step. Raises
        interrupts and `RankLostError`. After any other error, calls `_handle_failure` and returns
        `None`."""
        start = time.perf_counter()
        num_unsized = self.blocks.num_unsized
        try:
            if self.memory.processes is not None:
                self.memory.processes.check(plan)
            logits = self.executor.run(plan)
        except BaseException as error:
            self.undo_step()
            if is_interrupt(error) or isinstance(error, RankLostError):
                self._is_mid_update = False  # undone already, so callers need not recover
                raise
            self._handle_failure(plan, error, num_unsized)
            return None
        seconds = time.perf_counter() - start
        with self.memory.lock:
            self.scheduler.commit(plan)
            if self.scheduler.queue.suspects:
                self.scheduler.queue.suspects.clear_computed()
        for request in plan.admitted:
            request.note_first_step(start)
        if plan.has_chunks:
            self.scheduler.preemption.cost_model.observe_prefill(plan.num_tokens, seconds)
        elif self.drafter.instance is not None:
            self.drafter.instance.note_decode_time(plan.num_tokens, seconds)
        return logits

    def _handle_failure(
        self,
        plan: StepPlan,
        error: BaseException,
        num_unsized: int,
    ) -> None:
        """Handles the error of a step's forward. A `RowsError` ends the generations that it
        concerns. Another error ends the step's only generation or, if the step has several, makes
        the next steps isolate the failing ones. `num_unsized`: number of layer groups whose bytes
        per block were unknown before the forward."""
        cause: BaseException = error
        if isinstance(error, RowsError) and error.cause is not None:
            cause = error.cause
        if isinstance(cause, OutOfBlocksError) and self.blocks.num_unsized < num_unsized:
            # only the forward showed how many bytes a block takes, and fewer blocks fit than was
            # assumed: the next step repeats this one
            return
        failed_generations = self.ledger.generations_of(
            sequence.request for sequence in plan.sequences
        )
        whole_generations = list(
            dict.fromkeys(generation.parent or generation for generation in failed_generations)
        )
        if isinstance(error, RowsError):
            failed_generations = [
                generation
                for generation in failed_generations
                if any(map(error.concerns, generation.requests))
            ]
        elif len(whole_generations) > 1:
            request_lists = [generation.requests for generation in whole_generations]
            self.scheduler.queue.suspects.halve(request_lists)
            logger.debug(
                "a forward for %d generations failed and is repeated in halves: %s",
                len(whole_generations),
                error,
            )
            return
        for generation in failed_generations:
            self._fail(generation, cause)

    def _end_overlong_generations(self) -> None:
        """Ends generations whose next forward would read past the model's table of positions."""
        overlong_requests = self.ledger.overlong_requests
        while overlong_requests:
            generation, request = overlong_requests.popleft()
            if request.exceeds_positions and not generation.is_closed:
                max_positions = request.max_computable_length
                error = IndexError(
                    f"request {request.request_id!r} cannot continue: the model's table of"
                    f" positions ends after {max_positions} of the request's tokens. Lower"
                    f" `max_new_tokens` to {max_positions + 1 - request.num_prompt_tokens}, or"
                    " shorten the prompt"
                )
                self._fail(generation, error)

    def undo_step(self) -> None:
        """Undoes a scheduled step that was not completed: the prefix index drops the blocks that
        the step should have filled. If the runner keeps states, which may have advanced, all
        requests are recomputed."""
        with self.memory.lock:
            self.scheduler.undo_step()
            if self.executor.runner.has_states:
                # without `split_preempted`, since there is no shortage of blocks
                self.scheduler.recompute()
            self.executor.forget_model()

    def recover(self, unsampled_generations: Iterable[Generation] = ()) -> None:
        """Called after an exception that may have left the bookkeeping half changed: makes pools
        and queues consistent with the unfinished requests, which are recomputed from their tokens.
        Logits of `unsampled_generations` that are ready are dropped. If this raises, the next
        call of `add`, `drop`, `handle_weight_change`, `compute` or `step` repeats it first."""
        self._is_recovery_due = True
        for generation in unsampled_generations:
            generation.is_sampling = False
        with self.executor.lock, self.memory.lock:
            self.memory.recover()
            self.scheduler.reclaim()
            self.ledger.recover()
            self.executor.forget_model()
        self._is_mid_update = self._is_recovery_due = False

    def _finish_recovery(self) -> None:
        """Repeats a `recover` that raised."""
        if self._is_recovery_due:
            self.recover()

    def _fail(self, generation: Generation, error: BaseException) -> None:
        """Ends a generation with an error, and adds the generation to `unreported`."""
        generation.fail(error)
        self.drop(generation)
        self.unreported.append(generation)  # last: another thread may now read the error

    def _rewind(self, generations: list[Generation]) -> None:
        """Undoes the last step of these generations; later steps compute and sample their tokens
        again."""
        for generation in generations:
            generation.rewind()
        if generations:
            self.recover(generations)

    def _fail_interrupted(
        self,
        ready: Ready,
        to_repeat: list[Generation],
        current_generation: Generation | None,
        cause: BaseException,
        is_mid_update: bool,
    ) -> None:
        """Handles the exception `cause`, which stopped the sampling of `ready`. Generations in
        `to_repeat` are sampled again; if `cause` is an interrupt, so are all others that can
        repeat, except `current_generation`, whose token may be half appended. The remaining
        generations end, since it is unknown whether they advanced. `is_mid_update`: whether results
        were being applied."""
        for generation in self.unreported:  # these have advanced, even if `is_sampling` is set
            generation.is_sampling = False
        stopped_generations = [generation for generation, _ in ready if generation.is_sampling]
        if is_interrupt(cause):
            to_repeat = [
                generation
                for generation in stopped_generations
                if generation.can_repeat and generation is not current_generation
            ]
        try:
            self._rewind(to_repeat)
            if is_mid_update:
                self.recover()
        finally:
            for generation in stopped_generations:
                if generation not in to_repeat:
                    self._fail(generation, interruption_error(cause))
