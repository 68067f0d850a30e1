"""The block size of each layer group: the config's or, under `block_size="auto"`, one chosen from
the lengths of sequences. Holds no tensors and rebuilds no pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config import AUTO
from .groups import UNBOUNDED, GroupSpec

DEFAULT_BLOCK_SIZE = 16  # without data (PagedAttention, arXiv 2309.06180, section 7.2)
MAX_NUM_LENGTHS = 1024  # how many final lengths are kept, the latest ones
MIN_GAIN = 0.02  # smallest reduction of the loss that justifies rebuilding a pool
# after this many ended sequences without a prefix cache hit, cached blocks count as worthless
MIN_ENDED_WITHOUT_HIT = 64


class Costs(NamedTuple):
    """Attention time per context token, in any unit, by block size."""

    times: dict[int, float]
    source: str  # where the times were measured, or why there are none


NO_COSTS = Costs({}, "the cache belongs to no model")


@dataclass(frozen=True)
class Choice:
    """A layer group's block size in tokens, and the reason for it."""

    block_size: int
    reason: str


class Occupancy(NamedTuple):
    """How sequences of given lengths fill the memory of a layer group."""

    num_tokens: int
    # partly filled blocks: the last of each sequence and, once its window has moved, its first
    num_partial_blocks: int

    @classmethod
    def of(cls, lengths: Sequence[int], window: int | None = None) -> Occupancy:
        limit = window or UNBOUNDED
        num_tokens = sum(min(length, limit) for length in lengths)
        num_partial_blocks = sum(1 + (length > limit) for length in lengths)
        return cls(num_tokens, num_partial_blocks)

    def losses(self, block_size: int, times: dict[int, float]) -> tuple[float, float]:
        """Returns the share of the group's memory that holds no tokens, if partly filled blocks are
        half full on average, and the share of the attention time that the fastest block size would
        save."""
        num_unused_slots = self.num_partial_blocks * block_size / 2
        memory_loss = num_unused_slots / (self.num_tokens + num_unused_slots)
        time_loss = 1 - min(times.values()) / times[block_size]
        return memory_loss, time_loss


def choose(lengths: Sequence[int], costs: Costs, window: int | None = None) -> Choice:
    """Chooses the block size with the least loss, where 1% of the group's memory counts as much as
    1% of its attention time; `DEFAULT_BLOCK_SIZE` without lengths or times.

    Args:
        lengths: Final lengths of sequences, observed or expected, in tokens.
        costs: Attention time per context token for each block size that may be chosen.
        window: The group's sliding window in tokens; `None`: full attention.
    """
    times = costs.times
    if not times or not lengths:
        reason = "no sequence had ended when the pool was created" if times else costs.source
        return Choice(DEFAULT_BLOCK_SIZE, reason)
    occupancy = Occupancy.of(lengths, window)
    best_size = min(sorted(times), key=lambda size: sum(occupancy.losses(size, times)))
    memory_loss, time_loss = occupancy.losses(best_size, times)
    mean = sum(lengths) / len(lengths)
    reason = (
        f"loses {memory_loss:.1%} of memory and {time_loss:.1%} of attention time with"
        f" {len(lengths)} sequences of {mean:.0f} tokens on average; {costs.source}"
    )
    return Choice(best_size, reason)


class BlockSizes:
    """The block sizes of one memory. Under `block_size="auto"`, chooses a group's block size when
    the group is created, from the lengths passed to `__init__`. `lengths` records how long
    sequences were when they ended, for the model's next memory."""

    def __init__(
        self,
        costs: Costs | None = None,
        expected: Iterable[int] = (),
        observed: Iterable[int] = (),
        block_size: int | str = AUTO,
    ) -> None:
        """`block_size`: the tokens per block of all groups, or "auto". Under "auto", sizes are
        chosen with `costs` for the `observed` lengths of finished sequences, in tokens, or for the
        `expected` ones if there are none; without `costs`, they are `DEFAULT_BLOCK_SIZE`."""
        self.costs = costs or NO_COSTS
        self.is_fixed = block_size != AUTO
        self.default = int(block_size) if self.is_fixed else DEFAULT_BLOCK_SIZE
        self.chosen = dict[GroupSpec, Choice]()
        self.lengths = deque(observed, MAX_NUM_LENGTHS)
        self.num_ended = 0  # sequences that have ended in this memory
        self._initial_lengths = tuple(self.lengths) or tuple(expected)

    def of(self, spec: GroupSpec) -> int:
        """Returns the group's block size in tokens."""
        if self.is_fixed:
            return self.default
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

    def better_sizes(self) -> BlockSizes | None:
        """Returns sizes chosen for the lengths recorded so far; `None` unless they reduce the loss
        of some group by at least `MIN_GAIN`."""
        if not self.num_ended:
            return None
        new_sizes = BlockSizes(self.costs, observed=self.lengths)
        times = self.costs.times
        for spec, old_choice in list(self.chosen.items()):
            old_size = old_choice.block_size
            new_size = new_sizes.of(spec)
            occupancy = Occupancy.of(new_sizes._initial_lengths, spec.window)
            if new_size == old_size:
                continue
            old_loss = float("inf")
            if old_size in times:
                old_loss = sum(occupancy.losses(old_size, times))
            new_loss = sum(occupancy.losses(new_size, times))
            if old_loss - new_loss >= MIN_GAIN:
                return new_sizes
        return None
