"""Swaps the blocks of preempted requests to host memory and back (PagedAttention, arXiv 2309.06180,
section 4.5). The scheduler decides which requests are preempted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..interrupts import is_interrupt
from .block_manager import BlockManager
from .block_pool import BlockTable
from .group_memory import GroupMemory, mirrored
from .kv_blocks import KVBlocks, empty_states


class HostLayer(NamedTuple):
    """Copies in host memory of some blocks of one layer, and the layer's device."""

    blocks: KVBlocks
    device: torch.device

    @classmethod
    def copy_of(cls, layer: KVBlocks, block_ids: list[int]) -> HostLayer:
        """Copies these blocks of a layer to host memory, pinned for CUDA."""
        data = [_to_cpu(tensor, block_ids) for tensor in layer.data]
        return cls(layer.like(data), layer.keys.device)

    def put_back(
        self, group: GroupMemory, index: int, num_layers: int, block_ids: dict[int, int]
    ) -> None:
        """Writes row `row` of the copies to block `block_ids[row]` of layer `index`, for each `row`
        in `block_ids`."""
        # since the copy, the storage may have grown, changed its dtype or been recreated
        keys, values = empty_states(self.blocks.formats, self.device)
        target = group.layer(index, keys, values, num_layers, num_new_tables=None)
        ids = torch.tensor(list(block_ids.values()), device=self.device)
        rows = list(block_ids)
        tensors = []
        for tensor in self.blocks.data:
            if rows != list(range(tensor.shape[0])):
                tensor = tensor[rows]
            tensors.append(tensor.to(self.device, non_blocking=tensor.is_pinned()))
        target.put_blocks(ids, self.blocks.like(tensors))


class HostBlocks(dict[int, Any]):
    """Host copies of a group's blocks: a [`HostLayer`] by layer index, or one [`StateRows`] for a
    group of states."""


@mirrored
def copy_out(group: GroupMemory, block_ids: list[int]) -> HostBlocks:
    """Copies blocks to host memory. Raises `KeyError` if a slot has no state."""
    if not group.holds_states:
        layers = group.storage.layers.items()
        copies = ((index, HostLayer.copy_of(layer, block_ids)) for index, layer in layers)
        return HostBlocks(copies)
    storage: Any = group.storage
    return HostBlocks({0: storage.copy_out(block_ids)} if block_ids else {})


@mirrored
def put_back(group: GroupMemory, host: HostBlocks, block_ids: dict[int, int]) -> None:
    """Writes row `row` of the copies to block `block_ids[row]`, for each `row` in `block_ids`."""
    if block_ids:
        for index, layer in host.items():
            layer.put_back(group, index, len(host), block_ids)


