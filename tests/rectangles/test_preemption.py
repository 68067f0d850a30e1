"""Prompts that cannot be computed in chunks: which of them wait for another's prefill to stop."""

from __future__ import annotations

from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool
from hf_paged.rectangles.preemption import RectanglePreemption
from hf_paged.rectangles.states import StateSpec
from tests.batching.scheduling.test_scheduler import SIZE, give, step
from tests.support.pools import PoolGroup, manager_of


def test_prompts_that_await_another_let_others_pass() -> None:
    """With states, others can begin only behind a snapshot. They keep their seats and their
    turn."""
    groups = [PoolGroup(BlockPool(200)), PoolGroup(BlockPool(9), StateSpec())]
    preemption = RectanglePreemption(manager_of(groups, SIZE))
    scheduler = Scheduler(preemption, max_num_batched_tokens=1 << 40, max_num_seqs=4, watermark=0.0)
    common = list(range(102))
    for name, start in (("a", 0), ("b", 0), ("c", 1000), ("d", 0), ("e", 2000)):
        prompt = [start + token for token in common] + [*name.encode()] * 3
        scheduler.add(Request(name, [Sequence(prompt)], 150))
    assert step(scheduler) == "a100 c105"
    assert (len(scheduler.queue.running), len(scheduler.queue.waiting)) == (2, 3)
    give(scheduler.queue.running[1])
    assert step(scheduler) == "c1 a5 b5 d5"
    assert "".join(request.request_id for request in scheduler.queue.running) == "abcd"
    for request in scheduler.queue.running:
        scheduler.finish(request)
    assert step(scheduler) == "e105"
    scheduler.blocks.check_integrity()
    assert not len(preemption._waiting_prompts)


def test_rows_that_end_with_the_prompt_are_each_recomputed() -> None:
    """As after an interrupt between a prompt's forward and the first sampled tokens: a shared
    prompt would leave all rows but the first without logits."""
    for num_new, expected in ((0, "a40 a40"), (1, "a40")):
        groups = [PoolGroup(BlockPool(200)), PoolGroup(BlockPool(9), StateSpec())]
        preemption = RectanglePreemption(manager_of(groups, SIZE), replays_all_prompts=True)
        scheduler = Scheduler(preemption, max_num_batched_tokens=1 << 40, max_num_seqs=4)
        request = Request("a", [Sequence(list(range(40))) for _ in range(2)], 150)
        for sequence in request.sequences:
            sequence.token_ids += [7] * num_new
        scheduler.add(request)
        assert step(scheduler) == expected
        if num_new == 0:
            give(request)
        assert step(scheduler) == "a1 a1"
        scheduler.blocks.check_integrity()
