"""Storing keys and values in blocks, after errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.store import store_signature


def test_an_error_as_a_store_is_prepared_leaves_none_for_other_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, values = torch.zeros(2, 4, 2, 8, 16)
    blocks = KVBlocks((keys, values), keys, values)
    many, few = torch.randn(3, 2, 1, 16), torch.randn(1, 2, 1, 16)
    blocks.store(store_signature(many, many), many, many, torch.tensor([[0], [1], [2]]))
    set_attribute = KVBlocks.__setattr__

    def fail(self: KVBlocks, name: str, value: Any) -> None:
        if name == "store_signature" and value is not None:
            raise MemoryError("on purpose")
        set_attribute(self, name, value)

    monkeypatch.setattr(KVBlocks, "__setattr__", fail)
    with pytest.raises(MemoryError):
        blocks.store(store_signature(few, few), few, few, torch.tensor([[3]]))
    monkeypatch.undo()
    blocks.store(store_signature(many, many), many, many, torch.tensor([[4], [5], [6]]))
    assert torch.equal(keys[0, :, 4:7], many[:, :, 0].transpose(0, 1))
