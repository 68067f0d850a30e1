"""The benchmark of contiguous rows runs on tiny models."""

from __future__ import annotations

import os

import pytest

from benchmarks import virtual


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")
def test_every_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    virtual.main(["--quick"])
    out = capsys.readouterr().out
    assert all(f"| decode step of {name}, 2x64 | virtual |" in out for name in virtual.TARGETS)
