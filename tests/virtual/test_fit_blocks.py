"""Block sizes of virtual storage: blocks fill whole pages."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig

from hf_paged import PagedConfig, VirtualStorage
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.virtual import storage as virtual
from hf_paged.virtual.mappings import PlaneLayout
from tests.model import test_heterogeneous as heterogeneous

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")

CPU = torch.device("cpu")


@pytest.mark.parametrize("page", [1 << shift for shift in range(12, 20)])
def test_blocks_of_one_tensor_without_values_fill_large_pages(page: int) -> None:
    """Latents: no values lie beside them in a block."""
    config = DeepseekV3Config(kv_lora_rank=16, qk_rope_head_dim=16)
    requested = PagedConfig(storage=VirtualStorage(page_bytes=page))
    size = int(virtual.fit_blocks(requested, config, CPU).block_size)
    block = torch.empty(1, 1, size, 32, dtype=torch.bfloat16, device="meta")
    assert PlaneLayout.fit(block, 1, page) is not None


@pytest.mark.parametrize("value_dim", [None, 16, 32])
@pytest.mark.parametrize("size", [1 << shift for shift in range(2, 15)])
@pytest.mark.parametrize("page", [1 << 12, 1 << 16, 1 << 18])
def test_any_size_is_raised_until_it_fills_pages(
    page: int, size: int, value_dim: int | None
) -> None:
    """Also where keys and values have tensors of their own, since their dims differ."""
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    config.v_head_dim = value_dim
    requested = PagedConfig(block_size=size, storage=VirtualStorage(page_bytes=page))
    found = virtual.fit_blocks(requested, config, CPU)
    keys, values = torch.empty(1, 4, 0, 32), torch.empty(1, 4, 0, value_dim or 32)
    assert int(found.block_size) >= size
    storage = virtual.make_storage(found, FULL_ATTENTION, int(found.block_size), lambda: None)
    outline = storage.outline(keys.half(), values.half())
    num_heads = outline.data[0].shape[1]
    assert num_heads == (4 if value_dim == 16 else 8)
    num_parts = num_heads // 4
    for tensor in outline.data:
        assert PlaneLayout.fit(tensor, num_parts, page) is not None


@heterogeneous.pytestmark
def test_pages_hold_blocks_of_layers_with_other_numbers_of_heads() -> None:
    config = heterogeneous.build().config
    page = virtual.pages_for(CPU, VirtualStorage().page_bytes).granularity
    found = virtual.fit_blocks(PagedConfig(storage="virtual"), config, CPU)
    for layer in config.per_layer_config:
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        assert int(found.block_size) * width * 2 % page == 0
