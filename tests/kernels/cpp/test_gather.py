"""Gathering by the C++ kernel: no reads outside of a step's blocks. `test_fuzz.py` tests its
results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import gather
from hf_paged.step import StepMetadata

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")


def step_of(
    tables: list[list[int]], columns: range, origins: tuple[int, ...], size: int
) -> StepMetadata:
    ids = torch.tensor(tables, dtype=torch.int32).view(len(tables), -1)
    lengths = [max(0, columns.stop - origin) for origin in origins]
    return StepMetadata.rectangle(ids, lengths, size, columns=columns, origins=origins)


def test_what_does_not_fit_is_refused() -> None:
    blocks, step = torch.zeros(4, 1, 8, 2), step_of([[0, 1]], range(0, 10), (0,), 8)
    assert gather(step, blocks).shape == (1, 1, 10, 2)
    # the second block is not read
    assert gather(step_of([[0, 9]], range(0, 8), (0,), 8), blocks).shape == (1, 1, 8, 2)
    for tables in ([[0, 4]], [[0, -1]], [[0]]):
        with pytest.raises(IndexError, match="too few blocks for columns range"):
            gather(step_of(tables, range(0, 10), (0,), 8), blocks)
    others = torch.zeros(4, 1, 4, 2), torch.zeros(4, 1, 8, 4)[..., ::2], torch.zeros(4, 8, 2)
    for each in (*others, blocks.to("meta")):
        with pytest.raises(ValueError, match=r"blocks are torch\.float32"):
            gather(step, each)
    with pytest.raises(ValueError, match=r"blocks are torch\.float32"):
        gather(step_of([[0, 1]], range(0, 10), (0,), 0), torch.zeros(4, 1, 0, 2))
    for wrong in (replace(step, origins=()), replace(step, columns=None)):
        with pytest.raises(ValueError, match="one origin and one table for each of 1 rows"):
            gather(wrong, blocks)
