"""Tracks whether the current weights computed a sequence's blocks. `model.weights` reads the model,
and `cache.block_manager` drops blocks."""

from __future__ import annotations


class Epochs:
    """Counts epochs. A new one begins when user code may have changed the model, and when the whole
    cache is dropped. A sequence belongs to the epoch of its oldest block, which may be a cached
    one."""

    def __init__(self) -> None:
        self.current = 0
        self.first_valid = 0  # sequences of earlier epochs must not register blocks
        # first epoch of the current span (`begin_span`); 0: blocks of all epochs are verified
        self.span_start = 0

    def begin_span(self) -> None:
        """Begins a span in which no user code runs, so that the model cannot change. User code
        may have changed it before: blocks of earlier epochs need verification."""
        self.current += 1
        self.span_start = self.current

    @property
    def are_verified(self) -> bool:
        """Whether the current model is known to have computed all registered blocks."""
        return not self.span_start

    def verify(self) -> None:
        """Marks all registered blocks as computed by the current model."""
        self.span_start = 0

    def drop_before_span(self) -> int:
        """Marks blocks from before this span as outdated, since the model has changed. Sequences
        that have outdated blocks register no further blocks. Returns the span's first epoch; 0,
        with no block marked, if blocks of all epochs are verified."""
        self.first_valid = max(self.first_valid, self.span_start)
        return self.span_start

    def drop(self) -> None:
        """Marks all blocks computed so far as outdated."""
        self.current += 1
        self.first_valid = self.current
