"""Physical pages that can be mapped into reserved addresses, each any number of times: pages of a memory file on Linux,
or of a CUDA device through its driver (vAttention, arXiv 2405.04437, section 5).

A page is identified by its offset in one offset space, which takes no memory. Callers follow the rules of the stricter
driver: unless it `maps_over`, `map` only unmapped addresses, and `release` only offsets that are mapped nowhere.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

PLANE_BYTES = 1 << 38
"""Distance between planes in the offset space, more than the bytes of any plane, so that each can grow."""


class Addresses:
    """A reserved address range, given up once this object and all its tensors are freed."""

    def __init__(
        self, address: int, size: int, view: Callable[[Addresses], Tensor], give_up: Callable[[], None] | None = None
    ) -> None:
        self.address, self.size, self._view = address, size, view
        self.holds: Any = None  # what must live as long, as the pages that are mapped there
        if give_up is not None:
            weakref.finalize(self, give_up).atexit = False

    def lend(self, start: int, size: int) -> Addresses:
        """Returns `size` bytes of the range as a new object, whose lifetime shows when its tensors are freed."""
        lent = Addresses(self.address + start, size, self._view)
        lent.holds = self
        return lent

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Returns the range as a one-dimensional tensor of `dtype`, writable where pages are mapped."""
        with torch.inference_mode(False):  # the tensor outlives the call
            return self._view(self).view(dtype)


