"""Overlapping `generate` calls: `SharedLoop` runs the calls of several threads on a model in one
`StepLoop`. The calls share forwards, and a caller's code runs in the caller's thread. This module
is one of hf_paged's optional parts (`rooms.py`), and imports none of the others."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import forks
from .batching.call_loop import POLL_SECONDS, CallLoop
from .batching.decoding.base import Fetch
from .batching.execution.executor import StableSpan
from .batching.generation import Generation
from .batching.ledger import Ready
from .batching.loop import StepLoop
from .cache.block_pool import OutOfBlocksError
from .cache.memory import PagedMemory, autocast_dtype
from .cache.waits import Shortage
from .generation.call import starting_calls
from .generation.candidate import Candidate
from .interrupts import num_modes, restoring
from .model.forwards import compute_device
from .threads import step_lock, wait

# bounds, in seconds, on how long a step waits for callers that are still sampling or starting
MIN_PATIENCE, MAX_PATIENCE = 0.002, 0.05


@dataclass(eq=False)
class Caller:
    """A `generate` call in the loop."""

    generation: Generation
    wake: threading.Condition  # notified when its thread has logits, an error or a step to take
    thread_id: int = field(default_factory=threading.get_ident)
    ready: Ready = field(default_factory=list)  # logits that its thread has not taken yet
    sampling: Ready = field(default_factory=list)  # logits that its thread took last
    error: Exception | None = None  # the error that ended its generation
    # when its logits were ready or, later, taken (`time.perf_counter`); `None` while it waits for
    # them
    sampling_since: float | None = None
    is_late: bool = False  # whether its last sampling took longer than a step waits for it
    has_committed: bool = False  # whether its thread has sampled, and called `Executor.commit`
    has_ended: bool = False  # whether its generation is done: its thread waits for no more logits

    def take(self) -> Ready:
        """Called in its thread: takes the logits that are ready, to sample them."""
        self.sampling, self.ready, self.sampling_since = self.ready, [], time.perf_counter()
        return self.sampling

    def end_sampling(self, now: float, patience: float) -> None:
        """Called in its thread at the time `now`, once it has sampled the logits that it took last.
        Sets `is_late` if that took more than `patience` seconds."""
        if self.sampling_since is not None:
            self.is_late = now - self.sampling_since > patience
            self.has_committed = True  # `CallLoop.run` calls `Executor.commit` after sampling
        self.sampling, self.sampling_since = [], None

    def fail(self, error: Exception | None) -> None:
        """Records an error of its generation, unless there already is one."""
        self.error = self.error or error

    def end_step(self, ready: Ready) -> None:
        """Called at the end of each step: notes whether its generation has ended, keeps the logits
        `ready` for its thread, and wakes the thread unless it must wait for another step."""
        self.is_late |= self.sampling_since is not None
        if ready:
            self.ready += ready
            self.sampling_since = self.sampling_since or time.perf_counter()
        self.has_ended = self.generation.is_done
        if self.ready or self.has_ended or self.error is not None:
            self.wake.notify()


class SharedLoop(CallLoop):
    """Iteration-level scheduling (Orca, OSDI 2022) over callers. While no step is in progress, the
    thread of a caller that waits for logits takes a step for all callers. If sampling runs none of
    a caller's code, this thread also samples for that caller, so that the caller's thread need not
    wake up. A caller's first token, and all tokens of other callers, are sampled in the caller's
    thread, without a lock, as its processors, criteria and streamers may be slow. A step waits
    briefly for callers that were not late the last time. Before it computes prompts, it also waits
    for calls that have just started."""

    def __init__(self, loop: StepLoop, is_private: bool) -> None:
        super().__init__(loop)
        self._is_private = is_private  # whether no other call can join
        self.users = set[object]()  # one object per open `call_loop` context
        self._lock = forks.rlock()
        self._callers: dict[Generation, Caller] = {}
        self.stepper: Caller | None = None  # the caller whose thread is taking a step
        # generations to drop after the current step, which may write to their blocks
        self._deferred_drops: list[Generation] = []
        # how long, in seconds, a step waits for callers that are still sampling and, counted from
        # the end of the last step, for new calls; equal to the duration of the last step, between
        # `MIN_PATIENCE` and `MAX_PATIENCE`
        self._patience = MAX_PATIENCE
        # when the last step began and ended; at first, times just before the loop was made
        self._last_end = time.perf_counter()
        self._last_start = self._last_end - MAX_PATIENCE
        self._shortage: Shortage | None = None  # set while steps fail because blocks are too few
        self._retry_at = 0.0  # earliest time of the next step, in seconds of `time.perf_counter`

    def _add(self, generation: Generation) -> None:
        with self._lock:
            self.loop.add(generation)
            thread_id = threading.get_ident()
            calls_of_thread = [call for call in list(starting_calls) if call.thread == thread_id]
            starting_calls.difference_update(calls_of_thread)
            wake = threading.Condition(self._lock)
            self._callers[generation] = Caller(generation, wake)

    def _guard_fetch(self, generation: Generation, run_ahead: Fetch) -> Fetch:
        return functools.partial(self._fetch, self._callers[generation], run_ahead)

    def _raise_error(self, generation: Generation) -> None:
        with self._lock:
            self._report_errors()
        error = self._callers[generation].error
        if error is not None:
            raise error

    def _report_errors(self) -> None:
        """Passes the errors of failed generations to their callers."""
        while self.loop.unreported:
            generation = self.loop.unreported.popleft()
            caller = self._callers.get(generation.parent or generation)
            if caller is not None:  # `None`: it has left
                caller.fail(generation.error)

    def _fetch(self, caller: Caller, run_ahead: Fetch, tokens: Tensor) -> list[int]:
        """Copies tokens to the host. If this caller is the only one and no step is in progress,
        `run_ahead` copies them, and meanwhile launches the next step."""
        with self._lock:
            is_alone = len(self._callers) == 1 and self.stepper is None
            if is_alone:
                self.stepper = caller
        if not is_alone:  # without the lock: on a GPU, the copy waits for work launched before it
            host_tokens: list[int] = tokens.tolist()
            return host_tokens
        try:
            return run_ahead(tokens)
        finally:
            self._end_step([])

    def _wait_for_logits(self, generation: Generation) -> Ready:
        """Waits until the generation or parts of it have logits, and returns these; an empty list
        if the generation has ended. Takes steps if no other thread does. Raises the error that
        ended the generation."""
        now = time.perf_counter()
        with self._lock:
            caller = self._callers[generation]
            caller.end_sampling(now, self._patience)
        while True:
            with self._lock:
                if caller.error is not None:
                    raise caller.error
                if caller.ready:
                    return caller.take()
                if caller.has_ended:
                    return []
                delay = self._seconds_until_step()
                should_step = self.stepper is None and delay <= 0
                if should_step:
                    self.stepper = caller
                else:
                    seconds = min(delay, POLL_SECONDS) if delay > 0 else POLL_SECONDS
                    wait(caller.wake, self._lock, seconds)
            if should_step:
                self._step()

    def _seconds_until_step(self) -> float:
        """Returns how many seconds the next step still waits for callers that are sampling, for
        calls that are starting, or for blocks; zero or less if the step is due."""
        start_times = [
            caller.sampling_since
            for caller in self._callers.values()
            if caller.sampling_since and not caller.is_late
        ]
        if self._awaits_prompts():
            start_times.append(self._last_end)
        due_at = max(self._retry_at, max(start_times, default=0.0) + self._patience)
        return due_at - time.perf_counter()

    def _awaits_prompts(self) -> bool:
        """Whether the next step computes prompts of callers, and other threads have called
        `generate` of the same model since the last step began: one step for all prompts takes less
        time than several."""
        callers = list(self._callers.values())
        if self._is_private or self._shortage is not None:
            return False
        if all(caller.has_committed or caller.sampling_since is not None for caller in callers):
            return False
        threads = {caller.thread_id for caller in callers}
        model = self.loop.executor.model
        return any(
            call.model is model and call.started_at > self._last_start
            for call in list(starting_calls)
            if call.thread not in threads
        )

    def is_progressing(self, thread: int) -> bool:
        """Like `Holder.is_progressing`, for the callers of the loop. A loop that lacks blocks makes
        no progress: its requests are preempted, and hold no blocks."""
        stepper = self.stepper
        callers = [caller for caller in list(self._callers.values()) if caller.thread_id != thread]
        if any(caller.sampling_since is not None for caller in callers):
            return True
        if stepper is not None and stepper.thread_id == thread:
            # the thread that lacks blocks is taking this loop's step, which thus cannot progress
            return False
        return bool(callers) and (stepper is not None or self._shortage is None)

    def _step(self) -> None:
        """Takes a step for all callers. If there are too few blocks and waiting cannot help, ends
        one generation with the error: the first that waits for logits and still holds blocks of its
        ended rows or, if there is none, the generation whose request would be admitted next. Raises
        an interrupt that stopped sampling."""
        start = self._last_start = time.perf_counter()
        ready: Ready = []
        interrupt: BaseException | None = None
        try:
            self.loop.propose()
            with self.loop.executor.attention():
                ready = self.loop.compute()
            self._shortage, self._retry_at = None, 0.0
        except OutOfBlocksError as error:
            # other calls or models hold the blocks that the request to admit next needs
            first_waiting = self.loop.first_waiting_generation
            if first_waiting is None:
                raise
            self._retry_at = time.perf_counter() + POLL_SECONDS
            self._shortage = shortage = self._shortage or Shortage(self.loop.memory)
            # waiting helps if calls of other threads may free blocks, or other models memory
            if not (shortage.should_retry() or shortage.should_await_other_models):
                generations_with_blocks = (
                    generation
                    for generation, caller in list(self._callers.items())
                    if caller.sampling_since is None
                    and any(part.kept_blocks for part in generation.parts or [generation])
                )
                generation = next(generations_with_blocks, first_waiting)
                generation.fail(error)
                self.loop.unreported.append(generation)
                self._shortage = None  # the ended generation's blocks go to the others
        else:
            interrupt = self._sample_for_callers(ready)
        finally:
            seconds = time.perf_counter() - start
            self._patience = min(max(MIN_PATIENCE, seconds), MAX_PATIENCE)
            self._end_step(ready)
        if interrupt is not None:
            raise interrupt

    def _sample_for_callers(self, ready: Ready) -> BaseException | None:
        """Samples those generations of `ready` whose sampling runs no code of their callers and can
        be repeated after an interrupt of this thread. Skips a lone caller. Also skips a call's
        first tokens: the call's own thread samples them, then calls `Executor.commit`. Returns an
        interrupt that stopped the sampling, as `StepLoop.sample` does; `None` if there was none."""
        with self._lock:
            if len(self._callers) < 2:
                return None
            committed_generations = {
                generation for generation, caller in self._callers.items() if caller.has_committed
            }
        entries = [
            (generation, logits)
            for generation, logits in ready
            if generation.can_repeat and (generation.parent or generation) in committed_generations
        ]
        span = StableSpan(is_call=True, is_open=True, is_committed=True)
        return self.loop.sample(entries, span) if entries else None

    def _end_step(self, ready: Ready) -> None:
        """Passes the errors and logits of a step to the callers, and ends the step. If this raises,
        `_leave` ends the step."""
        self._last_end = time.perf_counter()
        with self._lock:
            while self._deferred_drops:
                self.loop.drop(self._deferred_drops.pop())
            self._report_errors()
            ready_by_call: dict[Generation, Ready] = {}
            for generation, logits in ready:
                if generation.is_sampling:  # the others were sampled by `_sample_for_callers`
                    call = generation.parent or generation
                    ready_by_call.setdefault(call, []).append((generation, logits))
            for generation, caller in self._callers.items():
                caller.end_step(ready_by_call.get(generation, []))
            self.stepper = None
            self._wake_next_stepper()

    def _abort_step(self) -> None:
        """Ends a step that an exception left open just as the step began or ended: passes errors to
        the callers, and makes the loop recompute the logits that no caller received."""
        self.stepper = None
        delivered_generations = {
            generation
            for caller in self._callers.values()
            for generation, _ in caller.ready + caller.sampling
        }
        for generation, caller in self._callers.items():
            for part in (generation, *generation.parts):
                caller.fail(part.error)
            caller.end_step([])
        with self.loop.memory.lock:  # other callers hold it while they remove their rows
            generations = self.loop.ledger.generations()
        self.loop.recover(
            generation
            for generation in generations
            if generation.is_sampling and generation not in delivered_generations
        )

    def _wake_next_stepper(self) -> None:
        """Wakes a caller that waits for logits, so that its thread takes the next step."""
        for caller in self._callers.values():
            if caller.sampling_since is None and not caller.has_ended:
                caller.wake.notify()
                return

    def _leave(self, generation: Generation) -> None:
        """Removes a caller, and drops its generation, now or after the current step."""
        with self._lock:
            caller = self._callers.get(generation)
            try:
                if caller is not None and self.stepper is caller:
                    self._abort_step()
                if self.stepper is None or generation.is_done:
                    self.loop.drop(generation)
                else:
                    self._deferred_drops.append(generation)
                self._callers.pop(generation, None)
            finally:
                self._wake_next_stepper()

    def clean_up_after_error(self) -> None:
        """Removes this thread's callers after an error (`interrupts.register_for_cleanup`)."""
        thread_id = threading.get_ident()
        for caller in list(self._callers.values()):
            if caller.thread_id == thread_id:
                self._leave(caller.generation)

    def after_fork(self, freed: set[Any]) -> None:
        """Called in a forked child, where other threads do not exist: undoes a step of another
        thread, and drops the calls of other threads."""
        thread_id = threading.get_ident()
        if self.stepper is not None and self.stepper.thread_id != thread_id:
            self.loop.undo_step()
            self.stepper = None
        for caller in list(self._callers.values()):
            caller.wake = threading.Condition(self._lock)
            if caller.thread_id != thread_id:
                self._leave(caller.generation)


