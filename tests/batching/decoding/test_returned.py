"""Errors name the processor or criterion that returned something wrong, and end its request
alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from hf_paged import PagedEngine
from tests.support import models
from tests.support.engine_helpers import run_all

GREEDY = {"max_new_tokens": 4, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 2}
IDS = torch.tensor([[5, 6, 7]])


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores.mul_(2)


class Doubles(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.mul(2)


class Fails(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        raise AttributeError("on purpose")


class Returns(StoppingCriteria):
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return self.value


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    "processors",
    [[InPlace()], [Doubles(), InPlace()], [InPlace(), Doubles()]],
    ids=["alone", "last", "first"],
)
def test_a_processor_that_returns_no_scores_is_named(
    processors: list[Any], options: dict[str, Any]
) -> None:
    model, message = models.get("llama"), "the logits processor InPlace returned None: it must"
    with PagedEngine(model) as engine:
        engine.add_request([5, 6, 7], options, logits_processor=processors, request_id="wrong")
        engine.add_request([5, 6, 7], options, request_id="right")
        results = run_all(engine)
    assert isinstance(results["wrong"].error, TypeError) and results["right"].error is None
    assert str(results["wrong"].error).startswith(message)
    with pytest.raises(TypeError, match=rf"{message} return the scores, a tensor of shape \("):
        model.generate(
            IDS, logits_processor=LogitsProcessorList(processors), **options, **models.PAGED
        )


@pytest.mark.parametrize(
    ("value", "options", "told"),
    [
        (None, GREEDY, r"None.*: it must .* shape \(1,\)"),
        ("stop", GREEDY, r"a str.*: it must .* shape \(1,\)"),
        (torch.ones(7), GREEDY, r"a tensor of shape \(7.*: it must .* shape \(1,\)"),
        (None, BEAMS, "no such tensor"),
    ],
)
def test_a_criterion_that_returns_no_bools_is_named(
    value: Any, options: dict[str, Any], told: str
) -> None:
    model, message = models.get("llama"), f"the stopping criterion Returns returned {told}"
    with PagedEngine(model) as engine:
        (result,) = engine.generate([[5, 6, 7]], options, stopping_criteria=[Returns(value)])
        assert engine.generate([[5, 6, 7]], options)[0].error is None
    assert isinstance(result.error, TypeError) and re.match(message, str(result.error))
    with pytest.raises(TypeError, match=message):
        model.generate(IDS, stopping_criteria=[Returns(value)], **options, **models.PAGED)


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_an_error_of_a_processor_itself_is_its_own(options: dict[str, Any]) -> None:
    with PagedEngine(models.get("llama")) as engine:
        (result,) = engine.generate([[5, 6, 7]], options, logits_processor=[Doubles(), Fails()])
    assert isinstance(result.error, AttributeError) and "on purpose" in str(result.error)
