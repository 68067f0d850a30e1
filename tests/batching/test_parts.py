"""Parts of a caller's in place of those that an engine's config asks for (`EngineParts`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged import PagedEngine
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.storage import KVBlocks
from hf_paged.seams import EngineParts
from tests.support import models


class HalfStorage:
    """A toy `Storage`: float16 blocks, whatever the model computes, in tensors that grow by as many
    blocks as asked."""

    most_bytes, growth_step, is_elastic = None, 0, False

    def __init__(self, config: Any, spec: Any, block_size: int, before_move: Any) -> None:
        self.pool = BlockPool()
        self.layers: dict[int, KVBlocks] = {}
        self.block_size = block_size

    @property
    def block_bytes(self) -> int:
        return sum(layer.block_bytes for layer in self.layers.values())

    @property
    def num_rows(self) -> int:
        return min((layer.num_blocks for layer in self.layers.values()), default=0)

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_rows

    def _blocks(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        heads, dim = keys.shape[1], keys.shape[3]
        shape = (num_blocks, 2 * heads, self.block_size, dim)
        data = torch.zeros(shape, dtype=torch.float16, device=keys.device)
        return KVBlocks.view((data,), heads, dim, (keys.dtype, values.dtype))

    def reserve(self, reservation: Any, drops: bool) -> None:
        """Reserves nothing."""

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        return self._blocks(1, keys.to("meta"), values.to("meta"))

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        self.layers[index] = self._blocks(self.pool.num_blocks, keys, values)
        return self.layers[index]

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        raise AssertionError("the model's dtype does not change")

    def grow(self, num_blocks: int, most: int) -> None:
        grown = {index: layer.grown(num_blocks) for index, layer in self.layers.items()}
        self.layers = grown

    def copy_blocks(self, copies: Any) -> None:
        sources, targets = map(list, zip(*copies))
        for layer in self.layers.values():
            layer.put_blocks(targets, layer.at(sources))

    def clear(self) -> None:
        self.layers = {}


def test_a_toy_storage_keeps_float16_blocks_for_a_float32_model() -> None:
    model = models.build("llama")
    assert model.dtype == torch.float32
    prompts = [[5, 6, 7, 8] * 6, [5, 6, 7, 8] * 5 + [9]]
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2}
    config = {"block_size": 8}
    with PagedEngine(model, config) as engine:
        expected = [result.sequences for result in engine.generate(prompts, options, seed=0)]
        num_bytes = engine.stats().peak_bytes
    with PagedEngine(model, config, parts=EngineParts(storage=HalfStorage)) as engine:
        results = [result.sequences for result in engine.generate(prompts, options, seed=0)]
        assert [[row.token_ids for row in rows] for rows in results] == [
            [row.token_ids for row in rows] for rows in expected
        ]
        (group,) = engine.memory.groups.values()
        assert {layer.keys.dtype for layer in group.storage.layers.values()} == {torch.float16}
        assert engine.stats().peak_bytes == num_bytes // 2
        engine.check_integrity()
