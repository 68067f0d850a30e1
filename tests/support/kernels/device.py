"""Device of the kernels' tests: the GPU if there is one, else Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged.kernels import triton
from hf_paged.step import Lengths, StepMetadata
from tests.attention.test_backends import Call

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_OBSTACLE = None if triton.is_available(DEVICE) else "no Triton, or TRITON_INTERPRET unset"
available = pytest.mark.gpu(unless=_OBSTACLE)
"""Marks tests of kernels on `DEVICE`."""
interpreted = pytest.mark.skipif(
    DEVICE.type != "cpu" or _OBSTACLE is not None, reason="Triton's interpreter is off"
)
"""Marks tests of kernels on CPU tensors."""


def to_device(call: Call, device: torch.device = DEVICE) -> Call:
    """The call with its tensors on the device, and lengths that the host knows."""
    return dataclasses.replace(
        call,
        query=call.query.to(device),
        key_blocks=call.key_blocks.to(device),
        value_blocks=call.value_blocks.to(device),
        step=dataclasses.replace(call.step, block_tables=call.step.block_tables.to(device)),
        options={
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.options.items()
        },
    )


def on_device(call: Call) -> Call:
    """The call with its tensors on `DEVICE`; K and V stay views of shared tensors; lengths are
    unknown to the host."""
    moved: dict[int, Tensor] = {}

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        storage = tensor.untyped_storage()
        whole = moved.get(storage.data_ptr())
        if whole is None:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            whole = moved[storage.data_ptr()] = flat.to(DEVICE)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    step = call.step
    lengths = [
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in (step.seq_lens, step.starts)
    ]
    return dataclasses.replace(
        call,
        query=move(call.query),
        key_blocks=move(call.key_blocks),
        value_blocks=move(call.value_blocks),
        step=dataclasses.replace(
            step,
            block_tables=poisoned_tables(step).to(DEVICE),
            seq_lens=(),
            starts=(),
            lengths=Lengths(*lengths),
        ),
        options={name: move(value) for name, value in call.options.items()},
    )


def poisoned_tables(step: StepMetadata) -> Tensor:
    """The block tables, with out-of-range ids where a row has no tokens."""
    first = torch.arange(step.block_tables.shape[1])[None, :] * step.block_size
    return step.block_tables.masked_fill(first >= torch.tensor(step.seq_lens)[:, None], 2**30)
