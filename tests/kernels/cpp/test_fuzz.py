"""Random calls through each entry point of the C++ library, the same under a sanitizer, and the
tests of its kernels at every register width."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.build import KERNEL_NAMES
from tests.support import kernel_fuzz, sanitize
from tests.support.tools import run_apart

built = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")


@built
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_random_calls_give_what_pytorch_gives(name: str) -> None:
    assert kernel_fuzz.run(20, 0, [name]) == []


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        kernel_fuzz.ENTRIES, "hash", lambda draws: kernel_fuzz.refuses(lambda: None)
    )
    (wrong,) = kernel_fuzz.run(1, 3, ["hash"])
    assert wrong.startswith("hash 3 0: ") and "was served" in wrong


@pytest.mark.slow
@pytest.mark.skipif(
    sanitize.obstacle("address") is not None, reason=str(sanitize.obstacle("address"))
)
def test_address_sanitizer_reports_nothing() -> None:
    """`sanitize` fails unless a known error is reported first."""
    done = run_apart(".sanitize", "address", "--calls", 100, "--no-tests", timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "1,100 calls, 0 reports, 0 failed" in done.stdout


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
@built
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_other_widths(lanes: int, tmp_path: Path) -> None:
    environment = os.environ | {"HF_PAGED_CACHE_DIR": str(tmp_path / "kernels")}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [sys.executable, "-c", _RUN, str(lanes)]
    output = dict(capture_output=True, text=True, timeout=600)
    done = subprocess.run(command, env=environment, **output)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list((tmp_path / "kernels").glob("cpp-*.so"))) == 1
