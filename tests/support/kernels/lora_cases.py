"""AOT cases of the segmented products of LoRA adapters."""

from __future__ import annotations

import torch

from hf_paged.kernels.triton import lora
from tests.support.kernels.aot import LIMITS, AotCase


def _call(dtype: torch.dtype, rank: int) -> None:
    x, out = (torch.empty(32, 4096, dtype=dtype, device="meta") for _ in range(2))
    numbers, ranges = (torch.empty(8, width, dtype=torch.int64, device="meta") for width in (5, 2))
    lora.add_deltas(
        out, x, lora.Table(numbers, ranges, torch.empty(8, device="meta"), dtype, rank, most=4)
    )


CASES = [
    AotCase(
        f"lora rank {rank} {str(dtype).removeprefix('torch.')}",
        lambda d=dtype, r=rank: _call(d, r),
        LIMITS,
    )
    for dtype, rank in ((torch.bfloat16, 16), (torch.bfloat16, 128), (torch.float32, 128))
]
