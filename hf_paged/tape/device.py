"""Replays a recorded forward on a device in fewer launches: each list of small operations is one fused kernel."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import fused
from .lower import Call, Entry, Launch, Lowering
from .record import recording
from .rows import Rows
from .values import Ref

SPOILED = 0xFF  # as every byte: NaN in each float dtype


class DeviceTape:
    """Repeats the computation of `run`, on tensors allocated and freed as in `run`; a CUDA graph is recorded of this.
    It holds the outside tensors that `run` used. A graph of it must keep `constants` alive."""

    def __init__(self, lowering: Lowering, entries: list[Entry]) -> None:
        self._values, self._device = lowering.values, lowering.device
        self.entries = entries
        self.constants = lowering.values.constants
        self._begins: list[list[int]] = [[] for _ in entries]  # values that each entry is the first to use
        self._ends: list[list[int]] = [[] for _ in entries]
        for value, (first, last) in lowering.spans().items():
            if value not in self._values.fixed:
                self._begins[first].append(value)
                self._ends[last].append(value)
        self._outside = sorted(self._values.outside.items())  # storages by address
        self._storages: dict[int, torch.UntypedStorage] = {}  # of values in use

    @classmethod
    def record(cls, run: Callable[[], None], device: torch.device) -> DeviceTape:
        """Runs `run` once and records it. Raises what it raises, and `NotCapturable` if it cannot be run again."""
        with recording() as operations:
            run()
        lowering = Lowering(lambda tensor: True, device, has_kernels=False)
        return cls(lowering, lowering.run(operations))

    @property
    def num_launches(self) -> int:
        """Number of launches of our kernels and of PyTorch operations."""
        return len(self.entries)

    def replay(self, spoils: bool = False) -> None:
        """Runs all entries. `spoils`: fills new memory with NaN, to show that the replay computes the results."""
        try:
            for entry, begins, ends in zip(self.entries, self._begins, self._ends):
                for value in begins:
                    self._make(value, spoils)
                self._run(entry)
                for value in ends:
                    del self._storages[value]
        finally:
            self._storages.clear()

    def _make(self, value: int, spoils: bool) -> None:
        memory = torch.empty(self._values.sizes[value], dtype=torch.uint8, device=self._device)
        self._storages[value] = (memory.fill_(SPOILED) if spoils else memory).untyped_storage()

    def _run(self, entry: Entry) -> None:
        if isinstance(entry, Rows):
            fused.launch(entry, self._tensor)
            return
        assert isinstance(entry, (Launch, Call))
        leaves = [self._tensor(x) if isinstance(x, Ref) else x for x in entry.args]
        args, kwargs = tree_unflatten(leaves, entry.tree)
        if isinstance(entry, Launch):
            entry.kernel[entry.grid](*args, **kwargs)
            return
        made = tree_flatten(entry.function(*args, **kwargs))[0]
        for ref, tensor in zip(entry.found, made):
            if ref is not None and not self._take(ref, tensor):
                self._tensor(ref).copy_(tensor)

    def _take(self, ref: Ref, tensor: Tensor) -> bool:
        """Uses a result's memory as the value's, if its layout is as recorded; returns whether it is."""
        storage = tensor.untyped_storage()
        if ref.value is None or ref.value in self._values.fixed or storage.nbytes() != self._values.sizes[ref.value]:
            return False
        lies = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset() * tensor.element_size()
        is_alike = lies == (ref.sizes, ref.strides, ref.start) and tensor.dtype is ref.dtype
        if is_alike:
            self._storages[ref.value] = storage
        return is_alike

    def _tensor(self, ref: Ref) -> Tensor:
        storage, start = self._place(ref)
        found = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return found.set_(storage, start // ref.dtype.itemsize, ref.sizes, ref.strides)

    def _place(self, ref: Ref) -> tuple[torch.UntypedStorage, int]:
        """A tensor's storage, and the byte offset in it."""
        fixed = None if ref.value is None else self._values.fixed.get(ref.value)
        if ref.value is not None and fixed is None:
            return self._storages[ref.value], ref.start
        address = ref.start + (fixed or 0)
        place = bisect.bisect_right(self._outside, address, key=lambda item: item[0]) - 1
        base, storage = self._outside[place]
        return storage, address - base
