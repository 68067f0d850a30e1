"""Overlapping `generate` calls of several threads on a model: shared forwards, and effects of one
call on others."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import hf_paged
from hf_paged.batching import shared_loop
from hf_paged.batching.execution import executor
from hf_paged.batching.loop import StepLoop
from hf_paged.cache import waits
from hf_paged.cache.waits import claims_on
from hf_paged.generation import batch_call, candidate
from tests.batching.test_rectangles import build, forwards
from tests.support import models
from tests.support.checks import in_threads, model_state
from tests.support.rooms import records_on_cpu

NUM = 6
STEPS = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS}
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 8}}


class AtToken(LogitsProcessor):
    """Runs `action` when it chooses new token `number`, counted from 0."""

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


def generate(
    model: PreTrainedModel, number: int, *processors: LogitsProcessor, **options: Any
) -> torch.Tensor:
    ids = prompt(number).to(model.device)
    options = {**GREEDY, "pad_token_id": 0, "logits_processor": list(processors), **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def paged(
    model: PreTrainedModel, number: int, *processors: LogitsProcessor, **options: Any
) -> torch.Tensor:
    return generate(model, number, *processors, **{**PAGED, **options})


def together(model: PreTrainedModel, *others: LogitsProcessor) -> list[Callable[[], torch.Tensor]]:
    """Jobs of `NUM` calls, which wait at their first token until all are in the loop; the second
    uses `others`."""
    are_in = threading.Event()

    def is_ready() -> bool:
        if num_callers() == NUM:
            are_in.set()  # from now on some may leave
        return are_in.is_set()

    processors = {number: [AtToken(0, lambda: wait_for(is_ready))] for number in range(NUM)}
    processors[1] += others
    return [
        lambda number=number: paged(model, number, *processors[number]) for number in range(NUM)
    ]


@contextlib.contextmanager
def fails_with(model: PreTrainedModel, bad: int) -> Iterator[None]:
    """The model's forward raises if it gets token `bad`; the signature stays."""
    cls, original, is_armed = type(model), type(model).forward, []

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if is_armed and bad in input_ids:
            raise MemoryError("of that row")
        return original(self, input_ids=input_ids, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)  # the replaced forward is checked here
        assert hf_paged.last_route(model).road == "engine"  # type: ignore[union-attr]
        is_armed.append(True)
        yield
    finally:
        cls.forward = original  # type: ignore[method-assign]


def assert_clean(model: PreTrainedModel) -> None:
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
    assert num_callers() == 0 and not any(shared_loop._loops.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "BloomForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_calls_of_threads_share_forwards(name: str) -> None:
    model = models.build(name) if name == "llama" else build(name)
    expected = [generate(model, number) for number in range(NUM)]
    paged(model, 0)  # the model is checked here
    before = model_state(model)
    with forwards(model) as shapes:
        paged(model, 0)  # the replaced forward is
        shapes.clear()
        found = in_threads(*together(model))
    assert len(shapes) <= 2 * STEPS + NUM, (
        f"{len(shapes)} forwards, {NUM * STEPS} without sharing: {shapes}"
    )
    assert all(map(torch.equal, expected, found))
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    assert model_state(model) == before
    assert_clean(model)


@pytest.mark.slow_cases("cpu")
def test_beams_and_samples_of_one_prompt_share_forwards_with_others(device: torch.device) -> None:
    model = models.build("llama").to(device)
    options = [
        {},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"repetition_penalty": 1.3},
    ]
    expected = [generate(model, number, **each) for number, each in enumerate(options)]
    for _ in range(3):
        jobs = [
            lambda number=number, each=each: paged(model, number, **each)
            for number, each in enumerate(options)
        ]
        assert all(map(torch.equal, expected, in_threads(*jobs)))
    assert_clean(model)


def test_draws_of_a_call_alone_are_those_of_plain(device: torch.device) -> None:
    model = models.build("llama").to(device)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "Qwen3NextForCausalLM"])
