"""Building the C++ kernels with the user's own compiler, once per machine, and loading them with ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  before dlopen: the library then shares the OpenMP runtime, and so the threads, of torch

logger = logging.getLogger(__package__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_SOURCES = (_SOURCE, *map(_SOURCE.with_name, ("draw.cpp", "hash.cpp", "lanes.cpp")))
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-Wno-psabi")
# From the best to what any compiler takes; the first that builds is kept.
_EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())


def is_available() -> bool:
    """Whether the kernels are there, building them if this machine has not yet."""
    return library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None with the reason in the log. Tried once per process."""
    try:
        if os.environ.get("HF_PAGED_NATIVE") == "0":
            raise RuntimeError("HF_PAGED_NATIVE=0")
        path = _build()
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:  # a damaged file from elsewhere: build it again
            path.unlink()
            loaded = ctypes.CDLL(str(_build()))
        for function in (loaded.hf_paged_attention, loaded.hf_paged_store, loaded.hf_paged_hash):
            function.argtypes = [ctypes.c_char_p]
            function.restype = ctypes.c_int
        loaded.hf_paged_draw.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        loaded.hf_paged_draw.restype = ctypes.c_int
        return loaded
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("hf_paged runs without its C++ kernels, on the portable path: %s", error)
        return None


def _build() -> Path:
    """The path of the built library; compiles it unless a file for this source, compiler and CPU is there."""
    if sys.platform == "win32":
        raise RuntimeError("no build on Windows")
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler, tried {', '.join(names)}")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    # A home directory may serve machines with other CPUs, which -march=native would not run on.
    key = hashlib.sha256()
    for part in (
        *(source.read_bytes() for source in _SOURCES),
        repr((_FLAGS, _EXTRA_FLAGS)).encode(),
        version,
        _cpu().encode(),
    ):
        key.update(hashlib.sha256(part).digest())
    folder = _cache_dir()
    path = folder / f"native-{key.hexdigest()[:24]}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        for extra in _EXTRA_FLAGS:
            command = [compiler, *_FLAGS, *extra, str(_SOURCE), "-o", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode == 0:
                os.replace(name, path)  # atomic: another process sees no file or a whole one
                return path
        raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
    finally:
        Path(name).unlink(missing_ok=True)


def _cache_dir() -> Path:
    if folder := os.environ.get("HF_PAGED_CACHE_DIR"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hf_paged"


def _cpu() -> str:
    """Architecture and instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"
