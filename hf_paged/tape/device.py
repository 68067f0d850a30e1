"""Replays a recorded forward on a device in fewer launches: each list of small operations is one
fused kernel."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from . import fused
from .entries import Call, Entry, spans
from .lower import Lowering
from .record import recording
from .rows import Rows
from .values import Ref

SPOILED = 0xFF  # as every byte: NaN in each float dtype


class DeviceTape:
    """Repeats the computation of `run`, on tensors allocated and freed as in `run`; a CUDA graph is
    recorded of this. It holds the outside tensors that `run` used. A graph of it must keep
    `constants` alive."""

    def __init__(self, lowering: Lowering) -> None:
        self._values = lowering.values
        self._device = lowering.device
        self.entries = lowering.entries
        self.constants = lowering.values.constants
        # values that each entry is the first, or the last, to use
        self._begins: list[list[int]] = [[] for _ in self.entries]
        self._ends: list[list[int]] = [[] for _ in self.entries]
        for value, (first, last) in spans(self.entries).items():
            if value in self._values.fixed:
                continue
            self._begins[first].append(value)
            self._ends[last].append(value)
        outside = self._values.outside
        self._outside = sorted(outside.items())  # storages by address
        self._storages: dict[int, torch.UntypedStorage] = {}  # of values in use

    @classmethod
    def record(
        cls,
        run: Callable[[], None],
        device: torch.device,
    ) -> DeviceTape:
        """Runs `run` once and records it. Raises what it raises, and `NotCapturable` if it cannot
        be run again."""
        with recording() as operations:
            run()
        lowering = Lowering(lambda tensor: True, device, has_kernels=False)
        lowering.run(operations)
        return cls(lowering)

    @property
    def num_launches(self) -> int:
        """Number of launches of our kernels and of PyTorch operations."""
        return len(self.entries)

    def replay(self, spoils: bool = False) -> None:
        """Runs all entries. `spoils`: fills new memory with NaN, to show that the replay computes
        the results."""
        try:
            steps = zip(self.entries, self._begins, self._ends)
            for entry, begins, ends in steps:
                for value in begins:
                    self._make(value, spoils)
                self._run(entry)
                for value in ends:
                    del self._storages[value]
        finally:
            self._storages.clear()

    def _make(self, value: int, spoils: bool) -> None:
        nbytes = self._values.sizes[value]
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if spoils:
            memory.fill_(SPOILED)
        self._storages[value] = memory.untyped_storage()

    def _run(self, entry: Entry) -> None:
        if isinstance(entry, Rows):
            fused.launch(entry, self._tensor)
            return
        assert isinstance(entry, Call)
        args, kwargs = tree_map_only(Ref, self._tensor, entry.given)
        result = entry.function(*args, **kwargs)
        for ref, tensor in zip(entry.results, tree_leaves(result)):
            if isinstance(ref, Ref) and not self._take(ref, tensor):
                self._tensor(ref).copy_(tensor)

    def _take(self, ref: Ref, tensor: Tensor) -> bool:
        """Uses a result's memory as the value's, if its layout is as recorded; returns whether it
        is."""
        storage = tensor.untyped_storage()
        value = ref.value
        if value is None or value in self._values.fixed:
            return False
        start = tensor.storage_offset() * tensor.element_size()
        is_alike = (
            storage.nbytes() == self._values.sizes[value]
            and Ref(value, start, tensor.dtype, tensor.shape, tensor.stride()) == ref
        )
        if is_alike:
            self._storages[value] = storage
        return is_alike

    def _tensor(self, ref: Ref) -> Tensor:
        fixed = self._values.fixed
        start = ref.start  # in the storage
        if ref.value is not None and ref.value not in fixed:
            storage = self._storages[ref.value]
        else:
            if ref.value is not None:
                start += fixed[ref.value]
            after = bisect.bisect_right(self._outside, start, key=lambda item: item[0])
            base, storage = self._outside[after - 1]
            start -= base
        tensor = torch.empty(0, dtype=ref.dtype, device=storage.device)
        offset = start // ref.dtype.itemsize
        return tensor.set_(storage, offset, ref.sizes, ref.strides)
