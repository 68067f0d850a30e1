"""Hashes of the bytes of tensors: fused optimizers and numpy write without a change of `_version` and `data_ptr`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpp, uses_triton

CHUNK_BYTES = 8 << 20  # that the portable hash reads at once; it takes some four times as much for what is between
# The odd constants of SplitMix64 (Steele et al., OOPSLA 2014), as torch's int64 holds them.
_STEP, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def hash_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    """Hashes of the elements of strided tensors: one of all tensors that the C++ kernel can read, one of each other."""
    tensors = [_dense(tensor) for tensor in tensors]
    here = [tensor for tensor in tensors if tensor.is_cpu] if cpp.is_available() else []
    found: list[Any] = [cpp.hash_memory([x.data_ptr() for x in here], [x.nbytes for x in here]) if here else None]
    others: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not (here and tensor.is_cpu):
            others.setdefault(tensor.device, []).append(tensor)
    hashes = [_hash_each(held) for held in others.values()]
    return found + [sums.tolist() for sums in hashes]  # waits once per device, after all devices have begun


def _hash_each(tensors: Sequence[Tensor]) -> Tensor:
    """`(len(tensors), 2)` int64: `hash_portable` of each, of contiguous tensors on one device, where they are."""
    if uses_triton(tensors[0]):
        from .triton.hash import hash_all  # needs Triton

        return hash_all(tensors)
    return torch.stack([hash_portable(tensor) for tensor in tensors])


def _dense(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the elements of `tensor`, each once: `tensor` itself, a view of it or else a copy."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def hash_portable(tensor: Tensor) -> Tensor:
    """`(2,)` int64, on the tensor's device: the hash of a contiguous tensor's bytes, exact in any order of summation.
    Each 8 bytes are scrambled with their position by a bijection, and the results are summed modulo 2^64: a changed
    word always changes the first sum, and any two different contents agree in both with a chance of about 2^-128."""
    content = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            chunk = F.pad(chunk, (0, -chunk.numel() % 8))  # a copy in any case
        words = chunk.view(torch.int64)
        position = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device)
        mixed = position.mul_(_STEP).bitwise_xor_(words)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, _STEP)):
            mixed = mixed.bitwise_xor_(_shift(mixed, shift)).mul_(factor)
        total[0] += mixed.sum()
        total[1] += mixed.bitwise_xor_(_shift(mixed, 32)).mul_(_FIRST).sum()
    return total


def _shift(words: Tensor, bits: int) -> Tensor:
    """`words >> bits` as unsigned numbers."""
    return (words >> bits).bitwise_and_((1 << 64 - bits) - 1)