def test_a_forward_that_fails_for_one_call_fails_that_call_alone(name: str) -> None:
    model = models.build(name) if name == "llama" else build(name)
    expected = [generate(model, number) for number in range(NUM)]
    others = {
        token for number, ids in enumerate(expected) if number != 1 for token in ids[0].tolist()
    }
    bad = next(token for token in prompt(1)[0].tolist() if token not in others)
    with fails_with(model, bad):
        jobs = [lambda number=number: paged(model, number) for number in range(NUM)]
        failing = jobs[1]

        def caught() -> None:
            with pytest.raises(MemoryError, match="of that row"):
                failing()

        for _ in range(3):
            found = in_threads(jobs[0], caught, *jobs[2:])
            for number in (0, *range(2, NUM)):
                assert torch.equal(found[number], expected[number])
    assert_clean(model)


@pytest.mark.slow
def test_calls_go_on_where_a_forward_failed_and_blocks_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In separate loops, calls cannot preempt each other."""
    model, few = models.build("llama"), {"cache_config": {"block_size": 8, "num_blocks": 8}}
    # of the first, 6 blocks; of the second, 7
    long: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40}
    expected = [generate(model, number, **long) for number in (0, 1)]
    bad = next(
        token for token in range(4, models.VOCAB_SIZE) if not any(token in ids for ids in expected)
    )
    compute, has_begun, others = StepLoop.compute, threading.Event(), threading.Event()

    def together(*args: Any, **kwargs: Any) -> Any:
        if not has_begun.is_set():
            wait_for(lambda: num_callers() == 3)
            has_begun.set()
        return compute(*args, **kwargs)

    def first() -> torch.Tensor:
        # 5 of the blocks are taken, so the other call, which has 2 or more, cannot get all that it
        # needs
        return paged(model, 0, AtToken(30, lambda: wait_for(others.is_set)), **long, **few)

    def failing() -> None:
        with pytest.raises(MemoryError, match="of that row"):
            model.generate(torch.full((1, 5), bad), **GREEDY, **{**PAGED, **few})

    with fails_with(model, bad):
        monkeypatch.setattr(StepLoop, "compute", together)
        found = in_threads(
            first, lambda: paged(model, 1, AtToken(4, others.set), **long, **few), failing
        )
    assert all(map(torch.equal, expected, found))
    assert_clean(model)


@pytest.mark.slow
def test_a_call_waits_for_blocks_of_one_that_samples() -> None:
    """A row that ended keeps its blocks until the whole call, which is slow, ends."""
    model, few = models.build("llama"), {"cache_config": {"block_size": 8, "num_blocks": 8}}
    ids = torch.cat([models.token_ids(1, 17, seed=seed) for seed in (3, 4)])
    options = {
        **GREEDY,
        "min_new_tokens": 0,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    # ends the first row, which keeps 3 blocks
    options["eos_token_id"] = int(model.generate(ids, **options)[0, 18])
    plain, needed = (
        model.generate(ids, **options),
        generate(model, 4, max_new_tokens=20, min_new_tokens=20),
    )
    waits = threading.Event()

    class Short(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 20:
                waits.set()
                loops = [loop for loops in shared_loop._loops.values() for loop in loops.values()]
                wait_for(lambda: any(loop._retry_at for loop in loops) or bool(ended))
            return scores

    ended: list[Any] = []

    def first() -> torch.Tensor:
        kept = {"return_dict_in_generate": True, "logits_processor": [Short()]}
        return model.generate(ids, **options, **PAGED | few, **kept).sequences

    def second() -> torch.Tensor:
        wait_for(waits.is_set)
        try:
            return paged(model, 4, max_new_tokens=20, min_new_tokens=20, **few)  # 6 blocks
        finally:
            ended.append(True)

    found = in_threads(first, second)
    assert torch.equal(found[0], plain) and torch.equal(found[1], needed)
    assert_clean(model)


@pytest.mark.slow
def test_an_error_where_no_call_will_give_blocks_back() -> None:
    model, few = models.build("llama"), {"cache_config": {"block_size": 8, "num_blocks": 8}}
    kept = paged(model, 4, return_dict_in_generate=True, **few)  # holds 5 blocks

    def refused(number: int) -> None:
        with pytest.raises(hf_paged.OutOfBlocksError, match="Other requests or caches hold"):
            paged(model, number, **few)

    in_threads(*(functools.partial(refused, number) for number in (3, 4, 5)))
    del kept
    # within a forward, delayed by a separate call
    held, cls, original = [True], type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not held[0]:
            held[0] = True
            refused(4)
        return original(self, *args, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 4, **few)
        held[0] = False
        assert torch.equal(paged(model, 4, **few), generate(model, 4))
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


@pytest.mark.slow
def test_of_calls_that_wait_for_one_another_the_one_that_keeps_blocks_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that ended keep all blocks until the other rows end, which need more; the call that came
    first fits."""
    monkeypatch.setattr(waits, "MAX_STALL", 1.0)
    model, few, samples = (
        models.build("llama"),
        {"cache_config": {"block_size": 8, "num_blocks": 6}},
        threading.Event(),
    )

    def is_short() -> bool:
        loops = [loop for loops in shared_loop._loops.values() for loop in loops.values()]
        return any(loop._shortage is not None for loop in loops)

    def first() -> torch.Tensor:
        return paged(model, 1, AtToken(5, lambda: (samples.set(), wait_for(is_short))), **few)

    def second() -> None:
        wait_for(samples.is_set)
        ids = models.token_ids(12, 13)
        kept = {
            **GREEDY,
            **PAGED,
            **few,
            "attention_mask": torch.ones_like(ids),
            "return_dict_in_generate": True,
        }
        with pytest.raises(hf_paged.OutOfBlocksError):
            model.generate(ids, **kept)

    found = in_threads(first, second)
    assert torch.equal(found[0], generate(model, 1))
    assert_clean(model)


