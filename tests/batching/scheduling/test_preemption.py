"""The choice between recompute and swap."""

from __future__ import annotations

import pytest

from hf_paged.batching.scheduling.preemption import CostModel


def test_the_cheaper_one_is_chosen_on_both_sides_of_the_break_even() -> None:
    assert CostModel(1e30).choose(10**9, 1) == "recompute"  # no prefill was seen
    model = CostModel(1000.0)
    for num_tokens in (10, 50, 90):
        model.observe_prefill(num_tokens, 0.01 * num_tokens)
    # 100 tokens: 1 second. 500 bytes out and back: 1 second.
    assert model.choose(100, 499) == "swap"
    assert model.choose(100, 501) == "recompute"


def test_the_mean_weighs_by_tokens_and_a_half_life_halves_the_weight() -> None:
    model = CostModel(1.0)
    model.observe_prefill(100, 8.0)
    for _ in range(CostModel.HALF_LIFE - 1):
        model.observe_prefill(0, 0.0)
    model.observe_prefill(150, 1.0)
    assert model.seconds_per_token == pytest.approx((8.0 / 2 + 1.0) / (100 / 2 + 150))


def test_what_was_observed_replaces_what_was_given_and_the_new_replaces_the_old() -> None:
    model, untimed = CostModel(1.0), CostModel(7.0)
    untimed.observe_swap(100, 0.0)  # too short to time
    assert untimed.bytes_per_second == 7.0
    model.observe_swap(100, 1.0)
    assert model.bytes_per_second == pytest.approx(100)
    for seconds in (0.002, 0.004):
        for _ in range(20 * CostModel.HALF_LIFE):
            model.observe_swap(5000, 1.0)
            model.observe_prefill(1000, seconds * 1000)
    assert model.bytes_per_second == pytest.approx(5000, rel=1e-3)
    assert model.seconds_per_token == pytest.approx(0.004, rel=1e-3)
