"""Drafts on models with recurrent states: after a rejected draft a row returns to the state before
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.speculation import sources as speculation
from hf_paged.speculation.sources import StepCosts
from tests.rectangles.test_state_snapshots import CLASSES, NEVER, STATELESS, text
from tests.speculation.test_speculation import (
    GREEDY,
    NGRAM,
    check_accept_lengths,
    repeating,
)
from tests.support import models
from tests.support.engine_helpers import Asked, lone_run
from tests.support.forwards import build


@pytest.fixture(autouse=True)
def cheap_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes drafts worthwhile whatever the step times on this machine."""
    monkeypatch.setattr(StepCosts, "price", lambda *args: 0.3)
    monkeypatch.setattr(speculation, "NGRAM_SIZE", 1)  # random models repeat no more


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow_cases("Lfm2ForCausalLM")
@pytest.mark.parametrize(
    "name", ["Lfm2ForCausalLM", *slow(*(name for name in CLASSES if name[:4] != "Lfm2"), STATELESS)]
)
def test_random_accept_lengths(name: str) -> None:
    """Some rows continue beside others' drafts; some lose their blocks in mid-draft."""
    texts = [text(length, seed) for seed, length in enumerate((3, 12, 7, 20))]
    beams = {**GREEDY, "num_beams": 2}
    seen = check_accept_lengths(build(name), texts, (None, 34, 30), beside=beams)
    assert sum(accepted for _, accepted in seen) > 30


@pytest.mark.slow_cases("Lfm2ForCausalLM")
@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", *slow("Qwen3NextForCausalLM")])
def test_generate_speculates_by_ngrams(name: str) -> None:
    """One row and several; a rejected draft's tokens are in no cached prefix."""
    model: Any = build(name)
    paged = {"cache_implementation": "paged", "cache_config": NGRAM}
    for rows in ([list(range(4, 150))], repeating(9, 5, 7)):
        # what the first one has behind any token
        inputs = models.left_padded(rows)
        expected = model.generate(**inputs, **GREEDY)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **GREEDY, **paged), expected)
            route = hf_paged.last_route(model)
            assert route is not None and route.road == "engine" and route.num_draft_tokens > 0
    hf_paged.check_integrity(model)


@pytest.mark.slow
def test_rows_that_cannot_go_back_are_refused() -> None:
    """A model whose layers reset their state in each forward of more than a token."""
    model = build(NEVER)
    with PagedEngine(model, PagedConfig(**NGRAM)) as engine:
        with pytest.raises(ValueError, match="the engine cannot assist this request"):
            engine.add_request(text(9, 1), {**GREEDY, "prompt_lookup_num_tokens": 3})
        (result,) = engine.generate([repeating(9)[0]], GREEDY)
        assert not result.num_draft_tokens
    assert result.token_ids == lone_run(model, repeating(9)[0], GREEDY)[0]


@pytest.mark.slow
def test_an_assistant_proposes_for_a_model_with_states() -> None:
    model: Any = build("Qwen3NextForCausalLM")
    assistant: Any = build("LlamaForCausalLM")
    prompts = [text(6, 1), text(11, 2)]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        Asked(engine, prompts, GREEDY, assistant_model=assistant).check()
        assert engine.stats().num_draft_tokens > 0
