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
    """The call with its tensors on the device, where K and V stay views of shared tensors, and
    lengths that the host knows."""
    moved: dict[int, Tensor] = {}

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        storage = tensor.untyped_storage()
        whole = moved.get(storage.data_ptr())
        if whole is None:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            whole = moved[storage.data_ptr()] = flat.to(device)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    tensors = {name: move(getattr(call, name)) for name in ("query", "key_blocks", "value_blocks")}
    step = dataclasses.replace(call.step, block_tables=move(call.step.block_tables))
    options = {name: move(value) for name, value in call.options.items()}
    return dataclasses.replace(call, **tensors, step=step, options=options)


def on_device(call: Call) -> Call:
    """As `to_device`, with lengths that the host does not know."""
    step, names = call.step, ("seq_lens", "starts")
    ints = {"dtype": torch.int32, "device": DEVICE}
    lengths = Lengths(*(torch.tensor(getattr(step, name), **ints) for name in names))
    tables = poisoned_tables(step).to(DEVICE)
    step = dataclasses.replace(step, block_tables=tables, seq_lens=(), starts=(), lengths=lengths)
    return dataclasses.replace(to_device(call), step=step)


def poisoned_tables(step: StepMetadata) -> Tensor:
    """The block tables, with out-of-range ids where a row has no tokens."""
    first = torch.arange(step.block_tables.shape[1])[None, :] * step.block_size
    return step.block_tables.masked_fill(first >= torch.tensor(step.seq_lens)[:, None], 2**30)
