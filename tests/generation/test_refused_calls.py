"""After a failed call, whatever the reason, the model serves the next call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both

LONG = models.prompt("llama", 1, 60)["input_ids"]
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


# Arguments of `generate`, added to `OPTIONS`; plain refuses each of them.
REFUSED: dict[str, dict[str, Any]] = {
    "ids of three dimensions": {"input_ids": LONG[None]},
    "ids of three dimensions, several rows": {"input_ids": LONG.view(1, 4, 15)},
    "ids of three dimensions, beams": {"input_ids": LONG[None], "num_beams": 3},
    "a column of ids": {"input_ids": LONG[:, :, None]},
    "ids of one dimension": {"input_ids": LONG[0]},
    "float ids": {"input_ids": LONG.float()},
    "ids outside the vocabulary": {"input_ids": LONG + models.VOCAB_SIZE},
    "no rows": {"input_ids": LONG[:0]},
    "a mask of another length": {"input_ids": LONG, "attention_mask": torch.ones(1, 7)},
    "a mask of text": {"input_ids": LONG, "attention_mask": "left"},
    "a mask of three dimensions": {"input_ids": LONG, "attention_mask": torch.ones(1, 1, 60)},
    "a processor that raises": {"input_ids": LONG, "logits_processor": [lambda ids, scores: 1 / 0]},
    "a processor that leaves no scores": {
        "input_ids": LONG,
        "logits_processor": [lambda ids, scores: scores[:, :0]],
    },
    "no new tokens": {"input_ids": LONG, "max_new_tokens": 0},
    "beams and no sampling": {"input_ids": LONG, "num_beams": 2, "num_return_sequences": 3},
    "an unknown option": {"input_ids": LONG, "max_tokens": 3},
    "a negative temperature": {"input_ids": LONG, "do_sample": True, "temperature": -1.0},
}


def call(model: PreTrainedModel, arguments: dict[str, Any], **paged: Any) -> torch.Tensor:
    """The call expects more blocks than the others, so that later calls find enough left."""
    arguments = {**OPTIONS, "max_new_tokens": 120, **arguments, **paged}
    return model.generate(arguments.pop("input_ids"), **arguments)


def assert_served(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    assert assert_paged_is_plain(model, inputs, OPTIONS).road == "engine"


SHAPES = list(REFUSED)[:4]


@pytest.mark.slow_cases("t5-*", "bart-*")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("llama", case) for case in REFUSED),
        *((name, case) for name in ("t5", "bart", "mistral") for case in SHAPES),
    ],
)
def test_after_a_refused_call_the_next_is_served(name: str, case: str) -> None:
    model, inputs = models.get(name), models.padded_prompt(name, (5, 3))
    hf_paged.free(model)  # a new pool
    assert_served(model, inputs)
    errors = (ValueError, RuntimeError, TypeError, AttributeError, IndexError, ZeroDivisionError)
    for paged in ({}, models.PAGED) * 2:
        with pytest.raises(errors):
            call(model, REFUSED[case], **paged)
    assert_served(model, inputs)


def test_a_refused_call_takes_nothing_from_a_cache_that_the_caller_holds() -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 2, 5)
    options = {**OPTIONS, "return_dict_in_generate": True}
    expected, ours = generate_both(model, inputs, options)
    with pytest.raises(ValueError, match="both must be"):
        call(model, REFUSED["ids of three dimensions"], **models.PAGED)
    for layer, stock in zip(ours.past_key_values.layers, expected.past_key_values.layers):
        torch.testing.assert_close(layer.keys + 0, stock.keys)
    assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected.sequences)
    hf_paged.check_integrity(model)


def test_a_model_whose_heads_change_is_served() -> None:
    """States of another shape need not come from the failed call: the model may have changed."""
    model, other = models.build("llama"), models.build("llama", seed=5, num_key_value_heads=4)
    inputs = models.padded_prompt("llama", (5, 3))
    assert_served(model, inputs)
    model.config, model.model, model.lm_head = other.config, other.model, other.lm_head
    assert_served(model, inputs)
