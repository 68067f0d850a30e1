"""Facts of the machine and the software that a benchmark's figures belong to."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers


def devices() -> list[str]:
    """The devices that this machine has, for `--device`."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def facts(device: str = "cpu") -> dict[str, str | int | float]:
    """What a reader needs in order to compare two tables; RAM in GiB, the date in UTC."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    found: dict[str, str | int | float] = {
        "cpu": cpu,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "ram_gib": _ram_gib(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "revision": _revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda or "unknown"
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _ram_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return 0.0


def _revision() -> str:
    """The commit, with `+` if the work tree differs from it."""
    root = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10
        )
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
