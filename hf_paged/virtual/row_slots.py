"""Assigns rows to slots of a layer's address range, the same in all layers, and plans the portable
attention of rows in slots. Reads and writes no tensor, and leaves mapping to `mappings.py`."""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .. import forks
from ..attention.backends.parts import Member, Part, PartPlan, geometries_of, part_maker
from ..step import StepMetadata

MIN_ROWS = 64
MAX_ROWS = 1024
BACKOFF_STEPS = 256  # steps that gather before rows are mapped again
MANY_USERS = 8  # references to steps above which dead ones are dropped
MIN_ROW_TOKENS = 4096  # least addresses of a slot, which take no memory


@dataclass(slots=True, eq=False)
class Row:
    """The blocks to map in one slot, in all layers."""

    first: int = 0  # position of the first block, in blocks
    block_ids: list[int] = field(default_factory=list)
    end: int = 0  # position after the last token
    has_padding: bool = False  # whether padding precedes it
    version: int = 0  # counts changes
    first_version: int = 0  # the version at which an unrelated row was replaced
    # block ids by position, if mappings are kept: the row's, and after them those of earlier rows
    mapped: list[int | None] = field(default_factory=list)
    users: list[weakref.ref[StepMetadata]] = field(default_factory=list)  # steps that read it
    last_used: int = 0  # clock of the last of them

    @property
    def is_free(self) -> bool:
        """Whether no living step reads the row."""
        for user in self.users:  # faster than `all`
            if user() is not None:
                return False
        return True

    def holds(self, position: int, block_id: int) -> bool:
        index = position - self.first
        if not 0 <= index < len(self.block_ids):
            return False
        return self.block_ids[index] == block_id


class BlockSpan(NamedTuple):
    """A row of a step: its blocks, the position of the first, in blocks, and the position after its
    last token."""

    first: int
    ids: list[int]
    end: int


@dataclass(frozen=True, eq=False)
class Placement:
    slots: list[int]  # by row of a step
    firsts: list[int]  # by row, the position in its slot, in tokens, of the step's position 0


class RowViews(NamedTuple):
    """The rows of a step as strided tensors. They stay readable while the step and these views
    live, even if other rows are mapped meanwhile. Implements `seams.PlacedRows`."""

    placement: Placement
    keys: Tensor  # (slots, heads, max_len, dim); only rows of the placement may be read
    values: Tensor
    step: StepMetadata

    def parts(self, kv_heads: int) -> PartPlan:
        plan: PartPlan = self.step.plan(_plan, kv_heads, self.placement)
        return plan

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        visible = slice(part.offset, part.offset + part.length)
        return self.keys[part.row_slots, :, visible], self.values[part.row_slots, :, visible]


def _plan(step: StepMetadata, kv_heads: int, placement: Placement) -> PartPlan:
    """Returns the parts of rows that are contiguous in memory: each has rows of one geometry in
    consecutive slots."""
    geometries, is_complete = geometries_of(step)
    heads = slice(0, kv_heads)
    parts = []
    for geometry, all_members in geometries:
        runs: list[tuple[int, int, list[Member]]] = []
        expected = None
        for row, first_visible in all_members:
            slot = placement.slots[row]
            offset = placement.firsts[row] + first_visible
            if (row, slot, offset) != expected:
                runs.append((slot, offset, []))
            runs[-1][2].append((row, first_visible))
            expected = (row + 1, slot + 1, offset)
        make_part = part_maker(step, geometry, geometries)
        for slot, offset, members in runs:
            row, _ = members[0]
            rows = slice(row, row + len(members))
            slots = slice(slot, slot + len(members))
            parts.append(make_part(rows, tuple(members), heads, offset, row_slots=slots))
    return tuple(parts), is_complete


