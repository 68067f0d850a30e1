"""Overlapping `generate` calls of several threads on a model: shared forwards, and effects of one
call on others."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged.batching.decoding.sampler import sample_step
from hf_paged.batching.execution import executor
from hf_paged.batching.ledger import Ledger
from hf_paged.batching.loop import StepLoop
from hf_paged.cache import waits
from hf_paged.generation import batch_call, candidate
from hf_paged.generation import call as call_module
from hf_paged.overlap import Caller, SharedLoop, _loops
from tests.support import models
from tests.support.checks import in_threads, model_state
from tests.support.forwards import build, forwards
from tests.support.rooms import records_on_cpu

NUM = 6
STEPS = 12


def exactly(num_tokens: int, **more: Any) -> dict[str, Any]:
    counts = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    return {"do_sample": False, "pad_token_id": 0, **counts, **more}


def paged_with(**config: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"block_size": 8, **config}}


PAGED = paged_with()
FEW = paged_with(num_blocks=8)
LONG = exactly(40)
KEPT = {"return_dict_in_generate": True}


def at_token(number: int, action: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """A processor that runs `action` when it chooses new token `number`, counted from 0."""
    numbers = itertools.count()

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(numbers) == number:
            action()
        return scores

    return process


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 30 seconds")


def open_loops() -> list[Any]:
    return [loop for loops in _loops.values() for loop in loops.values()]


def num_callers() -> int:
    return sum(len(loop._callers) for loop in open_loops())


def until_callers(number: int) -> Callable[[], None]:
    return lambda: wait_for(lambda: num_callers() == number)


def prompt(number: int) -> torch.Tensor:
    return models.token_ids(1, 9 + 5 * number, seed=number)


def generate(model: PreTrainedModel, number: int, *processors: Any, **options: Any) -> torch.Tensor:
    ids = prompt(number).to(model.device)
    given = {**exactly(STEPS), "logits_processor": list(processors), **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)


def paged(model: PreTrainedModel, number: int, *processors: Any, **options: Any) -> torch.Tensor:
    return generate(model, number, *processors, **{**PAGED, **options})


def plain(model: PreTrainedModel, numbers: Iterable[int] = range(NUM), **options: Any) -> list[Any]:
    return [generate(model, number, **options) for number in numbers]


def calls(model: PreTrainedModel, numbers: Iterable[int] = range(NUM), **options: Any) -> list[Any]:
    return [functools.partial(paged, model, number, **options) for number in numbers]


def together(model: PreTrainedModel, *others: Any) -> list[Callable[[], torch.Tensor]]:
    """Jobs of `NUM` calls, which wait at their first token until all are in the loop; the second
    uses `others`."""
    are_in = threading.Event()

    def is_ready() -> bool:
        if num_callers() == NUM:
            are_in.set()  # from now on some may leave
        return are_in.is_set()

    def job(number: int) -> torch.Tensor:
        processors = others if number == 1 else ()
        return paged(model, number, at_token(0, lambda: wait_for(is_ready)), *processors)

    return [functools.partial(job, number) for number in range(NUM)]


def begin_together(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    """Makes the first step wait until all calls are in the loop."""
    compute, has_begun = StepLoop.compute, threading.Event()

    def computed(self: StepLoop, *args: Any, **kwargs: Any) -> Any:
        if not has_begun.is_set():
            until_callers(num_calls)()
            has_begun.set()
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(StepLoop, "compute", computed)


def raises(
    error: type[Exception], message: str | None, job: Callable[[], Any]
) -> Callable[[], None]:
    def caught() -> None:
        with pytest.raises(error, match=message):
            job()

    return caught


def or_error(job: Callable[[], Any], error: type[BaseException]) -> Callable[[], Any]:
    """The job, whose result is None if it raises the error."""

    def caught() -> Any:
        with contextlib.suppress(error):
            return job()

    return caught


@contextlib.contextmanager
def before_forwards(model: PreTrainedModel, act: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Calls `act` with the token ids before each forward; the signature stays."""
    original, is_armed = type(model).forward, []

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if is_armed:
            act(input_ids)
        return original(self, input_ids=input_ids, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", forward)
        paged(model, 0)  # the replaced forward is checked here
        assert hf_paged.last_route(model).road == "engine"
        is_armed.append(True)
        yield


def once(is_meant: Callable[[torch.Tensor], bool], act: Callable[[], Any]) -> Callable[..., None]:
    """Acts before the first forward that is meant."""
    left = [act]

    def look(ids: torch.Tensor) -> None:
        if left and is_meant(ids):
            left.pop()()

    return look


def assert_clean(model: PreTrainedModel) -> None:
    gc.collect()
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
    assert num_callers() == 0 and not any(_loops.values())


def assert_same(model: PreTrainedModel, expected: Iterable[Any], found: Iterable[Any]) -> None:
    """The same tokens, except for calls that ended with an error."""
    for left, right in zip(expected, found, strict=True):
        assert right is None or torch.equal(left, right)
    assert_clean(model)


def model_of(name: str) -> PreTrainedModel:
    return models.build(name) if name in models.CONFIGS else build(name)


@pytest.fixture
def model() -> Any:
    return models.build("llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "BloomForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_calls_of_threads_share_forwards(name: str) -> None:
    model = model_of(name)
    expected = plain(model)
    paged(model, 0)  # the model is checked here
    before = model_state(model)
    with forwards(model) as shapes:
        paged(model, 0)  # the replaced forward is
        shapes.clear()
        found = in_threads(*together(model))
    assert len(shapes) <= 2 * STEPS + NUM, f"{NUM * STEPS} without sharing: {shapes}"
    assert hf_paged.last_route(model).road == "engine"
    assert model_state(model) == before
    assert_same(model, expected, found)


def test_a_call_that_joins_counts_its_own_replays(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes: list[Any] = []
    monkeypatch.setattr(call_module, "note_route", lambda model, route: routes.append(route))
    threads: list[threading.Thread] = []

    def join() -> None:
        threads.append(threading.Thread(target=paged, args=(model, 1), kwargs=exactly(20)))
        threads[-1].start()

    paged(model, 0, at_token(60, join), **exactly(120))
    threads[0].join()
    counts = [route.num_captured_steps for route in routes]
    assert (len(counts) == 2 and 0 < counts[0] <= 40 < counts[1]) or not records_on_cpu(), counts


MIXED = [
    {},
    {"num_beams": 3},
    {"num_return_sequences": 2, "num_beams": 2},
    {"repetition_penalty": 1.3},
]


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize(
    ("options", "config"),
    [(MIXED, PAGED), ([{}] * NUM, FEW)],  # the longest prompt needs 6 of the few blocks
    ids=["beams and samples of one prompt", "calls that preempt one another"],
)
def test_calls_share_forwards_and_blocks(
    options: list[dict[str, Any]], config: dict[str, Any], device: torch.device
) -> None:
    model = models.build("llama").to(device)
    given = list(enumerate(options))
    expected = [generate(model, number, **each) for number, each in given]
    for _ in range(3):
        jobs = [functools.partial(paged, model, n, **each, **config) for n, each in given]
        assert_same(model, expected, in_threads(*jobs))


def test_the_thread_of_a_step_samples_for_calls_without_code(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other threads wake up for their first tokens and at their ends; that of a call with a
    processor, for each of its tokens."""
    num_takes, take = Counter[torch.Size](), Caller.take
    limits = [exactly(length) for length in (STEPS, 2, STEPS - 3, STEPS, 1, STEPS)]
    expected = [generate(model, number, **limit) for number, limit in enumerate(limits)]
    paged(model, 0)

    def counted(self: Caller) -> Any:
        num_takes[self.generation.decoding.inputs.input_ids.shape] += 1
        return take(self)

    begin_together(monkeypatch, NUM)
    monkeypatch.setattr(Caller, "take", counted)
    jobs = [functools.partial(paged, model, n, **limit) for n, limit in enumerate(limits)]
    jobs[3] = functools.partial(jobs[3], at_token(STEPS, lambda: None))
    assert_same(model, expected, in_threads(*jobs))
    assert [num_takes[prompt(number).shape] for number in range(NUM)] == [1, 1, 1, STEPS, 1, 1]


@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "drawn"])
def test_an_interrupt_while_a_thread_samples_for_others_ends_its_own_call(
    samples: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_numbers = itertools.count()
    paged(model, 0)

    def interrupted(ready: Any, *others: Any) -> Any:
        results = sample_step(ready, *others)
        if len(ready) == NUM and next(step_numbers) == 2:
            raise KeyboardInterrupt
        return results

    begin_together(monkeypatch, NUM)
    monkeypatch.setattr("hf_paged.batching.loop.sample_step", interrupted)
    # a draw from one token alone is that token
    options = dict(do_sample=True, top_k=1) if samples else {}
    jobs = [or_error(job, KeyboardInterrupt) for job in calls(model, **options)]
    found = in_threads(*jobs)
    assert next(step_numbers) > 2 and sum(tokens is None for tokens in found) == 1
    assert_same(model, plain(model), found)


def test_a_processor_with_an_adapter_generates_beside_a_call_that_waits_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the model's lock, for which the other call's step waits. The blocks of its call are
    those of the adapter."""
    peft_models = pytest.importorskip("tests.support.peft_models")
    model, inner = peft_models.lora_model(), list[torch.Tensor]()
    expected = [generate(model, 0, adapter_names=["second"]), *plain(model, [1], **LONG)]
    with peft_models.active(model, "second"):
        expected += plain(model, [2])
    adapters, request = [], batch_call.Request

    def noted(*args: Any, **kwargs: Any) -> Any:
        adapters.append(kwargs["adapter"])
        return request(*args, **kwargs)

    def other_waits() -> bool:
        steppers = (loop.stepper for loop in open_loops())
        this_thread = threading.get_ident()
        return any(stepper and stepper.thread_id != this_thread for stepper in steppers)

    def judge() -> None:
        wait_for(other_waits)
        inner.append(paged(model, 2))

    with monkeypatch.context() as patch:
        patch.setattr(batch_call, "Request", noted)
        found = in_threads(
            lambda: paged(model, 0, at_token(4, judge), adapter_names=["second"]),
            lambda: paged(model, 1, at_token(0, until_callers(2)), **LONG),
        )
    assert sorted(adapters, key=str) == [None, "second", "second"]
    assert hf_paged.last_route(model).road == "engine"
    assert_same(model, expected, [*found, *inner])


def test_an_exception_of_one_call_does_not_reach_the_others(model: Any) -> None:
    def fail() -> None:
        raise KeyError("of a caller's own")

    first, failing, *rest = together(model, at_token(4, fail))
    found = in_threads(first, raises(KeyError, "of a caller's own", failing), *rest)
    assert_same(model, plain(model), found)


@pytest.mark.slow
def test_calls_go_on_where_a_forward_failed_and_blocks_are_few(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails that call alone. In separate loops, calls cannot preempt each other."""
    # of the first, 6 blocks; of the second, 7
    expected = plain(model, (0, 1), **LONG)
    known = torch.cat(expected, dim=1)
    bad = next(token for token in range(4, models.VOCAB_SIZE) if token not in known)
    others = threading.Event()

    def fail(ids: torch.Tensor) -> None:
        if bad in ids:
            raise MemoryError("of that row")

    def failing() -> None:
        model.generate(torch.full((1, 5), bad), **exactly(STEPS), **FEW)

    jobs = [
        # 5 of the blocks are taken, so the other call, which has 2 or more, cannot get all that
        # it needs
        lambda: paged(model, 0, at_token(30, lambda: wait_for(others.is_set)), **LONG, **FEW),
        lambda: paged(model, 1, at_token(4, others.set), **LONG, **FEW),
        raises(MemoryError, "of that row", failing),
    ]
    with before_forwards(model, fail):
        begin_together(monkeypatch, 3)
        *found, _ = in_threads(*jobs)
    assert_same(model, expected, found)


@pytest.mark.slow
def test_a_call_waits_for_blocks_of_one_that_samples(model: Any) -> None:
    """A row that ended keeps its blocks until the whole call, which is slow, ends."""
    is_waited_for, ended = threading.Event(), threading.Event()
    inputs, options = models.prompt("llama", 2, 17), exactly(STEPS, min_new_tokens=0)
    # ends the first row, which keeps 3 blocks
    options["eos_token_id"] = int(model.generate(**inputs, **options)[0, 18])
    expected = [model.generate(**inputs, **options), *plain(model, [4], **exactly(20))]

    def wait() -> None:
        is_waited_for.set()
        wait_for(lambda: any(loop._retry_at for loop in open_loops()) or ended.is_set())

    def first() -> torch.Tensor:
        own = {"logits_processor": [at_token(3, wait)]}
        return model.generate(**inputs, **options, **own, **FEW, **KEPT).sequences

    def second() -> torch.Tensor:
        wait_for(is_waited_for.is_set)
        try:
            return paged(model, 4, **exactly(20), **FEW)  # 6 blocks
        finally:
            ended.set()

    assert_same(model, expected, in_threads(first, second))


@pytest.mark.slow
def test_an_error_where_no_call_will_give_blocks_back(model: Any) -> None:
    message = "Other requests or caches hold blocks: end .*, free the caches or raise `num_blocks`"
    expected = plain(model, [4])
    kept = paged(model, 4, **KEPT, **FEW)  # holds 5 blocks
    jobs = calls(model, (3, 4, 5), **FEW)
    in_threads(*(raises(hf_paged.OutOfBlocksError, message, job) for job in jobs))
    del kept
    # within a forward, delayed by a separate call
    refused = raises(hf_paged.OutOfBlocksError, message, jobs[1])
    with before_forwards(model, once(lambda ids: True, refused)):
        assert_same(model, expected, [jobs[1]()])


@pytest.mark.slow
def test_of_calls_that_wait_for_one_another_the_one_that_keeps_blocks_ends(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that ended keep all blocks until the other rows end, which need more; the call that came
    first fits."""
    monkeypatch.setattr(waits, "MAX_STALL", 1.0)
    few, samples = paged_with(num_blocks=6), threading.Event()

    def wait() -> None:
        samples.set()
        wait_for(lambda: any(loop._shortage is not None for loop in open_loops()))

    def second() -> None:
        wait_for(samples.is_set)
        model.generate(**models.prompt("llama", 12), **exactly(STEPS), **few, **KEPT)

    first = functools.partial(paged, model, 1, at_token(5, wait), **few)
    found = in_threads(first, raises(hf_paged.OutOfBlocksError, None, second))
    assert_same(model, plain(model, [1]), found[:1])


@pytest.mark.slow_cases("gemma3-*")
@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 7), ("gemma3", 10)])
def test_a_returned_cache_is_computed_again_in_the_blocks_of_its_call(
    name: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last rows may have been preempted just before they ended."""
    model, lose = models.build(name), batch_call.BatchCall._result

    def losing(self: Any, generation: Any, loop: StepLoop) -> Any:
        for row, (blocks, _) in generation.kept_blocks.items():
            blocks.free()
            generation.kept_blocks[row] = loop.blocks.new(), 0
        return lose(self, generation, loop)

    monkeypatch.setattr(batch_call.BatchCall, "_result", losing)
    (expected,) = plain(model, [1], **LONG, **KEPT)
    found = paged(model, 1, **LONG, **KEPT, **paged_with(num_blocks=num_blocks))
    assert torch.equal(found.sequences, expected.sequences)
    for layer, other in zip(found.past_key_values.layers, expected.past_key_values.layers):
        torch.testing.assert_close(layer.keys[..., -4:, :], other.keys[..., -4:, :])
    del found, layer
    assert_clean(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples"), [("llama", False), ("llama", True), ("BambaForCausalLM", True)]
)
def test_a_call_goes_on_beside_one_whose_forward_failed(name: str, samples: bool) -> None:
    """Its first row has ended, or it samples, with the draws of plain."""
    model, both, failed = model_of(name), threading.Event(), threading.Event()
    inputs = models.padded_prompt("llama", (13, 4))
    options = dict(do_sample=samples, max_new_tokens=40, pad_token_id=0)
    if not samples:
        first, second = model.generate(**inputs, **exactly(20))[:, 13:].tolist()
        options["eos_token_id"] = next(token for token in first[:4] if token not in second)

    def run(*processors: Any, **more: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(**inputs, **options, **more, logits_processor=[*processors])

    def fail() -> None:
        failed.set()
        raise MemoryError("of the rows of both")

    def meet() -> None:
        until_callers(2)()
        both.set()

    expected = [run(), *plain(model, [1], **LONG)]
    # a token of each open row
    meant = once(lambda ids: both.is_set() and ids.numel() == (3 if samples else 2), fail)
    with before_forwards(model, meant):
        found = in_threads(
            lambda: run(at_token(0 if samples else 6, meet), **PAGED),
            lambda: paged(model, 1, at_token(1, lambda: wait_for(both.is_set)), **LONG),
        )
    assert failed.is_set(), "no forward had the rows of both calls"
    assert_same(model, expected, found)


def test_a_call_that_joins_between_two_looks_of_a_step(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, found = [], []
    paged(model, 0)
    context, me = executor.unsupported_reasons, threading.get_ident()

    class Joined:
        reset = context.reset

        def set(self, value: Any) -> Any:
            if threading.get_ident() == me and not jobs:
                jobs.append(threading.Thread(target=lambda: found.append(paged(model, 1))))
                jobs[0].start()
                until_callers(2)()
            return context.set(value)

    monkeypatch.setattr(executor, "unsupported_reasons", Joined())
    own = paged(model, 0)
    jobs[0].join(60)
    assert_same(model, plain(model, (0, 1)), [own, *found])


def test_a_step_that_ends_between_two_looks_of_a_call(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, other = itertools.count(), Caller(None, None, thread_id=-1)  # type: ignore[arg-type]

    def stepper(self: Any) -> Any:
        return vars(self).get("stepper") if next(looks) else other

    both = property(stepper, lambda self, value: vars(self).update(stepper=value))
    monkeypatch.setattr(SharedLoop, "stepper", both, raising=False)
    assert_same(model, plain(model, [0]), [paged(model, 0)])


class HeldStreamer:
    """Waits at the prompt, before the call reaches the loop."""

    def __init__(self, condition: Callable[[], Any]) -> None:
        self.has_started, self._condition = threading.Event(), condition

    def put(self, tokens: torch.Tensor) -> None:
        if not self.has_started.is_set():
            self.has_started.set()
            wait_for(self._condition)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("is_patient", [True, False], ids=["long", "only briefly"])
def test_prompts_wait_for_a_call_that_starts(
    is_patient: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()
    held = HeldStreamer(num_callers if is_patient else has_ended.is_set)
    paged(model, 0)
    if is_patient:
        monkeypatch.setattr("hf_paged.overlap.MAX_PATIENCE", 30.0)

    def first() -> torch.Tensor:
        held.has_started.wait(30)
        output = paged(model, 0)
        has_ended.set()
        return output

    with forwards(model) as shapes:
        paged(model, 0)  # the replaced forward is checked
        shapes.clear()
        found = in_threads(first, functools.partial(paged, model, 1, streamer=held))
    both = prompt(0).numel() + prompt(1).numel()
    assert shapes[0] == (1, both if is_patient else prompt(0).numel())
    assert_same(model, plain(model, (0, 1)), found)


@pytest.mark.slow_cases("during a step")
@pytest.mark.parametrize("when", ["during a step", "later"])
def test_no_call_waits_for_one_that_samples(
    when: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor of the first waits until the second has ended, which joins during its step and
    takes the next, or later."""
    joins, ended, compute = threading.Event(), threading.Event(), StepLoop.compute
    paged(model, 0)

    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:
        ready = compute(self, *args, **kwargs)
        if not joins.is_set():
            joins.set()
            until_callers(2)()
            time.sleep(0.2)  # until it waits for the end of the step
        return ready

    def second() -> torch.Tensor:
        wait_for(joins.is_set if when == "during a step" else num_callers)
        output = paged(model, 1)
        ended.set()
        return output

    if when == "during a step":
        monkeypatch.setattr(StepLoop, "compute", computed)
        monkeypatch.setattr("hf_paged.overlap.POLL_SECONDS", 100)
    number = 0 if when == "during a step" else 2
    first = functools.partial(paged, model, 0, at_token(number, lambda: wait_for(ended.is_set)))
    assert_same(model, plain(model, (0, 1)), in_threads(first, second))


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("name", ["_end_step", "_step"])
def test_calls_go_on_after_a_step_for_all_that_failed_at_its_end(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str, is_before: bool
) -> None:
    change, failed = getattr(SharedLoop, name), []

    def changed(self: SharedLoop, *args: Any) -> Any:
        callers = self._callers.values()
        fails = not failed and [each.sampling_since for each in callers] == [None] * 3
        if fails:
            failed.append(True)
        result = None if fails and is_before else change(self, *args)
        if fails:
            raise MemoryError("on purpose")
        return result

    monkeypatch.setattr(SharedLoop, name, changed)
    jobs = [or_error(job, MemoryError) for job in calls(model, range(3))]
    for _ in range(50):  # a thread may begin after another's call has ended
        found = in_threads(*jobs)
        if failed:
            break
    assert failed, "no step was for all calls"
    assert sum(tokens is None for tokens in found) == 1
    assert_same(model, plain(model, range(3)), found)


def test_a_recovery_in_another_thread_waits_until_logits_are_delivered(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops, deliver, compute = {}, Ledger.deliver, StepLoop.compute

    def computed(self: StepLoop, *args: Any) -> Any:
        loops[self.ledger] = self
        return compute(self, *args)

    def delivered(self: Ledger, *args: Any) -> None:
        other = threading.Thread(target=loops[self].recover)
        other.start()
        other.join(timeout=0.02)
        deliver(self, *args)

    def slowly(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)  # longer than other callers wait
        return scores

    expected = plain(model, (0, 1))
    monkeypatch.setattr(StepLoop, "compute", computed)
    monkeypatch.setattr(Ledger, "deliver", delivered)
    found = in_threads(lambda: paged(model, 0, slowly), *calls(model, [1]))
    assert_same(model, expected, found)


def test_a_call_runs_by_its_own_config(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make, choose = [], batch_call.make_loop, candidate.choose_layout

    def choosing(*args: Any) -> Any:
        monkeypatch.setattr(candidate, "choose_layout", choose)
        in_threads(lambda: paged(model, 1))
        return choose(*args)

    def making(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(candidate, "choose_layout", choosing)
    monkeypatch.setattr(batch_call, "make_loop", making)
    paged(model, 0, **paged_with(max_num_batched_tokens=7, prefix_caching=False, capture=False))
    other, own = made[0], made[-1]
    assert own.scheduler.max_num_batched_tokens == 7 and not own.blocks.prefix_caching
    recorders = [loop.executor.runner.recorder is not None for loop in (other, own)]
    assert recorders == [records_on_cpu(), False], "the other call may record"


@pytest.mark.slow
def test_a_call_within_a_processor_and_within_a_forward(model: Any) -> None:
    inner = []

    def call() -> None:
        inner.append(paged(model, 1))

    found = [paged(model, 0, at_token(2, call))]
    with before_forwards(model, once(lambda ids: True, call)):
        found.append(paged(model, 0))
    assert_same(model, plain(model, (0, 0, 1, 1)), found + inner)


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, None), ({"prefill_chunk_size": 64}, "of 8 are free")],
    ids=["engine", "transformers' own loop"],
)
def test_a_call_that_can_never_fit_is_refused_beside_others(
    options: dict[str, Any], message: str | None, model: Any
) -> None:
    given = {**FEW, **options}
    job = functools.partial(paged, model, 5, **exactly(60), **given)
    refused = raises(hf_paged.OutOfBlocksError, message, job)
    *found, _ = in_threads(*calls(model, (1, 2), **given), refused)
    assert_same(model, plain(model, (1, 2)), found)


@pytest.mark.slow
def test_a_returned_cache_is_of_its_call_alone(model: Any) -> None:
    def again(outputs: list[Any]) -> list[torch.Tensor]:
        more = dict(max_new_tokens=4, do_sample=False)
        caches = [(each.sequences, each.past_key_values) for each in outputs]
        return [model.generate(ids, past_key_values=cache, **more) for ids, cache in caches]

    expected = again(plain(model, range(4), **KEPT))
    assert_same(model, expected, again(in_threads(*calls(model, range(4), **KEPT))))


@pytest.mark.slow
def test_models_are_held_by_their_calls_alone() -> None:
    def run() -> weakref.ref[PreTrainedModel]:
        model, copies = models.build("llama"), []

        def clone() -> None:
            copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])

        paged(model, 0, at_token(2, clone))
        for twin in copies:
            assert torch.equal(paged(twin, 0), generate(model, 0))
        in_threads(*calls(model, range(3)))
        return weakref.ref(model)

    gone = run()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_goes_on_with_the_call_that_forked(model: Any) -> None:
    expected, stop = plain(model, range(3)), threading.Event()
    codes, is_child = [], []

    def fork() -> None:
        child = os.fork()
        is_child.append(child == 0)
        if child:
            codes.append(os.waitpid(child, 0)[1])

    def endless() -> None:
        while not stop.is_set():
            assert torch.equal(paged(model, 1), expected[1])

    def forking() -> None:
        try:
            torch.set_num_threads(1)  # a child has no other threads of OpenMP
            for _ in range(5):
                is_child.clear()
                found = paged(model, 0, at_token(3, fork))
                if is_child[0]:
                    is_right = torch.equal(found, expected[0])
                    is_right = is_right and torch.equal(paged(model, 2), expected[2])
                    os._exit(0 if is_right else 1)
        finally:
            if True in is_child:
                os._exit(2)
            stop.set()

    in_threads(endless, forking)
    assert codes == [0] * 5
    assert_clean(model)


WAYS = {
    "engine": {},
    "rows that ended keep their blocks": KEPT,
    "transformers' own loop": {"prefill_chunk_size": 64},
    "beams in transformers' own loop": {"num_beams": 2, "output_hidden_states": True, **KEPT},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "num_calls"),
    [
        *(([way], 16) for way in WAYS),
        ([*WAYS], 1),
        ([*WAYS], 16),
        (["t5"], 1),
        *((["t5"], 32), (["bart"], 32)),
    ],
    ids=str,
)
def test_calls_of_any_route_wait_for_one_another(ways: list[str], num_calls: int) -> None:
    """Eight threads make calls of eight kinds; a call that needs blocks waits, with no error. No
    two of them hold half of the blocks each, and wait for the other half; the blocks of encoder
    outputs come back, too."""
    name = "llama" if ways[0] in WAYS else ways[0]
    model = models.build(name)

    def run(number: int, **few: Any) -> torch.Tensor:
        if name != "llama":
            options = dict(max_new_tokens=4 + 3 * number, min_new_tokens=4, do_sample=False)
            return model.generate(
                **models.prompt(name, 1, 8 + 6 * number, number), **options, **few
            )
        options = {**exactly(20), **WAYS[ways[number % len(ways)]], **few}
        found = generate(model, 2 + number % 3, **options)
        return found if isinstance(found, torch.Tensor) else found.sequences

    expected = [run(number) for number in range(8)]

    def job(first: int) -> None:
        for call_number in range(num_calls):
            number = (first + 3 * call_number) % 8
            few = paged_with(num_blocks=12)
            assert torch.equal(run(number, **few), expected[number]), number

    in_threads(*(functools.partial(job, number) for number in range(8)))
    assert_clean(model)
