"""Loads the C++ kernels with ctypes: from the wheel, or from a folder to which only the user can
write and where they are built once per kind of CPU. If a library in this folder is truncated or
altered, or another user could have written it, builds a new one instead of loading it."""

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

import torch  # noqa: F401  before the library is loaded, which then shares torch's OpenMP runtime and its threads
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

# best first, down to no flags, which any compiler accepts; the first that compile are used
_EXTRA_FLAGS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    ("-march=native",),
    (),
)

# seconds that a process waits for another's build before it builds a library for itself alone
MAX_WAIT = 600.0

ISA_VARIABLE = "HF_PAGED_ISA"
# the instructions that compute bfloat16 products, slowest first, and their numbers in C++
PATHS = {"wide": 0, "avx512_bf16": 1, "amx": 2}

KERNEL_NAMES = (
    "attention",
    "store",
    "gather",
    "hash",
    "draw",
    "linear",
    "linear_path",
    "is_optimized",
    "rows",
    "pick",
    "tape",
)

# Called after each call of the kernels for attention, stores and gathers, with the kernel's name,
# the packed struct, and two dicts: the tensors that the kernel reads, and the tensors that it
# writes, by the byte offset of their address in the struct. The dicts do not contain the pool's
# blocks.
observer: ContextVar[Callable[[str, bytes, dict[int, Any], dict[int, Any]], None] | None]
observer = ContextVar("observer", default=None)

# whether a row's results must not depend on the other rows of the batch, bit for bit
batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def is_available() -> bool:
    """Whether the kernels can be used. Builds them on first use on this machine."""
    return library() is not None


def kernel(name: str) -> Callable[[bytes], int]:
    """Returns the function of a kernel in `KERNEL_NAMES`, which takes a packed struct and returns 0
    or an error number. But `linear_path` returns a number in `PATHS`, and `is_optimized` returns
    whether the library was built with vector instructions and threads. The library must be
    available (`is_available`)."""
    function: Callable[[bytes], int] = getattr(library(), f"hf_paged_{name}")
    return function


