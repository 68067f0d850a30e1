"""`CallLoop` runs one `generate` call in a separate `StepLoop`. The optional package `overlap`
extends it, so that overlapping calls share a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..cache.block_pool import OutOfBlocksError
from ..cache.waits import Holder, Shortage, claims_waiting
from .decoding.base import Fetch
from .execution.executor import StableSpan
from .generation import Generation
from .ledger import Ready
from .loop import StepLoop

# how long a waiting thread sleeps before it checks for signals or repeats a step that lacked blocks
POLL_SECONDS = 0.05

T = TypeVar("T")


class CallLoop(Holder):
    """The loop of one `generate` call, whose thread takes the steps. Calls of other threads on the
    same memory have separate loops, whose steps take turns under the model's lock. The processors,
    criteria and streamer of a call run without a lock, so they may wait for those calls. Loops
    cannot preempt each other's requests: a step that lacks blocks is repeated until other calls
    free theirs, and fails once none of these calls makes progress (`cache.waits.Shortage`)."""

    def __init__(self, loop: StepLoop) -> None:
        super().__init__(loop.memory)
        self.loop = loop
        self._generation: Generation | None = None

    def run(
        self,
        generation: Generation,
        checks_weights: bool,
        allows_replays: bool,
        finish: Callable[[StepLoop], T],
    ) -> T:
        """Runs the generation to its end and returns `finish(loop)`, which is called before the
        generation's blocks are freed. Raises the error that ended the generation, or the error of a
        step taken by this thread. `checks_weights`, `allows_replays`: for `Executor.begin`."""
        executor = self.loop.executor
        span = StableSpan(
            is_call=True,
            is_open=not (checks_weights or allows_replays),
            is_committed=not checks_weights,
        )
        try:
            with executor.lock:
                runs_user_code = generation.decoding.runs_callers_code
                executor.begin(checks_weights, False, allows_replays, runs_user_code)
            executor.open(span)
            self._add(generation)
            with claims_waiting(self.memory):
                while True:
                    ready = self._wait_for_logits(generation)
                    fetch = executor.fetch_while_running_ahead(ready)
                    if fetch is not None:
                        fetch = self._guard_fetch(generation, fetch)
                    interrupt = self.loop.sample(ready, span, fetch)
                    if interrupt is not None:
                        raise interrupt
                    self._raise_error(generation)
                    if generation.is_done:
                        return finish(self.loop)
                    executor.commit(span)
        finally:
            try:
                executor.close(span)
            finally:
                self._leave(generation)

    def _add(self, generation: Generation) -> None:
        self._generation = generation
        self.loop.add(generation)

    def _wait_for_logits(self, generation: Generation) -> Ready:
        """Takes steps until the generation or parts of it have logits, and returns both. Raises
        the error that ended the generation. Repeats a step that lacks blocks as long as calls of
        other threads may free some, or other models hold the memory; then raises
        `OutOfBlocksError`."""
        shortage: Shortage | None = None
        ready = Ready()
        while not ready:
            try:
                self.loop.propose()
                with self.loop.executor.attention():
                    ready = self.loop.compute()
            except OutOfBlocksError:
                shortage = shortage or Shortage(self.memory)
                self.is_waiting = True
                if not (shortage.should_retry() or shortage.should_await_other_models):
                    raise
                time.sleep(POLL_SECONDS)
            else:
                shortage, self.is_waiting = None, False
                self._raise_error(generation)
        return ready

    def _guard_fetch(self, generation: Generation, run_ahead: Fetch) -> Fetch:
        """Returns the function that copies the generation's tokens to the host, given `run_ahead`,
        which also launches the next step."""
        return run_ahead

    def _raise_error(self, generation: Generation) -> None:
        """Raises the error that ended the generation or a part of it, if there is one. Removes
        generations from the loop's `unreported`, up to the one with an error."""
        while self.loop.unreported:
            error = self.loop.unreported.popleft().error
            if error is not None:
                raise error

    def _leave(self, generation: Generation) -> None:
        """Drops a generation that has ended or stopped."""
        self.loop.drop(generation)
        self._generation = None

    def withdraw(self) -> None:
        """Removes this loop from the memory's holders, and drops a generation that `run` left
        behind: after an interrupt, or in a forked child that lacks the thread of `run`."""
        super().withdraw()
        if self._generation is not None:
            self.loop.undo_step()
            self._leave(self._generation)
