"""The attention function as transformers calls it."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import blockwise_overlay, create_causal_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

import hf_paged
from hf_paged import compat
from hf_paged.attention.switch import (
    NAME,
    eager_features,
    model_attention,
    switch_attention,
    switchable_configs,
)
from hf_paged.cache.handles import PagedTensor
from tests.support import models

build, token_ids, PAGED = models.build, models.token_ids, models.PAGED


def switched(model: Any) -> Any:
    return switch_attention(list(model.modules()))


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
def test_a_model_loaded_with_ours_is_as_with_its_own(name: str) -> None:
    """It trains, and generates with and without us."""
    own, ours = build(name), build(name, attn_implementation=NAME)
    ids, options = token_ids(2, 9), dict(max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    expected = own.generate(ids, **options)
    for paged in ({}, PAGED):
        assert torch.equal(ours.generate(ids, **options, **paged), expected)
    assert ours.config._attn_implementation == NAME
    for a, b in zip(loss_and_gradients(own), loss_and_gradients(ours), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_eager_features_reads_the_function_not_its_name() -> None:
    assert eager_features(llama_eager) == frozenset()
    assert eager_features(gemma2_eager) == {"softcap"}
    assert eager_features(gpt_oss_eager) == {"sinks"}
    # scales by a log-sum-exp
    assert eager_features(modeling_granite_swa.eager_attention_forward) is None
    assert eager_features(None) is None


def test_a_call_of_another_thread_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = build("llama"), compat.attention_of
    begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        with switched(model):
            begun.set()
            may_end.wait()

    def then_the_other_ends(config: Any) -> Any:
        named = own(config)
        if threading.current_thread() is not other and not may_end.is_set():
            may_end.set()
            other.join(0.2)
        return named

    other = threading.Thread(target=call)
    other.start()
    begun.wait()
    monkeypatch.setattr(compat, "attention_of", then_the_other_ends)
    assert switchable_configs(model.modules()) == [model.config]
    other.join()
    assert own(model.config) == "sdpa"


def test_a_shallow_copy_made_during_a_call_gets_its_own_attention_back() -> None:
    model, other, ids = build("llama"), build("llama"), token_ids(1, 5)
    with switched(model):
        copied = copy.copy(model.config)
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = copied
    expected = model.generate(ids, max_new_tokens=4)
    assert torch.equal(other.generate(ids, max_new_tokens=4, **PAGED), expected)
    assert hf_paged.last_route(other).road == "engine"
    assert type(compat.attention_of(copied)) is str and copied._attn_implementation == "sdpa"


@pytest.mark.parametrize(("named", "other"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_code_that_compares_names_sees_the_configs_own(named: str, other: str) -> None:
    model, ids = build("gpt2"), token_ids(2, 7)
    model.set_attn_implementation(named)  # GPT2Attention compares with "eager"
    with switched(model):
        with switched(model):
            assert model_attention(model.config) == named
        found = model.config._attn_implementation
        assert found == NAME and found == named and {NAME: 1}[found] == 1
        assert found != other and found in (named,)
    found = model.config._attn_implementation
    assert type(found) is str and found == named
    tokens = [model.generate(ids, max_new_tokens=6, **options) for options in ({}, PAGED)]
    assert torch.equal(*tokens) and hf_paged.last_route(model).in_place


def test_a_mask_that_shows_dropped_padding_is_refused() -> None:
    model, ids = build("llama"), token_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(max_new_tokens=3, return_dict_in_generate=True, eos_token_id=None)
    out = model.generate(ids, attention_mask=mask, **options, **PAGED)
    cache, mask = out.past_key_values, torch.ones_like(out.sequences)
    assert cache.get_seq_length() == 14
    with pytest.raises(ValueError, match="row's first 5 positions were padding"):
        model.generate(out.sequences, attention_mask=mask, past_key_values=cache)


def test_keys_and_values_read_before_and_after_the_pool_has_grown() -> None:
    """As a layer with cross-attention reads them, while a call of another thread stores its own."""
    cache = hf_paged.PagedCache(paged_config={"block_size": 8})
    states, query = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 1, 8)
    cache.update(states, -states, 0)
    key = cache.layers[0].keys
    zeros = torch.zeros(2, 3, 99, 8)
    hf_paged.PagedCache(memory=cache.memory).update(zeros, zeros, 0)
    value = cache.layers[0].values
    assert isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
    assert len(key.blocks) < len(value.blocks)
    expected = F.scaled_dot_product_attention(query, states, -states)
    for pair in ((key, value), (key, -states), (states, value)):  # or one of them is the caller's
        found = F.scaled_dot_product_attention(query, *pair)
        torch.testing.assert_close(found, expected)


def test_a_class_that_repeats_its_inputs_is_served_and_uninstall_leaves_it_as_it_was() -> None:
    class Own(LlamaForCausalLM):
        def _expand_inputs_for_generation(self, expand_size=1, **kwargs):
            if expand_size == 1:
                return kwargs.pop("input_ids"), kwargs
            return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)

    model, own, ids = build("llama"), Own._expand_inputs_for_generation, token_ids(2, 5)
    model.__class__ = Own
    for options in ({}, dict(do_sample=True, num_return_sequences=2), dict(num_beams=3)):
        found = []
        for paged in ({}, PAGED):
            torch.manual_seed(0)
            found.append(model.generate(ids, max_new_tokens=4, **options, **paged))
        assert torch.equal(*found) and hf_paged.last_route(model).road == "engine"
    wrapped = GenerationMixin.generate
    hf_paged.install()
    assert GenerationMixin.generate is wrapped
    hf_paged.uninstall()
    try:
        assert Own._expand_inputs_for_generation is own
        undone = GenerationMixin.generate
        assert undone is not wrapped and "hf_paged" not in undone.__code__.co_filename
        assert inspect.signature(undone) == inspect.signature(wrapped)
        assert NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    finally:
        hf_paged.install()
    model.generate(ids, max_new_tokens=2, **PAGED)
    assert hf_paged.last_route(model).in_place


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_without_a_pattern_are_those_of_the_model(implementation: str) -> None:
    """Also those that transformers makes with `torch.vmap`, which cannot run when an operation
    reads a mask."""
    config = models.config("llama", attn_implementation=implementation)
    overlay = blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 1, 1]]))
    given = (config, torch.zeros(1, 6, 64), torch.ones(1, 6))
    options = {"past_key_values": None, "or_mask_function": overlay}
    expected = create_causal_mask(*given, **options)
    with switched(LlamaForCausalLM(config)):
        found = create_causal_mask(*given, **options)
    assert type(found) is torch.Tensor and torch.equal(found, expected)


def test_queries_of_one_row_are_broadcast_over_the_rows_of_handles() -> None:
    cache = hf_paged.PagedCache(paged_config={"block_size": 8})
    states, query = torch.randn(4, 3, 9, 8), torch.randn(1, 3, 1, 8)
    cache.update(states, -states, 0)
    found = F.scaled_dot_product_attention(query, cache.layers[0].keys, cache.layers[0].values)
    expected = F.scaled_dot_product_attention(query.expand(4, -1, -1, -1), states, -states)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
