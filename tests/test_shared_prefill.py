"""One prefill for several rows of a prompt: all that the cache holds is repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_paged import PagedCache, compat, last_route
from hf_paged.cache.layers import PagedIndexedLayer, PagedLayer
from hf_paged.shared_prefill import _can_repeat_rows
from tests.support import models


class _KeepsIds(LlamaForCausalLM):
    """Keeps the ids of all tokens on the cache, as Qwen4 keeps positions."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        cache = next(
            value for name, value in inputs.items() if name in ("cache", "past_key_values")
        )
        before = getattr(cache, "kept_ids", input_ids[:, :0])
        cache.kept_ids = torch.cat([before, input_ids], dim=1)
        return super().forward(input_ids, **inputs)


def test_what_a_forward_sets_on_the_cache_is_repeated() -> None:
    model = _KeepsIds(models.get("llama").config).eval()
    prompt = models.token_ids(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 3, "do_sample": False}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options, **models.PAGED), expected)
    route = last_route(model)
    assert route is not None and route.prefills_shared


class _Compressed(DynamicLayer):
    """Holds more than the method that it inherits reorders."""


class _Reordered(DynamicLayer):
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)


class _Foreign(DynamicLayer):
    __module__ = "abcnet"  # not of the module `abc`


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_Foreign, False),
        (DynamicLayer, True),
        (PagedLayer, True),
        (PagedIndexedLayer, True),
        (_Reordered, True),
        (_Compressed, False),
    ],
)
def test_layers_of_a_model_repeat_rows_only_by_a_method_of_their_own(
    kind: type, expected: bool
) -> None:
    assert _can_repeat_rows(object.__new__(kind)) is expected


def test_a_passed_cache_that_was_cropped_to_nothing() -> None:
    model, prompt = models.get("llama"), models.token_ids(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 3, "num_return_sequences": 3, "do_sample": True}
    results = []
    for cache in (DynamicCache(config=model.config), PagedCache(model.config)):
        torch.manual_seed(0)
        given = {**options, compat.cache_name(model): cache, "return_dict_in_generate": True}
        model.generate(prompt, **given)
        cache.crop(-cache.get_seq_length())
        results.append(model.generate(prompt, **given).sequences)
    assert torch.equal(*results)
