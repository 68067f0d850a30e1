"""The scheduler's choices: which requests run, in which order, and which are preempted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool, OutOfBlocksError
from hf_paged.cache.groups import GroupSpec, StateSpec
from hf_paged.cache.sequence_blocks import NO_BLOCKS
from hf_paged.plan import StepPlan
from tests.support.pools import PoolGroup, manager_of

SIZE = 4


def make(
    num_blocks: int = 64, tokens: int = 64, seqs: int = 8, window: Any = None, **options: Any
) -> Scheduler:
    """A scheduler over one pool; no watermark by default."""
    caching = options.pop("prefix_caching", True)
    blocks = manager_of(
        [PoolGroup(BlockPool(num_blocks), GroupSpec(window=window))], SIZE, prefix_caching=caching
    )
    options = {"watermark": 0.0, **options}
    return Scheduler(
        Preemption(blocks), max_num_batched_tokens=tokens, max_num_seqs=seqs, **options
    )


def add(
    scheduler: Scheduler, name: str, length: int, new_tokens: int = 8, **options: Any
) -> Request:
    """Queues a request with unique tokens."""
    start = sum(map(ord, name)) * 1000
    request = Request(
        name, [Sequence(list(range(start, start + length)))], length + new_tokens, **options
    )
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> StepPlan:
    """Schedules a step whose forward succeeds."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    return plan


def counts(plan: StepPlan) -> list[tuple[Any, int]]:
    """The scheduled token counts, with the requests' names."""
    return [
        (sequence.request.request_id, count) for sequence, count in zip(plan.sequences, plan.counts)
    ]


def names(requests: list[Request]) -> list[Any]:
    return [request.request_id for request in requests]


def test_decodes_come_first_and_never_wait_for_a_long_prompt() -> None:
    scheduler = make(tokens=10)
    a = add(scheduler, "a", 3)
    b = add(scheduler, "b", 20)
    c = add(scheduler, "c", 2)
    assert counts(step(scheduler)) == [("a", 3), ("b", 7)]
    a.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("a", 1), ("b", 9)]
    assert b.sequences[0].num_to_compute == 4
    a.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("a", 1), ("b", 4), ("c", 2)]
    assert c.status is Status.RUNNING
    assert counts(step(scheduler)) == []  # all wait for tokens


def test_a_plan_is_plain_data(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make(tokens=10)
    request = add(scheduler, "a", 3)
    add(scheduler, "b", 20, adapter="french")
    step(scheduler)
    request.sequences[0].token_ids.append(1)
    with caplog.at_level(logging.DEBUG):
        plan = step(scheduler)
    assert str(plan) == "[('a', 0, 1, 1, None), ('b', 0, 9, 0, 'french')]"
    assert "step 1 computes [('a', 0, 1, 1, None), ('b', 0, 9, 0, 'french')]" in caplog.text


def test_a_decode_behind_a_long_prompt_keeps_its_token_of_the_budget() -> None:
    scheduler = make(tokens=6)
    add(scheduler, "a", 30)
    b = add(scheduler, "b", 2, priority=-1)
    assert counts(step(scheduler)) == [("b", 2), ("a", 4)]
    b.sequences[0].token_ids.append(1)
    c = add(scheduler, "c", 1)
    assert counts(step(scheduler)) == [("b", 1), ("a", 5)] and c.status is Status.WAITING


def test_prompts_beside_decodes_are_few_tokens_whoever_comes_first() -> None:
    scheduler = make(tokens=20, max_chunk_tokens=3)
    a = add(scheduler, "a", 12)
    b = add(scheduler, "b", 2, priority=-1)
    assert counts(step(scheduler)) == [("b", 2), ("a", 12)]  # nothing decodes
    for each in (a, b):
        each.sequences[0].token_ids.append(1)
    c = add(scheduler, "c", 8, priority=-2)
    d = add(scheduler, "d", 4)
    assert counts(step(scheduler)) == [("b", 1), ("a", 1), ("c", 3)] and d.status is Status.WAITING
    for each in (a, b):
        each.sequences[0].token_ids.append(1)
    # which is now before them
    assert counts(step(scheduler)) == [("b", 1), ("a", 1), ("c", 3)]
    a.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("a", 1), ("d", 1), ("c", 2)]
    assert counts(step(scheduler)) == [("d", 3)] and c.status is Status.RUNNING
    e = add(scheduler, "e", 19)
    assert counts(step(scheduler)) == [("e", 19)] and e.status is Status.RUNNING


