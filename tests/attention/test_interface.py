"""The attention function as transformers calls it."""

from __future__ import annotations

import copy
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    T5Config,
)
from transformers.masking_utils import blockwise_overlay, create_causal_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

import hf_paged
from hf_paged import compat
from hf_paged.attention.interface import paged_attention, paged_mask
from hf_paged.attention.switch import (
    NAME,
    eager_features,
    model_attention,
    switchable_configs,
    use_paged_attention,
)
from hf_paged.cache.handles import PagedTensor

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)
START = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (AutoModelForCausalLM, LlamaConfig(**TINY)),
    "gemma2": (AutoModelForCausalLM, Gemma2Config(**TINY, head_dim=8, sliding_window=6)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **START),
    ),
}


def build(name: str, **kwargs: Any) -> Any:
    factory, config = MODELS[name]
    torch.manual_seed(0)
    return factory.from_config(type(config)(**config.to_dict()), **kwargs)


def loss_and_gradients(model: Any, name: str) -> list[torch.Tensor]:
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_loaded_with_ours_trains_as_with_its_own(name: str) -> None:
    own, ours = build(name).eval(), build(name, attn_implementation=NAME).eval()
    assert ours.config._attn_implementation == NAME
    for a, b in zip(loss_and_gradients(own, name), loss_and_gradients(ours, name), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_loaded_with_ours_generates_as_with_its_own(name: str) -> None:
    own, ours = build(name).eval(), build(name, attn_implementation=NAME).eval()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = own.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert torch.equal(ours.generate(ids, cache_implementation="paged", **options), expected)
    assert ours.config._attn_implementation == NAME


def test_eager_features_reads_the_function_not_its_name() -> None:
    assert eager_features(llama_eager) == frozenset()
    assert eager_features(gemma2_eager) == {"softcap"}
    assert eager_features(gpt_oss_eager) == {"sinks"}
    assert eager_features(modeling_granite_swa.eager_attention_forward) is None, (
        "scales by a log-sum-exp"
    )
    assert eager_features(None) is None


def test_switch_counts_calls_and_restores_once() -> None:
    model = build("llama")
    own = model.config._attn_implementation
    with use_paged_attention(switchable_configs(model.modules())):
        with use_paged_attention(switchable_configs(model.modules())):
            assert model.config._attn_implementation == NAME
            assert model_attention(model.config) == own
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == own


def test_a_call_of_another_thread_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = build("llama"), compat.attention_of
    begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        with use_paged_attention(switchable_configs(model.modules())):
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
    model = build("llama").eval()
    with use_paged_attention(switchable_configs(model.modules())):
        copied = copy.copy(model.config)
    other = build("llama").eval()
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = copied
    ids = torch.randint(3, 64, (1, 5))
    expected = model.generate(ids, max_new_tokens=4)
    assert torch.equal(
        other.generate(ids, max_new_tokens=4, cache_implementation="paged"), expected
    )
    assert hf_paged.last_route(other).road == "engine"
    assert type(compat.attention_of(copied)) is str and copied._attn_implementation == "sdpa"


@pytest.mark.parametrize("named", ["eager", "sdpa"])
def test_code_that_compares_names_sees_the_configs_own(named: str) -> None:
    model = build("gpt2").eval()
    model.set_attn_implementation(named)  # GPT2Attention compares with "eager"
    ids = torch.randint(3, 64, (2, 7))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with use_paged_attention(switchable_configs(model.modules())):
        switched = model.config._attn_implementation
        assert switched == NAME and switched == named and {NAME: 1}[switched] == 1
        assert switched != ("sdpa" if named == "eager" else "eager") and switched in (named,)
    assert (
        type(model.config._attn_implementation) is str
        and model.config._attn_implementation == named
    )
    assert torch.equal(
        model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="paged"),
        expected,
    )
    assert hf_paged.last_route(model).in_place


