"""A byte limit on all pools: idle pools shrink, no pool exceeds it, and requests that fit alone do
not fail."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache import budget as budgets
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.cache.memory import PagedMemory
from hf_paged.model import registry
from tests.support import models
from tests.support.engine_helpers import assert_drained, lone_run, prompts, run_all

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


def held(*owners: Any) -> int:
    """Bytes of the pools of models and engines."""
    return sum(
        (
            each.memory.stats()
            if isinstance(each, hf_paged.PagedEngine)
            else hf_paged.memory_stats(each)
        ).held_bytes
        for each in owners
    )


class Watch:
    """Peak of their joint bytes after each growth of a pool and creation of a layer."""

    def __init__(self, owners: list[Any], monkeypatch: Any) -> None:
        self.owners, self.most = owners, 0
        for name in ("ensure_free", "layer"):
            monkeypatch.setattr(GroupMemory, name, self._looking(getattr(GroupMemory, name)))

    def _looking(self, method: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            found = method(*args, **options)
            self.look()
            return found

        return wrapped

    def look(self) -> None:
        self.most = max(self.most, held(*self.owners))


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "1GiB"])
def test_a_budget_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the budget is .*None or a whole number of bytes"):
        hf_paged.budget(value)
    assert budgets.limit() is None


def burst(count: int, limit: int, monkeypatch: Any, seed: int = 0) -> None:
    """Two models in turns, calls and engines, each of which fills most of the budget."""
    all_models = [models.build("llama"), models.build("gemma2")]
    texts = prompts(60, 90, 40, 120, 75)
    expected = {
        (i, j): lone_run(m, t, GREEDY)[0]
        for i, m in enumerate(all_models)
        for j, t in enumerate(texts)
    }
    engines = [hf_paged.PagedEngine(model, {"block_size": SIZE}) for model in all_models]
    watch, draw = Watch([*all_models, *engines], monkeypatch), random.Random(seed)
    hf_paged.budget(limit)
    for number in range(count):
        which = number % 2
        model, engine = all_models[which], engines[which]
        if draw.random() < 0.5:
            chosen = [draw.randrange(len(texts)) for _ in range(draw.randrange(1, 8))]
            for place, each in enumerate(chosen):
                engine.add_request(texts[each], GREEDY, request_id=f"{place}")
            results = run_all(engine)
            for place, each in enumerate(chosen):
                result = results[f"{place}"]
                assert result.error is None, f"round {number}: {result.error!r}"
                assert result.token_ids == expected[which, each], f"round {number}"
            assert_drained(engine)
        else:
            each = draw.randrange(len(texts))
            ids = torch.tensor([texts[each]] * draw.randrange(1, 4))
            found = model.generate(ids, **GREEDY, **paged())
            assert found[:, ids.shape[1] :].tolist() == [expected[which, each]] * len(ids), (
                f"round {number}"
            )
            hf_paged.check_integrity(model)
        watch.look()
        assert watch.most <= limit, f"round {number}: {watch.most:,} bytes of {limit:,}"
    assert watch.most > 0.9 * limit, "the limit was never near"


@pytest.mark.slow
def test_two_models_in_turns(monkeypatch: Any) -> None:
    burst(12, 40 * BLOCK, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_two_models_in_two_hundred_turns(seed: int, monkeypatch: Any) -> None:
    burst(200, 40 * BLOCK, monkeypatch, seed)


@pytest.mark.slow
def test_a_first_step_over_the_budget_does_not_take_its_memory_on_the_next_try(
    monkeypatch: Any,
) -> None:
    # two groups, whose blocks' bytes are unknown until a layer of each is written
    model = models.build("gemma2")
    texts = prompts(120, 60, 90, 75)
    engine = hf_paged.PagedEngine(model, {"block_size": SIZE})
    watch = Watch([engine], monkeypatch)
    hf_paged.budget(40 * BLOCK)
    for number, text in enumerate(texts):
        engine.add_request(text, GREEDY, request_id=f"{number}")
    results = run_all(engine)
    assert all(result.error is None for result in results.values())
    assert 0 < watch.most <= 40 * BLOCK


def test_an_idle_pool_gives_way_and_the_one_used_last_goes_last() -> None:
    first, second, third = (models.build("llama", seed=seed) for seed in range(3))
    ids = torch.tensor(prompts(200))
    for model in (first, second):
        model.generate(ids, **GREEDY, **paged())
    blocks = held(first) // BLOCK
    assert held(first) == held(second) == blocks * BLOCK
    hf_paged.budget(int(2.5 * blocks) * BLOCK)
    assert held(first) == held(second) == blocks * BLOCK
    third.generate(ids, **GREEDY, **paged())
    assert held(first) == 0 and held(second) and held(third)
    hf_paged.budget(blocks * BLOCK)  # less than in use
    assert held(second) == 0 and held(third) == blocks * BLOCK
    hf_paged.budget(BLOCK)
    assert held(first, second, third) == 0
    assert hf_paged.memory_stats(first).budget_bytes == BLOCK


@pytest.mark.slow
def test_what_does_not_fit_alone_says_so() -> None:
    model = models.build("llama")
    ids = torch.tensor(prompts(200))
    hf_paged.budget(10 * BLOCK)
    words = (
        r"needs 2. blocks of 8 tokens, at most 10 are available: .*`hf_paged.budget`|nothing can be"
        r" .*`hf_paged.budget`"
    )
    for _ in range(2):  # before its blocks' size is known, and after
        with pytest.raises(hf_paged.OutOfBlocksError, match=words):
            model.generate(ids, **GREEDY, **paged())
        hf_paged.check_integrity(model)
        assert held(model) <= 10 * BLOCK
    hf_paged.budget(None)
    model.generate(ids, **GREEDY, **paged())


@pytest.mark.slow
def test_a_pool_in_use_keeps_what_it_has(monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "PATIENCE", 0.2)
    model, other = models.build("llama"), models.build("llama", seed=1)
    (prompt,) = prompts(60)
    hf_paged.budget(20 * BLOCK)
    expected = lone_run(model, prompt, {**GREEDY, "max_new_tokens": 40})[0]
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        engine.add_request(prompt, {**GREEDY, "max_new_tokens": 40}, request_id="0")
        engine.step()
        with pytest.raises(hf_paged.OutOfBlocksError, match="budget"):
            other.generate(torch.tensor(prompts(100)), **GREEDY, **paged())
        assert held(other, engine) <= 20 * BLOCK
        assert run_all(engine)["0"].token_ids == expected
        assert held(other, engine) <= 20 * BLOCK
        other.generate(torch.tensor(prompts(100)), **GREEDY, **paged())  # it is idle now
        assert held(other, engine) <= 20 * BLOCK


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


@pytest.mark.slow
def test_a_cache_of_ones_own_counts(monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "PATIENCE", 0.2)
    model = models.build("llama")
    hf_paged.budget(12 * BLOCK)
    cache = hf_paged.PagedCache(model.config, {"block_size": SIZE})
    with torch.no_grad():
        model(torch.tensor(prompts(80)), past_key_values=cache)
    assert cache.stats().held_bytes == 10 * BLOCK
    with pytest.raises(hf_paged.OutOfBlocksError, match="budget"):
        model.generate(torch.tensor(prompts(80)), **GREEDY, **paged())
    cache.free()
    model.generate(torch.tensor(prompts(80)), **GREEDY, **paged())
    assert cache.stats().held_bytes == 0


@pytest.mark.slow
def test_prefixes_of_a_pool_that_gives_way_stay_in_its_tiers(tmp_path: Any) -> None:
    model, other = models.build("llama"), models.build("llama", seed=1)
    ids = torch.tensor(prompts(160))
    tiers = paged(prefix_tiers=str(tmp_path))
    hf_paged.budget(30 * BLOCK)
    expected = model.generate(ids, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY, **tiers), expected)
        other.generate(ids, **GREEDY, **paged())
        assert held(model) == 0
    assert hf_paged.memory_stats(model).tier_restored_blocks >= 159 // SIZE


@pytest.mark.slow
def test_calls_of_threads_on_two_models_do_not_wait_for_ever() -> None:
    all_models = [models.build("llama"), models.build("llama", seed=1)]
    (prompt,) = prompts(100)
    expected = [lone_run(model, prompt, GREEDY)[0] for model in all_models]
    hf_paged.budget(40 * BLOCK)  # enough for both
    failures: list[Any] = []

    def call(which: int) -> None:
        ids = torch.tensor([prompt])
        for _ in range(10):
            try:
                found = all_models[which].generate(ids, **GREEDY, **paged())[0, 100:].tolist()
                if found != expected[which]:
                    failures.append(found)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=call, args=(which,), daemon=True) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "two pools wait for each other"
    assert not failures
    assert held(*all_models) <= 40 * BLOCK


def test_pools_that_are_gone_do_not_count() -> None:
    model = models.build("llama")
    model.generate(torch.tensor(prompts(100)), **GREEDY, **paged())
    memory = registry._memories[model][1]
    before = sum(pool.charged_bytes for pool in budgets._other_pools(None))
    assert memory.charged_bytes == memory.occupied_bytes > 0
    del memory
    hf_paged.free(model)
    assert sum(pool.charged_bytes for pool in budgets._other_pools(None)) < before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "count"), [("gemma2", 500, 100), ("gemma3", 400, 150)])
def test_a_window_leaves_the_other_layers_what_a_request_needs_alone(
    name: str, length: int, count: int
) -> None:
    """Blocks of chunks that have left the window, and cached blocks, hold no bytes that full layers
    need."""
    model, options = models.build(name), {**GREEDY, "max_new_tokens": count}
    (prompt,), others, limit = prompts(length), prompts(*[40] * 8, seed=1), 40 * BLOCK
    expected = lone_run(model, prompt, options)[0]
    hf_paged.budget(limit)
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        for number, text in enumerate(others):
            engine.add_request(text, GREEDY, request_id=f"{number}")
        results = run_all(engine)
        assert all(result.error is None for result in results.values())
        engine.add_request(prompt, options, request_id="long")
        result = run_all(engine)["long"]
        assert result.error is None and result.token_ids == expected
        assert held(engine) <= limit
        assert_drained(engine)


@pytest.mark.slow
def test_an_assistant_takes_no_memory_that_its_model_needs() -> None:
    model, assistant, limit = models.build("llama"), models.build("llama", seed=3), 26 * BLOCK
    options = {**GREEDY, "max_new_tokens": 40}
    texts = prompts(50, 45, 100)
    expected = [lone_run(model, text, options)[0] for text in texts]
    hf_paged.budget(limit)
    with hf_paged.PagedEngine(model, {"block_size": SIZE}) as engine:
        for chosen in ([0, 1], [2], [1]):
            for each in chosen:
                engine.add_request(
                    texts[each], options, request_id=f"{each}", assistant_model=assistant
                )
            results = run_all(engine)
            for each in chosen:
                assert (
                    results[f"{each}"].error is None
                    and results[f"{each}"].token_ids == expected[each]
                )
            assert held(engine) <= limit
        assert engine.stats().num_drafts
        assert_drained(engine)


@pytest.mark.slow
def test_threads_may_look_while_the_budget_changes_and_pools_are_made() -> None:
    memory, errors, end = PagedMemory(hf_paged.PagedConfig()), [], time.monotonic() + 0.5
    group = memory.group(FULL_ATTENTION)
    group.expect(BLOCK)

    def look() -> None:
        memory.growth_limit(group)
        budgets.left()
        budgets.charge(memory, 1)

    def change() -> None:
        hf_paged.budget(1 << 30)
        hf_paged.budget(None)

    def run(action: Callable[[], Any]) -> None:
        try:
            while time.monotonic() < end:
                action()
        except Exception as error:
            errors.append(error)

    def make() -> list[PagedMemory]:
        return [PagedMemory(hf_paged.PagedConfig()) for _ in range(20)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=run, args=(action,)) for action in (look, look, change, make)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