def test_the_loop_tells_whether_its_calls_go_on() -> None:
    """A call that waits in it for blocks does not, though no other claim may overtake it."""
    model, seen = models.build("llama"), []

    def look() -> None:
        (loop,) = (loop for loops in shared_loop._loops.values() for loop in loops.values())
        claims = claims_on(loop.loop.memory)
        seen.append(([claim.is_progressing(0) for claim in claims], loop.is_progressing(0)))

    paged(model, 1, AtToken(2, look), return_dict_in_generate=True)
    assert seen == [([False], True)]


@pytest.mark.slow_cases("gemma3")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_returned_cache_is_computed_again_in_the_blocks_of_its_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last rows may have been preempted just before they ended."""
    model, lose = models.build(name), batch_call.BatchCall._result
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}

    def losing(self: Any, generation: Any, loop: StepLoop) -> Any:
        for row, (blocks, _) in generation.kept_blocks.items():
            loop.blocks.free(blocks)
            generation.kept_blocks[row] = loop.blocks.new(), 0
        return lose(self, generation, loop)

    monkeypatch.setattr(batch_call.BatchCall, "_result", losing)
    plain = generate(model, 1, **options)
    few = {"cache_config": {"block_size": 8, "num_blocks": {"llama": 7, "gemma3": 10}[name]}}
    found = paged(model, 1, **options, **few)
    assert torch.equal(found.sequences, plain.sequences)
    for layer, other in zip(found.past_key_values.layers, plain.past_key_values.layers):
        torch.testing.assert_close(layer.keys[..., -4:, :], other.keys[..., -4:, :])
    del found, layer
    assert_clean(model)


@pytest.mark.slow
def test_a_call_with_rows_that_ended_goes_on_after_a_forward_that_failed() -> None:
    model, both, failed = models.build("llama"), threading.Event(), threading.Event()
    inputs = models.padded_prompt("llama", (13, 4))
    rows = model.generate(**inputs, **GREEDY)[:, 13:].tolist()
    end = next(token for token in rows[0][:4] if token not in rows[1])
    options = dict(do_sample=False, max_new_tokens=40, eos_token_id=end, pad_token_id=0)
    long = dict(max_new_tokens=40, min_new_tokens=40)
    expected = model.generate(**inputs, **options), generate(model, 1, **long)
    first_row, second_row = expected[0][:, 13:33].tolist()
    assert end in first_row[:4] and end not in second_row and len(second_row) == 20, (
        "one row was meant to end early"
    )
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if both.is_set() and not failed.is_set() and input_ids.shape == (1, 2):
            # the open row of one, and the other
            failed.set()
            raise MemoryError("of two rows")
        return original(self, input_ids=input_ids, **kwargs)

    def first() -> torch.Tensor:
        waits = AtToken(6, lambda: (wait_for(lambda: num_callers() == 2), both.set()))
        return model.generate(**inputs, **options, logits_processor=[waits], **PAGED)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)  # the replaced forward is checked
        found = in_threads(
            first, lambda: paged(model, 1, AtToken(2, lambda: wait_for(both.is_set)), **long)
        )
        assert all(map(torch.equal, expected, found))
        assert failed.is_set(), "no forward had the rows of both calls"
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "BambaForCausalLM"])
def test_samples_beside_a_call_whose_forward_fails_are_those_of_plain(name: str) -> None:
    model, failed = models.build(name) if name == "llama" else build(name), threading.Event()
    inputs, options = (
        models.padded_prompt("llama", (13, 4)),
        dict(do_sample=True, max_new_tokens=40, pad_token_id=0),
    )
    long = dict(max_new_tokens=40, min_new_tokens=40)
    torch.manual_seed(5)
    expected = model.generate(**inputs, **options), generate(model, 1, **long)
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if num_callers() == 2 and input_ids.numel() == 3 and not failed.is_set():
            # one token per row
            failed.set()
            raise MemoryError("of three rows")
        return original(self, input_ids=input_ids, **kwargs)

    def samples() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(**inputs, **options, **PAGED)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)  # the replaced forward is checked
        found = in_threads(
            samples,
            lambda: paged(
                model, 1, AtToken(1, lambda: wait_for(lambda: num_callers() == 2)), **long
            ),
        )
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert failed.is_set(), "no forward had the rows of both calls"
    assert all(map(torch.equal, expected, found))
    assert_clean(model)


def test_a_call_that_joins_between_two_looks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, jobs = models.build("llama"), []
    expected = [generate(model, number) for number in (0, 1)]
    paged(model, 0)
    context, me = executor.unsupported_reasons, threading.get_ident()

    class Joined:
        reset = context.reset

        def set(self, value: Any) -> Any:
            if threading.get_ident() == me and not jobs:
                jobs.append(threading.Thread(target=lambda: found.append(paged(model, 1))))
                jobs[0].start()
                wait_for(lambda: num_callers() == 2)
            return context.set(value)

    found: list[torch.Tensor] = []
    monkeypatch.setattr(executor, "unsupported_reasons", Joined())
    found.append(paged(model, 0))
    jobs[0].join(60)
    assert sorted(map(torch.Tensor.tolist, found)) == sorted(map(torch.Tensor.tolist, expected))
    assert_clean(model)


def test_a_step_that_ends_between_two_looks_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = models.build("llama"), [0]
    other = shared_loop.Caller(None, None, thread_id=-1)  # type: ignore[arg-type]

    def stepper(self: Any) -> Any:
        looks[0] += 1
        return other if looks[0] == 1 else vars(self).get("_stepper")

    both = property(stepper, lambda self, value: vars(self).update(_stepper=value))
    monkeypatch.setattr(shared_loop.SharedLoop, "_stepper", both, raising=False)
    assert torch.equal(paged(model, 0), generate(model, 0))


@pytest.mark.slow
def test_a_call_that_joined_during_a_step_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not wait for the thread that runs the step and samples."""
    model, ended = models.build("llama"), threading.Event()
    expected = [generate(model, number) for number in (0, 1)]
    paged(model, 0)
    compute, is_waited_for = StepLoop.compute, []

    def joined(self: Any, *args: Any, **kwargs: Any) -> Any:
        ready = compute(self, *args, **kwargs)
        if not is_waited_for:
            is_waited_for.append(True)
            wait_for(lambda: num_callers() == 2)
            threading.Event().wait(0.2)  # until it waits for the end of the step
        return ready

    def second() -> torch.Tensor:
        wait_for(lambda: bool(is_waited_for))
        output = paged(model, 1)
        ended.set()
        return output

    monkeypatch.setattr(StepLoop, "compute", joined)
    monkeypatch.setattr(shared_loop, "_POLL", 100)
    found = in_threads(lambda: paged(model, 0, AtToken(0, lambda: wait_for(ended.is_set))), second)
    assert all(map(torch.equal, expected, found))


