"""Attention time per context token by block size, from tables per machine that `benchmarks.tune`
writes. `cache.block_sizes` chooses a size."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path

import torch

from . import preferred
from .cpp.compiler import cpu_flags
from .cpp.prebuilt import LEVELS, levels

FOLDER = Path(__file__).with_name("tables")


def machine(device: torch.device) -> str:
    """Returns the name of a device's table: a processor's instruction level (`"x86-64-v3"`), or a
    GPU's chip."""
    if device.type != "cpu":
        from .triton import configs

        return configs.chip(device)
    name = platform.machine()
    if name != "x86_64":
        return name
    return next(levels(cpu_flags()), name)


def key(kernel: str, stored: str) -> str:
    """Returns the name of a table's entry. `stored`: the dtype of keys and values in blocks, such
    as `"int8"`."""
    return f"{kernel}/{stored}"


def find_costs(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: str | None = None,
) -> tuple[dict[int, float], str]:
    """Returns nanoseconds per context token by block size, for the kernel that computes attention
    of a model in `dtype` on this device; and the source of the times, or why there are none. If a
    processor's level has no times, uses those of the best level that has."""
    kernel = preferred(torch.empty(0, device=device))
    stored = kv_dtype or str(dtype).removeprefix("torch.")
    entry = key(kernel, stored)
    is_cpu = device.type == "cpu"
    if is_cpu or kernel == "triton":
        name = machine(device)
    else:
        name = device.type
    names = (name, *LEVELS) if is_cpu else (name,)
    for table_name in names:
        path = FOLDER / f"{table_name}.json"
        times = _table(path).get(entry)
        if times:
            return times, f"times of {entry} on {table_name}"
    reason = f"no times of {entry} were measured on {name} (`benchmarks.tune --block-sizes`)"
    return {}, reason


@functools.cache
def _table(path: Path) -> dict[str, dict[int, float]]:
    if not path.exists():
        return {}
    table = json.loads(path.read_text())["costs"]
    return {
        name: {int(size): float(time) for size, time in times.items()}
        for name, times in table.items()
    }
