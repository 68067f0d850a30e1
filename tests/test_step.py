"""A step's tensors on the device of each layer."""

from __future__ import annotations

import pytest
import torch

from hf_paged import PagedCache
from hf_paged.step import StepMetadata

META = torch.device("meta")  # a device other than the CPU that every machine has


def test_a_step_is_moved_to_a_device_once() -> None:
    tables = torch.zeros(2, 3, dtype=torch.int32)
    step = StepMetadata.rectangle(tables, (5, 4), 8, slots=torch.zeros(2, 1, dtype=torch.long))
    assert step.on(tables.device) is step
    moved = step.on(META)
    assert moved is step.on(META) and moved.on(META) is moved
    assert moved.block_tables.device == META
    assert moved.slots is not None and moved.slots.device == META
    lengths = step.seq_lens, step.query_start, 8
    assert (moved.seq_lens, moved.query_start, moved.block_size) == lengths
    assert step.block_tables.device == tables.device


def test_each_layer_asks_for_the_step_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    on = StepMetadata.on

    def observed(step: StepMetadata, device: torch.device) -> StepMetadata:
        asked.append(device)
        return on(step, device)

    monkeypatch.setattr(StepMetadata, "on", observed)
    cache, states = PagedCache(paged_config={"block_size": 8}), torch.randn(1, 2, 3, 4)
    for index in range(2):
        cache.update(states, states, index)
    assert asked == [states.device] * 2
