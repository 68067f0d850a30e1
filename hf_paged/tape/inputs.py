"""The buffers at fixed addresses that recorded steps use. A step reads its tokens and block tables
from input buffers, which one copy per step fills, and writes its logits to output buffers."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import forks
from ..batching.execution.buckets import power_of_two
from ..batching.execution.inputs import Bounds, PackedTokens, write_changed_rows
from ..cache.free_memory import discard
from ..cache.group_memory import GroupMemory
from ..kernels.triton.cascade import SharedPrefix
from ..step import Cascade, Lengths, StepMetadata
from .graph_keys import GraphKey

_DTYPES = {"q": torch.int64, "i": torch.int32}
_WORD = torch.int64  # the dtype of the buffers; each array begins at a word


class _InputArray:
    """One array of a step's inputs, with typecode "q" (int64) or "i" (int32), in the buffers on
    host and device."""

    on_host: Any  # a NumPy array
    on_device: Tensor

    def __init__(self, typecode: str, count: int) -> None:
        self.typecode = typecode
        self.count = count
        self._dtype = _DTYPES[typecode]
        self.num_words = -(-count * self._dtype.itemsize // _WORD.itemsize)

    def bind(self, host_words: Tensor, device_words: Tensor) -> None:
        """Places the array in these `num_words` words of the two buffers."""
        self.on_host = host_words.view(self._dtype)[: self.count].numpy()
        self.on_device = device_words.view(self._dtype)[: self.count]

    def write(self, numbers: list[int]) -> None:
        """Writes `numbers` to the beginning of the array."""
        self.on_host[: len(numbers)] = array(self.typecode, numbers)

    def write_padded(
        self,
        numbers: list[int],
        num_decodes: int,
        shift: int,
        fill: int = 0,
    ) -> None:
        """Writes the result of `padded` for these arguments to the whole array."""
        all_numbers = padded(numbers, self.count, num_decodes, shift, fill)
        self.on_host[:] = array(self.typecode, all_numbers)


def padded(
    numbers: list[int], count: int, num_decodes: int, shift: int, fill: int = 0
) -> list[int]:
    """Returns `count` numbers: the first `num_decodes` of `numbers`, `shift` times `fill`, the rest
    of `numbers`, and `fill` up to the end."""
    num_at_end = count - len(numbers) - shift
    return [*numbers[:num_decodes], *[fill] * shift, *numbers[num_decodes:], *[fill] * num_at_end]


NewArray = Callable[[str, int], _InputArray]
"""Adds an array to the buffers, from its typecode and its count of numbers."""


class _Tables:
    """Block tables of rows, with the rows' lengths and first visible positions, in tokens."""

    def __init__(self, num_rows: int, width: int, new_array: NewArray) -> None:
        self.width = width
        self.seq_lens = new_array("i", num_rows)
        self.starts = new_array("i", num_rows)
        self._block_ids = new_array("i", num_rows * width)
        self._written_ids: list[list[int]] = [[] for _ in range(num_rows)]  # block ids of each row

    def write(self, tables: Iterable[list[int]], first: int = 0) -> None:
        """Writes the tables of the rows from `first` on."""
        write_changed_rows(self._block_ids.on_host, self.width, self._written_ids, tables, first)

    @property
    def tensor(self) -> Tensor:
        """`(num_rows, width)` int32, on the device."""
        return self._block_ids.on_device.view(-1, self.width)


class _GroupInputs(_Tables):
    """The arrays of a layer group's [`StepMetadata`]."""

    def __init__(self, key: GraphKey, group: int, memory: GroupMemory, new_array: NewArray) -> None:
        super().__init__(key.num_rows, key.widths[group], new_array)
        self.window = memory.spec.window
        self.block_size = memory.block_size
        self.slots = new_array("q", key.num_tokens)
        self.origins = new_array("i", key.num_rows)
        # the `GroupTokens.starts` of the last step; the array has 0 for all other rows
        self.written_starts: Sequence[int] = ()
        self.cascade_inputs: _CascadeInputs | None = None
        if key.prefixes and key.prefixes[group][0]:
            num_prefixes, width = key.prefixes[group]
            self.cascade_inputs = _CascadeInputs(key.num_decodes, num_prefixes, width, new_array)


