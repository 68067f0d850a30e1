"""The benchmark of contiguous rows runs on tiny models."""

from __future__ import annotations

import os

import pytest

from benchmarks import virtual

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


def test_pages_of_beams_and_samples_are_counted() -> None:
    for rows, limit in ((8, 0.25), (16, 0.20)):
        share, after = virtual.pages_of(rows, 32)
        assert 0 < share <= limit and after == 0


@pytest.mark.slow
def test_every_part_runs(capsys: pytest.CaptureFixture[str]) -> None:
    virtual.main(["--quick", "--only", "decode step of gpt_neo|mechanisms|decode 8x512, qwen"])
    out = capsys.readouterr().out
    assert "decode step of gpt_neo" in out and "7 blocks ahead" in out
