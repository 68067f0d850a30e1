"""What a process may lack: libraries, and folders that it may use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


@contextlib.contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """The folder is another user's."""
    is_root, mode = os.geteuid() == 0, path.stat().st_mode
    path.chmod(0o700 if is_root else 0)
    try:
        if is_root:
            try:
                os.seteuid(NOBODY)
            except OSError:
                pytest.skip("root cannot become another user here")
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(mode)


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
