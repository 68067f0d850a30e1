"""Block copies within the tensors of a storage, for copy-on-write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels import uses_triton
from ..kernels.triton.launch import LaunchFailedError
from ..step import numbers_on


class BlockCopies:
    """Copies blocks in all tensors of a storage: on a GPU with one transfer of the ids and one
    launch per device, over a table of the tensors' addresses that is rebuilt when they change.
    Without `launches`, which require contiguous tensors, it copies in PyTorch."""

    def __init__(self, launches: bool = True) -> None:
        self._launches = launches
        self._tables: dict[torch.device, tuple[list[tuple[int, int]], Tensor]] = {}

    def make(self, tensors: Iterable[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` of each tensor `(num_blocks, ...)` to its block `target`, for each
        pair of ids (at least one), reading all sources before writing. Raises `IndexError` for
        blocks out of range."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        sources = {source for source, _ in copies}
        is_ordered = not sources.isdisjoint(target for _, target in copies)
        for device, held in by_device.items():
            pairs = numbers_on(device, copies)
            if self._launches and not is_ordered and uses_triton(held[0]):
                with contextlib.suppress(LaunchFailedError):
                    last = max(map(max, copies))
                    self._launch(held, pairs, last)
                    continue
            copy_portable(held, pairs)

    def _launch(self, tensors: list[Tensor], pairs: Tensor, last: int) -> None:
        from ..kernels.triton import copy  # needs Triton

        num_blocks = min(map(len, tensors))
        if last >= num_blocks:
            raise IndexError(f"cannot copy block {last}: there are {num_blocks} blocks")
        addresses = copy.describe(tensors)
        of_table, table = self._tables.get(pairs.device, (None, None))
        if table is None or of_table != addresses:
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(pairs.device)
            self._tables[pairs.device] = addresses, table
        copy.copy_blocks(addresses, table, pairs)


def copy_portable(tensors: Iterable[Tensor], pairs: Tensor) -> None:
    """Copies in plain PyTorch, for tensors of any strides on one device; `pairs` is `(n, 2)`
    int64."""
    sources, targets = pairs.unbind(1)
    for tensor in tensors:
        tensor[targets] = tensor[sources]
