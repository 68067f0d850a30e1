"""The C++ kernels of `kernels.cpp`: built on first use with the compiler of the user, loaded with ctypes. Without a
compiler, or with `HF_PAGED_CPP=0`, `is_available()` is False and `attention/backends/gather.py` serves."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from .build import is_available, kernel
from .draws import multinomial

__all__ = ["hash_memory", "is_available", "multinomial"]

_HASH_CALL = struct.Struct("3Q2q")  # struct HashCall


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """16 bytes that tell the spans of `sizes[i]` bytes from address `starts[i]`, their order and their content. Raises
    `ValueError` for a negative size, or a size without an address."""
    count = len(starts)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses and {len(sizes)} sizes")
    addresses, num_bytes = (ctypes.c_uint64 * count)(*starts), (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    if kernel("hash")(_HASH_CALL.pack(*pointers, count, torch.get_num_threads())):
        raise ValueError(f"a span has a negative size, or no address: sizes are {list(sizes)}")
    return bytes(out)
