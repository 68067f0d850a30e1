"""Chooses the block size of each layer group under `block_size="auto"`. It holds no tensors and
never rebuilds a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .groups import GroupSpec

DEFAULT_BLOCK_SIZE = 16  # without data (PagedAttention, arXiv 2309.06180, section 7.2)
MAX_LENGTHS = 1024  # of the sequences that ended last
MIN_GAIN = 0.02  # least gain that justifies rebuilding a pool
# once this many sequences have ended without a prefix cache hit, cached blocks count as worthless
MIN_UNSERVED = 64


class Costs(NamedTuple):
    """Attention time per context token, in any unit, by block size."""

    times: dict[int, float]
    source: str  # where times were measured, or why there are none


NO_COSTS = Costs({}, "the cache belongs to no model")


@dataclass(frozen=True)
class Choice:
    """A layer group's block size in tokens, and the reason for it."""

    block_size: int
    reason: str


class HeldTokens(NamedTuple):
    """How much of a group's memory finished sequences filled."""

    num_tokens: int
    # partly filled blocks: a row's last one and, once its window has moved, its first
    num_ends: int

    @classmethod
    def of(cls, lengths: Sequence[int], window: int | None = None) -> HeldTokens:
        if window is None:
            return cls(sum(lengths), len(lengths))
        num_tokens = sum(min(length, window) for length in lengths)
        num_ends = sum(1 + (length > window) for length in lengths)
        return cls(num_tokens, num_ends)

    def losses(self, block_size: int, times: dict[int, float]) -> tuple[float, float]:
        """Returns the share of the group's memory without tokens, at half a block per end, and the
        share of the kernel's time that the fastest block size would save."""
        wasted = self.num_ends * block_size / 2
        of_memory = wasted / (self.num_tokens + wasted)
        of_time = 1 - min(times.values()) / times[block_size]
        return of_memory, of_time


def choose(lengths: Sequence[int], costs: Costs, window: int | None = None) -> Choice:
    """Chooses the block size with the least loss: 1% of the group's memory counts as much as 1% of
    its kernel's time.

    Args:
        lengths: Final lengths, in tokens, of finished sequences.
        costs: Attention time per context token for each block size that may be chosen.
        window: The group's sliding window in tokens; `None`: full attention.
    """
    times = costs.times
    if not times or not lengths:
        reason = "no sequence has ended yet" if times else costs.source
        return Choice(DEFAULT_BLOCK_SIZE, reason)
    held = HeldTokens.of(lengths, window)
    best = min(sorted(times), key=lambda size: sum(held.losses(size, times)))
    memory, time = held.losses(best, times)
    mean = sum(lengths) / len(lengths)
    reason = (
        f"loses {memory:.1%} of memory and {time:.1%} of attention time with sequences of "
        f"{mean:.0f} tokens ({len(lengths)} of them); {costs.source}"
    )
    return Choice(best, reason)


class BlockSizes:
    """The block sizes of one memory. Each is chosen when its group is created, from lengths known
    when the memory was created. `lengths` records those of sequences that end, for the model's next
    memory."""

    def __init__(
        self, costs: Costs | None = None, expected: Iterable[int] = (), observed: Iterable[int] = ()
    ) -> None:
        """Without `costs` all blocks have the default size. `observed`: lengths of finished
        sequences; if there are none, `expected` ones."""
        self.costs = costs or NO_COSTS
        self.chosen = dict[GroupSpec, Choice]()
        self.lengths = deque(observed, MAX_LENGTHS)
        self.num_ended = 0  # sequences since creation
        self._initial_lengths = tuple(self.lengths) or tuple(expected)

    def of(self, spec: GroupSpec) -> int:
        """Returns the group's block size in tokens."""
        if spec not in self.chosen:
            if spec.kind == "cross" and self.costs.times:
                self.chosen[spec] = Choice(
                    DEFAULT_BLOCK_SIZE, "the lengths of an encoder's outputs are not recorded"
                )
            else:
                self.chosen[spec] = choose(self._initial_lengths, self.costs, spec.window)
        return self.chosen[spec].block_size

    def note(self, length: int) -> None:
        """Records that a sequence of `length` tokens has ended."""
        self.num_ended += 1
        self.lengths.append(length)

    def renewed(self) -> BlockSizes | None:
        """Returns sizes chosen from the lengths recorded so far; `None` unless one saves a group at
        least `MIN_GAIN`."""
        if not self.num_ended:
            return None
        later = BlockSizes(self.costs, observed=self.lengths)
        times = self.costs.times
        for spec, before in list(self.chosen.items()):
            now = later.of(spec)
            held = HeldTokens.of(later._initial_lengths, spec.window)
            if now == before.block_size:
                continue
            old_loss = float("inf")
            if before.block_size in times:
                old_loss = sum(held.losses(before.block_size, times))
            new_loss = sum(held.losses(now, times))
            if old_loss - new_loss >= MIN_GAIN:
                return later
        return None
