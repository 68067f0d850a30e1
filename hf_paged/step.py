"""Attention metadata of one step: rows, lengths and block tables, built once and read by every
layer. The vocabulary in hf_paged/README.md has a diagram of `seq_len`, `context_len` and
`query_len`.

Tokens of all rows are concatenated, row after row. Positions are *table coordinates* of a row:
position `t` is stored in block `block_tables[row, t // block_size]` at offset `t % block_size`. A
row whose leading blocks were freed (sliding window) counts from its first remaining block.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .forks import lazy_property

Plan = TypeVar("Plan")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to `device`. The copy to a CUDA device goes through pinned memory, so
    that the host does not wait."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        host = host.pin_memory()
    return host.to(device, non_blocking=is_cuda)


def numbers_on(
    device: torch.device, numbers: Sequence[Any], dtype: torch.dtype | None = torch.long
) -> Tensor:
    """Copies numbers, or lists of numbers of equal length, to `device`, as `to_device` does.
    `dtype=None`: the dtype that torch infers."""
    return to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


class NotPackable(RuntimeError):
    """The model uses keys, values or masks of packed rows in a way that is correct only if each row
    of the batch holds one sequence."""


class NotCapturable(RuntimeError):
    """A step cannot be captured and replayed with other inputs: for example, its forward waits for
    the device, or its attention needs lengths on the host."""


class KeysReadError(NotCapturable):
    """In a step that is being recorded, code other than our attention reads keys or values."""


@dataclasses.dataclass
class ReadCounters:
    """Counts how often attention over cached tokens read blocks in place, and how often it gathered
    them first."""

    in_place: int = 0
    gathered: int = 0
    gathered_decodes: int = 0  # the part of `gathered` in steps with one query per row
    latent: int = 0  # how often MLA's expansion was applied to attention outputs, not to latents

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadCounters:
        return ReadCounters()  # a copied cache starts at 0


class Lengths(NamedTuple):
    """The lengths of a step, as in `StepMetadata`, as int32 tensors on the device of its block
    tables. `query_start` is `None` in a recorded step that has only decodes, since their rows have
    one query each."""

    seq_lens: Tensor  # (n,)
    starts: Tensor  # (n,)
    query_start: Tensor | None = None  # (n + 1,)
    origins: Tensor | None = None  # (n,), for packed rows only

    def rows(self, first: int, last: int, start: int) -> Lengths:
        """Returns the lengths of rows `[first, last)`. `start`: the step's token at which row
        `first` begins."""
        query_start = self.query_start
        if query_start is not None:
            query_start = query_start[first : last + 1]
            if start:
                query_start = query_start - start
        origins = self.origins
        if origins is not None:
            origins = origins[first:last]
        return Lengths(
            self.seq_lens[first:last],
            self.starts[first:last],
            query_start,
            origins,
        )


class Cascade(NamedTuple):
    """A step of one-query rows, split into two steps because groups of rows share leading blocks
    (cascade inference, FlashInfer, arXiv 2501.01005, sec. 3.1.2)."""

    # all rows, but in a row of a group only the positions after the shared prefix
    tails: StepMetadata
    # one row per group: the shared prefix, with the queries of the group's rows
    prefixes: StepMetadata
    query_index: Tensor  # (n,) int32 on the device: the rows of the groups, group by group


@dataclasses.dataclass(frozen=True, eq=False)
class StepMetadata:
    """The metadata of `n` rows with `T` tokens in total. The cache makes one object for each layer
    group. From it, attention derives objects that leave out positions hidden by a mask. Query `i`
    of a row is at position `seq_len - query_len + i`, which is negative for a padding query."""

    block_tables: Tensor
    """`(n, max_blocks)` int32, rows contiguous, on the pool's device. Entries past a row's last
    block are not read."""
    query_start: tuple[int, ...]  # n + 1: row i has tokens [query_start[i], query_start[i + 1])
    # number of tokens of each row, including new ones; () if only the device knows these numbers
    seq_lens: tuple[int, ...]
    starts: tuple[int, ...]  # first visible position of each row; () if `seq_lens` is ()
    block_size: int
    causal: bool = True  # the query at position p sees only keys <= p; if not, [start, seq_len)
    window: int | None = None  # with `causal`: keys in (p - window, p] only
    slots: Tensor | None = None
    """`(batch, query_len)` or, packed, `(1, T)` int64: the slot of each token's K and V; negative
    for tokens that are not stored."""
    block_ids: Sequence[list[int]] = ()
    """Block tables of the leading one-query rows, on the host. Attention searches them for shared
    prefixes; empty to skip the search."""
    lengths: Lengths | None = None
    """In a captured step: the tensors from which a replay reads its lengths. `query_start` then
    gives the capacity in rows, one-query rows first, and in tokens."""
    cascade: Cascade | None = None
    """In a captured step: the prefixes that its leading one-query rows share. Other steps find them
    in `block_ids`."""
    key_len: int | None = None
    """For packed rows of a model whose own code computes attention: the number of keys that this
    code gets for every row. It is the longest row's number of keys or, in a recorded step, the
    number of slots of a block table. Otherwise `None`."""
    columns: range | None = None
    """The columns of the padded batch, including new ones, for which a layer's `update` returns
    keys and values; `None` for packed rows."""
    # where position 0 of each row is: as a column if there are `columns`, otherwise as a position
    # in the row's sequence
    origins: tuple[int, ...] = ()
    counters: ReadCounters = dataclasses.field(default_factory=ReadCounters)
    query_len: int | None = dataclasses.field(init=False)  # `None` if rows differ; 1 without rows
    _plans: dict[object, Any] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        query_lens = set(self.query_lens) or {1}
        query_len = None
        if len(query_lens) == 1:
            query_len = query_lens.pop()
        object.__setattr__(self, "query_len", query_len)
        object.__setattr__(self, "_plans", {})

    def plan(self, make: Callable[..., Plan], *args: object) -> Plan:
        """Returns `make(self, *args)`, computed once for each `make` and `args` and cached. Tensors
        in `args` are compared by identity."""
        key = (make, *args) if args else make
        try:
            return self._plans[key]
        except KeyError:
            pass  # `make` runs after this block, so that its errors are not chained to `KeyError`
        new_plan = self._plans[key] = make(self, *args)
        return new_plan

    @classmethod
    def rectangle(
        cls,
        block_tables: Tensor,
        seq_lens: Iterable[int],
        block_size: int,
        *,
        query_len: int = 1,
        starts: Iterable[int] = (),
        **fields: Any,
    ) -> StepMetadata:
        """Makes a step with `query_len` tokens in each row; `starts` default to 0."""
        seq_lens = tuple(seq_lens)
        query_lens = [query_len] * block_tables.shape[0]
        query_start = tuple(itertools.accumulate(query_lens, initial=0))
        return cls(
            block_tables,
            query_start,
            seq_lens,
            tuple(starts) or (0,) * len(seq_lens),
            block_size,
            **fields,
        )

    def on(self, device: torch.device) -> StepMetadata:
        """Returns the step with its tensors on `device`. Layers on several devices may share
        tables."""
        if self.block_tables.device == device:
            return self
        return self.plan(_move, device)

    @property
    def num_rows(self) -> int:
        return len(self.query_start) - 1

    @property
    def num_tokens(self) -> int:
        return self.query_start[-1]

    @lazy_property
    def query_lens(self) -> tuple[int, ...]:
        """The number of tokens of each row."""
        return tuple([end - start for start, end in itertools.pairwise(self.query_start)])

    @lazy_property
    def max_query_len(self) -> int:
        """The largest number of queries of a row."""
        return max(self.query_lens, default=0)

    @property
    def on_device(self) -> Lengths:
        """The lengths on the device: `lengths` in a captured step, otherwise a copy of the host's
        lengths, made once."""
        return self.lengths or self.plan(_copy_lengths)

    @property
    def has_padding(self) -> bool:
        """Whether a row has padding in `columns`. Padding is not stored."""
        if self.columns is None:
            return False
        last_origin = max(self.origins, default=0)
        return last_origin > self.columns.start

    @property
    def is_first_prefill(self) -> bool:
        """Whether every row is a first prefill of the same length (at least 2), so that plain
        causal attention over the new K/V suffices."""
        query_len = self.query_len
        if query_len is None or query_len < 2:
            return False
        if not self.causal or self.lengths is not None:
            return False
        sees_all = self.window is None or self.window >= query_len
        if not sees_all or any(self.starts):
            return False
        return set(self.seq_lens) <= {query_len}

    def rows(self, first: int, last: int) -> StepMetadata:
        """Returns rows `[first, last)` as a step for attention: without `slots`, and with a cascade
        only if this step's cascade has just these rows."""
        start = self.query_start[first]
        query_start = self.query_start[first : last + 1]
        lengths = self.lengths
        if lengths:
            lengths = lengths.rows(first, last, start)
        cascade = self.cascade
        if cascade and (first, last) != (0, cascade.tails.num_rows):
            cascade = None
        return dataclasses.replace(
            self,
            block_tables=self.block_tables[first:last],
            query_start=tuple(offset - start for offset in query_start),
            seq_lens=self.seq_lens[first:last],
            starts=self.starts[first:last],
            origins=self.origins[first:last],
            slots=None,
            block_ids=self.block_ids[first:last],
            lengths=lengths,
            cascade=cascade,
        )

    def split(self, max_queries: int) -> tuple[StepMetadata | None, StepMetadata | None]:
        """Splits the step after its leading rows of up to `max_queries` queries each. Returns both
        parts; `None` for a part without rows."""
        num_rows = self.num_rows
        count = 0
        for query_len in self.query_lens:
            if query_len > max_queries:
                break
            count += 1
        if count == num_rows:
            return self, None
        if not count:
            return None, self
        return self.rows(0, count), self.rows(count, num_rows)

    def visible(self, row: int, query: int) -> tuple[int, int]:
        """Returns the range `[low, high)` of positions that `query` of `row` attends to; empty for
        a padding query."""
        low = self.starts[row]
        high = self.seq_lens[row]
        if self.causal:
            query_len = self.query_lens[row]
            position = high - query_len + query
            high = position + 1
            if self.window is not None:
                low = max(low, position - self.window + 1)
        return low, max(low, high)


