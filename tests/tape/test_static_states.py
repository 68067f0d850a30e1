"""Indexer keys in the buffers of a recorded step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer

from hf_paged.rectangles.states import growing_states, state_tensors
from hf_paged.step import NotCapturable
from hf_paged.tape.length import Length, LengthRange
from hf_paged.tape.static_states import StaticStates
from hf_paged.tape.step_cache import IndexedStepLayer

DIM, CAPACITY = 4, 16


def layer_of(num_rows: int, length: int, seed: int) -> DynamicIndexedLayer:
    layer = DynamicIndexedLayer()
    generator = torch.Generator().manual_seed(seed)
    layer.update_indexer(torch.randn(num_rows, length, DIM, generator=generator))
    layer.indexer_position_ids = torch.arange(3 * num_rows * length).view(3, num_rows, length)
    return layer


def replay(static: StaticStates, layer: DynamicIndexedLayer, value: float) -> Tensor:
    """Writes `value` as a replay writes the next column; returns the keys that the layer should
    then hold. Its positions must then be those before and `value`."""
    before, positions = layer.indexer_keys.clone(), layer.indexer_position_ids.clone()
    num_rows, length, _ = before.shape
    static.move_in([layer])
    buffers = static.buffers
    static.move_in([layer])  # which already holds views of the buffers
    assert layer.indexer_position_ids.data_ptr() == buffers[1].data_ptr()
    for buffer in buffers:
        assert not buffer[:num_rows, length:].any()
        buffer[:num_rows, length] = value
    static.grow([layer])
    expected = torch.cat([positions, torch.full((3, num_rows, 1), int(value))], dim=-1)
    assert torch.equal(layer.indexer_position_ids, expected)
    return torch.cat([before, torch.full((num_rows, 1, DIM), value)], dim=1)


def test_keys_grow_in_the_buffers_until_other_rows_use_them() -> None:
    first, second = layer_of(2, 5, 0), layer_of(3, 3, 1)
    assert growing_states([first]) == [True, True]
    static = StaticStates([first], num_rows=4, num_columns=CAPACITY)
    for value in (1.0, 2.0):
        expected = replay(static, first, value)
        assert torch.equal(first.indexer_keys, expected)
        assert first.indexer_keys.data_ptr() == static.buffers[0].data_ptr()
    assert static.overwritten_buffers == []
    expected_second = replay(static, second, 3.0)
    assert torch.equal(second.indexer_keys, expected_second)
    assert torch.equal(first.indexer_keys, expected)


def test_keys_are_ordinary_for_steps_without_a_recording() -> None:
    """The layer then leaves the buffers, and comes back with other rows."""
    layer = layer_of(3, 4, 0)
    static = StaticStates([layer], num_rows=4, num_columns=CAPACITY)
    replay(static, layer, 1.0)
    layer.update_indexer(torch.ones(3, 1, DIM))
    layer.indexer_keys = layer.indexer_keys[[2, 0]]
    positions = layer.indexer_position_ids
    layer.indexer_position_ids = torch.cat([positions, positions[..., :1]], dim=-1)[:, [2, 0]]
    expected = replay(static, layer, 2.0)
    assert torch.equal(state_tensors([layer])[0], expected)
    assert expected.shape == (2, 7, DIM)


def test_a_recorded_layer_takes_a_key_for_each_token_alone() -> None:
    source: Any = layer_of(2, 5, 0)
    source.dtype, source.device = torch.float32, torch.device("cpu")
    step: Any = None
    layers = []
    for length in (5, 6):
        counted = Length(torch.tensor(length), length, LengthRange())
        layers.append(IndexedStepLayer(None, step, counted, is_sliding=False, reads_keys=True))
    layers[0].take(source)
    assert layers[0].indexer_keys is source.indexer_keys
    assert state_tensors([layers[0]])[1].data_ptr() == source.indexer_position_ids.data_ptr()
    with pytest.raises(NotCapturable, match="different number of indexer keys"):
        layers[1].take(source)
    source.indexer_position_ids = torch.zeros(3, 2, 4)
    with pytest.raises(NotCapturable, match="different number of indexer keys"):
        layers[0].take(source)
