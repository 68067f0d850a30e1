"""Fixtures of tests of recorded steps."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.kernels import cpp


@pytest.fixture
def needs_compiler() -> None:
    if not cpp.is_available():
        pytest.skip("no C++ compiler: nothing is recorded, and nothing reads lengths from tensors")


@pytest.fixture
def graphs(needs_compiler: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`FakeGraphs` stand for a device's graphs."""
    from tests.support.graph_helpers import use_fake_graphs  # needs the room

    return use_fake_graphs(monkeypatch)
