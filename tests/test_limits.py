"""Where the system allows no more threads, memory or files: the right tokens or an error, never a
hang or a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedEngine, PrefixTiers, threads
from hf_paged.attention.backends import cpp
from hf_paged.cache import idle
from tests.support import limits, models

GREEDY = limits.GREEDY
PROMPT = models.token_ids(1, 33)
NO_MORE = "can't start new thread: the process is at"


def lack(error: type[Exception]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("can't start new thread")

    return fail


NO_THREADS = {
    "refused": lack(RuntimeError),
    "no memory": lack(MemoryError),
    # as one that lacks memory before it tells that it has started
    "ended at once": lambda *_, **__: 0,
}


@contextlib.contextmanager
def without_threads(how: str) -> Iterator[pytest.MonkeyPatch]:
    """A process that gets no thread, until the patch is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "START_SECONDS", 0.05)
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                patch.setattr(threading, name, NO_THREADS[how])
        yield patch


@pytest.fixture(params=NO_THREADS)
def threadless(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    with without_threads(request.param) as patch:
        yield patch
    for thread in list(threading._limbo):  # type: ignore[attr-defined]
        if thread.name.startswith("hf_paged"):
            del threading._limbo[thread]  # type: ignore[attr-defined]  # it ended before it began, which threading waits for


@pytest.fixture
def plain() -> tuple[Any, list[int]]:
    """A model, and its tokens."""
    model = models.build("llama")
    return model, model.generate(PROMPT, **GREEDY)[0].tolist()


def test_a_thread_starts_or_not(threadless: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert threads.start(lambda: calls.append(1), "test") is None
    threadless.undo()
    thread = threads.start(lambda: calls.append(2), "test")
    assert thread is not None and thread.name == "test" and thread.daemon
    thread.join()
    assert calls == [2]


def test_generate_without_an_idle_release(threadless: pytest.MonkeyPatch, plain: Any) -> None:
    model, expected = plain
    paged = {"cache_implementation": "paged", "cache_config": {"idle_release_seconds": 0.05}}
    was_running = idle._is_running  # for pools of other tests
    assert model.generate(PROMPT, **GREEDY, **paged)[0].tolist() == expected
    assert was_running or not idle._is_running
    threadless.undo()
    assert model.generate(PROMPT, **GREEDY, **paged)[0].tolist() == expected
    assert idle._is_running


def test_tiers_write_once_there_are_threads(
    threadless: pytest.MonkeyPatch, plain: Any, tmp_path: Path
) -> None:
    model, expected = plain
    config = {"block_size": 8, "prefix_tiers": PrefixTiers(disk_path=tmp_path)}
    engine = PagedEngine(model, config)
    for is_threadless in (True, False):
        if not is_threadless:
            threadless.undo()
        (result,) = engine.generate(PROMPT.tolist(), GREEDY)
        assert result.error is None and result.prompt_ids + result.token_ids == expected
        store: Any = engine._core.loop.blocks.tier  # type: ignore[union-attr]
        engine.free()  # evicts all blocks
        store.wait()
        assert bool(store._unwritten) == is_threadless
        assert bool(store.counts().disk_bytes) != is_threadless


def test_parts_that_need_a_thread_do_without(threadless: pytest.MonkeyPatch) -> None:
    """An adapter is loaded by the step that needs it; the kernel for quantized blocks is left
    out."""
    from hf_paged.adapters.files import AdapterStore

    store: Any = AdapterStore(torch.nn.Linear(1, 1))
    file: Any = type("File", (), {"path": "a"})()
    store.prefetch([file])
    assert not store._prefetches
    threadless.setattr(cpp, "_agreements", {})
    assert not cpp._agrees_in_thread(torch.int8) and not cpp._agreements


def test_a_schema_is_refused(threadless: pytest.MonkeyPatch) -> None:
    serving = pytest.importorskip("hf_paged.tools.serving")
    before = serving._compile_slots._value
    with pytest.raises(ValueError, match="no thread"):
        serving._compile(lambda: None)
    assert serving._compile_slots._value == before


@pytest.fixture
def installed() -> Iterator[None]:
    hf_paged.install(continuous_batching=True)
    yield
    hf_paged.uninstall()
    hf_paged.install()


def test_a_manager_says_so(threadless: pytest.MonkeyPatch, plain: Any, installed: None) -> None:
    model, expected = plain
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        manager.start()
    assert not manager.is_running()
    threadless.undo()
    manager.start()
    name = manager.add_request(PROMPT[0].tolist())
    assert PROMPT[0].tolist() + manager.get_result(name, 60).generated_tokens == expected
    manager.stop()


def test_a_signal_while_a_manager_starts_leaves_a_thread_that_can_be_stopped(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def start(thread: threading.Thread) -> None:
        original(thread)
        signal.raise_signal(signal.SIGUSR1)

    original, before = threading.Thread.start, signal.signal(signal.SIGUSR1, interrupt)
    manager: Any = models.build("llama").init_continuous_batching(GenerationConfig(**GREEDY))  # type: ignore[operator]
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", start)
            manager.start()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert manager.is_running()
    manager.stop()
    for thread in threading.enumerate():
        if thread.name == "hf_paged-continuous-batching" and thread.ident is not None:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process, as Linux has them")
@pytest.mark.parametrize("limit", ["threads", "memory 0", "memory 8", "files 0", "files 2"])
def test_entry_points_at_a_limit(limit: str) -> None:
    seconds = limits.SECONDS * (len(limits.ENTRY_POINTS) + 1)
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which only its user may enter
        os.chmod(folder, 0o777)
        command = [sys.executable, "-m", "tests.support.limits", folder, limit]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{limit}, ")]
    outcomes = dict(line.split(": ", 1) for line in lines)
    assert not done.returncode, done.stdout + done.stderr
    assert len(outcomes) == len(limits.ENTRY_POINTS), done.stdout + done.stderr
    if limit == "threads":
        batch = outcomes.pop("threads, generate_batch")
        assert batch.startswith("raised RuntimeError: can't start new thread")
        assert set(outcomes.values()) == {"tokens"}


@pytest.mark.parametrize("how", ["refused", "no memory"])
def test_a_function_that_could_not_be_submitted_is_never_called(how: str) -> None:
    calls: list[int] = []

    async def fail() -> None:
        executor = ThreadPoolExecutor(2)
        asyncio.get_running_loop().set_default_executor(executor)
        is_over = threading.Event()
        busy = threads.submit(is_over.wait, 60)  # its thread would later take a queued function
        with without_threads(how), pytest.raises(RuntimeError, match=NO_MORE):
            threads.submit(calls.append, 1)
        is_over.set()
        await busy
        executor.shutdown()

    asyncio.run(fail())
    assert not calls


@pytest.mark.parametrize("how", ["refused", "no memory"])
def test_an_async_stream_says_so(how: str) -> None:
    async def read() -> list[Any]:
        return [output async for output in engine.astream([[5, 6, 7]], GREEDY)]

    async def fail(num_read: int) -> None:
        stream = engine.astream([[5, 6, 7]], GREEDY)
        if num_read:
            await anext(stream)
        with without_threads(how):
            if num_read:  # the thread that runs this far serves the rest
                asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            with pytest.raises(RuntimeError, match=NO_MORE):
                async for _ in stream:
                    pass
        assert not engine.has_unfinished

    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        for num_read in (0, 1):
            asyncio.run(fail(num_read))
            assert asyncio.run(read())[-1].result.error is None
        engine.check_integrity()