def test_a_call_runs_by_its_own_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = models.build("llama"), []
    make, choose = batch_call.make_loop, candidate.choose_layout

    def choosing(*args: Any) -> Any:
        monkeypatch.setattr(candidate, "choose_layout", choose)
        in_threads(lambda: paged(model, 1))
        return choose(*args)

    def making(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(candidate, "choose_layout", choosing)
    monkeypatch.setattr(batch_call, "make_loop", making)
    paged(
        model,
        0,
        cache_config={
            "block_size": 8,
            "max_num_batched_tokens": 7,
            "prefix_caching": False,
            "capture": False,
        },
    )
    assert made[-1].scheduler.max_num_batched_tokens == 7 and not made[-1].blocks.prefix_caching
    is_recorded = made[0].executor.runner.recorder is not None
    assert is_recorded is records_on_cpu(), "the other call may record"
    assert made[-1].executor.runner.recorder is None


def test_no_call_waits_for_one_that_stopped() -> None:
    """A processor that waits until another, later call has ended."""
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


@pytest.mark.slow
def test_a_call_within_a_processor_and_within_a_forward() -> None:
    model, inner = models.build("llama"), []
    expected = [generate(model, number) for number in (0, 1)]
    found = paged(model, 0, AtToken(2, lambda: inner.append(paged(model, 1))))
    assert torch.equal(found, expected[0]) and torch.equal(inner[0], expected[1])

    cls, original, is_inside = type(model), type(model).forward, [True]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_inside[0]:
            is_inside[0] = True
            inner.append(paged(model, 1))
        return original(self, *args, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        paged(model, 0)
        is_inside[0] = False
        assert torch.equal(paged(model, 0), expected[0]) and torch.equal(inner[1], expected[1])
    finally:
        cls.forward = original  # type: ignore[method-assign]
    assert_clean(model)


@pytest.mark.slow_cases("cpu")
def test_calls_preempt_one_another_where_blocks_are_few(device: torch.device) -> None:
    model = models.build("llama").to(device)
    expected = [generate(model, number) for number in range(NUM)]
    few = {"cache_config": {"block_size": 8, "num_blocks": 8}}  # the longest needs 6 of them
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


def rms(found: Any, expected: Any) -> float:
    """The root mean square of the difference of two outputs' logits."""
    return float((torch.stack(found.logits) - torch.stack(expected.logits)).square().mean().sqrt())


@pytest.mark.slow
def test_calls_under_other_contexts_take_turns() -> None:
    model = models.build("llama")

    def cast(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(model, 3, return_dict_in_generate=True, output_logits=True)

    def inference(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return function(model, 4)

    full = generate(model, 3, return_dict_in_generate=True, output_logits=True)
    rounding = rms(cast(generate), full)  # from plain's own products and kernels
    jobs = [
        lambda: paged(model, 0),
        lambda: cast(paged),
        lambda: inference(paged),
        lambda: paged(model, 1),
    ]
    found = in_threads(*jobs)
    assert 0.5 * rounding < rms(found[1], full) < 1.3 * rounding  # it was cast, and no worse
    for at, number in ((0, 0), (2, 4), (3, 1)):
        assert torch.equal(found[at], generate(model, number))


@pytest.mark.slow
def test_a_returned_cache_is_of_its_call_alone() -> None:
    model = models.build("llama")
    options = dict(return_dict_in_generate=True)
    expected = [generate(model, number, **options) for number in range(4)]
    found = in_threads(
        *(lambda number=number: paged(model, number, **options) for number in range(4))
    )
    for plain, ours in zip(expected, found):
        assert torch.equal(plain.sequences, ours.sequences)
        more = dict(max_new_tokens=4, do_sample=False)
        again = [
            model.generate(x.sequences, past_key_values=x.past_key_values, **more)
            for x in (plain, ours)
        ]
        assert torch.equal(*again)
    del found, ours, again
    gc.collect()
    assert_clean(model)


@pytest.mark.slow
def test_models_are_held_by_their_calls_alone() -> None:
    def run() -> weakref.ref[PreTrainedModel]:
        model = models.build("llama")
        copies: list[PreTrainedModel] = []
        paged(
            model,
            0,
            AtToken(
                2, lambda: copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
            ),
        )
        for twin in copies:
            assert torch.equal(paged(twin, 0), generate(model, 0))
        in_threads(*(lambda number=number: paged(model, number) for number in range(3)))
        return weakref.ref(model)

    gone = run()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
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
                    is_right = torch.equal(found, expected[0]) and torch.equal(
                        paged(model, 2), expected[2]
                    )
                    os._exit(0 if is_right else 1)
        finally:
            if True in is_child:
                os._exit(2)
            stop.set()

    in_threads(endless, forking)
    assert codes == [0] * 5
    assert_clean(model)


# -- calls that do not fit together --------------------------------------------------------------

slow = pytest.mark.slow


@pytest.mark.slow_cases("*-1")
@pytest.mark.parametrize(
    ("name", "num_calls"),
    [("t5", 1), pytest.param("t5", 32, marks=slow), pytest.param("bart", 32, marks=slow)],
)
def test_calls_of_an_encoder_decoder_wait_for_one_another(name: str, num_calls: int) -> None:
    """The blocks of other calls' encoder outputs come back, too: none is told that it can never
    fit."""
    model = models.build(name)
    inputs = [models.prompt(name, 1, 8 + 6 * number, seed=number) for number in range(8)]
    options = [
        {"do_sample": False, "max_new_tokens": 4 + 3 * number, "min_new_tokens": 4}
        for number in range(8)
    ]
    expected = [model.generate(**given, **config) for given, config in zip(inputs, options)]
    few = {"cache_implementation": "paged", "cache_config": {"block_size": 8, "num_blocks": 12}}

    def job(first: int) -> None:
        for call_number in range(num_calls):
            number = (first + 3 * call_number) % 8
            found = model.generate(**inputs[number], **options[number], **few)
            assert torch.equal(found, expected[number]), number

    in_threads(*(functools.partial(job, number) for number in range(8)))
    assert_clean(model)


WAYS: dict[str, dict[str, Any]] = {
    "engine": {},
    "rows that ended keep their blocks": {"return_dict_in_generate": True},
    "transformers' own loop": {"prefill_chunk_size": 64},
    "beams in transformers' own loop": {
        "num_beams": 2,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    },
}


@pytest.mark.slow_cases("all of them")
@pytest.mark.parametrize(
    ("ways", "num_calls"),
    [
        *(pytest.param([way], 16, marks=slow, id=way) for way in WAYS),
        pytest.param([*WAYS], 1, id="all of them"),
        pytest.param([*WAYS], 16, marks=slow, id="all of them, many"),
    ],
)
def test_calls_of_any_route_wait_for_one_another(ways: list[str], num_calls: int) -> None:
    """No two of them hold half of the blocks each, and wait for the other half."""
    model, few = models.build("llama"), {"cache_config": {"block_size": 8, "num_blocks": 12}}
    given = [(2 + number % 3, WAYS[ways[number % len(ways)]]) for number in range(8)]

    def tokens(function: Callable[..., Any], number: int) -> torch.Tensor:
        length, options = given[number]
        found = function(model, length, max_new_tokens=20, min_new_tokens=20, **options)
        return found if isinstance(found, torch.Tensor) else found.sequences

    expected = [tokens(generate, number) for number in range(8)]

    def job(first: int) -> None:
        for call_number in range(num_calls):
            number = (first + 3 * call_number) % 8
            found = tokens(functools.partial(paged, **few), number)
            assert torch.equal(found, expected[number]), given[number]

    in_threads(*(functools.partial(job, number) for number in range(8)))
    gc.collect()
    assert_clean(model)


def test_a_call_in_transformers_own_loop_that_can_never_fit_is_refused_beside_others() -> None:
    model, few = (
        models.build("llama"),
        {"cache_config": {"block_size": 8, "num_blocks": 8}, "prefill_chunk_size": 64},
    )

    def refused() -> None:
        with pytest.raises(hf_paged.OutOfBlocksError, match="of 8 are free"):
            paged(model, 5, max_new_tokens=60, min_new_tokens=60, **few)

    found = in_threads(lambda: paged(model, 1, **few), refused, lambda: paged(model, 2, **few))
    assert torch.equal(found[0], generate(model, 1)) and torch.equal(found[2], generate(model, 2))
    assert_clean(model)
