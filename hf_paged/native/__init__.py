"""The C++ kernels of `kernels.cpp`: built on first use, loaded with ctypes, absent without complaint.

There is no wheel to match and no torch header to compile: a few seconds of the user's own compiler, once per machine,
kept in `$HF_PAGED_CACHE_DIR`, else `$XDG_CACHE_HOME/hf_paged`, else `~/.cache/hf_paged`. Wherever that cannot work (no
compiler, read-only home, `HF_PAGED_NATIVE=0`), `is_available()` is False and the portable
path of `attention/cpu.py` serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # before dlopen: the library then shares the OpenMP runtime, and so the threads, of torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_paged.attention.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

MAX_QUERIES = 16
"""Queries per row up to which reading the blocks in place beats gathering them once."""

_SOURCE = Path(__file__).with_name("kernels.cpp")
_SOURCES = (_SOURCE, *map(_SOURCE.with_name, ("lanes.cpp", "hash.cpp")))
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-Wno-psabi")
# From the best to what any compiler takes; the first that builds is kept.
_EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ATTENTION = struct.Struct("9Q3q10q3q3q3q4q1q3q2d")  # struct AttentionCall
_STORE = struct.Struct("5Q6q6q6q2q")  # struct StoreCall
_HASH = struct.Struct("3Q2q")  # struct HashCall
_NO_STRIDES: tuple[int, ...] = (0, 0, 0, 0)


def is_available() -> bool:
    """Whether the kernels are there, building them if this machine has not yet."""
    return _library() is not None


def supports(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    """Whether `paged_attention` takes these arguments: float32, bfloat16 or float16 on the CPU, at most
    `MAX_QUERIES` queries a row, contiguous head dimensions, as many heads of V as of K, no gradient wanted."""
    dtype = query.dtype
    if not (
        query.is_cpu
        and metadata.query_len <= MAX_QUERIES
        and dtype in _DTYPES
        and key_blocks.dtype is dtype
        and value_blocks.dtype is dtype
    ):
        return False
    if not (
        query.stride(3) == 1
        and key_blocks.stride(3) == 1
        and value_blocks.stride(3) == 1
        and key_blocks.size(1) == value_blocks.size(1)
    ):
        return False
    if sinks is not None and (sinks.dtype not in _DTYPES or not sinks.is_cpu or sinks.stride(0) != 1):
        return False
    if bias is not None and (bias.dtype not in _DTYPES or not bias.is_cpu):
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (query, key_blocks, value_blocks, sinks, bias)
    return not any(tensor is not None and tensor.requires_grad for tensor in tensors)


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention` for the arguments that `supports` accepts; float32 arithmetic for every dtype."""
    batch, heads, query_len, key_dim = query.shape
    num_blocks, kv_heads, block_size, value_dim = value_blocks.shape
    out = query.new_empty(batch, query_len, heads, value_dim)
    tables = metadata.block_tables
    bias_strides, bias_len = _NO_STRIDES, 0
    if bias is not None:
        keys = max(bias.shape[-1], max(metadata.seq_lens_host) if bias.shape[-1] == 1 else 0)
        bias = bias.expand(batch, heads, query_len, keys)
        bias_strides, bias_len = bias.stride(), keys
    query_strides, key_strides, value_strides = query.stride(), key_blocks.stride(), value_blocks.stride()
    call = _ATTENTION.pack(
        query.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        out.data_ptr(),
        tables.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.starts.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        _DTYPES[query.dtype],
        0 if sinks is None else _DTYPES[sinks.dtype],
        0 if bias is None else _DTYPES[bias.dtype],
        batch,
        heads,
        kv_heads,
        query_len,
        key_dim,
        value_dim,
        block_size,
        num_blocks,
        tables.stride(0),
        tables.size(1),
        query_strides[0],
        query_strides[1],
        query_strides[2],
        key_strides[0],
        key_strides[1],
        key_strides[2],
        value_strides[0],
        value_strides[1],
        value_strides[2],
        *bias_strides,
        bias_len,
        metadata.causal,
        -1 if metadata.window is None else metadata.window,
        torch.get_num_threads(),
        scale,
        softcap or 0.0,
    )
    library = _library()
    assert library is not None
    error = library.hf_paged_attention(call)
    if error:
        raise IndexError(
            f"block tables of shape {tuple(tables.shape)} and {block_size} tokens a block do not fit "
            f"seq_lens {metadata.seq_lens.tolist()}"
            if error == 1
            else f"a block id in block_tables is outside the pool of {num_blocks} blocks"
            if error == 2
            else f"the bias covers {bias_len} positions, seq_lens are {metadata.seq_lens.tolist()}"
        )
    return out


def supports_store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> bool:
    """Whether `store` takes these arguments: plain copies within the CPU, contiguous head dimension."""
    return (
        keys.is_cpu
        and key_blocks.is_cpu
        and keys.dtype is key_blocks.dtype
        and values.dtype is value_blocks.dtype
        and keys.stride(3) == 1
        and values.stride(3) == 1
        and key_blocks.stride(3) == 1
        and value_blocks.stride(3) == 1
        and keys.size(1) == values.size(1)
        and slots.dtype is torch.int64
        and slots.stride(1) == 1
        and not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
    )


def store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
    """`cache.storage.store` for the arguments that `supports_store` accepts."""
    batch, kv_heads, tokens, key_dim = keys.shape
    num_blocks, _, block_size, value_dim = value_blocks.shape
    key_size, value_size = keys.element_size(), values.element_size()
    key_strides, value_strides = keys.stride(), values.stride()
    key_block_strides, value_block_strides = key_blocks.stride(), value_blocks.stride()
    call = _STORE.pack(
        keys.data_ptr(),
        values.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        slots.data_ptr(),
        batch,
        kv_heads,
        tokens,
        block_size,
        num_blocks * block_size,
        slots.stride(0),
        key_strides[0] * key_size,
        key_strides[1] * key_size,
        key_strides[2] * key_size,
        value_strides[0] * value_size,
        value_strides[1] * value_size,
        value_strides[2] * value_size,
        key_block_strides[0] * key_size,
        key_block_strides[1] * key_size,
        key_block_strides[2] * key_size,
        value_block_strides[0] * value_size,
        value_block_strides[1] * value_size,
        value_block_strides[2] * value_size,
        key_dim * key_size,
        value_dim * value_size,
    )
    library = _library()
    assert library is not None
    if library.hf_paged_store(call):
        raise IndexError(f"a slot is outside the pool of {num_blocks} blocks of {block_size} tokens")


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """16 bytes that tell the spans of `sizes[i]` bytes from address `starts[i]`, their order and their content."""
    count = len(starts)
    addresses, num_bytes = (ctypes.c_uint64 * count)(*starts), (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    library = _library()
    assert library is not None
    library.hf_paged_hash(_HASH.pack(*pointers, count, torch.get_num_threads()))
    return bytes(out)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The loaded library, or None with the reason in the log. Tried once per process."""
    try:
        if os.environ.get("HF_PAGED_NATIVE") == "0":
            raise RuntimeError("HF_PAGED_NATIVE=0")
        path = _build()
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # a damaged file from elsewhere: build it again
            path.unlink()
            library = ctypes.CDLL(str(_build()))
        for function in (library.hf_paged_attention, library.hf_paged_store, library.hf_paged_hash):
            function.argtypes = [ctypes.c_char_p]
            function.restype = ctypes.c_int
        return library
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
