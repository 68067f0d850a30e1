"""Folders that this process may not use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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
