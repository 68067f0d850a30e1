"""Assistants inside wrappers of models."""

from __future__ import annotations

from hf_paged import PagedEngine
from tests.batching.test_wrappers import CONFIG, GREEDY, PROMPT, compiled, tokens
from tests.support import models


def test_an_assistant_may_be_wrapped() -> None:
    model, assistant = models.build("llama"), models.get_assistant("llama")
    expected = tokens(model)
    with PagedEngine(model, CONFIG) as engine:
        (result,) = engine.generate([PROMPT], GREEDY, assistant_model=compiled(assistant))
        assert result.error is None and result.token_ids == expected
