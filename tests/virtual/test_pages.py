"""Pages of a device, by a stand-in of its driver that refuses calls without the device's context;
pages of Linux, which a failure at any line leaves without a loss."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.cache import free_memory
from hf_paged.virtual import pages as linux
from tests.support.checks import in_threads
from tests.virtual.cuda_driver import CONTEXT, Driver, StandInPages

PAGE = 1 << 16


@pytest.mark.parametrize(
    "before", [[], ["context of device 1"], [CONTEXT]], ids=["none", "another", "the same"]
)
def test_any_thread_maps_pages_and_its_context_stays(before: list[Any]) -> None:
    driver = Driver(PAGE)
    pages = StandInPages(driver)

    def work() -> list[Any]:
        driver.contexts.extend(before)
        addresses = pages.reserve(4 * PAGE)
        offset = pages.extend(2 * PAGE)
        pages.map(addresses.address, offset, 2 * PAGE)
        addresses.tensor(torch.uint8)[: 2 * PAGE].fill_(7)
        pages.detach(addresses, [addresses.address], PAGE)
        pages.unmap(addresses.address, 4 * PAGE)
        pages.release(offset, 2 * PAGE)
        del addresses
        return list(driver.contexts)

    (after,) = in_threads(work)
    assert after == before and not driver.broken


def test_pages_that_a_failed_map_made_are_released() -> None:
    driver = Driver(PAGE, memory=3 * PAGE)
    pages = StandInPages(driver)
    addresses, offset = pages.reserve(8 * PAGE), pages.extend(8 * PAGE)
    pages.map(addresses.address, offset, PAGE)
    with pytest.raises(MemoryError):
        pages.map(addresses.address + PAGE, offset, 4 * PAGE)
    assert pages.physical_bytes() == len(driver.handles) * PAGE == len(driver.mapped) * PAGE == PAGE
    pages.map(addresses.address + PAGE, offset, 3 * PAGE)
    assert not driver.broken


class Reserved(mmap.mmap):
    """Addresses that are reserved until the object's end."""

    living: weakref.WeakSet[Any] = weakref.WeakSet()

    def __new__(cls, *args: Any) -> Any:
        reserved = super().__new__(cls, *args)
        cls.living.add(reserved)
        return reserved


def fails_at(
    number: int,
    call: Callable[[], Any],
    *paths: str,
    error: type[BaseException] = MemoryError,
) -> bool:
    """Calls with an error at the line `number`, counted as they run, of all lines of these files
    except those of finalizers; returns whether there was one."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename not in paths or code.co_name == "_close":
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise error("on purpose")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        return False
    except error:
        return True
    finally:
        sys.settrace(before)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
@pytest.mark.parametrize("operation", ["file", "reserve", "reserved", "detach"])
def test_a_failure_at_any_line_leaks_no_addresses_and_no_file(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = linux.MemoryFile().granularity
    file = linux.MemoryFile()
    addresses = file.reserve(4 * size)
    content = addresses.tensor(torch.uint8)
    monkeypatch.setattr(linux.mmap, "mmap", Reserved)

    def call() -> None:
        if operation == "file":
            linux.MemoryFile()
        elif operation == "reserve":
            file.reserve(size)
        elif operation == "reserved":
            free_memory.reserved_tensor(size)
        else:
            first, second = addresses.address, addresses.address + 2 * size
            file.detach(addresses, [first, first + size, second + size], size)

    num_files = len(os.listdir("/proc/self/fd"))
    number = 0
    has_failed = True
    while has_failed:
        has_failed = fails_at(number, call, linux.__file__, free_memory.__file__)
        assert not Reserved.living, f"line {number}"
        assert len(os.listdir("/proc/self/fd")) == num_files, f"line {number}"
        offset = file.extend(4 * size)
        file.map(addresses.address, offset, 4 * size)
        content.fill_(number)
        assert content.unique().tolist() == [number]
        number += 1
    assert number > 3
