"""A byte limit on all pools."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hf_paged
from hf_paged.cache import budget as budgets
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.storage import BlockStorage
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import assert_drained, lone_run, prompts, run_all, tokens_of

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
SIZE = models.BLOCK_SIZE
# bytes of a block of `models.build("llama")`: layers, K and V, heads, dims
BLOCK = 2 * 2 * 2 * 16 * SIZE * 4


@pytest.fixture(autouse=True)
def no_limit_is_left() -> Iterator[None]:
    yield
    hf_paged.budget(None)


def paged(**config: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"block_size": SIZE, **config}}


def call(model: Any, ids: Any, **config: Any) -> torch.Tensor:
    return model.generate(torch.tensor(ids), **GREEDY, **paged(**config))


def held(*owners: Any) -> int:
    """Bytes of the pools of models and engines."""
    return sum(hf_paged.memory_stats(each).held_bytes for each in owners)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The peak of the joint bytes of pools so far, after each growth of a pool and creation of a
    layer, of the owners that were passed first."""
    owners: list[Any] = []
    peak = 0

    def look(*given: Any) -> int:
        nonlocal peak
        owners[:] = given or owners
        peak = max(peak, held(*owners))
        return peak

    def looking(method: Any) -> Any:
        return lambda *args, **options: (method(*args, **options), look())[0]

    for name in ("ensure_free", "layer"):
        monkeypatch.setattr(GroupMemory, name, looking(getattr(GroupMemory, name)))
    return look


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "1GiB"])
def test_a_budget_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the budget is .*None or a whole number of bytes"):
        hf_paged.budget(value)
    assert budgets.limit() is None


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(12, 0), (200, 0), (200, 1)])
def test_two_models_in_turns(count: int, seed: int, most: Callable[..., int]) -> None:
    """Calls and engines, each of which fills most of the budget."""
    both, limit = [models.build("llama"), models.build("gemma2")], 40 * BLOCK
    texts = prompts(60, 90, 40, 120, 75)
    expected = [[lone_run(model, text, GREEDY) for text in texts] for model in both]
    engines = [hf_paged.PagedEngine(model, {"block_size": SIZE}) for model in both]
    most(*both, *engines)
    draw = random.Random(seed)
    hf_paged.budget(limit)
    for number in range(count):
        which = number % 2
        if draw.random() < 0.5:
            chosen = [draw.randrange(len(texts)) for _ in range(draw.randrange(1, 8))]
            results = engines[which].generate([texts[each] for each in chosen], GREEDY)
            found = tokens_of(results)
            assert_drained(engines[which])
        else:
            chosen = [draw.randrange(len(texts))] * draw.randrange(1, 4)
            rows = call(both[which], [texts[each] for each in chosen]).tolist()
            found = [[row[len(texts[chosen[0]]) :]] for row in rows]
            hf_paged.check_integrity(both[which])
        assert found == [expected[which][each] for each in chosen], f"round {number}"
        assert most() <= limit, f"round {number}: {most():,} bytes of {limit:,}"
    assert most() > 0.9 * limit, "the limit was never near"


def test_an_idle_pool_gives_way_and_the_one_used_last_goes_last() -> None:
    first, second, third = (models.build("llama", seed=seed) for seed in range(3))
    ids = prompts(200)
    for model in (first, second):
        call(model, ids)
    blocks = held(first) // BLOCK
    hf_paged.budget(int(2.5 * blocks) * BLOCK)
    assert held(first) == held(second) == blocks * BLOCK
    call(third, ids)
    assert held(first) == 0 and held(second) and held(third)
    hf_paged.budget(blocks * BLOCK)  # less than in use
    assert held(second) == 0 and held(third) == blocks * BLOCK
    hf_paged.budget(BLOCK)
    assert held(first, second, third) == 0
    assert hf_paged.memory_stats(first).budget_bytes == BLOCK


@pytest.mark.slow
def test_what_does_not_fit_alone_says_so() -> None:
    model = models.build("llama")
    hf_paged.budget(10 * BLOCK)
    words = (
        r"needs 2. blocks of 8 tokens, but at most 10 are available: .*`hf_paged.budget`"
        r"|nothing can be .*`hf_paged.budget`"
    )
    for _ in range(2):  # before its blocks' size is known, and after
        with pytest.raises(hf_paged.OutOfBlocksError, match=words):
            call(model, prompts(200))
        hf_paged.check_integrity(model)
        assert held(model) <= 10 * BLOCK
    hf_paged.budget(None)
    call(model, prompts(200))


