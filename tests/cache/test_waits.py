"""Which calls wait for one another's blocks, and when they no longer do: with a memory that only
counts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hf_paged.cache import waits
from hf_paged.cache.waits import Claim, Shortage, claiming, claims_on
from tests.support.checks import in_threads


def memory_with(*are_progressing: bool) -> Any:
    """A memory that calls of other threads hold, which go on or not."""
    holders = [Mock() for _ in are_progressing]
    for holder, is_progressing in zip(holders, are_progressing):
        holder.is_progressing.return_value = is_progressing
    return SimpleNamespace(holders=holders, progress_count=0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    found = [1.0]
    clock = SimpleNamespace(monotonic=lambda: found[0], sleep=lambda seconds: None)
    monkeypatch.setattr(waits, "time", clock)
    return found


def test_a_call_tries_again_as_long_as_others_go_on_and_a_moment_longer(now: list[float]) -> None:
    memory = memory_with(False, True)
    other, shortage = memory.holders[1].is_progressing, Shortage(memory)
    for _ in range(3):
        now[0] += 5 * waits.GRACE
        assert shortage.should_retry()
    other.return_value = False
    now[0] += 0.9 * waits.GRACE
    assert shortage.should_retry()
    now[0] += 0.2 * waits.GRACE
    assert not shortage.should_retry()
    other.return_value = True
    assert shortage.should_retry()
    assert not Shortage(memory_with(), is_alone=True).should_retry()


def test_a_call_gives_up_where_nobody_computes(now: list[float]) -> None:
    """The code of a caller that holds blocks may wait for the call that is short of them."""
    memory = memory_with(True)
    shortage = Shortage(memory)
    for _ in range(5):
        now[0] += 0.9 * waits.MAX_STALL
        memory.progress_count += 1
        assert shortage.should_retry()
    now[0] += 1.1 * waits.MAX_STALL
    assert not shortage.should_retry()


def test_calls_that_fit_together_go_on_together_in_the_order_in_which_they_came() -> None:
    memory, claims = memory_with(), []
    for thread, num_blocks in enumerate((5, 3, 9, 1), 1):
        claims.append(Claim(memory, num_blocks))
        claims[-1].thread += thread  # as of other threads
        memory.holders.append(claims[-1])
    assert [claim.fits(8) for claim in claims] == [True, True, False, False]
    claims[0].withdraw()
    fits = [claim.fits(8) for claim in claims[1:]]
    assert fits == [True, False, False], "the third is not overtaken"
    claims[1].withdraw()
    fits = [claim.fits(8) for claim in claims[2:]]
    assert fits == [True, False], "the first may need more than there is"


def test_a_call_inside_of_another_one_does_not_wait_for_it() -> None:
    memory = memory_with()
    with claiming(memory, 8, lambda: 8), claiming(memory, 8, lambda: 8):
        assert len(memory.holders) == 2
        assert not any(holder.is_progressing(threading.get_ident()) for holder in memory.holders)
    assert not memory.holders


def test_a_call_that_waits_for_blocks_does_not_count_as_one_that_goes_on() -> None:
    memory, seen = memory_with(False), []

    def are_progressing() -> list[bool]:
        return [claim.is_progressing(0) for claim in claims_on(memory)]

    memory.holders[0].is_progressing.side_effect = lambda thread: seen.append(are_progressing())
    with claiming(memory, 3, lambda: 8):
        assert are_progressing() == [True]
        Shortage(memory).wait()
        assert are_progressing() == [True]
    assert seen == [[False]]


def test_calls_take_turns_where_they_do_not_fit_together() -> None:
    memory, most = memory_with(), [0]
    running: list[None] = []

    def call() -> None:
        for _ in range(3):
            with claiming(memory, 3, lambda: 8):
                running.append(None)
                most[0] = max(most[0], len(running))
                running.pop()

    in_threads(*[call] * 5)
    assert 1 <= most[0] <= 2 and not memory.holders
