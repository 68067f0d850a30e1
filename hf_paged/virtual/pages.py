"""Physical pages that can be mapped at several reserved addresses each: pages of an in-memory file
on Linux, or of a CUDA device through its driver (vAttention, arXiv 2405.04437, section 5). Callers
keep track of the mapped pages.

Pages are identified by their offset in an offset space, which takes no memory itself. Unless
`can_map_over` is true, callers must `map` only at unmapped addresses, and `release` only pages that
are mapped nowhere.
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
"""Distance between planes (`mappings.PlaneLayout`) in the offset space: larger than any plane, so
that each can grow."""


class Addresses:
    """A reserved address range, which is freed once this object and all its tensors are freed."""

    def __init__(
        self,
        address: int,
        size: int,
        make_view: Callable[[Addresses], Tensor],
        memory: Any = None,
        backing: Backing | None = None,
    ) -> None:
        """`size`: in bytes. `make_view`: makes a uint8 tensor of the range. `memory`: an object
        whose deletion frees the range. `backing`: the pages to map, which live at least as long as
        the range."""
        self.address = address
        self.size = size
        self._make_view = make_view
        self._memory = memory
        self.backing = backing

    def subrange(self, start: int, size: int) -> Addresses:
        """Returns the `size` bytes from byte `start` on as a separate object, which together with
        its tensors keeps this range alive."""
        return Addresses(self.address + start, size, self._make_view, self)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Returns the range as a one-dimensional tensor of `dtype`. Only mapped pages of it may be
        written to or, on a CUDA device, read."""
        with torch.inference_mode(False):  # the tensor outlives the call
            memory = self._make_view(self)
            return memory.view(dtype)


def when_freed(owner: Any, callback: Callable[..., None], *arguments: Any) -> Any:
    """Calls `callback(*arguments)` when `owner` is freed, but not at interpreter exit. Returns a
    function that makes this call at once instead; later calls of that function do nothing."""
    finalizer = weakref.finalize(owner, callback, *arguments)
    finalizer.atexit = False
    return finalizer


