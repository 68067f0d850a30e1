"""A strict stand-in for `cuda.bindings.driver`: the virtual memory management of CUDA's driver, on
host memory. Calls that the driver forbids or leaves undefined raise an error; unmapped memory, or
memory without access rights, cannot be touched."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import threading
import types
from typing import Any

import torch

from hf_paged.virtual import pages

NONE, READ_WRITE = 0, 3
CONTEXT = "primary context of device 0"
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class _Refused(Exception):
    pass


def _require(is_allowed: bool, what: str) -> None:
    if not is_allowed:
        raise _Refused(what)


def _mmap(
    address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, offset)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


def _driver_call(method: Any) -> Any:
    """The method as a call of the driver, which needs the device's context."""

    @functools.wraps(method)
    def call(self: Driver, *args: Any) -> tuple[Any, ...]:
        try:
            current = self.contexts[-1:]
            _require(current == [CONTEXT], f"{method.__name__} in the context {current}")
            return CUresult.CUDA_SUCCESS, method(self, *args)
        except MemoryError:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        except _Refused as error:
            self.broken.append(str(error))
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)

    return call


class Driver:
    """`memory`: bytes of the device. `broken`: all violations of the rules."""

    CUresult = CUresult
    CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = types.SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM="least"
    )
    CUmemAccessDesc = types.SimpleNamespace

    def __init__(self, granularity: int = 2 << 20, memory: int = 1 << 40) -> None:
        self.granularity, self.memory = granularity, memory
        self.broken: list[str] = []
        self._threads = threading.local()
        self._file = os.memfd_create("device")
        self._size, self._next, self._is_synchronized = 0, 1, False
        self.reserved: dict[int, int] = {}  # size by address
        self.handles: dict[int, int] = {}  # offset in the file, by handle
        self.mapped: dict[int, int] = {}  # handle by address

    def __del__(self) -> None:
        os.close(self._file)

    @property
    def contexts(self) -> list[Any]:
        """The calling thread's stack of contexts, the current one last."""
        if not hasattr(self._threads, "contexts"):
            self._threads.contexts = []
        return self._threads.contexts

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, number

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, CONTEXT

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, self.contexts.append(context)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, self.contexts.pop()

    def CUmemAllocationProp(self) -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def _is_whole(self, *numbers: int) -> bool:
        return all(number >= 0 and number % self.granularity == 0 for number in numbers)

    def _is_mapped(self, address: int, size: int) -> bool:
        spots = range(address, address + size, self.granularity)
        return self._is_whole(address, size) and all(at in self.mapped for at in spots)

    @_driver_call
    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> int:
        given = properties.type, properties.location.type, option
        _require(given == ("pinned", "device", "least"), "granularity of another allocation")
        return self.granularity

    @_driver_call
    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        _require(size > 0 and self._is_whole(size) and not flags, f"reserve {size}")
        # aligned like the device's addresses
        start = _mmap(None, size + self.granularity, NONE, _PRIVATE | _ANONYMOUS | _NORESERVE)
        first = -(-start // self.granularity) * self.granularity
        self.reserved[first] = size
        return first

    @_driver_call
    def cuMemAddressFree(self, address: int, size: int) -> None:
        _require(self.reserved.get(address) == size, "what was not reserved as one is given up")
        is_in_use = any(address <= at < address + size for at in self.mapped)
        _require(not is_in_use, "addresses are given up at which something is mapped")
        del self.reserved[address]
        _libc.munmap(address, size)

    @_driver_call
    def cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        is_known = size == self.granularity and properties.type == "pinned"
        _require(is_known and not flags, f"create {size}")
        if (len(self.handles) + 1) * size > self.memory:
            raise MemoryError
        offset, self._size = self._size, self._size + size
        os.ftruncate(self._file, self._size)
        handle, self._next = self._next, self._next + 1
        self.handles[handle] = offset
        return handle

    @_driver_call
    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        is_page = self._is_whole(address) and size == self.granularity
        _require(is_page and not offset and not flags, "part of a page is mapped")
        places = self.reserved.items()
        is_reserved = any(at <= address and address + size <= at + room for at, room in places)
        _require(is_reserved, "a page is mapped at addresses that are not reserved")
        _require(address not in self.mapped, "a page is mapped over another")
        _require(handle in self.handles, "a page is mapped that was released")
        _mmap(address, size, NONE, _SHARED | _FIXED, self._file, self.handles[handle])
        self.mapped[address] = handle

    @_driver_call
    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        flags = [each.flags for each in access]
        _require(count == 1 and flags == ["read and write"], "another access is set")
        _require(self._is_mapped(address, size), "access is set where nothing is mapped")
        _libc.mprotect(address, size, READ_WRITE)

    @_driver_call
    def cuCtxSynchronize(self) -> None:
        self._is_synchronized = True

    @_driver_call
    def cuMemUnmap(self, address: int, size: int) -> None:
        _require(self._is_mapped(address, size), "what is not mapped is unmapped")
        _require(self._is_synchronized, "a page is unmapped while kernels may read it")
        for at in range(address, address + size, self.granularity):
            del self.mapped[at]
        _mmap(address, size, NONE, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED)

    @_driver_call
    def cuMemRelease(self, handle: int) -> None:
        _require(handle in self.handles, "a page is released twice")
        _require(handle not in self.mapped.values(), "a page is released that is mapped")
        _libc.fallocate(self._file, 3, self.handles.pop(handle), self.granularity)


class StandInPages(pages.CudaPages):
    """`CudaPages` whose tensors are on the CPU."""

    def __init__(self, api: Driver | None = None) -> None:
        super().__init__(torch.device("cpu"), api or Driver())

    def _tensor(self, addresses: pages.Addresses) -> torch.Tensor:
        return pages.MemoryFile._tensor(addresses)
