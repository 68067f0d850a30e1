"""Counts the steps for which there was no recording of their size, and decides from these counts
when to record one. `graphs.py` records it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

from .graph_keys import GraphKey
from .recorders import RecordedStep

# steps without a graph of their size before one is recorded: a recording takes about as long as
# three steps (an estimate, not measured)
MIN_MISSES = 3
# the same for steps whose context or inputs are `is_fixed`. Their recording is useless once a
# context with other ranges, or media of other sizes, follow. So about as many steps must come first
# as the recording needs replays to pay for itself (`MIN_REPLAYS`).
MIN_FIXED_MISSES = 64
# replays that save as much time as a recording and its check take
MIN_REPLAYS = 64
# maximum number of times that `MIN_MISSES` is doubled: after 768 misses, a recording that never
# pays costs little
MAX_DOUBLINGS = 8
MAX_COUNTS = 4096  # maximum number of counted keys, since media of each new size add keys


class Misses:
    """Counts of one model's misses (steps without a recording of their size), by key and by
    `GraphKey.without_widths`.

    Each time that the model changes before its recordings have paid for themselves (`MIN_REPLAYS`),
    the number of misses before the next recording doubles, until a recording pays."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()  # negative after memory ran out
        self._num_out_of_memory = 0  # recordings that ran out of memory since the last success
        self._num_unpaid = 0  # times that unpaid recordings were dropped since one last paid

    def add(self, key: GraphKey) -> None:
        if len(self._counts) > MAX_COUNTS:
            self._counts.clear()
        self._counts.update((key, key.without_widths))

    def is_due(self, key: GraphKey, is_fixed: bool, has_larger: bool) -> bool:
        """Whether to record a step of this key. `is_fixed`: that of its context or inputs;
        `has_larger`: whether a larger recording can serve it."""
        min_misses = MIN_MISSES << min(self._num_unpaid, MAX_DOUBLINGS)
        if is_fixed:
            min_misses = max(min_misses, MIN_FIXED_MISSES)
        is_due = self._counts[key] >= min_misses
        return is_due or (not has_larger and self._counts[key.without_widths] >= min_misses)

    def note_recorded(self) -> None:
        self._num_out_of_memory = 0

    def note_paid(self) -> None:
        """Called when a recording has been replayed `MIN_REPLAYS` times."""
        self._num_unpaid = 0

    def restart(self, dropped: Collection[RecordedStep]) -> None:
        """Called after the model has changed, with the recordings that are dropped for that reason.
        Sets all counts to 0, so that a model that changes often is recorded less often."""
        self._counts.clear()
        if any(step.num_replays < MIN_REPLAYS for step in dropped):
            self._num_unpaid += 1

    def forget(self, key: GraphKey) -> None:
        """Called after the recording of this key was evicted: sets its counts to 0, so that it is
        not recorded again at once."""
        self._counts[key] = self._counts[key.without_widths] = 0

    def delay(self, key: GraphKey) -> None:
        """Called after a recording of this key ran out of memory: delays the next attempt."""
        self._num_out_of_memory += 1
        num_delayed = MIN_MISSES << self._num_out_of_memory
        self._counts[key] = self._counts[key.without_widths] = -num_delayed