_loops_lock = forks.lock()
_loops: weakref.WeakKeyDictionary[PagedMemory, dict[Hashable, SharedLoop]] = (
    weakref.WeakKeyDictionary()
)
if hasattr(os, "register_at_fork"):  # the threads of other callers do not exist in the child
    os.register_at_fork(after_in_child=lambda: _loops.clear())
    os.register_at_fork(after_in_child=starting_calls.clear)


@restoring
def call_loop(candidate: Candidate, make_loop: Callable[[], StepLoop]) -> Iterator[SharedLoop]:
    """A context whose value is a loop on the call's memory. Calls that can share forwards, even
    across threads, get the same loop. The first of their contexts makes the loop with `make_loop`,
    and the last drops it, since the loop holds the model. The call gets a separate loop if this
    thread is already taking a step of the shared loop, or if it holds the model's lock, for which
    the other threads of the shared loop would wait."""
    memory, device = candidate.cache.memory, compute_device(candidate.model)
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    key: Hashable = (
        dataclasses.replace(candidate.paged_config, cache_salt=None, idle_release_seconds=None),
        candidate.layout,
        tuple(candidate.cache.groups),
        candidate.model.training,
        autocast_dtype(device),
        torch.is_inference_mode_enabled(),
        stream,
        # torch's function and dispatch modes belong to one thread
        threading.get_ident() if any(num_modes()) else None,
    )
    user = object()
    shared_loop = None
    try:
        with _loops_lock:
            loops = _loops.setdefault(memory, {})
            shared_loop = loops.get(key)
            # read once: another thread may change it
            stepper = None if shared_loop is None else shared_loop.stepper
            is_stepping = stepper is not None and stepper.thread_id == threading.get_ident()
            if is_stepping or step_lock(candidate.model)._is_owned():  # type: ignore[attr-defined]
                key, shared_loop = user, None
            if shared_loop is None:
                shared_loop = loops[key] = SharedLoop(make_loop(), is_private=key is user)
            if shared_loop not in memory.holders:
                memory.holders.append(shared_loop)
            shared_loop.users.add(user)
        yield shared_loop
    finally:
        with _loops_lock:
            if shared_loop is not None:
                shared_loop.users.discard(user)
                if not shared_loop.users and loops.get(key) is shared_loop:
                    del loops[key]
                if not shared_loop.users:
                    shared_loop.withdraw()
