"""The loop that `PagedEngine` and `generate` share: schedule, run, sample, update."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.switch import switchable_configs, use_configs
from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.memory import PagedMemory, autocast_dtype
from ..interrupts import held, let_in
from ..locks import step_lock
from ..model.state import ModelState, read_state
from ..model.weights import WeightsGuard
from .ahead import LookAhead
from .decoding.base import SampledTokens
from .decoding.prepare import num_embeddings
from .decoding.sampler import sample_step
from .execution.adapters import AdapterError, use_adapter
from .job import Job
from .request import Request, Sequence
from .scheduling.cost import CostModel
from .scheduling.scheduler import ScheduledBatch, Scheduler

MAX_IDLE_STEPS = 8  # that neither computed nor sampled
MAX_FRUITLESS_STEPS = 10_000  # that preempted and brought no token, in a row


class EngineStalledError(RuntimeError):
    """Several steps in a row neither computed nor sampled anything. The message holds the state."""


class Runner(Protocol):
    """Computes scheduled tokens: all in one packed forward, or row by row."""

    can_capture: bool  # whether it wants to know the model's state
    num_captured_steps: int

    def begin(self, state: ModelState | None) -> None:
        """Work begins on a model in this state; `None`: its state is unknown."""

    def run(self, items: list[tuple[Sequence, int]], adapter: str | None = None) -> Tensor:
        """
        Logits `(n, vocab)` of the items whose sequence has nothing left to compute, in order. The model runs with
        `adapter` now.
        """

    def run_ahead(self, sequences: list[Sequence], token_ids: Tensor, adapter: str | None = None) -> Tensor | None:
        """
        Logits `(n, vocab)` after one more token, `(n,)` on the device, of each sequence; the tokens are not in
        `token_ids` of the sequences yet. `None` if the host is needed for that.
        """


class States(Protocol):
    """What a runner holds of sequences beside their blocks."""

    def fork(self, parent: Sequence, children: Sequences[Sequence]) -> None:
        """`children` begin as copies of `parent`."""

    def permute(self, sequences: Sequences[Sequence], parents: Sequences[int]) -> None:
        """Sequence `i` continues what `parents[i]` was."""

    def forget(self, sequences: Sequences[Sequence]) -> None:
        """What was computed for the sequences is no longer held."""


class Core:
    """
    Runs jobs on one model and one paged memory.

    Args:
        model ([`PreTrainedModel`]): Its attention must be switched to `"hf_paged"` while `step` runs.
        memory ([`PagedMemory`]): Its lock guards the tables.
        blocks ([`BlockManager`]): Whose tables the runner reads.
        runner ([`Runner`]): Computes what is scheduled.
        scheduler ([`Scheduler`]): Decides what that is.
        cost ([`CostModel`], *optional*): Is told how long prefills take.
        states ([`States`], *optional*): What the runner holds of sequences beside their blocks.
        swapper ([`BlockSwapper`], *optional*): Counts in `num_swaps` the requests whose blocks went to host memory.
        obstacle (`str`, *optional*): Why the model does not run packed.
        guard ([`WeightsGuard`], *optional*): Knows which cached blocks may be served; none where none are cached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedMemory,
        blocks: BlockManager,
        runner: Runner,
        scheduler: Scheduler,
        cost: CostModel | None,
        states: States | None = None,
        swapper: Any = None,
        obstacle: str | None = None,
        guard: WeightsGuard | None = None,
    ) -> None:
        self.model, self.memory, self.blocks = model, memory, blocks
        self.runner, self.scheduler, self.cost = runner, scheduler, cost
        self.states = states
        self._configs: list[PreTrainedConfig] | None = None  # that `attention` switches
        self.step_lock = step_lock(model)
        self.autocast: torch.dtype | None = None  # what forwards compute in: what did when the weights were checked
        self._num_embeddings = num_embeddings(model)
        self.swapper, self.obstacle, self.guard = swapper, obstacle, guard
        self._checks_weights = True
        self._num_changes = -1  # of the model, when the runner was last told of it
        self.num_steps = self.num_generated_tokens = self.num_preemptions = 0
        self.seconds = 0.0
        self.admitted: list[Request] = []  # in the last step
        self._ahead = LookAhead(memory, scheduler) if runner.can_capture else None
        self._idle_steps = self._fruitless_steps = 0
        self._awaited: list[Job] = []  # split off with their logits already there
        self._interrupted: list[Job] = []  # advanced, or ended, in a step that was not finished

    # -- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queues the job's requests. Raises `OutOfBlocksError`, with none queued, if one can never fit."""
        requests = job.requests
        for request in requests:
            request.payload = []
        for row, (request, _) in enumerate(job.rows):
            request.payload.append((job, row))
        with held(), self.memory.lock:
            for request in requests:
                self.scheduler.check_fits(request)
            for request in requests:
                self.scheduler.add(request)
            job.is_added = True

    def drop(self, job: Job) -> None:
        """Ends the job at any point; its blocks go back."""
        with held():
            for part in job.parts:
                self.drop(part)
            with self.memory.lock:
                for request, index in job.rows if job.is_added and not job.parts else ():
                    alone = all(other is job or other.is_closed for other, _ in request.payload)
                    if alone:
                        self._finish(request)
                    elif len(request.sequences) > index:
                        self._finish_sequence(request.sequences[index])
                for blocks, _ in job.kept.values():
                    self.blocks.free(blocks)
            job.held.clear()
            job.kept.clear()
            job.is_closed = True

    def split(self, job: Job) -> None:
        """From here on every row of the job advances by itself."""
        for row, decoding in enumerate(job.decoding.split()):
            part = Job(decoding, [job.rows[row]], job.keep_blocks)
            part.is_added = True
            part.state = job
            request, index = job.rows[row]
            request.payload[index] = (part, 0)
            if row in job.kept:
                part.kept[0] = job.kept[row]
            if decoding.is_done:
                part.is_closed = True
            elif row in job.held:
                part.held[0] = job.held[row]
                self._awaited.append(part)
            job.parts.append(part)
        job.kept, job.held = {}, {}

    def begin(self, check_weights: bool = True) -> None:
        """
        Called while nothing is in flight; forwards from now on compute under the autocast of this moment, whichever
        thread takes the steps. Without `check_weights` neither the prefix cache nor graphs are used.
        """
        self.autocast = autocast_dtype(self.model.device)
        self._num_embeddings = num_embeddings(self.model)
        self._checks_weights = check_weights
        if self.guard is not None:
            self.guard.begin(check_weights, self.autocast)
        self._forget_model()

    def open_window(self) -> None:
        """
        Called before the first step of a call, or before each of an engine that is stepped: other code may have changed
        the model since. Forgets the prefix cache if it was computed with other weights, as far as a quick look tells,
        and graphs that were recorded of another model.
        """
        with held(), self.step_lock:
            if self.guard is not None:
                self.guard.open()
            self._notice_model()

    def settle(self, is_call: bool) -> None:
        """
        Called before control goes back to other code, and after `open_window`: what was computed since gets the
        fingerprint of the weights that computed it. A call (`is_call`) may do so once its first token is out.
        """
        if self.guard is not None:
            with held(), self.step_lock:
                self.guard.settle(is_call)

    def attention(self) -> AbstractContextManager[None]:
        """
        Within it the model's attention is `"hf_paged"`: around the steps of an engine, after `open_window`. `generate`
        has made its own.
        """
        if self._configs is None:
            self._configs = switchable_configs(self.model.modules())
        return use_configs(self._configs)

    def abandon(self) -> None:
        """Called instead of `settle` after a failure."""
        if self.guard is not None:
            self.guard.abandon()

    def rest(self) -> None:
        """Called when nothing is in flight any more."""
        if self.guard is not None:
            self.guard.rest()

    def change_weights(self, recompute: bool) -> None:
        """
        Called between steps when the weights are others from here on: nothing that is cached is served any more, and
        no block of an unfinished request. With `recompute` these compute their keys and values again.
        """
        with held(), self.step_lock:
            if self.guard is not None:
                self.guard.change()
            self._forget_model()
            if recompute:
                with self.memory.lock:
                    stopped = self.scheduler.recompute()
                self._loosen(stopped)

    def _forget_model(self) -> None:
        """
        Drops the step launched ahead. No graph is used before the model's state has been read again, and its modules
        may have other configs.
        """
        self._num_changes, self._configs = -1, None
        if self._ahead is not None:
            self._ahead.clear()
        self.runner.begin(None)

    def _notice_model(self) -> None:
        """After a look at the model: if it is another, what was recorded or launched ahead of it goes."""
        num_changes = 0 if self.guard is None else self.guard.num_changes
        if num_changes != self._num_changes:
            self._forget_model()
            self._num_changes = num_changes
            if self._checks_weights and self.runner.can_capture:
                self.runner.begin(read_state(self.model))

    def compute(self, targets: list[tuple[Sequence, int]]) -> None:
        """
        Fills the K and V of each sequence up to its target; returns no logits. Raises `OutOfBlocksError`.
        """
        budget = self.scheduler.max_num_batched_tokens
        pending = list(targets)
        while pending:
            items: list[tuple[Sequence, int]] = []
            left = budget
            with held(), self.step_lock:
                with self.memory.lock:
                    while pending and left:
                        sequence, target = pending[-1]
                        count = min(left, target - sequence.num_computed_tokens)
                        if not self.blocks.append(sequence.blocks, count):
                            raise OutOfBlocksError(
                                f"needs {self.blocks.num_needed(sequence.blocks, count)} blocks for the cache that is "
                                f"returned, {self.blocks.num_free} are free: raise `num_blocks`"
                            )
                        sequence.num_computed_tokens += count
                        items.append((sequence, count))
                        left -= count
                        if sequence.num_computed_tokens == target:
                            pending.pop()
                    self.blocks.flush_copies()
                    self.memory.note_peak()
                with self._autocast(), let_in():
                    self.runner.run(sorted(items, key=lambda item: item[1] != 1))

    # -- one step -------------------------------------------------------------------------------------------------

    @property
    def num_swaps(self) -> int:
        """Requests whose blocks went to host memory."""
        return self.swapper.num_swaps if self.swapper is not None else 0

    @property
    def num_captured_steps(self) -> int:
        """Forwards that were replays of a graph."""
        return self.runner.num_captured_steps

    def step(self) -> list[Job]:
        """
        Schedules, computes and samples once; returns the jobs that advanced or failed. Interrupts reach the forward and
        callers' own code: the step then never happened, or the request whose code it is ends.

        Raises:
            OutOfBlocksError: if others hold the blocks that every request needs to go on.
            EngineStalledError: if several steps in a row did nothing.
        """
        with held():
            return self._step()

    def _step(self) -> list[Job]:
        if self._interrupted:  # what came of them is still to be told
            jobs, self._interrupted = self._interrupted, []
            return jobs
        start = time.perf_counter()
        with held(), self.step_lock:
            with self.memory.lock:
                batch = self.scheduler.schedule()
            try:
                with self.memory.lock:
                    self.blocks.flush_copies()
                    self.memory.note_peak()
                self._notice_model()  # a hit may have been looked into
                self.admitted = batch.admitted
                self._loosen(batch.preempted)
                logits, failed = self._run(batch)
            except BaseException:  # blocks already have the names of what was not computed
                with self.memory.lock:
                    self.scheduler.fail_step()
                raise
        advanced, interrupt = self._choose(batch, logits)
        advanced = failed + advanced
        self._idle_steps = 0 if batch.items or advanced else self._idle_steps + 1
        self._fruitless_steps = 0 if advanced or not batch.preempted else self._fruitless_steps + 1
        if self._idle_steps >= MAX_IDLE_STEPS or self._fruitless_steps >= MAX_FRUITLESS_STEPS:
            steps = max(self._idle_steps, self._fruitless_steps)
            raise EngineStalledError(f"no token for {steps} steps: {self.scheduler!r}, {self.blocks!r}")
        if self._ahead is not None and not self.scheduler.has_unfinished:
            self._ahead.clear()
        self.num_steps += 1
        self.seconds += time.perf_counter() - start
        if interrupt is not None:
            self._interrupted = advanced
            raise interrupt
        return advanced

    def _loosen(self, preempted: list[Request]) -> None:
        """Rows that need not wait for one another no longer do, once blocks are short."""
        self.num_preemptions += len(preempted)
        for request in preempted:
            if self.states is not None:
                self.states.forget(request.sequences)
            for job, _ in list(request.payload):
                if len(job.requests) > 1 and not job.parts and job.decoding.can_split:
                    self.split(job)

    def _run(self, batch: ScheduledBatch) -> tuple[Tensor | None, list[Job]]:
        """Logits of the batch, or the jobs that its failure ended."""
        if not batch.items:
            return None, []
        start = time.perf_counter()
        try:
            with self._autocast():
                logits = self._logits(batch.items)
        except BaseException as error:
            with self.memory.lock:
                self.scheduler.fail_step()
            if not isinstance(error, Exception):
                raise  # interrupted: the step can be taken again
            jobs = self._jobs(batch)
            if isinstance(error, AdapterError):  # the others take the step again
                jobs = [job for job in jobs if _adapter(job.requests[0]) == error.adapter]
            for job in jobs:
                self.drop(job)
                job.error = error
            return None, jobs
        num_tokens = sum(count for _, count in batch.items)
        if num_tokens > len(batch.items) and self.cost is not None:
            self.cost.observe_prefill(num_tokens, time.perf_counter() - start)
        return logits, []

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None and autocast_dtype(self.model.device) is None:
            return nullcontext()  # entering one clears its cache of weights: not for nothing in every step
        return torch.autocast(self.model.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def _run_ahead(self, sequences: list[Sequence], token_ids: Tensor) -> Tensor | None:
        names = {_adapter(sequence.request) for sequence in sequences}
        if len(names) > 1:
            return None
        (only,) = names
        known = token_ids.clamp(0, self._num_embeddings - 1)  # what was chosen is checked when the host has it
        with self.step_lock, self._autocast(), use_adapter(self.model, only):
            return self.runner.run_ahead(sequences, known, only)

    def _logits(self, items: list[tuple[Sequence, int]]) -> Tensor:
        """Of what was launched ahead, then of the rest."""
        ahead, count = self._ahead.take(items) if self._ahead is not None else (None, 0)
        if ahead is None:
            return self._run_by_adapter(items)
        return torch.cat([ahead, self._run_by_adapter(items[count:])]) if count < len(items) else ahead

    def _run_by_adapter(self, items: list[tuple[Sequence, int]]) -> Tensor:
        names = {_adapter(sequence.request) for sequence, _ in items}
        if len(names) == 1:
            (only,) = names
            with use_adapter(self.model, only), let_in():
                return self.runner.run(items, only)
        found: dict[int, Tensor] = {}
        for name in sorted(names, key=str):
            places = [i for i, (sequence, _) in enumerate(items) if _adapter(sequence.request) == name]
            with use_adapter(self.model, name), let_in():
                logits = self.runner.run([items[i] for i in places], name)
            ends = [i for i in places if not items[i][0].num_to_compute]
            found.update(zip(ends, logits))
        return torch.stack([found[i] for i in sorted(found)]) if found else logits  # no sequence got to its end

    @staticmethod
    def _jobs(batch: ScheduledBatch) -> list[Job]:
        return list(dict.fromkeys(job for sequence, _ in batch.items for job, _ in sequence.request.payload))

    # -- logits to decodings --------------------------------------------------------------------------------------

    def _deliver(self, batch: ScheduledBatch, logits: Tensor | None) -> list[tuple[Job, Tensor]]:
        """The jobs all of whose open rows have their logits now, with those logits in the order of the rows."""
        found: dict[Job, dict[int, int]] = {}
        place = 0
        for sequence, _ in batch.items if logits is not None else ():
            if sequence.num_computed_tokens != len(sequence.token_ids):
                continue
            request = sequence.request
            if len(request.sequences) < len(request.payload):  # the prompt, computed once for all its rows
                with self.memory.lock:
                    self.scheduler.fork(request, len(request.payload))
                if self.states is not None:
                    self.states.fork(request.sequences[0], request.sequences[1:])
                for job, row in request.payload:
                    found.setdefault(job, {})[row] = place
            else:
                job, row = request.payload[sequence.index]
                found.setdefault(job, {})[row] = place
            place += 1
        ready: list[tuple[Job, Tensor]] = []
        for job in self._awaited:
            ready.append((job, torch.stack([job.held.pop(row) for row in job.decoding.open_rows])))
        self._awaited = []
        for job, places in found.items():
            assert logits is not None
            rows = job.decoding.open_rows
            if job.is_closed:
                continue
            if not job.held and len(places) == len(rows):
                ready.append((job, _take(logits, [places[row] for row in rows])))
                continue
            for row, at in places.items():
                job.held.setdefault(row, logits[at].clone())
            if len(job.held) == len(rows):
                ready.append((job, torch.stack([job.held[row] for row in rows])))
                job.held = {}
        return ready

    def _choose(self, batch: ScheduledBatch, logits: Tensor | None) -> tuple[list[Job], BaseException | None]:
        """The next tokens of all jobs that have their logits; and what interrupted a caller's own code meanwhile."""
        ready: list[tuple[Job, Tensor]] | None = None
        settled: list[Job] = []
        try:
            ready = self._deliver(batch, logits)
            interrupt = self._advance(ready, settled)
        except BaseException as cause:  # out of memory, say: how far those that are not settled came is not known
            if ready is not None:
                jobs = [job for job, _ in ready]
            else:
                answered = [sequence.request for sequence, _ in batch.items if not sequence.num_to_compute]
                jobs = list(dict.fromkeys(job for request in answered for job, _ in request.payload))
            for job in jobs:
                if job not in settled:
                    self.drop(job)
                    job.error = RuntimeError(f"interrupted by {cause!r} while its token was chosen")
            self._interrupted = jobs
            raise
        return settled, interrupt

    def _advance(self, ready: list[tuple[Job, Tensor]], settled: list[Job]) -> BaseException | None:
        fetch = self._ahead.fetch(ready, self._run_ahead) if self._ahead is not None else None
        results = sample_step([(job.decoding, logits) for job, logits in ready], fetch) if ready else []
        interrupt: BaseException | None = None
        for (job, _), result in zip(ready, results):
            error = result if isinstance(result, BaseException) else self._unknown_token(result)
            if error is not None:
                self.drop(job)
                if not isinstance(error, Exception):
                    interrupt, error = error, RuntimeError(f"interrupted by {error!r} while its token was chosen")
                job.error = error
            else:
                job.new_tokens = {} if result.parents is not None else {row: result.tokens[row] for row in result.rows}
                with self.memory.lock:
                    self._apply(job, result)
            settled.append(job)
        return interrupt

    def _unknown_token(self, advance: SampledTokens) -> Exception | None:
        """An error if the next forward would get an id that has no embedding: a caller's own code chose it."""
        for row in advance.rows:
            token = advance.tokens[row]
            if not 0 <= token < self._num_embeddings and row not in advance.finished:
                return IndexError(  # as the embedding raises
                    f"token id {token} was chosen, but ids from 0 to {self._num_embeddings - 1} have an embedding: a "
                    "logits processor widened the scores, or a stopping criterion wrote the id"
                )
        return None

    def _apply(self, job: Job, advance: Any) -> None:
        """Gives the sequences their new tokens."""
        scheduler, finished = self.scheduler, set(advance.finished)
        if advance.parents is not None:
            for request in job.requests:
                if request.is_finished:
                    continue
                first = request.payload[0][1]
                rows = range(first, first + len(request.payload))
                parents = [advance.parents[row] - first for row in rows]
                if self.states is not None:
                    self.states.permute(request.sequences, parents)
                scheduler.permute(request, parents, [advance.tokens[row] for row in rows])
                self.num_generated_tokens += len(rows)
                if not job.decoding.is_done and all(row in finished for row in rows):
                    self._finish(request)
        else:
            for row in advance.rows:
                request, index = job.rows[row]
                scheduler.append_token(request.sequences[index], advance.tokens[row])
                self.num_generated_tokens += 1
                if row in finished:
                    self._end_row(job, row)
        if job.decoding.is_done:
            self._close(job)

    def _end_row(self, job: Job, row: int) -> None:
        request, index = job.rows[row]
        if job.keep_blocks:
            sequence = request.sequences[index]
            self.scheduler.forget_swapped(request)  # blocks on the host cannot be shared
            job.kept[row] = (self.blocks.fork(sequence.blocks), sequence.num_computed_tokens)
        self._finish_sequence(request.sequences[index])

    def _finish(self, request: Request) -> None:
        if self.states is not None:
            self.states.forget(request.sequences)
        self.scheduler.finish(request)

    def _finish_sequence(self, sequence: Sequence) -> None:
        if self.states is not None:
            self.states.forget([sequence])
        self.scheduler.finish_sequence(sequence)

    def _close(self, job: Job) -> None:
        for row, (request, _) in enumerate(job.rows):
            if job.keep_blocks and row not in job.kept:
                self._end_row(job, row)
            if all(other is job or other.is_closed for other, _ in request.payload) and not request.is_finished:
                self._finish(request)
        job.is_closed = True


def _adapter(request: Request) -> str | None:
    return request.adapter


def _take(logits: Tensor, places: list[int]) -> Tensor:
    if places == list(range(places[0], places[0] + len(places))):
        return logits[places[0] : places[0] + len(places)]
    return logits[torch.tensor(places, device=logits.device)]
