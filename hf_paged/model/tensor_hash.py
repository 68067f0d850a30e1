"""
Hashes of the bytes of tensors: `_version` and `data_ptr` prove a change but not its absence, since fused optimizers,
`p.data.copy_` and writes through numpy move neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpp

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
            others.setdefault(tensor.device, []).append(hash_portable(tensor))
    found += [torch.stack(hashes).tolist() for hashes in others.values()]  # waits once per device
    return found


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
    """
    The hash of a contiguous tensor's bytes, in integer arithmetic: exact on any device, in whatever order it sums.

    Each 8 bytes are scrambled together with their position by a bijection, and the results are summed modulo 2^64: one
    changed word always changes the first sum, and any two different contents agree in both with a chance of about
    2^-128.

    Returns (`torch.Tensor` of shape `(2,)`, int64, on the tensor's device).
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            padded = chunk.new_zeros(-(-chunk.numel() // 8) * 8)
            padded[: chunk.numel()] = chunk
            chunk = padded
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
