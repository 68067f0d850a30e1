"""Gathering by the C++ kernel: results of the portable path, and no reads outside of a step's
blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_paged.cache import reading
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import gather
from hf_paged.step import Lengths, StepMetadata

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")


def step_of(
    tables: list[list[int]], columns: range, origins: tuple[int, ...], size: int
) -> StepMetadata:
    ids = torch.tensor(tables, dtype=torch.int32).view(len(tables), -1)
    lengths = [max(0, columns.stop - origin) for origin in origins]
    return StepMetadata.rectangle(ids, lengths, size, columns=columns, origins=origins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [range(0, 21), range(5, 21), range(0, 1)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_gathers_what_the_portable_path_gathers(dtype, columns, interleaved, monkeypatch):
    size, heads, dim = 8, 3, 5
    data = torch.full(
        (9, 2 * heads, size, 2 * dim if interleaved else dim), float("nan"), dtype=dtype
    )
    origins = (0, 4, columns.stop, -3)  # whole, padded, only padding, freed blocks
    tables = [[3, 1, 7], [5, 8, 2], [0, 0, 0], [4, 6, 2]]
    blocks = data[:, heads:, :, :dim]
    for row, origin in enumerate(origins):
        for token in range(columns.stop - origin):
            blocks[tables[row][token // size], :, token % size] = torch.randn(heads, dim).to(dtype)
    step = step_of(tables, columns, origins, size)
    found = gather(step, blocks)
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    assert torch.equal(found, reading.gather(step, blocks, dtype)) and found.is_contiguous()
    assert not found.isnan().any() and not found[2].any()


@pytest.mark.parametrize("columns", [range(0, 24), range(5, 24)], ids=str)
def test_a_recorded_step_gets_zeros_after_the_last_token(columns: range) -> None:
    """Its lengths are numbers in memory, which a replay reads again."""
    size, heads, dim = 8, 2, 5
    blocks = torch.full((6, heads, size, dim), float("nan"))
    origins, seq_lens = [0, 7, 0, 24], [19, 3, 0, 0]
    tables = torch.tensor([[3, 1, 5], [2, 99, 99], [99, 99, 99], [99, 99, 99]], dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        for token in range(length):
            blocks[tables[row, token // size], :, token % size] = torch.randn(heads, dim)
    lengths = Lengths(
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        origins=torch.tensor(origins, dtype=torch.int32),
    )
    step = StepMetadata.rectangle(tables, (), size, columns=columns, lengths=lengths)
    gathered = gather(step, blocks)
    for row, (origin, length) in enumerate(zip(origins, seq_lens)):
        for place, column in enumerate(columns):
            token, expected = column - origin, torch.zeros(heads, dim)
            if 0 <= token < length:
                expected = blocks[tables[row, token // size], :, token % size]
            assert torch.equal(gathered[row, :, place], expected), (row, column)


def test_many_bytes_are_shared_among_threads(monkeypatch):
    blocks = torch.randn(40, 4, 16, 64)
    tables = torch.randperm(40).view(2, 20).tolist()
    step = step_of(tables, range(0, 300), (0, 17), 16)
    found = gather(step, blocks)
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    assert torch.equal(found, reading.gather(step, blocks, blocks.dtype))


def test_tables_that_do_not_fit_are_refused():
    blocks = torch.zeros(4, 1, 8, 2)
    for tables in ([[0, 4]], [[0, -1]], [[0]]):
        with pytest.raises(IndexError, match="too few blocks for columns range"):
            gather(step_of(tables, range(0, 10), (0,), 8), blocks)
    # the second is not read
    assert gather(step_of([[0, 9]], range(0, 8), (0,), 8), blocks).shape == (1, 1, 8, 2)


def test_blocks_and_origins_that_do_not_fit_are_refused():
    step = step_of([[0, 1]], range(0, 10), (0,), 8)
    assert gather(step, torch.zeros(4, 1, 8, 2)).shape == (1, 1, 10, 2)
    others = torch.zeros(4, 1, 4, 2), torch.zeros(4, 1, 8, 4)[..., ::2], torch.zeros(4, 8, 2)
    for blocks in (*others, torch.zeros(4, 1, 8, 2, device="meta")):
        with pytest.raises(ValueError, match=r"blocks are torch\.float32"):
            gather(step, blocks)
    with pytest.raises(ValueError, match=r"blocks are torch\.float32"):
        gather(step_of([[0, 1]], range(0, 10), (0,), 0), torch.zeros(4, 1, 0, 2))
    for wrong in (replace(step, origins=()), replace(step, columns=None)):
        with pytest.raises(ValueError, match="one origin and table for each of 1 rows"):
            gather(wrong, torch.zeros(4, 1, 8, 2))