def test_a_long_prompt_leaves_half_to_more_urgent_ones() -> None:
    scheduler = make(tokens=20, max_chunk_tokens=8)
    a = add(scheduler, "a", 2)
    add(scheduler, "b", 60)
    assert counts(step(scheduler)) == [("a", 2), ("b", 18)]
    a.sequences[0].token_ids.append(1)
    add(scheduler, "c", 5)
    add(scheduler, "d", 3, priority=-2)
    assert counts(step(scheduler)) == [("a", 1), ("c", 1), ("b", 4), ("d", 3)]
    a.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("a", 1), ("b", 8)]


def test_priority_is_worth_a_number_of_arrivals() -> None:
    scheduler = make(seqs=1, arrivals_per_priority=2.5)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 0), ("f", -1)]:
        add(scheduler, name, 2, priority=priority)
    order = []
    while scheduler.has_unfinished:
        batch = step(scheduler)
        order += names(batch.admitted)
        scheduler.finish(batch.admitted[0])
    assert order == ["a", "c", "f", "d", "b", "e"]


def test_the_head_is_not_overtaken() -> None:
    scheduler = make(num_blocks=8)
    a = add(scheduler, "a", 16, new_tokens=1)
    add(scheduler, "b", 20)
    add(scheduler, "c", 2)
    assert counts(step(scheduler)) == [("a", 16)]
    scheduler.finish(a)
    assert counts(step(scheduler)) == [("b", 20), ("c", 2)]


def test_admission_leaves_the_watermark_to_those_who_run() -> None:
    scheduler = make(num_blocks=10, watermark=0.25)
    add(scheduler, "a", 16)
    add(scheduler, "b", 20)
    add(scheduler, "c", 4)
    # 6 blocks are free: 5 for b, 2 must stay free
    assert counts(step(scheduler)) == [("a", 16)]
    alone = make(num_blocks=10, watermark=1.0)
    add(alone, "a", 32)
    assert counts(step(alone)) == [("a", 32)]


@pytest.mark.parametrize(
    ("length", "new_tokens", "rows", "needed"),
    [(16, 17, 1, 8), (16, 18, 1, 9), (17, 8, 2, 8), (17, 8, 3, 10), (16, 9, 2, 9)],
    ids=[
        "fits",
        "one block too many",
        "rows share the prompt",
        "a row too many",
        "not its last token's block",
    ],
)
def test_what_can_never_fit_is_refused(
    length: int, new_tokens: int, rows: int, needed: int
) -> None:
    scheduler = make(num_blocks=8)
    if needed > 8:
        with pytest.raises(
            OutOfBlocksError,
            match=f"'a' needs {needed} blocks of 4 tokens, at most 8 are available: raise",
        ):
            add(scheduler, "a", length, new_tokens, num_rows=rows)
        assert not scheduler.has_unfinished
    else:
        add(scheduler, "a", length, new_tokens, num_rows=rows)


def test_a_window_needs_few_blocks_however_long_the_prompt() -> None:
    scheduler = make(num_blocks=3, window=6)
    a = add(scheduler, "a", 100, 50)
    steps = 0
    while a.sequences[0].num_to_compute:
        batch = step(scheduler)
        assert not batch.preempted and len(batch)
        steps += 1
    assert steps < 100  # in chunks, as far as there is room


def test_the_latest_is_preempted_and_resumes_before_later_ones() -> None:
    scheduler = make(num_blocks=6, prefix_caching=False)
    requests = [add(scheduler, name, 8, new_tokens=9) for name in "abc"]
    assert names(step(scheduler).admitted) == ["a", "b", "c"]
    add(scheduler, "d", 4)
    for request in requests:
        request.sequences[0].token_ids.append(1)
    batch = step(scheduler)
    assert (
        counts(batch) == [("a", 1), ("b", 1)]
        and names(batch.preempted) == ["c"]
        and not batch.admitted
    )
    c = requests[2].sequences[0]
    assert (c.num_computed_tokens, c.blocks, requests[2].num_preemptions) == (0, NO_BLOCKS, 1)
    scheduler.finish(requests[0])
    batch = step(scheduler)
    assert counts(batch) == [("c", 9)] and names(batch.admitted) == ["c"]


def test_a_preempted_request_finds_its_blocks_in_the_prefix_cache() -> None:
    scheduler = make(num_blocks=7)
    requests = [add(scheduler, name, 8, new_tokens=9) for name in "abc"]
    step(scheduler)
    for request in requests:
        request.sequences[0].token_ids.append(1)
    assert names(step(scheduler).preempted) == ["c"]
    scheduler.finish(requests[0])
    assert counts(step(scheduler)) == [("c", 5)]  # b took the later one of its two blocks
    assert requests[2].num_hit_tokens == 0, (
        "what counts is what its prompt found when it was first admitted"
    )


