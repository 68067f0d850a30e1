"""Assigns each row to a slot (address range), the same in all layers, and plans the portable
attention of rows in slots. `mappings.py` maps the blocks of rows in their slots."""

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

MIN_SLOTS = 64  # initial number of slots of a storage, each for one row
MAX_SLOTS = 1024
BACKOFF_STEPS = 256  # number of steps that gather rows after mapping has failed
MAX_READING_STEPS = 8  # a row with more references to steps drops its dead references
MIN_SLOT_TOKENS = 4096  # initial length of a slot in tokens: unmapped addresses take no memory


@dataclass(slots=True, eq=False)
class Row:
    """The blocks to map in one slot, in all layers."""

    first_block: int = 0  # position of the first block, in blocks
    block_ids: list[int] = field(default_factory=list)
    end_token: int = 0  # position after the last token, in tokens
    has_padding: bool = False  # whether padding precedes the first block
    version: int = 0  # counts changes
    # the version at which the row was replaced, or became shorter
    assigned_version: int = 0
    # if mappings are kept: block ids by position, of this row and, past its end, of earlier rows
    mapped_ids: list[int | None] = field(default_factory=list)
    reading_steps: list[weakref.ref[StepMetadata]] = field(default_factory=list)
    last_used: int = 0  # `RowSlots._clock` at the last step

    @property
    def is_free(self) -> bool:
        """Whether no living step reads the row."""
        for step in self.reading_steps:  # faster than `all`
            if step() is not None:
                return False
        return True

    def holds(self, position: int, block_id: int) -> bool:
        index = position - self.first_block
        if not 0 <= index < len(self.block_ids):
            return False
        return self.block_ids[index] == block_id

    def assign(self, step: StepMetadata, span: BlockSpan, now: int, keeps_mappings: bool) -> None:
        """Assigns a row of `step` to this slot. Keeps leading blocks that other steps read. `span`:
        the row's blocks. `now`: `RowSlots._clock`."""
        first, ids, end = span
        has_padding = step.has_padding
        if self.is_free:
            self.reading_steps.clear()
        elif first > self.first_block:
            # other steps read earlier blocks, which a layer may map only later
            earlier_ids = self.block_ids[: first - self.first_block]
            ids = earlier_ids + ids
            first = self.first_block
        # if shorter, either a different row, or this one after a crop or a rejected draft
        is_shorter = end < self.end_token
        is_replaced = is_shorter and not keeps_mappings
        old_content = (self.first_block, self.block_ids, self.has_padding)
        is_changed = old_content != (first, ids, has_padding)
        num_positions = first + len(ids)
        self.end_token = end
        if is_changed or is_replaced:
            overlaps = bool(ids) and self.holds(first, ids[0])
            # before the change, so that blocks are mapped again after an interrupt
            self.version += 1
            if is_shorter or not overlaps:
                self.assigned_version = self.version
            self.first_block, self.block_ids, self.has_padding = first, ids, has_padding
            if keeps_mappings:
                self.mapped_ids += [None] * (num_positions - len(self.mapped_ids))
                self.mapped_ids[first:num_positions] = ids
        if len(self.reading_steps) > MAX_READING_STEPS:
            self.reading_steps = [ref for ref in self.reading_steps if ref() is not None]
        self.reading_steps.append(weakref.ref(step))
        self.last_used = now


class BlockSpan(NamedTuple):
    """The blocks of one row of a step, and their position in the row's slot."""

    first_block: int  # position of the first block, in blocks
    ids: list[int]
    end_token: int  # position after the last token, in tokens


@dataclass(frozen=True, eq=False)
class Placement:
    """The slots in which the rows of a step are mapped."""

    slots: list[int]  # by row
    offsets: list[int]  # by row: tokens from the slot's start to the first block of the row's table


class RowViews(NamedTuple):
    """The rows of a step as strided tensors. They stay readable while the step and these views are
    alive, even if other rows are mapped meanwhile. Implements `seams.PlacedRows`."""

    placement: Placement
    keys: Tensor  # (slots, heads, max_len, dim); only the placement's slots may be read
    values: Tensor
    step: StepMetadata

    def parts(self, kv_heads: int) -> PartPlan:
        plan: PartPlan = self.step.plan(_plan_parts, kv_heads, self.placement)
        return plan

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        visible = slice(part.offset, part.offset + part.length)
        return self.keys[part.row_slots, :, visible], self.values[part.row_slots, :, visible]


