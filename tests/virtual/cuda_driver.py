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


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


DONE = (CUresult.CUDA_SUCCESS,)


def _mmap(
    address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, offset)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


def _in_context(call: Any) -> Any:
    """Refuses a call from a thread whose current context is not the device's."""

    @functools.wraps(call)
    def checked(self: Driver, *args: Any) -> Any:
        if self.contexts[-1:] != [CONTEXT]:
            self.broken.append(f"{call.__name__} in the context {self.contexts[-1:]}")
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        return call(self, *args)

    return checked


class Driver:
    """`memory`: bytes of the device. `broken`: all violations of the rules."""

    CUresult = CUresult
    CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = types.SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM="least"
    )

    def __init__(self, granularity: int = 2 << 20, memory: int = 1 << 40) -> None:
        self.granularity, self.memory = granularity, memory
        self.broken: list[str] = []
        self.calls: list[str] = []
        self._threads = threading.local()
        self._file = os.memfd_create("device")
        self._size, self._next = 0, 1
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
        return *DONE, number

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return *DONE, CONTEXT

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.contexts.append(context)
        return DONE

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return *DONE, self.contexts.pop()

    def CUmemAllocationProp(self) -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return types.SimpleNamespace()

    def _refuse(self, why: str) -> tuple[CUresult]:
        self.broken.append(why)
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)

    def _is_whole(self, *numbers: int) -> bool:
        return all(number >= 0 and number % self.granularity == 0 for number in numbers)

    def _is_mapped(self, address: int, size: int) -> bool:
        spots = range(address, address + size, self.granularity)
        return self._is_whole(address, size) and all(at in self.mapped for at in spots)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, ...]:
        if (properties.type, properties.location.type, option) != ("pinned", "device", "least"):
            return self._refuse("granularity of another allocation")
        return *DONE, self.granularity

    @_in_context
    def cuMemAddressReserve(
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, ...]:
        if not size or not self._is_whole(size) or flags:
            return self._refuse(f"reserve {size}")
        # aligned like the device's addresses
        start = _mmap(None, size + self.granularity, NONE, _PRIVATE | _ANONYMOUS | _NORESERVE)
        first = -(-start // self.granularity) * self.granularity
        self.reserved[first] = size
        return *DONE, first

    @_in_context
    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.reserved.get(address) != size:
            return self._refuse("addresses are given up that were not reserved as one")
        if any(address <= at < address + size for at in self.mapped):
            return self._refuse("addresses are given up at which something is mapped")
        del self.reserved[address]
        _libc.munmap(address, size)
        return DONE

    @_in_context
    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if size != self.granularity or properties.type != "pinned" or flags:
            return self._refuse(f"create {size}")
        if (len(self.handles) + 1) * size > self.memory:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        offset, self._size = self._size, self._size + size
        os.ftruncate(self._file, self._size)
        handle, self._next = self._next, self._next + 1
        self.handles[handle] = offset
        return *DONE, handle

    @_in_context
    def cuMemMap(
        self, address: int, size: int, offset: int, handle: int, flags: int
    ) -> tuple[Any, ...]:
        if not self._is_whole(address, size) or size != self.granularity or offset or flags:
            return self._refuse("part of a page is mapped")
        places = self.reserved.items()
        if not any(at <= address and address + size <= at + room for at, room in places):
            return self._refuse("a page is mapped at addresses that are not reserved")
        if address in self.mapped:
            return self._refuse("a page is mapped over another")
        if handle not in self.handles:
            return self._refuse("a page is mapped that was released")
        _mmap(address, size, NONE, _SHARED | _FIXED, self._file, self.handles[handle])
        self.mapped[address] = handle
        return DONE

    @_in_context
    def cuMemSetAccess(
        self, address: int, size: int, access: list[Any], count: int
    ) -> tuple[Any, ...]:
        if len(access) != count != 1 or access[0].flags != "read and write":
            return self._refuse("another access is set")
        if not self._is_mapped(address, size):
            return self._refuse("access is set where nothing is mapped")
        _libc.mprotect(address, size, READ_WRITE)
        return DONE

    @_in_context
    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self.calls.append("synchronize")
        return DONE

    @_in_context
    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if not self._is_mapped(address, size):
            return self._refuse("what is not mapped is unmapped")
        if "synchronize" not in self.calls:
            return self._refuse("a page is unmapped while kernels may read it")
        for at in range(address, address + size, self.granularity):
            del self.mapped[at]
        _mmap(address, size, NONE, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED)
        return DONE

    @_in_context
    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if handle not in self.handles:
            return self._refuse("a page is released twice")
        if handle in self.mapped.values():
            return self._refuse("a page is released that is mapped")
        _libc.fallocate(
            self._file,
            3,
            ctypes.c_int64(self.handles.pop(handle)),
            ctypes.c_int64(self.granularity),
        )
        return DONE


class StandInPages(pages.CudaPages):
    """`CudaPages` whose tensors are on the CPU."""

    def __init__(self, api: Driver | None = None) -> None:
        super().__init__(torch.device("cpu"), api or Driver())

    def _tensor(self, addresses: pages.Addresses) -> torch.Tensor:
        return pages.MemoryFile._tensor(addresses)