def test_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler = make()
    prompt = list(range(18))
    requests = [Request(number, [Sequence([*prompt, number])], 30) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    assert counts(step(scheduler)) == [(0, 19), (1, 3), (2, 3)]
    first, second, _ = (request.sequences[0].blocks.tables[0].block_ids for request in requests)
    assert first[:4] == second[:4] and first[4] != second[4]
    assert scheduler.blocks.num_free == 64 - 7


@pytest.mark.parametrize("tokens", [1, 7, 24, 64])
def test_prompts_that_arrive_together_are_computed_once_in_chunks_of_any_size(tokens: int) -> None:
    scheduler, computed = make(tokens=tokens), 0
    requests = [Request(number, [Sequence([*range(18), number])], 30) for number in range(3)]
    scheduler.add(*requests)
    while not all(request.is_computed for request in requests):
        computed += step(scheduler).num_tokens
    assert computed == 19 + 3 + 3 and [request.num_hit_tokens for request in requests] == [
        0,
        16,
        16,
    ]


def test_prompts_that_await_another_let_others_pass() -> None:
    """With states, others can begin only behind a snapshot. They keep their seats and their
    turn."""
    groups = [PoolGroup(BlockPool(200)), PoolGroup(BlockPool(9), StateSpec())]
    preemption = Preemption(manager_of(groups, SIZE), can_chunk=False)
    scheduler = Scheduler(preemption, max_num_batched_tokens=1 << 40, max_num_seqs=4, watermark=0.0)
    common = list(range(102))
    for name, start in (("a", 0), ("b", 0), ("c", 1000), ("d", 0), ("e", 2000)):
        prompt = [start + token for token in common] + [*name.encode()] * 3
        scheduler.add(Request(name, [Sequence(prompt)], 150))
    assert counts(step(scheduler)) == [("a", 100), ("c", 105)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    scheduler.queue.running[1].sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("c", 1), ("a", 5), ("b", 5), ("d", 5)]
    assert names(scheduler.queue.running) == ["a", "b", "c", "d"]
    for request in scheduler.queue.running:
        scheduler.finish(request)
    assert counts(step(scheduler)) == [("e", 105)]
    scheduler.blocks.check_integrity()
    assert not len(preemption.waiting_prompts)


def test_a_later_turn_finds_the_generated_tokens() -> None:
    scheduler = make()
    a = add(scheduler, "a", 5)
    for token in (1, 2, 3, 4):
        step(scheduler)
        a.sequences[0].token_ids.append(token)
    history = list(a.sequences[0].token_ids)
    scheduler.finish(a)
    b = Request("b", [Sequence([*history, 7, 7])], 20)
    scheduler.add(b)
    assert counts(step(scheduler)) == [("b", 3)] and b.num_hit_tokens == 8


def test_rows_computed_anew_share_their_prompt_again() -> None:
    scheduler = make(num_blocks=12, prefix_caching=False)
    other = add(scheduler, "other", 12, new_tokens=20, priority=-1)
    request = add(scheduler, "rows", 17, new_tokens=8, num_rows=3)
    step(scheduler)
    request.fork(scheduler.blocks, 3)
    used = scheduler.blocks.num_free
    for number, sequence in enumerate(request.sequences):
        sequence.token_ids.append(number)
    step(scheduler)
    assert scheduler.blocks.num_free == used - 2  # a separate tail for each row
    for _ in range(12):
        other.sequences[0].token_ids.append(1)
        if step(scheduler).preempted:
            break
    assert request.status is Status.WAITING
    scheduler.finish(other)
    assert counts(step(scheduler)) == []  # all rows have their logits
    for sequence in request.sequences:
        sequence.token_ids.append(1)
    assert counts(step(scheduler)) == [("rows", 16)]
    assert counts(step(scheduler)) == [("rows", 3)] * 3
    tables = [sequence.blocks.tables[0].block_ids for sequence in request.sequences]
    assert (
        tables[0][:4] == tables[1][:4] == tables[2][:4] and len({table[4] for table in tables}) == 3
    )


def test_permute_changes_hands_and_forks() -> None:
    scheduler = make()
    request = add(scheduler, "a", 6, num_rows=3)
    step(scheduler)
    request.fork(scheduler.blocks, 3)
    for number, sequence in enumerate(request.sequences):
        sequence.token_ids.append(number)
    step(scheduler)
    used = scheduler.blocks.num_free
    tails = [sequence.blocks.tables[0].block_ids[-1] for sequence in request.sequences]
    request.permute(scheduler.blocks, [1, 1, 0], [7, 8, 9])
    assert [sequence.token_ids[-2:] for sequence in request.sequences] == [[1, 7], [1, 8], [0, 9]]
    held = [sequence.blocks.tables[0].block_ids[-1] for sequence in request.sequences]
    assert held == [tails[1], tails[1], tails[0]] and scheduler.blocks.num_free == used + 1
    batch = step(scheduler)
    assert counts(batch) == [("a", 1)] * 3
    made: list[tuple[int, int]] = []
    scheduler.blocks.groups[0].copy_blocks = made.extend  # type: ignore[method-assign]
    scheduler.blocks.flush_copies()
    assert made


def test_a_request_that_waits_for_another_gives_way_and_stays_away_until_it_has_a_token() -> None:
    scheduler = make(num_blocks=6, prefix_caching=False)
    a, b = add(scheduler, "a", 16, new_tokens=4), add(scheduler, "b", 16, new_tokens=4)
    assert counts(step(scheduler)) == [("a", 16)]
    batch = step(scheduler)  # a waits for b, whose decoding it shares
    assert counts(batch) == [("b", 16)] and names(batch.preempted) == ["a"]
    assert counts(step(scheduler)) == [] and scheduler.num_waiting == 1
    a.sequences[0].token_ids.append(1)
    b.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("b", 1)]
    batch = step(scheduler)
    assert counts(batch) == [("a", 17)] and names(batch.preempted) == ["b"]


