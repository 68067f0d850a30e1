"""After an exception in the middle of bookkeeping, the engine goes on with the tokens that it would
have had."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.execution.executor import Executor
from hf_paged.batching.ledger import Ledger
from hf_paged.batching.loop import StepLoop
from hf_paged.batching.request import Request
from hf_paged.batching.scheduling.queue import RequestQueue
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.batching.shared_loop import SharedLoop
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.prefix_index import PrefixIndex
from hf_paged.cache.swap import BlockSwapper
from hf_paged.generation import batch_call
from tests.support import models, scenarios
from tests.support.engine_helpers import (
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)

CHANGES: list[tuple[type, str]] = [
    *((BlockPool, name) for name in ("allocate", "release", "keep")),
    (BlockTable, "append"),
    *((BlockManager, name) for name in ("take", "register")),
    (PrefixIndex, "add"),
    (BlockSwapper, "swap_in"),
    (RequestQueue, "remove"),
    (Scheduler, "_schedule"),
    *((Ledger, name) for name in ("append", "apply", "close")),
    *((StepLoop, name) for name in ("_add", "_compute", "compute")),
    (Request, "fork"),
]
IDS = [f"{owner.__name__}.{name}" for owner, name in CHANGES]


def fail_after(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    number: int,
    error: type[Exception] = MemoryError,
) -> None:
    """Makes the method raise this error once, after its call of this number (from 1) has done its
    work."""
    change, calls = getattr(owner, name), iter(range(1, 1 << 60))

    def changed(*args: Any, **options: Any) -> Any:
        result = change(*args, **options)
        if next(calls) == number:
            raise error("on purpose")
        return result

    monkeypatch.setattr(owner, name, changed)


def fail_before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Makes the method raise `MemoryError` when it is first called, in place of its work."""
    change, calls = getattr(owner, name), iter(range(1 << 60))

    def changed(*args: Any, **options: Any) -> Any:
        if next(calls) == 0:
            raise MemoryError("on purpose")
        return change(*args, **options)

    monkeypatch.setattr(owner, name, changed)


@pytest.fixture(scope="module")
def case() -> Iterator[scenarios.Engine]:
    made = scenarios.build_engine_in_a_tight_pool("swap")
    made.injected = (MemoryError,)
    yield made
    hf_paged.free(made.model)


