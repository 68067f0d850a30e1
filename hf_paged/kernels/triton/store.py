"""Triton scatter of a step's keys and values into their blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import strides
from .launch import launch


@triton.jit(
    do_not_specialize=["tokens", "num_slots", "slots_row", "slots_token"], do_not_specialize_on_alignment=["slots"]
)
def _store_kernel(
    keys, values, key_blocks, value_blocks, slots, tokens, num_slots, slots_row, slots_token,
    key_row, key_head, key_token, key_d, value_row, value_head, value_token, value_d,
    key_block, key_block_head, key_block_token, key_block_d,
    value_block, value_block_head, value_block_token, value_block_d,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    # One token and BLOCK_HEADS heads a program. Addresses in int64: states of a long prompt pass 2^31 elements.
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    slot = tl.load(slots + row * slots_row + token * slots_token).to(tl.int64)
    # Out of the pool is skipped as -1 is: a captured graph cannot raise, and must not write elsewhere.
    if (slot < 0) | (slot >= num_slots):
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_KEY).to(tl.int64)[None, :]
    mask = (head < HEADS) & (d < KEY_DIM)
    source = keys + row * key_row + token * key_token + head * key_head + d * key_d
    target = key_blocks + block * key_block + offset * key_block_token + head * key_block_head + d * key_block_d
    tl.store(target, tl.load(source, mask=mask).to(key_blocks.dtype.element_ty), mask=mask)
    d = tl.arange(0, BLOCK_VALUE).to(tl.int64)[None, :]
    mask = (head < HEADS) & (d < VALUE_DIM)
    source = values + row * value_row + token * value_token + head * value_head + d * value_d
    target = value_blocks + block * value_block + offset * value_block_token
    target += head * value_block_head + d * value_block_d
    tl.store(target, tl.load(source, mask=mask).to(value_blocks.dtype.element_ty), mask=mask)


def store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
    """The store of `cache.storage.choose_store` in one launch, without waiting for the device. Slots, int32 or int64,
    that are negative or past the pool are not written; those of another device are copied."""
    slots = slots.to(key_blocks.device, non_blocking=True)
    batch, heads, tokens, key_dim = keys.shape
    if batch * tokens * heads == 0:
        return
    num_blocks, _, block_size, value_dim = value_blocks.shape
    block_key, block_value = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    # About 2048 elements a program: 16 of each thread of four warps.
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // max(block_key, block_value)))
    launch(
        _store_kernel, (batch * tokens, triton.cdiv(heads, block_heads)),
        keys, values, key_blocks, value_blocks, slots, tokens, num_blocks * block_size, *slots.stride(),
        *strides(keys), *strides(values), *key_blocks.stride(), *value_blocks.stride(),
        HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads, BLOCK_KEY=block_key, BLOCK_VALUE=block_value,
        writes=(key_blocks, value_blocks),
    )  # fmt: skip