def address_of(name: str) -> int:
    """Returns the address of the function that `kernel(name)` returns."""
    function: Any = kernel(name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def best_path() -> int:
    """Returns the number of the best of `PATHS` that this CPU supports, or of a lower one that
    `HF_PAGED_ISA` names. Raises `ValueError` for unknown names."""
    best = kernel("linear_path")(b"")
    name = os.environ.get(ISA_VARIABLE)
    if name and name not in PATHS:
        raise ValueError(
            f"{ISA_VARIABLE}={name!r} names no instructions: use one of {', '.join(PATHS)}, or"
            " unset the variable"
        )
    return min(best, PATHS[name]) if name else best


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the loaded library. If it cannot be built or loaded, or if `HF_PAGED_CPP=0`, logs the
    reason and returns `None`. A process tries only once."""
    if os.environ.get("HF_PAGED_CPP") == "0":
        logger.info("hf_paged runs without its C++ kernels, on the portable path: HF_PAGED_CPP=0")
        return None
    try:
        with timed("build"):
            loaded_library = _load()
        for name in KERNEL_NAMES:
            getattr(loaded_library, f"hf_paged_{name}").argtypes = [ctypes.c_char_p]
        return loaded_library
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
    """Loads the wheel's library or, failing that, the one in the cache folder, compiled if it is
    missing. If the folder cannot be used, compiles a library for this process alone."""
    if (path := prebuilt.find()) is not None:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            if is_interrupt(error):
                raise
            logger.info("not using the wheel's library, which does not load: %s", error)
    compiler, key = _find_compiler_and_key()
    try:
        folder = _make_private(_cache_dir())
        path = _find_library(folder, key) or _build_once(folder, key, compiler)
        return ctypes.CDLL(str(path))
    except (OSError, NotImplementedError) as error:  # a file system without locks raises the latter
        if is_interrupt(error):
            raise
        logger.warning(
            Topic.CPP_KERNELS(
                "hf_paged: compiling the CPU kernels for this process alone, as every process will,"
                " since a compiled library cannot be stored in the cache folder or loaded from it:"
                " %s. Set HF_PAGED_CACHE_DIR to a folder that is yours and that only you can write"
                " to"
            ),
            error,
        )
        with tempfile.TemporaryDirectory(prefix="hf_paged-") as name:
            # the file may be deleted once the library is loaded
            return ctypes.CDLL(str(_build(_make_private(Path(name)), key, compiler)))


def _find_compiler_and_key() -> tuple[list[str], str]:
    """Returns the compiler's command, and a key that identifies the library that it builds from
    these sources on this CPU."""
    compiler = find_compiler()
    version = subprocess.run(
        [compiler[0], "--version"], capture_output=True, check=True, timeout=60
    ).stdout
    # The CPU is part of the key: machines with other CPUs, which may share the home directory, may
    # be unable to run code that was built here with -march=native.
    parts = (
        *(source.read_bytes() for source in SOURCES),
        COMMON_FLAGS,
        _EXTRA_FLAGS,
        compiler[1:],
        link_flags(compiler),
        version,
        _describe_cpu(),
    )
    return compiler, hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _find_library(folder: Path, key: str, level: int = logging.WARNING) -> Path | None:
    """Returns the path of an intact library with this key in a private folder, or `None`. Logs at
    `level` why it rejects a file. A library is intact if its name, which a build gives it when it
    is finished, ends with the hash of its content."""
    for path in sorted(folder.glob(f"cpp-{key}-*.so")):
        try:
            content = _read_private(path)
        except OSError as error:
            if is_interrupt(error):
                raise
            logger.log(
                level,
                Topic.CPP_KERNELS(
                    "hf_paged does not load a library that others could have changed, or that"
                    " cannot be read: %s"
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
    """Builds the library in a private folder, or waits for the process that builds it, and returns
    its path. If a process is killed, the system releases its lock. Raises `OSError` if the folder
    cannot be written to or locked within `MAX_WAIT` seconds, `NotImplementedError` if its file
    system has no locks, and the errors of `_build`."""
    lock = FileLock(folder / "build.lock", timeout=MAX_WAIT)
    with lock:
        try:
            path = _find_library(folder, key, logging.DEBUG)
            if path is None:
                # left by builds that were killed
                for partial in folder.glob(f"{tempfile.gettempprefix()}*.so"):
                    partial.unlink()
                logger.warning(
                    Topic.CPP_KERNELS(
                        "hf_paged: compiling the CPU kernels, once on this machine ..."
                    )
                )
                path = _build(folder, key, compiler)
            return path
        finally:
            # deleted while locked, so that waiting processes lock a new file
            Path(lock.lock_file).unlink(missing_ok=True)


def _build(folder: Path, key: str, compiler: list[str]) -> Path:
    """Compiles the library into a private folder and returns its path. Raises `RuntimeError` with
    the compiler's errors, `SubprocessError` if a compilation takes longer than 300 seconds, and
    `OSError`."""
    start = time.perf_counter()
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        for extra_flags in _EXTRA_FLAGS:
            command = compile_command(compiler, extra_flags, Path(name))
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=300
            )
            if result.returncode == 0:
                os.chmod(name, 0o700)  # the linker's file has the permissions of the umask
                content_hash = hashlib.sha256(_read_private(Path(name))).hexdigest()
                path = folder / f"cpp-{key}-{content_hash}.so"
                os.replace(name, path)  # atomic: other processes see the whole file or none
                seconds = time.perf_counter() - start
                logger.warning(
                    Topic.CPP_KERNELS("hf_paged: compiled the CPU kernels in %.1f s"), seconds
                )
                return path
        raise RuntimeError(f"{compiler[0]} failed: {result.stderr.strip()[-500:]}")
    finally:
        Path(name).unlink(missing_ok=True)


def _cache_dir() -> Path:
    """Returns `$HF_PAGED_CACHE_DIR` if it is set, otherwise `$XDG_CACHE_HOME/hf_paged` if that
    variable is set, otherwise `~/.cache/hf_paged`. Raises `OSError` if the path is relative."""
    variable = next(
        (name for name in ("HF_PAGED_CACHE_DIR", "XDG_CACHE_HOME") if os.environ.get(name)), "HOME"
    )
    value = os.environ.get(variable) or os.path.expanduser("~")
    if not os.path.isabs(value):
        raise OSError(f"{variable} is {value!r}: it must be an absolute path")
    subfolders = {"XDG_CACHE_HOME": ("hf_paged",), "HOME": (".cache", "hf_paged")}
    return Path(value, *subfolders.get(variable, ()))


def _describe_cpu() -> str:
    """Returns the architecture, and the CPU flags or, without these, the processor's name."""
    return f"{platform.machine()} {' '.join(sorted(cpu_flags())) or platform.processor()}"


def _make_private(folder: Path) -> Path:
    """Returns the folder's path with links resolved; creates the folder if it is missing. Checks,
    as ssh does for keys, that only this user can open the folder (mode 700), and that only root and
    this user can replace it, a folder above it or a link on its path. Raises an `OSError` that says
    which of these does not hold."""
    resolved_path = Path(os.path.realpath(folder))
    user = os.geteuid()
    for path in [path for end in (folder, resolved_path) for path in (*reversed(end.parents), end)]:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            os.makedirs(path, mode=0o700, exist_ok=True)  # another process may have created it
            status = os.lstat(path)
        # links' modes do not apply; in sticky folders, users can replace only their own files
        is_protected = stat.S_ISLNK(status.st_mode) or bool(status.st_mode & stat.S_ISVTX)
        _check_access(path, status, (0, user), allow_writers=is_protected)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    _check_access(path, status, (user,), allow_writers=True)
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} has mode {stat.S_IMODE(status.st_mode):o}: chmod 700 {path}")
    return resolved_path


def _read_private(path: Path) -> bytes:
    """Returns the content of a file in a private folder. Raises `OSError` unless it is a regular
    file that only this user can change."""
    # O_NONBLOCK, since opening a pipe must not wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        _check_access(path, status, (os.geteuid(),))
        return file.read()


def _check_access(
    path: Path, status: os.stat_result, owners: tuple[int, ...], allow_writers: bool = False
) -> None:
    """Raises `PermissionError` unless one of the users `owners` owns the path and (without
    `allow_writers`) no other user can write to it."""
    if status.st_uid not in owners:
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not allow_writers:
        raise PermissionError(f"other users can write to {path}: chmod go-w {path}")
