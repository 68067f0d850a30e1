"""Latent attention is absorbed only if the expansion is transformers' code and a single plain
matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import hf_paged
from hf_paged.attention.interface import paged_attention
from hf_paged.attention.switch import NAME, switch_attention
from hf_paged.latent import ExpandedTensor
from tests.support import models
from tests.support.latents import build_deepseek

OPTIONS = {"max_new_tokens": 10, "do_sample": False}


def scale_forward(model: Any) -> None:
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        own.forward = lambda x, own=own: 1.7 * nn.functional.linear(x, own.weight)


def scale_in_global_hook(model: Any) -> None:
    projections = {layer.self_attn.kv_b_proj for layer in model.model.layers}
    hook = nn.modules.module.register_module_forward_hook
    hook(lambda module, _, output: 1.7 * output if module in projections else None)


def offload(model: Any) -> None:
    # weights are elsewhere between forwards
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def scale_expansion(model: Any) -> None:
    own = DeepseekV3Attention.expand_kv

    def expand_kv(self: Any, *latents: Any) -> Any:
        keys, values = own(self, *latents)
        return keys, 1.7 * values

    DeepseekV3Attention.expand_kv = expand_kv


CHANGES = [scale_forward, scale_in_global_hook, offload, scale_expansion]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    hf_paged.uninstall()
    own, hooks = DeepseekV3Attention.expand_kv, nn.modules.module._global_forward_hooks
    hf_paged.install()
    yield
    hf_paged.uninstall()  # or it would take the class as wrapped still
    DeepseekV3Attention.expand_kv = own
    hooks.clear()
    hf_paged.install()


@pytest.mark.slow_cases("offload-*", "scale_expansion-1")
@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_code_of_the_users_own_is_not_left_out(
    change: Callable[[Any], None], calls_before: int
) -> None:
    model, inputs = build_deepseek(), models.padded_prompt("llama")
    for _ in range(calls_before):
        before = model.generate(**inputs, **OPTIONS, **models.PAGED)
        assert hf_paged.last_route(model).latent
    change(model)
    expected = model.generate(**inputs, **OPTIONS)
    assert not calls_before or change is offload or not torch.equal(expected, before)
    assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected)
    assert not hf_paged.last_route(model).latent


def test_uninstall_leaves_what_others_put_there() -> None:
    own = DeepseekV3Attention.expand_kv
    model, inputs = build_deepseek(), models.padded_prompt("llama")
    model.generate(**inputs, **OPTIONS, **models.PAGED)
    assert DeepseekV3Attention.expand_kv is not own
    hf_paged.uninstall()
    assert DeepseekV3Attention.expand_kv is own
    hf_paged.install()
    model.generate(**inputs, **OPTIONS, **models.PAGED)
    scale_expansion(model)
    theirs = DeepseekV3Attention.expand_kv
    hf_paged.uninstall()
    hf_paged.install()
    assert DeepseekV3Attention.expand_kv is theirs
    model.generate(**inputs, **OPTIONS, **models.PAGED)
    del DeepseekV3Attention.expand_kv
    hf_paged.uninstall()
    assert not hasattr(DeepseekV3Attention, "expand_kv")


@pytest.mark.parametrize("num_queries", [16, 17])
def test_many_queries_are_not_projected(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt after cached tokens reads expanded latents."""
    model = build_deepseek()
    ids, absorb, query_lens = models.token_ids(2, 5 + num_queries), ExpandedTensor.absorb, []

    def observed(self: ExpandedTensor, query: torch.Tensor, value: torch.Tensor) -> Any:
        query_lens.append(query.shape[2])
        return absorb(self, query, value)

    monkeypatch.setattr(ExpandedTensor, "absorb", observed)
    cache = hf_paged.PagedCache(model.config)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        with switch_attention(list(model.modules())):
            model(ids[:, :5], past_key_values=cache)
            logits = model(ids[:, 5:], past_key_values=cache).logits[:, -1]
    assert query_lens == ([16, 16] if num_queries == 16 else [])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_without_a_scaling_the_scale_is_that_of_the_models_own_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Absorbed queries are wider."""
    model, ids = build_deepseek(), models.token_ids(2, 7)

    def unscaled(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return paged_attention(*args, **kwargs)

    cache = hf_paged.PagedCache(model.config)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, NAME, unscaled)
        with switch_attention(list(model.modules())):
            model(ids[:, :5], past_key_values=cache)
            logits = model(ids[:, 5:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
