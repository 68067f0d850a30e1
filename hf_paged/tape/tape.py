"""[`Tape`]: a recorded forward that replays on the CPU, on fixed memory. This module knows neither
the model nor where the inputs come from."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..kernels.cpp.build import address_of, kernel
from .buffers import Arena, Buffers, PackedCall, TensorRef
from .entries import Entry, ModuleCall, TorchOp, check_kernel, lifetimes
from .lower import Lowering
from .record import recording

_ENTRY = struct.Struct("2Q")  # struct TapeEntry
_TAPE = struct.Struct("QqQq")  # struct TapeCall
_SHARED = ("attention", "linear")  # kernels that usually divide their work among threads
_WITH_OUT = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})  # can write to an `out` tensor


def store_bytes(retained: list[Any], data: bytes) -> int:
    """Copies bytes to a buffer that `retained` keeps alive; returns its address."""
    buffer = ctypes.create_string_buffer(data, len(data))
    retained.append(buffer)
    return ctypes.addressof(buffer)


class Tape:
    """Recorded operations that run again, in order, on the same memory. One call runs consecutive
    C++ entries; PyTorch's operations run between these calls. The tape owns memory for intermediate
    results; the model, blocks and inputs must stay at their addresses."""

    def __init__(self, entries: list[Entry], buffers: Buffers, storages: set[int]) -> None:
        """`storages`: addresses of the storages outside the arena that entries read or write."""
        self.storages = storages
        self._arena = Arena(buffers, lifetimes(entries))
        self._retained: list[Any] = [buffers.retained_tensors]
        self._store = functools.partial(store_bytes, self._retained)
        self._failed_index = ctypes.c_int64()  # index, within its call, of the kernel that failed
        self.kernel_names: list[str] = []  # of the C++ entries, in order
        self.calls_modules = False  # whether an entry is a `ModuleCall`
        # by `id` of the `LiveValue`: what a live module (`live.py`) returned in the last replay
        self._live_values: dict[int, Any] = {}
        self._runs: list[Callable[[], None]] = []
        calls: list[PackedCall] = []
        for entry in entries:
            if isinstance(entry, (TorchOp, ModuleCall)):
                self._add_kernels(calls)
                calls = []
                if isinstance(entry, TorchOp):
                    self._runs.append(self._bind(entry))
                else:
                    self.calls_modules = True
                    self._runs.append(entry.bind(self._arena.tensor, self._live_values))
            else:
                calls.append(entry.pack(self._arena.address, self._store))
        self._add_kernels(calls)

    @classmethod
    def record(
        cls,
        run: Callable[[], None],
        is_persistent: Callable[[Tensor], bool],
    ) -> Tape:
        """Calls `run` once and records it. Raises the errors of `run`, and `NotCapturable` if `run`
        cannot be replayed. `is_persistent` returns whether a tensor that `run` reads or writes
        outlives the tape; the tape keeps the other tensors alive."""
        with recording() as operations:
            run()
        lowering = Lowering(is_persistent)
        return cls(lowering.run(operations), lowering.buffers, lowering.storages)

    def replay(self) -> None:
        for run in self._runs:
            run()

    def discard(self) -> bool:
        """As `Arena.discard`."""
        return self._arena.discard()

    # -- entries ----------------------------------------------------------------------------------

    def _add_kernels(self, calls: list[PackedCall]) -> None:
        """Appends one call that runs all kernels of `calls`."""
        if not calls:
            return
        first = len(self.kernel_names)
        self.kernel_names += [name for name, _ in calls]
        packed_entries = b""
        for name, packed in calls:
            packed_entries += _ENTRY.pack(address_of(name), self._store(packed))
        entries_address = self._store(packed_entries)
        failed_address = ctypes.addressof(self._failed_index)
        num_shared = sum(name in _SHARED for name, _ in calls)
        num_threads = torch.get_num_threads() if num_shared > 1 else 1
        call = _TAPE.pack(entries_address, len(calls), failed_address, num_threads)
        function = kernel("tape")

        def run() -> None:
            error = function(call)
            if error:
                check_kernel(self.kernel_names[first + self._failed_index.value], error)

        self._runs.append(run)

    def _bind(self, entry: TorchOp) -> Callable[[], None]:
        """Returns a function that runs a PyTorch operation on the tape's memory."""
        tensor_of = self._arena.tensor
        args, kwargs = tree_map_only(TensorRef, tensor_of, entry.arguments)
        targets = [tensor_of(x) if isinstance(x, TensorRef) else None for x in entry.results]
        function = entry.function
        if function.name() in _WITH_OUT and not kwargs:
            with_out = function.overloadpacket.out
            (out,) = targets
            return lambda: with_out(*args, out=out)

        def run() -> None:
            result = function(*args, **kwargs)
            results = result if isinstance(result, (tuple, list)) else (result,)
            for target, tensor in zip(targets, results):
                if target is not None:
                    target.copy_(tensor)

        return run
