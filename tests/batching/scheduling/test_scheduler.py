"""The scheduler's choices: which requests run, in which order, and which are preempted."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool, OutOfBlocksError
from hf_paged.cache.groups import GroupSpec
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


def step(scheduler: Scheduler) -> str:
    """What a step has whose forward succeeds: token counts behind names, and who gave way."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    chunks = [f"{s.request.request_id}{count}" for s, count in zip(plan.sequences, plan.counts)]
    return " ".join([*chunks, *(f"-{request.request_id}" for request in plan.preempted)])


def give(*requests: Request) -> None:
    """A new token for each of their rows."""
    for request in requests:
        for number, sequence in enumerate(request.sequences):
            sequence.token_ids.append(number + 1)


def test_one_token_of_a_prompt_counts_as_a_chunk() -> None:
    scheduler = make(tokens=64, seqs=32, max_chunk_tokens=5)
    a = add(scheduler, "a", 4)
    assert step(scheduler) == "a4"
    give(a)
    for name, length in zip("bcde", (4, 20, 20, 20)):
        add(scheduler, name, length)
    plan = scheduler.schedule()
    assert sum(plan.counts) == 1 + 5 and len(plan.sequences) == 3  # `c` gets one token


def test_drafts_leave_the_tokens_that_chunks_have_taken() -> None:
    scheduler = make(tokens=16)
    b = add(scheduler, "b", 3)
    step(scheduler)
    give(b)
    add(scheduler, "a", 40, priority=-1)
    assert step(scheduler) == "b1 a15"
    give(b)
    b.sequences[0].draft = [1] * 9
    assert sum(scheduler.schedule().counts) == 16


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_may_end_between_schedule_and_commit(window: int | None) -> None:
    """In another thread."""
    scheduler = make(window=window)
    a = add(scheduler, "a", 10)
    plan = scheduler.schedule()
    scheduler.finish(a)
    scheduler.commit(plan)
    assert not scheduler.blocks.groups[0].pool.num_used


def test_decodes_come_first_and_never_wait_for_a_long_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = make(tokens=10)
    a, _, c = add(scheduler, "a", 3), add(scheduler, "b", 20, adapter="x"), add(scheduler, "c", 2)
    assert step(scheduler) == "a3 b7"
    give(a)
    with caplog.at_level(logging.DEBUG):
        assert step(scheduler) == "a1 b9"
    assert "step 1 computes [('a', 0, 1, 1, None), ('b', 0, 9, 0, 'x')]" in caplog.text
    give(a)
    assert step(scheduler) == "a1 b4 c2"
    assert c.status is Status.RUNNING
    assert step(scheduler) == ""  # all wait for tokens


def test_a_decode_behind_a_long_prompt_keeps_its_token_of_the_budget() -> None:
    scheduler = make(tokens=6)
    add(scheduler, "a", 30)
    b = add(scheduler, "b", 2, priority=-1)
    assert step(scheduler) == "b2 a4"
    give(b)
    c = add(scheduler, "c", 1)
    assert step(scheduler) == "b1 a5" and c.status is Status.WAITING


def test_prompts_beside_decodes_are_few_tokens_whoever_comes_first() -> None:
    scheduler = make(tokens=20, max_chunk_tokens=3)
    a, b = add(scheduler, "a", 12), add(scheduler, "b", 2, priority=-1)
    assert step(scheduler) == "b2 a12"  # nothing decodes
    give(a, b)
    add(scheduler, "c", 8, priority=-2)
    add(scheduler, "d", 4)
    assert step(scheduler) == "b1 a1 c3"
    give(a, b)
    assert step(scheduler) == "b1 a1 c3"  # which is now before them
    give(a)
    assert step(scheduler) == "a1 d1 c2"
    assert step(scheduler) == "d3"
    add(scheduler, "e", 19)
    assert step(scheduler) == "e19"


def test_a_long_prompt_leaves_half_to_more_urgent_ones() -> None:
    scheduler = make(tokens=20, max_chunk_tokens=8)
    a = add(scheduler, "a", 2)
    add(scheduler, "b", 60)
    assert step(scheduler) == "a2 b18"
    give(a)
    add(scheduler, "c", 5)
    add(scheduler, "d", 3, priority=-2)
    assert step(scheduler) == "a1 c1 b4 d3"
    give(a)
    assert step(scheduler) == "a1 b8"


