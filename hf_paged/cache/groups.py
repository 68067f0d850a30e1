"""Layer groups and the specs that define them: what their layers keep of a sequence. Plain Python:
no tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from .block_pool import BlockPool

UNBOUNDED = 1 << 40  # block size of blocks that hold a sequence of any length


@dataclass(frozen=True)
class GroupSpec:
    """Attention over all tokens or a sliding window. Layers with equal specs share block tables; a
    subclass, with other storage or other tokens to keep, forms a separate group."""

    kind: str = "self"  # which of a model's caches; or "cross"
    # sliding window in tokens, including the current one; older blocks are freed
    window: int | None = None

    def block_size(self, num_tokens: int) -> int:
        """Returns the block size, given the configured one."""
        return num_tokens

    def storage_dtype(self, dtype: Any) -> Any:
        return dtype

    @property
    def is_counted(self) -> bool:
        """Whether its blocks take memory and count toward `num_blocks`."""
        return True

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        """Returns the most counted blocks at once for tokens `[first, end)`, appended at most
        `chunk` at a time, beside the `num_held` blocks of earlier tokens; `first` is the start of a
        block."""
        end_block = -(-end // block_size)
        span = end_block - first // block_size
        if self.window is not None:  # the oldest token seen may be the last of its block
            num_seen = (self.window + chunk - 3 + block_size) // block_size + 1
            span = min(span, num_seen - num_held)
        return max(0, span)

    def first_visible(self, length: int) -> int:
        """Returns the first position that the next query after `length` positions sees, as
        transformers counts."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1)

    @property
    def prefix_window(self) -> int | None:
        """Tokens that the first query after a cached prefix sees, including its own; `None`:
        all."""
        return self.window

    @property
    def label(self) -> tuple[str, int | None]:
        """The group's name in reports."""
        return self.kind, self.window


FULL_ATTENTION = GroupSpec()


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """States of linear attention and convolutions: one slot per sequence, a block for any number of
    tokens. A snapshot is a state that the prefix cache keeps, in a slot that no sequence writes
    to."""

    kind: str = "states"
    is_empty: bool = False  # without states in the model: the slot only identifies the sequence

    def block_size(self, num_tokens: int) -> int:
        return UNBOUNDED

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
        """2: needs the snapshot after the previous token; 1: without states, needs no block."""
        return 1 if self.is_empty else 2


class BlockGroup:
    """One layer group for the manager, with a pool of fixed size. `cache.memory` has a subclass
    with memory."""

    can_grow = False

    def __init__(
        self,
        pool: BlockPool,
        spec: GroupSpec = FULL_ATTENTION,
        block_size: int = 0,
    ) -> None:
        """`block_size`: tokens per block of this group; 0: the manager's."""
        self.pool = pool
        self.spec = spec
        self.block_size = block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; 0 if not known yet."""
        return 0

    @property
    def is_sized(self) -> bool:
        """Whether the bytes of a block are known, or no limit in bytes needs them."""
        return True

    def has_free(self, num_blocks: int) -> bool:
        """Whether this many blocks are free and no limit need be looked at, so that `make_room` has
        nothing to do."""
        return False

    def make_room(self, num_blocks: int) -> None:
        """Makes this many blocks allocatable, or raises `OutOfBlocksError`."""

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Takes `num_blocks` new blocks with refcount 1, preferably after block `after`. Raises
        `OutOfBlocksError`."""
        self.make_room(num_blocks)
        return self.pool.allocate(num_blocks, after)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies the first block of each pair to the second; all are read before one is written."""


def group_label(key: Hashable) -> str:
    """A layer group's label, from its window, or from the kind of its cache and its window."""
    kind, window = key if isinstance(key, tuple) else ("self", key)
    if kind == "cross":
        return "cross attention"
    if window is None:
        return "full attention"
    return f"window of {window:,} tokens"
