"""How many tokens a block of each layer group has under `block_size="auto"`. Plain Python: no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .groups import GroupSpec

DEFAULT_BLOCK_SIZE = 16  # where nothing tells (PagedAttention, arXiv 2309.06180, section 7.2)
MAX_LENGTHS = 1024  # of sequences, the last that ended
MIN_GAIN = 0.02  # what a pool is made again for
MIN_UNSERVED = 64  # sequences that ended, none of which began with a cached prefix: what is cached is worth nothing


class Costs(NamedTuple):
    """A kernel's time for a token of the context, in any unit, by the tokens in a block."""

    times: dict[int, float]
    source: str  # where it was measured; or why there are no times


NO_COSTS = Costs({}, "the cache is no model's own")


@dataclass(frozen=True)
class Choice:
    """A layer group's block size in tokens, and what it was chosen by."""

    block_size: int
    reason: str


class Held(NamedTuple):
    """What a group keeps of rows at their ends."""

    num_tokens: int
    num_ends: int  # where a row may end within a block; behind its window it begins there, too

    @classmethod
    def of(cls, lengths: Sequence[int], window: int | None = None) -> Held:
        if window is None:
            return cls(sum(lengths), len(lengths))
        return cls(sum(min(length, window) for length in lengths), sum(1 + (length > window) for length in lengths))

    def losses(self, block_size: int, times: dict[int, float]) -> tuple[float, float]:
        """Which part of the group's memory holds no token, half a block for each end; and which part of the kernel's
        time the fastest size would save."""
        wasted = self.num_ends * block_size / 2
        return wasted / (self.num_tokens + wasted), 1 - min(times.values()) / times[block_size]


def choose(lengths: Sequence[int], costs: Costs, window: int | None = None) -> Choice:
    """
    The size that loses least: a hundredth of a group's memory counts as a hundredth of its kernel's time.

    Args:
        lengths: Tokens of sequences that were seen, of each the most that it had.
        costs: The kernel's time for a token at each size that may be chosen.
        window: Tokens that the group's layers look back; `None`: all.
    """
    times = costs.times
    if not times or not lengths:
        return Choice(DEFAULT_BLOCK_SIZE, "no sequence has ended yet" if times else costs.source)
    held = Held.of(lengths, window)
    best = min(sorted(times), key=lambda size: sum(held.losses(size, times)))
    memory, time = held.losses(best, times)
    return Choice(
        best,
        f"{memory:.1%} of memory and {time:.1%} of attention's time are lost with sequences of "
        f"{sum(lengths) / len(lengths):.0f} tokens ({len(lengths)} of them); {costs.source}",
    )


class BlockSizes:
    """The sizes that one memory has, each chosen when its group is made, by the lengths known when the memory is; and
    the lengths of sequences that end since, for the next memory of the model."""

    def __init__(self, costs: Costs | None = None, known: Iterable[int] = (), seen: Iterable[int] = ()) -> None:
        """Without `costs` all are of the default size. `known`: lengths that are expected, where none was `seen`."""
        self.costs, self.chosen = costs or NO_COSTS, dict[GroupSpec, Choice]()
        self.seen = deque(seen, MAX_LENGTHS)
        self.num_ended = 0  # sequences since this was made
        self._known = tuple(self.seen) or tuple(known)

    def of(self, spec: GroupSpec) -> int:
        """Tokens in a block of this group."""
        if spec not in self.chosen:
            if spec.kind == "cross" and self.costs.times:
                self.chosen[spec] = Choice(DEFAULT_BLOCK_SIZE, "how long an encoder's outputs are is not seen")
            else:
                self.chosen[spec] = choose(self._known, self.costs, spec.window)
        return self.chosen[spec].block_size

    def note(self, length: int) -> None:
        """A sequence of `length` tokens has ended."""
        self.num_ended += 1
        self.seen.append(length)

    def renewed(self) -> BlockSizes | None:
        """Those by the lengths seen until now; `None` unless a group would lose `MIN_GAIN` less with its new one."""
        if not self.num_ended:
            return None
        later, times = BlockSizes(self.costs, seen=self.seen), self.costs.times
        for spec, before in list(self.chosen.items()):
            now, held = later.of(spec), Held.of(later._known, spec.window)
            if now == before.block_size:
                continue
            old = sum(held.losses(before.block_size, times)) if before.block_size in times else float("inf")
            if old - sum(held.losses(now, times)) >= MIN_GAIN:
                return later
        return None
