"""What the layers of a model keep of a sequence: the specs that tell layer groups apart. Plain Python: no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .block_pool import BlockPool

UNBOUNDED = 1 << 40  # tokens in a block that holds a sequence of any length


@dataclass(frozen=True)
class GroupSpec:
    """Full attention: all tokens are kept. Layers whose specs are equal share block tables; a subclass with another
    storage, or other tokens to keep, is a group of its own."""

    kind: str = "self"  # which of a model's caches; or "cross"
    window: int | None = None  # tokens that a layer looks back, itself included; older ones are given back

    def block_size(self, num_tokens: int) -> int:
        """Tokens in a block, where the config says `num_tokens`."""
        return num_tokens

    def storage_dtype(self, dtype: Any) -> Any:
        return dtype

    @property
    def is_counted(self) -> bool:
        """Whether its blocks are memory, which `num_blocks` bounds."""
        return True

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        """The most counted blocks at a time for tokens `[first, end)`, appended at most `chunk` at a time, beside the
        `num_held` that hold what is in front; `first` is where a block begins."""
        span = -(-end // block_size) - first // block_size
        if self.window is not None:  # the oldest token seen may be the last of its block
            span = min(span, (self.window + chunk - 3 + block_size) // block_size + 1 - num_held)
        return max(0, span)

    def first_visible(self, length: int) -> int:
        """First position that the next query after `length` positions is shown, as transformers counts."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    @property
    def prefix_window(self) -> int | None:
        """Tokens that a sequence which begins behind cached ones looks back, its own first included; `None`: all."""
        return self.window

    @property
    def label(self) -> tuple[str, int | None]:
        """What reports name the group by."""
        return self.kind, self.window


FULL_ATTENTION = GroupSpec()


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """States of linear attention and convolutions: one slot a sequence, a block for any number of tokens. A state that
    the prefix cache keeps, a snapshot, is a slot that no sequence computes on."""

    kind: str = "states"
    is_empty: bool = False  # the model has no states: the slot only tells sequences apart

    def block_size(self, num_tokens: int) -> int:
        return UNBOUNDED

    @property
    def is_counted(self) -> bool:
        return not self.is_empty

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        return 0 if self.is_empty else max(0, super().num_spanned(first, end, chunk, num_held, block_size) - num_held)

    @property
    def prefix_window(self) -> int | None:
        """The snapshot after the token in front."""
        return 1 if self.is_empty else 2


class BlockGroup:
    """One layer group, as the manager needs it: a pool of fixed size. `cache.memory` has the one with memory."""

    can_grow = False

    def __init__(self, pool: BlockPool, spec: GroupSpec = FULL_ATTENTION, block_size: int = 0) -> None:
        """`block_size`: tokens in a block of this group; 0: as many as the manager says."""
        self.pool, self.spec, self.block_size = pool, spec, block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; 0 while that is not known."""
        return 0

    @property
    def is_sized(self) -> bool:
        """Whether what a block takes is known, where a limit in bytes asks for it."""
        return True

    def make_room(self, num_blocks: int) -> None:
        """Sees to it that this many blocks can be allocated, or raises `OutOfBlocksError`."""

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """`num_blocks` new blocks with refcount 1, best those `after` a block. Raises `OutOfBlocksError`."""
        self.make_room(num_blocks)
        return self.pool.allocate(num_blocks, after)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies the first block of each pair to the second; all are read before one is written."""
