"""Codes and scales: all stores write the same ones; their error; their layout in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_paged.attention import backends
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks, store_portable
from hf_paged.kernels import cpp, quantized
from hf_paged.kernels.cpp.blocks import Store
from hf_paged.step import StepMetadata
from tests.support.kernels.device import interpreted

# of the largest magnitude; of each number
ROUNDING = {"int8": 1 / 254, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8}
SHAPES = [(2, 16, 16, 8), (3, 40, 9, 16), (1, 24, 8, 32), (5, 64, 64, 16), (1, 9, 9, 8)]


def blocks_like(
    keys: Tensor, values: Tensor, block_size: int, kv_dtype: str, num_blocks: int = 7
) -> KVBlocks:
    blocks = KVBlocks.allocate(num_blocks, block_size, keys, values, kv_dtype=kv_dtype)
    for tensor in blocks.data:
        tensor.fill_(0xFF)  # scales of NaN
    return blocks


def states(
    shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """K/V of five tokens in three rows, whose magnitudes differ by token, and their slots."""
    heads, key_dim, value_dim, block_size = shape
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(3, heads, 5, 1, generator=generator).mul(2).exp()
    keys, values = (
        (torch.randn(3, 5, heads, dim, generator=generator).transpose(1, 2) * sizes).to(dtype)
        for dim in (key_dim, value_dim)
    )
    keys[0, 0, 1] = 0
    slots = torch.randperm(7 * block_size, generator=generator)[:15].view(3, 5)
    slots[1, :2] = -1
    return keys, values, slots


def stored(blocks: KVBlocks, slots: Tensor) -> list[Tensor]:
    """K/V at these slots, float32."""
    size = blocks.keys.shape[2]
    index = slots // size, slice(None), slots % size
    return [quantized.read(x, index, torch.float32) for x in (blocks.keys, blocks.values)]


def by_cpp(*inputs: Tensor) -> None:
    Store(*inputs)(*inputs[:2], inputs[4])


def by_triton(*inputs: Tensor) -> None:
    from hf_paged.kernels.triton.store import store

    store(*inputs)


STORES = [
    store_portable,
    pytest.param(by_cpp, marks=pytest.mark.skipif(not cpp.is_available(), reason="no compiler")),
    pytest.param(by_triton, marks=interpreted),
]


# the interpreter is slow: each shape, kind of codes and dtype once
@pytest.mark.slow_cases(
    but=[
        "store_portable-*",
        "by_cpp-*",
        "by_triton-(2, 16, 16, 8)-int8-torch.float32",
        "by_triton-(2, 16, 16, 8)-fp8_e4m3-torch.bfloat16",
        "by_triton-(3, 40, 9, 16)-fp8_e4m3-torch.float16",
        "by_triton-(1, 24, 8, 32)-fp8_e5m2-torch.float32",
        "by_triton-(1, 24, 8, 32)-int8-torch.float16",
        "by_triton-(5, 64, 64, 16)-int8-torch.bfloat16",
        "by_triton-(1, 9, 9, 8)-fp8_e5m2-torch.bfloat16",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("store", STORES)
def test_every_store_writes_the_same_bytes(
    store: Callable[..., None], shape: tuple[int, int, int, int], kv_dtype: str, dtype: torch.dtype
) -> None:
    keys, values, slots = states(shape, dtype)
    found, expected = (blocks_like(keys, values, shape[3], kv_dtype) for _ in range(2))
    if found.shares_scales:  # as `KVBlocks.store` does
        keys = values = torch.cat((keys, values), dim=3)
        found, expected = found.latents, expected.latents
    for function, blocks in ((store_portable, expected), (store, found)):
        function(keys, values, blocks.keys, blocks.values, slots)
    assert all(torch.equal(a, b) for a, b in zip(found.data, expected.data))
    for ours, exact in zip(stored(found, slots[slots >= 0]), (keys, values)):
        exact = exact.transpose(1, 2)[slots >= 0].float()
        largest = exact.abs().amax(-1, keepdim=True)
        size = largest if kv_dtype == "int8" else exact.abs()
        smallest = largest / quantized.MAX_CODES[found.keys.dtype] * 2**-6
        assert ((ours - exact).abs() <= 1.001 * ROUNDING[kv_dtype] * size + smallest).all()


@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
@pytest.mark.parametrize("store", STORES)
def test_what_is_not_finite_stays_so_and_alone(store: Callable[..., None], kv_dtype: str) -> None:
    keys = torch.ones(1, 2, 4, 16)
    keys[0, 0, 1, 3], keys[0, 1, 2, 5] = math.nan, math.inf
    blocks = blocks_like(keys, keys, 8, kv_dtype)
    slots = torch.arange(4)[None]
    store(keys, keys, blocks.keys, blocks.values, slots)
    finite = stored(blocks, slots[0])[0].isfinite().all(-1)
    assert finite.tolist() == [[True, True], [False, True], [True, False], [True, True]]
    assert (stored(blocks, slots[0])[0][0] == 1).all()


@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
def test_all_codes_that_are_stored_are_read(kv_dtype: str) -> None:
    """The C++ kernel decodes each of the 256 byte values to PyTorch's number."""
    codes = torch.arange(256, dtype=torch.uint8).view(quantized.DTYPES[kv_dtype]).float()
    codes = codes[codes.isfinite()]
    keys = torch.zeros(1, 1, 1, 256)
    keys[..., : len(codes)] = codes
    blocks = blocks_like(keys, keys, 8, kv_dtype, num_blocks=1)
    blocks.store((), keys, keys, torch.zeros(1, 1, dtype=torch.int64))
    step = StepMetadata.rectangle(torch.zeros(1, 1, dtype=torch.int32), (1,), 8)
    call = AttentionCall(torch.zeros(1, 1, 256), blocks, step, 1.0)
    with torch.no_grad():
        expected = backends.reference.attend(call)
        assert not cpp.is_available() or torch.equal(backends.cpp.attend(call), expected)
    if kv_dtype != "int8":  # of which -128 is not stored
        assert torch.equal(expected[0, 0, : len(codes)], codes)


@pytest.mark.parametrize("store", STORES[1:])
def test_kernels_refuse_codes_that_they_do_not_have(
    store: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = torch.ones(1, 1, 4, 16)
    blocks = blocks_like(keys, keys, 8, "int8", num_blocks=1)
    step = StepMetadata.rectangle(torch.zeros(1, 1, dtype=torch.int32), (4,), 8)
    call = AttentionCall(torch.ones(1, 1, 16), blocks, step, 1.0)
    attend = backends.cpp.attend if store is by_cpp else backends.triton.attend
    monkeypatch.setitem(quantized.DTYPE_NUMBERS, torch.int8, 1 + len(quantized.DTYPES))
    with pytest.raises(Exception, match="the dtype of the codes is unknown"):
        store(keys, keys, blocks.keys, blocks.values, torch.arange(4)[None])
    with pytest.raises(Exception, match="the dtype of the codes is unknown"), torch.no_grad():
        attend(call)


@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_bytes(dim: int, kv_dtype: str) -> None:
    states = torch.empty(1, 8, 0, dim, dtype=torch.bfloat16)
    plain, found = (KVBlocks.allocate(2, 16, states, states, kv_dtype=x) for x in (None, kv_dtype))
    assert found.block_bytes <= 0.55 * plain.block_bytes
