"""Effects of a running call on another process or on a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.model import state
from tests.support import models

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


@pytest.mark.slow
def test_a_copy_during_an_engines_step_has_its_own_attention() -> None:
    model = models.build("llama")
    processor, prompt = Copies(model, copy.deepcopy), [5, 6, 7]
    with PagedEngine(model, CONFIG) as engine:
        (result,) = engine.generate([prompt], OPTIONS, logits_processor=[processor])
    assert len(processor.copies) == 2
    for twin in processor.copies:
        assert attention_of(twin) == {"sdpa"}
        with PagedEngine(twin, CONFIG) as engine:
            assert engine.generate([prompt], OPTIONS)[0].token_ids == result.token_ids


def test_configs_copied_during_a_call_name_the_models_attention() -> None:
    model, inputs, found = models.build("llama"), models.prompt("llama"), []

    class Looks(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            found.append(copy.deepcopy(model.config)._attn_implementation)
            found.append(type(model)(copy.deepcopy(model.config)).config._attn_implementation)
            return scores

    model.generate(
        **inputs, **{**OPTIONS, "max_new_tokens": 2}, **models.PAGED, logits_processor=[Looks()]
    )
    assert found == ["sdpa"] * 4


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_copy_of_the_cache_that_a_call_returned_goes_on_like_it(name: str, how: str) -> None:
    model, inputs = models.build(name), models.prompt(name)
    returned = model.generate(**inputs, **OPTIONS, **models.PAGED, return_dict_in_generate=True)
    assert hf_paged.last_route(model).road == "engine"
    twin, ids = HOW[how](returned.past_key_values), returned.sequences
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    for cache in (twin, returned.past_key_values):
        assert torch.equal(
            model.generate(ids, attention_mask=mask, **OPTIONS, past_key_values=cache), expected
        )
    hf_paged.check_integrity(model)


# ------------------------------------------------------------------------------------------ forks

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def in_child(work: Callable[[], None], seconds: float = 60.0) -> str:
    """The exception of `work` in a forked child; "hangs" if it did not end in time."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                work()
                told = "fine"
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(write, told.encode())
        finally:
            os._exit(0)
    os.close(write)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


class Pauses(LogitsProcessor):
    """Signals that a call is in the middle of a step, and waits there."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.is_there.set()
        assert self.may_go_on.wait(120)
        return scores


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
    with another_thread(
        lambda: model.generate(**inputs, **OPTIONS, **models.PAGED, logits_processor=[pause])
    ) as got:
        assert pause.is_there.wait(60)
        try:
            told = in_child(work)
        finally:
            pause.may_go_on.set()
    assert told == "fine"
    assert torch.equal(got[0], expected), "the parent's own call"


@pytest.mark.slow
@needs_fork
def test_a_child_finds_locks_free_that_threads_of_its_parent_held() -> None:
    """Forks at many moments of continuous calls."""
    model, inputs = models.build("llama", num_hidden_layers=1), models.prompt("llama", 2, 9)
    options = {**OPTIONS, "max_new_tokens": 4}
    expected = model.generate(**inputs, **options)
    engine, stop = PagedEngine(model, CONFIG), threading.Event()
    prompts = inputs["input_ids"].tolist()

    def work() -> None:
        assert torch.equal(model.generate(**inputs, **options, **models.PAGED), expected)
        engine.free()
        results = engine.generate(prompts, options)
        assert [r.prompt_ids + r.token_ids for r in results] == expected.tolist()
        engine.check_integrity()

    def run_on() -> None:
        while not stop.is_set():
            model.generate(**inputs, **options, **models.PAGED)
            engine.generate(prompts, options)

    with another_thread(run_on):
        try:
            told = [in_child(work) for _ in range(12)]
        finally:
            stop.set()
    assert told == ["fine"] * 12
    engine.check_integrity()


@needs_fork
def test_a_child_reads_the_model_while_a_thread_of_its_parent_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, is_there, may_go_on = (
        models.build("llama", num_hidden_layers=1),
        threading.Event(),
        threading.Event(),
    )

    class Waits(state.ModelState):
        def __init__(self, model: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_there.set()
                assert may_go_on.wait(120)
            super().__init__(model)

    monkeypatch.setattr(state, "ModelState", Waits)
    expected = state.fingerprint(model)

    def work() -> None:
        assert expected is not None and state.fingerprint(model) == expected

    with another_thread(lambda: state.fingerprint(model)) as got:
        assert is_there.wait(60)
        try:
            told = in_child(work, seconds=20)
        finally:
            may_go_on.set()
    assert told == "fine"
    assert got == [expected]


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

    with another_thread(
        lambda: engine.generate([[5, 6, 7]], OPTIONS, logits_processor=[pause])
    ) as got:
        assert pause.is_there.wait(60)
        try:
            told = in_child(work)
        finally:
            pause.may_go_on.set()
    assert told == "fine"
    assert got[0][0].token_ids == expected


@needs_fork
def test_a_child_of_a_thread_in_a_call_goes_on_with_it() -> None:
    """The forking thread keeps its locks, and its call the switched attention: in the child the
    call ends as usual."""
    model, inputs = models.build("llama"), models.prompt("llama")
    expected, told = model.generate(**inputs, **OPTIONS), []

    class Forks(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not told:
                told.append(in_child(self.check))
            return scores

        def check(self) -> None:
            told.append("child")
            with PagedEngine(model, CONFIG) as engine:
                results = engine.generate(inputs["input_ids"], OPTIONS)
            assert [r.prompt_ids + r.token_ids for r in results] == expected.tolist()
            assert attention_of(model) == {"hf_paged"}, "this thread's call has not ended"

    actual = model.generate(**inputs, **OPTIONS, **models.PAGED, logits_processor=[Forks()])
    assert told == ["fine"]
    assert torch.equal(actual, expected)


@needs_fork
def test_idle_engines_go_on_in_a_child() -> None:
    model = models.build("llama")
    engine = PagedEngine(model, CONFIG)
    expected = engine.generate([[5, 6, 7]], OPTIONS)[0].token_ids
    engine.add_request([5, 6, 7], OPTIONS, request_id="a")
    engine.step()

    def finish() -> None:
        while engine.has_unfinished:
            for output in engine.step():
                if output.result is not None:
                    assert output.result.token_ids == expected
        engine.check_integrity()

    assert in_child(finish) == "fine"
    finish()
