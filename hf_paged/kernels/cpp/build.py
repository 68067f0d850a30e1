"""Builds the C++ kernels once per machine and loads them with ctypes. The library is stored in a
folder that no other user can replace. Never loads a truncated, altered or foreign library, but
compiles it again."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch  # noqa: F401  before dlopen: the library then shares the OpenMP runtime, and so the threads, of torch
from filelock import FileLock

from ...interrupts import is_interrupt
from ...timing import timed
from ...topics import Topic
from . import prebuilt
from .compiler import (
    COMMON_FLAGS,
    SOURCES,
    compile_command,
    cpu_flags,
    find_compiler,
    link_flags,
)

logger = logging.getLogger(__package__)

# From the best flags to those that any compiler accepts; the first flags that work are used.
_EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())

# seconds for which a process waits for another one that builds, before it builds for itself
MAX_WAIT = 600.0

VARIABLE = "HF_PAGED_ISA"
# instruction paths of bfloat16 products, the best last
PATHS = {"wide": 0, "avx512_bf16": 1, "amx": 2}

NAMES = (
    "attention",
    "store",
    "gather",
    "hash",
    "draw",
    "linear",
    "linear_path",
    "rows",
    "pick",
    "tape",
)

# called with each kernel call: its name, the packed struct, and the tensors that it reads and those
# that it writes, by offset in the struct
observer: ContextVar[Callable[[str, bytes, dict[int, Any], dict[int, Any]], None] | None]
observer = ContextVar("observer", default=None)

# whether a row's results must be bitwise independent of the other rows of the batch
batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def is_available() -> bool:
    """Whether the kernels are available; builds them on first use on this machine."""
    return library() is not None


def kernel(name: str) -> Callable[[bytes], int]:
    """Returns a function of the library, which must be available. The function takes a packed
    struct and returns 0 or an error number."""
    function: Callable[[bytes], int] = getattr(library(), f"hf_paged_{name}")
    return function


def address_of(name: str) -> int:
    """Returns the address of the function that `kernel` returns."""
    function: Any = kernel(name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def best_path() -> int:
    """Returns the number of this CPU's best path, or of a lower one that `HF_PAGED_ISA` names.
    Raises `ValueError` for unknown names."""
    best = kernel("linear_path")(b"")
    name = os.environ.get(VARIABLE)
    if name and name not in PATHS:
        raise ValueError(
            f"{VARIABLE}={name!r} names no instructions: use one of {', '.join(PATHS)}, or unset it"
        )
    return min(best, PATHS[name]) if name else best


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the loaded library, or logs the reason and returns `None`. Tried once per process."""
    if os.environ.get("HF_PAGED_CPP") == "0":
        logger.info("hf_paged runs without its C++ kernels, on the portable path: HF_PAGED_CPP=0")
        return None
    try:
        with timed("build"):
            loaded = _load()
        for name in NAMES:
            getattr(loaded, f"hf_paged_{name}").argtypes = [ctypes.c_char_p]
        return loaded
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        if is_interrupt(error):
            raise
        logger.warning(
            Topic.CPP_KERNELS(
                "hf_paged runs without its C++ kernels, on the slower portable path: %s"
            ),
            error,
        )
        return None


def _load() -> ctypes.CDLL:
    """Loads the wheel's library, else the one in the cache folder, which it compiles if missing. If
    the folder is unusable, compiles one for this process alone."""
    if (path := prebuilt.find()) is not None:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            logger.info("compiling the kernels, since the wheel's library does not load: %s", error)
    compiler, key = _recipe()
    try:
        folder = _make_private(_cache_dir())
        path = _find(folder, key) or _build_once(folder, key, compiler)
        return ctypes.CDLL(str(path))
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        if is_interrupt(error):
            raise
        logger.warning(
            Topic.CPP_KERNELS(
                "hf_paged: compiling the CPU kernels for this process alone, and again in every"
                " process, since they cannot be stored: %s. Set HF_PAGED_CACHE_DIR to a folder that"
                " is yours and that only you can write to"
            ),
            error,
        )
        with tempfile.TemporaryDirectory(prefix="hf_paged-") as name:
            # a loaded library no longer needs its file
            return ctypes.CDLL(str(_build(_make_private(Path(name)), key, compiler)))


