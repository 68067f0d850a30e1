"""`hf_paged.ray` without Ray installed; `tests/ecosystem/test_ray.py` has the rest."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.missing import take_away


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "ray")
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    with pytest.raises(ImportError, match=r'needs Ray: pip install "hf_paged\[ray\]"'):
        importlib.import_module("hf_paged.ray")
