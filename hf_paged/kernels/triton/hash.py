"""A Triton kernel that hashes the bytes of many tensors in one launch. The hashes equal the results
of `kernels.hashing.hash_portable`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import num_multiprocessors
from .launch import launch

TILE = 1024  # 8-byte words that a program reads at a time: 8 per thread of four warps
PROGRAMS_PER_SM = 5  # programs that fit on a multiprocessor at once, at 90 registers per thread
# the constants of `hash_portable`, as uint64
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(words, position):
    # Returns the two numbers that each word adds to the sums. Arithmetic of uint64 is modulo 2^64.
    mixed = words ^ (position * _GAMMA)
    mixed = (mixed ^ (mixed >> 30)) * _MIX_1
    mixed = (mixed ^ (mixed >> 27)) * _MIX_2
    mixed = (mixed ^ (mixed >> 31)) * _GAMMA
    return mixed, (mixed ^ (mixed >> 32)) * _MIX_1


@triton.jit
def _load_unaligned(address, word, num_bytes):
    # Loads words of a tensor of `num_bytes` at any alignment, with zeros for bytes past its end.
    loaded = tl.zeros_like(word).to(tl.uint64)
    pointers = address.to(tl.pointer_type(tl.uint8))
    for byte in range(8):
        offset = word * 8 + byte
        value = tl.load(pointers + offset, mask=offset < num_bytes, other=0)
        loaded |= value.to(tl.uint64) << (8 * byte)
    return loaded


@triton.jit(do_not_specialize=["num_tensors", "num_tiles", "tiles_per_program"])
def _hash_kernel(table, sums, num_tensors, num_tiles, tiles_per_program, TILE: tl.constexpr):
    # A program hashes consecutive tiles, which may span several tensors. Tensor i has the tiles
    # [first_tiles[i], first_tiles[i + 1]); the first tile of program p is in tensor
    # first_tensors[p].
    addresses = table
    sizes = table + num_tensors
    first_tiles = table + 2 * num_tensors
    first_tensors = first_tiles + num_tensors + 1
    tensor = tl.load(first_tensors + tl.program_id(0))
    tile = tl.program_id(0).to(tl.int64) * tiles_per_program
    end = tl.minimum(tile + tiles_per_program, num_tiles)
    lane = tl.arange(0, TILE).to(tl.int64)
    while tile < end:
        address = tl.load(addresses + tensor)
        size = tl.load(sizes + tensor)
        first_tile = tl.load(first_tiles + tensor)
        tensor_end = tl.minimum(end, tl.load(first_tiles + tensor + 1))
        # Full tiles of an aligned tensor are read as words; a last, partial tile and unaligned
        # tensors are read as bytes.
        num_word_tiles = tl.where(address % 8 == 0, size // (8 * TILE), 0)
        words_end = tl.minimum(tensor_end, first_tile + num_word_tiles)
        word_pointers = address.to(tl.pointer_type(tl.uint64))
        total = tl.zeros([TILE], dtype=tl.uint64)
        second_total = tl.zeros([TILE], dtype=tl.uint64)
        for current in range(tile, words_end):
            word = (current - first_tile) * TILE + lane
            mixed, second_mixed = _mix(tl.load(word_pointers + word), (word + 1).to(tl.uint64))
            total += mixed
            second_total += second_mixed
        for current in range(tl.maximum(tile, words_end), tensor_end):
            word = (current - first_tile) * TILE + lane
            loaded = _load_unaligned(address, word, size)
            mixed, second_mixed = _mix(loaded, (word + 1).to(tl.uint64))
            # words past the end are not summed, as in `hash_portable`
            total += tl.where(word * 8 < size, mixed, 0)
            second_total += tl.where(word * 8 < size, second_mixed, 0)
        tl.atomic_add(sums + 2 * tensor, tl.sum(total).to(tl.int64, bitcast=True), sem="relaxed")
        tl.atomic_add(
            sums + 2 * tensor + 1, tl.sum(second_total).to(tl.int64, bitcast=True), sem="relaxed"
        )
        tile = tensor_end
        tensor += 1


def hash_all(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the hashes (`hash_portable`) of contiguous tensors of any dtype and size on one
    device, as `(len(tensors), 2)` int64 on that device. Launches one kernel and does not wait for
    it. Raises `LaunchFailedError` if the kernel cannot be launched."""
    device = tensors[0].device
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    sizes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    first_tiles = np.concatenate([[0], np.cumsum(-(-sizes // (8 * TILE)))])
    num_tiles = int(first_tiles[-1])
    if num_tiles == 0:
        return sums
    tiles_per_program = triton.cdiv(num_tiles, num_multiprocessors(device) * PROGRAMS_PER_SM)
    num_programs = triton.cdiv(num_tiles, tiles_per_program)
    program_starts = np.arange(num_programs) * tiles_per_program
    first_tensors = np.searchsorted(first_tiles, program_starts, side="right") - 1
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64).view(np.int64)
    columns = [addresses, sizes, first_tiles, first_tensors]
    table = torch.from_numpy(np.concatenate(columns)).to(device)
    launch(
        _hash_kernel,
        (num_programs,),
        table,
        sums,
        len(tensors),
        num_tiles,
        tiles_per_program,
        TILE=TILE,
        writes=(sums,),
    )
    return sums
