"""After an exception in the middle of bookkeeping, or where memory is refused, the engine goes on
with the tokens that it would have had."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine
from hf_paged.batching import engine_loop
from hf_paged.batching.ledger import Ledger
from hf_paged.batching.scheduling.queue import RequestQueue
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool, BlockTable
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.generation import batch_call
from tests.support import models, scenarios
from tests.support.checks import assert_pool_empty
from tests.support.engine_helpers import (
    Asked,
    assert_drained,
    assert_lone,
    assert_same_as_lone,
    engine_of,
    lone_run,
    prompts,
    run_all,
    steps,
    told_by,
)

SHORT = {"do_sample": False, "max_new_tokens": 8}
ENDLESS: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
BRIEF = {**ENDLESS, "max_new_tokens": 6}


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
        (Scheduler, "_continue_running"),
        (BlockTable, "append"),
        (SequenceBlocks, "fork"),
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
    assert kept.append(40) and lost.append(40)
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


# --------------------- requests that never fit, which shows only when an allocation fails

# of 8 tokens: keys and values of 2 heads of 16 float32 in 2 layers
BLOCK_BYTES = 8 * 2 * 2 * 16 * 4 * 2


@pytest.mark.parametrize("num_blocks", [None, 1000])
def test_one_that_never_fits_fails_soon_and_alone(
    num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams recompute their shared tokens in each attempt: the second attempt without progress ends
    them."""
    # free, whatever the machine
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 5 * BLOCK_BYTES + 64)
    model, prompt = models.get("llama"), prompts(5)[0]
    config = PagedConfig(block_size=8, num_blocks=num_blocks, memory_fraction=1.0)
    modes = {"long": {"max_new_tokens": 200}, "beams": {"max_new_tokens": 200, "num_beams": 3}}
    with PagedEngine(model, config) as engine:
        for name, mode in modes.items():
            engine.add_request(prompt, {**ENDLESS, **mode}, request_id=name)
        engine.add_request(prompt, BRIEF, request_id="short")
        results = run_all(engine)
        assert engine.stats().num_steps < 600
        for name in modes:
            error = results[name].error
            assert isinstance(error, OutOfBlocksError) and "memory_fraction" in str(error)
        assert_same_as_lone(lone_run(model, prompt, BRIEF), results["short"], ENDLESS, "")
        assert_drained(engine)


def test_memory_that_is_refused_while_the_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget: the allocator refuses more than 6 blocks. That is a shortage like others,
    which preempts; the error of a request that needs more names no number of blocks."""
    make = kv_blocks._empty

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = make(*args, **kwargs)
        if found.nbytes > 6 * 8 * 4 * 16 * 4:
            raise torch.OutOfMemoryError("no more of it")
        return found

    # otherwise storage is reserved at once, and never grows
    monkeypatch.setattr(engine_loop, "UNLIMITED_BLOCKS", 1)
    model, prompt = models.get("llama"), prompts(5)[0]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.generate([prompt], BRIEF)
        monkeypatch.setattr(kv_blocks, "_empty", refuse)
        Asked(engine, prompts(9, 20, 14), {**ENDLESS, "max_new_tokens": 20}).check()
        assert engine.stats().num_preemptions > 0
        (result,) = engine.generate([prompt], {**ENDLESS, "max_new_tokens": 400})
        assert result.error is not None and "922337203685477" not in str(result.error)
        assert engine.stats().num_steps < 600
        assert_drained(engine)
