"""Facts about the machine and the software that produced a benchmark's figures."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from benchmarks.report import CLEAN

BF16_FLAGS = ("amx_bf16", "avx512_bf16")


def devices() -> list[str]:
    """The devices of this machine, for `--device`."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def facts(device: str = "cpu") -> dict[str, str | int | float]:
    """Facts needed to compare two tables; RAM in GiB, the date in UTC."""
    found: dict[str, str | int | float] = {
        "cpu": told("model name") or platform.processor() or platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "bf16": bf16_instructions() or "no instructions",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "revision": revision(),
        "tree": tree(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda or "unknown"
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = (output_of(*query) or "unknown").split("\n")[0]
    return found


def bf16_instructions() -> str:
    """The processor's extensions that compute in bfloat16; empty if it has none: PyTorch's products
    then take tens of times as long as in float32."""
    return ", ".join(flag for flag in BF16_FLAGS if flag in told("flags").split())


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def told(key: str) -> str:
    """What /proc/cpuinfo tells of the first processor; empty if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    values = [line.split(":", 1)[1].strip() for line in lines if line.startswith(key)]
    return values[0] if values else ""


def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


def git(*arguments: str) -> str | None:
    """Output of a git command in this checkout; `None` without git or outside of a checkout."""
    return output_of("git", *arguments)


def output_of(*command: str) -> str | None:
    """What a command prints; `None` if it fails or does not exist."""
    # a copy without git may lie in another project's checkout
    own = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout().parent)}
    options = dict(cwd=checkout(), env=own, capture_output=True, text=True)
    try:
        found = subprocess.run(command, **options, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def revision() -> str:
    """The commit, with `+` if the work tree differs from it."""
    if told := os.environ.get("HF_PAGED_REVISION"):  # of a copy without git
        return told
    head = git("rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head if tree() == CLEAN else f"{head}+"


def tree() -> str:
    """`CLEAN`, or the files that differ from the commit, except results, which a run writes
    itself."""
    changed = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    if changed is None:
        return "unknown"
    names = [line.split(maxsplit=1)[-1] for line in changed.splitlines()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"changed: {', '.join(names[:3])}{more}" if names else CLEAN
