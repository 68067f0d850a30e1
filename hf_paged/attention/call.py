"""One layer's attention: what every backend takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.storage import KVBlocks
from ..step import StepMetadata


class AttentionCall(NamedTuple):
    """
    Args:
        query (`torch.Tensor` of shape `(T, heads, head_dim)`):
            Tokens of all rows, row after row. Query head `h` reads K/V head `h // (heads // kv_heads)`.
        blocks ([`KVBlocks`]): Keys and values of the layer.
        step ([`StepMetadata`]): Block tables, lengths and masks.
        scale (`float`): Factor on `q @ k`.
        softcap (`float`, *optional*): Scores become `tanh(scores / softcap) * softcap` before bias and mask.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*):
            One more logit per head that takes probability and adds no value.
        bias (`torch.Tensor` that broadcasts to `(n, heads, query_len, >= max seq_len)`, *optional*):
            Added to the scores, its last axis in table coordinates of each row; may hold `-inf`. All rows have
            equally many queries.
        fresh (pair of `torch.Tensor` of shape `(T, kv_heads, dim)`, *optional*):
            Keys and values of the step's own tokens, where they are at hand.
    """

    query: Tensor
    blocks: KVBlocks
    step: StepMetadata
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    fresh: tuple[Tensor, Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax(q k scale) v under the step's mask and nothing else."""
        return self.softcap is None and self.sinks is None and self.bias is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys, values, and sinks and bias where there are any."""
        optional = [tensor for tensor in (self.sinks, self.bias) if tensor is not None]
        return self.query, self.blocks.keys, self.blocks.values, *optional

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient is wanted."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def of_heads(self, heads: slice, query: Tensor, bias: Tensor | None) -> AttentionCall:
        """The call of some query heads, whose queries and bias these are."""
        return self._replace(query=query, bias=bias, sinks=None if self.sinks is None else self.sinks[heads])

    def by_groups(self) -> list[AttentionCall]:
        """The call as one a group of rows with equally many queries, in order."""
        groups = self.step.row_groups()
        if len(groups) == 1:
            return [self]
        calls = [self._replace(query=self.query[tokens], step=step) for tokens, step in groups]
        if self.fresh is None:
            return calls
        keys, values = self.fresh
        return [call._replace(fresh=(keys[at], values[at])) for call, (at, _) in zip(calls, groups)]
