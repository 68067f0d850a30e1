"""The choice between recompute and swap."""

from __future__ import annotations

import pytest

from hf_paged.batching.scheduling.preemption import CostModel
from tests.support.engine_helpers import Asked, engine_of, prompts


def test_the_cheaper_one_is_chosen_on_both_sides_of_the_break_even() -> None:
    assert CostModel(1e30).choose(10**9, 1) == "recompute"  # no prefill was seen
    model = CostModel(1000.0)
    for num_tokens in (10, 50, 90):
        model.observe_prefill(num_tokens, 0.01 * num_tokens)
    # 100 tokens: 1 second. 500 bytes out and back: 1 second.
    assert model.choose(100, 499) == "swap"
    assert model.choose(100, 501) == "recompute"


def test_means_weigh_by_tokens_and_a_half_life_halves_the_weight() -> None:
    model, untimed = CostModel(7.0), CostModel(7.0)
    untimed.observe_swap(100, 0.0)  # too short to time
    assert untimed.bytes_per_second == 7.0
    model.observe_swap(100, 1.0)
    assert model.bytes_per_second == pytest.approx(100), "observed, it replaces what was given"
    model.observe_prefill(100, 8.0)
    for _ in range(CostModel.HALF_LIFE - 1):
        model.observe_prefill(0, 0.0)
    model.observe_prefill(150, 1.0)
    assert model.seconds_per_token == pytest.approx((8.0 / 2 + 1.0) / (100 / 2 + 150))


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_auto_does_not_swap_what_others_hold(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swapped-in copy gets separate blocks, so fewer requests fit than before."""
    monkeypatch.setattr(CostModel, "choose", lambda *given: "swap")
    (prefix,), ends = prompts(64, seed=3), prompts(*range(5, 13), seed=4)
    texts = [[*prefix, *end] if is_shared else [*end, *prefix[:16]] for end in ends]
    options = {"do_sample": False, "max_new_tokens": 30}
    with engine_of(num_blocks=30) as engine:
        engine.generate(texts[:1], {**options, "max_new_tokens": 1})  # its blocks are indexed
        Asked(engine, texts, options).check()
        stats = engine.stats()
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (not is_shared)
