"""The C++ kernels at every register width, whatever this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged.kernels import cpp

_RUN = """
import sys, pytest
from hf_paged.kernels.cpp import build
build.COMMON_FLAGS += (f"-DLANES={sys.argv[1]}",)
chosen = ["-m", "not slow and not gpu", "tests/attention/test_backends.py"]
chosen += ["tests/attention/test_quantized.py", "tests/kernels/test_quantized.py"]
chosen += ["tests/kernels/test_linear.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *chosen]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_other_widths(lanes: int, tmp_path: Path) -> None:
    environment = os.environ | {"HF_PAGED_CACHE_DIR": str(tmp_path / "kernels")}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(lanes)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list((tmp_path / "kernels").glob("cpp-*.so"))) == 1
