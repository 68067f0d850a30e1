"""Generation configs of requests: remembered, and always those that transformers would make now."""

from __future__ import annotations

import threading
from typing import Any

from transformers import GenerationConfig

from hf_paged import compat
from hf_paged.batching.decoding import prepare
from tests.support import models


def made(model: Any, **options: Any) -> dict[str, Any]:
    keywords = {"generation_config": None, **options}
    own, _ = compat.prepare_generation_config(model, **keywords)
    config = prepare._cached_config(model, keywords)
    # `True == 1 == 1.0`, and transformers' checks ask for types
    assert repr(sorted(vars(config).items())) == repr(sorted(vars(own).items()))
    return vars(config)


def test_options_are_those_that_transformers_would_make_now() -> None:
    """Changes of the model, of a given config and of what was made are seen or not, as there."""
    model = models.build("llama")
    theirs = model.generation_config
    theirs.eos_token_id = [1, 2]
    made(model, max_new_tokens=5)["eos_token_id"].append(3)
    assert made(model, max_new_tokens=5)["eos_token_id"] == [1, 2]
    theirs.eos_token_id.append(3)
    made(model, max_new_tokens=5, temperature=1.0)
    made(model, max_new_tokens=5, temperature=1)
    made(model, max_new_tokens=5, bad_words_ids=[[7]])["bad_words_ids"].append([8])
    assert made(model, max_new_tokens=5, bad_words_ids=[[7]])["bad_words_ids"] == [[7]]
    theirs.top_k = 7
    for bias in (2, 2.0):
        theirs.sequence_bias = [[[5], bias]]
        made(model, max_new_tokens=5)
    for temperature in (2, 2.0):
        given = GenerationConfig(eos_token_id=[5], temperature=temperature)
        made(model, generation_config=given)
        given.eos_token_id.append(6)
        given.max_new_tokens = 9
        assert made(model, generation_config=given)["eos_token_id"] == [5, 6]
    model.config.lock = threading.Lock()  # cannot be copied
    assert made(model, max_new_tokens=5)["max_new_tokens"] == 5
    assert made(model, max_new_tokens=6)["max_new_tokens"] == 6


def test_a_class_of_the_models_options_may_make_them_of_anything() -> None:
    class Counted(GenerationConfig):
        most = 5

        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "max_new_tokens": self.most}

    model = models.build("llama")
    model.generation_config = Counted()
    for most in (5, 6):
        Counted.most = most
        assert made(model)["max_new_tokens"] == most
    size = len(prepare._config_cache)
    assert model in prepare._config_cache
    del model
    assert len(prepare._config_cache) == size - 1, "a remembered model is kept"
