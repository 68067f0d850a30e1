"""Passes over the entries of a whole tape: they drop entries and stores whose results nothing
reads, merge matrix products and lists of row operations, and elide the copy of the forward's
result. They change no operation's result."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..kernels.cpp.linear import MAX_PIECES
from .buffers import Buffers
from .entries import Entry, Linear, ModuleCall, TorchOp
from .rows import RowOps

_MAX_DISTANCE = 5  # maximum distance, in entries, of two lists of row operations that are merged


def simplify(entries: list[Entry], buffers: Buffers) -> list[Entry]:
    """Runs all passes; returns the entries that remain. May give one buffer a fixed address."""
    entries = _without_unread(_without_empty(entries), buffers)
    entries = _merge(entries, _merge_linear)
    entries = _merge(entries, _merge_row_ops)
    _drop_stores(entries, buffers)
    entries = _without_empty(entries)
    _elide_last_copy(entries, buffers)
    return entries


def _without_empty(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not isinstance(entry, RowOps) or entry.instructions]


def _merge(
    entries: list[Entry],
    merge: Callable[[Entry, list[Entry]], bool],
) -> list[Entry]:
    """Returns the entries without those that `merge` merged into earlier ones. `merge` gets an
    entry and the remaining earlier entries, and returns whether it merged the entry into one of
    these."""
    remaining: list[Entry] = []
    for entry in entries:
        if not merge(entry, remaining):
            remaining.append(entry)
    return remaining


def _merge_linear(entry: Entry, earlier: list[Entry]) -> bool:
    """Merges a product into the last earlier product with the same `merge_key`, unless that product
    is full, or it or an entry between the two writes to an input of `entry`."""
    if not isinstance(entry, Linear):
        return False
    for candidate in reversed(earlier):
        if candidate.writes & entry.reads:
            return False
        if isinstance(candidate, Linear) and candidate.merge_key == entry.merge_key:
            has_space = len(candidate.pieces) < MAX_PIECES
            if has_space:
                candidate.pieces.extend(entry.pieces)
            return has_space
    return False


def _merge_row_ops(entry: Entry, earlier: list[Entry]) -> bool:
    """Merges row operations into an earlier list of the same shape, if one of the two lists can be
    moved past the entries between them."""
    if not isinstance(entry, RowOps):
        return False
    between: list[Entry] = []
    for candidate in reversed(earlier[-_MAX_DISTANCE:]):
        if isinstance(candidate, RowOps) and candidate.can_absorb(entry):
            is_entry_fixed = any(_has_hazard(entry, x) for x in between)
            is_candidate_fixed = any(_has_hazard(candidate, x) for x in between)
            if not (is_entry_fixed and is_candidate_fixed):
                candidate.absorb(entry)
                if is_entry_fixed:
                    earlier.remove(candidate)
                    earlier.append(candidate)
                return True
        between.append(candidate)
    return False


def _has_hazard(a: Entry, b: Entry) -> bool:
    """Whether the order of two entries matters because one writes to a buffer that the other
    uses."""
    used = b.reads | b.writes
    return bool(a.writes & used or a.reads & b.writes)


def _without_unread(entries: list[Entry], buffers: Buffers) -> list[Entry]:
    """Returns the entries without those of PyTorch's operations and lists of row operations whose
    results neither a later entry nor other code reads."""
    needed = set(buffers.fixed_addresses)
    remaining: list[Entry] = []
    for entry in reversed(entries):
        if _writes_only_buffers(entry) and needed.isdisjoint(entry.writes):
            continue
        needed |= entry.reads
        remaining.append(entry)
    return remaining[::-1]


def _writes_only_buffers(entry: Entry) -> bool:
    """Whether an entry writes only to buffers, and is either a list of row operations or an
    operation of PyTorch that does not work in place."""
    if isinstance(entry, RowOps):
        return all(target.ref.buffer_id is not None for target in entry.accesses("store"))
    if isinstance(entry, TorchOp):
        return bool(entry.writes) and not entry.function._schema.is_mutable
    return False


def _drop_stores(entries: list[Entry], buffers: Buffers) -> None:
    needed = set(buffers.fixed_addresses).union(*(entry.reads for entry in entries))
    for entry in entries:
        if isinstance(entry, RowOps):
            entry.drop_stores(needed)


def _elide_last_copy(entries: list[Entry], buffers: Buffers) -> None:
    """Drops the last entry if it only copies a buffer to memory outside all buffers, and if the
    only other entry that uses the buffer writes it in C++. The buffer then gets the address of that
    memory."""
    if not entries:
        return
    *earlier, last = entries
    if not isinstance(last, RowOps):
        return
    ops = [instruction.op for instruction in last.instructions]
    if ops != ["load", "copy", "store"]:
        return
    source, target = last.accesses()
    copied = source.ref
    buffer_id = copied.buffer_id
    if buffer_id is None or target.ref.buffer_id is not None:
        return
    has_same_layout = source.strides == target.strides and copied.dtype is target.ref.dtype
    content_bytes = math.prod(copied.sizes) * copied.dtype.itemsize
    buffer_bytes = buffers.num_bytes[buffer_id]
    is_whole = copied.offset == 0 and copied.span_bytes == content_bytes == buffer_bytes
    users = [entry for entry in earlier if buffer_id in entry.reads | entry.writes]
    if not has_same_layout or source.is_narrow or not is_whole or len(users) != 1:
        return
    (producer,) = users
    if buffer_id not in producer.reads and not isinstance(producer, (TorchOp, ModuleCall)):
        buffers.fixed_addresses[buffer_id] = target.ref.offset
        entries.pop()
