"""Mapped blocks of a model whose layers have other numbers of heads."""

from __future__ import annotations

import torch

from hf_paged import PagedConfig, VirtualStorage
from hf_paged.virtual import storage as virtual
from tests.model.test_heterogeneous import build, pytestmark  # noqa: F401


def test_pages_hold_blocks_of_all_layers() -> None:
    model, page = (
        build(),
        virtual.pages_for(torch.device("cpu"), VirtualStorage().page_bytes).granularity,
    )
    found = virtual.fit_blocks(PagedConfig(storage="virtual"), model.config, torch.device("cpu"))
    for layer in model.config.per_layer_config:
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        assert int(found.block_size) * width * 2 % page == 0
