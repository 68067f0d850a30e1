"""`hf_paged.ray` without Ray installed; `tests/ecosystem/test_ray.py` has the rest."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_paged import PagedEngine
from tests.support import models
from tests.support.missing import take_away


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "ray")
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    with pytest.raises(ImportError, match=r'needs Ray: pip install "hf_paged\[ray\]"'):
        importlib.import_module("hf_paged.ray")


def test_what_the_model_cannot_take_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 400 for a prompt that is longer than the model's table of positions."""
    responses: Any = ModuleType("starlette.responses")
    responses.Response = lambda content, status, media_type: (status, json.loads(content))
    responses.StreamingResponse = None
    for name, module in {"ray": ModuleType("ray"), "starlette.responses": responses}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    package = importlib.import_module("hf_paged.ray")
    server = package.LLMServer(lambda: PagedEngine(models.build("gpt2")))
    monkeypatch.delitem(sys.modules, "hf_paged.ray")

    async def status(prompt: list[int]) -> tuple[int, Any]:
        async def body() -> dict[str, Any]:
            return {"prompt": prompt, "generation_config": {"max_new_tokens": 2}}

        found: tuple[int, Any] = await server(SimpleNamespace(json=body))
        return found

    assert asyncio.run(status([5, 6, 7]))[0] == 200
    assert asyncio.run(status([models.VOCAB_SIZE]))[0] == 400
    code, answer = asyncio.run(status([5] * 300))
    assert code == 400 and "positions" in answer["error"]
