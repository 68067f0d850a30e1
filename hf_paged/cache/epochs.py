"""Whether the blocks of a sequence were computed by the model as it is now, or may have been by an
earlier one. It never looks at a model (`model.weights` does), nor drops a block."""

from __future__ import annotations

from .sequence_blocks import SequenceBlocks


class Epochs:
    """Numbers the times between changes of a model (windows) and drops of all that is cached. A
    sequence has the epoch in which its first token was stored."""

    def __init__(self) -> None:
        self.current = 0
        self.dropped = 0  # blocks of earlier epochs must not be registered
        self._period = 0  # first epoch of the open window; 0: blocks of all epochs are vouched for

    def begin_period(self) -> None:
        """Opens a window, since others may have changed the model: blocks computed before it need
        vouching for."""
        self.current += 1
        self._period = self.current

    @property
    def are_verified(self) -> bool:
        return not self._period

    def verify(self) -> None:
        """Marks all registered blocks as computed with the current model."""
        self._period = 0

    def needs_verification(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence holds registered blocks from before this window, and `vouch` was not
        called in it."""
        return blocks.num_registered > 0 and blocks.epoch < self._period

    def is_outdated(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence has stored tokens before the model changed, or before all that is
        cached was dropped."""
        return blocks.epoch < self.dropped

    def drop_before_period(self) -> int:
        """The model has changed: returns the first epoch whose blocks are not dropped."""
        self.dropped = max(self.dropped, self._period)
        return self._period

    def drop(self) -> None:
        """All blocks of now and before are dropped."""
        self.current += 1
        self.dropped = self.current
