"""The error of `hf_paged.tools.metrics` without its package; tests/ecosystem tests its metrics."""

from __future__ import annotations

import importlib
import sys

import pytest

from ..support.missing import take_away


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "prometheus_client")
    monkeypatch.delitem(sys.modules, "hf_paged.tools.metrics", raising=False)
    with pytest.raises(ImportError, match=r"hf_paged\[serve\]"):
        importlib.import_module("hf_paged.tools.metrics")