def _recipe() -> tuple[list[str], str]:
    """Returns the compiler, and a key of the library that it builds from these sources on this
    CPU."""
    compiler = find_compiler()
    version = subprocess.run(
        [compiler[0], "--version"], capture_output=True, check=True, timeout=60
    ).stdout
    # The CPU is part of the key: a shared home directory may serve other CPUs, which cannot run
    # -march=native code.
    parts = (
        *(source.read_bytes() for source in SOURCES),
        COMMON_FLAGS,
        _EXTRA_FLAGS,
        compiler[1:],
        link_flags(compiler),
        version,
        _cpu(),
    )
    return compiler, hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _find(folder: Path, key: str, level: int = logging.WARNING) -> Path | None:
    """Returns an intact library of this key in a private folder, or `None`; logs why it rejects
    others at `level`. A library's name ends with the hash of its content; one rename creates both
    together."""
    for path in sorted(folder.glob(f"cpp-{key}-*.so")):
        try:
            content = _read_private(path)
        except OSError as error:
            logger.log(
                level,
                Topic.CPP_KERNELS(
                    "hf_paged does not load a library that others could have changed: %s"
                ),
                error,
            )
            continue
        if path.stem.endswith(hashlib.sha256(content).hexdigest()):
            return path
        logger.log(
            level,
            Topic.CPP_KERNELS("hf_paged does not load %s, which is truncated or altered"),
            path,
        )
    return None


def _build_once(folder: Path, key: str, compiler: list[str]) -> Path:
    """Builds the library in a private folder, or waits for the process that builds it. The system
    releases the lock of a process that is killed. Raises `OSError` if the folder cannot be locked
    or written to."""
    lock = FileLock(folder / "build.lock", timeout=MAX_WAIT)
    with lock:
        try:
            path = _find(folder, key, logging.DEBUG)
            if path is None:
                for leftover in folder.glob(f"{tempfile.gettempprefix()}*.so"):
                    # left by builds that were killed
                    leftover.unlink()
                logger.warning(
                    Topic.CPP_KERNELS(
                        "hf_paged: compiling the CPU kernels, once on this machine ..."
                    )
                )
                path = _build(folder, key, compiler)
            return path
        finally:
            # waiting processes lock a new file
            Path(lock.lock_file).unlink(missing_ok=True)


def _build(folder: Path, key: str, compiler: list[str]) -> Path:
    start = time.perf_counter()
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        for extra in _EXTRA_FLAGS:
            command = compile_command(compiler, extra, Path(name))
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=300
            )
            if done.returncode == 0:
                os.chmod(name, 0o700)  # the linker applies the umask
                path = (
                    folder / f"cpp-{key}-{hashlib.sha256(_read_private(Path(name))).hexdigest()}.so"
                )
                os.replace(name, path)  # atomic: another process sees the whole file or none
                seconds = time.perf_counter() - start
                logger.warning(
                    Topic.CPP_KERNELS("hf_paged: compiled the CPU kernels in %.1f s"), seconds
                )
                return path
        raise RuntimeError(f"{compiler[0]} failed: {done.stderr.strip()[-500:]}")
    finally:
        Path(name).unlink(missing_ok=True)


def _cache_dir() -> Path:
    """Returns `$HF_PAGED_CACHE_DIR`, else `$XDG_CACHE_HOME/hf_paged`, else `~/.cache/hf_paged`.
    Raises `OSError` if it is relative."""
    name = next(
        (name for name in ("HF_PAGED_CACHE_DIR", "XDG_CACHE_HOME") if os.environ.get(name)), "HOME"
    )
    value = os.environ.get(name) or os.path.expanduser("~")
    if not os.path.isabs(value):
        raise OSError(f"{name} is {value!r}: it must be an absolute path")
    return Path(
        value, *{"XDG_CACHE_HOME": ("hf_paged",), "HOME": (".cache", "hf_paged")}.get(name, ())
    )


def _cpu() -> str:
    """Returns the architecture and the instruction sets that the system reports."""
    return f"{platform.machine()} {' '.join(sorted(cpu_flags())) or platform.processor()}"


def _make_private(folder: Path) -> Path:
    """Returns the folder without links; creates it if missing. Checks that it is ours alone (mode
    700) and that only root and we can replace it or a link on its path, like ssh does for keys.
    Raises an `OSError` that says what to change."""
    resolved = Path(os.path.realpath(folder))
    user = os.geteuid()
    for path in [path for end in (folder, resolved) for path in (*reversed(end.parents), end)]:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            os.makedirs(path, mode=0o700, exist_ok=True)  # another process may have created it
            status = os.lstat(path)
        is_sticky = status.st_mode & stat.S_ISVTX  # such as /tmp
        _check_access(
            path, status, (0, user), may_be_open=stat.S_ISLNK(status.st_mode) or is_sticky
        )
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    _check_access(path, status, (user,), may_be_open=True)
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} has mode {stat.S_IMODE(status.st_mode):o}: chmod 700 {path}")
    return resolved


def _read_private(path: Path) -> bytes:
    """Reads a file in a private folder. Raises `OSError` unless it is a regular file that only we
    can change."""
    # O_NONBLOCK: opening a pipe must not wait
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        _check_access(path, status, (os.geteuid(),))
        return file.read()


def _check_access(
    path: Path, status: os.stat_result, owners: tuple[int, ...], may_be_open: int = False
) -> None:
    if status.st_uid not in owners:
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not may_be_open:
        raise PermissionError(f"other users can write to {path}: chmod go-w {path}")
