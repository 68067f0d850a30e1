"""Keys and values quantized to one byte per element: their layout in blocks, and the maths in plain
PyTorch.

A block of a K/V head is one tile of bytes: `block_size * dim` codes, token after token, then
`block_size` float32 scales, one per token, so that tokens stored later do not change earlier ones.
A token's scale is its largest magnitude divided by the largest code, as in vLLM's
`int8_per_token_head`; a state (an element of a key or value) is code * scale. Callers pass a
layer's blocks as a view of the codes, `(num_blocks, heads, block_size, dim)`; `scales` derives the
location of the scales from the view's strides.

To add a one-byte dtype, extend `config.KV_DTYPES`, `DTYPES`, `MAX_CODES`, `lanes.cpp`, the dispatch
on `stored` in `kernels.cpp` and `attention.cpp`, and the Triton kernels (`CODE_DTYPE`); kernels
refuse dtype numbers that they do not know. Narrower codes, such as two int4 codes in a byte, also
require changes of `kIsCode` in `lanes.cpp`, and of all code that takes `shape[3]` of blocks for the
number of elements per token: `KVBlocks`, `cache.handles`, `cache.reading`, `attention.backends`,
and the C++ and Triton kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCALE_BYTES = 4
MIN_MAGNITUDE = 2.0**-100
"""Lower bound of a token's largest magnitude, so that a scale and its reciprocal are finite."""

DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes by their names in `config.KV_DTYPES`."""

MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest code of each dtype."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(MAX_CODES, 1)}
"""Numbers by which kernels identify the dtypes of codes; 0 means unquantized."""


def is_quantized(blocks: Tensor) -> bool:
    return blocks.dtype in MAX_CODES


def are_quantized_alike(key_blocks: Tensor, value_blocks: Tensor) -> bool:
    """Whether the blocks are quantized to the same dtype, or both unquantized, as kernels need."""
    return DTYPE_NUMBERS.get(key_blocks.dtype) == DTYPE_NUMBERS.get(value_blocks.dtype)


def check_alignment(block_size: int, dim: int) -> None:
    """Raises `ValueError` if the scales of a tile would not be aligned for float32."""
    if block_size * dim % SCALE_BYTES:
        raise ValueError(
            f"a quantized block of {block_size} tokens with {dim} elements per token has"
            f" {block_size * dim} bytes of codes, not a multiple of {SCALE_BYTES}, so the scales"
            f" after them would not be aligned: pass a `block_size` that is a multiple of"
            f" {SCALE_BYTES}, or no `kv_dtype`"
        )


def tile_bytes(block_size: int, dim: int) -> int:
    """Returns the bytes of one head's block with `dim` elements per token, codes and scales."""
    return block_size * (dim + SCALE_BYTES)


def codes(tiles: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Returns the codes of tiles `(num_blocks, heads, tile_bytes)` uint8, as a view `(num_blocks,
    heads, block_size, dim)` in `dtype`."""
    dim = tiles.shape[2] // block_size - SCALE_BYTES
    return tiles.view(dtype)[..., : block_size * dim].unflatten(2, (block_size, dim))


def scales(blocks: Tensor) -> Tensor:
    """Returns the scales of `blocks`, `(num_blocks, heads, block_size)` float32, as a view of their
    tiles. `blocks` may be a view of only the first or the last codes of each token (latents and
    rotary keys)."""
    num_blocks, heads, block_size, _ = blocks.shape
    block_stride, head_stride, dim, _ = blocks.stride()
    offset = blocks.storage_offset()
    begin = offset - offset % tile_bytes(block_size, dim) + block_size * dim
    size = num_blocks, heads, block_size * SCALE_BYTES
    strides = block_stride, head_stride, 1
    return as_bytes(blocks).as_strided(size, strides, begin).view(torch.float32)


def as_bytes(blocks: Tensor) -> Tensor:
    """Returns a view of codes as int8, since some PyTorch operations do not support 8-bit
    floats."""
    return blocks.view(torch.int8)


def stored_tensors(blocks: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors in which `blocks` are stored, each `(num_blocks, heads, block_size, n)`:
    states, or codes as int8 and scales as float32."""
    return (as_bytes(blocks), scales(blocks).unsqueeze(3)) if is_quantized(blocks) else (blocks,)


def dequantize(pieces: list[Tensor], blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns states in `dtype`. `pieces`: the elements that were read from each of the
    `stored_tensors` of `blocks`."""
    if len(pieces) == 1:
        return pieces[0].to(dtype)
    return (pieces[0].view(blocks.dtype).float() * pieces[1]).to(dtype)


def read(blocks: Tensor, index: Any, dtype: torch.dtype) -> Tensor:
    """Returns `blocks[index]` as states in `dtype`. `index` must not index the last axis."""
    pieces = [tensor[index] for tensor in stored_tensors(blocks)]
    return dequantize(pieces, blocks, dtype)


def quantize(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns codes `(..., dim)` in `dtype` and scales `(...)` float32 of states `(..., dim)`. A
    non-finite element makes its token's scale non-finite, so that no element of the token is read
    as a finite number."""
    floats = states.float()
    token_scales = floats.abs().amax(-1).clamp_min(MIN_MAGNITUDE) * (1 / MAX_CODES[dtype])
    floats = floats * (1 / token_scales).unsqueeze(-1)
    return (floats.round() if dtype is torch.int8 else floats).to(dtype), token_scales


def write(blocks: Tensor, index: Any, states: Tensor) -> None:
    """Sets `blocks[index] = states`, converted or quantized to the blocks' dtype."""
    if not is_quantized(blocks):
        blocks[index] = states.to(blocks.dtype)
        return
    new_codes, token_scales = quantize(states, blocks.dtype)
    as_bytes(blocks)[index], scales(blocks)[index] = as_bytes(new_codes), token_scales
