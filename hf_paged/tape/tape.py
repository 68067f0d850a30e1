"""[`Tape`]: a recording that replays on the CPU, on fixed memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from ..kernels.cpp import linear
from ..kernels.cpp.build import address_of, best_path, kernel
from .lower import WITH_OUT, Call, Entry, Kernel, Linear, Lowering
from .record import recording
from .rows import CALL as ROWS_CALL
from .rows import Rows
from .values import Arena, Ref

_ENTRY = struct.Struct("2Q")  # struct TapeEntry
_TAPE = struct.Struct("QqQ")  # struct TapeCall


def pack(
    entry: Entry,
    address: Callable[[Ref], int],
    keep: Callable[[bytes], int],
) -> tuple[str, bytes]:
    """Returns the name of the kernel that runs an entry, and its packed call. `keep` stores bytes
    for as long as the call is used, and returns their address."""
    if isinstance(entry, Rows):
        num_threads = torch.get_num_threads()
        packed, parts = entry.pack(address, num_threads)
        addresses = (keep(part) for part in parts)
        pointers = struct.pack("3Q", *addresses)
        head_size = ROWS_CALL.size - 24
        return "rows", packed[:head_size] + pointers
    if isinstance(entry, Linear):
        x = entry.x
        num_rows, depth = x.sizes
        stride = x.strides[0]
        head = address(x), x.dtype, num_rows, depth, stride
        pieces: list[tuple[int, ...]] = []
        for weight, bias, out in entry.pieces:
            bias_at = 0
            if bias is not None:
                bias_at = address(bias)
            piece = (
                address(weight),
                bias_at,
                address(out),
                out.sizes[1],
                weight.strides[0],
                out.strides[0],
            )
            pieces.append(piece)
        path = best_path()
        packed_linear = linear.pack(head, entry.is_transposed, pieces, path)
        return "linear", packed_linear
    assert isinstance(entry, Kernel)
    packed_kernel = bytearray(entry.packed)
    for place, ref in entry.refs.items():
        struct.pack_into("Q", packed_kernel, place, address(ref))
    return entry.name, bytes(packed_kernel)


class Tape:
    """Recorded operations that run again, in order, on the same memory: consecutive C++ entries in
    one call, between calls of PyTorch. It owns memory for intermediate values; the model, blocks
    and inputs must stay at their addresses.
    """

    def __init__(self, lowering: Lowering, entries: list[Entry]) -> None:
        values = lowering.values
        self._arena = Arena(values, lowering.spans())
        self._held: list[Any] = [values.constants, values.held]
        self._failed = ctypes.c_int64()
        self.names: list[str] = []  # of the C++ kernels, in order
        self._num_batches = 0  # batches of C++ kernels, one call each
        self._parts: list[Callable[[], None]] = []
        batch: list[tuple[str, bytes]] = []
        for entry in entries:
            if isinstance(entry, Call):
                self._close(batch)
                batch = []
                self._parts.append(self._call(entry))
            else:
                packed = pack(entry, self._arena.address, self._keep)
                batch.append(packed)
        self._close(batch)

    @classmethod
    def record(
        cls,
        run: Callable[[], None],
        is_kept: Callable[[Tensor], bool],
    ) -> Tape:
        """Runs `run` once and records it. Raises what it raises, and `NotCapturable` if it cannot
        be run again. `is_kept`: whether a tensor that `run` reads or writes outlives the tape
        without being held by it."""
        with recording() as operations:
            run()
        lowering = Lowering(is_kept)
        entries = lowering.run(operations)
        return cls(lowering, entries)

    @property
    def num_calls(self) -> int:
        """Number of PyTorch operations that a replay calls."""
        return len(self._parts) - self._num_batches

    @property
    def nbytes(self) -> int:
        """Bytes of the memory it owns."""
        return self._arena.nbytes

    def replay(self) -> None:
        for part in self._parts:
            part()

    # -- entries ----------------------------------------------------------------------------------

    def _keep(self, data: bytes) -> int:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._held.append(buffer)
        return ctypes.addressof(buffer)

    def _close(self, batch: list[tuple[str, bytes]]) -> None:
        """Turns these entries into one part."""
        if not batch:
            return
        first = len(self.names)
        self.names += [name for name, _ in batch]
        self._num_batches += 1
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
                    f"the kernel {name!r} of a recorded step gave up with error {error}"
                )

        self._parts.append(run)

    def _call(self, entry: Call) -> Callable[[], None]:
        tensor = self._arena.tensor
        leaves = []
        for leaf in entry.args:
            if isinstance(leaf, Ref):
                leaf = tensor(leaf)
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, entry.tree)
        targets: list[Tensor | None] = []
        for ref in entry.found:
            target = None
            if ref is not None:
                target = tensor(ref)
            targets.append(target)
        function = entry.function
        if function in WITH_OUT and not kwargs:
            with_out = WITH_OUT[function]
            (out,) = targets
            return lambda: with_out(*args, out=out)

        def run() -> None:
            made = function(*args, **kwargs)
            results = made if isinstance(made, (tuple, list)) else (made,)
            for target, result in zip(targets, results):
                if target is not None:
                    target.copy_(result)

        return run
