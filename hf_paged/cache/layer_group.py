"""The block tables of one layer group of a cache, advanced once per step for all of its layers.
`cache.rows` runs the operations on rows of all groups."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..interrupts import guarded
from ..step import NotPackable, StepMetadata
from .block_pool import BlockTable
from .groups import GroupSpec

if TYPE_CHECKING:
    from .rows import CacheRows


class LayerGroup:
    """The block tables of one layer group, one per row. The first layer to update in a step
    advances them for all layers."""

    def __init__(self, rows: CacheRows, spec: GroupSpec) -> None:
        self.num_layers = 0
        self.record_past = False  # whether tokens outside the window are kept until the next `crop`
        self.rows = rows
        self.spec = spec
        self.index = rows.specs.index(spec)
        self.memory = rows.memory
        self.group_memory = rows.memory.group(spec)
        rows.groups[spec] = self
        # step of the current packed forward, during which the cache holds no rows
        self.packed_step: StepMetadata | None = None
        self.clear()

    def clear(self, expected_paddings: tuple[tuple[int, ...], int] | None = None) -> None:
        """Sets the length to 0; all tables must be empty. `expected_paddings`: the paddings of the
        first step and its length, if known in advance; a first step of another shape ignores
        them."""
        self.expected_paddings = expected_paddings
        self.set_rows((), 0)

    def set_rows(self, paddings: tuple[int, ...], length: int) -> None:
        """Called after the tables have changed: the rows now hold `length` logical positions each,
        including `paddings`, their leading positions that are not stored. Drops cached steps."""
        self.paddings, self.length = paddings, length
        # steps over the current tables, by their length and number of queries
        self._steps: dict[tuple[int, int], StepMetadata] = {}
        self._block_tables: Tensor | None = None  # `None`: out of date

    @property
    def tables(self) -> list[BlockTable]:
        return [sequence.tables[self.index] for sequence in self.rows.sequences]

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and `copy.deepcopy`. The rows include tables and memory."""
        names = (
            "length",
            "paddings",
            "expected_paddings",
            "record_past",
            "num_layers",
            "rows",
            "spec",
        )
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("rows"), state.pop("spec"))  # type: ignore[misc]
        self.__dict__.update(state)

    def num_new_tables(self, context_len: int) -> int | None:
        """Returns the number of tables whose blocks get their first content in this step, which
        follows `context_len` positions; `None` if a table of the step already has content."""
        step = self.packed_step
        if step is None:
            if context_len:
                return None
            return sum(bool(table.block_ids) for table in self.tables)
        if step.seq_lens != step.query_lens:
            return None
        return step.num_rows

    def advance(
        self,
        batch_size: int,
        context_len: int,
        query_len: int,
        device: torch.device,
    ) -> StepMetadata:
        """Makes logical positions `[context_len, context_len + query_len)` writable in every row.
        Returns the step, on `device` unless another layer began it. Raises `OutOfBlocksError`, with
        nothing allocated, if too few blocks are available; `ValueError` if the batch size differs
        from the number of rows, or if the layer cannot catch up with the other layers; and
        `NotPackable` if the sizes differ from the packed step's."""
        if self.packed_step is not None:
            sizes = (batch_size, query_len)
            if sizes != (1, self.packed_step.num_tokens):
                raise NotPackable(
                    f"keys of {batch_size} x {query_len} tokens came in a packed step of"
                    f" {self.packed_step.num_tokens} tokens"
                )
            return self.packed_step
        num_rows = len(self.rows.sequences)
        has_rows = self.length or num_rows
        if has_rows and batch_size != num_rows:
            state = f"holds {num_rows} rows" if num_rows else "has dropped all its rows"
            raise ValueError(
                f"the cache {state}, but got keys of {batch_size} rows: `reset` it first"
            )
        if not self.paddings and not self.length:  # the rows begin in this step
            paddings, expected_length = self.expected_paddings or ((), 0)
            if len(paddings) != batch_size or expected_length != query_len:
                paddings = (0,) * batch_size
            sequences = self.rows.sequences
            if not sequences:
                sequences = [self.rows.manager.new() for _ in range(batch_size)]
            # one statement, since `undo_first_step` assumes that the step has begun once paddings
            # are set
            self.rows.sequences, self.paddings, self.expected_paddings = sequences, paddings, None
        length = context_len + query_len
        step = self._steps.get((length, query_len))
        if step is not None:
            return step
        if context_len != self.length or not self._use_slots(length):
            self._make_writable(context_len, length)
        self._steps.clear()
        return self._make_step(length, query_len, device)

    def _use_slots(self, length: int) -> bool:
        """Extends all rows to `length` logical positions if that only takes raising their token
        counts; returns whether it did. Otherwise, changes nothing."""
        tables = self.tables
        paddings = self.paddings
        if self.rows.is_borrowed:
            # the tables' owner has allocated blocks, and copied shared ones, for counted tokens
            rows = zip(tables, paddings)
            if not all(padding + table.num_tokens >= length for table, padding in rows):
                return False
            self.length, self._block_tables = length, None
            return True
        first_visible = 0
        if not self.record_past:
            first_visible = self.spec.first_visible(self.length)
        if not self.length or self.memory.is_recovery_due:
            return False
        if not self.group_memory.pool.is_exclusive:
            return False
        for table, padding in zip(tables, paddings):
            size = table.block_size
            num_slots = table.num_tokens + table.num_unused_slots
            num_droppable = (first_visible - padding) // size
            if padding + num_slots < length or num_droppable > table.num_dropped:
                return False
        for table, padding in zip(tables, paddings):
            table.num_tokens = max(table.num_tokens, length - padding)
        self.length = length
        self.memory.note_progress()
        return True

    @guarded
    def undo_first_step(self, length: int) -> None:
        """Undoes a failed first step of `length` positions, so that it can be retried with the same
        paddings: empties the tables. If all other groups are also empty, drops the rows, so that a
        step with another batch size can begin. Does nothing to borrowed rows."""
        if self.rows.is_borrowed or not self.paddings:
            return
        with self.memory.changing():
            paddings = self.paddings
            for table in self.tables:
                table.free()
            self.clear()
            groups = list(self.rows.groups.values())
            if not any(group.length for group in groups):
                self.rows.free()
            for group in groups:
                if not group.length:
                    group.clear((paddings, length))

    @guarded
    def _make_writable(self, context_len: int, length: int) -> None:
        """Frees blocks outside the window and makes logical positions `[context_len, length)`
        writable; another layer of the group may already have stored some of them. Borrowed tables
        lack blocks only for tokens that the model's own code adds. Raises `ValueError` if the layer
        cannot catch up with the other layers."""
        if context_len < self.length:
            if context_len == 0 and any(self.paddings):
                raise ValueError(
                    f"a layer starts with {length} tokens while another layer of its group holds"
                    f" {self.length}, including {list(self.paddings)} tokens of padding (one number"
                    " per row), which are not stored: pass rows without padding"
                )
            # a first prefill attends only to its new K/V
            self._check_window(context_len or length)
        is_borrowed = self.rows.is_borrowed
        tables = self.tables
        ranges = [
            (max(0, context_len - padding), max(0, length - padding)) for padding in self.paddings
        ]
        with self.memory.changing():
            if length > self.length and not self.record_past:
                is_first_prefill = context_len == 0 and not self.length and not is_borrowed
                first_visible = self.spec.first_visible(length)
                self._drop_outside_window(context_len)
                if is_first_prefill and first_visible:
                    # a first prefill attends only to its new K/V, so it stores none that will be
                    # outside the window
                    for table, padding in zip(tables, self.paddings):
                        table.skip(max(0, first_visible - padding))
            tables_and_ranges = zip(tables, ranges)
            if any(table.read_only_blocks(*tokens) for table, tokens in tables_and_ranges):
                self.rows.handles.gather()
            if self.rows.manager.extend(self.index, tables, ranges) or is_borrowed:
                self._block_tables = None
            if is_borrowed:
                for blocks in self.rows.sequences:
                    blocks.limit_capacity()  # their owner has counted fewer tokens
            self.length = max(self.length, length)
            self.memory.note_progress()
        self.group_memory.pool.check_writable(
            block_id
            for table, tokens in zip(tables, ranges)
            for block_id in table.read_only_blocks(*tokens)
        )

    def _check_window(self, length: int) -> None:
        """Raises `ValueError` unless all tokens that the next query after `length` positions sees
        are still stored."""
        if self._freed_before > self.spec.first_visible(length):
            raise ValueError(
                f"a layer attends to {self.spec.window} tokens up to token {length}, but the first"
                f" {self._freed_before} were freed, since another layer with the same tables holds"
                f" {self.length} tokens: update all layers in each step"
            )

    @property
    def _freed_before(self) -> int:
        """The largest logical position before which some row has freed its blocks; 0 if none."""
        freed_before = (
            padding + table.first_token
            for table, padding in zip(self.tables, self.paddings)
            if table.first_token
        )
        return max(freed_before, default=0)

    def _drop_outside_window(self, length: int) -> None:
        """Frees the blocks that no query after the first `length` positions sees."""
        first_visible = self.spec.first_visible(length)
        for table, padding in zip(self.tables, self.paddings):
            first_token = max(0, first_visible - padding)
            first_block = first_token // table.block_size
            if first_block > table.num_dropped and table.block_ids:
                self.rows.handles.gather()
                table.drop_before(first_token)
                self._block_tables = None

    def _make_step(
        self,
        length: int,
        query_len: int,
        device: torch.device,
    ) -> StepMetadata:
        tables = self.tables
        size = self.group_memory.block_size
        if self._block_tables is None:
            num_blocks = (len(table.block_ids) for table in tables)
            width = max(num_blocks, default=0)
            rows = [table.block_ids + [0] * (width - len(table.block_ids)) for table in tables]
            block_ids = array("i", itertools.chain.from_iterable(rows))
            self._block_tables = _tensor(block_ids, torch.int32, len(tables), width)
        seq_lens = []
        origins = []
        slots = array("q")
        for table, padding in zip(tables, self.paddings):
            num_dropped_tokens = table.num_dropped * size
            origin = padding + num_dropped_tokens
            end = max(0, length - origin)
            start = max(0, length - origin - query_len)
            if query_len:
                num_unstored = query_len - (end - start)
                slots.extend([-1] * num_unstored)
                slots.extend(table.slots(num_dropped_tokens + start, num_dropped_tokens + end))
            seq_lens.append(end)
            origins.append(origin)
        first_column = self.spec.first_visible(length - query_len)
        if self.record_past and not query_len:  # without queries: all tokens that are still stored
            first_column = min(first_column, self._freed_before)
        block_tables = self._block_tables.to(device)
        slot_tensor = _tensor(slots, torch.long, len(tables), query_len)
        step = self._steps[length, query_len] = StepMetadata.rectangle(
            block_tables,
            seq_lens,
            size,
            query_len=query_len,
            window=self.spec.window,
            slots=slot_tensor.to(device),
            columns=range(first_column, length),
            origins=tuple(origins),
            counters=self.rows.counters,
        )
        return step

    def view(self, length: int, device: torch.device) -> StepMetadata:
        """Returns a step without queries over the first `length` logical positions. Raises
        `ValueError` if visible positions were freed."""
        if length < self.length:
            self._check_window(length)
        return self._steps.get((length, 0)) or self._make_step(length, 0, device)

    def check_crop(self, length: int) -> None:
        """Raises `ValueError` if the new end lies in freed blocks."""
        for table, padding in zip(self.tables, self.paddings):
            table.check_truncate(max(0, length - padding))

    def crop(self, length: int) -> None:
        """Removes logical positions from `length` on, then frees blocks outside the window."""
        paddings = tuple(min(padding, length) for padding in self.paddings if length)
        for table, padding in zip(self.tables, self.paddings):
            table.truncate(max(0, length - padding))
        self.set_rows(paddings, min(self.length, length))
        self._drop_outside_window(self.length)


def _tensor(values: array[int], dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor over an array's buffer, three times as fast as making one from a list."""
    if values:
        tensor = torch.frombuffer(values, dtype=dtype)
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.view(shape)
