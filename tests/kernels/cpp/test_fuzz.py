"""Random calls through each entry point of the C++ library, and the same under a sanitizer."""

from __future__ import annotations

import pytest

from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.build import KERNEL_NAMES
from tests.support import kernel_fuzz, sanitize
from tests.support.tools import run_apart


@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
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
