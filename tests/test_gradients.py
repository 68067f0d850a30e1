"""Gradients through a `PagedCache`, against the `DynamicCache` that it replaces."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
)

from hf_paged import PagedCache
from tests.cache.test_paged_cache import CONFIGS, MIXED, TINY, tokens
from tests.support import models

SMALL = {**TINY, "num_hidden_layers": 2}
LATENT = transformers.DeepseekV3Config(
    **{**SMALL, "num_key_value_heads": 4},
    **dict(q_lora_rank=8, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    first_k_dense_replace=2,
)
MODELS: dict[str, PreTrainedConfig] = {**CONFIGS, "mixed": MIXED, "latent": LATENT}
SEQ2SEQ = transformers.BartConfig(
    **dict(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=2, init_std=0.3),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2),
    **dict(encoder_ffn_dim=16, decoder_ffn_dim=16),
)
T5 = transformers.T5Config(
    vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0
)
CACHES: tuple[type[DynamicCache], ...] = (DynamicCache, PagedCache)


def build(config: PreTrainedConfig, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(copy.deepcopy(config), attn_implementation=attention).eval()


Make = Callable[[], DynamicCache]


def assert_same_gradients(
    config: PreTrainedConfig, run: Callable[[Any, Make], torch.Tensor], **options: Any
) -> None:
    """Asserts that `run(model, make_cache)`, which returns logits, gives the same gradients with
    both kinds of caches."""
    results = []
    for cls in CACHES:
        model = build(config, **options)
        run(model, functools.partial(cls, config=model.config)).pow(2).sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for plain, paged in zip(*results, strict=True):
        assert (plain is None) == (paged is None)
        if plain is not None:
            torch.testing.assert_close(paged, plain, rtol=1e-4, atol=1e-4)


def forward(model: Any, cache: Any, length: int, seed: int, rows: int = 2) -> torch.Tensor:
    return model(tokens(rows, length, seed), past_key_values=cache).logits


def play(steps: Sequence[Any], model: Any, make: Make) -> torch.Tensor:
    """Logits of forwards of these numbers of tokens, without gradients where negative; operations
    on the cache in between."""
    cache, rows, logits = make(), 2, []
    for seed, step in enumerate(steps):
        if callable(step):
            step(cache)
            rows = cache.layers[0].keys.shape[0] if cache.get_seq_length() else 2
            continue
        with torch.set_grad_enabled(step > 0):
            found = forward(model, cache, abs(step), seed, rows)
        logits += [found.flatten()] if step > 0 else []
    return torch.cat(logits)


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


record, crop = methodcaller("activate_past_recording"), methodcaller("crop", -3)

STEPS: dict[str, tuple[Any, ...]] = {
    "what earlier forwards cached": (9, 1, 2, 3),
    "on top of a prefix without them": (-7, 2, 3),
    "around a forward without them": (4, -2, 2, 2),
}
for name, operation in OPERATIONS.copy().items():
    OPERATIONS[f"{name}, without"] = torch.no_grad()(operation)
AROUND = {name: (7, operation, 1, 2) for name, operation in OPERATIONS.items()}
OF_WINDOWS = {"a recorded past": (14, record, 4, crop, 2)}
if not models.BEFORE_5_18:  # a recorded past is cut to another length there
    OF_WINDOWS["a past recorded without"] = (-5, record, -9, 2, crop, 2, 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_gradients_of_forwards(name: str, steps: Sequence[Any], attention: str) -> None:
    assert_same_gradients(MODELS[name], functools.partial(play, steps), attention=attention)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, steps) for name in ("full", "window", "latent") for steps in AROUND),
        *(("window", steps) for steps in OF_WINDOWS),
    ],
)
def test_gradients_follow_operations_on_rows_and_lengths(name: str, steps: str) -> None:
    assert_same_gradients(MODELS[name], functools.partial(play, (AROUND | OF_WINDOWS)[steps]))


@pytest.mark.parametrize(
    "names", ["layers.2.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.1.mlp", "q_proj"]
)
def test_gradients_of_some_parameters(names: str) -> None:
    def run(model: Any, make: Make) -> torch.Tensor:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(names in name)
        return play((5, 1, 2), model, make)

    assert_same_gradients(CONFIGS["full"], run)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_learned_keys_and_values(frozen: bool) -> None:
    def run(model: Any, make: Make) -> torch.Tensor:
        model.requires_grad_(not frozen)
        cache = make()
        for layer in range(3):
            prefix = torch.nn.Parameter(torch.randn(2, 2, 2, 4, 8))
            model.register_parameter(f"prefix_{layer}", prefix)
            cache.update(prefix[0], prefix[1], layer)
        return play((3, 1), model, lambda: cache)

    assert_same_gradients(CONFIGS["full"], run)


@pytest.mark.parametrize("config", [SEQ2SEQ, T5], ids=["bart", "t5"])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_gradients_reach_an_encoder_and_cross_attention(
    config: PreTrainedConfig, frozen_first: bool
) -> None:
    def run(model: Any, make: Make) -> torch.Tensor:
        cache, encoded = EncoderDecoderCache(make(), make()), model.get_encoder()(tokens(2, 6))
        for seed, length in enumerate((3, 1, 1)):
            with torch.set_grad_enabled(seed > 0 or not frozen_first):
                given = {"encoder_outputs": encoded, "past_key_values": cache}
                output = model(**given, decoder_input_ids=tokens(2, length, 1 + seed))
        return output.logits

    assert_same_gradients(config, run)


@pytest.mark.parametrize("is_copied", [True, False], ids=["copy", "pickle"])
def test_a_copy_has_the_graph_and_a_pickle_has_not(is_copied: bool) -> None:
    def run(model: Any, make: Make) -> torch.Tensor:
        cache = make()
        is_paged = isinstance(cache, PagedCache)
        with torch.set_grad_enabled(is_paged or is_copied):
            forward(model, cache, 5, 0)
        if is_paged:
            cache = copy.deepcopy(cache) if is_copied else pickle.loads(pickle.dumps(cache))
        return forward(model, cache, 2, 1)

    assert_same_gradients(CONFIGS["full"], run)


def test_detach_truncates_backpropagation_through_time() -> None:
    model = build(CONFIGS["full"])
    cache = PagedCache(model.config)
    for seed in range(3):
        forward(model, cache, 3, seed).pow(2).sum().backward()
        cache.detach()
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


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("kv_dtype", ["int8", None])
def test_quantized_states_are_as_rounded_with_gradients_as_without(
    kv_dtype: str | None, name: str
) -> None:
    config, logits, grads = CONFIGS[name], [], []
    options = {"block_size": 8, "kv_dtype": kv_dtype}
    for cache, has_gradients in (
        (PagedCache(config, options), False),
        (PagedCache(config, options), True),
        (DynamicCache(config=config), True),
    ):
        model = build(config)
        with torch.set_grad_enabled(has_gradients):
            for seed in range(3):
                found = forward(model, cache, 12, seed)
        logits.append(found)
        if has_gradients:
            found.pow(2).sum().backward()
            grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert (grads[0] - grads[1]).norm() < 0.2 * grads[1].norm()


def test_no_new_tokens_in_quantized_blocks() -> None:
    cache = PagedCache(paged_config={"block_size": 8, "kv_dtype": "int8"})
    states = torch.randn(1, 1, 9, 4, requires_grad=True)
    cache.update(states, states, 0)
    keys, values = cache.update(states[:, :, :0], states[:, :, :0], 0)
    assert keys.shape == values.shape == states.shape
