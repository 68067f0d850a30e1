"""Assigns rows to slots of a layer's address range, the same in all layers. No tensors are read or written."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .. import forks
from ..interrupts import held
from ..step import StepMetadata

MIN_ROWS, MAX_ROWS = 64, 1024
FULL_STEPS = 256  # steps that gather before mapping is tried again
MANY_USERS = 8  # references to steps from which dead ones are dropped
MIN_ROW_TOKENS = 4096  # for which a slot has addresses, which take no memory


@dataclass(slots=True, eq=False)
class Row:
    """The blocks to map in one slot, in all layers."""

    first: int = 0  # position of the first block, in blocks
    block_ids: list[int] = field(default_factory=list)
    hides: bool = False  # whether padding precedes it
    version: int = 0  # counts changes
    owner: int = 0  # counts unrelated rows in this slot
    users: list[weakref.ref[StepMetadata]] = field(default_factory=list)  # steps that read it
    used: int = 0  # time of the last one

    @property
    def is_free(self) -> bool:
        """Whether no step reads it any more."""
        for user in self.users:  # faster than `all`
            if user() is not None:
                return False
        return True

    def holds(self, position: int, block_id: int) -> bool:
        place = position - self.first
        return 0 <= place < len(self.block_ids) and self.block_ids[place] == block_id


@dataclass(frozen=True, eq=False)
class Placement:
    slots: list[int]  # per row of a step
    firsts: list[int]  # position in the slot, in tokens, of each row's position 0 in the step


class PlacedRows(NamedTuple):
    """Where the rows of a step can be read. Stays readable while the step and these views live, whatever else is
    mapped meanwhile."""

    placement: Placement
    keys: Tensor  # (slots, heads, max_len, dim); only placed rows may be read
    values: Tensor


class RowSlots:
    """The rows in the slots of a storage, the same in all its layers."""

    def __init__(self) -> None:
        self.lock = forks.rlock()
        self.num_slots, self.max_len = MIN_ROWS, MIN_ROW_TOKENS
        self.rows = [Row() for _ in range(MIN_ROWS)]
        self._num_full = 0  # remaining steps that gather, since mapping failed
        self._tails: dict[int, int] = {}  # slot by the row's last block
        self._runs: dict[int, int] = {}  # first slot of the last run of consecutive slots, by the run's length
        self._clock = 0

    def place(self, step: StepMetadata, together: bool) -> Placement | None:
        """Returns slots for the rows of a step, consecutive if `together`; `None` if there are none."""
        if len(step.seq_lens) != step.num_rows or not step.num_rows:
            return None
        if self._num_full:
            self._num_full -= 1
            return None
        size, known = step.block_size, len(step.block_ids) == step.num_rows
        tables = list(step.block_ids) if known else step.block_tables.tolist()
        origins = step.origins or (0,) * step.num_rows
        # (first, ids): a row begins at the block position of its origin in the sequence or the columns
        rows = [(at // size, ids[: -(-end // size)]) for at, ids, end in zip(origins, tables, step.seq_lens)]
        with self.lock, held():
            slots = self._choose(rows, together, step.has_padding)
            if slots is None:
                return None
            self._clock += 1
            for slot, (first, ids) in zip(slots, rows):
                self._write(step, slot, first, ids, step.has_padding)
            self._fit_length(max((first + len(ids)) * size for first, ids in rows))
        return Placement(slots, [first * size for first, _ in rows])

    @property
    def is_full(self) -> bool:
        """Whether the next steps must gather."""
        return bool(self._num_full)

    def fill(self) -> None:
        """Makes the next `FULL_STEPS` steps gather, since mapping failed."""
        self._num_full = FULL_STEPS

    def _fit_length(self, num_tokens: int) -> None:
        while self.max_len < num_tokens:
            self.max_len *= 2

    def _choose(self, rows: list[tuple[int, list[int]]], together: bool, hides: bool) -> list[int] | None:
        taken: set[int] = set()
        found: list[int | None] = []
        for first, ids in rows:
            slot = self._find(first, ids, taken, hides)
            found.append(slot)
            if slot is not None:
                taken.add(slot)
        begin = found[0]
        if begin is not None and found == list(range(begin, begin + len(rows))):
            return list(range(begin, begin + len(rows)))
        if together:
            return self._neighbours(len(rows))
        spare = sorted(
            (slot for slot, row in enumerate(self.rows) if slot not in taken and row.is_free),
            key=lambda slot: self.rows[slot].used,
        )
        missing = found.count(None)
        if missing > len(spare):
            first = len(self.rows)
            if not self._grow(first + missing):
                return None
            spare += range(first, len(self.rows))
        free = iter(spare)
        return [next(free) if slot is None else slot for slot in found]

    def _find(self, first: int, ids: list[int], taken: set[int], hides: bool) -> int | None:
        """Returns the slot of the row's last step, found by one of its last two blocks."""
        for place in range(len(ids) - 1, max(-1, len(ids) - 3), -1):
            slot = self._tails.get(ids[place])
            if slot is None or slot in taken:
                continue
            row = self.rows[slot]
            if row.holds(first + place, ids[place]) and (row.is_free or self._only_grows(row, first, ids, hides)):
                return slot
        return None

    def _only_grows(self, row: Row, first: int, ids: list[int], hides: bool) -> bool:
        """Whether these blocks may follow in the slot while other steps read it: nothing that they read is unmapped."""
        shift = first - row.first
        keeps = shift == 0 or (shift > 0 and not hides)  # padding unmaps what precedes it
        return keeps and row.block_ids[shift:] == ids[: len(row.block_ids) - shift]

    def _neighbours(self, count: int) -> list[int] | None:
        begin = self._runs.get(count)
        if begin is None or not all(row.is_free for row in self.rows[begin : begin + count]):
            begin = self._free_run(count)
            if begin is None:
                begin = len(self.rows)
                if not self._grow(begin + count):
                    return None
            self._runs[count] = begin
        return list(range(begin, begin + count))

    def _free_run(self, count: int) -> int | None:
        """Returns the first slot of the run of free slots that was least recently used."""
        best, best_used, begin = None, math.inf, 0
        for slot, row in enumerate(self.rows):
            if not row.is_free:
                begin = slot + 1
            elif slot + 1 - begin >= count:
                used = max(each.used for each in self.rows[slot + 1 - count : slot + 1])
                if used < best_used:
                    best, best_used = slot + 1 - count, used
        return best

    def _grow(self, num_slots: int) -> bool:
        if num_slots > MAX_ROWS:
            return False
        while len(self.rows) < num_slots:
            self.rows += [Row() for _ in self.rows]
        self.num_slots = len(self.rows)
        return True

    def _write(self, step: StepMetadata, slot: int, first: int, ids: list[int], hides: bool) -> None:
        row = self.rows[slot]
        if row.is_free:
            row.users.clear()
        elif first > row.first:  # other layers may still have to map what other steps read
            first, ids = row.first, row.block_ids[: first - row.first] + ids
        if (row.first, row.block_ids, row.hides) != (first, ids, hides):
            overlaps = any(row.holds(first + place, block_id) for place, block_id in enumerate(ids[:1]))
            row.owner += not overlaps
            row.first, row.block_ids, row.hides = first, ids, hides
            row.version += 1
        if ids:
            self._tails[ids[-1]] = slot
        if len(row.users) > MANY_USERS:
            row.users = [user for user in row.users if user() is not None]
        row.users.append(weakref.ref(step))
        row.used = self._clock
