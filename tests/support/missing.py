"""Simulates an environment in which a library is not installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest


class _Missing:
    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, *args: Any) -> None:
        if name.partition(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Makes `library` impossible to import until the end of the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(library), *sys.meta_path])
