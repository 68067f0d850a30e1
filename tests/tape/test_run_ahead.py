"""Steps launched before the host has the previous tokens, on the CPU, including launches that prove
useless."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.execution.packed import PackedRunner
from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.memory import PagedMemory
from hf_paged.kernels import cpp
from hf_paged.tape.run_ahead import GraphRunAhead, LaunchedStep
from tests.batching import test_invariance
from tests.batching.test_invariance import Schedule
from tests.batching.test_runner import SIZE
from tests.support import models
from tests.support.engine_helpers import (
    MANY_ENDS,
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.support.graph_helpers import graphs_of, results, use_fake_graphs
from tests.support.pools import PoolGroup, manager_of

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
CONFIG = PagedConfig(block_size=SIZE)

OF_ONE_KIND: list[dict[str, Any]] = [
    {"do_sample": False, "max_new_tokens": 25},
    {"do_sample": False, "max_new_tokens": 6},
    {"do_sample": False, "max_new_tokens": 40, "eos_token_id": MANY_ENDS},
]

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing reads lengths from tensors"
)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Counts the outcomes of steps: `launched`, then `used` whole, `in part` (a row left), `joined`
    or `in vain`."""
    use_fake_graphs(monkeypatch)
    counts: collections.Counter[str] = collections.Counter()
    take, run_ahead = GraphRunAhead.take, PackedRunner.run_ahead

    def counted_take(self: GraphRunAhead, plan: Any) -> Any:
        launched = self._launched
        logits, count = take(self, plan)
        if launched is not None:
            whole = count == len(launched.rows)
            counts[
                "in vain"
                if not count
                else "joined"
                if count < len(plan)
                else "used"
                if whole
                else "in part"
            ] += 1
        return logits, count

    def counted_run(self: PackedRunner, *args: Any) -> Any:
        logits = run_ahead(self, *args)
        counts["launched"] += logits is not None
        return logits

    monkeypatch.setattr(GraphRunAhead, "take", counted_take)
    monkeypatch.setattr(PackedRunner, "run_ahead", counted_run)
    yield counts


def job(prompt: int, new: int, seed: int = 0, **options: Any) -> tuple[list[int], dict[str, Any]]:
    return prompts(prompt, seed=seed)[0], {
        "generation_config": {**GREEDY, "max_new_tokens": new},
        **options,
    }


def check(model: Any, jobs: list[Any], found: list[Any]) -> None:
    for (prompt, options), result in zip(jobs, found):
        assert_same_as_lone(
            lone_run(model, prompt, options["generation_config"]), result, GREEDY, ""
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nearly_every_step_is(name: str, seen: collections.Counter[str]) -> None:
    """Rows enter new blocks at different steps, and end one after the other, as known in
    advance."""
    model, jobs = models.get(name), [job(5, 60, 0), job(9, 48, 1), job(14, 36, 2)]
    with PagedEngine(model, CONFIG) as engine:
        found = results(engine, jobs)
        num_steps = engine.stats().num_steps
        assert_drained(engine)
    check(model, jobs, found)
    # in a new size the first two steps serve its graph
    assert seen["used"] == seen["launched"] >= num_steps - 9 and set(seen) == {"launched", "used"}


@pytest.mark.parametrize("mode", ["greedy_eos", "penalties", "sample", "samples", "sample_warped"])
def test_generate_gives_plain_tokens(mode: str, seen: collections.Counter[str]) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", (26, 4, 17))
    torch.manual_seed(1)
    expected = model.generate(**inputs, **MODES[mode])
    state = torch.random.get_rng_state()
    for _ in range(2):
        torch.manual_seed(1)
        found = model.generate(
            **inputs, **MODES[mode], cache_implementation="paged", cache_config={"block_size": SIZE}
        )
        assert torch.equal(found, expected)
        assert torch.equal(torch.random.get_rng_state(), state)
        hf_paged.check_integrity(model)
    assert seen["used"] > 10 and not seen["in vain"]
    if mode == "greedy_eos":
        assert seen["in part"], "rows end by EOS at different steps"


MANY = (pytest.mark.slow, pytest.mark.full)


@pytest.mark.slow_cases("few")
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param({"llama": 6, "gemma3": 3, "mistral": 1}, id="few"),
        pytest.param({"llama": 25, "gemma3": 25, "mistral": 10}, id="many", marks=MANY),
    ],
)
def test_random_schedules(
    counts: dict[str, int], seen: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join, leave, are cancelled, preempted and swapped while steps are in flight."""
    # rows are preempted
    few = {name: budgets[1:4] for name, budgets in test_invariance.BUDGETS.items()}
    monkeypatch.setattr(test_invariance, "BUDGETS", few)
    monkeypatch.setattr(test_invariance, "OPTIONS", OF_ONE_KIND)
    monkeypatch.setattr(
        test_invariance, "expected", functools.cache(test_invariance.expected.__wrapped__)
    )
    for name, count in counts.items():
        for seed in range(count):
            Schedule(name, seed).run(seen)
    missing = [
        what for what in ("used", "in part", "joined", "swaps", "recomputes") if not seen[what]
    ]
    assert not missing, f"the schedules never had {missing}: {seen}"


class Rewrites(StoppingCriteria):
    """Replaces the newest token by another, at random."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] % 5 == 0:
            input_ids[:, -1] = (input_ids[:, -1] + 7) % 40 + 3
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.slow
def test_a_criterion_chooses_another_token(seen: collections.Counter[str]) -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 2)
    options: dict[str, Any] = {**GREEDY, "max_new_tokens": 70}
    expected = model.generate(**inputs, **options, stopping_criteria=[Rewrites()])
    assert not torch.equal(expected, model.generate(**inputs, **options))
    found = model.generate(**inputs, **options, stopping_criteria=[Rewrites()], **models.PAGED)
    assert torch.equal(found, expected)
    assert seen["in vain"] >= 6 and seen["used"] >= 20


