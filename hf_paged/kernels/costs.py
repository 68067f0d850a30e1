"""Measured attention time per context token by block size, in one table per kind of machine, which
`benchmarks.tune --block-sizes` writes. `cache.block_sizes` chooses a size."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path

import torch

from . import preferred_backend
from .cpp.compiler import cpu_flags
from .cpp.prebuilt import LEVELS, supported_levels

FOLDER = Path(__file__).with_name("tables")


def machine_name(device: torch.device) -> str:
    """Returns the name of the table for `device`: the processor's instruction level
    (`"x86-64-v3"`) or architecture (`"aarch64"`), or the GPU's chip (`"sm90"`)."""
    if device.type != "cpu":
        from .triton import configs

        return configs.chip_name(device)
    architecture = platform.machine()
    if architecture != "x86_64":
        return architecture
    return next(supported_levels(cpu_flags()), architecture)


def entry_name(backend: str, kv_dtype: str) -> str:
    """Returns the name of a table's entry for an attention backend and the dtype of keys and values
    in blocks, such as `"int8"` or `"float32"`."""
    return f"{backend}/{kv_dtype}"


def find_costs(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: str | None = None,
) -> tuple[dict[int, float], str]:
    """Returns measured attention times in nanoseconds per context token, by block size in tokens,
    and a phrase for messages that says where they were measured. The backend is the one that
    `kernels.preferred_backend` returns for `device`. `dtype`: the model's; `kv_dtype`: as in
    `PagedConfig`. If this kind of CPU was not measured, returns the times of the highest x86-64
    level that was. If there are no times, returns an empty `dict` and the reason. Raises the errors
    of `kernels.preferred_backend`."""
    backend = preferred_backend(torch.empty(0, device=device))
    entry = entry_name(backend, kv_dtype or str(dtype).removeprefix("torch."))
    is_cpu = device.type == "cpu"
    if is_cpu or backend == "triton":
        machine = machine_name(device)
    else:
        machine = device.type
    machines = (machine, *LEVELS) if is_cpu else (machine,)
    for measured_machine in machines:
        times = _load_table(FOLDER / f"{measured_machine}.json").get(entry)
        if times:
            return times, f"times of {entry} on {measured_machine}"
    reason = f"no times of {entry} were measured on {machine} (`benchmarks.tune --block-sizes`)"
    return {}, reason


@functools.cache
def _load_table(path: Path) -> dict[str, dict[int, float]]:
    if not path.exists():
        return {}
    table = json.loads(path.read_text())["costs"]
    return {
        entry: {int(block_size): float(time) for block_size, time in times.items()}
        for entry, times in table.items()
    }
