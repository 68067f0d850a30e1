"""What LoRA adapters add to a layer's product of packed rows: to each range of rows what its own adapter does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..step import NotCapturable
from . import uses_triton


class LoraWeights(NamedTuple):
    """What an adapter adds to one layer: `scaling * (x A^T B^T + bias)` (LoRA, arXiv 2106.09685, section 4.1)."""

    a: Tensor  # (rank, depth)
    b: Tensor  # (width, rank)
    bias: Tensor | None  # (width,)
    scaling: float
    group: Any = None  # processes that have a part of the depth each, and sum what `a` makes of it

    @property
    def tensors(self) -> list[Tensor]:
        return [self.a, self.b] if self.bias is None else [self.a, self.b, self.bias]


Part = tuple[int, int, LoraWeights]
"""Rows `[start, end)`, and what is added to them."""


class Deltas:
    """What is added to one layer's product. Each part is a product of its own (segmented products, as in Punica, arXiv
    2310.18547, and S-LoRA, arXiv 2311.03285, section 6): adapters may differ in rank and dtype, and what a row gets
    depends on the rows of its own part alone."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.table: Any = None  # the Triton kernels': addresses, ranges and factors on the device

    def prepare(self, like: Tensor) -> None:
        """Copies what the kernels read to the device of `like`, so that later calls copy nothing and can be recorded.
        Where there are no kernels for that, nothing."""
        if self.table is None and self.parts and uses_triton(like):
            from .triton import lora  # needs Triton

            self.table = lora.make_table(self.parts, like.device)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds to rows of `out` `(rows, width)` what their parts make of `x` `(rows, depth)`, in place; a row that no
        part names stays as it is."""
        self.prepare(out)
        if self.table is not None:
            from .triton import lora

            if lora.takes(out, x):
                lora.add_deltas(out, x, self.table)
                return
        add_each(out, x, self.parts)


class RecordedDeltas:
    """As [`Deltas`], by the Triton kernels, of ranges of rows that they read on the device: in a recorded step these
    are others each time. `ranges` `(n, 2)` int64, of `most` rows each, to which weights go by number."""

    def __init__(self, ranges: Tensor, most: int, weights: Sequence[tuple[int, LoraWeights]]) -> None:
        from .triton import lora  # needs Triton

        self.table = lora.table_over(ranges, most, weights)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Raises [`NotCapturable`] for tensors that the kernels do not take."""
        from .triton import lora

        if not lora.takes(out, x):
            raise NotCapturable(f"LoRA's kernels do not take {x.dtype} and {out.dtype}")
        lora.add_deltas(out, x, self.table)


def can_record(weights: Sequence[LoraWeights], device: torch.device) -> bool:
    """Whether [`RecordedDeltas`] take them, on this device."""
    if not uses_triton(torch.empty(0, device=device)):
        return False
    from .triton import lora

    return lora.takes_weights(weights, device)


def add_each(out: Tensor, x: Tensor, parts: Sequence[Part]) -> None:
    """`Deltas.add` in plain PyTorch, operation for operation as PEFT computes one adapter alone."""
    shrunk = [F.linear(x[start:end].to(lora.a.dtype), lora.a) for start, end, lora in parts]
    for (start, end, lora), middle in zip(parts, _summed(shrunk, parts)):
        target = out[start:end]
        delta = F.linear(middle, lora.b, lora.bias) * lora.scaling
        if target.dtype == delta.dtype:
            target += delta
        else:
            target.copy_(target + delta)


def _summed(shrunk: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """Where processes have parts of the depth, the sums of theirs, of all adapters at once."""
    places = [place for place, (*_, lora) in enumerate(parts) if lora.group is not None]
    if places:
        own = [shrunk[place] for place in places]
        together = torch.cat([each.flatten() for each in own])
        dist.all_reduce(together, group=parts[places[0]][2].group)
        for place, each, found in zip(places, own, together.split([each.numel() for each in own])):
            shrunk[place] = found.view(each.shape).to(each.dtype)
    return shrunk