class _CascadeInputs(_Tables):
    """The arrays of a [`Cascade`] of decodes. Each shared prefix has a block table. The last table
    belongs to an empty prefix, for the decodes that share no prefix."""

    def __init__(
        self,
        num_decodes: int,
        max_prefixes: int,
        width: int,
        new_array: NewArray,
    ) -> None:
        super().__init__(max_prefixes + 1, width, new_array)
        self.num_decodes = num_decodes
        self.max_prefixes = max_prefixes
        self.tail_starts = new_array("i", num_decodes)
        self.query_index = new_array("i", num_decodes)
        self.query_start = new_array("i", max_prefixes + 2)

    def fill(
        self,
        prefixes: Sequence[SharedPrefix],
        tables: list[list[int]],
        block_size: int,
    ) -> None:
        """Writes the prefixes that a step's decodes share. `tables`: the block tables of the step's
        rows."""
        tail_starts = [0] * self.num_decodes
        query_start = [0]
        grouped_rows = list[int]()
        for rows, num_blocks in prefixes:
            grouped_rows += rows
            query_start.append(len(grouped_rows))
            for row in rows:
                tail_starts[row] = num_blocks * block_size
        num_unused = self.max_prefixes - len(prefixes)
        ungrouped_rows = set(range(self.num_decodes)).difference(grouped_rows)
        seq_lens = [num_blocks * block_size for _, num_blocks in prefixes]
        seq_lens += [0] * (num_unused + 1)
        query_start += [*[query_start[-1]] * num_unused, self.num_decodes]
        self.tail_starts.write(tail_starts)
        self.query_index.write([*grouped_rows, *ungrouped_rows])
        self.query_start.write(query_start)
        self.seq_lens.write(seq_lens)
        shared_tables = []
        for rows, num_blocks in prefixes:
            first_table = tables[rows[0]]
            shared_tables.append(first_table[:num_blocks])
        self.write(shared_tables)

    def cascade(self, decodes: StepMetadata) -> Cascade:
        """Returns the cascade of a recorded step's decodes."""
        assert decodes.lengths is not None
        lengths = Lengths(
            self.seq_lens.on_device,
            self.starts.on_device,
            self.query_start.on_device,
        )
        ends = [self.num_decodes] * (self.max_prefixes + 1)
        query_start = (0, *ends)  # in a replay, all rows may share any of the prefixes
        prefixes = StepMetadata(
            self.tensor,
            query_start,
            (),
            (),
            decodes.block_size,
            causal=False,
            lengths=lengths,
        )
        tail_lengths = decodes.lengths._replace(starts=self.tail_starts.on_device)
        tails = dataclasses.replace(decodes, lengths=tail_lengths)
        return Cascade(tails, prefixes, self.query_index.on_device)