def _to_cpu(tensor: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    ids = torch.tensor(block_ids, dtype=torch.long, device=tensor.device)
    blocks = tensor.index_select(0, ids)
    if tensor.is_cpu:
        return blocks
    host = torch.empty_like(blocks, device="cpu", pin_memory=tensor.is_cuda)
    # synchronous: preemption is rare, and its measured time is then exact
    return host.copy_(blocks)


class SwappedSequence(NamedTuple):
    """The host copies of a swapped-out sequence's blocks."""

    host_blocks: list[HostBlocks]  # per group, shared by all sequences of the request
    # per group, the row in `host_blocks` of each block of the sequence's table
    rows: list[list[int]]


class BlockSwapper:
    """Copies a request's blocks to host memory (pinned for CUDA) and back into free blocks. The
    request's sequences keep sharing blocks. Tables of swapped-out sequences keep token counts."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def num_blocks(self, request: Any) -> int:
        """Returns how many blocks `swap_in` allocates, over all counted groups."""
        rows_by_group = _needed_rows(_swapped(request))
        groups = zip(self.block_manager.groups, rows_by_group)
        return sum(len(rows) for group, rows in groups if group.spec.is_counted)

    def num_held_bytes(self, request: Any) -> int:
        """Returns the bytes of the distinct blocks of the request's unfinished sequences, over all
        layers."""
        tables_by_sequence = [sequence.blocks.tables for sequence in request.open_sequences]
        groups = zip(self.block_manager.groups, zip(*tables_by_sequence))
        return sum(
            len(number_blocks(tables)) * group.storage.block_bytes for group, tables in groups
        )

    def swap_out(self, request: Any) -> bool:
        """Copies every block of `request` to host memory and releases it; a block that other
        requests hold stays in the pool as well. Returns `False`, with no block released, if host
        memory is too small or a state is missing."""
        self.block_manager.flush_copies()
        sequences = [sequence for sequence in request.sequences if sequence.blocks.tables]
        with self.block_manager.memory.lock:
            tables_by_group = zip(*(sequence.blocks.tables for sequence in sequences))
            numbers = [number_blocks(tables) for tables in tables_by_group]
            try:
                groups = zip(self.block_manager.groups, numbers)
                host_blocks = [
                    copy_out(group, list(block_numbers)) for group, block_numbers in groups
                ]
            except (MemoryError, RuntimeError, KeyError) as error:  # torch raises `RuntimeError`
                if is_interrupt(error):
                    raise
                return False
            for sequence in sequences:
                tables = sequence.blocks.tables
                table_rows = list(map(host_rows, tables, numbers))
                sequence.swapped = SwappedSequence(host_blocks, table_rows)
                for table in tables:
                    table.release()
        return True

    def swap_in(self, request: Any) -> bool:
        """Allocates blocks for the swapped-out sequences of `request` (at least one), copies the
        content back and restores the tables. Returns `False`, with nothing changed, if too few
        blocks are free."""
        swapped_sequences = _swapped(request)
        rows_by_group = _needed_rows(swapped_sequences)
        host_blocks = swapped_sequences[0].swapped.host_blocks
        with self.block_manager.memory.lock:
            allocated_ids = self.block_manager.take(list(map(len, rows_by_group)))
            if allocated_ids is None:
                return False
            try:
                targets = [
                    dict(zip(rows, new_ids)) for rows, new_ids in zip(rows_by_group, allocated_ids)
                ]
                groups = self.block_manager.groups
                for group, copies, block_ids in zip(groups, host_blocks, targets):
                    put_back(group, copies, block_ids)
                for sequence in swapped_sequences:
                    tables = sequence.blocks.tables
                    for table, table_rows, block_ids in zip(tables, sequence.swapped.rows, targets):
                        table.hold([block_ids[row] for row in table_rows])
                    sequence.swapped = None
            finally:  # by now the tables hold the blocks, unless there was an error
                for group, new_ids in zip(self.block_manager.groups, allocated_ids):
                    group.pool.release(reversed(new_ids))
        return True


def _swapped(request: Any) -> list[Any]:
    """Returns the swapped-out sequences of a request."""
    return [sequence for sequence in request.sequences if sequence.swapped is not None]


def _needed_rows(swapped_sequences: Iterable[Any]) -> list[list[int]]:
    """Returns, per group, the rows of the host copies that these sequences need."""
    rows_by_group = zip(*(sequence.swapped.rows for sequence in swapped_sequences))
    return [list(dict.fromkeys(itertools.chain(*rows))) for rows in rows_by_group]


def number_blocks(tables: Iterable[BlockTable]) -> dict[int, int]:
    """Returns a number for each distinct block id in some tables, from 0 in order of appearance."""
    block_ids = dict.fromkeys(block_id for table in tables for block_id in table.block_ids)
    return {block_id: number for number, block_id in enumerate(block_ids)}


def host_rows(table: BlockTable, numbers: dict[int, int]) -> list[int]:
    """Returns the numbers of a table's blocks, which are the rows of the host copies."""
    return [numbers[block_id] for block_id in table.block_ids]
