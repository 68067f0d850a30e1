"""Physical pages that can be mapped at reserved addresses, each any number of times: pages of a
memory file on Linux, or of a CUDA device through its driver (vAttention, arXiv 2405.04437, section
5). Leaves the record of mappings to its callers.

A page is identified by its offset in one offset space, which takes no memory. Callers follow the
rules of the stricter driver: unless `maps_over` is set, they `map` only unmapped addresses, and
`release` only offsets that are mapped nowhere.
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
from ctypes import c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..cache.free_memory import NORESERVE, mapping_error, reserve_addresses

PLANE_BYTES = 1 << 38
"""Distance between planes in the offset space: more than the bytes of any plane, so that every
plane can grow."""


class Addresses:
    """A reserved address range, which is freed with this object and the last of its tensors."""

    def __init__(
        self,
        address: int,
        size: int,
        view: Callable[[Addresses], Tensor],
        memory: Any = None,
    ) -> None:
        """`memory`: an object whose deletion frees the range."""
        self.address = address
        self.size = size
        self._view = view
        self._memory = memory
        self.backing: Backing | None = None  # the mapped pages, which live at least as long

    def subrange(self, start: int, size: int) -> Addresses:
        """Returns `size` bytes of the range as a new object, which is freed with its last
        tensor."""
        return Addresses(self.address + start, size, self._view, self)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Returns the range as a one-dimensional tensor of `dtype`, writable where pages are
        mapped."""
        with torch.inference_mode(False):  # the tensor outlives the call
            memory = self._view(self)
            return memory.view(dtype)


def when_freed(owner: Any, call: Callable[..., None], *arguments: Any) -> Any:
    """Calls `call(*arguments)` once `owner` is freed, but not at interpreter exit."""
    finalizer = weakref.finalize(owner, call, *arguments)
    finalizer.atexit = False
    return finalizer


