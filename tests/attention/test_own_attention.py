"""Custom attention functions and masks of the user: called with gathered K/V, never replaced by
ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_paged import PagedEngine, check_integrity, last_route
from tests.support import models
from tests.support.engine_helpers import lone_run, prompts, tokens_of

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def sharper(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Any:
    """sdpa with doubled scores, computed from data that non-torch code could read."""
    assert type(key) is type(value) is Tensor and key.data_ptr() and value.data_ptr()
    assert mask is None or type(mask) is Tensor
    if isinstance(kwargs.get("scaling"), float):
        kwargs["scaling"] *= 2
    else:
        query = 2 * query
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> Any:
    """transformers' implementation, except for the factor."""
    key, value = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling * 2
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).contiguous(), None


def nearest(*args: Any, **kwargs: Any) -> Any:
    """A mask that hides all but the last four keys of each query."""
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(*args, **kwargs)
    length, queries = mask.shape[-1], mask.shape[-2]
    positions = torch.arange(length - queries, length)[:, None] - torch.arange(length)
    return mask & (positions < 4)


def _register_both() -> None:
    AttentionInterface.register("mine", sharper)
    AttentionMaskInterface.register("mine", sdpa_mask)


WAYS: dict[str, tuple[str, Callable[[], object]]] = {  # the name, and what gives it another meaning
    "both": ("mine", _register_both),
    "without a mask": ("mine", lambda: AttentionInterface.register("mine", sharper)),
    "assigned": ("sdpa", lambda: ALL_ATTENTION_FUNCTIONS.update(sdpa=sharper)),
    "registered again": ("sdpa", lambda: AttentionInterface.register("sdpa", sharper)),
    "mask": ("sdpa", lambda: AttentionMaskInterface.register("sdpa", nearest)),
    "eager": ("eager", lambda: setattr(modeling_llama, "eager_attention_forward", eager)),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    interfaces = (AttentionInterface, AttentionMaskInterface)
    before = [dict(interface._global_mapping) for interface in interfaces]
    own = modeling_llama.eager_attention_forward
    yield
    for interface, mapping in zip(interfaces, before):
        interface._global_mapping.clear()
        interface._global_mapping.update(mapping)
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
    modeling_llama.eager_attention_forward = own


def assert_gathered(model: Any, implementation: str, **options: Any) -> Tensor:
    """Asserts that a call gives plain's tokens, by the model's own attention; returns them."""
    inputs = models.padded_prompt("llama")
    expected = model.generate(**inputs, **OPTIONS, **options)
    found = model.generate(**inputs, **OPTIONS, **options, **models.PAGED)
    assert torch.equal(found, expected)
    route = last_route(model)
    assert route is not None and route.road == "hf_loop" and not route.in_place
    named = f"its attention function or mask, '{implementation}', is not transformers' own"
    assert named in route.reason and model.config._attn_implementation == implementation
    check_integrity(model)
    return expected


@pytest.mark.slow_cases("*-1")  # an engine calls it greedily, below
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_is_called_by_generate(way: str, beams: int) -> None:
    model, (implementation, register) = models.build("llama"), WAYS[way]
    # a finding made here is invalid later
    before = model.generate(**models.padded_prompt("llama"), **OPTIONS, **models.PAGED)
    register()
    model.set_attn_implementation(implementation)
    assert not torch.equal(assert_gathered(model, implementation, num_beams=beams), before)


@pytest.mark.parametrize("way", WAYS)
def test_is_called_by_the_engine(way: str) -> None:
    model, (implementation, register), texts = models.build("llama"), WAYS[way], prompts(9, 5)
    with PagedEngine(model) as engine:
        engine.generate(texts, OPTIONS)
        register()
        model.set_attn_implementation(implementation)
        found = tokens_of(engine.generate(texts, OPTIONS))
        engine.check_integrity()
    assert found == [lone_run(model, text, OPTIONS) for text in texts]


def test_in_a_decoder_with_an_encoder() -> None:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sharper
    assert_gathered(models.build("bart"), "sdpa")


def test_a_name_for_one_of_transformers_own_is_no_obstacle() -> None:
    AttentionInterface.register("mine", sdpa_attention_forward)
    AttentionMaskInterface.register("mine", sdpa_mask)
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    model.set_attn_implementation("mine")
    expected = model.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected)
    assert last_route(model).road == "engine"