class Backing:
    """Pages from `offset` on, returned to the system with the last addresses that hold this object, or by `release`."""

    def __init__(self, pages: Pages, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.release = weakref.finalize(self, pages.release, offset, size)
        self.release.atexit = False
        _backings.add(self)


_backings: weakref.WeakSet[Backing] = weakref.WeakSet()


def leave_to_parent() -> None:
    """In a child process: never returns pages made so far to the system, which the parent does."""
    for backing in list(_backings):
        backing.release.detach()


class Extents:
    """Counts the extents of all rows of a process: ranges that are contiguous in addresses and pages. Linux allows
    `vm.max_map_count` mappings per process, which other allocations need, too, so that rows take at most half."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.count = limit, 0

    @classmethod
    def of_linux(cls) -> Extents:
        try:
            return cls(int(Path("/proc/sys/vm/max_map_count").read_text()) // 2)
        except (OSError, ValueError):  # not readable: use Linux's default
            return cls(65530 // 2)

    def add(self, count: int) -> None:
        self.count += count

    def check(self) -> None:
        """Raises `MemoryError` if there are too many extents."""
        if self.count > self.limit:
            raise MemoryError(
                f"rows would take {self.count:,} mappings, and half of `vm.max_map_count` is {self.limit:,}: raise it, "
                "or `page_bytes` of `VirtualStorage`"
            )


class Pages(Protocol):
    """Maps pages. Sizes, offsets and addresses are in bytes, in multiples of `granularity`."""

    granularity: int
    maps_over: bool  # whether `map` may replace mappings, and `release` may take mapped pages
    is_sparse: bool  # whether mapped pages take no memory before they are written to
    extents: Extents  # of the rows' mappings

    def reserve(self, size: int) -> Addresses:
        """Reserves addresses. Raises `MemoryError` if that fails."""

    def extend(self, size: int) -> int:
        """Adds `size` offsets that may be mapped; returns the first."""

    def map(self, address: int, offset: int, size: int) -> None:
        """Maps pages `[offset, offset + size)`, created if missing, at an address. Raises `MemoryError`."""

    def unmap(self, address: int, size: int) -> None:
        """Unmaps addresses, some of which may be unmapped already."""

    def release(self, offset: int, size: int) -> None:
        """Returns existing pages to the system."""

    def detach(self, addresses: Addresses, spots: Sequence[int], size: int) -> None:
        """Replaces the pages at `spots`, addresses of `size` bytes in this range, by copies that nothing else maps and
        that are freed with the range. Raises `MemoryError`."""

    def physical_bytes(self) -> int:
        """Returns the bytes of physical memory that pages take."""

    def fresh(self) -> Pages:
        """Returns a twin with the same offsets but no pages, for a child process to map instead of its parent's."""


def pages_for(device: torch.device, page_bytes: int | None = None) -> Pages:
    """Returns the `Pages` of this device, in groups of `page_bytes`. Raises `ValueError` if the device is unsupported,
    `cuda.bindings` is missing, or `page_bytes` is no multiple of the page size."""
    pages: Pages | None = None
    if device.type == "cuda":
        pages = CudaPages(device)
    elif device.type == "cpu" and sys.platform == "linux" and hasattr(os, "memfd_create"):
        _check_file_size()
        pages = MemoryFile()
    if pages is not None:
        if page_bytes is not None and page_bytes % pages.granularity:
            raise ValueError(
                f"`page_bytes` is {page_bytes:,}, and pages of {device} have {pages.granularity:,} bytes: it must be a "
                "multiple of that"
            )
        pages.granularity = page_bytes or pages.granularity
        return pages
    raise ValueError(
        f"`storage` is 'virtual', and pages cannot be mapped on {device} under {sys.platform}: it needs Linux for "
        "models on the CPU, or a CUDA device. Leave it out"
    )


def _check_file_size() -> None:
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        raise ValueError(
            f"`storage` is 'virtual', and files of this process are limited to {limit:,} bytes (ulimit -f), sparse "
            "ones in memory, too: lift the limit, or leave `storage` out"
        )


# -- Linux ----------------------------------------------------------------------------------------------------------

_READ, _WRITE = 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_MAY_MOVE, _MOVE_FIXED = 1, 2
_PUNCH_HOLE_KEEP_SIZE = 3
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    found: int = _libc().mmap(address, size, protection, flags, fd, offset)
    if found == _FAILED:
        error = os.strerror(ctypes.get_errno())
        raise MemoryError(f"{size:,} bytes of addresses cannot be mapped: {error} (ulimit -v, vm.max_map_count)")
    return found


def _munmap(address: int, size: int) -> None:
    _libc().munmap(address, size)


def _move(address: int, size: int, target: int) -> None:
    """Moves a mapping, in place of others: threads that read there see either. Raises `MemoryError`."""
    if _libc().mremap(address, size, size, _MAY_MOVE | _MOVE_FIXED, target) == _FAILED:
        error = os.strerror(ctypes.get_errno())
        _munmap(address, size)
        raise MemoryError(f"{size:,} bytes of addresses cannot be mapped: {error} (ulimit -v, vm.max_map_count)")


@functools.cache
def _extents() -> Extents:
    return Extents.of_linux()


def reserved(size: int) -> Tensor:
    """Returns `(size,)` bytes of host memory on Linux, committed when written to. They never make `fork` fail: Linux
    counts other reservations as copied by it, and refuses more than the machine has. Raises `MemoryError`."""
    address = _mmap(None, size, _READ | _WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE)
    give_up = functools.partial(_munmap, address, size)
    return Addresses(address, size, MemoryFile._tensor, give_up).tensor(torch.uint8)


class MemoryFile:
    """Pages of a sparse in-memory file (`memfd_create`). Unmapped addresses read as zeros."""

    maps_over, is_sparse = True, True

    def __init__(self, granularity: int = mmap.PAGESIZE) -> None:
        self.granularity, self.extents = granularity, _extents()
        self._fd, self._size = os.memfd_create("hf_paged"), 0
        weakref.finalize(self, os.close, self._fd).atexit = False

    def reserve(self, size: int) -> Addresses:
        address = _mmap(None, size, _READ, _PRIVATE | _ANONYMOUS | _NORESERVE)
        return Addresses(address, size, self._tensor, functools.partial(_munmap, address, size))

    @staticmethod
    def _tensor(addresses: Addresses) -> Tensor:
        buffer: Any = (ctypes.c_char * addresses.size).from_address(addresses.address)
        buffer.addresses = addresses  # the tensor holds the buffer
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def extend(self, size: int) -> int:
        first = self._size
        os.ftruncate(self._fd, first + size)
        self._size += size
        return first

    def map(self, address: int, offset: int, size: int) -> None:
        _mmap(address, size, _READ | _WRITE, _SHARED | _FIXED, self._fd, offset)

    def unmap(self, address: int, size: int) -> None:
        _mmap(address, size, _READ, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED)

    def release(self, offset: int, size: int) -> None:
        if _libc().fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def detach(self, addresses: Addresses, spots: Sequence[int], size: int) -> None:
        runs: list[list[int]] = []  # address and bytes
        for spot in spots:
            if runs and sum(runs[-1]) == spot:
                runs[-1][1] += size
            else:
                runs.append([spot, size])
        for address, count in runs:
            # private memory: after a fork, each process has its own copy
            copied = _mmap(None, count, _READ | _WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE)
            ctypes.memmove(copied, address, count)
            _move(copied, count, address)

    def physical_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def fresh(self) -> MemoryFile:
        twin = MemoryFile(self.granularity)
        twin.extend(self._size)
        return twin


# -- CUDA -----------------------------------------------------------------------------------------------------------


class CudaPages:
    """Pages of a CUDA device, from its driver's virtual memory management. `api`: the module `cuda.bindings.driver`."""

    maps_over, is_sparse = False, False

    def __init__(self, device: torch.device, api: Any = None) -> None:
        self.device, self._api, self.extents = device, api or _cuda_driver(), Extents()
        cuda = self._api
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index or 0
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, least))
        self._handles: dict[int, Any] = {}  # by offset, of `granularity` bytes each
        self._mapped: set[int] = set()  # addresses with a mapped page
        self._size = 0  # of the offset space

    def _call(self, name: str, *args: Any) -> Any:
        error, *found = getattr(self._api, name)(*args)
        if error == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"{name}: CUDA out of memory")
        if error != self._api.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error}")
        return found[0] if found else None

    def reserve(self, size: int) -> Addresses:
        address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        return Addresses(address, size, self._tensor, functools.partial(self._give_up, address, size))

    def _give_up(self, address: int, size: int) -> None:
        self.unmap(address, size)
        self._call("cuMemAddressFree", address, size)

    def _tensor(self, addresses: Addresses) -> Tensor:
        return torch.as_tensor(_CudaArray(addresses), device=self.device)

    def extend(self, size: int) -> int:
        first, self._size = self._size, self._size + size
        return first

    def map(self, address: int, offset: int, size: int) -> None:
        page = self.granularity
        try:
            for at in range(0, size, page):
                handle = self._handles.get(offset + at)
                if handle is None:
                    handle = self._handles[offset + at] = self._call("cuMemCreate", page, self._properties, 0)
                self._call("cuMemMap", address + at, page, 0, handle, 0)
                self._mapped.add(address + at)
            self._call("cuMemSetAccess", address, size, [self._access], 1)
        except BaseException:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        found = [at for at in range(address, address + size, self.granularity) if at in self._mapped]
        if found:
            self._call("cuCtxSynchronize")  # running kernels may read there
        for at in found:
            self._call("cuMemUnmap", at, self.granularity)
            self._mapped.discard(at)

    def release(self, offset: int, size: int) -> None:
        for found in [each for each in self._handles if offset <= each < offset + size]:
            self._call("cuMemRelease", self._handles.pop(found))

    def detach(self, addresses: Addresses, spots: Sequence[int], size: int) -> None:
        total = len(spots) * size
        offset, copies = self.extend(total), self.reserve(total)
        self.map(copies.address, offset, total)
        target, source = copies.tensor(torch.uint8).view(-1, size), addresses.tensor(torch.uint8)
        for number, spot in enumerate(spots):
            target[number] = source[spot - addresses.address :][:size]
            self.unmap(spot, size)
            self.map(spot, offset + number * size, size)
        weakref.finalize(addresses, self._drop, spots, size, offset).atexit = False

    def _drop(self, spots: Sequence[int], size: int, offset: int) -> None:
        for spot in spots:
            self.unmap(spot, size)
        self.release(offset, len(spots) * size)

    def physical_bytes(self) -> int:
        return len(self._handles) * self.granularity

    def fresh(self) -> CudaPages:
        twin = CudaPages(self.device, self._api)
        twin.granularity, twin._size = self.granularity, self._size
        return twin


class _CudaArray:
    """Device addresses as a CUDA array for torch; the tensor keeps them alive."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self.__cuda_array_interface__ = {
            "shape": (addresses.size,),
            "typestr": "|u1",
            "data": (addresses.address, False),
            "version": 2,
        }


def _cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ValueError(
            "`storage` is 'virtual', which needs `cuda.bindings` on a CUDA device: "
            'pip install "hf_paged[cuda]", or leave it out'
        ) from error
    return driver
