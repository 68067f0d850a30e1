"""Steps launched before the host has the previous tokens, on the CPU, including launches that prove
useless."""

from __future__ import annotations

import collections
import logging
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.execution.packed import PackedRunner
from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.tape.run_ahead import GraphRunAhead, LaunchedStep
from tests.batching.test_runner import SIZE
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.support.graph_helpers import (
    FakeGraphs,
    assert_as_lone,
    job,
    results,
)
from tests.support.pools import PoolGroup, manager_of

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
CONFIG = PagedConfig(block_size=SIZE)

pytestmark = pytest.mark.usefixtures("graphs")


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts the outcomes of steps: `launched`, then `used` whole, `in part` (a row left), `joined`
    or `in vain`."""
    counts: collections.Counter[str] = collections.Counter()
    take, run_ahead = GraphRunAhead.take, PackedRunner.run_ahead

    def counted_take(self: GraphRunAhead, plan: Any) -> Any:
        launched = self._launched
        logits, count = take(self, plan)
        if launched is not None and count:
            left = "used" if count == len(launched.rows) else "in part"
            counts["joined" if count < len(plan) else left] += 1
        counts["in vain"] += launched is not None and not count
        return logits, count

    def counted_run(self: PackedRunner, *args: Any) -> Any:
        logits = run_ahead(self, *args)
        counts["launched"] += logits is not None
        return logits

    monkeypatch.setattr(GraphRunAhead, "take", counted_take)
    monkeypatch.setattr(PackedRunner, "run_ahead", counted_run)
    return counts


@pytest.mark.parametrize(
    "mode", ["greedy_eos", "penalties", "sample", "samples", "sample_warped", "beams_eos"]
)
def test_generate_gives_plain_tokens(
    mode: str, graphs: FakeGraphs, seen: collections.Counter[str]
) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", (26, 4, 17))
    found = []
    for options in ({}, models.PAGED, models.PAGED):
        torch.manual_seed(1)
        found.append((model.generate(**inputs, **MODES[mode], **options), torch.get_rng_state()))
        assert all(torch.equal(x, y) for x, y in zip(found[0], found[-1]))
        hf_paged.check_integrity(model)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine" and route.num_captured_steps > 5
    if mode == "beams_eos":
        return
    assert seen["used"] > 10 and not seen["in vain"]
    if mode == "greedy_eos":
        assert seen["in part"], "rows end by EOS at different steps"
        count = len(graphs.graphs)
        uncached = {**models.PAGED, "cache_config": {"block_size": SIZE, "prefix_caching": False}}
        model.generate(**inputs, **MODES[mode], **uncached)
        assert len(graphs.graphs) == count, "graphs are kept between calls"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_random_requests(name: str, seen: collections.Counter[str]) -> None:
    """Rows join, leave, are cancelled, preempted and swapped while steps are in flight."""
    from tests.support import load  # which needs PEFT

    num_blocks = load.KINDS[name].budget[1]
    for preemption in ("recompute", "swap"):
        config = PagedConfig(block_size=SIZE, num_blocks=num_blocks, preemption=preemption)
        run = load.Run(3, 0, name, lora=False, config=config, in_flight=12, captured=True)
        events, failure = load.play(run, 150, 24)
        assert not failure, failure
        assert events["swaps" if preemption == "swap" else "recomputes"], events
    assert all(seen[x] for x in ("used", "in part", "joined")), seen


def test_a_returned_cache_holds_what_it_says(seen: collections.Counter[str]) -> None:
    """Ended rows keep no block allocated for a token that was never generated."""
    model, inputs = models.build("llama"), models.padded_prompt("llama", (26, 4, 17))
    options = {**MODES["greedy_eos"], "return_dict_in_generate": True}
    continued = []
    for paged in ({}, models.PAGED):
        outputs = model.generate(**inputs, **options, **paged)
        hf_paged.check_integrity(model)
        ids = torch.cat([outputs.sequences, torch.full((3, 4), 9)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, :26] = inputs["attention_mask"]
        past = {"attention_mask": mask, "past_key_values": outputs.past_key_values}
        continued.append(model.generate(ids, **past, **GREEDY, max_new_tokens=8))
    assert torch.equal(*continued) and seen["used"]
    hf_paged.check_integrity(model)


def test_short_of_blocks(seen: collections.Counter[str]) -> None:
    """No request is preempted for a speculative launch."""
    model, jobs = models.get("llama"), [job(7, 33, 0), job(7, 33, 1)]
    most = 2 * -(-40 // SIZE)
    with PagedEngine(model, PagedConfig(block_size=SIZE, num_blocks=most)) as engine:
        found = results(engine, jobs)
        assert engine.stats().num_preemptions == 0 and engine.stats().peak_blocks <= most
    assert_as_lone(model, jobs, found)
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
    assert_as_lone(model, jobs, found)
    assert "could not be launched ahead" in caplog.text and not seen["used"]


def test_an_id_without_embedding_does_not_reach_the_device(
    caplog: pytest.LogCaptureFixture, seen: collections.Counter[str]
) -> None:
    """A device's embedding would end the process for all requests; the id is reported when the host
    has it."""

    def widen(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = torch.inf if input_ids.shape[1] == 15 else -torch.inf
        return torch.nn.functional.pad(scores, (0, 9), value=best)

    caplog.set_level(logging.DEBUG, logger="hf_paged.tape.run_ahead")
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        options = {**GREEDY, "max_new_tokens": 20}
        (result,) = engine.generate(prompts(5), options, logits_processor=[widen])
        assert_drained(engine)
    assert str(result.error).startswith(f"token id {models.VOCAB_SIZE} was chosen")
    assert len(result.token_ids) == 11
    assert seen["launched"] > seen["used"] > 5 and "could not be launched" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_of_every_kind_are_launched_ahead(
    name: str, seen: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while requests wait for a seat. Exceptions: the first steps of a size, and those after
    an unforeseen admission, of a request that arrived meanwhile."""
    schedule, model, jobs = Scheduler.schedule, models.get(name), []
    sampled, penalty = {"do_sample": True, "top_k": 20}, {"repetition_penalty": 1.3}
    kinds: list[Any] = [({}, {}), (sampled, {"seed": 3}), (penalty, {}), (sampled, {})]
    kinds.append(({}, {"return_logprobs": True}))

    def counted(self: Scheduler) -> Any:
        plan = schedule(self)
        seen["decode steps"] += bool(plan.num_decodes) and not plan.has_chunks
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    for number in range(24):
        options, arguments = kinds[number % len(kinds)]
        prompt, given = job(5 + number % 7, 30 + 5 * (number % 4), number)
        given["generation_config"] |= options
        jobs.append((prompt, given | arguments))
    with PagedEngine(model, PagedConfig(block_size=SIZE, max_num_seqs=4)) as engine:
        found = results(engine, jobs)
        assert_drained(engine)
    for (prompt, given), result in zip(jobs, found):
        options, seed = given["generation_config"], given.get("seed")
        assert result.error is None and len(result.token_ids) == options["max_new_tokens"]
        if seed is not None or not options["do_sample"]:
            assert_same_as_lone(lone_run(model, prompt, options, seed), result, GREEDY, name)
    assert seen["used"] >= 0.9 * seen["decode steps"] > 100, seen


