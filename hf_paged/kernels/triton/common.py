"""What the kernels and their launchers share."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """What operands of these dtypes are converted to for `tl.dot`: one that holds them all."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def split_dim(dim: int, smallest: int = 16) -> tuple[int, int]:
    """Sizes of the one or two power-of-two tiles that cover `dim` elements; the second is 0 if one is as small.

    80 is 64 + 16 and 576 is 512 + 64; 112 would be 64 + 64 and is 128. No tile is below `smallest`.
    """
    whole = max(smallest, triton.next_power_of_2(dim))
    if dim == whole or whole == smallest:
        return whole, 0
    rest = max(smallest, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; those of an H200 for tensors that are on none."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    if tensor.is_cuda:
        return torch.cuda.device_of(tensor)
    if tensor.is_xpu:
        return torch.xpu.device_of(tensor)
    return contextlib.nullcontext()