def test_rows_that_wait_for_each_other_may_be_more_than_max_num_seqs() -> None:
    scheduler = make(seqs=2)
    for name in "abcd":
        add(scheduler, name, 2)
    assert counts(step(scheduler)) == [("a", 2), ("b", 2)]
    for name in "cd":  # one more per step, as long as none of them gets a token
        batch = step(scheduler)
        assert counts(batch) == [(name, 2)] and not batch.preempted


def test_blocks_held_by_others_are_reported() -> None:
    scheduler = make(num_blocks=8)
    held = scheduler.blocks.groups[0].pool.allocate(6)
    add(scheduler, "a", 16)
    with pytest.raises(
        OutOfBlocksError,
        match=r"nothing can be scheduled.*2 of 8 available.*Other requests or caches hold blocks",
    ):
        step(scheduler)
    scheduler.blocks.groups[0].pool.release(held)
    assert counts(step(scheduler)) == [("a", 16)]


def test_a_failed_step_never_happened() -> None:
    scheduler = make()
    a = add(scheduler, "a", 6)
    step(scheduler)
    a.sequences[0].token_ids.append(1)
    b = Request("b", [Sequence(list(range(9)))], 12)
    c = Request("c", [Sequence(list(range(10)))], 12)
    scheduler.add(b)
    scheduler.add(c)
    assert counts(scheduler.schedule()) == [("a", 1), ("b", 9), ("c", 2)]
    scheduler.fail_step()
    assert a.sequences[0].num_to_compute == 1 and b.status is Status.WAITING
    scheduler.finish(b)
    assert counts(step(scheduler)) == [("a", 1), ("c", 10)]  # none of b's blocks are reused


@pytest.mark.parametrize("window", [None, SIZE])
def test_a_step_whose_logits_are_lost_is_computed_again(window: int | None) -> None:
    """In a child process the thread that took it is gone."""
    scheduler = make(window=window)
    a = add(scheduler, "a", 14)
    assert counts(step(scheduler)) == [("a", 14)]
    scheduler.fail_step()
    assert counts(step(scheduler)) == [("a", 2)]  # the rest is cached
    a.sequences[0].token_ids.append(1)
    assert counts(step(scheduler)) == [("a", 1)]
    scheduler.fail_step()
    assert a.sequences[0].num_to_compute
    assert step(scheduler).num_logits == [1] and not a.sequences[0].num_to_compute


def test_a_step_that_is_not_scheduled_to_its_end_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make()
    a = add(scheduler, "a", 6)
    step(scheduler)
    a.sequences[0].token_ids.append(1)
    add(scheduler, "b", 3)

    def gone(left: int) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(scheduler, "_admit", gone)
        scheduler.schedule()
    scheduler.fail_step()
    (table,) = a.sequences[0].blocks.tables
    assert table.num_tokens == a.sequences[0].num_computed_tokens == 6
    assert counts(step(scheduler)) == [("a", 1), ("b", 3)]


def test_cancellation_anywhere_gives_every_block_back() -> None:
    scheduler = make(num_blocks=8)
    running = add(scheduler, "a", 16)
    waiting = [add(scheduler, "bc"[i % 2], 20) for i in range(300)]
    step(scheduler)
    for request in waiting[:-1]:
        scheduler.finish(request)
        scheduler.finish(request)
    assert scheduler.num_waiting == 1
    scheduler.finish(running)
    assert counts(step(scheduler)) == [("c", 20)]
    scheduler.finish_sequence(waiting[-1].sequences[0])
    assert (
        waiting[-1].is_finished and not scheduler.has_unfinished and scheduler.blocks.num_free == 8
    )
