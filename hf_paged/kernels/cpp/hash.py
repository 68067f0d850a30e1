"""A hash of memory by the C++ kernel (`hash.cpp`)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from .build import kernel

_CALL = struct.Struct("3Q2q")  # struct HashCall


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """
    16 bytes that tell the spans of `sizes[i]` bytes from address `starts[i]`, their order and their content. Raises
    `ValueError` for a negative size, or a size without an address.
    """
    count = len(starts)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses and {len(sizes)} sizes")
    addresses, num_bytes = (ctypes.c_uint64 * count)(*starts), (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    if kernel("hash")(_CALL.pack(*pointers, count, torch.get_num_threads())):
        raise ValueError(f"a span has a negative size, or no address: sizes are {list(sizes)}")
    return bytes(out)