def test_priority_is_worth_a_number_of_arrivals() -> None:
    scheduler = make(seqs=1)
    scheduler.queue.arrivals_per_priority = 2.5
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 0), ("f", -1)]:
        add(scheduler, name, 2, priority=priority)
    order = ""
    while scheduler.queue.running or scheduler.queue.waiting:
        order += step(scheduler)
        scheduler.finish(scheduler.queue.running[0])
    assert order == "a2c2f2d2b2e2"


def test_the_head_is_not_overtaken() -> None:
    scheduler = make(num_blocks=8)
    a = add(scheduler, "a", 16, new_tokens=1)
    add(scheduler, "b", 20)
    add(scheduler, "c", 2)
    assert step(scheduler) == "a16"
    scheduler.finish(a)
    assert step(scheduler) == "b20 c2"


def test_admission_leaves_the_watermark_to_those_who_run() -> None:
    scheduler = make(num_blocks=10, watermark=0.25)
    for name, length in (("a", 16), ("b", 20), ("c", 4)):
        add(scheduler, name, length)
    assert step(scheduler) == "a16"  # 6 blocks are free: 5 for b, 2 must stay free
    alone = make(num_blocks=10, watermark=1.0)
    add(alone, "a", 32)
    assert step(alone) == "a32"


@pytest.mark.parametrize(
    ("length", "new_tokens", "rows", "needed"),
    [(16, 17, 1, 8), (16, 18, 1, 9), (17, 8, 2, 8), (17, 8, 3, 10), (16, 9, 2, 9)],
)
def test_what_can_never_fit_is_refused(
    length: int, new_tokens: int, rows: int, needed: int
) -> None:
    """Rows share the prompt's blocks but its last token's."""
    scheduler = make(num_blocks=8)
    if needed <= 8:
        add(scheduler, "a", length, new_tokens, num_rows=rows)
        return
    told = f"'a' needs {needed} blocks of 4 tokens, but at most 8 are available: raise"
    with pytest.raises(OutOfBlocksError, match=told):
        add(scheduler, "a", length, new_tokens, num_rows=rows)
    assert not scheduler.queue.running and not scheduler.queue.waiting


def test_a_window_needs_few_blocks_however_long_the_prompt() -> None:
    scheduler = make(num_blocks=3, window=6)
    a = add(scheduler, "a", 100, 50)
    steps = 0
    while a.sequences[0].num_to_compute:
        assert step(scheduler).startswith("a")
        steps += 1
    assert steps < 100  # in chunks, as far as there is room


def test_a_prompt_computed_as_a_whole_skips_the_blocks_that_its_window_leaves() -> None:
    scheduler = make(num_blocks=3, window=6)
    prompts = SimpleNamespace(keys_after=lambda row, token_ids: token_ids)
    add(scheduler, "a", 20, inputs=(prompts, 0))
    assert step(scheduler) == "a20"


@pytest.mark.parametrize(
    ("num_blocks", "caching", "again"),
    [(6, False, "c9"), (7, True, "c5")],  # b took the later one of its two cached blocks
)
def test_the_latest_is_preempted_and_resumes_before_later_ones(
    num_blocks: int, caching: bool, again: str
) -> None:
    scheduler = make(num_blocks=num_blocks, prefix_caching=caching)
    a, b, c = (add(scheduler, name, 8, new_tokens=9) for name in "abc")
    assert step(scheduler) == "a8 b8 c8"
    add(scheduler, "d", 4)
    give(a, b, c)
    assert step(scheduler) == "a1 b1 -c"
    assert c.sequences[0].num_computed_tokens == 0 and c.num_preemptions == 1
    scheduler.finish(a)
    assert step(scheduler).startswith(again)
    assert c.num_hit_tokens == 0, "what counts is what its prompt found when it was first admitted"


def test_a_preemption_counts_even_if_its_step_has_no_plan() -> None:
    scheduler = make(num_blocks=3)
    a = add(scheduler, "a", 8, new_tokens=4)
    assert scheduler.blocks.take([1]) and step(scheduler) == "a8"
    give(a)
    a.num_tokens_alone = 9  # it was preempted before at this length
    with pytest.raises(OutOfBlocksError):
        scheduler.schedule()
    assert scheduler.preemption.num_preemptions == a.num_preemptions == 1


