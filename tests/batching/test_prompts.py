"""Prompts that are more than token ids: images, embeddings, positions of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged.batching.decoding.prepare import captured_call
from hf_paged.batching.execution.prompts import prompts_of
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import decoder_text

LENGTH = 11  # tokens of the longer of two prompts


def text(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return decoder_text(model.config)


def test_positions_with_several_axes_that_count_are_packed() -> None:
    model = tiny_model(transformers.Qwen2VLForConditionalGeneration)
    inputs = text(model)
    options = {**inputs, "do_sample": False, "max_new_tokens": 9}
    plain, paged = model.generate(**options), model.generate(**options, **models.PAGED)
    assert torch.equal(plain, paged)
    assert hf_paged.last_route(model).road == "engine"
    counted = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0).expand(3, -1, -1).clone()
    plain = model.generate(**options, position_ids=counted)
    assert torch.equal(plain, model.generate(**options, position_ids=counted, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {}])
def test_a_captured_call_has_each_prompt_once(options: dict[str, Any]) -> None:
    model = models.get("llama")
    inputs = text(model)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    before = dict(vars(model.generation_config))
    call = captured_call(model, **inputs, inputs_embeds=embeds, max_new_tokens=5, **options)
    rows = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    assert call.method == ("_beam_search" if "num_beams" in options else "_sample")
    assert call.arguments["input_ids"].shape == (2 * rows, LENGTH)
    assert call.unexpanded is not None
    prompts = prompts_of(call.unexpanded, call.arguments["model_kwargs"], is_decoder=False)
    assert torch.equal(prompts.input_ids, inputs["input_ids"])
    assert prompts.model_kwargs["inputs_embeds"] is embeds and prompts.model_kwargs["use_cache"]
    assert "past_key_values" not in prompts.model_kwargs
    assert prompts.paddings == (inputs["attention_mask"] == 0).sum(-1).tolist() and prompts.length == LENGTH
    assert vars(model.generation_config) == before
    assert model.generate(**inputs, max_new_tokens=5).shape == (2, LENGTH + 5)  # as ever behind it


def test_a_captured_call_raises_as_generate() -> None:
    model = models.get("llama")
    with pytest.raises(ValueError, match="max_new_tokens"):
        captured_call(model, **text(model), max_new_tokens=0)
