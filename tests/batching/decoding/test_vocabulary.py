"""Token ids of prompts that have no embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.decoding.vocabulary import check_vocabulary
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_media import media_rows
from tests.support.engine_helpers import run_all

CONFIG = PagedConfig(block_size=8, num_blocks=64)
GREEDY = {"do_sample": False, "max_new_tokens": 5}


def picture_prompt(name: str) -> tuple[Any, list[int], dict[str, Any]]:
    """A model, and the token ids and other inputs of a prompt with a picture."""
    torch.manual_seed(0)
    model = tiny_model(getattr(transformers, name))
    (row, *_) = media_rows(model)["image"]
    ids = row["input_ids"][0].tolist()
    others = {key: x for key, x in row.items() if key not in ("input_ids", "attention_mask")}
    return model, ids, others


@pytest.mark.parametrize("name", ["positions", "picture", "encoder", "decoder"])
def test_ids_without_an_embedding_are_refused_before_memory_is_allocated(name: str) -> None:
    model, ids, inputs = models.get("bart"), [5, 6], dict[str, Any]()
    if name == "positions":
        model, inputs = models.get("llama"), {"position_ids": torch.arange(3)[None]}
    elif name == "picture":
        model, ids, inputs = picture_prompt("LlavaForConditionalGeneration")
    last_id = model.get_input_embeddings().num_embeddings - 1
    with PagedEngine(model, CONFIG) as engine:
        for wrong in (-1, 1 << 30):
            text = [*ids, wrong]
            if name == "decoder":
                text, inputs = ids, {"decoder_input_ids": torch.tensor([[1, wrong]])}
            message = f"token id {wrong} is outside the vocabulary: ids from 0 to {last_id} have"
            with pytest.raises(ValueError, match=message):
                engine.add_request(text, GREEDY, inputs=inputs or None)
        assert engine._core.loop is None


def test_placeholders_outside_the_vocabulary_stand_for_pictures() -> None:
    model, ids, inputs = picture_prompt("PaliGemmaForConditionalGeneration")
    outside = model.get_input_embeddings().num_embeddings + 3
    ids = [outside if token == model.config.image_token_id else token for token in ids]
    model.config.image_token_id = outside
    plain = model.generate(torch.tensor([ids]), **inputs, **GREEDY, eos_token_id=None)
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(ids, {**GREEDY, "eos_token_id": None}, inputs=inputs, request_id="a")
        result = run_all(engine)["a"]
        with pytest.raises(ValueError, match=f"token id {outside + 1} is outside the vocabulary"):
            engine.add_request([*ids, outside + 1], GREEDY, inputs=inputs)
    assert result.token_ids == plain[0, len(ids) :].tolist()


def test_ids_that_nobody_looks_up_are_not_checked() -> None:
    class Own(transformers.LlamaForCausalLM):
        """Code of a user's own may know other placeholders."""

    model = tiny_model(transformers.LlamaForCausalLM)
    model.__class__ = Own
    check_vocabulary(model, [5, -200], {"pixel_values": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="-200 is outside"):
        check_vocabulary(model, [5, -200], {"position_ids": torch.arange(2)[None]})
    check_vocabulary(models.get("llama"), [5, -1], {"inputs_embeds": torch.zeros(1, 2, 8)})
    whisper = models.get("whisper")  # its encoder has no table of ids
    check_vocabulary(whisper, [5, -1], {"input_features": torch.zeros(1, 2, 8)})
