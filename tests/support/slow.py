"""Which tests a plain run leaves out: those marked `slow`, and cases of those marked `slow_cases`.

`pytest --durations=50` on a quiet machine shows which should be marked, so that a plain run stays
below 5 minutes on 2 cores. Of slow tests, `.ci/run` runs an eighth; `.ci/full` runs all.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable

SHARE = 8


def is_slow(case: str, patterns: Collection[str], but: Collection[str] = ()) -> bool:
    """Whether a case of parameters is one of a mark `slow_cases(*patterns, but=...)`, whose
    patterns are `fnmatch`'s; without patterns, all cases are slow but those of `but`."""

    def matches(pattern: str) -> bool:
        return fnmatch.fnmatchcase(case, pattern.replace("[", "[[]"))

    if patterns:
        return any(map(matches, patterns))
    return not any(map(matches, but))


def left_to_full(names: Iterable[str]) -> set[str]:
    """Of slow tests, those that only `.ci/full` runs: of each function's parameters all but every
    eighth, in an order that does not follow the grid's, so that each value of each dimension has a
    chance. Functions begin to count at different numbers, so that of eight without parameters one
    is kept."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    left = set[str]()
    for function, parameters in functions.items():
        parameters.sort(key=lambda name: zlib.crc32(name.encode()))
        first = zlib.crc32(function.encode())
        left.update(name for number, name in enumerate(parameters, first) if number % SHARE)
    return left
