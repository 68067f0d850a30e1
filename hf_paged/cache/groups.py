"""Specs of layer groups: which part of a sequence a group's layers keep. They hold no tensors and
no sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 1 << 40  # block size of blocks that hold a sequence of any length


@dataclass(frozen=True)
class GroupSpec:
    """Which tokens the layers of a group store: all tokens of a sequence, or a sliding window.
    Layers with equal specs share block tables. A subclass is for layers that store something else
    or keep other tokens; its specs form separate groups."""

    kind: str = "self"  # name of the cache, if a model has several; "cross": cross attention
    # sliding window in tokens, including the current one; older blocks are freed; `None`: no window
    window: int | None = None

    def make_states(self) -> Any:
        """Returns the storage of a group whose blocks are slots for states; `None` for keys and
        values."""
        return None

    @property
    def is_counted(self) -> bool:
        """Whether the group's blocks take memory and count toward `num_blocks`."""
        return True

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        """Returns the maximum number of counted blocks that tokens `[first, end)` occupy at once,
        besides the `num_held` blocks of earlier tokens, if up to `chunk` tokens are appended at a
        time. `first` must be the first token of a block."""
        end_block = -(-end // block_size)
        window = self.window or UNBOUNDED
        # the oldest visible token may be the last of its block
        num_visible = (window + chunk - 3 + block_size) // block_size + 1
        return max(0, min(end_block - first // block_size, num_visible - num_held))

    def first_visible(self, length: int) -> int:
        """Returns the first position that the query at position `length` sees: as in transformers,
        the window includes the query."""
        return max(0, length - (self.window or UNBOUNDED) + 1)

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


def group_label(key: Hashable) -> str:
    """Returns the name of a layer group for messages. `key`: a `GroupSpec.label`, or only the
    window if the kind is "self"."""
    kind, window = key if isinstance(key, tuple) else ("self", key)
    if kind == "cross":
        return "cross attention"
    if kind == "states":
        return "states"
    attention = "full attention" if window is None else f"window of {window:,} tokens"
    return f"{kind}, {attention}" if kind.startswith("assistant") else attention
