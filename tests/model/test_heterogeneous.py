"""Models whose layers have other numbers of heads: their config refuses to be read for the model as
a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import PagedConfig, PagedEngine, VirtualStorage, compat
from hf_paged.tape.shared_prefixes import SharedPrefixes
from hf_paged.virtual import storage as virtual
from tests.support import models
from tests.support.architecture_configs import spread_weights, tiny_config

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Dots3NoteForCausalLM"), reason="this version has no such model"
)

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def build() -> Any:
    """Dots3Note, whose layers of sliding attention have fewer heads."""
    sliding = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 24,
        "sliding_window": 8,
    }
    model_class = transformers.Dots3NoteForCausalLM
    config = tiny_config(model_class.config_class, per_layer_config=dict.fromkeys((1, 3), sliding))
    model = model_class(config).float().eval()
    spread_weights(model, 0)
    return model


@pytest.mark.parametrize("storage", ["blocks", "virtual"])
def test_tokens(storage: str) -> None:
    model, inputs = build(), models.prompt("llama", 2, 12)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        assert model.config.num_key_value_heads
    plain = model.generate(**inputs, **GREEDY)
    config = {"storage": storage}
    assert torch.equal(
        plain, model.generate(**inputs, **GREEDY, cache_implementation="paged", cache_config=config)
    )
    with PagedEngine(model, config) as engine:
        results = engine.generate(inputs["input_ids"], GREEDY)
    assert [result.token_ids for result in results] == plain[:, 12:].tolist()
    hf_paged.free(model)


def test_pages_hold_blocks_of_all_layers() -> None:
    model, page = (
        build(),
        virtual.pages_for(torch.device("cpu"), VirtualStorage().page_bytes).granularity,
    )
    found = virtual.fit_blocks(PagedConfig(storage="virtual"), model.config, torch.device("cpu"))
    for layer in model.config.per_layer_config:
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        assert int(found.block_size) * width * 2 % page == 0


def test_heads_are_shared_among_processes_if_each_layers_are() -> None:
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    model = SimpleNamespace(config=build().config, tp_plan=plan, tp_size=4)
    assert compat.split_heads(model) == (2, 4)  # 4 and 2 heads


def test_costs_of_shared_prefixes_count_each_layers_heads() -> None:
    model = build()
    keys = torch.zeros(3, 1, 8, 16)
    blocks = SimpleNamespace(keys=keys, values=keys, tiles=(keys,))
    layers = [dict.fromkeys(each, blocks) for each in ([0], [1], [0, 1])]
    groups = [SimpleNamespace(storage=SimpleNamespace(layers=each)) for each in layers]
    prefixes: Any = SimpleNamespace(_model=lambda: model, _groups=groups)
    first, second, both = SharedPrefixes._read_costs(prefixes)
    assert first.state_bytes == 2 * second.state_bytes
    assert both.state_bytes == first.state_bytes + second.state_bytes
