"""Which calls wait for one another's blocks, and when they no longer do: with a memory that only
counts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.cache import waits
from hf_paged.cache.waits import Claim, Shortage, claimed, claims_on


class Call:
    """Calls of another thread, which go on or not."""

    def __init__(self, is_progressing: bool) -> None:
        self.is_going_on = is_progressing

    def is_progressing(self, thread: int) -> bool:
        return self.is_going_on


def memory_with(*holders: Any) -> Any:
    return SimpleNamespace(holders=list(holders), progress_count=0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    found = [1.0]
    clock = SimpleNamespace(monotonic=lambda: found[0], sleep=lambda seconds: None)
    monkeypatch.setattr(waits, "time", clock)
    return found


def test_a_call_tries_again_as_long_as_others_go_on_and_a_moment_longer(now: list[float]) -> None:
    other = Call(is_progressing=True)
    memory = memory_with(Call(is_progressing=False), other)
    shortage = Shortage(memory)
    for _ in range(3):
        now[0] += 5 * waits.GRACE
        assert shortage.should_retry()
    other.is_going_on = False
    now[0] += 0.9 * waits.GRACE
    assert shortage.should_retry()
    now[0] += 0.2 * waits.GRACE
    assert not shortage.should_retry()
    other.is_going_on = True
    assert shortage.should_retry()
    assert not Shortage(memory_with(), is_alone=True).should_retry()


def test_a_call_gives_up_where_nobody_computes(now: list[float]) -> None:
    """The code of a caller that holds blocks may wait for the call that is short of them."""
    memory = memory_with(Call(is_progressing=True))
    shortage = Shortage(memory)
    for _ in range(5):
        now[0] += 0.9 * waits.MAX_STALL
        memory.progress_count += 1
        assert shortage.should_retry()
    now[0] += 1.1 * waits.MAX_STALL
    assert not shortage.should_retry()


def test_calls_that_fit_together_go_on_together_in_the_order_in_which_they_came() -> None:
    memory = memory_with()

    def claim(num_blocks: int) -> Claim:
        made = Claim(memory, num_blocks)
        made.thread += 1 + len(memory.holders)  # as of other threads
        memory.holders.append(made)
        return made

    claims = [claim(num_blocks) for num_blocks in (5, 3, 9, 1)]
    assert [each.fits(8) for each in claims] == [True, True, False, False]
    claims[0].withdraw()
    assert [each.fits(8) for each in claims[1:]] == [True, False, False], (
        "the third is not overtaken"
    )
    claims[1].withdraw()
    assert [each.fits(8) for each in claims[2:]] == [True, False], (
        "the first may need more than there is"
    )


def test_a_call_inside_of_another_one_does_not_wait_for_it() -> None:
    memory = memory_with()
    with claimed(memory, 8, lambda: 8), claimed(memory, 8, lambda: 8):
        assert len(memory.holders) == 2
        assert not any(holder.is_progressing(threading.get_ident()) for holder in memory.holders)
    assert not memory.holders


def test_a_call_that_waits_for_blocks_does_not_count_as_one_that_goes_on() -> None:
    memory, seen = memory_with(), []

    class Watch(Call):
        def is_progressing(self, thread: int) -> bool:
            seen.append([claim.is_progressing(thread + 1) for claim in claims_on(memory)])
            return False

    memory.holders.append(Watch(is_progressing=False))
    with claimed(memory, 3, lambda: 8):
        assert [claim.is_progressing(0) for claim in claims_on(memory)] == [True]
        Shortage(memory).wait()
        assert [claim.is_progressing(0) for claim in claims_on(memory)] == [True]
    assert seen == [[False]]
