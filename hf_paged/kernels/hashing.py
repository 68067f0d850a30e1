"""Hashes of tensor bytes, which detect writes that change neither `_version` nor `data_ptr` (fused
optimizers, numpy).

The constants are public and strides are ignored, so a user who chooses the bytes can make two
tensors collide. User content is therefore identified by BLAKE2b digests
(`media/prompts.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpp, uses_triton
from .triton.launch import LaunchFailedError

# bytes that `hash_portable` reads at a time; its temporaries take at most three times as many
CHUNK_BYTES = 8 << 20
# The odd constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed int64.
_GAMMA, _MIX_1, _MIX_2 = (
    word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def hash_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    """Hashes the elements of tensors with any strides, on any devices. The first item of the result
    is one hash of all tensors that the C++ kernel reads (`None` if it reads none). Each further
    item is a list of the hashes of the other tensors on one device, as pairs of integers
    (`hash_portable`)."""
    tensors = [_dense(tensor) for tensor in tensors]
    # `is_cpu` first, so that GPU tensors do not trigger the C++ build
    cpp_tensors = [tensor for tensor in tensors if tensor.is_cpu and cpp.is_available()]
    cpp_hash = None
    if cpp_tensors:
        addresses = [tensor.data_ptr() for tensor in cpp_tensors]
        sizes = [tensor.nbytes for tensor in cpp_tensors]
        cpp_hash = cpp.hash_memory(addresses, sizes)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not (cpp_tensors and tensor.is_cpu):
            by_device.setdefault(tensor.device, []).append(tensor)
    device_hashes = [_hash_on_device(device_tensors) for device_tensors in by_device.values()]
    # `tolist` waits for a device, so the work of all devices is queued first
    return [cpp_hash, *(hashes.tolist() for hashes in device_hashes)]


def _hash_on_device(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the hashes (`hash_portable`) of contiguous tensors on one device, as
    `(len(tensors), 2)` int64 on that device."""
    if uses_triton(tensors[0]):
        from .triton.hash import hash_all  # needs Triton

        with contextlib.suppress(LaunchFailedError):
            return hash_all(tensors)
    return torch.stack([hash_portable(tensor) for tensor in tensors])


def _dense(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor that holds each element of `tensor` once (expanded dimensions
    have size 1): `tensor` itself, a view of it or a copy."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def hash_portable(tensor: Tensor) -> Tensor:
    """Returns the hash of a contiguous tensor's bytes, `(2,)` int64 on the tensor's device. Mixes
    each 8-byte word with its position by a bijection, mixes the results once more, and sums the
    results of both mixes separately, modulo 2^64, so that the order of summation does not matter.
    A change of one word always changes the first sum; two different contents of the same size agree
    in both sums with a probability of about 2^-128, unless they were chosen to collide."""
    content = tensor.detach().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            chunk = F.pad(chunk, (0, -chunk.numel() % 8))  # always copies, which aligns the chunk
        words = chunk.view(torch.int64)
        positions = torch.arange(
            start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device
        )
        mixed = positions.mul_(_GAMMA).bitwise_xor_(words)
        for bits, factor in ((30, _MIX_1), (27, _MIX_2), (31, _GAMMA)):
            mixed = mixed.bitwise_xor_(_shift_right_unsigned(mixed, bits)).mul_(factor)
        sums[0] += mixed.sum()
        sums[1] += mixed.bitwise_xor_(_shift_right_unsigned(mixed, 32)).mul_(_MIX_1).sum()
    return sums


def _shift_right_unsigned(words: Tensor, bits: int) -> Tensor:
    """Returns `words >> bits` of int64 words, shifting in zeros."""
    return (words >> bits).bitwise_and_((1 << 64 - bits) - 1)
