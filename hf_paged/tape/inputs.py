"""The buffers at fixed addresses from which a recorded step reads its tokens and block tables,
filled with one copy per step. Runs no forward."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batching.execution.buckets import power_of_two
from ..batching.execution.inputs import Bounds, PackedTokens, write_changed_rows
from ..cache.group_memory import GroupMemory
from ..kernels.triton.cascade import SharedPrefix
from ..step import Cascade, Lengths, StepMetadata
from .graph_keys import Key
from .static_states import StaticStates

_DTYPES = {"q": torch.int64, "i": torch.int32}
_WORD = torch.int64  # of the buffers


class _Part:
    """One array of a step's inputs, of kind "q" (int64) or "i" (int32), in the buffers of host and
    device."""

    host: Any  # a NumPy array
    device: Tensor

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        self.count = count
        self._dtype = _DTYPES[kind]
        self.num_words = -(-count * self._dtype.itemsize // _WORD.itemsize)

    def allocate(self, host: Tensor, device: Tensor) -> None:
        """Places the part in its words of the two buffers."""
        self.host = host.view(self._dtype)[: self.count].numpy()
        self.device = device.view(self._dtype)[: self.count]

    def write(self, numbers: list[int]) -> None:
        self.host[: len(numbers)] = array(self.kind, numbers)

    def spread(
        self,
        numbers: list[int],
        num_decodes: int,
        shift: int,
        fill: int = 0,
    ) -> None:
        """Writes the whole part, as `padded` returns it."""
        self.host[:] = array(self.kind, padded(numbers, self.count, num_decodes, shift, fill))


def padded(
    numbers: list[int], count: int, num_decodes: int, shift: int, fill: int = 0
) -> list[int]:
    """Returns `count` numbers: those of decodes, `shift` unused entries, the numbers of chunks, and
    unused entries to the end. Unused entries get `fill`."""
    rest = count - len(numbers) - shift
    return [*numbers[:num_decodes], *[fill] * shift, *numbers[num_decodes:], *[fill] * rest]


NewPart = Callable[[str, int], _Part]


class _Tables:
    """Block tables, their lengths and first visible positions."""

    def __init__(self, num_rows: int, width: int, new_part: NewPart) -> None:
        self.width = width
        self.seq_lens = new_part("i", num_rows)
        self.starts = new_part("i", num_rows)
        self._block_ids = new_part("i", num_rows * width)
        self._written: list[list[int]] = [[] for _ in range(num_rows)]  # block ids of each row

    def write(self, tables: Iterable[list[int]], first: int = 0) -> None:
        """Writes the tables of the rows from `first` on."""
        write_changed_rows(self._block_ids.host, self.width, self._written, tables, first)

    @property
    def tensor(self) -> Tensor:
        return self._block_ids.device.view(-1, self.width)


class _GroupInputs(_Tables):
    """The parts of a layer group's [`StepMetadata`]."""

    def __init__(self, key: Key, number: int, memory: GroupMemory, new_part: NewPart) -> None:
        super().__init__(key.num_rows, key.widths[number], new_part)
        self.window = memory.spec.window
        self.block_size = memory.block_size
        self.slots = new_part("q", key.num_tokens)
        self.origins = new_part("i", key.num_rows)
        self.prefixes: _Prefixes | None = None
        if key.prefixes and key.prefixes[number][0]:
            num_prefixes, width = key.prefixes[number]
            self.prefixes = _Prefixes(key.num_decodes, num_prefixes, width, new_part)


