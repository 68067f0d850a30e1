"""Lazy tensors that stand for a layer's cached keys or values without gathering them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from ..step import Derives
from .storage import KVBlocks

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class ReadCounters:
    """
    How often attention over cached tokens read blocks in place, and how often it had to gather them first; of that, how
    often in decode steps.
    """

    in_place: int = 0
    gathered: int = 0
    gathered_decodes: int = 0
    latent: int = 0


@dataclass(eq=False)
class Step(Derives):
    """
    The state of a layer group's tables at one step: what its layers' handles read through.

    Positions here are *logical*: the column in the padded batch, as transformers counts. The token at logical position
    `p` of row `b` is token `p - paddings[b]` of that row's table; positions below `paddings[b]` are padding and not
    stored.

    Args:
        length (`int`): Logical positions so far, the new ones included.
        context_len (`int`): Of these, how many were there before the step.
        first (`int`): First logical position that the layer shows (above 0 for a sliding window).
        block_size (`int`): Tokens in a block.
        paddings (`tuple[int, ...]`): Leading padding positions of each row that are not stored.
        dropped (`tuple[int, ...]`): Leading tokens of each row's table whose blocks were given back.
        host_tables (`tuple[tuple[int, ...], ...]`): Block ids of each row.
        counters (`ReadCounters`): Shared by the whole cache.
    """

    length: int
    context_len: int
    first: int
    block_size: int
    paddings: tuple[int, ...]
    dropped: tuple[int, ...]
    host_tables: tuple[tuple[int, ...], ...]
    tables: dict[torch.device, torch.Tensor]
    counters: ReadCounters

    @property
    def query_len(self) -> int:
        """Tokens of each row that are new in this step."""
        return self.length - self.context_len

    def block_tables(self, device: torch.device) -> torch.Tensor:
        """`(batch, max_blocks)` int32 on `device`, rows filled up with 0."""
        table = self.tables.get(device)
        if table is None:
            width = max(map(len, self.host_tables), default=0)
            rows = [[*ids, *([0] * (width - len(ids)))] for ids in self.host_tables]
            table = self.tables[device] = torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), width)
        return table

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """
        Logical positions `[first, length)` of every row as one tensor, padding as zeros.

        Args:
            blocks (`torch.Tensor` of shape `(num_blocks, heads, block_size, dim)`): Keys or values of one layer.

        Returns:
            `torch.Tensor` of shape `(batch, heads, length - first, dim)`, contiguous.
        """
        heads, size, dim = blocks.shape[1:]
        if not (heads and self.host_tables):
            return blocks.new_empty(len(self.host_tables), heads, self.length - self.first, dim)
        stride = blocks.stride(2)  # blocks and heads lie whole rows of one token and head apart
        step_block, step_head = blocks.stride(0) // stride, blocks.stride(1) // stride
        rows, hidden = self.plan(Step._rows, step_block, step_head, heads, blocks.device)
        num_rows = max(0, (blocks.shape[0] - 1) * step_block + (heads - 1) * step_head + size)
        dense = blocks.as_strided((num_rows, dim), (stride, 1)).index_select(0, rows)
        if hidden is not None:
            dense.index_fill_(0, hidden, 0)
        return dense.view(len(self.host_tables), heads, self.length - self.first, dim)

    def _rows(
        self, step_block: int, step_head: int, heads: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Where `gather` finds what it returns, and which of it is padding: made once for all layers that are laid out
        alike, from one token and head to the next.
        """
        tables = self.block_tables(device)
        behind = [padding + dropped for padding, dropped in zip(self.paddings, self.dropped)]
        tokens = torch.arange(self.first, self.length, device=device)[None, :]
        tokens = tokens - torch.tensor(behind, device=device)[:, None]  # (batch, length - first)
        is_padded = max(behind) > self.first
        hidden = None
        if is_padded:
            shape = (len(behind), heads, self.length - self.first)
            hidden = (tokens < 0)[:, None].expand(shape).flatten().nonzero().squeeze(1)
            tokens = tokens.clamp_(min=0)
        if tables.shape[1]:
            slots = tables.gather(1, tokens // self.block_size).long() * step_block + tokens % self.block_size
        else:  # padding is all there is
            slots = torch.zeros_like(tokens)
        rows = slots[:, None] + torch.arange(0, heads * step_head, step_head, device=device)[:, None]
        return rows.flatten(), hidden


_OVERRIDES: dict[Callable[..., Any], Callable[..., Any]] = {}


def implements(torch_function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorates what is called in place of `torch_function` where an argument is a `PagedTensor`."""

    def register(function: Function) -> Function:
        _OVERRIDES[torch_function] = function
        return function

    return register


class PagedTensor(torch.Tensor):
    """
    A layer's keys or values, `(batch, heads, length, dim)`, left in their blocks.

    Our attention function reads `blocks` through `step`; any other operation gathers a contiguous tensor by itself, so
    that a model with attention code of its own still works, only slower.
    Functions of torch that have an implementation of ours (`implements`) are passed to it.
    """

    step: Step
    layer: KVBlocks
    blocks: torch.Tensor
    fresh: torch.Tensor | None
    _dense: torch.Tensor | None

    @staticmethod
    def __new__(cls, step: Step, layer: KVBlocks, which: str, fresh: torch.Tensor | None = None) -> PagedTensor:
        """
        `which`: `"keys"` or `"values"` of `layer`. `fresh`: this step's own states, `(batch, heads, n, dim)`, when
        there was nothing before them.
        """
        blocks: torch.Tensor = getattr(layer, which)
        batch, heads, length, dim = len(step.host_tables), blocks.shape[1], step.length - step.first, blocks.shape[3]
        # views are worked out from these strides, so they must be those of what `dense` returns
        strides = (heads * length * dim, length * dim, dim, 1) if fresh is None else fresh.stride()
        handle = torch.Tensor._make_wrapper_subclass(
            cls,
            (batch, heads, length, dim),
            strides=strides,
            dtype=layer.dtypes[which == "values"] if fresh is None else fresh.dtype,
            device=blocks.device,
        )
        handle.step, handle.layer, handle.blocks, handle.fresh, handle._dense = step, layer, blocks, fresh, None
        return handle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def dense(self) -> torch.Tensor:
        """The same as an ordinary tensor, gathered once."""
        if self._dense is None:
            if self.fresh is not None:
                self._dense = self.fresh
            else:
                self._dense = self.step.gather(self.blocks).to(self.dtype)
                self.step.counters.gathered += 1
                self.step.counters.gathered_decodes += self.step.query_len == 1
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, block_size={self.step.block_size})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OVERRIDES:
            return _OVERRIDES[func](*args, **(kwargs or {}))
        if func in _MEMORY_READERS:
            args = tree_map_only(PagedTensor, PagedTensor.dense, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(PagedTensor, PagedTensor.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


# Functions that torch does not dispatch: they go to a tensor's memory, and a handle has none.
_MEMORY_READERS = {
    torch.Tensor.__array__,
    torch.Tensor.__cuda_array_interface__.__get__,
    torch.Tensor.__dlpack__,
    torch.Tensor.apply_,
    torch.Tensor.data_ptr,
    torch.Tensor.map_,
    torch.Tensor.numpy,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
}
