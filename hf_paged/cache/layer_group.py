"""One layer group of a cache's rows: layers that see the same tokens and keep them equally long."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..interrupts import held
from .block_pool import OutOfBlocksError
from .block_table import BlockTable
from .groups import GroupSpec
from .handles import Step
from .rows import CacheRows


class LayerGroup:
    """
    The block tables of one layer group, one a row. The first layer that updates in a step moves them on for all.

    Args:
        rows ([`CacheRows`]): Of the cache.
        spec ([`GroupSpec`]): Which of their groups it is.

    Attributes:
        length (`int`): Logical positions, padding included.
        paddings (`tuple[int, ...]`): Leading ones of each row that are not stored.
        expected_paddings: Those of a first step, and its length.
        record_past (`bool`): What left the window is kept until the next `crop`.
        num_layers (`int`): Layers of the group.
    """

    _OWN = ("length", "paddings", "expected_paddings", "record_past", "num_layers")

    def __init__(self, rows: CacheRows, spec: GroupSpec) -> None:
        self.num_layers, self.record_past = 0, False
        self._attach(rows, spec)
        self.clear()

    def _attach(self, rows: CacheRows, spec: GroupSpec) -> None:
        self.rows, self.spec, self.number = rows, spec, rows.specs.index(spec)
        self.memory, self.blocks = rows.memory, rows.memory.group(spec)
        rows.groups[spec] = self
        self._device_tables: dict[torch.device, torch.Tensor] = {}
        self.forget_steps()

    def clear(self) -> None:
        """Nothing is held."""
        self.length = 0
        self.paddings: tuple[int, ...] = ()
        self.expected_paddings: tuple[tuple[int, ...], int] | None = None
        self.forget_steps()

    def forget_steps(self) -> None:
        """The tables are others than they were."""
        self._step: Step | None = None
        self._view: Step | None = None
        self._slots: torch.Tensor | None = None
        self._host_tables: tuple[tuple[int, ...], ...] | None = None  # None: tables changed since they were taken

    @property
    def tables(self) -> list[BlockTable]:
        """One a row."""
        return [blocks.tables[self.number] for blocks in self.rows.held]

    def twin(self, rows: CacheRows) -> LayerGroup:
        """The same group of other rows, which hold what these hold."""
        other = LayerGroup(rows, self.spec)
        other.__dict__.update({name: getattr(self, name) for name in self._OWN})
        self.forget_steps()  # a layer that is still to write its part of the step shares the blocks now
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        copy.deepcopy(self.rows, memo)
        twin: LayerGroup = memo[id(self)]
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self._OWN, "rows", "spec")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, spec = state.pop("rows"), state.pop("spec")
        self._attach(rows, spec)
        self.__dict__.update(state)

    # -- moving on ------------------------------------------------------------------------------------------------

    def advance(
        self, batch_size: int, context_len: int, query_len: int, device: torch.device | str = "cpu"
    ) -> tuple[Step, torch.Tensor]:
        """
        Makes logical positions `[context_len, context_len + query_len)` writable in every row.

        Returns the step, and the slot of each new token, `(batch, query_len)` int64 with -1 for what is not stored, on
        the `device` that the first layer of the step asked for.
        Raises `OutOfBlocksError` with nothing allocated, `ValueError` for another batch size.
        """
        if not self.paddings and not self.length:
            self._open(batch_size, query_len)
        if batch_size != len(self.rows.held):
            raise ValueError(f"the cache holds {len(self.rows.held)} rows, but keys of {batch_size} rows came")
        length = context_len + query_len
        step = self._step
        if step is not None and (step.length, step.context_len) == (length, context_len) and self._slots is not None:
            return step, self._slots
        tables = self.tables
        if context_len < self.length:
            self._own(tables, context_len, length)
        if length > self.length:
            try:
                with held():
                    self._extend(tables, length, context_len)
            except OutOfBlocksError:
                if not self.length:  # nothing is held: be as if never asked
                    self._close(tables)
                raise
        for table, padding in zip(tables, self.paddings):
            places = table.places(max(0, context_len - padding), max(0, length - padding))
            self.blocks.pool.note_write(table.block_ids[place] for place in places)
        self._view = None
        self._step = self._snapshot(length, context_len)
        self._slots = self._new_slots(self._step).to(device)
        return self._step, self._slots

    def _open(self, batch_size: int, length: int) -> None:
        (paddings, expected_length), self.expected_paddings = self.expected_paddings or ((), 0), None
        is_expected = len(paddings) == batch_size and expected_length == length
        self.paddings = paddings if is_expected else (0,) * batch_size
        if not self.rows.held:
            self.rows.open(batch_size)

    def _close(self, tables: list[BlockTable]) -> None:
        for table in tables:
            table.free()
        self.clear()
        if not any(group.length for group in self.rows.groups.values()):
            self.rows.free()

    def _extend(self, tables: list[BlockTable], length: int, context_len: int) -> None:
        """Makes room up to `length`; borrowed tables have it, but for tokens that a model adds of its own."""
        window = self.spec.window
        if window is not None and not self.record_past:
            self._drop_outside_window(tables, context_len)
            if context_len == 0 and length >= window and not (self.length or self.rows.borrows):
                # a first prefill attends to its own states: what will be outside the window is never stored
                for table, padding in zip(tables, self.paddings):
                    table.skip(max(0, length - window + 1 - padding))
        counts = [max(0, length - padding - table.num_tokens) for table, padding in zip(tables, self.paddings)]
        if any(count and table.shared_tail is not None for table, count in zip(tables, counts)):
            self.rows.keep_snapshots()
        if self.rows.manager.extend(self.number, tables, counts) or self.rows.borrows:
            self._host_tables = None
        self.length = length
        self.memory.note_peak()

    def _own(self, tables: list[BlockTable], context_len: int, length: int) -> None:
        """
        Copies the blocks of logical positions `[context_len, length)` that are there already and that others hold too.
        Some are there where a layer holds fewer tokens than another of the group: its own, beside cross attention's.
        """
        if context_len == 0 and any(self.paddings):
            raise ValueError(
                f"a layer starts with {length} tokens where another of its kind holds {self.length}, of which the "
                f"first {self.paddings} of each row were padding and are not stored: pass rows without padding in front"
            )
        # a first prefill attends to its own states
        self._check_window(context_len or length)
        ranges = [(max(0, context_len - padding), max(0, length - padding)) for padding in self.paddings]
        if any(table.shared_blocks(*tokens) for table, tokens in zip(tables, ranges)):
            self.rows.keep_snapshots()
            self.rows.manager.own(self.number, tables, ranges)
            self._host_tables = None
            self.memory.note_peak()

    def _check_window(self, length: int) -> None:
        """Raises `ValueError` unless what the next query after `length` positions is shown is still there."""
        first = self.spec.first_visible(length)
        dropped = (table.num_dropped * table.block_size for table in self.tables)
        given_back = max((padding + count for padding, count in zip(self.paddings, dropped) if count), default=0)
        if given_back > first:
            raise ValueError(
                f"a layer looks {self.spec.window} tokens back from token {length}, of which the first {given_back} "
                f"were given back, as another layer of its kind holds {self.length} tokens: update all in each step"
            )

    def _drop_outside_window(self, tables: list[BlockTable], length: int) -> None:
        """Gives back what no query at logical position `length` or later can see."""
        assert self.spec.window is not None
        for table, padding in zip(tables, self.paddings):
            oldest = max(0, length - self.spec.window + 1 - padding)
            if oldest // table.block_size > table.num_dropped and table.block_ids:
                self.rows.keep_snapshots()
                table.drop_before(oldest)
                self._host_tables = None

    def _first_shown(self, length: int, context_len: int) -> int:
        first = self.spec.first_visible(context_len)
        if self.record_past and length == context_len:  # outside a step: all that is still there
            sizes = (table.num_dropped * table.block_size for table in self.tables)
            kept = [padding + dropped for padding, dropped in zip(self.paddings, sizes) if dropped]
            first = min(first, max(kept, default=0))
        return first

    def _snapshot(self, length: int, context_len: int) -> Step:
        size = self.blocks.block_size
        if self._host_tables is None:
            self._host_tables = tuple(tuple(table.block_ids) for table in self.tables)
            self._device_tables = {}
        return Step(
            length=length,
            context_len=context_len,
            first=self._first_shown(length, context_len),
            block_size=size,
            paddings=self.paddings,
            dropped=tuple(table.num_dropped * size for table in self.tables),
            host_tables=self._host_tables,
            tables=self._device_tables,
            counters=self.rows.counters,
        )

    def _new_slots(self, step: Step) -> torch.Tensor:
        size, position = step.block_size, step.context_len
        if not step.host_tables:
            return torch.empty(0, step.query_len, dtype=torch.long)
        if step.query_len == 1:
            slots = []
            for ids, padding, dropped in zip(step.host_tables, step.paddings, step.dropped):
                token = position - padding - dropped
                slots.append([ids[token // size] * size + token % size if token >= 0 else -1])
            return torch.tensor(slots)
        tables = step.block_tables(torch.device("cpu")).long()
        behind = torch.tensor([padding + dropped for padding, dropped in zip(step.paddings, step.dropped)])
        tokens = torch.arange(position, step.length)[None, :] - behind[:, None]  # (batch, query_len)
        stored = tokens >= 0
        tokens = tokens.clamp(min=0)
        columns = (tokens // size).clamp(max=max(0, tables.shape[1] - 1))
        slots = tables.gather(1, columns) * size + tokens % size if tables.shape[1] else torch.zeros_like(tokens)
        return slots.masked_fill_(~stored, -1)

    # -- what a layer shows outside a step ------------------------------------------------------------------------

    def view(self, length: int) -> Step:
        """A step without queries over the first `length` logical positions."""
        if self._view is None or self._view.length != length or self.length != length:
            if length < self.length:
                self._check_window(length)
            self._view = self._snapshot(length, length)
        return self._view

    def crop(self, length: int) -> None:
        """Forgets logical positions from `length` on, and what is outside the window then."""
        tables = self.tables
        for table, padding in zip(tables, self.paddings):
            table.truncate(max(0, length - padding))
        self.length = min(self.length, length)
        if self.spec.window is not None:
            self._drop_outside_window(tables, self.length)
        self.forget_steps()
