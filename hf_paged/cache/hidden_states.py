"""Stores a model's last hidden state of each token beside its keys and values, as one more layer of
their group."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..kernels import quantized
from ..step import to_device
from ..topics import Topic
from .block_manager import SequenceBlocks
from .groups import GroupSpec
from .layers import PagedLayer
from .paged_cache import PagedCache

MAX_DIM = 128  # head dim when a hidden state is stored as heads


def reason_against_hidden_states(cache: PagedCache, hidden_size: int) -> str | None:
    """Returns why the hidden states of a model with this cache cannot be stored; `None` if they
    can."""
    if hidden_size % 2:
        return Topic.ASSISTED(
            f"hidden states of odd size ({hidden_size}) cannot be stored as keys and values"
        )
    if GroupSpec() in cache.groups:
        return None
    return Topic.ASSISTED("no layer keeps all tokens, so hidden states have no blocks")


class HiddenStates:
    """Hidden states in the blocks of the full-attention layers, so that they are shared, copied,
    swapped and cached with K/V; half of each is stored as the keys and half as the values of a
    layer."""

    def __init__(self, cache: PagedCache) -> None:
        self._layer = PagedLayer(cache.groups[GroupSpec()], len(cache.layers))

    def store(self, hidden: Tensor) -> None:
        """Stores the hidden states `(1, n, hidden_size)` of the current packed step in its
        slots."""
        half = hidden.shape[2] // 2
        dim = math.gcd(half, MAX_DIM)
        heads = half // dim
        states = hidden.reshape(1, -1, 2 * heads, dim)
        keys = states[:, :, :heads].transpose(1, 2)
        values = states[:, :, heads:].transpose(1, 2)
        layer = self._layer
        group = layer.group
        with group.memory.lock:
            # `num_layers` is 1: do not estimate the other layers' bytes from this one
            group.blocks.layer(layer.index, keys, values, 1, group.num_begun(0))
        layer.update(keys, values)
        layer.packed_handles = None

    def read(self, wanted: Iterable[tuple[SequenceBlocks, int, int]]) -> Tensor:
        """Returns the hidden states `(1, n, hidden_size)` of tokens `[first, end)` of each
        sequence, concatenated."""
        group = self._layer.group
        slots = []
        for sequence, first, end in wanted:
            table = sequence.tables[group.number]
            slots += table.slots(first, end)
        with group.memory.lock:
            blocks = group.blocks.storage.layers[self._layer.index]
            on_host = torch.tensor(slots, dtype=torch.long, device="cpu")
            at = to_device(on_host, blocks.keys.device)
            size = group.blocks.block_size
            index = (at // size, slice(None), at % size)
            # each (n, heads, dim)
            halves = [quantized.read(stored, index, dtype) for stored, dtype in blocks.pair]
        return torch.cat([half.flatten(1) for half in halves], dim=1)[None]
