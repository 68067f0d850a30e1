"""Errors name the processor or criterion that returned something wrong, and end its request
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged import PagedEngine
from tests.support import models
from tests.support.engine_helpers import run_all

GREEDY = {"max_new_tokens": 4, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 2}
IDS = torch.tensor([[5, 6, 7]])


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores.mul_(2)


class Returns(StoppingCriteria):
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return self.value


def double(input_ids: Any, scores: Any) -> Any:
    return scores.mul(2)


def fail(input_ids: Any, scores: Any) -> Any:
    raise AttributeError("on purpose")


NONE = (
    r"the logits processor InPlace returned None: it must return the scores, a tensor of shape \("
)
CRITERION = "the stopping criterion Returns returned {}.*: it must .*"
WRONG = [
    *(
        ({"logits_processor": processors}, options, NONE)
        for processors in ([InPlace()], [double, InPlace()], [InPlace(), double])
        for options in (GREEDY, BEAMS)
    ),
    *(
        ({"stopping_criteria": [Returns(value)]}, GREEDY, CRITERION.format(told) + r"shape \(1,\)")
        for value, told in (
            (None, "None"),
            ("stop", "an object of type str"),
            (torch.ones(7), r"a tensor of shape \(7"),
        )
    ),
    ({"stopping_criteria": [Returns(None)]}, BEAMS, CRITERION.format("an invalid result")),
]


@pytest.mark.parametrize(("code", "options", "message"), WRONG)
def test_code_that_returns_something_wrong_is_named(
    code: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    model = models.get("llama")
    with PagedEngine(model) as engine:
        engine.add_request([5, 6, 7], options, **code, request_id="wrong")
        engine.add_request([5, 6, 7], options, request_id="right")
        results = run_all(engine)
    assert results["right"].error is None
    with pytest.raises(TypeError, match=message):
        raise results["wrong"].error
    with pytest.raises(TypeError, match=message):
        model.generate(IDS, **code, **options, **models.PAGED)


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_an_error_of_a_processor_itself_is_its_own(options: dict[str, Any]) -> None:
    with PagedEngine(models.get("llama")) as engine:
        (result,) = engine.generate([[5, 6, 7]], options, logits_processor=[double, fail])
    assert isinstance(result.error, AttributeError) and "on purpose" in str(result.error)