class _Prefixes(_Tables):
    """The parts of a [`Cascade`] of decodes. Decodes that share no prefix form a last group, whose
    prefix is empty."""

    def __init__(
        self,
        num_rows: int,
        num_groups: int,
        width: int,
        new_part: NewPart,
    ) -> None:
        super().__init__(num_groups + 1, width, new_part)
        self.num_rows = num_rows
        self.num_groups = num_groups
        self.tail_starts = new_part("i", num_rows)
        self.members = new_part("i", num_rows)
        self.bounds = new_part("i", num_groups + 2)

    def fill(
        self,
        groups: Sequence[SharedPrefix],
        tables: list[list[int]],
        block_size: int,
    ) -> None:
        starts = [0] * self.num_rows
        bounds = [0]
        members = list[int]()
        for rows, num_blocks in groups:
            members += rows
            bounds.append(len(members))
            for row in rows:
                starts[row] = num_blocks * block_size
        num_empty = self.num_groups - len(groups)
        alone = set(range(self.num_rows)).difference(members)
        seq_lens = [num_blocks * block_size for _, num_blocks in groups]
        seq_lens += [0] * (num_empty + 1)
        tail_bounds = [*[bounds[-1]] * num_empty, self.num_rows]
        self.tail_starts.write(starts)
        self.members.write([*members, *alone])
        self.bounds.write([*bounds, *tail_bounds])
        self.seq_lens.write(seq_lens)
        shared = []
        for rows, num_blocks in groups:
            first_table = tables[rows[0]]
            shared.append(first_table[:num_blocks])
        self.write(shared)

    def cascade(self, decodes: StepMetadata) -> Cascade:
        assert decodes.lengths is not None
        lengths = Lengths(
            self.seq_lens.device,
            self.starts.device,
            self.bounds.device,
        )
        ends = [self.num_rows] * (self.num_groups + 1)
        query_start = (0, *ends)  # all rows may share one prefix
        prefixes = StepMetadata(
            self.tensor,
            query_start,
            (),
            (),
            decodes.block_size,
            causal=False,
            lengths=lengths,
        )
        tail_lengths = decodes.lengths._replace(starts=self.tail_starts.device)
        tails = dataclasses.replace(decodes, lengths=tail_lengths)
        return Cascade(tails, prefixes, self.members.device)


