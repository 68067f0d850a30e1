"""Free memory of a device: how much there is, how much of it a call reserves, and which errors mean
that it has run out. The limits of `PagedConfig` are in `cache.memory`."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from . import budget
from .groups import GroupSpec

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap lacks


def commits_when_touched(device: torch.device) -> bool:
    """Whether allocated memory is committed only when first written to."""
    return device.type == "cpu"


@dataclass(eq=False)
class Reservation:
    """Expected memory use of a call or an engine, allocated at once instead of step by step:
    `num_blocks[spec]` blocks per layer, within `share` of the memory that is free when the first
    layer is allocated. Where allocation commits memory, at most `live[spec]` blocks, as many as
    running sequences hold. Memory that one layer does not need is divided among the other layers,
    of which `num_layers[spec]` have that spec."""

    num_blocks: dict[GroupSpec, int]
    live: dict[GroupSpec, int]
    num_layers: dict[GroupSpec, int]
    share: float
    _budget: int = field(default=-1, init=False)  # bytes; -1: unknown until the first layer

    def limit(self, free: int) -> None:
        """Sets the budget from `free` bytes of memory."""
        self._budget = int(self.share * free)

    def renew(self) -> None:
        """Makes the next `num_layer_blocks` read the free memory again."""
        self._budget = -1

    def num_layer_blocks(self, spec: GroupSpec, block_bytes: int, device: torch.device) -> int:
        """Returns the blocks to allocate for a layer with this spec, whose blocks take
        `block_bytes`."""
        if self._budget < 0:
            try:
                self.limit(free_bytes(device))
            except ValueError:  # unknown free memory: allocate blocks as they are used
                self.limit(0)
            left = budget.left()
            if left is not None and not commits_when_touched(device):
                self._budget = min(self._budget, left)
        most = self.num_blocks
        if not commits_when_touched(device):
            live = self.live.items()
            most = {other: min(most[other], count) for other, count in live}
        left = self._budget // max(block_bytes, 1)
        counts = self.num_layers.items()
        others = sorted(most[other] for other, count in counts for _ in range(count))
        for number, num_blocks in enumerate(others):
            even = left // (len(others) - number)
            if num_blocks > even:
                return min(most[spec], even)
            left -= num_blocks
        return most[spec]


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of free memory on `device`, including the reserve of torch's allocator; on
    the CPU at most the addresses that the process may still map (`ulimit -v`). Raises `ValueError`
    for a device whose free memory torch does not report."""
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        allocated = torch.mps.driver_allocated_memory()
        return max(0, most - allocated)
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "mem_get_info"):
            raise ValueError(
                f"torch does not report the free memory of {device}: set `num_blocks` instead of"
                " `memory_fraction`"
            )
        # memory of freed tensors, which the allocator reuses or returns before the device runs out
        reserved = module.memory_reserved(device)
        reserve = reserved - module.memory_allocated(device)
        free = int(module.mem_get_info(device)[0])
        return free + max(0, reserve)
    free = int(psutil.virtual_memory().available)
    limit = address_limit()
    if limit is None:
        return free
    unmapped = limit - psutil.Process().memory_info().vms
    return max(0, min(free, unmapped))


def free_bytes_of_all(block_bytes: Mapping[torch.device, int]) -> int:
    """Returns how many bytes of blocks fit in free memory, given the bytes of one block on each
    device: the device that fills up first is the limit."""
    total = sum(block_bytes.values())
    of_devices = []
    for device, count in block_bytes.items():
        device_bytes = free_bytes(device)
        if count:
            device_bytes = device_bytes * total // count
        of_devices.append(device_bytes)
    return min(of_devices) if of_devices else free_bytes(torch.device("cpu"))


def address_limit() -> int | None:
    """Returns the bytes of addresses that the process may map (`ulimit -v`); `None` without a
    limit."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def reserve_addresses(size: int, protection: int) -> mmap.mmap:
    """Reserves host addresses on Linux, without memory until they are written to. Raises
    `MemoryError`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        return mmap.mmap(-1, size, flags, protection)
    except OSError as error:
        raise mapping_error(size, error.errno) from error


def mapping_error(size: int, number: int | None) -> MemoryError:
    error = os.strerror(number or 0)
    return MemoryError(
        f"{size:,} bytes of addresses cannot be mapped: {error} (ulimit -v, vm.max_map_count)"
    )


def reserved_tensor(size: int) -> torch.Tensor:
    """Returns `(size,)` bytes of host memory on Linux, committed when written to. They never make
    `fork` fail: Linux charges ordinary reservations to the child, too, and refuses more than the
    machine has. Raises `MemoryError`."""
    memory = reserve_addresses(size, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def trim() -> None:
    """Returns freed host memory that the C library still caches to the system. (It unmaps large
    tensors when they are freed, but keeps the memory of small ones.)"""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or its cause, means that an allocation failed: torch has no single type for
    that."""
    cause = error.__cause__
    if cause is not None and is_out_of_memory(cause):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(words in message for words in _OUT_OF_MEMORY)


# messages of the CPU allocators (Linux and macOS, Windows) and of devices that raise a plain
# RuntimeError
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
