"""Idle pools release their memory to the system and are allocated again by the next call."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

import hf_paged
from hf_paged.cache import idle
from hf_paged.cache.memory import PagedMemory
from hf_paged.config import PagedConfig
from hf_paged.model import registry
from tests.support import models
from tests.support.models import BLOCK_SIZE, build

PROMPT = torch.arange(4, 44)[None]
PLAIN: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def _paged(seconds: float | None, **config: Any) -> dict[str, Any]:
    cache_config = {"block_size": BLOCK_SIZE, "idle_release_seconds": seconds, **config}
    return {**PLAIN, "cache_implementation": "paged", "cache_config": cache_config}


def _wait_for(condition: Callable[[], bool]) -> None:
    """Fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _memory(model: Any) -> PagedMemory:
    return registry._memories[model][1]


def _held(model: Any) -> int:
    return hf_paged.memory_stats(model).held_bytes


@pytest.mark.slow
def test_memory_returns_to_the_system() -> None:
    model, process = build("llama", num_hidden_layers=4, head_dim=1024), psutil.Process()
    prompts = models.token_ids(4, 900)
    first = model.generate(prompts, **_paged(None, block_size=16))
    gc.collect()
    held, before = _held(model), process.memory_info().rss
    assert held > 200 << 20
    second = model.generate(prompts, **_paged(0, block_size=16))
    fallen = before - process.memory_info().rss
    assert _held(model) == 0 and fallen > 0.9 * held, f"{fallen:,} of {held:,}"
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, "blocks") for name in ("llama", "mistral", "qwen3_next")), ("llama", "virtual")],
)
def test_same_tokens_after_each_release(name: str, storage: str) -> None:
    model = models.get(name)
    expected = model.generate(PROMPT, **PLAIN)
    hf_paged.free(model)
    for _ in range(3):
        found = model.generate(PROMPT, **_paged(0, storage=storage))
        assert torch.equal(found, expected)
        stats = hf_paged.memory_stats(model)
        assert stats.held_bytes == stats.cached_blocks == 0 < stats.peak_bytes
        hf_paged.check_integrity(model)
    hf_paged.free(model)


def _make_due(memory: PagedMemory) -> None:
    with idle._lock:
        assert memory in idle._deadlines
        idle._deadlines[memory] = 0.0
        idle._condition.notify_all()


@pytest.mark.slow
def test_a_pool_is_released_when_it_is_due_and_not_before() -> None:
    """Calls, and a cache that a caller holds, keep it."""
    model = build("llama")
    expected = model.generate(PROMPT, **{**PLAIN, "max_new_tokens": 12})
    first = model.generate(PROMPT, **_paged(3600), return_dict_in_generate=True)
    memory = _memory(model)
    _make_due(memory)
    _wait_for(lambda: idle._deadlines.get(memory, 0.0) > 0.0)  # it tries again later
    assert _held(model) > 0
    options = {"past_key_values": first.past_key_values, **PLAIN}
    assert torch.equal(model.generate(first.sequences, **options), expected)
    del first, options

    def keeps(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert memory not in idle._deadlines
        return scores

    model.generate(PROMPT, **_paged(3600), logits_processor=[keeps])
    assert _held(model) > 0
    _make_due(memory)
    _wait_for(lambda: not _held(model))
    found = model.generate(PROMPT, **_paged(None))
    assert torch.equal(found, expected[:, : found.shape[1]])
    assert _memory(model) is memory, "another setting makes no other pool"
    assert memory not in idle._deadlines


@pytest.mark.slow
def test_the_thread_ends_and_keeps_no_pool_alive() -> None:
    model = build("llama")
    model.generate(PROMPT, **_paged(3600))
    (thread,) = (each for each in threading.enumerate() if each.name == "hf_paged idle pools")
    ref = weakref.ref(_memory(model))
    assert thread.daemon
    del model
    gc.collect()
    assert ref() is None
    if not idle._deadlines:  # other tests' deadlines are later
        with idle._lock:
            idle._condition.notify_all()
        _wait_for(lambda: not thread.is_alive())


def test_engine_is_idle_without_unfinished_requests() -> None:
    prompt = PROMPT[0].tolist()
    config = {"block_size": BLOCK_SIZE, "idle_release_seconds": 0}
    with hf_paged.PagedEngine(models.get("llama"), config) as engine:
        expected = engine.generate([prompt], PLAIN)[0].token_ids
        assert engine.stats().cached_blocks == _held(engine) == 0
        assert engine.route is not None
        engine.add_request(prompt, PLAIN, request_id="a")
        engine.add_request(prompt, {**PLAIN, "max_new_tokens": 2}, request_id="b")
        found: dict[str, list[int]] = {}
        while engine.has_unfinished:
            results = [output.result for output in engine.step() if output.result is not None]
            found |= {result.request_id: result.token_ids for result in results}
            assert (_held(engine) > 0) == ("a" not in found)
        assert found == {"a": expected, "b": expected[:2]}
        engine.check_integrity()


@pytest.mark.parametrize("seconds", [None, 0.0, 60.0])
def test_the_end_of_a_call_is_the_last_use_of_its_pool(seconds: float | None) -> None:
    """`hf_paged.budget` frees the least recently used idle pools first."""
    config = PagedConfig(idle_release_seconds=seconds)
    long_use, short_use = PagedMemory(config), PagedMemory(config)
    for memory in (long_use, short_use):
        idle.begin_use(memory)
    for memory in (short_use, long_use):
        time.sleep(0.02)  # longer than a tick of the clock
        idle.end_use(memory)
    assert long_use.last_used > short_use.last_used


_SCRIPT = """
import os, sys, time, torch, hf_paged
from hf_paged.cache import idle
from tests.support.models import build
torch.set_num_threads(1)  # OpenMP does not survive a fork
model = build("llama")
ids = torch.arange(4, 40)[None]
def call(seconds):
    return model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="paged",
                          cache_config={"idle_release_seconds": seconds})
expected = call(0.3)
engine = hf_paged.PagedEngine(model, {"idle_release_seconds": 0.3})
engine.generate([ids[0]], {"max_new_tokens": 4})
if hasattr(os, "fork"):
    child = os.fork()
    if not child:
        try:
            assert not idle._is_running
            assert torch.equal(call(0.1), expected)
            engine.generate([ids[0]], {"max_new_tokens": 4})
            while hf_paged.memory_stats(model).held_bytes or engine.memory.stats().held_bytes:
                time.sleep(0.01)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
call(3600)
print("over")
"""


@pytest.mark.slow
def test_forks_and_the_end_of_the_interpreter() -> None:
    """The thread keeps no process alive until a pool is due."""
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "over\n", done.stderr
