"""Hashes of tensor bytes, to detect writes that change neither `_version` nor `data_ptr` (fused
optimizers, numpy).

The keys are public and strides are ignored, so that a user who chooses the bytes can give two
tensors the same hash. User content is therefore identified by BLAKE2b digests
(`batching/execution/prompts.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpp, uses_triton
from .triton.launch import LaunchFailedError

# bytes that the portable hash reads at a time; its temporaries take about four times as many
CHUNK_BYTES = 8 << 20
# The odd constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed int64.
_STEP, _FIRST, _SECOND = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def hash_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    """Hashes the elements of strided tensors: one hash for all tensors that the C++ kernel reads,
    and one for each other tensor."""
    tensors = [_dense(tensor) for tensor in tensors]
    # `is_cpu` first, so that tensors of a GPU do not build the C++ kernels
    here = [tensor for tensor in tensors if tensor.is_cpu and cpp.is_available()]
    hashes: list[Any] = [
        cpp.hash_memory([x.data_ptr() for x in here], [x.nbytes for x in here]) if here else None
    ]
    others: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not (here and tensor.is_cpu):
            others.setdefault(tensor.device, []).append(tensor)
    device_hashes = [_hash_on_device(held) for held in others.values()]
    # waits once per device, after work is queued on all of them
    return hashes + [sums.tolist() for sums in device_hashes]


def _hash_on_device(tensors: Sequence[Tensor]) -> Tensor:
    """Returns `hash_portable` of contiguous tensors on one device, as `(len(tensors), 2)` int64 on
    that device."""
    if uses_triton(tensors[0]):
        from .triton.hash import hash_all  # needs Triton

        with contextlib.suppress(LaunchFailedError):
            return hash_all(tensors)
    return torch.stack([hash_portable(tensor) for tensor in tensors])


def _dense(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor with each element of `tensor` once: `tensor` itself, a view of it
    or a copy."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def hash_portable(tensor: Tensor) -> Tensor:
    """Returns the hash of a contiguous tensor's bytes, `(2,)` int64 on its device, independent of
    the order of summation. A bijection mixes each 8-byte word with its position, and the results
    are summed modulo 2^64: one changed word always changes the first sum, and two different
    contents agree in both sums with a probability of about 2^-128."""
    content = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            chunk = F.pad(chunk, (0, -chunk.numel() % 8))  # always copies, which aligns the chunk
        words = chunk.view(torch.int64)
        position = torch.arange(
            start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device
        )
        mixed = position.mul_(_STEP).bitwise_xor_(words)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, _STEP)):
            mixed = mixed.bitwise_xor_(_shift(mixed, shift)).mul_(factor)
        total[0] += mixed.sum()
        total[1] += mixed.bitwise_xor_(_shift(mixed, 32)).mul_(_FIRST).sum()
    return total


def _shift(words: Tensor, bits: int) -> Tensor:
    """Returns `words >> bits` of unsigned words."""
    return (words >> bits).bitwise_and_((1 << 64 - bits) - 1)
