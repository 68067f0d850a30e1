"""Models whose layers have other numbers of heads: their config refuses to be read for the model as
a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.architecture_configs import spread_weights, tiny_config

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Dots3NoteForCausalLM"), reason="this version has no such model"
)

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def build() -> Any:
    """Dots3Note, whose layers of sliding attention have fewer heads."""
    sliding = {
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 24,
        "sliding_window": 8,
    }
    model_class = transformers.Dots3NoteForCausalLM
    config = tiny_config(model_class.config_class, per_layer_config=dict.fromkeys((1, 3), sliding))
    model = model_class(config).float().eval()
    spread_weights(model, 0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["blocks", "virtual"])
def test_tokens(storage: str) -> None:
    model, inputs = build(), models.prompt("llama", 2, 12)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        assert model.config.num_key_value_heads
    plain = model.generate(**inputs, **GREEDY)
    config = {"storage": storage}
    assert torch.equal(
        plain, model.generate(**inputs, **GREEDY, cache_implementation="paged", cache_config=config)
    )
    with PagedEngine(model, config) as engine:
        results = engine.generate(inputs["input_ids"], GREEDY)
    assert [result.token_ids for result in results] == plain[:, 12:].tolist()
    hf_paged.free(model)
