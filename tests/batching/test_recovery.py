"""After an exception in the middle of bookkeeping, the engine goes on with the tokens that it would
have had."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.ledger import Ledger
from hf_paged.batching.scheduling.queue import RequestQueue
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.memory import PagedMemory
from hf_paged.generation import batch_call
from tests.support import models, scenarios
from tests.support.checks import assert_pool_empty
from tests.support.engine_helpers import (
    assert_drained,
    assert_lone,
    engine_of,
    prompts,
    run_all,
    steps,
    told_by,
)

SHORT = {"do_sample": False, "max_new_tokens": 8}


def memory_error() -> Any:
    return pytest.raises(MemoryError, match="on purpose")


def fail(
    patch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    number: int = 1,
    is_before: bool = False,
) -> None:
    """Makes the method raise `MemoryError` once, after its call of this number (from 1) has done
    its work, or in its place."""
    change, calls = getattr(owner, name), itertools.count(1)

    def changed(*args: Any, **options: Any) -> Any:
        fails = next(calls) == number
        result = None if fails and is_before else change(*args, **options)
        if fails:
            raise MemoryError("on purpose")
        return result

    patch.setattr(owner, name, changed)


@pytest.fixture(scope="module")
def case() -> Iterator[scenarios.Engine]:
    made = scenarios.build_engine_in_a_tight_pool("swap")
    made.injected = (MemoryError,)
    yield made
    hf_paged.free(made.model)


def places(*places: tuple[type, str]) -> Any:
    ids = [f"{owner.__name__}.{name}" for owner, name in places]
    return pytest.mark.parametrize(("owner", "name"), places, ids=ids)


@pytest.mark.slow_cases(but=["PagedMemory.*-behind", "Scheduler.*-before"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
@places((PagedMemory, "recover"), (BlockPool, "recount"), (Scheduler, "recover"))
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
        with monkeypatch.context() as patch, memory_error():
            fail(patch, owner, name, is_before=is_before)
            fail(patch, *change, 2)
            case.run()
        gc.collect()
        case.check()


def test_blocks_of_a_lost_sequence_are_free_again() -> None:
    cache = hf_paged.PagedCache(models.get("llama").config)
    manager = cache.rows.manager
    kept, lost = manager.new(), manager.new()
    assert manager.append(kept, 40) and manager.append(lost, 40)
    del lost
    cache.memory.check_integrity()
    assert cache.stats().used_blocks == len(kept.tables[0].block_ids)


def test_an_engine_goes_on_after_an_exception_behind_a_change_of_adapters_in_folders(
    tmp_path: Path,
) -> None:
    peft_models = pytest.importorskip("tests.support.peft_models")
    from hf_paged.adapters.pages import AdapterPages, _ResidentAdapter

    tuned, rows = peft_models.many(3, r=8), list(enumerate(prompts(9, 14, 5, 20)))
    expected = {
        str(i): peft_models.lone_with(tuned, f"a{i % 3}", text, SHORT)[0] for i, text in rows
    }
    folders = peft_models.saved(tuned, tmp_path)
    config = PagedConfig(block_size=8, num_blocks=14, max_num_seqs=2, storage="blocks")
    with PagedEngine(models.build("llama"), config) as engine:

        def add() -> None:
            for i, text in rows:
                engine.add_request(text, SHORT, request_id=str(i), adapter=folders[i % 3])

        add()
        run_all(engine)
        assert engine.stats().num_adapter_evictions, "the pool is not small enough"
        changes = [(AdapterPages, name) for name in ("pin", "unpin", "_allocate")]
        changes += [(AdapterPages, "_evict_adapter_of"), (_ResidentAdapter, "hold")]
        for (owner, name), number in itertools.product(changes, (1, 2)):
            results = {}
            add()
            with pytest.MonkeyPatch.context() as patch, memory_error():
                fail(patch, owner, name, number)
                run_all(engine, results)
            run_all(engine, results)
            assert {i: result.token_ids for i, result in results.items()} == expected
            assert_drained(engine)


@places((BlockManager, "take"), (BlockPool, "allocate"), (BlockTable, "append"))
def test_a_call_leaves_no_blocks_that_failed_while_it_completed_the_returned_cache(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (11, 4))
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    first = int(model.generate(**inputs, **options).sequences[0, 12])
    schedule = batch_call._schedule

    def scheduled(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            fail(patch, owner, name)
            return schedule(*args)

    with monkeypatch.context() as patch, memory_error():
        patch.setattr(batch_call, "_schedule", scheduled)
        model.generate(**inputs, **options, **models.PAGED, eos_token_id=first, pad_token_id=0)
    assert_pool_empty(model)


@pytest.mark.parametrize(
    ("owner", "name", "how"),
    [
        (RequestQueue, "remove", "weights_update"),
        (BlockPool, "drop", "weights_update"),
        (BlockPool, "drop", "reset_prefix_cache"),
    ],
)
def test_an_engine_goes_on_after_an_exception_while_its_prefixes_are_dropped(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, how: str
) -> None:
    model, texts = models.build("llama"), prompts(20, 14)
    with PagedEngine(model, PagedConfig(block_size=8, storage="blocks")) as engine:
        engine.generate(texts, SHORT)
        for text in texts:
            engine.add_request(text, SHORT)
        engine.step()
        with monkeypatch.context() as patch, memory_error():
            if how == "reset_prefix_cache":
                fail(patch, owner, name)
                engine.reset_prefix_cache()
            with engine.weights_update(), torch.no_grad():
                model.lm_head.weight.mul_(1.5)
                model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
                fail(patch, owner, name)
        engine.check_integrity()
        assert all(result.error is None for result in run_all(engine).values())
        assert_lone(engine, texts, engine.generate(texts, SHORT), SHORT)
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

    with engine_of() as engine:
        engine._core.pending_outputs = FailsOnce()
        name = engine.add_request([5, 6, 7], SHORT)
        with memory_error():
            engine.step()
        outputs = steps(engine)
    assert told_by(outputs)[name] == {0: outputs[-1].result.token_ids}
