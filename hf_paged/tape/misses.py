"""Counts the steps that no recording of their own size served, and decides from these counts when
one is recorded. `graphs.py` records it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

from .graph_keys import GraphKey
from .recorders import RecordedStep

# steps without a graph of their own size before one is recorded: a recording takes about as long as
# three steps (an estimate, not measured)
MIN_MISSES = 3
# the same if the context or inputs are `is_fixed`: roughly the number of replays that pay for a
# recording, which is useless once a context with other ranges, or media of other sizes, follow
MIN_FIXED_MISSES = 64
# replays that pay for a recording with its check
MIN_REPLAYS = 64
# maximum number of times that `MIN_MISSES` is doubled: after 768 misses, a recording that never
# pays costs little
MAX_DOUBLINGS = 8
MAX_COUNTS = 4096  # keys: each new form of media has its own


class Misses:
    """The misses of one model's steps: by key, and by `GraphKey.without_widths`.

    If the model changes before its recordings have paid for themselves, twice as many misses in the
    same state of the model are needed for the next recording, until one pays."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()  # negative after memory ran out
        self._num_out_of_memory = 0  # recordings that ran out of memory since the last success
        self._num_unpaid = 0  # times that unpaid recordings were dropped since one paid

    def add(self, key: GraphKey) -> None:
        if len(self._counts) > MAX_COUNTS:
            self._counts.clear()
        self._counts.update((key, key.without_widths))

    def is_due(self, key: GraphKey, is_fixed: bool, has_larger: bool) -> bool:
        """Whether to record a step of this key. `is_fixed`: whether its context or its inputs are;
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
        """Called after the model has changed, with the recordings that this drops. Counts from 0,
        so that a model that changes often is recorded less often."""
        self._counts.clear()
        if any(step.num_replays < MIN_REPLAYS for step in dropped):
            self._num_unpaid += 1

    def forget(self, key: GraphKey) -> None:
        """Called after the recording of this key was evicted, so that it is not made again at
        once."""
        self._counts[key] = self._counts[key.without_widths] = 0

    def delay(self, key: GraphKey) -> None:
        """Called after a recording of this key ran out of memory: delays the next attempt."""
        self._num_out_of_memory += 1
        num_delayed = MIN_MISSES << self._num_out_of_memory
        self._counts[key] = self._counts[key.without_widths] = -num_delayed