class StaticInputs:
    """Buffers at fixed addresses for steps that fit in `key`, filled with one copy per step.
    Unused rows hold token 0 at position 0, which is not stored (slot -1) and attends to no key
    (length 0). `token_ids` and `positions` are `(1, tokens)` int64. Where the host gives positions
    on axes, `arguments` have them as the model's `position_ids`: `(axes, 1, tokens)`, or `(1,
    tokens)` on one axis; where rows have states, `arguments` have those. `logit_indices`, only with
    chunks, is `(decodes + chunks,)` int64: the tokens that get logits. `ranges` is
    `(key.num_ranges, 2)` int64: each adapter's range of decode tokens, and, with chunks, its range
    of chunk tokens."""

    def __init__(
        self,
        key: Key,
        memories: list[GroupMemory],
        device: torch.device,
        layers: Sequence[Any] = (),
    ) -> None:
        """`layers` hold the rows' states."""
        self.key = key
        num_logit_indices = 0
        num_starts = 0
        if key.num_chunks:
            num_logit_indices = key.num_decodes + key.num_chunks
            num_starts = key.num_rows + 1
        parts: list[_Part] = []

        def new_part(kind: str, count: int) -> _Part:
            part = _Part(kind, count)
            parts.append(part)
            return part

        self._token_ids = new_part("q", key.num_tokens)
        self._positions = new_part("q", key.num_tokens)
        self._axes = new_part("q", key.num_axes * key.num_tokens)
        self._groups = []
        for number, memory in enumerate(memories):
            self._groups.append(_GroupInputs(key, number, memory, new_part))
        self._logit_indices = new_part("q", num_logit_indices)
        self._query_start = new_part("i", num_starts)
        self._ranges = new_part("q", 2 * key.num_ranges)
        num_words = [part.num_words for part in parts]
        with torch.inference_mode(False):  # the buffers outlive the call
            self._host = torch.zeros(
                sum(num_words),
                dtype=_WORD,
                pin_memory=device.type != "cpu",
                device="cpu",
            )
            self._buffer = torch.zeros_like(self._host, device=device)
            words = zip(self._host.split(num_words), self._buffer.split(num_words))
            for part, (host, on_device) in zip(parts, words):
                part.allocate(host, on_device)
            self.ranges = self._ranges.device.view(-1, 2)
            self.token_ids = self._token_ids.device[None]
            self.positions = self._positions.device[None]
            self.arguments: dict[str, Any] = {}
            if key.num_axes:
                axes = self._axes.device.view(key.num_axes, 1, key.num_tokens)
                self.arguments["position_ids"] = axes if key.num_axes > 1 else axes[0]
            self.states: StaticStates | None = None
            if layers:
                self.states = StaticStates(layers, key.num_decodes)
                self.arguments["states"] = self.states.buffers
            self.logit_indices = self._logit_indices.device if key.num_chunks else None
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()

    @property
    def state_buffers(self) -> list[Tensor]:
        return [] if self.states is None else self.states.buffers

    def copy_in(self, layers: Sequence[Any]) -> None:
        """As `StaticStates.copy_in`, if there are states."""
        if self.states is not None:
            self.states.copy_in(layers)

    def move_in(self, layers: Sequence[Any]) -> None:
        """As `StaticStates.move_in`, if there are states."""
        if self.states is not None:
            self.states.move_in(layers)

    def fill(
        self,
        tokens: PackedTokens,
        prefixes: Sequence[Sequence[SharedPrefix]],
        ranges: Sequence[tuple[Bounds, Bounds]],
    ) -> None:
        """Copies a step to the buffers, with the prefixes that its decodes share in each layer
        group and each adapter's token ranges. Waits first for the previous copy from pinned host
        memory."""
        if self._copied is not None:
            self._copied.synchronize()
        key = self.key
        num_decodes = tokens.num_decodes
        shift = key.num_decodes - num_decodes
        self._token_ids.spread(tokens.token_ids, num_decodes, shift)
        self._positions.spread(tokens.positions, num_decodes, shift)
        axes = list[int]()
        for positions in tokens.axes or ():
            axes += padded(positions, key.num_tokens, num_decodes, shift)
        self._axes.write(axes)
        for group, inputs, shared in itertools.zip_longest(tokens.groups, self._groups, prefixes):
            inputs.slots.spread(group.slots, num_decodes, shift, -1)
            inputs.seq_lens.spread(group.seq_lens, num_decodes, shift)
            inputs.origins.spread(group.origins, num_decodes, shift)
            inputs.write(group.tables[:num_decodes])
            if key.num_chunks:
                inputs.write(group.tables[num_decodes:], key.num_decodes)
            if inputs.prefixes is not None:
                inputs.prefixes.fill(shared, group.tables, inputs.block_size)
        if key.num_chunks:
            starts = [shift + start for start in tokens.query_start[num_decodes:]]
            num_unused = key.num_rows - key.num_decodes - len(starts)
            query_start = [
                *range(key.num_decodes),
                *starts,
                *starts[-1:] * num_unused,
                key.num_tokens,
            ]
            self._query_start.write(query_start)
            indices = [index if index < num_decodes else index + shift for index in tokens.last]
            self._logit_indices.spread(indices, 0, 0)
        bounds = list[int]()
        for (start, end), (first, last) in ranges:
            bounds += (start, end)
            if key.num_chunks:
                bounds += (first + shift, last + shift)
        if bounds:
            self._ranges.write(bounds)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def steps(self) -> list[StepMetadata]:
        """Returns one step per layer group. Any chunk may have up to all chunk tokens:
        `query_start` on the host gives them to the first chunk."""
        key = self.key
        num_decodes = key.num_decodes
        ends = [key.num_tokens] * (key.num_rows - num_decodes)
        query_start = (*range(num_decodes + 1), *ends)
        begins = self._query_start.device if key.num_chunks else None
        steps = []
        for inputs in self._groups:
            lengths = Lengths(
                inputs.seq_lens.device,
                inputs.starts.device,
                begins,
                inputs.origins.device,
            )
            step = StepMetadata(
                inputs.tensor,
                query_start,
                (),
                (),
                inputs.block_size,
                window=inputs.window,
                slots=inputs.slots.device[None],
                lengths=lengths,
            )
            if inputs.prefixes is not None:
                decodes = step.rows(0, num_decodes)
                cascade = inputs.prefixes.cascade(decodes)
                step = dataclasses.replace(step, cascade=cascade)
            steps.append(step)
        return steps


class StaticOutputs:
    """The buffers that recorded steps write logits to, by vocabulary size and dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def clear(self) -> None:
        self._buffers.clear()

    def like(self, logits: Tensor) -> Tensor:
        """Returns the buffer for logits `(n, vocab_size)` of this shape, dtype and device."""
        num_rows, vocab_size = logits.shape
        kind = (vocab_size, logits.dtype)
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < num_rows:
            # smaller graphs still write to the buffers they were recorded with
            sizes = power_of_two(1, num_rows), vocab_size
            with torch.inference_mode(False):
                buffer = torch.empty(sizes, dtype=logits.dtype, device=logits.device)
            self._buffers[kind] = buffer
        return buffer[:num_rows]
