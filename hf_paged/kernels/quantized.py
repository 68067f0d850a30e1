"""Keys and values quantized to one byte per element: their layout in blocks, and the maths in plain
PyTorch.

A block of a K/V head is one tile of bytes: `block_size * dim` codes, token after token, then
`block_size` float32 scales, one per token. A state is code * scale; a token's scale is its largest
magnitude over the largest code, so that tokens stored later do not change earlier ones. (vLLM's
`int8_per_token_head` has the same scales.) The codes are a view `(num_blocks, heads, block_size,
dim)` of the tiles; the scales are located from this view.

A format is one torch dtype of one byte. A new one is named in `config.KV_DTYPES`, `DTYPES`,
`LARGEST`, `NUMBERS`, `lanes.cpp` and the Triton kernels (`STORED`); narrower codes also change
`KVBlocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCALE_BYTES = 4
TINY = 2.0**-100
"""Lower bound of a token's largest magnitude, so that a scale and its reciprocal are finite."""

DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes by their names in `config.KV_DTYPES`."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
NUMBERS = {dtype: number for number, dtype in enumerate(LARGEST, 1)}
"""Numbers by which kernels identify the dtypes; 0 means unquantized."""


def is_quantized(blocks: Tensor) -> bool:
    return blocks.dtype in LARGEST


def check_sizes(block_size: int, dim: int) -> None:
    """Raises `ValueError` if the scales of a tile would not be aligned for float32."""
    if block_size * dim % SCALE_BYTES:
        raise ValueError(
            f"quantized blocks of {block_size} tokens with {dim} elements each have"
            f" {block_size * dim} bytes of codes, after which the scales must begin at a multiple"
            f" of {SCALE_BYTES}: pass a `block_size` that is a multiple of {SCALE_BYTES}, or no"
            " `kv_dtype`"
        )


def tile_bytes(block_size: int, dim: int) -> int:
    """Returns the bytes of one head's block with `dim` elements per token."""
    return block_size * (dim + SCALE_BYTES)


def codes(tiles: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Returns codes `(num_blocks, heads, block_size, dim)`, a view of tiles `(num_blocks, heads,
    tile_bytes)` uint8."""
    dim = tiles.shape[2] // block_size - SCALE_BYTES
    return tiles.view(dtype)[..., : block_size * dim].unflatten(2, (block_size, dim))


def scales(blocks: Tensor) -> Tensor:
    """Returns scales `(num_blocks, heads, block_size)` float32, a view of the tiles that contain
    the codes `blocks`: all codes of each token, or the first or last ones (latents and rotary
    keys)."""
    num_blocks, heads, block_size, _ = blocks.shape
    block, head, width, _ = blocks.stride()
    offset = blocks.storage_offset()
    begin = offset - offset % tile_bytes(block_size, width) + block_size * width
    size = num_blocks, heads, block_size * SCALE_BYTES
    return as_bytes(blocks).as_strided(size, (block, head, 1), begin).view(torch.float32)


def as_bytes(blocks: Tensor) -> Tensor:
    """Returns codes viewed as int8, which every PyTorch operation supports."""
    return blocks.view(torch.int8)


def planes(blocks: Tensor) -> tuple[Tensor, ...]:
    """Returns the stored tensors of keys or values, each `(num_blocks, heads, block_size, n)`:
    states, or codes and scales."""
    return (as_bytes(blocks), scales(blocks).unsqueeze(3)) if is_quantized(blocks) else (blocks,)


def join(pieces: list[Tensor], blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns states in `dtype` from elements read from each of the `planes` of these blocks."""
    if len(pieces) == 1:
        return pieces[0].to(dtype)
    return (pieces[0].view(blocks.dtype).float() * pieces[1]).to(dtype)


def read(blocks: Tensor, index: Any, dtype: torch.dtype) -> Tensor:
    """Returns `blocks[index]` as states in `dtype`; the index excludes the last axis."""
    return join([plane[index] for plane in planes(blocks)], blocks, dtype)


def quantize(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns codes `(..., dim)` and scales `(...)` of states `(..., dim)`. A non-finite element
    makes its whole token non-finite."""
    numbers = states.float()
    factors = numbers.abs().amax(-1).clamp_min(TINY) * (1 / LARGEST[dtype])
    numbers = numbers * (1 / factors).unsqueeze(-1)
    return (numbers.round() if dtype is torch.int8 else numbers).to(dtype), factors


def write(blocks: Tensor, index: Any, states: Tensor) -> None:
    """Sets `blocks[index] = states`, converted to the dtype that the blocks store."""
    if not is_quantized(blocks):
        blocks[index] = states.to(blocks.dtype)
        return
    new_codes, factors = quantize(states, blocks.dtype)
    as_bytes(blocks)[index], scales(blocks)[index] = as_bytes(new_codes), factors