def _plan_parts(step: StepMetadata, kv_heads: int, placement: Placement) -> PartPlan:
    """Plans the parts of a step whose rows are each contiguous in memory. The rows of a part have
    the same geometry and offset, and consecutive slots."""
    geometries, is_complete = geometries_of(step)
    heads = slice(0, kv_heads)
    parts = []
    for geometry, all_members in geometries:
        runs: list[tuple[int, int, list[Member]]] = []
        next_in_run = None
        for row, first_visible in all_members:
            slot = placement.slots[row]
            offset = placement.offsets[row] + first_visible
            if (row, slot, offset) != next_in_run:
                runs.append((slot, offset, []))
            runs[-1][2].append((row, first_visible))
            next_in_run = (row + 1, slot + 1, offset)
        make_part = part_maker(step, geometry, geometries)
        for slot, offset, members in runs:
            row, _ = members[0]
            rows = slice(row, row + len(members))
            slots = slice(slot, slot + len(members))
            parts.append(make_part(rows, tuple(members), heads, offset, row_slots=slots))
    return tuple(parts), is_complete


class RowSlots:
    """The slots of a storage; each has the same row in all layers. `keeps_mappings`: whether slots
    keep the mappings of finished rows, for new rows that have most of the same blocks."""

    def __init__(self, keeps_mappings: bool = True) -> None:
        self.lock = forks.rlock()
        self._keeps_mappings = keeps_mappings
        self.max_len = MIN_SLOT_TOKENS  # of a slot, in tokens
        self.rows = [Row() for _ in range(MIN_SLOTS)]  # by slot
        self._num_gathering_steps = 0  # remaining steps that gather after mapping failed
        self._slot_by_last_block: dict[int, int] = {}  # may be out of date
        # by number of rows: the first slot of the last run of consecutive slots for that many rows
        self._last_runs: dict[int, int] = {}
        self._clock = 0  # counts steps

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def place(self, step: StepMetadata, are_consecutive: bool) -> Placement | None:
        """Assigns slots to the rows of a step, consecutive ones if `are_consecutive`, and returns
        them with each row's offset. Returns `None` if there are no rows, if the host does not know
        their lengths, if too few slots are free, or for `BACKOFF_STEPS` steps after `back_off`."""
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
        # in its slot, a row's first block is at the position of the block with the row's origin
        spans = [
            BlockSpan(origin // size, ids[: -(-length // size)], origin + length)
            for origin, ids, length in zip(origins, tables, step.seq_lens)
        ]
        with self.lock:
            slots = self._choose_slots(spans, are_consecutive, step.has_padding)
            if slots is None:
                return None
            self._clock += 1
            num_tokens = max((span.first_block + len(span.ids)) * size for span in spans)
            self._grow_length(num_tokens)
            for slot, span in zip(slots, spans):
                row = self.rows[slot]
                row.assign(step, span, self._clock, self._keeps_mappings)
                if row.block_ids:
                    self._slot_by_last_block[row.block_ids[-1]] = slot
        offsets = [span.first_block * size for span in spans]
        return Placement(slots, offsets)

    def back_off(self) -> None:
        """Makes the next `BACKOFF_STEPS` steps gather their rows, since mapping failed."""
        self._num_gathering_steps = BACKOFF_STEPS

    def _grow_length(self, num_tokens: int) -> None:
        """Doubles `max_len` until it is at least `num_tokens`. Layers then map rows at new
        addresses."""
        max_len = self.max_len
        while max_len < num_tokens:
            max_len *= 2
        if max_len != self.max_len:
            self.clear_mapped(self.rows)
            self.max_len = max_len

    def clear_mapped(self, rows: Iterable[Row]) -> None:
        """Records that nothing is mapped in the slots of these rows."""
        for row in rows:
            row.mapped_ids.clear()

    def _choose_slots(
        self,
        spans: list[BlockSpan],
        are_consecutive: bool,
        has_padding: bool,
    ) -> list[int] | None:
        """Returns a slot for each row: the slot of the row's last step or, for a new row, a free
        one. With `are_consecutive`, returns a run of free slots instead, unless the rows' last
        slots are consecutive. Returns `None` if too few slots are free."""
        assigned_slots: set[int] = set()
        last_slots: list[int | None] = []  # by row; `None` for new rows
        for span in spans:
            slot = self._find_slot(span, assigned_slots, has_padding)
            last_slots.append(slot)
            if slot is not None:
                assigned_slots.add(slot)
        first_slot = last_slots[0]
        if first_slot is not None:
            run = list(range(first_slot, first_slot + len(spans)))
            if last_slots == run:
                return run
        num_new = last_slots.count(None)
        if are_consecutive:
            are_new = num_new == len(spans)
            return self._choose_consecutive_slots(spans, are_new)
        unordered_slots = (
            slot for slot, row in enumerate(self.rows) if slot not in assigned_slots and row.is_free
        )
        free_slots = sorted(unordered_slots, key=lambda slot: self.rows[slot].last_used)
        if num_new > len(free_slots):
            first = len(self.rows)
            if not self._add_slots(first + num_new):
                return None
            free_slots += range(first, len(self.rows))
        slots = []
        for slot, span in zip(last_slots, spans):
            if slot is None:
                slot = free_slots[0]
                if self._keeps_mappings:
                    slot = max(free_slots, key=functools.partial(self._num_reusable, span))
                free_slots.remove(slot)
            slots.append(slot)
        return slots

    def _num_reusable(self, span: BlockSpan, slot: int) -> int:
        """Returns how many of a row's blocks are still mapped in a slot; 0 unless most of them are,
        since the slot's mappings may fit another row better."""
        ids = span.ids
        mapped_ids = self.rows[slot].mapped_ids[span.first_block : span.first_block + len(ids)]
        num_mapped = sum(map(operator.eq, mapped_ids, ids))
        if 2 * num_mapped <= len(ids):
            return 0
        return num_mapped

    def _find_slot(
        self,
        span: BlockSpan,
        assigned_slots: set[int],
        has_padding: bool,
    ) -> int | None:
        """Returns the slot that the row had in its last step, found by one of the row's last two
        blocks. Returns `None` if no slot outside `assigned_slots` has one of these blocks, or if
        using the slot would unmap blocks that other steps read."""
        last = len(span.ids) - 1
        for index in range(last, max(-1, last - 2), -1):
            block_id = span.ids[index]
            slot = self._slot_by_last_block.get(block_id)
            if slot is None or slot in assigned_slots:
                continue
            row = self.rows[slot]
            if not row.holds(span.first_block + index, block_id):
                continue
            if row.is_free or self._only_appends(row, span, has_padding):
                return slot
        return None

    def _only_appends(
        self,
        row: Row,
        span: BlockSpan,
        has_padding: bool,
    ) -> bool:
        """Whether `span` differs from the row only by appended blocks and missing leading blocks.
        If so, no block is unmapped, and other steps may keep reading the slot."""
        # leading blocks of the row that `span` lacks
        num_skipped = span.first_block - row.first_block
        # with padding, blocks before `span` must be unmapped
        keeps_leading = num_skipped == 0 or (num_skipped > 0 and not has_padding)
        if not keeps_leading:
            return False
        num_shared = len(row.block_ids) - num_skipped
        return row.block_ids[num_skipped:] == span.ids[:num_shared]

    def _choose_consecutive_slots(self, spans: list[BlockSpan], are_new: bool) -> list[int] | None:
        """Returns a run of consecutive free slots, one per row: the last run for the same number of
        rows or, if that is in use or new rows might reuse mappings, the best run. Adds slots if no
        run is free; returns `None` if there would be too many."""
        num_rows = len(spans)
        first_slot = self._last_runs.get(num_rows)
        is_free = False
        if first_slot is not None:
            run = self.rows[first_slot : first_slot + num_rows]
            is_free = all(row.is_free for row in run)
        can_reuse_mappings = are_new and self._keeps_mappings
        if first_slot is None or not is_free or can_reuse_mappings:
            first_slot = self._find_best_run(spans)
            if first_slot is None:
                first_slot = len(self.rows)
                if not self._add_slots(first_slot + num_rows):
                    return None
            self._last_runs[num_rows] = first_slot
        return list(range(first_slot, first_slot + num_rows))

    def _find_best_run(self, spans: list[BlockSpan]) -> int | None:
        """Returns the first slot of a run of consecutive free slots, one per row: the run in which
        the most blocks of the rows are mapped and, among equals, the least recently used; `None` if
        there is none."""
        best_start = None
        run_start = 0
        num_rows = len(spans)
        best_rank: tuple[int, float] = 0, -math.inf
        for slot, row in enumerate(self.rows):
            if not row.is_free:
                run_start = slot + 1
            elif slot + 1 - run_start >= num_rows:
                start = slot + 1 - num_rows
                num_reusable = sum(map(self._num_reusable, spans, range(start, slot + 1)))
                run = self.rows[start : slot + 1]
                last_used = max(run_row.last_used for run_row in run)
                rank = (num_reusable, -last_used)
                if rank > best_rank:
                    best_start = start
                    best_rank = rank
        return best_start

    def _add_slots(self, num_slots: int) -> bool:
        """Adds slots until there are at least `num_slots`. Returns `False`, with none added, if
        that is more than `MAX_SLOTS`."""
        if num_slots > MAX_SLOTS:
            return False
        if len(self.rows) < num_slots:
            self.clear_mapped(self.rows)
        while len(self.rows) < num_slots:
            self.rows += [Row() for _ in self.rows]
        return True
