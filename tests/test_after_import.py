"""Actions that follow the import of a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged.after_import import after_import, forget_import

NAMES = ("paged_early", "paged_late", "paged_never")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("value = []\n")
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def test_actions_after_an_import_of_a_module_that_is_reloaded() -> None:
    module = importlib.import_module("paged_early")
    before = sys.meta_path.copy()
    after_import("paged_early", note := lambda module: module.value.append(1))
    importlib.reload(module)
    assert module.value == [1]
    forget_import("paged_early", note)
    assert sys.meta_path == before
    assert importlib.reload(module).value == []


def test_actions_after_an_import() -> None:
    """They run once, with the whole module; forgotten ones do not."""
    values: list[Any] = []

    def note(module: Any) -> None:
        values.append(module.value)

    before = sys.meta_path.copy()
    for _ in range(2):
        after_import("paged_late", note)
    assert not values and "paged_late" not in sys.modules
    importlib.util.find_spec("paged_late")  # does not import it
    importlib.import_module("paged_late")
    assert values == [[]]
    after_import("paged_late", note)
    assert values == [[], []]
    forget_import("paged_late", note)
    assert sys.meta_path == before
    after_import("paged_never", note)
    forget_import("paged_never", note)
    importlib.import_module("paged_never")
    assert values == [[], []]