class Backing:
    """Owns the pages `[offset, offset + size)`. They return to the system when `release` is called
    or this object is freed; the `Addresses` that refer to it keep it alive."""

    def __init__(self, pages: Pages, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.release = when_freed(self, _release, os.getpid(), pages, offset, size)


def _release(pid: int, pages: Pages, offset: int, size: int) -> None:
    """Returns pages to the system, but only in process `pid`, which created them."""
    if os.getpid() == pid:
        pages.release(offset, size)


class Extents:
    """Counts the extents of rows: ranges of adjacent addresses that map adjacent pages. Each extent
    takes one mapping of the process. Linux allows `vm.max_map_count` mappings; all rows together
    may take half, since other allocations also need mappings. CUDA has no such limit."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count

    def check(self) -> None:
        """Raises `MemoryError` if there are too many extents."""
        if self.count > self.limit:
            raise MemoryError(
                f"rows would take {self.count:,} mappings, but half of `vm.max_map_count` is"
                f" {self.limit:,}: raise that setting, or `page_bytes` of `VirtualStorage`"
            )


def pages_for(device: torch.device, page_bytes: int | None = None) -> Pages:
    """Returns new `Pages` on this device with a `granularity` of `page_bytes`, by default the
    device's page size. Raises `ValueError` if the device is unsupported, file sizes are limited,
    `cuda.bindings` is missing, or `page_bytes` is not a multiple of the device's page size."""
    has_memory_files = sys.platform == "linux" and hasattr(os, "memfd_create")
    pages: Pages
    if device.type == "cuda":
        pages = CudaPages(device)
    elif device.type == "cpu" and has_memory_files:
        _check_file_size()
        pages = MemoryFile()
    else:
        raise ValueError(
            f"`storage` is 'virtual', but pages cannot be mapped on {device} under {sys.platform}:"
            " this needs Linux for models on the CPU, or a CUDA device. Leave `storage` out"
        )
    if page_bytes is not None and page_bytes % pages.granularity:
        raise ValueError(
            f"`page_bytes` is {page_bytes:,}, but must be a multiple of the {pages.granularity:,}"
            f" bytes of a page on {device}"
        )
    pages.granularity = page_bytes or pages.granularity
    return pages


def _check_file_size() -> None:
    """Raises `ValueError` if file sizes are limited: our offsets are far larger than memory."""
    import resource  # missing on Windows

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        raise ValueError(
            f"`storage` is 'virtual', but files of this process are limited to {limit:,} bytes"
            " (ulimit -f), including sparse files in memory: lift the limit, or leave `storage`"
            " out"
        )


# Linux

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
    """Maps pages over existing mappings: another thread that reads there sees the old or the new
    pages. Raises `MemoryError`."""
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


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class MemoryFile:
    """The pages of a sparse in-memory file (`memfd_create`). Unmapped addresses read as zeros.
    Sizes, offsets and addresses are in bytes, and multiples of `granularity`."""

    can_map_over = True  # whether `map` may replace mappings, and `release` accepts mapped pages
    is_sparse = True  # whether mapped pages take no memory until they are first accessed

    def __init__(self, granularity: int = mmap.PAGESIZE) -> None:
        self.granularity = granularity
        self.extents = _extents()  # of the process
        self._size = 0  # of the offset space
        self._fds: list[int] = []  # one, in a list that the finalizer shares
        when_freed(self, _close, self._fds)  # before the file exists, so that no error leaks it
        self._fds.append(os.memfd_create("hf_paged"))

    @property
    def _fd(self) -> int:
        return self._fds[0]

    def reserve(self, size: int, backing: Backing | None = None) -> Addresses:
        """Reserves a range of unmapped addresses for pages of `backing`. Raises `MemoryError`."""
        memory = reserve_addresses(size, _READ)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        return Addresses(address, size, self._tensor, memory, backing)

    @staticmethod
    def _tensor(addresses: Addresses) -> Tensor:
        array_type: Any = ctypes.c_char * addresses.size
        buffer = array_type.from_address(addresses.address)
        buffer.addresses = addresses  # so that the tensor, which owns the buffer, keeps the range
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def extend(self, size: int) -> int:
        """Extends the offset space by `size` bytes, so that pages at the new offsets may be mapped;
        returns the first new offset."""
        first_offset = self._size
        os.ftruncate(self._fd, first_offset + size)
        self._size += size
        return first_offset

    def map(self, address: int, offset: int, size: int) -> None:
        """Maps pages `[offset, offset + size)` at an address. Pages that do not exist are created
        when they are first accessed (`CudaPages`: at once). Raises `MemoryError`."""
        _map_over(address, size, _READ | _WRITE, _SHARED, self._fd, offset)

    def unmap(self, address: int, size: int) -> None:
        """Unmaps a range of addresses, parts of which may be unmapped already."""
        _map_over(address, size, _READ, _PRIVATE | _ANONYMOUS | NORESERVE)

    def release(self, offset: int, size: int) -> None:
        """Returns the existing pages in `[offset, offset + size)` to the system."""
        if _libc().fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, size):
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number))

    def detach(self, addresses: Addresses, starts: Sequence[int], size: int) -> None:
        """Replaces `size` bytes of pages at each of `starts`, which are addresses in the range
        `addresses`, by private copies that are freed with the range. Raises `MemoryError`, possibly
        after it has replaced some of them."""
        runs: list[list[int]] = []  # address and bytes of adjacent pages
        for start in starts:
            if runs and sum(runs[-1]) == start:
                runs[-1][1] += size
            else:
                runs.append([start, size])
        copies = MemoryFile(self.granularity)
        offsets = [copies._append_copy(address, num_bytes) for address, num_bytes in runs]
        for (address, num_bytes), offset in zip(runs, offsets):
            # private mappings keep the file alive, and are not shared with a child process
            flags = _PRIVATE | NORESERVE
            _map_over(address, num_bytes, _READ | _WRITE, flags, copies._fd, offset)

    def _append_copy(self, address: int, size: int) -> int:
        """Copies `size` bytes of memory to new pages; returns their offset. Raises
        `MemoryError`."""
        first = self.extend(size)
        content: Any = (ctypes.c_char * size).from_address(address)
        remaining_bytes = memoryview(content)
        while remaining_bytes:
            try:
                num_written = os.pwrite(
                    self._fd, remaining_bytes, first + size - len(remaining_bytes)
                )
            except OSError as error:
                raise MemoryError(f"{size:,} bytes cannot be copied: {error}") from error
            remaining_bytes = remaining_bytes[num_written:]
        return first

    def physical_bytes(self) -> int:
        """Returns the bytes of physical memory that the pages take."""
        return os.fstat(self._fd).st_blocks * 512

    def empty_copy(self) -> MemoryFile:
        """Returns a file with an offset space of the same size but no pages. A child process maps
        it in place of its parent's file."""
        empty = MemoryFile(self.granularity)
        empty.extend(self._size)
        return empty


# CUDA devices


