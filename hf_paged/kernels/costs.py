"""Attention time per context token by block size: tables per machine, written by `benchmarks.tune`."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path

import torch

from . import cpp, forced, uses_triton
from .cpp.compiler import cpu_flags
from .cpp.prebuilt import LEVELS

FOLDER = Path(__file__).with_name("tables")


def preferred_kernel(device: torch.device) -> str:
    """The attention backend that is tried first on this device. Raises as `kernels.forced`."""
    if uses_triton(torch.empty(0, device=device)):
        return "triton"
    return forced() or ("cpp" if device.type == "cpu" and cpp.is_available() else "gather")


def machine(device: torch.device) -> str:
    """Names the table of a device: a processor's instruction level (`"x86-64-v3"`), or a GPU's chip."""
    if device.type != "cpu":
        from .triton import configs

        return configs.chip(device)
    flags = cpu_flags() if platform.machine() == "x86_64" else set()
    levels = (level for level, (_, needed) in LEVELS.items() if flags.issuperset(needed.split()))
    return next(levels, platform.machine())


def key(kernel: str, stored: str) -> str:
    """Names an entry of a table; `stored`: the dtype of keys and values in blocks, such as `"int8"`."""
    return f"{kernel}/{stored}"


def find_costs(device: torch.device, dtype: torch.dtype, kv_dtype: str | None = None) -> tuple[dict[int, float], str]:
    """Nanoseconds per context token by block size, for the kernel that serves a model in `dtype` on this device; and
    the source of the times, or why there are none. Without times of a processor's level, those of the best level that
    has any."""
    kernel, stored = preferred_kernel(device), kv_dtype or str(dtype).removeprefix("torch.")
    own = machine(device) if device.type == "cpu" or kernel == "triton" else device.type
    for name in (own, *LEVELS) if device.type == "cpu" else (own,):
        times = _table(FOLDER / f"{name}.json").get(key(kernel, stored))
        if times:
            return times, f"times of {key(kernel, stored)} on {name}"
    return {}, f"no times of {key(kernel, stored)} were measured on {own} (`benchmarks.tune --block-sizes`)"


@functools.cache
def _table(path: Path) -> dict[str, dict[int, float]]:
    table = json.loads(path.read_text())["costs"] if path.exists() else {}
    return {name: {int(size): float(time) for size, time in times.items()} for name, times in table.items()}
