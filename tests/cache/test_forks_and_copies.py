"""Effects of a running call on another process or on a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
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


def attention_of(model: PreTrainedModel) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


# ----------------------------------------------------------------------------------------- copies


class Copies(LogitsProcessor):
    """Copies the model in the middle of a call."""

    def __init__(self, model: PreTrainedModel, how: Callable[[Any], Any]) -> None:
        self.model, self.how, self.copies = model, how, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.copies) < 2:
            self.copies.append(self.how(self.model))
        return scores


HOW: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_copy_of_the_model_during_a_call_has_its_own_attention(name: str, how: str) -> None:
    model, inputs = models.build(name), models.padded_prompt(name)
    before, expected = attention_of(model), model.generate(**inputs, **OPTIONS)
    assert before == {"sdpa"}
    processor = Copies(model, HOW[how])
    model.generate(**inputs, **OPTIONS, **models.PAGED, logits_processor=[processor])
    assert len(processor.copies) == 2
    for twin in (*processor.copies, copy.copy(processor.copies[0])):
        assert attention_of(twin) == before
        assert torch.equal(twin.generate(**inputs, **OPTIONS), expected)
        assert torch.equal(twin.generate(**inputs, **OPTIONS, **models.PAGED), expected)
        assert attention_of(twin) == before
    assert attention_of(model) == before


def test_configs_copied_during_a_call_name_the_models_attention() -> None:
    model = models.build("llama")
    processor = Copies(model, lambda model: type(model)(copy.deepcopy(model.config)))
    model.generate(
        **models.prompt("llama"), **OPTIONS, **models.PAGED, logits_processor=[processor]
    )
    found = [twin.config._attn_implementation for twin in processor.copies]
    assert found == ["sdpa"] * 2


# ------------------------------------------------------------------------------------------ forks

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


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


@contextlib.contextmanager
def another_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs `work` concurrently; its result is available afterwards."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    try:
        yield results
    finally:
        thread.join()


def forked_in(call: Callable[[], Any], pause: Pauses, work: Callable[[], None]) -> Any:
    """Runs `work` in a child that is forked while another thread's call is in the middle; returns
    the call's result."""
    with another_thread(call) as got:
        assert pause.is_there.wait(60)
        try:
            in_child(work)
        finally:
            pause.may_go_on.set()
    return got[0]


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
def test_a_child_of_a_thread_in_a_call_goes_on_with_it() -> None:
    """The forking thread keeps its locks, and its call the switched attention: in the child the
    call ends as usual."""
    model, inputs = models.build("llama"), models.prompt("llama")
    expected, told = model.generate(**inputs, **OPTIONS), []

    class Forks(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not told:
                told.append("parent")
                in_child(self.check)
            return scores

        def check(self) -> None:
            with PagedEngine(model, CONFIG) as engine:
                results = engine.generate(inputs["input_ids"], OPTIONS)
            assert [r.prompt_ids + r.token_ids for r in results] == expected.tolist()
            assert attention_of(model) == {"hf_paged"}, "this thread's call has not ended"

    actual = model.generate(**inputs, **OPTIONS, **models.PAGED, logits_processor=[Forks()])
    assert told
    assert torch.equal(actual, expected)


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
