"""One long prompt: equal tokens, and no more K/V memory than its blocks."""

from __future__ import annotations

import pytest
from transformers import DynamicCache

import hf_paged
from hf_paged import compat
from tests.support import models

PLAIN = {"prefix_caching": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_tokens, new_tokens", [(512, 16), pytest.param(32768, 4, marks=pytest.mark.full)]
)
def test_the_tokens_and_the_bytes_are_plain_ones(num_tokens: int, new_tokens: int) -> None:
    model = models.build("llama", max_position_embeddings=num_tokens + new_tokens)
    ids = models.token_ids(1, num_tokens)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    cache = DynamicCache(config=model.config)
    expected = model.generate(ids, **options, **{compat.OUTPUT_CACHE: cache})
    paged = model.generate(ids, **options, cache_implementation="paged", cache_config=PLAIN)
    assert paged.tolist() == expected.tolist()
    with hf_paged.PagedEngine(model, PLAIN) as engine:
        (result,) = engine.generate(ids.tolist(), options)
        assert result.token_ids == expected[0, num_tokens:].tolist()
        held = [hf_paged.memory_stats(model).peak_bytes, engine.stats().peak_bytes]
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    block = plain // (num_tokens + new_tokens - 1) * 16
    assert all(plain - block < num_bytes <= plain + block for num_bytes in held)
