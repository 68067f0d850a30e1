"""One layer group of a cache's rows: layers that see the same tokens and keep them equally long."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from ..interrupts import held
from ..step import NotPackable, StepMetadata
from .block_pool import OutOfBlocksError
from .block_table import BlockTable
from .groups import GroupSpec
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
        packed ([`StepMetadata`], *optional*): Of the packed forward that runs now; no rows are held then.
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
        self.packed: StepMetadata | None = None
        self.forget_steps()

    def clear(self) -> None:
        """Nothing is held."""
        self.length = 0
        self.paddings: tuple[int, ...] = ()
        self.expected_paddings: tuple[tuple[int, ...], int] | None = None
        self.forget_steps()

    def forget_steps(self) -> None:
        """The tables are others than they were."""
        self._step: StepMetadata | None = None
        self._view: StepMetadata | None = None
        self._block_tables: torch.Tensor | None = None  # None: tables changed since they were taken

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

    def num_begun(self, context_len: int) -> int | None:
        """Tables that a step behind `context_len` positions writes to; `None` if one of them holds tokens already."""
        step = self.packed
        if step is None:
            return None if context_len else len(self.rows.held)
        query_lens = tuple(end - start for start, end in itertools.pairwise(step.query_start))
        return step.num_rows if step.seq_lens == query_lens else None

    def advance(
        self, batch_size: int, context_len: int, query_len: int, device: torch.device | str = "cpu"
    ) -> StepMetadata:
        """
        Makes logical positions `[context_len, context_len + query_len)` writable in every row.

        Returns the step, with tables and slots `(batch, query_len)` on the `device` that the first layer asked for.
        Raises `OutOfBlocksError` with nothing allocated, `ValueError` for another batch size, `NotPackable` for other
        sizes than a packed step's.
        """
        if self.packed is not None:
            if (batch_size, query_len) != (1, self.packed.num_tokens):
                raise NotPackable(
                    f"{batch_size} x {query_len} states came in a packed step of {self.packed.num_tokens} tokens"
                )
            return self.packed
        if not self.paddings and not self.length:
            self._open(batch_size, query_len)
        if batch_size != len(self.rows.held):
            raise ValueError(f"the cache holds {len(self.rows.held)} rows, but keys of {batch_size} rows came")
        length, step = context_len + query_len, self._step
        if step is not None and step.query_len == query_len and step.columns is not None:
            if step.columns.stop == length:
                return step
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
        self._step = self._snapshot(length, query_len, device)
        return self._step

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
            self._block_tables = None
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
            self._block_tables = None
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
                self._block_tables = None

    def _first_shown(self, length: int, context_len: int) -> int:
        first = self.spec.first_visible(context_len)
        if self.record_past and length == context_len:  # outside a step: all that is still there
            sizes = (table.num_dropped * table.block_size for table in self.tables)
            kept = [padding + dropped for padding, dropped in zip(self.paddings, sizes) if dropped]
            first = min(first, max(kept, default=0))
        return first

    def _snapshot(self, length: int, query_len: int, device: torch.device | str) -> StepMetadata:
        tables, size = self.tables, self.blocks.block_size
        if self._block_tables is None:
            width = max((len(table.block_ids) for table in tables), default=0)
            ids = [table.block_ids + [0] * (width - len(table.block_ids)) for table in tables]
            self._block_tables = torch.tensor(ids, dtype=torch.int32).view(len(ids), width)
        origins = tuple(padding + table.num_dropped * size for padding, table in zip(self.paddings, tables))
        return StepMetadata.rectangle(
            self._block_tables.to(device),
            (max(0, length - origin) for origin in origins),
            size,
            query_len=query_len,
            window=self.spec.window,
            slots=self._slots(tables, origins, length - query_len, query_len).to(device),
            columns=range(self._first_shown(length, length - query_len), length),
            origins=origins,
            counters=self.rows.counters,
        )

    def _slots(self, tables: list[BlockTable], origins: tuple[int, ...], first: int, query_len: int) -> torch.Tensor:
        """`(rows, query_len)` int64: of the logical positions from `first` on; -1 for what is not stored."""
        size = self.blocks.block_size
        if query_len == 1:
            slots = []
            for table, origin in zip(tables, origins):
                token = first - origin
                slots.append([table.block_ids[token // size] * size + token % size if token >= 0 else -1])
            return torch.tensor(slots, dtype=torch.long).view(-1, 1)
        assert self._block_tables is not None
        if not self._block_tables.numel():
            return torch.full((len(tables), query_len), -1)
        tokens = torch.arange(first, first + query_len)[None, :] - torch.tensor(origins)[:, None]
        columns = (tokens // size).clamp(0, self._block_tables.shape[1] - 1)
        slots = self._block_tables.gather(1, columns).long() * size + tokens % size
        return slots.masked_fill_(tokens < 0, -1)

    # -- what a layer shows outside a step ------------------------------------------------------------------------

    def view(self, length: int, device: torch.device) -> StepMetadata:
        """A step without queries over the first `length` logical positions."""
        view = self._view
        if view is None or view.columns is None or view.columns.stop != length or self.length != length:
            if length < self.length:
                self._check_window(length)
            view = self._view = self._snapshot(length, 0, device)
        return view

    def crop(self, length: int) -> None:
        """Forgets logical positions from `length` on, and what is outside the window then."""
        tables = self.tables
        for table, padding in zip(tables, self.paddings):
            table.truncate(max(0, length - padding))
        self.length = min(self.length, length)
        if self.spec.window is not None:
            self._drop_outside_window(tables, self.length)
        self.forget_steps()
