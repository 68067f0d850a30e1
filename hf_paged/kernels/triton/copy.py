"""A Triton kernel that copies blocks to other blocks of the same layer, in one launch for all
layers. `cache.storage` calls it, or falls back to PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

TILE_BYTES = 8192  # bytes that a program copies: 8 words of 8 bytes per thread of four warps


@triton.jit(do_not_specialize=["num_tensors"])
def _copy_kernel(
    table, pairs, num_tensors, WORD: tl.constexpr, WORD_BYTES: tl.constexpr, TILE: tl.constexpr
):
    # Each program copies one tile of one block of one tensor. Consecutive programs copy the same
    # block of different tensors.
    tensor = tl.program_id(0) % num_tensors
    pair = tl.program_id(0) // num_tensors
    address = tl.load(table + 2 * tensor)
    block_bytes = tl.load(table + 2 * tensor + 1)
    # Offsets are int64, since a layer's blocks may exceed 2^31 bytes.
    source = (address + tl.load(pairs + 2 * pair) * block_bytes).to(tl.pointer_type(WORD))
    target = (address + tl.load(pairs + 2 * pair + 1) * block_bytes).to(tl.pointer_type(WORD))
    word = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = word * WORD_BYTES < block_bytes
    tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


def locate_blocks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Returns the address and the bytes per block of each tensor `(num_blocks, ...)`, which must be
    contiguous and have at least one block."""
    return [(tensor.data_ptr(), tensor.nbytes // len(tensor)) for tensor in tensors]


def copy_blocks(addresses: Sequence[tuple[int, int]], table: Tensor, pairs: Tensor) -> None:
    """Copies the source block to the target block of each pair, in all tensors, in one launch,
    without waiting for it. Raises `LaunchFailedError` if the kernel cannot be launched.

    Args:
        addresses: The result of `locate_blocks` for the tensors, on the host.
        table: The same numbers on the device of the tensors, `(len(addresses), 2)` int64.
        pairs: `(n, 2)` int64 on that device: ids of sources and targets, which are not checked.
            Targets must be distinct and none may also be a source, since programs run in any
            order.
    """
    max_block_bytes = max(block_bytes for _, block_bytes in addresses)
    if max_block_bytes * len(pairs) == 0:
        return
    is_aligned = all((address | block_bytes) % 8 == 0 for address, block_bytes in addresses)
    word, word_bytes = (tl.int64, 8) if is_aligned else (tl.uint8, 1)
    launch(
        _copy_kernel,
        (len(pairs) * len(addresses), triton.cdiv(max_block_bytes, TILE_BYTES)),
        table,
        pairs,
        len(addresses),
        WORD=word,
        WORD_BYTES=word_bytes,
        TILE=TILE_BYTES // word_bytes,
        # `launch` takes the device from this tensor, since the kernel gets the blocks as addresses
        writes=(table,),
    )
