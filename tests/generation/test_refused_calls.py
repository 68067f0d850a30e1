"""What plain `generate` refuses is not served, and after a failed call, whatever the reason, the
model serves the next call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both

LONG = models.prompt("llama", 1, 60)["input_ids"]
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
ERRORS = (ValueError, RuntimeError, TypeError, AttributeError, IndexError, ZeroDivisionError)


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
SHAPES = list(REFUSED)[:4]


def call(model: PreTrainedModel, arguments: dict[str, Any], **paged: Any) -> torch.Tensor:
    """The call expects more blocks than the others, so that later calls find enough left."""
    arguments = {**OPTIONS, "max_new_tokens": 120, **arguments, **paged}
    return model.generate(arguments.pop("input_ids"), **arguments)


def assert_served(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    assert assert_paged_is_plain(model, inputs, OPTIONS).road == "engine"


@pytest.mark.slow_cases("t5", "bart")
@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "bart"])
def test_after_a_refused_call_the_next_is_served(name: str) -> None:
    model, inputs = models.get(name), models.padded_prompt(name, (5, 3))
    for case in REFUSED if name == "llama" else SHAPES:
        hf_paged.free(model)  # a new pool
        assert_served(model, inputs)
        for paged in ({}, models.PAGED) * 2:
            with pytest.raises(ERRORS):
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


# ----------------------------------------------- inputs with another number of rows than the ids

LENGTH = 8
POSITIONS = torch.arange(LENGTH)


def inputs_of(model: Any, rows: int, others: int) -> dict[str, dict[str, Any]]:
    """By name: `rows` rows of token ids, and another input of `others` rows."""
    ids = models.token_ids(1, LENGTH)
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.ones(others, LENGTH, dtype=torch.long)
    mask[0, :2] = 0
    several: dict[str, Any] = {
        "attention_mask": mask,
        "position_ids": POSITIONS.repeat(others, 1),
        "inputs_embeds": embeds.repeat(others, 1, 1),
        "token_type_ids": torch.zeros(others, LENGTH, dtype=torch.long),
    }
    repeated = ids.repeat(rows, 1)
    given = {name: {"input_ids": repeated, name: value} for name, value in several.items()}
    given["mask of embeddings"] = {
        "inputs_embeds": embeds.repeat(rows, 1, 1),
        "attention_mask": mask,
    }
    return given


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("shape", [(1, 3), (3, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_other_numbers_of_rows(name: str, shape: tuple[int, int], num_beams: int) -> None:
    model, options = models.get(name), {**OPTIONS, "max_new_tokens": 3, "num_beams": num_beams}
    refused = []
    for what, given in inputs_of(model, *shape).items():
        if what == "token_type_ids" and name == "llama":
            continue
        try:
            plain = model.generate(**given, **options)
        except (IndexError, RuntimeError):
            refused.append(what)
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                model.generate(**given, **options, **models.PAGED)
        else:  # one row for all
            assert torch.equal(model.generate(**given, **options, **models.PAGED), plain), what
    assert refused
    hf_paged.check_integrity(model)


def test_inputs_that_an_encoder_decoder_ignores_are_ignored() -> None:
    inputs = {"input_ids": models.token_ids(2, LENGTH), "position_ids": POSITIONS[None]}
    assert_paged_is_plain(models.get("t5"), inputs, OPTIONS)


@pytest.mark.parametrize(
    "name", ["position_ids", "inputs_embeds", "token_type_ids", "attention_mask"]
)
def test_a_requests_inputs_are_those_of_one_prompt(name: str) -> None:
    model = models.get("gpt2")
    given = inputs_of(model, 1, 3)[name]
    types = torch.zeros(1, LENGTH, dtype=torch.long)
    of_a_processor = {"token_type_ids": types, **given}
    ids = given.pop("input_ids")
    with PagedEngine(model) as engine:
        for prompt, inputs in ((of_a_processor, None), (ids, given)):
            with pytest.raises(ValueError, match=rf"`{name}` has (3 rows|the shape \(3, 8\))"):
                engine.add_request(prompt, OPTIONS, inputs=inputs)
        assert not engine.has_unfinished