def _move(step: StepMetadata, device: torch.device) -> StepMetadata:
    slots = step.slots
    if slots is not None:
        slots = slots.to(device)
    tables = step.block_tables.to(device)
    return dataclasses.replace(step, block_tables=tables, slots=slots)


def _copy_lengths(step: StepMetadata) -> Lengths:
    # making a tensor from an array's buffer takes a third of the time of making it from a list
    origins = step.origins if step.columns is None else ()
    numbers = (*step.seq_lens, *step.starts, *step.query_start, *origins)
    buffer = array("i", numbers)
    host = torch.frombuffer(buffer, dtype=torch.int32)
    device_numbers = to_device(host, step.block_tables.device)
    num_rows = step.num_rows
    sizes = (num_rows, num_rows, num_rows + 1, len(origins))
    seq_lens, starts, query_start, row_origins = device_numbers.split(sizes)
    return Lengths(seq_lens, starts, query_start, row_origins if origins else None)


def row_groups(step: StepMetadata) -> tuple[tuple[slice, StepMetadata], ...]:
    """Splits a step into runs of consecutive rows with equal `query_len`, in which either all rows
    are first prefills or none is. Returns (slice of tokens, step) for each run."""

    def group_key(row: int) -> tuple[int, bool]:
        query_len = step.query_lens[row]
        if query_len == 1:
            return 1, False
        return query_len, step.seq_lens[row] == query_len and not step.starts[row]

    groups = []
    for _, members in itertools.groupby(range(step.num_rows), group_key):
        rows = list(members)
        first, last = rows[0], rows[-1] + 1
        tokens = slice(step.query_start[first], step.query_start[last])
        groups.append((tokens, step.rows(first, last)))
    return tuple(groups)
