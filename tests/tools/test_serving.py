"""How requests of `transformers serve` begin, without a server."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import threading
import weakref
from contextvars import ContextVar
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hf_paged.tools import serving
from tests.support import models
from tests.support.missing import take_away

name: ContextVar[str] = ContextVar("name")


def test_a_coroutine_begins_in_a_thread_and_ends_in_the_event_loop() -> None:
    """Also one that never waits, raises, or is cancelled."""
    steps: list[Any] = []

    async def answer(*errors: Exception | None) -> str:
        """What the app does: work, a wait, more work."""
        for error in errors:
            steps.append((threading.current_thread(), name.get()))
            if error is not None:
                raise error
            await asyncio.sleep(0)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "text")
        return str(await future)

    async def at_once() -> int:
        return 7

    async def never() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            steps.append("cancelled")

    async def serve() -> None:
        name.set("mine")
        assert await (await serving._begin_in_thread(answer(None, None))) == "text"
        (first, own), (second, same) = steps
        assert first is not second and second is threading.current_thread()
        assert own == same == "mine"
        for errors in ((OSError("told"),), (None, OSError("told"))):
            with pytest.raises(OSError, match="told"):
                await (await serving._begin_in_thread(answer(*errors)))
        assert await (await serving._begin_in_thread(at_once())) == 7
        task = asyncio.ensure_future(await serving._begin_in_thread(never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps[-1] == "cancelled"

    asyncio.run(serve())


def test_a_preloaded_model_that_is_unloaded_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one with a reference cycle, as hooks of accelerate make: the server has frozen it."""
    models = [torch.nn.Linear(2, 2)]
    models[0].forward = models[0].forward  # type: ignore[method-assign]
    model = weakref.ref(models[0])
    manager = MagicMock()
    manager.shutdown = lambda: (models.clear(), gc.collect())
    monkeypatch.setitem(sys.modules, "fastapi", MagicMock())
    monkeypatch.setattr(serving, "_build_server", MagicMock())
    try:
        serving.build_server(manager, MagicMock(), generation_state=MagicMock())
        assert gc.get_freeze_count()
        manager.shutdown()
    finally:
        gc.unfreeze()
    assert model() is None


def test_a_manager_whose_thread_does_not_start_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later requests would wait in its queue for ever."""

    def fail(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    model = models.get("llama")
    manager = serving.EngineGenerateManager()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(serving.ServedManager, "start", fail)
        manager.init_cb(model, model.generation_config)
    assert manager.manager is None
    manager.init_cb(model, model.generation_config)
    assert manager.manager is not None and manager.manager.is_running()
    manager.manager.stop(block=True)


def test_metrics_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "prometheus_client")
    monkeypatch.delitem(sys.modules, "hf_paged.tools.metrics", raising=False)
    with pytest.raises(ImportError, match=r"hf_paged\[serve\]"):
        importlib.import_module("hf_paged.tools.metrics")
