"""Effects of a running call on another process or on a copy of the model."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.engine_helpers import run_all
from tests.test_forks import holds_in_child

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
CONFIG = PagedConfig(block_size=8)

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def attention_of(model: PreTrainedModel) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


def rebuilt(model: Any) -> Any:
    """A model of a copy of the config."""
    twin = type(model)(copy.deepcopy(model.config)).eval()
    twin.load_state_dict(model.state_dict())
    twin.generation_config = model.generation_config
    return twin


HOW: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "config": rebuilt,
}


@pytest.mark.slow_cases(but=["llama-config"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_copy_of_the_model_during_a_call_has_its_own_attention(name: str, how: str) -> None:
    model, inputs, copies = models.build(name), models.padded_prompt(name), list[Any]()
    before, expected = attention_of(model), model.generate(**inputs, **OPTIONS)
    assert before == {"sdpa"}

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(copies) < 2:
            copies.append(HOW[how](model))
        return scores

    model.generate(**inputs, **OPTIONS, **models.PAGED, logits_processor=[process])
    assert len(copies) == 2
    for twin in (*copies, copy.copy(copies[0])):
        assert attention_of(twin) == before
        assert torch.equal(twin.generate(**inputs, **OPTIONS), expected)
        assert torch.equal(twin.generate(**inputs, **OPTIONS, **models.PAGED), expected)
        assert attention_of(twin) == before
    assert attention_of(model) == before


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child, which ends if it hangs."""

    def claim() -> bool:
        signal.alarm(60)
        work()
        return True

    assert holds_in_child(claim)


class Pauses(LogitsProcessor):
    """Signals that a call is in the middle of a step, and waits there."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.is_there.set()
        assert self.may_go_on.wait(120)
        return args[-1]


def forked_in(call: Callable[[], Any], pause: Pauses, work: Callable[[], None]) -> Any:
    """Runs `work` in a child that is forked while another thread's call is in the middle; returns
    the call's result."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call)
        assert pause.is_there.wait(60)
        try:
            in_child(work)
        finally:
            pause.may_go_on.set()
        return result.result()


@pytest.mark.slow_cases("t5")
@needs_fork
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_child_generates_while_a_thread_of_its_parent_does(name: str) -> None:
    model, inputs = models.build(name), models.padded_prompt(name)
    before, expected = attention_of(model), model.generate(**inputs, **OPTIONS)
    model.generate(**inputs, **OPTIONS, **models.PAGED)

    def work() -> None:
        assert attention_of(model) == before, attention_of(model)
        assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected)
            hf_paged.check_integrity(model)
            assert hf_paged.memory_stats(model).used_blocks == 0
        assert attention_of(model) == before

    pause = Pauses()
    call = functools.partial(model.generate, **inputs, **OPTIONS, **models.PAGED)
    found = forked_in(lambda: call(logits_processor=[pause]), pause, work)
    assert torch.equal(found, expected), "the parent's own call"


@needs_fork
def test_an_engine_in_a_child_is_empty_if_a_thread_was_taking_a_step() -> None:
    model, pause = models.build("llama"), Pauses()
    engine = PagedEngine(model, CONFIG)
    expected = engine.generate([[5, 6, 7]], OPTIONS)[0].token_ids

    def work() -> None:
        assert not engine.has_unfinished and engine.step() == []
        engine.check_integrity()
        assert engine.stats().used_blocks == 0
        assert engine.generate([[5, 6, 7]], OPTIONS)[0].token_ids == expected
        assert attention_of(model) == {"sdpa"}

    call = functools.partial(engine.generate, [[5, 6, 7]], OPTIONS, logits_processor=[pause])
    assert forked_in(call, pause, work)[0].token_ids == expected


@needs_fork
def test_idle_engines_go_on_in_a_child() -> None:
    model = models.build("llama")
    engine = PagedEngine(model, CONFIG)
    expected = engine.generate([[5, 6, 7]], OPTIONS)[0].token_ids
    engine.add_request([5, 6, 7], OPTIONS, request_id="a")
    engine.step()

    def finish() -> None:
        assert run_all(engine)["a"].token_ids == expected

    in_child(finish)
    finish()
