"""Ratios within turns, their intervals and verdicts."""

from __future__ import annotations

import pytest

from benchmarks import paired


def test_ratios_are_of_the_turns_that_both_ran():
    assert paired.ratios([4.0, 9.0, 1.0], [2.0, 3.0]) == [2.0, 3.0]


def test_interval_of_the_median():
    assert paired.interval([1.0, 2.0, 3.0, 4.0]) is None
    assert paired.interval([2.0] * 5) == (2.0, 2.0)
    values = [1.0 + 0.01 * index for index in range(21)]
    low, high = paired.interval(values)
    assert low < 1.1 < high and (low, high) == paired.interval(values)
    # the median of 21 lies between the 6th and the 16th smallest with a probability of 97.3%
    # (binomial), of 92.2% between the 7th and the 15th
    assert 1.05 <= low <= 1.06 and 1.14 <= high <= 1.15


@pytest.mark.parametrize(
    "values, target, is_met",
    [
        ([1.2, 1.4, 1.5], 1.3, True),
        ([1.2, 1.2, 1.5], 1.3, False),  # too few turns for an interval: the median decides
        ([0.99], 1.0, False),
        ([0.99] * 15, 1 / paired.NOT_SLOWER, True),
        ([0.96] * 15, 1 / paired.NOT_SLOWER, False),
        ([0.96] * 8 + [0.99] * 8, 1 / paired.NOT_SLOWER, True),  # the interval reaches across
    ],
)
def test_targets_are_reached_by_intervals(values, target, is_met):
    assert paired.estimate(values).reaches(target) == is_met


def test_text_of_an_estimate():
    assert paired.estimate([1.0]).text(2) == "1.00"
    assert paired.estimate([1.0, 2.0]).text(1) == "1.5 (1.0 to 2.0)"