class RowSlots:
    """The rows in the slots of a storage, the same in all its layers. `keeps_mappings`: whether
    slots keep the mappings of finished rows, so that a new row takes a slot in which most of its
    blocks are mapped."""

    def __init__(self, keeps_mappings: bool = True) -> None:
        self.lock = forks.rlock()
        self._keeps_mappings = keeps_mappings
        self.max_len = MIN_ROW_TOKENS
        self.rows = [Row() for _ in range(MIN_ROWS)]
        self._num_gathering_steps = 0  # remaining steps that gather after mapping failed
        self._tails: dict[int, int] = {}  # slot by the row's last block
        # first slot of the last run of consecutive slots, by the run's length
        self._runs: dict[int, int] = {}
        self._clock = 0

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def place(self, step: StepMetadata, are_consecutive: bool) -> Placement | None:
        """Returns slots for the rows of a step, consecutive ones if `are_consecutive`; `None` if no
        slots are available."""
        num_rows = step.num_rows
        if len(step.seq_lens) != num_rows or not num_rows:
            return None
        if self._num_gathering_steps:
            self._num_gathering_steps -= 1
            return None
        size = step.block_size
        if len(step.block_ids) == num_rows:
            tables = list(step.block_ids)
        else:
            tables = step.block_tables.tolist()
        origins = step.origins or (0,) * num_rows
        # a row begins at the block of its origin in the sequence or the columns
        rows = [
            BlockSpan(origin // size, ids[: -(-length // size)], origin + length)
            for origin, ids, length in zip(origins, tables, step.seq_lens)
        ]
        with self.lock:
            slots = self._choose(rows, are_consecutive, step.has_padding)
            if slots is None:
                return None
            self._clock += 1
            num_tokens = max((row.first + len(row.ids)) * size for row in rows)
            self._fit_length(num_tokens)
            for slot, row in zip(slots, rows):
                self._write(step, slot, *row)
        firsts = [row.first * size for row in rows]
        return Placement(slots, firsts)

    def back_off(self) -> None:
        """Makes the next `BACKOFF_STEPS` steps gather, after mapping failed."""
        self._num_gathering_steps = BACKOFF_STEPS

    def _fit_length(self, num_tokens: int) -> None:
        max_len = self.max_len
        while max_len < num_tokens:
            max_len *= 2
        if max_len != self.max_len:
            self.forget(self.rows)
            self.max_len = max_len

    def forget(self, rows: Iterable[Row]) -> None:
        """Records that these rows have no mappings, or only at former addresses."""
        for row in rows:
            row.mapped.clear()

    def _choose(
        self,
        rows: list[BlockSpan],
        are_consecutive: bool,
        has_padding: bool,
    ) -> list[int] | None:
        assigned: set[int] = set()
        previous: list[int | None] = []  # slots of the rows' last steps
        for row in rows:
            slot = self._find(row, assigned, has_padding)
            previous.append(slot)
            if slot is not None:
                assigned.add(slot)
        begin = previous[0]
        if begin is not None:
            run = list(range(begin, begin + len(rows)))
            if previous == run:
                return run
        num_new = previous.count(None)
        if are_consecutive:
            are_new = num_new == len(rows)
            return self._consecutive_slots(rows, are_new)
        free = (slot for slot, row in enumerate(self.rows) if slot not in assigned and row.is_free)
        spare = sorted(free, key=lambda slot: self.rows[slot].last_used)
        if num_new > len(spare):
            first = len(self.rows)
            if not self._grow(first + num_new):
                return None
            spare += range(first, len(self.rows))
        slots = []
        for slot, row in zip(previous, rows):
            if slot is None:
                slot = spare[0]
                if self._keeps_mappings:
                    slot = max(spare, key=functools.partial(self._num_saved, row))
                spare.remove(slot)
            slots.append(slot)
        return slots

    def _num_saved(self, row: BlockSpan, slot: int) -> int:
        """Returns how many blocks of a row are still mapped in a slot; 0 unless most of them are,
        since another row may need the slot's mappings."""
        ids = row.ids
        mapped = self.rows[slot].mapped[row.first : row.first + len(ids)]
        num_mapped = sum(map(operator.eq, mapped, ids))
        if 2 * num_mapped <= len(ids):
            return 0
        return num_mapped

    def _find(
        self,
        span: BlockSpan,
        assigned: set[int],
        has_padding: bool,
    ) -> int | None:
        """Returns the slot of the row's last step, found by one of its last two blocks."""
        last = len(span.ids) - 1
        for index in range(last, max(-1, last - 2), -1):
            block_id = span.ids[index]
            slot = self._tails.get(block_id)
            if slot is None or slot in assigned:
                continue
            row = self.rows[slot]
            if not row.holds(span.first + index, block_id):
                continue
            if row.is_free or self._only_grows(row, span, has_padding):
                return slot
        return None

    def _only_grows(
        self,
        row: Row,
        span: BlockSpan,
        has_padding: bool,
    ) -> bool:
        """Whether `span` only adds blocks to the row, so that it may take the slot while other
        steps read it: no block that they read is unmapped."""
        shift = span.first - row.first
        # a row with padding unmaps the blocks before it
        keeps_first = shift == 0 or (shift > 0 and not has_padding)
        if not keeps_first:
            return False
        num_shared = len(row.block_ids) - shift
        return row.block_ids[shift:] == span.ids[:num_shared]

    def _consecutive_slots(self, rows: list[BlockSpan], are_new: bool) -> list[int] | None:
        count = len(rows)
        begin = self._runs.get(count)
        is_free = False
        if begin is not None:
            run = self.rows[begin : begin + count]
            is_free = all(row.is_free for row in run)
        looks_for_mapped = are_new and self._keeps_mappings
        if begin is None or not is_free or looks_for_mapped:
            begin = self._free_run(rows)
            if begin is None:
                begin = len(self.rows)
                if not self._grow(begin + count):
                    return None
            self._runs[count] = begin
        return list(range(begin, begin + count))

    def _free_run(self, rows: list[BlockSpan]) -> int | None:
        """Returns the first slot of the run of free slots that saves most mappings of these rows;
        among equals, of the least recently used run."""
        best = None
        begin = 0
        count = len(rows)
        best_rank: tuple[int, float] = 0, -math.inf
        for slot, row in enumerate(self.rows):
            if not row.is_free:
                begin = slot + 1
            elif slot + 1 - begin >= count:
                start = slot + 1 - count
                num_saved = sum(map(self._num_saved, rows, range(start, slot + 1)))
                run = self.rows[start : slot + 1]
                last_used = max(other.last_used for other in run)
                rank = (num_saved, -last_used)
                if rank > best_rank:
                    best = start
                    best_rank = rank
        return best

    def _grow(self, num_slots: int) -> bool:
        if num_slots > MAX_ROWS:
            return False
        if len(self.rows) < num_slots:
            self.forget(self.rows)
        while len(self.rows) < num_slots:
            self.rows += [Row() for _ in self.rows]
        return True

    def _write(
        self,
        step: StepMetadata,
        slot: int,
        first: int,
        ids: list[int],
        end: int,
    ) -> None:
        row = self.rows[slot]
        has_padding = step.has_padding
        if row.is_free:
            row.users.clear()
        elif first > row.first:  # other layers may still have to map blocks that other steps read
            earlier_ids = row.block_ids[: first - row.first]
            ids = earlier_ids + ids
            first = row.first
        is_shorter = end < row.end  # then it is another row with the same blocks
        is_another = is_shorter and not self._keeps_mappings
        content = (row.first, row.block_ids, row.has_padding)
        is_changed = content != (first, ids, has_padding)
        num_positions = first + len(ids)
        row.end = end
        if is_changed or is_another:
            overlaps = bool(ids) and row.holds(first, ids[0])
            row.version += 1  # before the content, so that after an interrupt it is mapped again
            if is_shorter or not overlaps:
                row.first_version = row.version
            row.first, row.block_ids, row.has_padding = first, ids, has_padding
            if self._keeps_mappings:
                row.mapped += [None] * (num_positions - len(row.mapped))
                row.mapped[first:num_positions] = ids
        if ids:
            self._tails[ids[-1]] = slot
        if len(row.users) > MANY_USERS:
            row.users = [user for user in row.users if user() is not None]
        row.users.append(weakref.ref(step))
        row.last_used = self._clock