class Backing:
    """The pages from `offset` on. They return to the system when the last addresses that hold this
    object are freed, or by `release`."""

    def __init__(self, pages: Pages, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.release = when_freed(self, _release, os.getpid(), pages, offset, size)


def _release(process: int, pages: Pages, offset: int, size: int) -> None:
    """Returns pages to the system, only in the process that created them."""
    if os.getpid() == process:
        pages.release(offset, size)


class Extents:
    """Counts the extents of all rows of a process: ranges that are contiguous in addresses and
    pages. Linux allows `vm.max_map_count` mappings per process, of which rows take at most half:
    other allocations need mappings, too."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count

    def check(self) -> None:
        """Raises `MemoryError` if there are too many extents."""
        if self.count > self.limit:
            raise MemoryError(
                f"rows would take {self.count:,} mappings, and half of `vm.max_map_count` is"
                f" {self.limit:,}: raise it, or `page_bytes` of `VirtualStorage`"
            )


def pages_for(device: torch.device, page_bytes: int | None = None) -> Pages:
    """Returns the `Pages` of this device, in units of `page_bytes`. Raises `ValueError` if the
    device is unsupported, `cuda.bindings` is missing, or `page_bytes` is not a multiple of the page
    size."""
    has_memory_files = sys.platform == "linux" and hasattr(os, "memfd_create")
    pages: Pages
    if device.type == "cuda":
        pages = CudaPages(device)
    elif device.type == "cpu" and has_memory_files:
        _check_file_size()
        pages = MemoryFile()
    else:
        raise ValueError(
            f"`storage` is 'virtual', and pages cannot be mapped on {device} under {sys.platform}:"
            " this needs Linux for models on the CPU, or a CUDA device. Leave `storage` out"
        )
    if page_bytes is not None and page_bytes % pages.granularity:
        raise ValueError(
            f"`page_bytes` is {page_bytes:,}, and must be a multiple of the {pages.granularity:,}"
            f" bytes of a page of {device}"
        )
    pages.granularity = page_bytes or pages.granularity
    return pages


def _check_file_size() -> None:
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        raise ValueError(
            f"`storage` is 'virtual', and files of this process are limited to {limit:,} bytes"
            " (ulimit -f), including sparse files in memory: lift the limit, or leave `storage`"
            " out"
        )


# -- Linux ---------------------------------------------------------------------------------------

_READ = 1
_WRITE = 2
_SHARED = 1
_PRIVATE = 2
_FIXED = 0x10
_ANONYMOUS = 0x20
_PUNCH_HOLE_KEEP_SIZE = 3
_FAILED = c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = c_void_p
    libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_int64)
    libc.fallocate.argtypes = (c_int, c_int, c_int64, c_int64)
    return libc


def _map_over(
    address: int,
    size: int,
    protection: int,
    flags: int,
    fd: int = -1,
    offset: int = 0,
) -> None:
    """Maps over existing mappings: threads that read there see the old or the new one. Raises
    `MemoryError`."""
    if _libc().mmap(address, size, protection, flags | _FIXED, fd, offset) == _FAILED:
        raise mapping_error(size, ctypes.get_errno())


@functools.cache
def _extents() -> Extents:
    path = Path("/proc/sys/vm/max_map_count")
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):  # unreadable: assume Linux's default
        limit = 65530
    return Extents(limit // 2)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


class MemoryFile:
    """The pages of a sparse in-memory file (`memfd_create`). Unmapped addresses read as zeros.
    Sizes, offsets and addresses are in bytes, and multiples of `granularity`."""

    maps_over = True  # whether `map` may replace mappings, and `release` may take mapped pages
    is_sparse = True  # whether mapped pages take no memory before they are written to

    def __init__(self, granularity: int = mmap.PAGESIZE) -> None:
        self.granularity = granularity
        self.extents = _extents()  # of the rows' mappings
        self._size = 0
        self._files: list[int] = []  # the descriptor
        when_freed(self, _close, self._files)  # first, so that an error leaks no descriptor
        self._files.append(os.memfd_create("hf_paged"))

    @property
    def _fd(self) -> int:
        return self._files[0]

    def reserve(self, size: int) -> Addresses:
        """Reserves addresses. Raises `MemoryError` if that fails."""
        memory = reserve_addresses(size, _READ)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        return Addresses(address, size, self._tensor, memory)

    @staticmethod
    def _tensor(addresses: Addresses) -> Tensor:
        array_type: Any = ctypes.c_char * addresses.size
        buffer = array_type.from_address(addresses.address)
        buffer.addresses = addresses  # the tensor holds the buffer
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def extend(self, size: int) -> int:
        """Adds `size` offsets that may be mapped; returns the first."""
        first = self._size
        os.ftruncate(self._fd, first + size)
        self._size += size
        return first

    def map(self, address: int, offset: int, size: int) -> None:
        """Maps pages `[offset, offset + size)` at an address, and creates missing ones. Raises
        `MemoryError`."""
        _map_over(address, size, _READ | _WRITE, _SHARED, self._fd, offset)

    def unmap(self, address: int, size: int) -> None:
        """Unmaps addresses, some of which may be unmapped already."""
        _map_over(address, size, _READ, _PRIVATE | _ANONYMOUS | NORESERVE)

    def release(self, offset: int, size: int) -> None:
        """Returns existing pages to the system."""
        if _libc().fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def detach(self, addresses: Addresses, starts: Sequence[int], size: int) -> None:
        """Replaces the pages at `starts`, each `size` bytes in this range, by private copies, which
        are freed with the range. Raises `MemoryError`."""
        runs: list[list[int]] = []  # address and bytes
        for start in starts:
            if runs and sum(runs[-1]) == start:
                runs[-1][1] += size
            else:
                runs.append([start, size])
        copies = MemoryFile(self.granularity)
        offsets = [copies._append(address, count) for address, count in runs]
        for (address, count), offset in zip(runs, offsets):
            # private mappings give each process its own copy after a fork, and keep the file alive
            flags = _PRIVATE | NORESERVE
            _map_over(address, count, _READ | _WRITE, flags, copies._fd, offset)

    def _append(self, address: int, size: int) -> int:
        """Copies memory to new pages; returns their offset. Raises `MemoryError`."""
        first = self.extend(size)
        content: Any = (ctypes.c_char * size).from_address(address)
        rest = memoryview(content)
        while rest:
            try:
                count = os.pwrite(self._fd, rest, first + size - len(rest))
            except OSError as error:
                raise MemoryError(f"{size:,} bytes cannot be copied: {error}") from error
            rest = rest[count:]
        return first

    def physical_bytes(self) -> int:
        """Returns the bytes of physical memory that the pages take."""
        return os.fstat(self._fd).st_blocks * 512

    def empty_copy(self) -> MemoryFile:
        """Returns a file with the same offsets but no pages, which a child process maps in place of
        its parent's."""
        empty = MemoryFile(self.granularity)
        empty.extend(self._size)
        return empty


# -- CUDA ----------------------------------------------------------------------------------------


class CudaPages:
    """Pages of a CUDA device, from its driver's virtual memory management, with the methods of
    `MemoryFile`. Any thread may call them: every driver call runs in the device's primary context,
    which is torch's. `api`: the module `cuda.bindings.driver`."""

    maps_over = False
    is_sparse = False

    def __init__(self, device: torch.device, api: Any = None) -> None:
        self.device = device
        self._api = api or _cuda_driver()
        self.extents = Extents()
        cuda = self._api
        number = device.index or 0
        if device.type == "cuda" and device.index is None:
            number = torch.cuda.current_device()
        handle = self._checked("cuDeviceGet", number)
        self._context = self._checked("cuDevicePrimaryCtxRetain", handle)
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = number
        self._properties = properties
        access = cuda.CUmemAccessDesc()
        access.location = properties.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", properties, least)
        self.granularity = int(granularity)
        self._handles: dict[int, Any] = {}  # by offset, of `granularity` bytes each
        self._mapped: set[int] = set()  # addresses with a mapped page
        self._size = 0  # of the offset space

    def _call(self, name: str, *args: Any) -> Any:
        # other threads may have no context, or that of another device
        self._checked("cuCtxPushCurrent", self._context)
        try:
            return self._checked(name, *args)
        finally:
            self._checked("cuCtxPopCurrent")

    def _checked(self, name: str, *args: Any) -> Any:
        """Calls the driver. Raises `MemoryError` if memory runs out, and `RuntimeError` for other
        errors."""
        function = getattr(self._api, name)
        codes = self._api.CUresult
        error, *results = function(*args)
        if error == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"{name}: CUDA out of memory")
        if error != codes.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error}")
        if not results:
            return None
        return results[0]

    def reserve(self, size: int) -> Addresses:
        addresses = Addresses(0, size, self._tensor)
        # the address; one statement reserves and appends it, so that no error leaks it
        reserved: list[int] = []
        when_freed(addresses, self._free, reserved, size)
        reserved.append(int(self._call("cuMemAddressReserve", size, 0, 0, 0)))
        addresses.address = reserved[0]
        return addresses

    def _free(self, reserved: list[int], size: int) -> None:
        for address in reserved:
            self.unmap(address, size)
            self._call("cuMemAddressFree", address, size)

    def _tensor(self, addresses: Addresses) -> Tensor:
        return torch.as_tensor(_CudaArray(addresses), device=self.device)

    def extend(self, size: int) -> int:
        first = self._size
        self._size = first + size
        return first

    def map(self, address: int, offset: int, size: int) -> None:
        page = self.granularity
        try:
            for start in range(0, size, page):
                handle = self._handles.get(offset + start)
                if handle is None:
                    handle = self._handles[offset + start] = self._call(
                        "cuMemCreate", page, self._properties, 0
                    )
                self._call("cuMemMap", address + start, page, 0, handle, 0)
                self._mapped.add(address + start)
            self._call("cuMemSetAccess", address, size, [self._access], 1)
        except BaseException:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        pages = range(address, address + size, self.granularity)
        mapped = [page for page in pages if page in self._mapped]
        if mapped:
            self._call("cuCtxSynchronize")  # running kernels may read there
        for page in mapped:
            self._call("cuMemUnmap", page, self.granularity)
            self._mapped.discard(page)

    def release(self, offset: int, size: int) -> None:
        released = [start for start in self._handles if offset <= start < offset + size]
        for start in released:
            self._call("cuMemRelease", self._handles.pop(start))

    def detach(self, addresses: Addresses, starts: Sequence[int], size: int) -> None:
        total = len(starts) * size
        offset = self.extend(total)
        # first, so that an error leaks no pages
        when_freed(addresses, self._drop, starts, size, offset)
        copies = self.reserve(total)
        self.map(copies.address, offset, total)
        target = copies.tensor(torch.uint8).view(-1, size)
        source = addresses.tensor(torch.uint8)
        for number, start in enumerate(starts):
            position = start - addresses.address
            target[number] = source[position : position + size]
            self.unmap(start, size)
            self.map(start, offset + number * size, size)

    def _drop(self, starts: Sequence[int], size: int, offset: int) -> None:
        for start in starts:
            self.unmap(start, size)
        self.release(offset, len(starts) * size)

    def physical_bytes(self) -> int:
        return len(self._handles) * self.granularity


Pages: TypeAlias = MemoryFile | CudaPages


class _CudaArray:
    """Device addresses as a CUDA array for torch. The tensor keeps them alive."""

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
            'pip install "hf_paged[cuda]", or leave `storage` out'
        ) from error
    return driver
