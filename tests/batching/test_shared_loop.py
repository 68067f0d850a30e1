"""`generate` calls of several threads that overlap on a model: shared forwards, and what one call does to others."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import hf_paged
from hf_paged.batching import shared_loop
from tests.batching.test_rectangles import build, forwards
from tests.support import models
from tests.support.checks import in_threads, model_state

NUM = 6
STEPS = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS}
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 8}}


class AtToken(LogitsProcessor):
    """Runs `action` when it chooses the new token of this number."""

    def __init__(self, number: int, action: Callable[[], Any]) -> None:
        self.number, self.action = number, action

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.number == 0:
            self.action()
        self.number -= 1
        return scores


def wait_for(condition: Callable[[], bool]) -> None:
    limit = threading.Event()
    for _ in range(3000):
        if condition():
            return
        limit.wait(0.01)
    raise AssertionError("waited for 30 seconds")


def num_callers() -> int:
    loops = [loop for loops in shared_loop._loops.values() for loop in loops.values()]
    return sum(len(loop._callers) for loop in loops)


def prompt(number: int) -> torch.Tensor:
    return models.token_ids(1, 9 + 5 * number, seed=number)


def generate(model: PreTrainedModel, number: int, *processors: LogitsProcessor, **options: Any) -> torch.Tensor:
    ids = prompt(number)
    options = {**GREEDY, "pad_token_id": 0, "logits_processor": list(processors), **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def paged(model: PreTrainedModel, number: int, *processors: LogitsProcessor, **options: Any) -> torch.Tensor:
    return generate(model, number, *processors, **{**PAGED, **options})


def together(model: PreTrainedModel, *others: LogitsProcessor) -> list[Callable[[], torch.Tensor]]:
    """Jobs of `NUM` calls: the first waits at its first token until all are in the loop; the second has `others`."""
    first = AtToken(0, lambda: wait_for(lambda: num_callers() == NUM))
    processors: dict[int, tuple[LogitsProcessor, ...]] = {0: (first,), 1: others}
    return [lambda number=number: paged(model, number, *processors.get(number, ())) for number in range(NUM)]


def assert_clean(model: PreTrainedModel) -> None:
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
    assert num_callers() == 0 and not any(shared_loop._loops.values())


@pytest.mark.parametrize("name", ["llama", "BloomForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"])
def test_calls_of_threads_share_forwards(name: str) -> None:
    model = models.build(name) if name == "llama" else build(name)
    expected = [generate(model, number) for number in range(NUM)]
    paged(model, 0)  # the model is checked here
    before = model_state(model)
    with forwards(model) as shapes:
        paged(model, 0)  # the replaced forward is
        shapes.clear()
        found = in_threads(*together(model))
    assert len(shapes) <= 2 * STEPS + NUM, f"{len(shapes)} forwards, {NUM * STEPS} without sharing: {shapes}"
    assert all(map(torch.equal, expected, found))
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    assert model_state(model) == before
    assert_clean(model)


def test_beams_and_samples_of_one_prompt_share_forwards_with_others() -> None:
    model = models.build("llama")
    options = [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"repetition_penalty": 1.3}]
    expected = [generate(model, number, **each) for number, each in enumerate(options)]
    for _ in range(3):
        jobs = [lambda number=number, each=each: paged(model, number, **each) for number, each in enumerate(options)]
        assert all(map(torch.equal, expected, in_threads(*jobs)))
    assert_clean(model)


def test_draws_of_a_call_alone_are_those_of_plain() -> None:
    model = models.build("llama")
    options = dict(do_sample=True, num_return_sequences=3, temperature=1.5)

    def both(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [function(model, 1, **options), function(model, 2, **options)]

    assert all(map(torch.equal, both(generate), both(paged)))


def test_an_exception_of_one_call_does_not_reach_the_others() -> None:
    model = models.build("llama")
    expected = [generate(model, number) for number in range(NUM)]

    def fail() -> None:
        raise KeyError("of a caller's own")

    jobs = together(model, AtToken(4, fail))
    failing = jobs[1]

    def caught() -> None:
        with pytest.raises(KeyError, match="of a caller's own"):
            failing()

    found = in_threads(jobs[0], caught, *jobs[2:])
    assert [found[number].tolist() for number in (0, *range(2, NUM))] == [
        expected[number].tolist() for number in (0, *range(2, NUM))
    ]
    assert_clean(model)


@pytest.mark.parametrize("name", ["llama", "Qwen3NextForCausalLM"])
def test_a_forward_that_fails_for_one_call_fails_that_call_alone(name: str) -> None:
    model = models.build(name) if name == "llama" else build(name)
    expected = [generate(model, number) for number in range(NUM)]
    others = {token for number, ids in enumerate(expected) if number != 1 for token in ids[0].tolist()}
    bad = next(token for token in prompt(1)[0].tolist() if token not in others)
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if bad in input_ids and armed:
            raise MemoryError("of that row")
        return original(self, input_ids=input_ids, **kwargs)

    armed = False
    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)
        route = hf_paged.last_route(model)
        assert route is not None and route.road == "engine", route
        armed = True
        jobs = [lambda number=number: paged(model, number) for number in range(NUM)]
        failing = jobs[1]

        def caught() -> None:
            with pytest.raises(MemoryError, match="of that row"):
                failing()

        for _ in range(3):
            found = in_threads(jobs[0], caught, *jobs[2:])
            for number in (0, *range(2, NUM)):
                assert torch.equal(found[number], expected[number])
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


def test_a_call_with_rows_that_ended_goes_on_after_a_forward_that_failed() -> None:
    model, both, failed = models.build("llama"), threading.Event(), threading.Event()
    inputs = models.padded_prompt("llama", (13, 4))
    rows = model.generate(**inputs, **GREEDY)[:, 13:].tolist()
    end = next(token for token in rows[0][:4] if token not in rows[1])
    options = dict(do_sample=False, max_new_tokens=40, eos_token_id=end, pad_token_id=0)
    long = dict(max_new_tokens=40, min_new_tokens=40)
    expected = model.generate(**inputs, **options), generate(model, 1, **long)
    first_row, second_row = expected[0][:, 13:33].tolist()
    assert end in first_row[:4] and end not in second_row and len(second_row) == 20, "one row was meant to end early"
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if both.is_set() and not failed.is_set() and input_ids.shape == (1, 2):  # the open row of one, and the other
            failed.set()
            raise MemoryError("of two rows")
        return original(self, input_ids=input_ids, **kwargs)

    def first() -> torch.Tensor:
        waits = AtToken(6, lambda: (wait_for(lambda: num_callers() == 2), both.set()))
        return model.generate(**inputs, **options, logits_processor=[waits], **PAGED)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)  # the replaced forward is checked
        found = in_threads(first, lambda: paged(model, 1, AtToken(2, lambda: wait_for(both.is_set)), **long))
        assert all(map(torch.equal, expected, found))
        assert failed.is_set(), "no forward had the rows of both calls"
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


def test_nobody_waits_for_a_call_that_stopped() -> None:
    """A processor that waits until another call, which began later, has ended."""
    model = models.build("llama")
    expected, ended = [generate(model, number) for number in (0, 1)], threading.Event()

    def second() -> torch.Tensor:
        wait_for(lambda: num_callers() == 1)
        output = paged(model, 1)
        ended.set()
        return output

    found = in_threads(lambda: paged(model, 0, AtToken(2, lambda: wait_for(ended.is_set))), second)
    assert all(map(torch.equal, expected, found))
    assert_clean(model)


def test_a_call_within_a_processor_and_within_a_forward() -> None:
    model, inner = models.build("llama"), []
    expected = [generate(model, number) for number in (0, 1)]
    found = paged(model, 0, AtToken(2, lambda: inner.append(paged(model, 1))))
    assert torch.equal(found, expected[0]) and torch.equal(inner[0], expected[1])

    cls, original, is_inside = type(model), type(model).forward, [True]

    @functools.wraps(original)
    def forward(self: Any, **kwargs: Any) -> Any:
        if not is_inside[0]:
            is_inside[0] = True
            inner.append(paged(model, 1))
        return original(self, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)
        is_inside[0] = False
        assert torch.equal(paged(model, 0), expected[0]) and torch.equal(inner[1], expected[1])
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


def test_calls_preempt_one_another_where_blocks_are_few() -> None:
    model = models.build("llama")
    expected = [generate(model, number) for number in range(NUM)]
    few = {"cache_config": {"block_size": 8, "num_blocks": 8}}  # the longest takes 6 of them
    for _ in range(3):
        jobs = [lambda number=number: paged(model, number, **few) for number in range(NUM)]
        assert all(map(torch.equal, expected, in_threads(*jobs)))
    assert_clean(model)


def test_a_call_that_can_never_fit_is_refused_beside_others() -> None:
    model = models.build("llama")
    few = {"cache_config": {"block_size": 8, "num_blocks": 8}}

    def refused() -> None:
        with pytest.raises(hf_paged.OutOfBlocksError):
            paged(model, 5, max_new_tokens=60, **few)

    found = in_threads(lambda: paged(model, 1, **few), refused, lambda: paged(model, 2, **few))
    assert torch.equal(found[0], generate(model, 1)) and torch.equal(found[2], generate(model, 2))
    assert_clean(model)


def test_calls_under_other_contexts_take_turns() -> None:
    model = models.build("llama")

    def cast(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(model, 3, return_dict_in_generate=True, output_logits=True)

    def inference(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return function(model, 4)

    logits = torch.stack(cast(generate).logits)
    jobs = [lambda: paged(model, 0), lambda: cast(paged), lambda: inference(paged), lambda: paged(model, 1)]
    found = in_threads(*jobs)
    torch.testing.assert_close(torch.stack(found[1].logits), logits, atol=2e-2, rtol=2e-2)
    for at, number in ((0, 0), (2, 4), (3, 1)):
        assert torch.equal(found[at], generate(model, number))


def test_a_returned_cache_is_of_its_call_alone() -> None:
    model = models.build("llama")
    options = dict(return_dict_in_generate=True)
    expected = [generate(model, number, **options) for number in range(4)]
    found = in_threads(*(lambda number=number: paged(model, number, **options) for number in range(4)))
    for plain, ours in zip(expected, found):
        assert torch.equal(plain.sequences, ours.sequences)
        more = dict(max_new_tokens=4, do_sample=False)
        again = [model.generate(x.sequences, past_key_values=x.past_key_values, **more) for x in (plain, ours)]
        assert torch.equal(*again)
    del found, ours, again
    gc.collect()
    assert_clean(model)


def test_models_are_held_by_their_calls_alone() -> None:
    def run() -> weakref.ref[PreTrainedModel]:
        model = models.build("llama")
        copies: list[PreTrainedModel] = []
        paged(model, 0, AtToken(2, lambda: copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])))
        for twin in copies:
            assert torch.equal(paged(twin, 0), generate(model, 0))
        in_threads(*(lambda number=number: paged(model, number) for number in range(3)))
        return weakref.ref(model)

    gone = run()
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_goes_on_with_the_call_that_forked() -> None:
    model = models.build("llama")
    expected = [generate(model, number) for number in range(3)]
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        is_child.append(child == 0)
        if child:
            codes.append(os.waitpid(child, 0)[1])

    is_child: list[bool] = []
    stop = threading.Event()

    def endless() -> None:
        while not stop.is_set():
            assert torch.equal(paged(model, 1), expected[1])

    def forking() -> None:
        try:
            torch.set_num_threads(1)  # a child has no other threads of OpenMP
            for _ in range(5):
                is_child.clear()
                found = paged(model, 0, AtToken(3, fork))
                if is_child[0]:
                    is_right = torch.equal(found, expected[0]) and torch.equal(paged(model, 2), expected[2])
                    os._exit(0 if is_right else 1)
        finally:
            if True in is_child:
                os._exit(2)
            stop.set()

    in_threads(endless, forking)
    assert codes == [0] * 5
    assert_clean(model)
