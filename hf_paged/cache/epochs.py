"""Tracks whether the current weights computed a sequence's blocks. `model.weights` reads the model,
and `cache.block_manager` drops blocks."""

from __future__ import annotations

from .sequence_blocks import SequenceBlocks


class Epochs:
    """Counts epochs. A new one begins when user code may have changed the model, and when the whole
    cache is dropped. A sequence belongs to the epoch of its oldest block, which may be a cached
    one."""

    def __init__(self) -> None:
        self.current = 0
        self.first_valid = 0  # sequences of earlier epochs must not register blocks
        # first epoch of the current period; 0: blocks of all epochs are verified
        self._period_start = 0

    def begin_period(self) -> None:
        """Begins a period in which no user code runs, so that the model cannot change. User code
        may have changed it before: blocks of earlier epochs need verification."""
        self.current += 1
        self._period_start = self.current

    @property
    def are_verified(self) -> bool:
        """Whether the current model is known to have computed all registered blocks."""
        return not self._period_start

    def verify(self) -> None:
        """Marks all registered blocks as computed by the current model."""
        self._period_start = 0

    def needs_verification(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence holds registered blocks that were computed before this period and
        have not been verified in it."""
        return blocks.num_registered > 0 and blocks.epoch < self._period_start

    def is_outdated(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence has blocks from before the model changed or the whole cache was
        dropped."""
        return blocks.epoch < self.first_valid

    def drop_before_period(self) -> int:
        """Marks blocks from before this period as outdated, since the model has changed. Returns
        the period's first epoch; 0 if blocks of all epochs are verified, so that none is marked."""
        self.first_valid = max(self.first_valid, self._period_start)
        return self._period_start

    def drop(self) -> None:
        """Marks all blocks computed so far as outdated."""
        self.current += 1
        self.first_valid = self.current