class StaticInputs:
    """Buffers at fixed addresses for steps that fit in `key`, filled with one copy per step. Each
    unused token is token 0 at position 0: it is not stored (slot -1), and its row attends to no key
    (length 0).

    `token_ids` and `positions` are `(1, tokens)` int64. `logit_indices` is `(decodes + chunks,)`
    int64, the indices of the tokens that get logits; `None` without chunks. `ranges` is
    `(key.num_ranges, 2)` int64: for each key of the context, a range of decodes and, with chunks, a
    range of chunk tokens. `arguments` contains further arguments of the forward: `position_ids`, if
    positions do not count tokens, `(axes, 1, tokens)` or for one axis `(1, tokens)`; and `states`,
    the buffers of the rows' states, if there are any."""

    def __init__(
        self,
        key: GraphKey,
        memories: list[GroupMemory],
        device: torch.device,
        layers: Sequence[Any] = (),
    ) -> None:
        """`memories`: by layer group. `layers`: the cache's layers that hold the rows' states."""
        self.key = key
        num_logit_indices = 0
        num_starts = 0
        if key.num_chunks:
            num_logit_indices = key.num_decodes + key.num_chunks
            num_starts = key.num_rows + 1
        arrays: list[_InputArray] = []

        def new_array(typecode: str, count: int) -> _InputArray:
            created = _InputArray(typecode, count)
            arrays.append(created)
            return created

        self._token_ids = new_array("q", key.num_tokens)
        self._positions = new_array("q", key.num_tokens)
        self._axes = new_array("q", key.num_axes * key.num_tokens)
        self._groups = []
        for group, memory in enumerate(memories):
            self._groups.append(_GroupInputs(key, group, memory, new_array))
        self._logit_indices = new_array("q", num_logit_indices)
        self._query_start = new_array("i", num_starts)
        self._ranges = new_array("q", 2 * key.num_ranges)
        num_words = [input_array.num_words for input_array in arrays]
        with torch.inference_mode(False):  # the buffers outlive the call
            self._host = torch.zeros(
                sum(num_words),
                dtype=_WORD,
                pin_memory=device.type != "cpu",
                device="cpu",
            )
            self._buffer = torch.zeros_like(self._host, device=device)
            words = zip(self._host.split(num_words), self._buffer.split(num_words))
            for input_array, (host_words, device_words) in zip(arrays, words):
                input_array.bind(host_words, device_words)
            self.ranges = self._ranges.on_device.view(-1, 2)
            self.token_ids = self._token_ids.on_device[None]
            self.positions = self._positions.on_device[None]
            self.arguments: dict[str, Any] = {}
            if key.num_axes:
                axes = self._axes.on_device.view(key.num_axes, 1, key.num_tokens)
                self.arguments["position_ids"] = axes if key.num_axes > 1 else axes[0]
            self.states: Any = None  # the `StaticStates`, if there are any
            if layers:
                with forks.imports:
                    from .static_states import StaticStates

                tables = zip(key.widths, memories)
                num_columns = max(
                    (width * memory.block_size for width, memory in tables), default=0
                )
                self.states = StaticStates(layers, key.num_decodes, num_columns)
                self.arguments["states"] = self.states.buffers
            self.logit_indices = self._logit_indices.on_device if key.num_chunks else None
        self._copy_done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copy_done = torch.cuda.Event()

    @property
    def state_buffers(self) -> list[Tensor]:
        return [] if self.states is None else self.states.buffers

    @property
    def overwritten_buffers(self) -> list[Tensor]:
        return [] if self.states is None else self.states.overwritten_buffers

    def copy_in(self, layers: Sequence[Any]) -> None:
        """As `StaticStates.copy_in`, if there are states."""
        if self.states is not None:
            self.states.copy_in(layers)

    def move_in(self, layers: Sequence[Any]) -> None:
        """As `StaticStates.move_in`, if there are states."""
        if self.states is not None:
            self.states.move_in(layers)

    def grow(self, layers: Sequence[Any]) -> None:
        """As `StaticStates.grow`, if there are states."""
        if self.states is not None:
            self.states.grow(layers)

    def fill(
        self,
        tokens: PackedTokens,
        prefixes: Sequence[Sequence[SharedPrefix]],
        ranges: Sequence[tuple[Bounds, Bounds]],
    ) -> None:
        """Copies a step to the buffers, after waiting for the previous copy from pinned memory.
        `prefixes`: the prefixes that decodes share, by layer group, or `()`. `ranges`: for
        each key of the context, its ranges of decodes and of chunk tokens."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        key = self.key
        num_decodes = tokens.num_decodes
        shift = key.num_decodes - num_decodes  # of chunks, by the unused decode rows before them
        self._token_ids.write_padded(tokens.token_ids, num_decodes, shift)
        self._positions.write_padded(tokens.positions, num_decodes, shift)
        axes = list[int]()
        for positions in tokens.axes or ():
            axes += padded(positions, key.num_tokens, num_decodes, shift)
        self._axes.write(axes)
        for group, inputs, group_prefixes in itertools.zip_longest(
            tokens.groups, self._groups, prefixes
        ):
            inputs.slots.write_padded(group.slots, num_decodes, shift, -1)
            inputs.seq_lens.write_padded(group.seq_lens, num_decodes, shift)
            inputs.origins.write_padded(group.origins, num_decodes, shift)
            if group.starts != inputs.written_starts:
                inputs.starts.write_padded([*group.starts], num_decodes, shift)
                inputs.written_starts = group.starts
            inputs.write(group.tables[:num_decodes])
            if key.num_chunks:
                inputs.write(group.tables[num_decodes:], key.num_decodes)
            if inputs.cascade_inputs is not None:
                inputs.cascade_inputs.fill(group_prefixes, group.tables, inputs.block_size)
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
            self._logit_indices.write_padded(indices, 0, 0)
        flat_ranges = list[int]()
        for decode_range, (chunk_start, chunk_end) in ranges:
            flat_ranges += decode_range
            if key.num_chunks:
                flat_ranges += (chunk_start + shift, chunk_end + shift)
        if flat_ranges:
            self._ranges.write(flat_ranges)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()

    def steps(self) -> list[StepMetadata]:
        """Returns the recorded step of each layer group. Its `query_start` on the host gives all
        chunk tokens to the first chunk, since a replay may divide them in any way."""
        key = self.key
        num_decodes = key.num_decodes
        ends = [key.num_tokens] * (key.num_rows - num_decodes)
        query_start = (*range(num_decodes + 1), *ends)
        device_query_start = self._query_start.on_device if key.num_chunks else None
        steps = []
        for inputs in self._groups:
            lengths = Lengths(
                inputs.seq_lens.on_device,
                inputs.starts.on_device,
                device_query_start,
                inputs.origins.on_device,
            )
            step = StepMetadata(
                inputs.tensor,
                query_start,
                (),
                (),
                inputs.block_size,
                window=inputs.window,
                slots=inputs.slots.on_device[None],
                lengths=lengths,
            )
            if inputs.cascade_inputs is not None:
                decodes = step.rows(0, num_decodes)
                cascade = inputs.cascade_inputs.cascade(decodes)
                step = dataclasses.replace(step, cascade=cascade)
            steps.append(step)
        return steps


class StaticOutputs:
    """The buffers that recorded steps write logits to, by vocabulary size and dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def clear(self) -> None:
        self._buffers.clear()

    def discard(self) -> bool:
        """Gives the memory of the buffers back to the system until the next replay; returns whether
        that was possible."""
        return discard(list(self._buffers.values()))

    def like(self, logits: Tensor) -> Tensor:
        """Returns a buffer with the shape `(n, vocab_size)`, dtype and device of `logits`."""
        num_rows, vocab_size = logits.shape
        buffer_key = (vocab_size, logits.dtype)
        buffer = self._buffers.get(buffer_key)
        if buffer is None or len(buffer) < num_rows:
            # graphs recorded so far keep the smaller buffer, and write to it
            sizes = power_of_two(1, num_rows), vocab_size
            with torch.inference_mode(False):
                buffer = torch.empty(sizes, dtype=logits.dtype, device=logits.device)
            self._buffers[buffer_key] = buffer
        return buffer[:num_rows]
