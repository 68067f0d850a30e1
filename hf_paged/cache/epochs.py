"""Tracks whether a sequence's blocks were computed with the current weights. It never reads a model
(`model.weights` does) and drops no blocks."""

from __future__ import annotations

from .sequence_blocks import SequenceBlocks


class Epochs:
    """Counts epochs: the periods in which the model cannot change, also ended by drops of the whole
    cache. A sequence has the epoch in which its first token was stored."""

    def __init__(self) -> None:
        self.current = 0
        self.first_valid = 0  # blocks of earlier epochs must not be registered
        self._period = 0  # first epoch of the current period; 0: blocks of all epochs are verified

    def begin_period(self) -> None:
        """Begins a period. User code may have changed the model since the last one, so that earlier
        blocks need verification."""
        self.current += 1
        self._period = self.current

    @property
    def are_verified(self) -> bool:
        return not self._period

    def verify(self) -> None:
        """Marks all registered blocks as computed with the current model."""
        self._period = 0

    def needs_verification(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence holds registered blocks from before this period, in which `verify`
        has not been called."""
        return blocks.num_registered > 0 and blocks.epoch < self._period

    def is_outdated(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence stored tokens before the model changed, or before the whole cache
        was dropped."""
        return blocks.epoch < self.first_valid

    def drop_before_period(self) -> int:
        """Drops earlier periods, since the model has changed: returns the first epoch whose blocks
        stay."""
        self.first_valid = max(self.first_valid, self._period)
        return self._period

    def drop(self) -> None:
        """Drops the blocks of all epochs so far."""
        self.current += 1
        self.first_valid = self.current
