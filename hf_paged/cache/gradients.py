"""Keys and values with an autograd graph, beside their copies in blocks, which have none.
`cache.layers` decides when to keep such tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..step import StepMetadata
from .handles import READ_ONLY
from .kv_blocks import KVBlocks
from .reading import read_pair


class GraphStates(NamedTuple):
    """A layer's latest keys and values, each `(batch, heads, n, dim)`, with their autograd
    graph."""

    keys: Tensor
    values: Tensor
    versions: tuple[int, ...]  # of both tensors; a write in place increases them

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> GraphStates:
        return cls(keys, values, _versions(keys, values))

    def map(self, function: Callable[[Tensor], Tensor]) -> GraphStates:
        """Returns states with `function` applied to keys and to values."""
        keys = function(self.keys)
        values = function(self.values)
        return GraphStates.of(keys, values)

    def last(self, num_tokens: int) -> GraphStates:
        """Returns the states of the last `num_tokens` tokens, or all if there are fewer."""
        surplus = self.keys.shape[2] - num_tokens
        if surplus <= 0:
            return self
        return self.map(lambda states: states[:, :, surplus:])

    def check(self) -> None:
        """Raises `RuntimeError` if the tensors were written to in place, since the blocks still
        hold the old values."""
        if _versions(self.keys, self.values) != self.versions:
            raise RuntimeError(READ_ONLY)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphStates:
        return self  # shared, since its tensors are never written to

    def __reduce__(self) -> Any:
        return type(None), ()  # `None`: a pickled cache has the K/V of blocks, without a graph


def extend(
    past: GraphStates | None,
    step: StepMetadata,
    blocks: KVBlocks,
    key_states: Tensor,
    value_states: Tensor,
) -> GraphStates:
    """Returns the states of `past`, if any, followed by the step's new K/V `(batch, heads, n,
    dim)`, rounded as `blocks` store them."""
    new_states = [key_states, value_states]
    if not blocks.is_exact:  # gradients pass through the rounding
        pairs = zip(read_pair(step, blocks), new_states)
        new_states = [
            stored[:, :, -states.shape[2] :] + (states - states.detach())
            for stored, states in pairs
        ]
    if past is not None:
        pairs = zip(past[:2], new_states)
        new_states = [torch.cat(pair, dim=2) for pair in pairs]
    return GraphStates.of(*new_states)


def visible_states(
    states: GraphStates, step: StepMetadata, blocks: KVBlocks
) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of `step.columns`, each `(batch, heads, len(columns), dim)`: the
    last ones from `states`, the missing earlier ones from `blocks`, without a graph."""
    assert step.columns is not None
    num_visible = len(step.columns)
    keys, values, _ = states.last(num_visible)
    num_missing = num_visible - keys.shape[2]
    if not num_missing:
        return keys, values
    past_keys, past_values = (past[:, :, :num_missing] for past in read_pair(step, blocks))
    return torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)


def is_transformed(states: Tensor) -> bool:
    """Whether a function transform (`torch.func`, forward-mode differentiation) traces the
    tensor."""
    if torch._C._functorch.is_functorch_wrapped_tensor(states):
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(states).tangent is not None


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