def test_a_returned_cache_holds_what_it_says(seen: collections.Counter[str]) -> None:
    """Ended rows keep no block allocated for a token that was never generated."""
    model, inputs = models.build("llama"), models.padded_prompt("llama", (26, 4, 17))
    options = {**MODES["greedy_eos"], "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    config: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": SIZE}}
    first = model.generate(**inputs, **options, **config)
    assert torch.equal(plain.sequences, first.sequences) and seen["used"]
    hf_paged.check_integrity(model)
    states = []
    for outputs in (plain, first):
        ids = torch.cat([outputs.sequences, torch.full((3, 4), 9)], dim=1)
        mask = torch.nn.functional.pad(
            inputs["attention_mask"], (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=1
        )
        cache = outputs.past_key_values
        states.append(
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 8}
            )
        )
    assert torch.equal(states[0], states[1])
    hf_paged.check_integrity(model)


def test_short_of_blocks(seen: collections.Counter[str]) -> None:
    """No request is preempted for a speculative launch."""
    model, jobs = models.get("llama"), [job(7, 33, 0), job(7, 33, 1)]
    most = 2 * -(-40 // SIZE)
    with PagedEngine(model, PagedConfig(block_size=SIZE, num_blocks=most)) as engine:
        found = results(engine, jobs)
        assert engine.stats().num_preemptions == 0 and engine.stats().peak_blocks <= most
    check(model, jobs, found)
    assert seen["used"] > 20


def test_a_step_that_cannot_be_launched_is_computed_later(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seen: collections.Counter[str],
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PackedRunner, "run_ahead", fail)
    caplog.set_level(logging.DEBUG, logger="hf_paged.tape.run_ahead")
    model, jobs = models.get("llama"), [job(5, 20, 0), job(9, 15, 1)]
    with PagedEngine(model, CONFIG) as engine:
        found = results(engine, jobs)
        assert_drained(engine)
    check(model, jobs, found)
    assert "could not be launched ahead" in caplog.text and not seen["used"]


def test_an_id_without_embedding_does_not_reach_the_device(
    caplog: pytest.LogCaptureFixture, seen: collections.Counter[str]
) -> None:
    """A device's embedding would end the process for all requests; the id is reported when the host
    has it."""

    def widen(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = torch.full(
            (len(scores), 9), float("inf") if input_ids.shape[1] == 15 else float("-inf")
        )
        return torch.cat([scores, best], dim=1)

    caplog.set_level(logging.DEBUG, logger="hf_paged.tape.run_ahead")
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        result = engine.generate(
            [prompts(5)[0]], {**GREEDY, "max_new_tokens": 20}, logits_processor=[widen]
        )[0]
        assert_drained(engine)
    assert (
        str(result.error).startswith(f"token id {models.VOCAB_SIZE} was chosen")
        and len(result.token_ids) == 11
    )
    assert seen["launched"] > seen["used"] > 5 and "could not be launched" not in caplog.text


def test_nothing_is_kept_when_all_have_ended(seen: collections.Counter[str]) -> None:
    """Ends by EOS are unknown in advance: a step launched for ended rows is dropped by the step
    that finds out."""
    model = models.get("llama")
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(prompts(9)[0], MODES["greedy_eos"])
        run_all(engine)
        assert engine._core.loop is not None
        assert (
            engine._core.loop.executor.run_ahead._launched is None
            and seen["launched"] > seen["used"]
        )
        assert_drained(engine)


def test_graphs_of_steps_ahead_are_used_last(seen: collections.Counter[str]) -> None:
    """A graph that is only replayed ahead must not be evicted first when there are too many
    graphs."""
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        for prompt, options in (job(5, 60, 0), job(9, 60, 1)):
            engine.add_request(prompt, **options)
        for _ in range(20):
            engine.step()
        graphs = graphs_of(engine.memory)._graphs
        *others, used = graphs
        assert others, "tables of other widths came before"
        for key in others:
            graphs[key] = graphs.pop(key)
        before = seen["used"]
        engine.step()
        assert seen["used"] == before + 1 and list(graphs) == [*others, used]


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}
KINDS: dict[str, list[dict[str, Any]]] = {
    "a waiting queue": [{}],
    "greedy and sampled": [
        {},
        SAMPLED,
        {"repetition_penalty": 1.3},
        {**SAMPLED, "repetition_penalty": 1.2},
    ],
    "seeds": [{**SAMPLED, "seed": 3}, SAMPLED, {**SAMPLED, "seed": 5}],
    "all of it": [
        {},
        {**SAMPLED, "seed": 3},
        {"repetition_penalty": 1.3},
        SAMPLED,
        {"return_logprobs": True},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_are_launched_ahead(
    kind: str, seen: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while requests wait for a seat. Exceptions: the first steps of a size, and those after
    an unforeseen admission, of a request that arrived meanwhile."""
    schedule, model, jobs = Scheduler.schedule, models.get("llama"), []

    def counted(self: Scheduler) -> Any:
        plan = schedule(self)
        seen["decode steps"] += bool(plan.num_decodes) and not plan.has_chunks
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    for number in range(24):
        own = dict(KINDS[kind][number % len(KINDS[kind])])
        arguments = {name: own.pop(name) for name in ("seed", "return_logprobs") if name in own}
        options = {**GREEDY, "max_new_tokens": 30 + 5 * (number % 4), **own}
        jobs.append(
            (prompts(5 + number % 7, seed=number)[0], {"generation_config": options, **arguments})
        )
    with PagedEngine(model, PagedConfig(block_size=SIZE, max_num_seqs=4)) as engine:
        found = results(engine, jobs)
        assert_drained(engine)
    for (prompt, arguments), result in zip(jobs, found):
        options = arguments["generation_config"]
        assert result.error is None and len(result.token_ids) == options["max_new_tokens"]
        if not options["do_sample"] or "seed" in arguments:
            assert_same_as_lone(
                lone_run(model, prompt, options, arguments.get("seed")), result, GREEDY, kind
            )
    assert seen["used"] >= 0.9 * seen["decode steps"] > 100, seen


def test_only_what_was_launched_is_taken() -> None:
    """Items match in scheduled order up to the first that differs: token, length, block, or more
    than one token."""
    pool = BlockPool(32)
    manager = manager_of([PoolGroup(pool)], SIZE)
    scheduler = Scheduler(Preemption(manager), max_num_batched_tokens=100, max_num_seqs=8)
    sequences = [Sequence([1] * length) for length in (3, SIZE, 9, 5)]
    for number, sequence in enumerate(sequences):
        scheduler.add(Request(number, [sequence], 40))
    scheduler.commit(scheduler.schedule())
    logits = torch.arange(4.0)[:, None].expand(4, 7)

    def launched() -> GraphRunAhead:
        ahead = GraphRunAhead(PagedMemory(CONFIG), scheduler)
        states = [(s.num_tokens, 7, [s.blocks.tables[0].block_ids[-1]]) for s in sequences]
        ahead._launched = LaunchedStep(logits, dict(zip(sequences, enumerate(states))))
        return ahead

    assert scheduler.reserve_next(sequences)
    for sequence in sequences:
        sequence.token_ids.append(7)
    plan = scheduler.schedule()
    assert plan.sequences == sequences and plan.counts == [1] * 4
    found, count = launched().take(plan)
    assert count == 4 and torch.equal(found, logits)
    found, count = launched().take(plan.select([3, 1]))
    assert count == 2 and torch.equal(found, logits[[3, 1]])
    assert launched().take(dataclasses.replace(plan, counts=[2] * 4)) == (None, 0)
    ahead = launched()
    sequences[1].token_ids[-1] = 8
    found, count = ahead.take(plan)
    assert count == 1 and torch.equal(found, logits[:1])
    assert ahead.take(plan) == (None, 0), "once only"
    ahead = launched()
    sequences[0].blocks.tables[0].block_ids[-1] += 100
    assert ahead.take(plan) == (None, 0)
    ahead = launched()
    assert ahead.take(dataclasses.replace(plan, num_logits=[0] * 4)) == (None, 0)


def test_what_is_reserved() -> None:
    """Allocates a block for the next token if needed and indexes full blocks before it; no copy,
    never the last block."""
    pool = BlockPool(6)
    manager = manager_of([PoolGroup(pool)], SIZE)
    scheduler = Scheduler(Preemption(manager), max_num_batched_tokens=100, max_num_seqs=8)
    sequence = Sequence(list(range(SIZE - 1)))
    scheduler.add(Request("a", [sequence], 3 * SIZE))
    scheduler.commit(scheduler.schedule())
    sequence.token_ids.append(SIZE - 1)  # a decode fills the block, which does not index it
    scheduler.commit(scheduler.schedule())
    table = sequence.blocks.tables[0]
    for _ in range(2):
        assert (
            scheduler.reserve_next([sequence])
            and len(table.block_ids) == 2
            and table.num_tokens == SIZE
        )
        manager.check_integrity()
    other = manager.new()
    assert manager.match(other, [*range(SIZE), 5], None) == SIZE, "what is full has its name"
    manager.free(other)
    twin = manager.fork(sequence.blocks)
    assert len(twin.tables[0].block_ids) == 1, "what is reserved is one sequence's"
    manager.check_integrity()
    manager.free(twin)
    held = pool.allocate(pool.num_available)
    sequence.token_ids.append(5)
    plan = scheduler.schedule()
    assert plan.sequences == [sequence] and plan.counts == [1], "no other block is needed"
    scheduler.commit(plan)
    pool.release(held)
    twin = manager.fork(sequence.blocks)
    assert not scheduler.reserve_next([sequence]), "the tail is shared"
    manager.free(twin)
    assert not scheduler.reserve_next([]), "another request runs"
    assert scheduler.reserve_next([], 1), "... but ends"
    scheduler.max_num_seqs = 1
    scheduler.add(Request("b", [Sequence([1])], 2))
    assert not scheduler.reserve_next([sequence]), "a request waits that may be admitted"
    sequence.token_ids.append(5)
    scheduler.commit(scheduler.schedule())
    assert scheduler.reserve_next([sequence]), "there is no seat for it"
    assert not scheduler.reserve_next([], 1), "there will be one"
    scheduler.add(Request("c", [Sequence([1])], 2, priority=-1))
    assert not scheduler.reserve_next([sequence]), "another comes first"
    manager.check_integrity()


def test_an_exception_behind_a_change_of_tables_for_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = models.get("llama"), prompts(9, 14)
    options = [
        {"do_sample": False, "max_new_tokens": 40},
        {"do_sample": True, "max_new_tokens": 40, "top_k": 5},
    ]
    expected = [lone_run(model, *each, 7) for each in zip(texts, options)]
    allocate, reserve_next, is_reserving, has_failed = (
        BlockPool.allocate,
        BlockManager.reserve_next,
        False,
        False,
    )

    def reserving(self: BlockManager, *args: Any) -> bool:
        nonlocal is_reserving
        is_reserving = True
        try:
            return reserve_next(self, *args)
        finally:
            is_reserving = False

    def allocated(self: BlockPool, *args: Any) -> list[int]:
        nonlocal has_failed
        result = allocate(self, *args)
        if is_reserving and not has_failed:
            has_failed = True
            raise MemoryError("on purpose")
        return result

    monkeypatch.setattr(BlockManager, "reserve_next", reserving)
    monkeypatch.setattr(BlockPool, "allocate", allocated)
    with PagedEngine(model, CONFIG) as engine:
        for number, (text, given) in enumerate(zip(texts, options)):
            engine.add_request(text, given, request_id=str(number), seed=7)
        found = run_all(engine)
        assert has_failed
        for number, tokens in enumerate(expected):
            assert_same_as_lone(tokens, found[str(number)], options[number], f"request {number}")
        assert_drained(engine)
