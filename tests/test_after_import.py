"""Actions that follow the import of a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_paged.after_import import after_import, forget_import


def test_actions_after_an_import_of_a_module_that_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "paged_early.py").write_text("value = []\n")
    module = importlib.import_module("paged_early")
    before = sys.meta_path.copy()
    try:
        after_import("paged_early", note := lambda module: module.value.append(1))
        importlib.reload(module)
        assert module.value == [1]
        forget_import("paged_early", note)
        assert sys.meta_path == before
        assert importlib.reload(module).value == []
    finally:
        del sys.modules["paged_early"]


def test_actions_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run once, with the whole module; forgotten ones do not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "paged_late.py").write_text("value = 1\n")
    (tmp_path / "paged_never.py").write_text("")
    values: list[int] = []

    def note(module: Any) -> None:
        values.append(module.value)

    before = sys.meta_path.copy()
    try:
        for _ in range(2):
            after_import("paged_late", note)
        assert not values and "paged_late" not in sys.modules
        importlib.util.find_spec("paged_late")  # does not import it
        importlib.import_module("paged_late")
        assert values == [1]
        after_import("paged_late", note)
        assert values == [1, 1]
        forget_import("paged_late", note)
        assert sys.meta_path == before
        after_import("paged_never", note)
        forget_import("paged_never", note)
        importlib.import_module("paged_never")
        assert values == [1, 1]
    finally:
        for name in ("paged_late", "paged_never"):
            sys.modules.pop(name, None)
