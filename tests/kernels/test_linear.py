"""The C++ products for few rows: accurate, independent of the other rows in the batch, within their
memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.build import best_path
from hf_paged.kernels.cpp.linear import linear

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# widths and depths that fill no tile, no register and no unit of rows, and some that do
SHAPES = [(1, 1), (5, 7), (16, 32), (17, 33), (40, 100), (70, 96), (256, 512), (33, 1030)]
ROWS = [1, 2, 3, 5, 16, 17, 31, 33, 64, 70]


def paths() -> list[int]:
    return list(range(best_path() + 1)) if cpp.is_available() else []


def make(
    width: int, depth: int, rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, depth), (width, depth), (width,))
    )
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_as_exact_as_pytorchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for path in paths():
        for rows in ROWS:
            x, weight, bias = make(*shape, rows, dtype)
            for b in (None, bias):
                exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
                made = linear(x, weight, b, path), F.linear(x, weight, b)
                error, its = ((y.double() - exact).square().mean().sqrt() for y in made)
                assert error <= 1.3 * its + 4 * torch.finfo(dtype).eps * (dtype is torch.float32), (
                    path,
                    rows,
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 1030), (96, 768), (300, 100)], ids=str)
def test_a_row_is_the_same_whatever_stands_beside_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = make(*shape, 70, dtype)
    for path in paths():
        alone = torch.cat([linear(row[None], weight, bias, path) for row in x])
        for first, last in ((0, 2), (0, 3), (1, 6), (3, 20), (0, 33), (7, 70), (0, 70)):
            assert linear(x[first:last], weight, bias, path).equal(alone[first:last]), (
                path,
                first,
                last,
            )


def test_the_number_of_threads_does_not_count() -> None:
    before = torch.get_num_threads()
    for path in paths():
        for rows in (1, 5, 40):
            x, weight, bias = make(1000, 768, rows, torch.bfloat16)
            found = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(linear(x, weight, bias, path))
            torch.set_num_threads(before)
            assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_outside_of_a_tensor_counts(dtype: torch.dtype) -> None:
    """Rows between NaN rows, of weights and of x."""
    for path in paths():
        for width, depth, rows in ((17, 33, 3), (40, 100, 18), (16, 50, 1)):
            x, weight, bias = make(width, depth, rows, dtype)
            wide_x, wide_weight = (
                torch.full((len(t) + 2, depth + 40), torch.nan, dtype=dtype) for t in (x, weight)
            )
            wide_x[1:-1, 3 : 3 + depth], wide_weight[1:-1, 5 : 5 + depth] = x, weight
            found = linear(
                wide_x[1:-1, 3 : 3 + depth], wide_weight[1:-1, 5 : 5 + depth], bias, path
            )
            assert found.equal(linear(x, weight, bias, path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan_go_where_they_belong(dtype: torch.dtype) -> None:
    for path in paths():
        x, weight, bias = make(40, 64, 4, dtype)
        x[1, 3], x[2, 5], weight[7, 9] = torch.nan, torch.inf, torch.inf
        found, expected = linear(x, weight, bias, path), F.linear(x, weight, bias)
        assert found.isnan().equal(expected.isnan()) and found.isinf().equal(expected.isinf())


def test_tensors_that_it_does_not_take() -> None:
    x, weight, bias = make(8, 16, 2, torch.bfloat16)
    with pytest.raises(TypeError, match="contiguous rows"):
        linear(x.double(), weight.double())
    with pytest.raises(TypeError, match="the same for all"):
        linear(x, weight.float())
    with pytest.raises(TypeError, match="contiguous rows"):
        linear(x, torch.ones(16, 16).bfloat16()[::2, ::2].repeat(1, 4)[:, ::2])
    # Conv1D's
    torch.testing.assert_close(
        linear(x, weight.t().contiguous().t(), bias), F.linear(x, weight, bias)
    )
    with pytest.raises(ValueError, match="does not fit"):
        linear(x, weight[:, :8])
    with pytest.raises(ValueError, match="does not fit"):
        linear(x, weight, bias[:3])
    assert linear(x[:0], weight, bias).shape == (0, 8)
