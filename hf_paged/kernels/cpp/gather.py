"""A layer's keys or values as one tensor, gathered from their blocks by the C++ kernel (`kernels.cpp`)."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ...step import StepMetadata
from .build import kernel

_CALL = struct.Struct("2Q6q")  # struct GatherCall: this call, then the step
_STEP = struct.Struct("2Q7q")


def gather(step: StepMetadata, blocks: Tensor) -> Tensor:
    """
    All `step.columns` of every row, `(rows, heads, len(columns), dim)`, contiguous, padding as zeros, from `blocks`
    `(num_blocks, heads, block_size, dim)` on the CPU, of any dtype. Raises `IndexError` for a table that does not fit,
    `ValueError` for sizes that do not.
    """
    packed, _ = step.plan(_step_fields)
    num_blocks, heads, size, dim = blocks.shape
    assert step.columns is not None and size == step.block_size and blocks.stride(3) == 1
    out = blocks.new_empty(step.num_rows, heads, len(step.columns), dim)
    width = blocks.element_size()
    strides = (stride * width for stride in blocks.stride()[:3])
    call = _CALL.pack(blocks.data_ptr(), out.data_ptr(), heads, num_blocks, *strides, dim * width)
    if error := kernel("gather")(call + packed):
        if error == 4:
            raise ValueError("a tensor without memory, or sizes that do not fit one another")
        raise IndexError(
            f"block tables of shape {tuple(step.block_tables.shape)} do not fit columns {step.columns} of a pool of "
            f"{num_blocks} blocks"
        )
    return out


def _step_fields(step: StepMetadata) -> tuple[bytes, tuple[Tensor, Tensor]]:
    """What the kernel is told of a step, the same for all layers, and the tensors that this names."""
    tables, columns = step.block_tables.to("cpu", torch.int32).contiguous(), step.columns
    origins = torch.tensor(step.origins, dtype=torch.int32)
    assert columns is not None and len(origins) == len(tables) == step.num_rows
    packed = _STEP.pack(
        *(tables.data_ptr(), origins.data_ptr(), step.num_rows, columns.start, len(columns)),
        *(tables.stride(0), tables.size(1), step.block_size, torch.get_num_threads()),
    )
    return packed, (tables, origins)
