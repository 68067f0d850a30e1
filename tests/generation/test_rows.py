"""Inputs of `generate` with another number of rows than the token ids: what plain refuses is not
served."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import assert_paged_is_plain

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
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
def test_what_plain_refuses_is_refused(name: str, shape: tuple[int, int], num_beams: int) -> None:
    model = models.get(name)
    refused = []
    for what, given in inputs_of(model, *shape).items():
        if what == "token_type_ids" and name == "llama":
            continue
        options = {**OPTIONS, "num_beams": num_beams}
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


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize(
    "name", ["position_ids", "inputs_embeds", "token_type_ids", "attention_mask"]
)
def test_a_requests_inputs_are_those_of_one_prompt(name: str, is_mapping: bool) -> None:
    model = models.get("gpt2")
    given = inputs_of(model, 1, 3)[name]
    if is_mapping:  # of a processor
        given = {"token_type_ids": torch.zeros(1, LENGTH, dtype=torch.long), **given}
    with PagedEngine(model) as engine:
        with pytest.raises(ValueError, match=rf"`{name}` has (3 rows|the shape \(3, 8\))"):
            ids = given if is_mapping else given.pop("input_ids")
            engine.add_request(ids, OPTIONS, inputs=None if is_mapping else given)
        assert not engine.has_unfinished