def test_an_exception_behind_a_change_of_tables_for_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = models.get("llama"), prompts(9, 14)
    options = [{"do_sample": x, "max_new_tokens": 40, "top_k": 5} for x in (False, True)]
    expected = [lone_run(model, *each, 7) for each in zip(texts, options)]
    allocate, reserve_next = BlockPool.allocate, SequenceBlocks.reserve_next
    failed: list[bool] = []  # in each call of `reserve_next`

    def reserving(self: SequenceBlocks, *args: Any) -> bool:
        failed.append(False)
        with monkeypatch.context() as patch:
            if not any(failed):
                patch.setattr(BlockPool, "allocate", allocated)
            return reserve_next(self, *args)

    def allocated(self: BlockPool, *args: Any) -> list[int]:
        allocate(self, *args)
        failed[-1] = True
        raise MemoryError("on purpose")

    monkeypatch.setattr(SequenceBlocks, "reserve_next", reserving)
    with PagedEngine(model, CONFIG) as engine:
        for number, (text, given) in enumerate(zip(texts, options)):
            engine.add_request(text, given, request_id=str(number), seed=7)
        found = run_all(engine)
        assert failed.count(True) == 1
        for number, tokens in enumerate(expected):
            assert_same_as_lone(tokens, found[str(number)], options[number], f"request {number}")
        assert_drained(engine)


def scheduler_of(sequences: list[Sequence]) -> Scheduler:
    """A scheduler of requests whose prompts are computed, with their first new token."""
    manager = manager_of([PoolGroup(BlockPool(32))], SIZE)
    scheduler = Scheduler(Preemption(manager), max_num_batched_tokens=100, max_num_seqs=8)
    for number, sequence in enumerate(sequences):
        scheduler.add(Request(number, [sequence], 40))
    scheduler.commit(scheduler.schedule())
    for sequence in sequences:
        sequence.token_ids.append(7)
    return scheduler


def test_a_row_that_changed_is_not_taken() -> None:
    """Its block, as after a preemption, or its token, as a criterion may write it."""
    sequences = [Sequence([1] * length) for length in (3, 5)]
    scheduler = scheduler_of(sequences)
    plan, logits = scheduler.schedule(), torch.randn(2, 7)
    states = [(s.num_tokens, 7, [s.blocks.tables[0].block_ids[-1]]) for s in sequences]
    last_blocks, last_tokens = sequences[1].blocks.tables[0].block_ids, sequences[1].token_ids
    for values, change, count in (
        (last_blocks, 0, 2),
        (last_blocks, 100, 1),
        (last_blocks, -100, 2),
        (last_tokens, 1, 1),
    ):
        values[-1] += change
        ahead = GraphRunAhead(PagedMemory(CONFIG), scheduler)
        ahead._launched = LaunchedStep(logits, dict(zip(sequences, enumerate(states))))
        found, num_taken = ahead.take(plan)
        assert num_taken == count and torch.equal(found, logits[:count])


def test_nothing_is_reserved_for_steps_that_may_differ() -> None:
    sequence = Sequence(list(range(SIZE - 1)))
    scheduler = scheduler_of([sequence])
    scheduler.commit(scheduler.schedule())
    for _ in range(2):
        assert scheduler.reserve_next([sequence]) and len(sequence.blocks.tables[0].block_ids) == 2
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