@pytest.mark.slow_cases(
    but=["Ledger.append", "Ledger.apply", "Ledger.close", "RequestQueue.remove"]
)
@pytest.mark.parametrize(("owner", "name"), CHANGES, ids=IDS)
def test_an_engine_goes_on_after_an_exception_behind_any_change(
    case: scenarios.Engine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    for number in (1, 4):
        with monkeypatch.context() as patch:
            fail_after(patch, owner, name, number)
            try:
                case.run()
            except MemoryError as error:
                error.__traceback__ = None
            else:
                assert number > 1, "the engine has not called it"
        gc.collect()
        case.check()


RECOVERIES = [(PagedMemory, "recover"), (BlockPool, "recount"), (Scheduler, "recover")]


@pytest.mark.slow_cases(but=["PagedMemory-*-behind", "Scheduler-*-before"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("owner", "name"), RECOVERIES, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_engine_goes_on_after_a_recovery_that_failed(
    case: scenarios.Engine,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    is_before: bool,
) -> None:
    for change in [
        (Scheduler, "_schedule"),
        (BlockTable, "append"),
        (BlockManager, "fork"),
        (Ledger, "_finish"),
    ]:
        with monkeypatch.context() as patch:
            if is_before:
                fail_before(patch, owner, name)
            else:
                fail_after(patch, owner, name, 1)
            fail_after(patch, *change, 2)
            with pytest.raises(MemoryError, match="on purpose"):
                case.run()
        gc.collect()
        case.check()


@pytest.mark.parametrize("error", [MemoryError, ValueError, IndexError])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockPool, "allocate"),
        (BlockPool, "grow"),
        (BlockPool, "release"),
        (BlockTable, "free"),
        (BlockManager, "extend"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_call_that_failed_behind_a_change_leaves_no_blocks(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: type[Exception]
) -> None:
    model, ids = models.get("llama"), models.token_ids(1, 9, seed=1)
    cache = hf_paged.PagedCache(model.config)
    with monkeypatch.context() as patch, pytest.raises(error, match="on purpose"):
        fail_after(patch, owner, name, 1, error)
        for _ in range(2):
            model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        cache.reorder_cache(torch.tensor([0]))
    cache.reset()
    cache.memory.check_integrity()
    assert cache.stats().used_blocks == 0


def test_blocks_of_a_lost_sequence_are_free_again() -> None:
    cache = hf_paged.PagedCache(models.get("llama").config)
    manager = cache.rows.manager
    kept, lost = manager.new(), manager.new()
    assert manager.append(kept, 40)
    assert manager.append(lost, 40)
    del lost
    cache.memory.check_integrity()
    assert cache.stats().used_blocks == len(kept.tables[0].block_ids)


@pytest.mark.parametrize("name", ["pin", "unpin", "_allocate", "_hold", "_evict_adapter_of"])
def test_an_engine_goes_on_after_an_exception_behind_a_change_of_adapters_in_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("peft")
    from hf_paged.adapters.pages import AdapterPages
    from tests.support.peft_models import lone_with, many, saved

    options = {"do_sample": False, "max_new_tokens": 6}
    tuned, texts = many(3, r=8), prompts(9, 14, 5, 20)
    expected = [
        lone_with(tuned, f"a{number % 3}", text, options) for number, text in enumerate(texts)
    ]
    folders = saved(tuned, tmp_path)
    config = PagedConfig(block_size=8, num_blocks=14, max_num_seqs=2, storage="blocks")
    with PagedEngine(models.build("llama"), config) as engine:

        def add() -> None:
            for number, text in enumerate(texts):
                engine.add_request(
                    text, options, request_id=str(number), adapter=folders[number % 3]
                )

        add()
        run_all(engine)
        assert engine.stats().num_adapter_evictions, "the pool is not small enough"
        for number in (1, 2):
            results: dict[str, Any] = {}
            add()
            with monkeypatch.context() as patch, pytest.raises(MemoryError, match="on purpose"):
                fail_after(patch, AdapterPages, name, number)
                run_all(engine, results)
            run_all(engine, results)
            assert [[results[str(i)].token_ids] for i in range(4)] == expected
            assert_drained(engine)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_draft_ends_with_its_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A step that fails behind its forward leaves no draft to the next one, which computes other
    tokens."""
    options = {"do_sample": True, "temperature": 0.001, "max_new_tokens": 24}
    drafts: list[Any] = []
    fetch = Executor.fetch_while_running_ahead

    def failing(self: Executor, ready: Any) -> Any:
        drafts.extend(own.decoding.draft for own, _ in ready if own.decoding.draft is not None)
        if len(drafts) == number:
            drafts.append(None)
            raise MemoryError("on purpose")
        return fetch(self, ready)

    config = PagedConfig(block_size=8, speculation="ngram")
    with PagedEngine(models.get("llama"), config) as engine:
        text = [5, 6, 7, 8] * 2
        expected = engine.generate([text], options)[0].token_ids  # to be drafted from now on
        monkeypatch.setattr(Executor, "fetch_while_running_ahead", failing)
        engine.add_request(text, options, request_id="a")
        results: dict[str, Any] = {}
        with pytest.raises(MemoryError, match="on purpose"):
            run_all(engine, results)
        run_all(engine, results)
        assert results["a"].error is None and results["a"].token_ids == expected
        assert_drained(engine)


def generate_in_threads(model: Any, count: int, **own: Any) -> list[Any]:
    """`generate` in threads that start together, the first one with the options `own`; what each
    returns or raises."""
    begin, found = threading.Barrier(count), list[Any]([None] * count)

    def call(number: int) -> None:
        begin.wait()
        try:
            options = {"do_sample": False, "max_new_tokens": 16, **(own if number == 0 else {})}
            found[number] = model.generate(
                models.token_ids(1, 9 + number, seed=number), **options, **models.PAGED
            )
        except BaseException as error:
            error.__traceback__ = None
            found[number] = error

    threads = [
        threading.Thread(target=call, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a call waits for ever"
    return found


def lone_calls(model: Any, count: int) -> list[torch.Tensor]:
    options = {"do_sample": False, "max_new_tokens": 16}
    return [
        model.generate(models.token_ids(1, 9 + number, seed=number), **options)
        for number in range(count)
    ]


def slowly(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    time.sleep(0.06)  # longer than other callers wait
    return scores


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("name", ["_end_step", "_step"])
def test_calls_go_on_after_a_step_for_all_that_failed_at_its_end(
    monkeypatch: pytest.MonkeyPatch, name: str, is_before: bool
) -> None:
    model = models.get("llama")
    expected, change, failed = lone_calls(model, 3), getattr(SharedLoop, name), list[int]()

    def changed(self: SharedLoop, *args: Any) -> Any:
        fails = (
            not failed
            and len(self._callers) == 3
            and all(each.sampling_since is None for each in self._callers.values())
        )
        if fails:
            failed.append(threading.get_ident())
        if fails and is_before:
            raise MemoryError("on purpose")
        result = change(self, *args)
        if fails:
            raise MemoryError("on purpose")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(SharedLoop, name, changed)
        for _ in range(50):  # a thread may begin after another's call has ended
            found = generate_in_threads(model, 3)
            if failed:
                break
    assert failed, "no step was for all calls"
    wrong = [
        each
        for each, tokens in zip(found, expected)
        if isinstance(each, Exception) or not torch.equal(each, tokens)
    ]
    assert [str(each) for each in wrong] == ["on purpose"]
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0


def test_a_recovery_in_another_thread_waits_until_logits_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.get("llama")
    expected, deliver, compute = lone_calls(model, 2), Ledger.deliver, StepLoop.compute
    loops: dict[Ledger, StepLoop] = {}

    def computed(self: StepLoop, *args: Any) -> Any:
        loops[self.ledger] = self
        return compute(self, *args)

    def delivered(self: Ledger, *args: Any) -> None:
        other = threading.Thread(target=loops[self].recover)
        other.start()
        other.join(timeout=0.02)
        deliver(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StepLoop, "compute", computed)
        patch.setattr(Ledger, "deliver", delivered)
        found = generate_in_threads(model, 2, logits_processor=[slowly])
    for each, tokens in zip(found, expected):
        assert not isinstance(each, Exception), each
        assert torch.equal(each, tokens)
    hf_paged.check_integrity(model)


@pytest.mark.parametrize(
    ("owner", "name"), [(BlockManager, "take"), (BlockPool, "allocate"), (BlockTable, "append")]
)
def test_a_call_leaves_no_blocks_that_failed_while_it_completed_the_returned_cache(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (11, 4))
    options = {
        "do_sample": False,
        "max_new_tokens": 40,
        "return_dict_in_generate": True,
        **models.PAGED,
    }
    first = int(model.generate(**inputs, **options).sequences[0, 12])
    schedule = batch_call._schedule

    def scheduled(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            fail_after(patch, owner, name, 1)
            return schedule(*args)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="on purpose"):
        patch.setattr(batch_call, "_schedule", scheduled)
        model.generate(**inputs, **options, eos_token_id=first, pad_token_id=0)
    gc.collect()
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [(RequestQueue, "remove"), (BlockPool, "drop")],
)
def test_an_engine_goes_on_after_an_exception_while_weights_change(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    model, texts, options = (
        models.build("llama"),
        prompts(20, 14),
        {"do_sample": False, "max_new_tokens": 8},
    )
    with PagedEngine(model, PagedConfig(block_size=8, storage="blocks")) as engine:
        engine.generate(texts, options)
        for number, text in enumerate(texts):
            engine.add_request(text, options, request_id=str(number))
        engine.step()
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="on purpose"):
            with engine.weights_update(), torch.no_grad():
                model.lm_head.weight.mul_(1.5)
                model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
                fail_after(patch, owner, name, 1)
        engine.check_integrity()
        assert all(result.error is None for result in run_all(engine).values())
        expected = [lone_run(model, text, options) for text in texts]
        for tokens, result in zip(expected, engine.generate(texts, options)):
            assert_same_as_lone(tokens, result, options, "the weights are other ones")
        assert_drained(engine)


def test_an_engine_goes_on_after_an_exception_while_its_prefix_cache_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts, options = (
        models.get("llama"),
        prompts(20, 14),
        {"do_sample": False, "max_new_tokens": 8},
    )
    with PagedEngine(model, PagedConfig(block_size=8, storage="blocks")) as engine:
        before = engine.generate(texts, options)
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="on purpose"):
            fail_after(patch, BlockPool, "drop", 1)
            engine.reset_prefix_cache()
        engine.check_integrity()
        assert [each.token_ids for each in engine.generate(texts, options)] == [
            each.token_ids for each in before
        ]
        assert_drained(engine)


@pytest.mark.parametrize("has_cleared", [False, True])
def test_outputs_of_a_step_that_cannot_return_them_are_returned_once(has_cleared: bool) -> None:
    class FailsOnce(list[Any]):
        fails = True

        def clear(self) -> None:
            fails, self.fails = self.fails, False
            if has_cleared or not fails:
                super().clear()
            if fails:
                raise MemoryError("on purpose")

    model = models.get("llama")
    with PagedEngine(model) as engine:
        engine._core.pending_outputs = FailsOnce()
        engine.add_request(
            [5, 6, 7], {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1}, request_id="a"
        )
        with pytest.raises(MemoryError):
            engine.step()
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
    tokens = [token for output in outputs for token in output.new_tokens.values()]
    assert tokens == outputs[-1].result.token_ids and len(tokens) == 4
