"""Copies blocks within the tensors of a storage, for copy-on-write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels import uses_triton
from ..kernels.triton.launch import LaunchFailedError
from ..step import numbers_on


class BlockCopier:
    """Copies blocks in all tensors of a storage. With Triton, this takes one transfer of the block
    ids and one launch per device. The kernel reads the tensors' addresses from a table, which is
    rebuilt when tensors move. Plain PyTorch makes the copies if Triton does not run on the device,
    after a failed launch, if a target is also a source, or if `can_launch` is `False`. Pass
    `can_launch=False` for tensors that are not contiguous."""

    def __init__(self, can_launch: bool = True) -> None:
        self._can_launch = can_launch
        # by device: the addresses as a list, and as a tensor on the device
        self._tables: dict[torch.device, tuple[list[tuple[int, int]], Tensor]] = {}

    def copy(self, tensors: Iterable[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` of each tensor `(num_blocks, ...)` to its block `target`, for each
        pair `(source, target)`, reading all sources before writing. `copies` must not be empty, no
        id in it may be negative, and targets must be distinct. Raises `IndexError` for blocks past
        the end, except when plain PyTorch copies on a GPU: there a device-side assertion fails,
        after which the process cannot use the device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        sources = {source for source, _ in copies}
        has_chains = not sources.isdisjoint(target for _, target in copies)
        for device, device_tensors in by_device.items():
            pairs = numbers_on(device, copies)
            if self._can_launch and not has_chains and uses_triton(device_tensors[0]):
                with contextlib.suppress(LaunchFailedError):
                    max_block_id = max(map(max, copies))
                    self._launch(device_tensors, pairs, max_block_id)
                    continue
            copy_portable(device_tensors, pairs)

    def _launch(self, tensors: list[Tensor], pairs: Tensor, max_block_id: int) -> None:
        from ..kernels.triton import copy  # needs Triton

        num_blocks = min(map(len, tensors))
        if max_block_id >= num_blocks:
            raise IndexError(f"cannot copy block {max_block_id}: there are {num_blocks} blocks")
        addresses = copy.locate_blocks(tensors)
        old_addresses, table = self._tables.get(pairs.device, (None, None))
        if table is None or old_addresses != addresses:
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(pairs.device)
            self._tables[pairs.device] = addresses, table
        copy.copy_blocks(addresses, table, pairs)


def copy_portable(tensors: Iterable[Tensor], pairs: Tensor) -> None:
    """Copies blocks in plain PyTorch, in tensors `(num_blocks, ...)` of any strides on one device;
    `pairs` `(n, 2)` int64 is on that device."""
    sources, targets = pairs.unbind(1)
    for tensor in tensors:
        tensor[targets] = tensor[sources]
