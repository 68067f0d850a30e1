"""Adds the deltas of LoRA adapters to a layer's output for packed rows, one adapter per range of
rows. `adapters` decides which rows have which adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..step import NotCapturable
from . import uses_triton
from .triton.launch import LaunchFailedError


class LoraWeights(NamedTuple):
    """An adapter's weights for one layer, which add `scaling * (x A^T B^T + bias)` (LoRA, arXiv
    2106.09685, section 4.1)."""

    a: Tensor  # (rank, depth)
    b: Tensor  # (width, rank)
    bias: Tensor | None  # (width,)
    scaling: float
    group: Any = None  # process group that shards the depth and sums the products with `a`

    @property
    def tensors(self) -> list[Tensor]:
        return [self.a, self.b] if self.bias is None else [self.a, self.b, self.bias]

    def map(self, function: Callable[[Tensor], Tensor]) -> LoraWeights:
        """Returns the same adapter with `function` applied to its tensors."""
        bias = None if self.bias is None else function(self.bias)
        return self._replace(a=function(self.a), b=function(self.b), bias=bias)


Part = tuple[int, int, LoraWeights]
"""Rows `[start, end)`, and the adapter weights applied to them."""


class Deltas:
    """The deltas for one layer's output. Each part is a separate product (segmented products, as in
    Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285, section 6): adapters may differ in rank
    and dtype, and a row's delta depends only on the rows of its part."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.table: Any = None  # for the Triton kernels: addresses, ranges and factors on device

    def prepare(self, like: Tensor) -> None:
        """Copies the kernels' table to the device of `like`, so that later calls copy nothing and
        can be captured. Does nothing on devices without the Triton kernels."""
        if self.table is None and self.parts and uses_triton(like):
            from .triton import lora  # needs Triton

            self.table = lora.make_table(self.parts, like.device)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds the parts' deltas of `x` `(rows, depth)` to `out` `(rows, width)` in place; rows
        without a part are unchanged."""
        self.prepare(out)
        if self.table is not None:
            from .triton import lora

            if lora.supports(out, x):
                # on failure `out` is unchanged; processes that share the depth run the same
                # kernels, so that all fail
                with contextlib.suppress(LaunchFailedError):
                    lora.add_deltas(out, x, self.table)
                    return
        add_portable(out, x, self.parts)


class RecordedDeltas:
    """[`Deltas`] for captured steps: the Triton kernels read the ranges of rows on the device,
    where they change between replays. `ranges`: `(n, 2)` int64, of at most `max_rows` rows each;
    `weights` refer to their range by index."""

    def __init__(
        self, ranges: Tensor, max_rows: int, weights: Sequence[tuple[int, LoraWeights]]
    ) -> None:
        from .triton import lora  # needs Triton

        self.table = lora.table_over(ranges, max_rows, weights)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Same as `Deltas.add`. Raises [`NotCapturable`] for tensors that the kernels do not
        support, or if they fail."""
        from .triton import lora

        if not lora.supports(out, x):
            raise NotCapturable(f"the LoRA kernels do not support {x.dtype} and {out.dtype}")
        try:
            lora.add_deltas(out, x, self.table)
        except LaunchFailedError as error:
            raise NotCapturable("the LoRA kernels do not run") from error


def can_record(weights: Sequence[LoraWeights], device: torch.device) -> bool:
    """Whether [`RecordedDeltas`] support these weights on this device."""
    if not uses_triton(torch.empty(0, device=device)):
        return False
    from .triton import lora

    return lora.supports_weights(weights, device)


def add_portable(out: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
    """Computes `Deltas.add` in plain PyTorch, operation for operation like PEFT with one
    adapter."""
    shrunk = [F.linear(x[start:end].to(lora.a.dtype), lora.a) for start, end, lora in parts]
    for (start, end, lora), middle in zip(parts, _summed(shrunk, parts)):
        target = out[start:end]
        delta = F.linear(middle, lora.b, lora.bias) * lora.scaling
        if target.dtype == delta.dtype:
            target += delta
        else:
            target.copy_(target + delta)


def _summed(shrunk: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """Sums the products over processes that shard the depth, for all adapters in one all-reduce."""
    indices = [index for index, (*_, lora) in enumerate(parts) if lora.group is not None]
    if indices:
        sharded = [shrunk[index] for index in indices]
        together = torch.cat([product.flatten() for product in sharded])
        dist.all_reduce(together, group=parts[indices[0]][2].group)
        sums = together.split([product.numel() for product in sharded])
        for index, product, total in zip(indices, sharded, sums):
            shrunk[index] = total.view(product.shape).to(product.dtype)
    return shrunk
