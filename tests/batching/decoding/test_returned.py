"""Errors name the processor or criterion that returned something wrong, and end its request
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged import PagedEngine
from tests.support import models
from tests.support.engine_helpers import Asked

MODES = {
    "greedy": {"max_new_tokens": 4, "do_sample": False},
    "beams": {"max_new_tokens": 4, "do_sample": False, "num_beams": 2},
}


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


def code_of(*functions: Any) -> dict[str, Any]:
    return {"logits_processor": list(functions)}


PROCESSOR = "the logits processor InPlace returned None"
CRITERION = "the stopping criterion Returns returned "
# code, what its error says, and the type of the error
BOTH: list[tuple[dict[str, Any], str, type[Exception]]] = [
    (code_of(InPlace()), rf"{PROCESSOR}: it must return .*, a tensor of shape \(", TypeError),
    (code_of(double, InPlace()), PROCESSOR, TypeError),
    (code_of(InPlace(), double), PROCESSOR, TypeError),
    (code_of(double, fail), "on purpose", AttributeError),  # an error of its own
]
WRONG = {
    "greedy": [
        *BOTH,
        *(
            ({"stopping_criteria": [Returns(value)]}, rf"{CRITERION}{told}.*\(1,\)", TypeError)
            for value, told in (
                (None, "None"),
                ("stop", "an object of type str"),
                (torch.ones(7), r"a tensor of shape \(7"),
            )
        ),
    ],
    "beams": [
        *BOTH,
        ({"stopping_criteria": [Returns(None)]}, f"{CRITERION}an invalid result", TypeError),
    ],
}


@pytest.mark.parametrize("mode", WRONG)
def test_code_that_returns_something_wrong_is_named(mode: str) -> None:
    model, options = models.get("llama"), MODES[mode]
    for code, message, error in WRONG[mode]:
        with PagedEngine(model) as engine:
            engine.add_request([5, 6, 7], options, **code, request_id="wrong")
            asked = Asked(engine, [[5, 6, 7]], options)
            results = asked.check()
        with pytest.raises(error, match=message):
            raise results["wrong"].error
        with pytest.raises(error, match=message):
            model.generate(torch.tensor([[5, 6, 7]]), **code, **options, **models.PAGED)
