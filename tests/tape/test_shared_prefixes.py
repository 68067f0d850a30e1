"""Costs of shared prefixes of a model whose layers have other numbers of heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_paged.batching.execution.inputs import GroupTokens, PackedTokens
from hf_paged.tape.shared_prefixes import SharedPrefixes
from tests.model.test_heterogeneous import build, pytestmark  # noqa: F401


def test_costs_of_shared_prefixes_count_each_layers_heads() -> None:
    model, keys = build(), torch.zeros(3, 1, 8, 16)
    blocks = SimpleNamespace(keys=keys, values=keys, tiles=(keys,))
    layers = [dict.fromkeys(each, blocks) for each in ([0], [1], [0, 1])]
    groups: Any = [SimpleNamespace(storage=SimpleNamespace(layers=each)) for each in layers]
    first, second, both = SharedPrefixes(lambda: model, groups).costs
    assert first.state_bytes == 2 * second.state_bytes
    assert both.state_bytes == first.state_bytes + second.state_bytes


def test_a_prefix_whose_first_tokens_are_hidden_is_not_shared() -> None:
    model, keys = build(), torch.zeros(3, 1, 8, 16)
    storage = SimpleNamespace(layers={0: SimpleNamespace(keys=keys, values=keys, tiles=(keys,))})
    memory: Any = SimpleNamespace(storage=storage, block_size=8, spec=SimpleNamespace(window=None))
    rows, num_blocks = 64, 1024
    found = []
    for starts in ([0] * rows, [0, 3] * (rows // 2)):
        tables, lengths = [[*range(num_blocks)]] * rows, [8 * num_blocks] * rows
        group = GroupTokens([-1] * rows, tables, lengths, [0] * rows, starts)
        last = [*range(rows)]
        tokens = PackedTokens(last, last, last, [*last, rows], rows, [group], [])
        found.append(bool(SharedPrefixes(lambda: model, [memory]).find(tokens)))
    assert found == [True, False]
