"""A Triton kernel that stores a step's keys and values in their blocks, unquantized or quantized.
If it cannot be launched, `cache.kv_blocks` uses PyTorch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import quantized
from .configs import as_uint8, strides
from .launch import launch

MIN_MAGNITUDE = tl.constexpr(quantized.MIN_MAGNITUDE)


@triton.jit
def _to_float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Rounds float32 numbers to 8-bit floats, to nearest even, and returns their bits as uint8.
    `MANTISSA`: the number of mantissa bits; `BIAS`: the exponent bias. The numbers must be within
    the range of the format."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    UNIT: tl.constexpr = (128 - BIAS + SHIFT) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (
        magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1) - ((127 - BIAS) << 23)
    ) >> SHIFT
    # the lowest mantissa bit of `unit` is worth the smallest subnormal, so the addition rounds to
    # multiples of it
    unit = (tl.zeros_like(magnitude) + UNIT).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + unit).to(tl.uint32, bitcast=True) - UNIT
    code = tl.where(magnitude >= ((128 - BIAS) << 23), normal, subnormal)
    return ((code & 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store_states(
    source,
    source_d,
    target,
    target_d,
    scales,
    is_head,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Stores the states of some heads of one token, `[heads, dim]`, unquantized or as codes and
    scales (`kernels/quantized.py`). `source` and `target`: pointers `[heads, 1]`; `scales`:
    pointers `[heads]`."""
    d = tl.arange(0, TILE_DIM).to(tl.int64)[None, :]
    mask = is_head[:, None] & (d < DIM)
    states = tl.load(source + d * source_d, mask=mask)
    target += d * target_d
    if CODE_DTYPE == 0:
        tl.store(target, states.to(target.dtype.element_ty), mask=mask)
    else:
        x = tl.where(mask, states.to(tl.float32), 0.0)
        scale = tl.maximum(tl.max(tl.abs(x), axis=1), MIN_MAGNITUDE) * (1.0 / LARGEST)
        scale += tl.sum(x * 0.0, axis=1)  # makes the scale NaN if an element is not finite
        x = x * (1.0 / scale)[:, None]
        if CODE_DTYPE == 1:  # adding 1.5 * 2^23 rounds to an integer
            codes = ((x + 12582912.0) - 12582912.0).to(tl.int8)
        elif CODE_DTYPE == 2:
            codes = _to_float8_bits(x, 3, 7)
        else:
            tl.static_assert(CODE_DTYPE == 3, "the dtype of the codes is unknown")
            codes = _to_float8_bits(x, 2, 15)
        tl.store(target, codes, mask=mask)
        tl.store(scales, scale, mask=is_head)


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "slots_row", "slots_token"],
    do_not_specialize_on_alignment=["slots"],
)
def _store_kernel(
    keys,
    values,
    key_blocks,
    value_blocks,
    slots,
    num_tokens,
    num_slots,
    slots_row,
    slots_token,
    key_row,
    key_head,
    key_token,
    key_d,
    value_row,
    value_head,
    value_token,
    value_d,
    key_block,
    key_block_head,
    key_block_token,
    key_block_d,
    value_block,
    value_block_head,
    value_block_token,
    value_block_d,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEY: tl.constexpr,
    TILE_VALUE: tl.constexpr,
    CODE_DTYPE: tl.constexpr = 0,
    LARGEST: tl.constexpr = 1.0,
    key_scales=None,
    value_scales=None,
):
    # Each program stores one token and TILE_HEADS heads. `key_row` is the stride of `keys` along
    # rows, and so on. `key_block` and `key_block_x` are the strides of `key_blocks` along blocks
    # and along the axis `x`. The same holds for values and `slots`. Offsets are int64, since the
    # states of a long prompt may exceed 2^31 elements.
    row = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    slot = tl.load(slots + row * slots_row + token * slots_token).to(tl.int64)
    # Slots outside the pool are skipped, as -1 is: a captured graph cannot raise, and must not
    # write outside the pool.
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)
    head = heads[:, None]
    is_head = heads < HEADS
    if CODE_DTYPE:  # strides of quantized blocks are in bytes; a scale takes 4
        key_scales += block * (key_block // 4) + heads * (key_block_head // 4) + offset
        value_scales += block * (value_block // 4) + heads * (value_block_head // 4) + offset
    _store_states(
        keys + row * key_row + token * key_token + head * key_head,
        key_d,
        key_blocks + block * key_block + offset * key_block_token + head * key_block_head,
        key_block_d,
        key_scales,
        is_head,
        KEY_DIM,
        TILE_KEY,
        CODE_DTYPE,
        LARGEST,
    )
    _store_states(
        values + row * value_row + token * value_token + head * value_head,
        value_d,
        value_blocks + block * value_block + offset * value_block_token + head * value_block_head,
        value_block_d,
        value_scales,
        is_head,
        VALUE_DIM,
        TILE_VALUE,
        CODE_DTYPE,
        LARGEST,
    )


def store(
    keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor
) -> None:
    """Stores keys and values `(batch, heads, n, dim)` in blocks `(num_blocks, heads, block_size,
    dim)` at `slots`, `(batch, n)` int32 or int64, in one launch, without waiting for the device.
    Skips slots that are negative or past the pool. `slots` may be on another device. Raises
    `LaunchFailedError` if the kernel cannot be launched."""
    slots = slots.to(key_blocks.device, non_blocking=True)
    batch, heads, tokens, key_dim = keys.shape
    if batch * tokens * heads == 0:
        return
    num_blocks, _, block_size, value_dim = value_blocks.shape
    tile_key = triton.next_power_of_2(key_dim)
    tile_value = triton.next_power_of_2(value_dim)
    # about 2048 elements per program: 16 per thread of four warps
    tile_heads = min(triton.next_power_of_2(heads), max(1, 2048 // max(tile_key, tile_value)))
    options: dict[str, Any] = {}
    if (code_dtype := quantized.DTYPE_NUMBERS.get(key_blocks.dtype)) is not None:
        options = dict(CODE_DTYPE=code_dtype, LARGEST=quantized.MAX_CODES[key_blocks.dtype])
        options |= dict(
            key_scales=quantized.scales(key_blocks), value_scales=quantized.scales(value_blocks)
        )
        key_blocks = as_uint8(key_blocks)
        value_blocks = as_uint8(value_blocks)
    launch(
        _store_kernel,
        (batch * tokens, triton.cdiv(heads, tile_heads)),
        keys,
        values,
        key_blocks,
        value_blocks,
        slots,
        tokens,
        num_blocks * block_size,
        *slots.stride(),
        *strides(keys),
        *strides(values),
        *key_blocks.stride(),
        *value_blocks.stride(),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        TILE_HEADS=tile_heads,
        TILE_KEY=tile_key,
        TILE_VALUE=tile_value,
        writes=(key_blocks, value_blocks, options.get("key_scales"), options.get("value_scales")),
        **options,
    )
