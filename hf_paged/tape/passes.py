"""Passes over the entries of a whole tape: they join products and lists, drop stores that nothing
reads, and compute results at their targets. They do not change single operations."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..kernels.cpp.linear import MAX_PIECES
from .buffers import Buffers
from .entries import Entry, Linear, TorchOp
from .rows import Rows

_MAX_DISTANCE = 5  # entries between two lists that are joined, at most


def simplify(entries: list[Entry], buffers: Buffers) -> list[Entry]:
    entries = _join(_without_empty(entries), _joins_linear)
    entries = _join(entries, _joins_rows)
    _drop_stores(entries, buffers)
    entries = _without_empty(entries)
    _place_result(entries, buffers)
    return entries


def _without_empty(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not isinstance(entry, Rows) or entry.instructions]


def _join(
    entries: list[Entry],
    joins: Callable[[Entry, list[Entry]], bool],
) -> list[Entry]:
    """Returns the entries without those that `joins` joins to an earlier one."""
    remaining: list[Entry] = []
    for entry in entries:
        if not joins(entry, remaining):
            remaining.append(entry)
    return remaining


def _joins_linear(entry: Entry, before: list[Entry]) -> bool:
    """Moves a product up to the first one with the same `x`, unless an entry between them writes
    its inputs."""
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
    """Joins lists over rows of one shape if the entries between them allow one of them to move."""
    if not isinstance(entry, Rows):
        return False
    between: list[Entry] = []
    for other in reversed(before[-_MAX_DISTANCE:]):
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


def _drop_stores(entries: list[Entry], buffers: Buffers) -> None:
    needed = set(buffers.fixed_addresses).union(*(entry.reads for entry in entries))
    for entry in entries:
        if isinstance(entry, Rows):
            entry.drop_stores(needed)


def _place_result(entries: list[Entry], buffers: Buffers) -> None:
    """Drops a last entry that only copies a buffer to memory outside: the buffer gets that address
    instead."""
    if not entries:
        return
    *others, last = entries
    if not isinstance(last, Rows):
        return
    ops = [instruction.op for instruction in last.instructions]
    if ops != ["load", "copy", "store"]:
        return
    source, target = last.accesses()
    read = source.ref
    buffer_id = read.buffer_id
    if buffer_id is None or target.ref.buffer_id is not None:
        return
    are_alike = source.strides == target.strides and read.dtype is target.ref.dtype
    content_bytes = math.prod(read.sizes) * read.dtype.itemsize
    is_whole = read.offset == 0 and read.span_bytes == content_bytes == buffers.num_bytes[buffer_id]
    users = [entry for entry in others if buffer_id in entry.reads | entry.writes]
    if not are_alike or source.is_narrow or not is_whole or len(users) != 1:
        return
    (producer,) = users
    if buffer_id not in producer.reads and not isinstance(producer, TorchOp):
        buffers.fixed_addresses[buffer_id] = target.ref.offset
        entries.pop()
