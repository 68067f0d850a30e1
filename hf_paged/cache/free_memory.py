"""Free memory of a device: how much there is, how much of it a call reserves, and which errors
report that it ran out. `cache.memory` enforces the limits of `PagedConfig`."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from ..interrupts import is_interrupt
from . import budget
from .groups import GroupSpec

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap lacks


def commits_when_touched(device: torch.device) -> bool:
    """Whether memory allocated on this device is committed only when it is first written to."""
    return device.type == "cpu"


@dataclass(eq=False)
class Reservation:
    """The memory that a call or an engine will probably use, so that each layer allocates its part
    at once instead of step by step. Each of the `num_layers[spec]` layers of a spec gets
    `num_blocks[spec]` blocks, if all layers together fit in `memory_fraction` of the memory that is
    free when the first layer is sized. Otherwise the layers share that memory evenly, and a layer
    that needs less than its share leaves the rest to the others. On devices that commit memory when
    it is allocated (all but the CPU), a layer gets at most `num_live_blocks[spec]` blocks, the
    maximum that running sequences hold, and the layers must also fit in what `hf_paged.budget`
    leaves."""

    num_blocks: dict[GroupSpec, int]
    num_live_blocks: dict[GroupSpec, int]
    num_layers: dict[GroupSpec, int]
    memory_fraction: float
    _max_bytes: int = field(default=-1, init=False)  # -1: unknown until the first layer

    def set_limit(self, free: int) -> None:
        """Limits all layers together to `memory_fraction` of `free` bytes."""
        self._max_bytes = int(self.memory_fraction * free)

    def reset(self) -> None:
        """Makes the next call of `num_layer_blocks` ask again how much memory is free."""
        self._max_bytes = -1

    def num_layer_blocks(self, spec: GroupSpec, block_bytes: int, device: torch.device) -> int:
        """Returns how many blocks, of `block_bytes` bytes each, to allocate for a layer with this
        spec."""
        if self._max_bytes < 0:
            try:
                self.set_limit(free_bytes(device))
            except ValueError:  # free memory is unknown: reserve nothing
                self.set_limit(0)
            uncharged_bytes = budget.num_uncharged_bytes()
            if uncharged_bytes is not None and not commits_when_touched(device):
                self._max_bytes = min(self._max_bytes, uncharged_bytes)
        max_blocks = self.num_blocks
        if not commits_when_touched(device):
            live_counts = self.num_live_blocks.items()
            max_blocks = {key: min(max_blocks[key], count) for key, count in live_counts}
        num_available = self._max_bytes // max(block_bytes, 1)
        layer_counts = self.num_layers.items()
        # smallest first: the unused part of a small layer's even share goes to the larger ones
        block_counts = sorted(max_blocks[key] for key, count in layer_counts for _ in range(count))
        for index, num_blocks in enumerate(block_counts):
            even_share = num_available // (len(block_counts) - index)
            if num_blocks > even_share:
                return min(max_blocks[spec], even_share)
            num_available -= num_blocks
        return max_blocks[spec]


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of free memory on `device`, including (except on MPS) unused memory that
    torch's allocator holds; on the CPU, at most as many bytes as the process may still map
    (`ulimit -v`). Raises `ValueError` for a device whose free memory torch does not report."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        allocated_bytes = torch.mps.driver_allocated_memory()
        return max(0, total - allocated_bytes)
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "mem_get_info"):
            raise ValueError(
                f"torch does not report the free memory of {device}: set `num_blocks` instead of"
                " `memory_fraction`"
            )
        # the allocator reuses the memory of freed tensors, or returns it before the device runs out
        reserved_bytes = module.memory_reserved(device)
        unused_bytes = reserved_bytes - module.memory_allocated(device)
        free = module.mem_get_info(device)[0]
        return free + max(0, unused_bytes)
    free = psutil.virtual_memory().available
    limit = address_limit()
    if limit is None:
        return free
    unmapped_bytes = limit - psutil.Process().memory_info().vms
    return max(0, min(free, unmapped_bytes))


def free_bytes_of_all(block_bytes: Mapping[torch.device, int]) -> int:
    """Returns how many bytes of blocks fit in free memory, given the bytes of one block on each
    device: the first device to fill up sets the limit. If `block_bytes` is empty, returns the
    CPU's free bytes."""
    total = sum(block_bytes.values())
    limits = []
    for device, device_block_bytes in block_bytes.items():
        limit = free_bytes(device)
        if device_block_bytes:
            limit = limit * total // device_block_bytes
        limits.append(limit)
    return min(limits) if limits else free_bytes(torch.device("cpu"))


def address_limit() -> int | None:
    """Returns how many bytes of addresses the process may map (`ulimit -v`); `None` without a
    limit."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def reserve_addresses(size: int, protection: int) -> mmap.mmap:
    """On Linux, maps `size` bytes of host addresses, which take memory only once they are written
    to. `protection`: `mmap.PROT_*`. Raises `MemoryError` if the system refuses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        return mmap.mmap(-1, size, flags, protection)
    except OSError as error:
        raise mapping_error(size, error.errno) from error


def mapping_error(size: int, error_number: int | None) -> MemoryError:
    reason = os.strerror(error_number or 0)
    return MemoryError(
        f"{size:,} bytes of addresses cannot be mapped: {reason}. Raise"
        " `ulimit -v` or `vm.max_map_count`"
    )


def reserved_tensor(size: int) -> torch.Tensor:
    """Returns a `(size,)` uint8 tensor in host memory, on Linux. Its pages take memory only once
    they are written to. Ordinary allocations may make `fork` fail under Linux's default policy,
    since it charges them to the child again; these tensors do not. Raises `MemoryError` if the
    addresses cannot be mapped."""
    memory = reserve_addresses(size, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def discard(tensors: Iterable[torch.Tensor]) -> bool:
    """Gives the memory of these tensors' storages back to the system, and keeps their addresses:
    the content is lost, and the next write takes memory again. If a storage fills its first or last
    page only in part, that page keeps its memory. Returns `False` if a tensor keeps all of its
    memory: on a device, outside Linux, if its pages are locked, or if unused addresses count toward
    a limit (`ulimit -v`) or as memory (`vm.overcommit_memory=2`). Even then, other tensors may have
    lost their content."""
    madvise = _libc_function("madvise")
    is_on_linux = sys.platform == "linux" and madvise is not None
    if not is_on_linux or address_limit() is not None or _charges_addresses():
        return False
    page = mmap.PAGESIZE
    for tensor in tensors:
        if not tensor.is_cpu:
            return False
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes() - start) // page * page
        if size > 0:
            address = ctypes.c_void_p(start)
            num_bytes = ctypes.c_size_t(size)
            if madvise(address, num_bytes, mmap.MADV_DONTNEED):  # fails for locked memory
                return False
    return True


def _charges_addresses() -> bool:
    """Whether Linux counts writable private mappings as used memory before they are written to."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:  # unreadable: assume Linux's default
        return False


def trim() -> None:
    """Makes glibc give its free memory back to the system. (glibc unmaps large tensors when they
    are freed, but keeps the memory of small ones.) Does nothing with other C libraries."""
    malloc_trim = _libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _libc_function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError) as error:  # Windows, or another C library
        if is_interrupt(error):
            raise
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or an error in its chain of causes, reports a failed allocation. torch
    raises several types of errors for that."""
    cause = error.__cause__
    if cause is not None and is_out_of_memory(cause):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_torch_error = isinstance(error, RuntimeError)
    return is_torch_error and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


# parts of the messages of CPU allocators (Linux and macOS, Windows) and of devices that raise a
# plain RuntimeError
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