@pytest.mark.slow
def test_a_pool_in_use_and_a_cache_of_ones_own_keep_what_they_have(monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "PATIENCE", 0.2)
    model, other = models.build("llama"), models.build("llama", seed=1)
    (prompt,), long, options = prompts(60), prompts(100), {**GREEDY, "max_new_tokens": 40}
    expected = lone_run(model, prompt, options)[0]
    hf_paged.budget(20 * BLOCK)
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        engine.add_request(prompt, options, request_id="0")
        engine.step()
        with pytest.raises(hf_paged.OutOfBlocksError, match="budget"):
            call(other, long)
        assert held(other, engine) <= 20 * BLOCK
        assert run_all(engine)["0"].token_ids == expected
        call(other, long)  # it is idle now
        assert held(other, engine) <= 20 * BLOCK
    cache = hf_paged.PagedCache(model.config, {"block_size": SIZE})
    with torch.no_grad():
        model(torch.tensor(prompts(80)), past_key_values=cache)
    assert cache.stats().held_bytes == 10 * BLOCK
    with pytest.raises(hf_paged.OutOfBlocksError, match="budget"):
        call(other, long)
    cache.free()
    call(other, long)
    assert cache.stats().held_bytes == 0


def test_the_check_of_a_new_model_does_not_count() -> None:
    """Otherwise it would be taken for a model that cannot be packed."""
    model, other = models.build("llama"), models.build("llama", seed=1)
    (prompt,) = prompts(60)
    hf_paged.budget(10 * BLOCK)
    with (
        hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine,
        hf_paged.PagedEngine(other) as second,
    ):
        engine.add_request(prompt, {**GREEDY, "max_new_tokens": 12}, request_id="0")
        for _ in range(7):
            engine.step()
        assert held(engine) >= 9 * BLOCK
        second.add_request([5, 6, 7], GREEDY)
        assert second.route is not None and second.route.road == "engine"
        run_all(engine)
        run_all(second)


@pytest.mark.parametrize("reason", ["budget", "memory"])
def test_a_wider_dtype_that_does_not_fit_leaves_the_cache_as_it_was(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = models.build("llama"), torch.tensor(prompts(80))
    cache = hf_paged.PagedCache(model.config, {"block_size": SIZE})
    if reason == "budget":
        hf_paged.budget(12 * BLOCK)
    else:
        monkeypatch.setattr(BlockStorage, "promote", Mock(side_effect=MemoryError))
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        model(ids[:, :-1], past_key_values=cache)
        num_bytes = cache.stats().held_bytes
        model.double()
        with pytest.raises(hf_paged.OutOfBlocksError, match=reason):
            model(ids[:, -1:], past_key_values=cache)
        model.float()
        assert cache.stats().held_bytes == num_bytes
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected)
    cache.free()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "count"), [("gemma2", 500, 100), ("gemma3", 400, 150)])
def test_a_window_leaves_the_other_layers_what_a_request_needs_alone(
    name: str, length: int, count: int
) -> None:
    """Blocks of chunks that have left the window, and cached blocks, hold no bytes that full layers
    need."""
    model, options = models.build(name), {**GREEDY, "max_new_tokens": count}
    (prompt,), others, limit = prompts(length), prompts(*[40] * 8, seed=1), 40 * BLOCK
    expected = lone_run(model, prompt, options)
    hf_paged.budget(limit)
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        tokens_of(engine.generate(others, GREEDY))
        assert tokens_of(engine.generate([prompt], options)) == [expected]
        assert held(engine) <= limit
        assert_drained(engine)


@pytest.mark.slow
def test_threads_may_look_while_the_budget_changes_and_pools_are_made() -> None:
    memory, is_over = PagedMemory(hf_paged.PagedConfig()), threading.Event()
    group = memory.group(FULL_ATTENTION)
    group._expected_bytes = BLOCK

    def look() -> None:
        while not is_over.is_set():
            memory.growth_limit(group)
            budgets.num_uncharged_bytes()
            budgets.charge(memory, 1)

    def change() -> None:
        while not is_over.is_set():
            hf_paged.budget(1 << 30)
            hf_paged.budget(None)

    def make() -> None:
        try:
            for _ in range(200):
                assert [PagedMemory(hf_paged.PagedConfig()) for _ in range(20)]
        finally:
            is_over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(look, look, change, make)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_an_assistant_takes_no_memory_that_its_model_needs() -> None:
    model, assistant, limit = models.build("llama"), models.build("llama", seed=3), 26 * BLOCK
    options, texts = {**GREEDY, "max_new_tokens": 40}, prompts(50, 45, 100)
    hf_paged.budget(limit)
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        for chosen in (texts[:2], texts[2:], texts[1:2]):
            results = engine.generate(chosen, options, assistant_model=assistant)
            assert tokens_of(results) == [lone_run(model, text, options) for text in chosen]
            assert held(engine) <= limit
        assert engine.stats().num_drafts
        assert_drained(engine)
