"""[`Tape`]: a recording that replays on the CPU, on fixed memory. Knows neither the model nor where
its inputs come from."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..kernels.cpp.build import address_of, kernel
from .buffers import Arena, Buffers, PackedCall, TensorRef
from .entries import Entry, TorchOp, lifetimes
from .lower import Lowering
from .record import recording

_ENTRY = struct.Struct("2Q")  # struct TapeEntry
_TAPE = struct.Struct("QqQ")  # struct TapeCall
_WITH_OUT = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})  # can write to an `out` tensor


def keep(held: list[Any], data: bytes) -> int:
    """Stores bytes in `held`; returns their address."""
    buffer = ctypes.create_string_buffer(data, len(data))
    held.append(buffer)
    return ctypes.addressof(buffer)


class Tape:
    """Recorded operations that run again, in order, on the same memory: one call runs consecutive
    C++ entries, between calls of PyTorch. The tape owns memory for intermediate results; the model,
    blocks and inputs must stay at their addresses."""

    def __init__(self, entries: list[Entry], buffers: Buffers) -> None:
        self._arena = Arena(buffers, lifetimes(entries))
        self._held: list[Any] = [buffers.held_tensors]
        self._keep = functools.partial(keep, self._held)
        self._failed = ctypes.c_int64()
        self.names: list[str] = []  # of the C++ kernels, in order
        self._parts: list[Callable[[], None]] = []
        batch: list[PackedCall] = []
        for entry in entries:
            if isinstance(entry, TorchOp):
                self._close(batch)
                batch = []
                self._parts.append(self._call(entry))
            else:
                batch.append(entry.pack(self._arena.address, self._keep))
        self._close(batch)

    @classmethod
    def record(
        cls,
        run: Callable[[], None],
        is_persistent: Callable[[Tensor], bool],
    ) -> Tape:
        """Runs `run` once and records it. Raises the errors of `run`, and `NotCapturable` if it
        cannot be replayed. `is_persistent`: whether a tensor that `run` reads or writes outlives
        the tape without being held by it."""
        with recording() as operations:
            run()
        lowering = Lowering(is_persistent)
        return cls(lowering.run(operations), lowering.buffers)

    def replay(self) -> None:
        for part in self._parts:
            part()

    # -- entries ----------------------------------------------------------------------------------

    def _close(self, batch: list[PackedCall]) -> None:
        """Turns these entries into one part of the replay."""
        if not batch:
            return
        first = len(self.names)
        self.names += [name for name, _ in batch]
        packed_entries = b""
        for name, packed in batch:
            function_at = address_of(name)
            packed_entries += _ENTRY.pack(function_at, self._keep(packed))
        entries = self._keep(packed_entries)
        failed_at = ctypes.addressof(self._failed)
        call = _TAPE.pack(entries, len(batch), failed_at)
        function = kernel("tape")

        def run() -> None:
            error = function(call)
            if error:
                number = first + self._failed.value
                name = self.names[number]
                raise RuntimeError(
                    f"the kernel {name!r} of a recorded step failed with error {error}"
                )

        self._parts.append(run)

    def _call(self, entry: TorchOp) -> Callable[[], None]:
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
