"""Kernels access no memory out of bounds: their small tests under NVIDIA's compute-sanitizer, on a
GPU."""

from __future__ import annotations

import glob
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

pytestmark = pytest.mark.gpu

NAMES = ("store", "decode", "prefill", "cascade", "hash", "copy", "lora")
FILES = [Path(__file__).with_name(f"test_{name}.py") for name in NAMES]


def find_sanitizer() -> str | None:
    """Finds it in the path, the CUDA toolkit, or the wheel `nvidia-cuda-sanitizer-api`."""
    places = [shutil.which("compute-sanitizer") or "", f"{CUDA_HOME}/bin/compute-sanitizer"]
    for folder in site.getsitepackages():
        places += glob.glob(f"{folder}/nvidia/**/compute-sanitizer", recursive=True)
    able = (place for place in places if os.access(place, os.X_OK) and os.path.isfile(place))
    return next(able, None)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_memcheck(path: Path) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # one allocation per tensor, so that the memory after it is unallocated
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("TRITON_INTERPRET", None)
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    tool = [sanitizer, "--tool", "memcheck", "--error-exitcode", "99", "--target-processes", "all"]
    options = dict(env=environment, capture_output=True, text=True, timeout=600)
    run = subprocess.run([*tool, *tests], **options)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
