"""Generation configs of requests: remembered, and always those that transformers would make now."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_paged import compat
from hf_paged.batching.decoding import prepare
from tests.support import models


def made(model: Any, **options: Any) -> dict[str, Any]:
    keywords = {"generation_config": None, **options}
    own, _ = compat.prepare_generation_config(model, **keywords)
    config = prepare._cached_config(model, keywords)
    assert vars(config) == vars(own)
    return vars(config)


def test_equal_options_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    prepare_config, calls = compat.prepare_generation_config, []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        return prepare_config(*arguments, **keywords)

    monkeypatch.setattr(compat, "prepare_generation_config", counted)
    keywords = {"generation_config": None, "max_new_tokens": 5}
    first = prepare._cached_config(model, keywords)
    first.max_new_tokens = 7
    assert prepare._cached_config(model, dict(keywords)).max_new_tokens == 5
    assert len(calls) == 1
    prepare._cached_config(model, {**keywords, "max_new_tokens": 6})
    prepare._cached_config(models.build("llama"), keywords)
    assert len(calls) == 3


def test_changes_of_the_model_and_of_a_given_config_are_seen() -> None:
    model = models.build("llama")
    model.generation_config.eos_token_id = [1, 2]
    assert made(model, max_new_tokens=5)["eos_token_id"] == [1, 2]
    model.generation_config.eos_token_id.append(3)
    assert made(model, max_new_tokens=5)["eos_token_id"] == [1, 2, 3]
    model.generation_config.top_k = 7
    assert made(model, max_new_tokens=5)["top_k"] == 7
    given = GenerationConfig(max_new_tokens=4, eos_token_id=[5])
    assert made(model, generation_config=given)["eos_token_id"] == [5]
    given.eos_token_id.append(6)
    given.max_new_tokens = 9
    config = made(model, generation_config=given)
    assert (config["eos_token_id"], config["max_new_tokens"]) == ([5, 6], 9)


def test_copies_share_nothing() -> None:
    model = models.build("llama")
    first = made(model, max_new_tokens=5, eos_token_id=[1, 2])
    first["eos_token_id"].append(3)
    assert made(model, max_new_tokens=5, eos_token_id=[1, 2])["eos_token_id"] == [1, 2]


def test_options_that_compare_equal_are_told_apart() -> None:
    """`True == 1 == 1.0`, and transformers' checks ask for types."""
    model = models.build("llama")
    assert made(model, max_new_tokens=5, temperature=1.0)["temperature"] == 1.0
    assert type(made(model, max_new_tokens=5, temperature=1)["temperature"]) is int
    assert made(model, max_new_tokens=5, bad_words_ids=[[7]])["bad_words_ids"] == [[7]]


def test_attributes_that_compare_equal_are_told_apart() -> None:
    model = models.build("llama")
    assert (
        type(made(model, generation_config=GenerationConfig(temperature=2))["temperature"]) is int
    )
    given = GenerationConfig(temperature=2.0)
    assert type(made(model, generation_config=given)["temperature"]) is float
    model.generation_config.sequence_bias = [[[5], 2]]
    made(model, max_new_tokens=5)
    model.generation_config.sequence_bias = [[[5], 2.0]]
    assert type(made(model, max_new_tokens=5)["sequence_bias"][0][1]) is float


def test_a_class_of_the_models_options_may_make_them_of_anything() -> None:
    class Counted(GenerationConfig):
        most = 5

        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "max_new_tokens": self.most}

    model = models.build("llama")
    model.generation_config = Counted()
    assert made(model)["max_new_tokens"] == 5
    Counted.most = 6
    assert made(model)["max_new_tokens"] == 6


def test_a_models_config_may_hold_what_cannot_be_copied() -> None:
    model = models.build("llama")
    model.config.lock = threading.Lock()
    assert made(model, max_new_tokens=5)["max_new_tokens"] == 5
    assert made(model, max_new_tokens=6)["max_new_tokens"] == 6


def test_a_remembered_model_is_freed() -> None:
    model = models.build("llama")
    made(model, max_new_tokens=5)
    assert model in prepare._config_cache
    size = len(prepare._config_cache)
    del model
    assert len(prepare._config_cache) == size - 1
