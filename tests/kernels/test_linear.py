"""The C++ products for few rows: accurate, independent of the other rows in the batch, within their
memory."""

from __future__ import annotations

import itertools

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
SHAPES += [(20, 2100), (35, 2048)]  # rows of whole pages of memory are copied
ROWS = [1, 2, 3, 5, 16, 17, 31, 33, 64, 70]
PATHS = list(range(best_path() + 1)) if cpp.is_available() else []


def codes(width: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-128, 128, (width, depth), dtype=torch.int8, generator=generator)


def make(width: int, depth: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, depth), (width, depth), (width,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_as_exact_as_pytorchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """PyTorch's errors are the larger of those of few and of many rows, summed in other orders."""
    everything, floats, bias = make(*shape, max(ROWS), dtype)
    for weight, b in ((floats, None), (floats, bias), (codes(*shape), bias)):
        exact = F.linear(everything.double(), weight.double(), None if b is None else b.double())
        of_many = F.linear(everything, weight.to(dtype), b)
        unit = weight.double().square().mean().sqrt() * torch.finfo(dtype).eps
        for path, rows in itertools.product(PATHS, ROWS):
            x = everything[:rows]
            made = linear(x, weight, b, path), F.linear(x, weight.to(dtype), b), of_many[:rows]
            error, *of_torch = ((y.double() - exact[:rows]).square().mean().sqrt() for y in made)
            allowed = 1.3 * max(of_torch) + (4 * unit if dtype is torch.float32 else 0)
            assert error <= allowed, (path, rows, weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(33, 1030), (96, 768), (300, 100), (20, 2100), (35, 2048)], ids=str
)
def test_a_row_is_the_same_beside_any_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """And for any number of threads."""
    x, floats, bias = make(*shape, 70, dtype)
    before = torch.get_num_threads()
    for weight, path in itertools.product((floats, codes(*shape)), PATHS):
        alone = torch.cat([linear(row[None], weight, bias, path) for row in x])
        for first, last in ((0, 2), (0, 3), (1, 6), (3, 20), (0, 33), (7, 70), (0, 70)):
            torch.set_num_threads(1 + first)
            found = linear(x[first:last], weight, bias, path)
            torch.set_num_threads(before)
            assert found.equal(alone[first:last]), (weight.dtype, path, first, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "length"), [(96, 96), (33, 33), (96, 32), (48, 16), (512, 128)])
def test_groups_of_codes_with_zeros_and_scales(depth: int, length: int, dtype: torch.dtype) -> None:
    weight, generator = codes(70, depth), torch.Generator().manual_seed(2)
    scales = torch.rand((70, depth // length), generator=generator) * 0.01
    zeros = torch.randint(-128, 128, scales.shape, dtype=torch.int8, generator=generator)
    for scale_dtype, some_zeros in itertools.product(DTYPES, (None, zeros)):
        some_scales = scales.to(scale_dtype)
        wide = [y.double().repeat_interleave(length, 1) for y in (zeros, some_scales)]
        wide[0] *= some_zeros is not None
        exact_weight = (weight.double() - wide[0]) * wide[1]
        magnitudes = (weight.double().abs() + wide[0].abs()) * wide[1]
        for path, rows in itertools.product(PATHS, (1, 3, 17, 33, 70)):
            x, _, bias = make(70, depth, rows, dtype)
            found = linear(x, weight, bias, path, some_scales, some_zeros)
            exact = F.linear(x.double(), exact_weight, bias.double())
            sums = F.linear(x.double().abs(), magnitudes, bias.double().abs())
            rounding = 2 * torch.finfo(torch.float32).eps * sums
            allowed = rounding + torch.finfo(dtype).eps * exact.abs()
            assert ((found.double() - exact).abs() <= allowed).all()
            alone = linear(x[-1:], weight, bias, path, some_scales, some_zeros)
            assert alone.equal(found[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan_go_where_they_belong(dtype: torch.dtype) -> None:
    for path in PATHS:
        x, weight, bias = make(40, 64, 4, dtype)
        x[1, 3], x[2, 5], weight[7, 9] = torch.nan, torch.inf, torch.inf
        found, expected = linear(x, weight, bias, path), F.linear(x, weight, bias)
        assert found.isnan().equal(expected.isnan()) and found.isinf().equal(expected.isinf())


def test_tensors_that_it_does_not_take() -> None:
    x, weight, bias = make(8, 16, 2, torch.bfloat16)
    wide = torch.ones(2, 32).bfloat16()
    strided = torch.ones(16, 16).bfloat16()[::2, ::2].repeat(1, 4)[:, ::2]
    scales, zeros = torch.ones(8, 2), torch.ones(8, 2, dtype=torch.int8)
    for error, message, *given in (
        (TypeError, "contiguous rows", x.double(), weight.double()),
        (TypeError, "contiguous rows on the CPU, all in", x, weight.float()),
        (TypeError, "contiguous rows", x, strided),
        (ValueError, "does not fit", x, weight[:, :8]),
        (ValueError, "does not fit", x, weight, bias[:3]),
        (ValueError, "does not fit", x, codes(8, 8)),
        (TypeError, "contiguous rows", x, codes(16, 8).t()),
        (TypeError, "contiguous rows", x.char(), codes(8, 16)),
        (TypeError, "contiguous rows", x, codes(8, 16), bias.char()),
        (ValueError, "do not fit a weight", x, codes(8, 16), None, None, scales),  # groups of 8
        (ValueError, "do not fit a weight", wide, codes(8, 32), None, None, scales[:7]),
        (ValueError, "do not fit a weight", wide, codes(8, 32), None, None, torch.tensor(1.0)),
        (ValueError, "do not fit scales", wide, codes(8, 32), None, None, scales, zeros[:, :1]),
        (TypeError, "scales or zeros", wide, codes(8, 32), None, None, scales.double()),
        (TypeError, "scales or zeros", wide, codes(8, 32), None, None, scales, zeros.short()),
        (TypeError, "scales or zeros", wide, codes(8, 32), None, None, torch.ones(2, 8).t()),
    ):
        with pytest.raises(error, match=message):
            linear(*given)
    for depth in (48, 33):  # groups of 24, and of no whole number
        with pytest.raises(ValueError, match="do not fit a weight"):
            linear(torch.ones(2, depth).bfloat16(), codes(8, depth), None, None, scales)
    # Conv1D's
    found = linear(x, weight.t().contiguous().t(), bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    assert linear(x[:0], weight, bias).shape == (0, 8)
