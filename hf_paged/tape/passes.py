"""Changes to the entries of a whole tape: products and lists are joined, stores that nothing reads
are dropped, results are computed where they are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..kernels.cpp.linear import MAX_PIECES
from .entries import Entry, Linear, TorchOp
from .rows import Rows
from .values import Values

_REACH = 5  # lists are joined over at most as many entries


def simplify(entries: list[Entry], values: Values) -> list[Entry]:
    entries = _join(_without_empty(entries), _joins_linear)
    entries = _join(entries, _joins_rows)
    _drop_stores(entries, values)
    entries = _without_empty(entries)
    _place_result(entries, values)
    return entries


def _without_empty(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not isinstance(entry, Rows) or entry.instructions]


def _join(
    entries: list[Entry],
    joins: Callable[[Entry, list[Entry]], bool],
) -> list[Entry]:
    """The entries but those that `joins` has joined to an earlier one."""
    kept: list[Entry] = []
    for entry in entries:
        if not joins(entry, kept):
            kept.append(entry)
    return kept


def _joins_linear(entry: Entry, before: list[Entry]) -> bool:
    """Moves a product up to the first one of the same `x`, if nothing between writes what it
    reads."""
    if not isinstance(entry, Linear):
        return False
    for other in reversed(before):
        if isinstance(other, Linear) and other.kind == entry.kind:
            has_space = len(other.pieces) < MAX_PIECES
            if has_space:
                other.pieces += entry.pieces
            return has_space
        if other.writes & entry.reads:
            return False
    return False


def _joins_rows(entry: Entry, before: list[Entry]) -> bool:
    """Joins lists over rows of one shape, if the entries between allow one of them to move."""
    if not isinstance(entry, Rows):
        return False
    between: list[Entry] = []
    for other in reversed(before[-_REACH:]):
        if isinstance(other, Rows) and other.can_absorb(entry):
            entry_waits = any(_depend(entry, x) for x in between)
            other_waits = any(_depend(other, x) for x in between)
            if not (entry_waits and other_waits):
                other.absorb(entry)
                if entry_waits:
                    before.remove(other)
                    before.append(other)
                return True
        between.append(other)
    return False


def _depend(entry: Entry, other: Entry) -> bool:
    """Whether the order of two entries matters."""
    touched = other.reads | other.writes
    return bool(entry.writes & touched or entry.reads & other.writes)


def _drop_stores(entries: list[Entry], values: Values) -> None:
    needed = set(values.fixed).union(*(entry.reads for entry in entries))
    for entry in entries:
        if isinstance(entry, Rows):
            entry.drop_stores(needed)


def _place_result(entries: list[Entry], values: Values) -> None:
    """Computes a value that the last entry only copies outside directly at its target."""
    if not entries:
        return
    *others, last = entries
    if not isinstance(last, Rows):
        return
    ops = [each.op for each in last.instructions]
    if ops != ["load", "copy", "store"]:
        return
    source, target = last.accesses()
    read = source.ref
    value = read.value
    if value is None or target.ref.value is not None:
        return
    are_alike = source.strides == target.strides and read.dtype is target.ref.dtype
    content_bytes = math.prod(read.sizes) * read.dtype.itemsize
    is_whole = read.start == 0 and read.nbytes == content_bytes == values.sizes[value]
    users = [entry for entry in others if value in entry.reads | entry.writes]
    if not are_alike or source.is_narrow or not is_whole or len(users) != 1:
        return
    (maker,) = users
    if value not in maker.reads and not isinstance(maker, TorchOp):
        values.fixed[value] = target.ref.start
        entries.pop()
