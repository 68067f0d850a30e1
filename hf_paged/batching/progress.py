"""Counts steps without progress, and raises an error after many in a row. Ends no request."""

from __future__ import annotations

from ..plan import StepPlan
from ..topics import Topic, TopicError

MAX_IDLE_STEPS = 8  # steps in a row that computed nothing and advanced or ended no generation
MAX_STALLED_STEPS = 10_000  # steps in a row that preempted requests and produced no token


class EngineStalledError(TopicError, RuntimeError):
    """Many steps in a row produced no token. The message shows the loop's state."""

    topic = Topic.STALLED


class Progress:
    """Counts steps in a row without progress."""

    def __init__(self) -> None:
        self._num_idle = 0
        self._num_stalled = 0

    def note(self, plan: StepPlan, has_advanced: bool, state: object) -> None:
        """Counts a step. `has_advanced`: whether a generation got all of its logits in the step, or
        ended. After many steps in a row without progress, raises `EngineStalledError` with `state`
        in its message."""
        self._num_idle += 1
        if plan.sequences or has_advanced:
            self._num_idle = 0
        self._num_stalled += 1
        if has_advanced or not plan.preempted:
            self._num_stalled = 0
        if self._num_idle < MAX_IDLE_STEPS and self._num_stalled < MAX_STALLED_STEPS:
            return
        num_steps = max(self._num_idle, self._num_stalled)
        raise EngineStalledError(f"no token for {num_steps} steps: {state}")
