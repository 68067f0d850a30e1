"""Adds the deltas of LoRA adapters to a layer's output for a packed batch, in which each range of
rows has one adapter. The optional package `adapters` assigns the adapters."""

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
    """An adapter's weights for one layer: its delta is `scaling * (x A^T B^T + bias)` (LoRA, arXiv
    2106.09685, section 4.1)."""

    a: Tensor  # (rank, depth)
    b: Tensor  # (width, rank)
    bias: Tensor | None  # (width,)
    scaling: float
    # process group whose ranks hold shards of A along the depth, and sum their `x A^T`
    group: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.a, self.b] if self.bias is None else [self.a, self.b, self.bias]

    def map(self, function: Callable[[Tensor], Tensor]) -> LoraWeights:
        """Returns the weights with `function` applied to each tensor."""
        bias = None if self.bias is None else function(self.bias)
        return self._replace(a=function(self.a), b=function(self.b), bias=bias)


Part = tuple[int, int, LoraWeights]
"""The range of rows `[start, end)`, and the weights of their adapter."""


class Deltas:
    """Adds the deltas of one layer, with a separate product for each part (segmented products, as
    in Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285, section 5.3): adapters may differ in
    rank and dtype, and a row's delta depends only on the rows of its part."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        # the `LoraTable` of the Triton kernels: addresses, ranges and scalings on the device
        self.table: Any = None

    def prepare(self, like: Tensor) -> None:
        """Makes the table of the Triton kernels on the device of `like`, so that `add` copies
        nothing to the device and can be captured. Does nothing where these kernels do not run."""
        if self.table is None and self.parts and uses_triton(like):
            from .triton import lora  # needs Triton

            self.table = lora.make_table(self.parts, like.device)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds the deltas for the layer's input `x` `(rows, depth)` to its output `out` `(rows,
        width)` in place. Leaves rows outside all parts unchanged."""
        self.prepare(out)
        if self.table is not None:
            from .triton import lora

            if lora.supports(out, x):
                # A failed kernel leaves `out` unchanged. Ranks that shard the depth run the same
                # kernels, so they either all fail or all succeed.
                with contextlib.suppress(LaunchFailedError):
                    lora.add_deltas(out, x, self.table)
                    return
        add_portable(out, x, self.parts)


class RecordedDeltas:
    """[`Deltas`] for captured steps: the Triton kernels read the ranges of rows from the device,
    where the caller changes them between replays. The arguments are as in
    `triton.lora.make_range_table`."""

    def __init__(
        self, ranges: Tensor, max_rows: int, weights: Sequence[tuple[int, LoraWeights]]
    ) -> None:
        from .triton import lora  # needs Triton

        self.table = lora.make_range_table(ranges, max_rows, weights)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds the deltas as [`Deltas.add`] does. Raises [`NotCapturable`] for tensors that the
        kernels do not support, or if a kernel cannot be launched."""
        from .triton import lora

        if not lora.supports(out, x):
            raise NotCapturable(
                f"the LoRA kernels do not support inputs of {x.dtype} and outputs of {out.dtype},"
                " or rows that are not contiguous"
            )
        try:
            lora.add_deltas(out, x, self.table)
        except LaunchFailedError as error:
            raise NotCapturable("a LoRA kernel could not be launched") from error


def can_record(weights: Sequence[LoraWeights], device: torch.device) -> bool:
    """Whether [`RecordedDeltas`] can add the deltas of all `weights` on `device`."""
    if not uses_triton(torch.empty(0, device=device)):
        return False
    from .triton import lora

    return lora.supports_weights(weights, device)


def add_portable(out: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
    """Computes [`Deltas.add`] in plain PyTorch, with the operations of PEFT for a single
    adapter."""
    products = [F.linear(x[start:end].to(lora.a.dtype), lora.a) for start, end, lora in parts]
    for (start, end, lora), product in zip(parts, _all_reduce(products, parts)):
        target = out[start:end]
        delta = F.linear(product, lora.b, lora.bias) * lora.scaling
        if target.dtype == delta.dtype:
            target += delta
        else:
            target.copy_(target + delta)


def _all_reduce(products: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """Returns the products `x A^T` of all parts. One all-reduce sums the products of sharded
    adapters over the ranks that shard the depth."""
    indices = [index for index, (*_, lora) in enumerate(parts) if lora.group is not None]
    if indices:
        sharded_products = [products[index] for index in indices]
        flat = torch.cat([product.flatten() for product in sharded_products])
        dist.all_reduce(flat, group=parts[indices[0]][2].group)
        sums = flat.split([product.numel() for product in sharded_products])
        for index, product, total in zip(indices, sharded_products, sums):
            products[index] = total.view(product.shape).to(product.dtype)
    return products
