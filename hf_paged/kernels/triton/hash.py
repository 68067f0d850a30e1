"""Triton hash of the bytes of many tensors in one launch, equal to `kernels.hashing.hash_portable`
of each."""

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
PROGRAMS_PER_SM = 5  # resident programs per multiprocessor, with 90 registers per thread
# The constants of `hash_portable`, as uint64.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(words, position):
    # Returns the two summands of each word. Products and sums of uint64 are modulo 2^64.
    mixed = words ^ (position * _GAMMA)
    mixed = (mixed ^ (mixed >> 30)) * _MIX_1
    mixed = (mixed ^ (mixed >> 27)) * _MIX_2
    mixed = (mixed ^ (mixed >> 31)) * _GAMMA
    return mixed, (mixed ^ (mixed >> 32)) * _MIX_1


@triton.jit
def _load_bytes(address, word, num_bytes):
    # Loads words of a tensor at any alignment, with zeros for bytes past its end.
    loaded = tl.zeros_like(word).to(tl.uint64)
    for byte in range(8):
        at = word * 8 + byte
        value = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=at < num_bytes, other=0)
        loaded |= value.to(tl.uint64) << (8 * byte)
    return loaded


@triton.jit(do_not_specialize=["num_tensors", "num_tiles", "tiles_of_program"])
def _hash_kernel(table, sums, num_tensors, num_tiles, tiles_of_program, TILE: tl.constexpr):
    # A program hashes consecutive tiles, which may span several tensors. Tensor i has the tiles
    # [firsts[i], firsts[i + 1]); starts[p] is the tensor with the first tile of program p.
    addresses = table
    sizes = table + num_tensors
    firsts = table + 2 * num_tensors
    starts = firsts + num_tensors + 1
    number = tl.load(starts + tl.program_id(0))
    tile = tl.program_id(0).to(tl.int64) * tiles_of_program
    end = tl.minimum(tile + tiles_of_program, num_tiles)
    lane = tl.arange(0, TILE).to(tl.int64)
    while tile < end:
        address = tl.load(addresses + number)
        size = tl.load(sizes + number)
        first = tl.load(firsts + number)
        stop = tl.minimum(end, tl.load(firsts + number + 1))
        # Full tiles of an aligned tensor are read as words; its last tile, and unaligned tensors,
        # as bytes.
        words_stop = tl.minimum(stop, first + tl.where(address % 8 == 0, size // (8 * TILE), 0))
        words = address.to(tl.pointer_type(tl.uint64))
        total = tl.zeros([TILE], dtype=tl.uint64)
        total_again = tl.zeros([TILE], dtype=tl.uint64)
        for current in range(tile, words_stop):
            word = (current - first) * TILE + lane
            mixed, again = _mix(tl.load(words + word), (word + 1).to(tl.uint64))
            total += mixed
            total_again += again
        for current in range(tl.maximum(tile, words_stop), stop):
            word = (current - first) * TILE + lane
            mixed, again = _mix(_load_bytes(address, word, size), (word + 1).to(tl.uint64))
            # words past the end are not summed, as in `hash_portable`
            total += tl.where(word * 8 < size, mixed, 0)
            total_again += tl.where(word * 8 < size, again, 0)
        tl.atomic_add(sums + 2 * number, tl.sum(total).to(tl.int64, bitcast=True), sem="relaxed")
        tl.atomic_add(
            sums + 2 * number + 1, tl.sum(total_again).to(tl.int64, bitcast=True), sem="relaxed"
        )
        tile = stop
        number += 1


def hash_all(tensors: Sequence[Tensor]) -> Tensor:
    """Returns `hash_portable`, bit for bit, of contiguous tensors of any dtype and size on one
    device: `(len(tensors), 2)` int64 there, in one launch, without waiting for it. Raises
    `LaunchFailedError`."""
    device = tensors[0].device
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    sizes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    firsts = np.concatenate([[0], np.cumsum(-(-sizes // (8 * TILE)))])
    num_tiles = int(firsts[-1])
    if num_tiles == 0:
        return sums
    tiles_of_program = triton.cdiv(num_tiles, num_multiprocessors(device) * PROGRAMS_PER_SM)
    programs = triton.cdiv(num_tiles, tiles_of_program)
    starts = np.searchsorted(firsts, np.arange(programs) * tiles_of_program, side="right") - 1
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64).view(np.int64)
    table = torch.from_numpy(np.concatenate([addresses, sizes, firsts, starts])).to(device)
    launch(
        _hash_kernel,
        (programs,),
        table,
        sums,
        len(tensors),
        num_tiles,
        tiles_of_program,
        TILE=TILE,
        writes=(sums,),
    )
    return sums
