"""Gradients through a `PagedCache`, against the `DynamicCache` that it replaces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.autograd import forward_ad
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
)

import hf_paged
from hf_paged import PagedCache
from tests.cache.test_paged_cache import CONFIGS, MIXED, TINY, tokens
from tests.support import models

SMALL = {**TINY, "num_hidden_layers": 2}
LATENT = transformers.DeepseekV3Config(
    **{**SMALL, "num_key_value_heads": 4},
    q_lora_rank=8,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=2,
)
MODELS: dict[str, PreTrainedConfig] = {**CONFIGS, "mixed": MIXED, "latent": LATENT}
SEQ2SEQ = transformers.BartConfig(
    vocab_size=64,
    d_model=16,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    init_std=0.3,
)
T5 = transformers.T5Config(
    vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0
)
CACHES: tuple[type[DynamicCache], ...] = (DynamicCache, PagedCache)


def build(config: PreTrainedConfig, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(copy.deepcopy(config), attn_implementation=attention).eval()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(
    config: PreTrainedConfig, run: Callable[[Any, DynamicCache], Any], **options: Any
) -> None:
    """Asserts that `run(model, cache)`, which returns logits, gives the same gradients with both
    caches."""
    results = []
    for cls in CACHES:
        model = build(config, **options)
        run(model, cls(config=model.config)).pow(2).sum().backward()
        results.append(gradients(model))
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-4)


def forward(model: Any, cache: Any, length: int, seed: int, rows: int = 2) -> torch.Tensor:
    return model(tokens(rows, length, seed), past_key_values=cache).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_gradients_reach_what_earlier_forwards_cached(name: str, attention: str) -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        forward(model, cache, 9, 0)
        for step in range(3):
            logits = forward(model, cache, 1 + step, 1 + step)
        return logits

    assert_same_gradients(MODELS[name], run, attention=attention)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_gradients_on_top_of_a_prefix_without_them(name: str) -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            forward(model, cache, 7, 0)
        forward(model, cache, 2, 1)
        return forward(model, cache, 3, 2)

    assert_same_gradients(MODELS[name], run)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_forward_without_gradients_between_two_with(name: str) -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        first = forward(model, cache, 4, 0)
        with torch.no_grad():
            forward(model, cache, 2, 1)
        forward(model, cache, 2, 2)
        return torch.cat([first, forward(model, cache, 2, 3)], dim=1)

    assert_same_gradients(MODELS[name], run)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "crop": lambda cache: cache.crop(-2),
    "crop all": lambda cache: cache.crop(-7),
    "reset": lambda cache: cache.reset(),
}
if models.BEFORE_5_18:
    del OPERATIONS["reset"]  # it zeroes the tensors of the graph there


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("name", ["full", "window", "latent"])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_gradients_follow_operations_on_rows_and_lengths(
    operation: str, name: str, has_gradients: bool
) -> None:
    rows = {"repeat": 4, "select": 1}.get(operation, 2)

    def run(model: Any, cache: Any) -> torch.Tensor:
        first = forward(model, cache, 7, 0)
        with torch.set_grad_enabled(has_gradients):
            OPERATIONS[operation](cache)
        forward(model, cache, 1, 1, rows)
        return torch.cat([first.flatten(), forward(model, cache, 2, 2, rows).flatten()])

    assert_same_gradients(MODELS[name], run)


def test_gradients_in_a_window_whose_past_is_recorded() -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        forward(model, cache, 14, 0)
        cache.activate_past_recording()
        forward(model, cache, 4, 1)
        cache.crop(-3)
        return forward(model, cache, 2, 2)

    assert_same_gradients(CONFIGS["window"], run)


@pytest.mark.skipif(models.BEFORE_5_18, reason="a recorded past is cut to another length there")
def test_gradients_reach_a_window_through_states_that_were_cached_without() -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            forward(model, cache, 5, 0)
            cache.activate_past_recording()
            forward(model, cache, 9, 1)
        forward(model, cache, 2, 2)
        cache.crop(-3)
        forward(model, cache, 2, 3)
        return forward(model, cache, 1, 4)

    assert_same_gradients(CONFIGS["window"], run)


@pytest.mark.parametrize(
    "names", ["layers.2.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.1.mlp", "q_proj"]
)
def test_gradients_of_some_parameters(names: str) -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(names in name)
        forward(model, cache, 5, 0)
        forward(model, cache, 1, 1)
        return forward(model, cache, 2, 2)

    assert_same_gradients(CONFIGS["full"], run)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_learned_keys_and_values(frozen: bool) -> None:
    def run(model: Any, cache: Any) -> torch.Tensor:
        model.requires_grad_(not frozen)
        for layer in range(3):
            prefix = torch.nn.Parameter(torch.randn(2, 2, 2, 4, 8))
            model.register_parameter(f"prefix_{layer}", prefix)
            cache.update(prefix[0], prefix[1], layer)
        forward(model, cache, 3, 0)
        return forward(model, cache, 1, 1)

    assert_same_gradients(CONFIGS["full"], run)


@pytest.mark.parametrize("config", [SEQ2SEQ, T5], ids=["bart", "t5"])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_gradients_reach_an_encoder_and_cross_attention(
    config: PreTrainedConfig, frozen_first: bool
) -> None:
    results = []
    for cls in CACHES:
        model = build(config)
        cache = EncoderDecoderCache(cls(config=config), cls(config=config))
        encoder_outputs = model.get_encoder()(tokens(2, 6))
        with torch.set_grad_enabled(not frozen_first):
            model(
                encoder_outputs=encoder_outputs,
                decoder_input_ids=tokens(2, 3, 1),
                past_key_values=cache,
            )
        for seed in (2, 3):
            ids = tokens(2, 1, seed)
            logits = model(
                encoder_outputs=encoder_outputs, decoder_input_ids=ids, past_key_values=cache
            ).logits
        logits.pow(2).sum().backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-4)


def test_a_copy_has_the_graph_and_a_pickle_has_not() -> None:
    model = build(CONFIGS["full"])
    expected, cache = DynamicCache(config=model.config), PagedCache(model.config)
    for each in (expected, cache):
        forward(model, each, 5, 0)
    twin, unpickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    grads = []
    for each in (expected, twin):
        model.zero_grad()
        forward(model, each, 2, 1).pow(2).sum().backward(retain_graph=True)
        grads.append(gradients(model))
        grads[-1] = {name: gradient.clone() for name, gradient in grads[-1].items()}
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-4, atol=1e-4)
    frozen = PagedCache(model.config)
    with torch.no_grad():
        forward(model, frozen, 5, 0)
    grads = []
    for each in (frozen, unpickled):
        model.zero_grad()
        forward(model, each, 2, 1).pow(2).sum().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(*grads)
    cache.check_integrity()


def test_gradients_on_a_cache_that_a_call_returned() -> None:
    grads = []
    for options in ({}, {"cache_implementation": "paged"}):
        model = build(CONFIGS["full"])
        output = model.generate(
            tokens(2, 6),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            **options,
        )
        cache = output.past_key_values
        forward(model, cache, 2, 1)
        forward(model, cache, 2, 2).pow(2).sum().backward()
        grads.append(gradients(model))
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-4, atol=1e-4)


def test_detach_truncates_backpropagation_through_time() -> None:
    model = build(CONFIGS["full"])
    cache = PagedCache(model.config)
    grads = []
    for seed in range(3):
        model.zero_grad()
        forward(model, cache, 3, seed).pow(2).sum().backward()
        cache.detach()
        grads.append(gradients(model))
    forward(model, cache, 1, 5).sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        forward(model, cache, 1, 6).sum().backward()


def test_shown_keys_have_the_graph_of_the_states() -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    states = torch.randn(1, 1, 9, 4, requires_grad=True)
    cache.update(states, 2 * states, 0)
    (cache.layers[0].keys.sum() + cache.layers[0].values.sum()).backward()
    assert torch.equal(states.grad, torch.full_like(states, 3))
    with torch.no_grad():
        assert torch.equal(cache.layers[0].keys + 0, states)


def test_gradients_are_not_kept_in_a_forward_that_enables_them_in_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(CONFIGS["full"])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens(2, 9), **options)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", torch.enable_grad()(attention.forward))
    assert torch.equal(
        model.generate(tokens(2, 9), **options, cache_implementation="paged"), expected
    )
    hf_paged.check_integrity(model)


def test_forward_mode_differentiation_is_refused() -> None:
    model = build(CONFIGS["full"], "eager").requires_grad_(False)
    cache = PagedCache(model.config)
    embeds = model.get_input_embeddings()(tokens(1, 4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embeds, torch.ones_like(embeds))
        with pytest.raises(RuntimeError, match="use a `DynamicCache`"):
            model(inputs_embeds=dual, past_key_values=cache)
        assert cache.memory.num_used == 0
        forward(model, cache, 3, 0)
    cache.check_integrity()


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.vmap]
)
def test_function_transforms_are_refused(transform: Callable[..., Any]) -> None:
    model = build(CONFIGS["full"], "eager").requires_grad_(False)
    cache = PagedCache(model.config)
    with pytest.raises(RuntimeError, match=r"`torch.func`.* use a `DynamicCache`"):
        transform(lambda x: cache.update(*[x.reshape(2, 2, 4, 8)] * 2, 0)[0].sum())(
            torch.randn(1, 2, 2, 4, 8)
        )
    assert cache.memory.num_used == 0
    forward(model, cache, 3, 0)
    cache.check_integrity()


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("kv_dtype", ["int8", None])
def test_quantized_states_are_as_rounded_with_gradients_as_without(
    kv_dtype: str | None, name: str
) -> None:
    model, results = build(CONFIGS[name]), []
    for has_gradients in (False, True):
        cache = PagedCache(model.config, {"block_size": 8, "kv_dtype": kv_dtype})
        with torch.set_grad_enabled(has_gradients):
            for seed in range(3):
                logits = forward(model, cache, 12, seed)
        results.append(logits)
        shown = cache.layers[0].keys
        with torch.no_grad():
            assert torch.equal(shown + 0, cache.layers[0].keys + 0)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    results[1].pow(2).sum().backward()
    key_gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    exact = build(CONFIGS[name])
    cache = DynamicCache(config=exact.config)
    for seed in range(3):
        logits = forward(exact, cache, 12, seed)
    logits.pow(2).sum().backward()
    expected = exact.model.layers[0].self_attn.k_proj.weight.grad
    assert (key_gradient - expected).norm() < 0.2 * expected.norm()