class CudaPages:
    """Pages of a CUDA device, which the driver's virtual memory management creates and maps. Has
    the public methods of `MemoryFile` except `empty_copy`. Any thread may call these methods:
    driver calls run in the device's primary context, which is torch's. `api`: by default
    `cuda.bindings.driver`."""

    can_map_over = False
    is_sparse = False

    def __init__(self, device: torch.device, api: Any = None) -> None:
        self.device = device
        self._api = api or _cuda_driver()
        self.extents = Extents()
        cuda = self._api
        device_index = device.index or 0
        if device.type == "cuda" and device.index is None:
            device_index = torch.cuda.current_device()
        handle = self._call_driver("cuDeviceGet", device_index)
        self._context = self._call_driver("cuDevicePrimaryCtxRetain", handle)
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device_index
        self._properties = properties
        access = cuda.CUmemAccessDesc()
        access.location = properties.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call_in_context("cuMemGetAllocationGranularity", properties, minimum)
        self.granularity = int(granularity)
        # the driver's handles of existing pages, of `granularity` bytes each, by offset
        self._handles: dict[int, Any] = {}
        self._mapped_pages: set[int] = set()  # by address
        self._size = 0  # of the offset space

    def _call_in_context(self, name: str, *args: Any) -> Any:
        """Runs `_call_driver` in the device's context."""
        # the thread may have no context, or another device's
        self._call_driver("cuCtxPushCurrent", self._context)
        try:
            return self._call_driver(name, *args)
        finally:
            self._call_driver("cuCtxPopCurrent")

    def _call_driver(self, name: str, *args: Any) -> Any:
        """Calls a function of the driver; returns its first result. Raises `MemoryError` if memory
        runs out, and `RuntimeError` for other errors."""
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

    def reserve(self, size: int, backing: Backing | None = None) -> Addresses:
        addresses = Addresses(0, size, self._tensor, backing=backing)
        # filled once the range is reserved: the finalizer is registered first and shares this list,
        # so that no error leaks the range
        reserved_addresses: list[int] = []
        when_freed(addresses, self._free, reserved_addresses, size)
        reserved_addresses.append(int(self._call_in_context("cuMemAddressReserve", size, 0, 0, 0)))
        addresses.address = reserved_addresses[0]
        return addresses

    def _free(self, reserved_addresses: list[int], size: int) -> None:
        for address in reserved_addresses:
            self.unmap(address, size)
            self._call_in_context("cuMemAddressFree", address, size)

    def _tensor(self, addresses: Addresses) -> Tensor:
        return torch.as_tensor(_CudaArray(addresses), device=self.device)

    def extend(self, size: int) -> int:
        first = self._size
        self._size = first + size
        return first

    def map(self, address: int, offset: int, size: int) -> None:
        page = self.granularity
        new_offsets = [x for x in range(offset, offset + size, page) if x not in self._handles]
        try:
            for start in range(0, size, page):
                handle = self._handles.get(offset + start)
                if handle is None:
                    handle = self._handles[offset + start] = self._call_in_context(
                        "cuMemCreate", page, self._properties, 0
                    )
                self._call_in_context("cuMemMap", address + start, page, 0, handle, 0)
                self._mapped_pages.add(address + start)
            self._call_in_context("cuMemSetAccess", address, size, [self._access], 1)
        except BaseException:
            self.unmap(address, size)
            for new_offset in new_offsets:
                self.release(new_offset, page)
            raise

    def unmap(self, address: int, size: int) -> None:
        pages = range(address, address + size, self.granularity)
        mapped_pages = [page for page in pages if page in self._mapped_pages]
        if mapped_pages:
            self._call_in_context("cuCtxSynchronize")  # running kernels may read the pages
        for page in mapped_pages:
            self._call_in_context("cuMemUnmap", page, self.granularity)
            self._mapped_pages.discard(page)

    def release(self, offset: int, size: int) -> None:
        # a copy: another thread may map pages meanwhile
        released_offsets = [x for x in list(self._handles) if offset <= x < offset + size]
        for start in released_offsets:
            self._call_in_context("cuMemRelease", self._handles.pop(start))

    def detach(self, addresses: Addresses, starts: Sequence[int], size: int) -> None:
        num_bytes = len(starts) * size
        offset = self.extend(num_bytes)
        # before pages are created, so that an error leaks none
        when_freed(addresses, self._free_copies, starts, size, offset)
        copies = self.reserve(num_bytes)
        self.map(copies.address, offset, num_bytes)
        target = copies.tensor(torch.uint8).view(-1, size)
        source = addresses.tensor(torch.uint8)
        for index, start in enumerate(starts):
            position = start - addresses.address
            target[index] = source[position : position + size]
            self.unmap(start, size)
            self.map(start, offset + index * size, size)

    def _free_copies(self, starts: Sequence[int], size: int, offset: int) -> None:
        for start in starts:
            self.unmap(start, size)
        self.release(offset, len(starts) * size)

    def physical_bytes(self) -> int:
        return len(self._handles) * self.granularity


Pages: TypeAlias = MemoryFile | CudaPages


class _CudaArray:
    """Device addresses as a CUDA array, from which torch makes a tensor that keeps them alive."""

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
