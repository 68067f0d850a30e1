"""What a block is, in words and colours, for every picture of a pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Kind(NamedTuple):
    """Blocks with at least this number of holders, and fewer than the next kind has; -1 holders: cached."""

    low: int
    label: str
    colour: str


# Colours of Okabe and Ito (Color Universal Design, 2008), which colour-blind readers tell apart.
KINDS = (
    Kind(-1, "cached", "#56B4E9"),
    Kind(0, "free", "#D9D9D9"),
    Kind(1, "used by one", "#0072B2"),
    Kind(2, "shared by 2 or 3", "#009E73"),
    Kind(4, "shared by 4 to 7", "#E69F00"),
    Kind(8, "shared by 8 or more", "#D55E00"),
)
FREE = KINDS[1]
_LOWS = [kind.low for kind in KINDS]


def kind_index(num_holders: int) -> int:
    """The place in `KINDS` of a block with this number of holders (0: free, -1: cached)."""
    return bisect_right(_LOWS, num_holders) - 1


def count_kinds(states: Iterable[int]) -> list[int]:
    """How many blocks of each of `KINDS` there are."""
    counts = [0] * len(KINDS)
    for state in states:
        counts[kind_index(state)] += 1
    return counts


def to_cells(states: list[int], size: int) -> list[int]:
    """The kind of each cell of a picture whose cells stand for `size` blocks: the most frequent one among them."""
    if size == 1:
        return [kind_index(state) for state in states]
    counts = (count_kinds(states[first : first + size]) for first in range(0, len(states), size))
    return [max(range(len(KINDS)), key=each.__getitem__) for each in counts]


def group_label(key: object) -> str:
    """A layer group in words, from its window, or from the kind of its cache and its window."""
    kind, window = key if isinstance(key, tuple) else ("self", key)
    if kind == "cross":
        return "cross attention"
    return "full attention" if window is None else f"window of {window:,} tokens"
