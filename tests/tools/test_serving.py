"""How requests of `transformers serve` begin, without a server."""

from __future__ import annotations

import asyncio
import gc
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

name: ContextVar[str] = ContextVar("name")


async def answer(steps: list[Any], error: Exception | None = None) -> str:
    """What the app does: work, a wait, more work."""
    steps.append((threading.current_thread(), name.get()))
    future = asyncio.get_running_loop().create_future()
    if error is not None:
        raise error
    await asyncio.sleep(0)
    steps.append((threading.current_thread(), name.get()))
    asyncio.get_running_loop().call_soon(future.set_result, "text")
    return str(await future)


def test_a_coroutine_begins_in_a_thread_and_ends_in_the_event_loop() -> None:
    steps: list[Any] = []

    async def serve() -> str:
        name.set("mine")
        return str(await (await serving._begin_in_thread(answer(steps))))

    assert asyncio.run(serve()) == "text"
    (first, own), (second, same) = steps
    assert first is not second and second is threading.current_thread() and own == same == "mine"


def test_errors_pass_on_from_both_parts() -> None:
    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    async def serve(coroutine: Any) -> Any:
        return await (await serving._begin_in_thread(coroutine))

    name.set("mine")
    with pytest.raises(OSError, match="at once"):
        asyncio.run(serve(answer([], OSError("at once"))))
    with pytest.raises(KeyError, match="later"):
        asyncio.run(serve(failing()))


def test_a_coroutine_that_never_waits_and_one_that_is_cancelled() -> None:
    ended: list[str] = []

    async def at_once() -> int:
        return 7

    async def never() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")

    async def serve() -> None:
        assert await (await serving._begin_in_thread(at_once())) == 7
        task = asyncio.ensure_future(await serving._begin_in_thread(never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(serve())
    assert ended == ["cancelled"]


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
    model = models.get("llama")
    manager = serving.EngineGenerateManager()
    monkeypatch.setattr(serving.ServedManager, "start", failing_start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        manager.init_cb(model, model.generation_config)
    assert manager.manager is None
    monkeypatch.undo()
    manager.init_cb(model, model.generation_config)
    assert manager.manager is not None and manager.manager.is_running()
    manager.manager.stop(block=True)


def failing_start(self: Any) -> None:
    raise RuntimeError("can't start new thread")
