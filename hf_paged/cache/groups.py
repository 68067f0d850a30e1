"""Specs of layer groups: which part of a sequence a group's layers keep. They hold no tensors and
no sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

UNBOUNDED = 1 << 40  # block size of blocks that hold a sequence of any length


@dataclass(frozen=True)
class GroupSpec:
    """Attention over all tokens or a sliding window. Layers with equal specs share block tables.
    Specs of a subclass, for layers that store something else or keep other tokens, form separate
    groups."""

    kind: str = "self"  # name of the cache, if a model has several; "cross": cross attention
    # sliding window in tokens, including the current one; older blocks are freed
    window: int | None = None

    @property
    def is_counted(self) -> bool:
        """Whether the group's blocks take memory and count toward `num_blocks`."""
        return True

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        """Returns the maximum number of counted blocks that tokens `[first, end)` occupy at once,
        besides the `num_held` blocks of earlier tokens, if up to `chunk` tokens are appended at a
        time. `first` must be the first token of a block."""
        end_block = -(-end // block_size)
        span = end_block - first // block_size
        if self.window is not None:  # the oldest visible token may be the last of its block
            num_visible = (self.window + chunk - 3 + block_size) // block_size + 1
            span = min(span, num_visible - num_held)
        return max(0, span)

    def first_visible(self, length: int) -> int:
        """Returns the first position that the query at position `length` sees: as in transformers,
        the window includes the query."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1)

    @property
    def prefix_window(self) -> int | None:
        """Number of tokens that the first query after a cached prefix sees, including its own
        token; `None`: all."""
        return self.window

    @property
    def label(self) -> tuple[str, int | None]:
        """The kind and the window, which identify the group in reports."""
        return self.kind, self.window


FULL_ATTENTION = GroupSpec()


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """States of linear attention and convolutions: each sequence has one slot, which is a block for
    any number of tokens. A snapshot is a state that the prefix cache keeps, in a slot that no
    sequence writes to."""

    kind: str = "states"
    is_empty: bool = False  # the model has no states: the slot only identifies the sequence

    @property
    def is_counted(self) -> bool:
        return not self.is_empty

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        if self.is_empty:
            return 0
        span = super().num_spanned(first, end, chunk, num_held, block_size)
        return max(0, span - num_held)

    @property
    def prefix_window(self) -> int | None:
        """2, so that the snapshot after the previous token is visible; 1 if the model has no
        states, so that no snapshot is needed."""
        return 1 if self.is_empty else 2


def group_label(key: Hashable) -> str:
    """Returns the name of a layer group for messages. `key`: a `GroupSpec.label`, or only the
    window if the kind is "self"."""
    kind, window = key if isinstance(key, tuple) else ("self", key)
    if kind == "cross":
        return "cross attention"
    if kind == "states":
        return "states"
    if window is None:
        return "full attention"
    return f"window of {window:,} tokens"