@pytest.mark.parametrize("tokens", [1, 7, 24, 64])
def test_prompts_that_arrive_together_are_computed_once_in_chunks_of_any_size(tokens: int) -> None:
    scheduler, computed = make(tokens=tokens), 0
    requests = [Request(number, [Sequence([*range(18), number])], 30) for number in range(3)]
    scheduler.add(*requests)
    while not all(request.is_computed for request in requests):
        plan = scheduler.schedule()
        scheduler.commit(plan)
        computed += plan.num_tokens
    assert computed == 19 + 3 + 3 and scheduler.blocks.num_free == 64 - 7
    assert [request.num_hit_tokens for request in requests] == [0, 16, 16]


def test_rows_computed_anew_share_their_prompt_again() -> None:
    scheduler = make(num_blocks=12, prefix_caching=False)
    other = add(scheduler, "o", 12, new_tokens=20, priority=-1)
    rows = add(scheduler, "r", 17, new_tokens=8, num_rows=3)
    step(scheduler)
    rows.fork(3)
    used = scheduler.blocks.num_free
    give(rows)
    step(scheduler)
    assert scheduler.blocks.num_free == used - 2  # a separate tail for each row
    while rows.status is Status.RUNNING:
        give(other)
        step(scheduler)
    scheduler.finish(other)
    assert step(scheduler) == ""  # all rows have their logits
    give(rows)
    assert step(scheduler) == "r16"
    assert step(scheduler) == "r3 r3 r3"
    tables = [sequence.blocks.tables[0].block_ids for sequence in rows.sequences]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3


def test_beams_that_change_places_keep_their_blocks_writable() -> None:
    """Of the beams with one parent, one takes over the blocks, and the others share them."""
    scheduler = make()
    beams = add(scheduler, "a", 6, num_rows=3)
    step(scheduler)
    beams.fork(3)
    give(beams)
    step(scheduler)  # the first token after the fork copies the shared tail
    pool = scheduler.blocks.groups[0].pool
    num_shared, tables = pool.num_shared, [x.blocks.tables[0] for x in beams.sequences]
    beams.continue_beams([1, 2, 0], [7, 8, 9])
    assert [x.blocks.tables[0] for x in beams.sequences] == [tables[1], tables[2], tables[0]]
    assert [x.token_ids[-2:] for x in beams.sequences] == [[2, 7], [3, 8], [1, 9]]
    beams.continue_beams([1, 0, 0], [7, 8, 9])
    assert pool.num_shared == num_shared + 1
    scheduler.blocks.check_integrity()


def test_a_request_that_waits_for_another_gives_way_and_stays_away_until_it_has_a_token() -> None:
    scheduler = make(num_blocks=6, prefix_caching=False)
    a, b = add(scheduler, "a", 16, new_tokens=4), add(scheduler, "b", 16, new_tokens=4)
    assert step(scheduler) == "a16"
    assert step(scheduler) == "b16 -a"  # a waits for b, whose decoding it shares
    assert step(scheduler) == "" and len(scheduler.queue.waiting) == 1
    give(a, b)
    assert step(scheduler) == "b1"
    assert step(scheduler) == "a17 -b"


def test_rows_that_wait_for_each_other_may_be_more_than_max_num_seqs() -> None:
    scheduler = make(seqs=2)
    for name in "abcd":
        add(scheduler, name, 2)
    assert step(scheduler) == "a2 b2"
    for name in "cd":  # one more per step, as long as none of them gets a token
        assert step(scheduler) == f"{name}2"


@pytest.mark.parametrize("window", [None, SIZE])
def test_a_step_whose_logits_are_lost_is_computed_again(window: int | None) -> None:
    """In a child process the thread that took it is gone."""
    scheduler = make(window=window)
    a = add(scheduler, "a", 14)
    assert step(scheduler) == "a14"
    scheduler.undo_step()
    assert step(scheduler) == "a2"  # the rest is cached
    give(a)
    assert step(scheduler) == "a1"
    scheduler.undo_step()
    assert a.sequences[0].num_to_compute
    assert step(scheduler) and not a.sequences[0].num_to_compute
