"""When a step is recorded, and how changes of the model delay that."""

from __future__ import annotations

from typing import Any

from hf_paged.tape.graph_keys import GraphKey
from hf_paged.tape.misses import MAX_DOUBLINGS, MIN_FIXED_MISSES, MIN_MISSES, MIN_REPLAYS, Misses
from hf_paged.tape.recorders import RecordedStep

KEY = GraphKey(1, (64,))
NOTHING: Any = None


def num_missed(misses: Misses, is_fixed: bool = False) -> int:
    """How many steps miss until one is due."""
    count = 0
    while not misses.is_due(KEY, is_fixed, has_larger=False):
        misses.add(KEY)
        count += 1
    return count


def drop(misses: Misses, *num_replays: int) -> None:
    """The model changes, and recordings that were replayed so often are dropped."""
    steps = [RecordedStep(NOTHING, NOTHING, NOTHING, NOTHING, number) for number in num_replays]
    misses.restart(steps)


def test_recordings_that_do_not_pay_wait_longer() -> None:
    misses = Misses()
    assert num_missed(misses) == MIN_MISSES and num_missed(misses) == 0
    drop(misses)
    assert num_missed(misses) == MIN_MISSES, "nothing had been recorded"
    drop(misses, MIN_REPLAYS, MIN_REPLAYS)
    assert num_missed(misses) == MIN_MISSES, "both had paid"
    drop(misses, MIN_REPLAYS, MIN_REPLAYS - 1)
    assert num_missed(misses) == 2 * MIN_MISSES
    drop(misses, 0)
    assert num_missed(misses) == 4 * MIN_MISSES
    drop(misses, 0)
    assert num_missed(misses, is_fixed=True) == MIN_FIXED_MISSES
    for _ in range(20):
        drop(misses, 1)
    longest = MIN_MISSES << MAX_DOUBLINGS
    assert num_missed(misses) == longest, "not for ever"
    drop(misses)
    assert num_missed(misses, is_fixed=True) == longest
    misses.note_paid()
    drop(misses)
    assert num_missed(misses) == MIN_MISSES


def test_a_step_that_a_larger_recording_serves_waits_for_its_own_misses() -> None:
    misses = Misses()
    wider = KEY._replace(widths=(128,))
    num_missed(misses)
    assert misses.is_due(wider, is_fixed=False, has_larger=False)
    assert not misses.is_due(wider, is_fixed=False, has_larger=True)
    misses.forget(KEY)
    assert num_missed(misses) == MIN_MISSES


def test_recordings_for_which_there_is_no_memory_wait_longer() -> None:
    misses = Misses()
    misses.delay(KEY)
    assert num_missed(misses) == 3 * MIN_MISSES
    misses.delay(KEY)
    assert num_missed(misses) == 5 * MIN_MISSES
    misses.note_recorded()
    misses.delay(KEY)
    assert num_missed(misses) == 3 * MIN_MISSES