def test_a_mask_that_shows_dropped_padding_is_refused() -> None:
    model = build("llama").eval()
    ids = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=3,
        return_dict_in_generate=True,
        cache_implementation="paged",
        eos_token_id=None,
    )
    cache = out.past_key_values
    assert cache.get_seq_length() == 14
    with pytest.raises(ValueError, match="row's first 5 positions were padding"):
        model.generate(
            out.sequences, attention_mask=torch.ones_like(out.sequences), past_key_values=cache
        )


def test_dense_tensors_go_to_the_model_s_own_implementation() -> None:
    module = torch.nn.Module()
    module.config = SimpleNamespace(_attn_implementation="sdpa")
    query, key, value = (torch.randn(2, 3, 5, 8) for _ in range(3))
    mask = paged_mask(batch_size=2, q_length=5, kv_length=5)
    output, weights = paged_attention(module, query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert weights is None


def test_keys_and_values_read_before_and_after_the_pool_has_grown() -> None:
    """As a layer with cross-attention reads them, while a call of another thread stores its own."""
    cache = hf_paged.PagedCache(paged_config={"block_size": 8})
    states, query = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 1, 8)
    cache.update(states, -states, 0)
    key = cache.layers[0].keys
    other = hf_paged.PagedCache(memory=cache.memory)
    other.update(torch.zeros(2, 3, 99, 8), torch.zeros(2, 3, 99, 8), 0)
    value = cache.layers[0].values
    assert isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
    assert len(key.blocks) < len(value.blocks)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, states, -states)
    torch.testing.assert_close(found, expected)


def test_install_is_idempotent_and_uninstall_undoes_it() -> None:
    from transformers.generation import configuration_utils
    from transformers.generation.utils import GenerationMixin

    wrapped = GenerationMixin.generate
    hf_paged.install()
    assert GenerationMixin.generate is wrapped
    hf_paged.uninstall()
    try:
        undone = GenerationMixin.generate
        assert undone is not wrapped and "hf_paged" not in undone.__code__.co_filename
        assert inspect.signature(undone) == inspect.signature(wrapped)
        assert NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    finally:
        hf_paged.install()
    model = build("llama").eval()
    ids = torch.randint(3, 64, (1, 5))
    model.generate(ids, cache_implementation="paged", max_new_tokens=2)
    assert hf_paged.last_route(model).in_place


def test_a_class_that_repeats_its_inputs_by_itself_is_served_and_left_as_it_was() -> None:
    class Own(type(build("llama"))):
        def _expand_inputs_for_generation(self, expand_size=1, **kwargs):
            if expand_size == 1:
                return kwargs.pop("input_ids"), kwargs
            return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)

    model, own = build("llama").eval(), Own._expand_inputs_for_generation
    model.__class__ = Own
    ids = torch.randint(3, 64, (2, 5))
    for options in (dict(), dict(do_sample=True, num_return_sequences=2), dict(num_beams=3)):
        expected, got = (
            (torch.manual_seed(0), model.generate(ids, max_new_tokens=4, **options, **more))[1]
            for more in ({}, {"cache_implementation": "paged"})
        )
        assert got.tolist() == expected.tolist() and hf_paged.last_route(model).road == "engine"
    hf_paged.uninstall()
    try:
        assert Own._expand_inputs_for_generation is own
    finally:
        hf_paged.install()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_without_a_pattern_are_those_of_the_model(implementation: str) -> None:
    """Also those that transformers makes with `torch.vmap`, which cannot run when an operation
    reads a mask."""
    config = LlamaConfig(**TINY, attn_implementation=implementation)
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    given = {
        **{
            "config": config,
            "inputs_embeds": torch.zeros(1, 6, 32),
            "attention_mask": torch.ones(1, 6),
        },
        **{"past_key_values": None, "or_mask_function": blockwise_overlay(blocks)},
    }
    expected = create_causal_mask(**given)
    with use_paged_attention([config]):
        found = create_causal_mask(**given)
    assert type(found) is torch.Tensor and torch.equal(found, expected)
