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
    "values, target, said",
    [
        ([1.0], None, ""),
        ([1.2, 1.4, 1.5], 1.3, "at least 1.3: met"),
        ([1.2, 1.2, 1.5], 1.3, "at least 1.3: not met"),
        ([0.99], 1.0, "at least 1: not met"),  # too few turns for an interval
        ([0.99] * 14, 1.0, "at least 1: not met"),
        ([0.99] * 15, 1.0, "not slower: met"),
        ([0.96] * 15, 1.0, "not slower: not met"),
        ([0.96] * 8 + [0.99] * 8, 1.0, "not slower: met"),  # the interval reaches across
    ],
)
def test_verdicts(values, target, said):
    assert paired.verdict(values, target) == said


def test_at_most_and_spans():
    assert (paired.at_most(40.0, 40.0), paired.at_most(40.1, 40.0)) == (
        "at most 40: met",
        "at most 40: not met",
    )
    assert (paired.span([2.0, 1.0]), paired.span(None)) == ("1..2", "")
