"""Hashes of bytes: the C++ kernel and the PyTorch version against their definitions, word by
word."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged.kernels import cpp, hashing
from hf_paged.kernels.hashing import hash_portable

WORD = (1 << 64) - 1
SIZES = [0, 1, 7, 8, 9, 255, 4095, 4096, 4097, 3 * 4096 + 5, 262144, 262145, 600_001]


def scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class Digest:
    def __init__(self) -> None:
        self.a, self.b = 0x243F6A8885A308D3, 0x13198A2E03707344

    def absorb(self, x: int, y: int) -> None:
        self.a = (scramble(self.a ^ x) + self.b) & WORD
        self.b = (scramble(self.b ^ y) + (self.a << 1 | self.a >> 63)) & WORD


def reference(spans: list[bytes]) -> bytes:
    """Reimplements `hash.cpp`, word by word."""
    keys = [scramble((i + 1) * 0x9E3779B97F4A7C15 & WORD) for i in range(513)]
    low = np.array([key & 0xFFFFFFFF for key in keys], np.uint32)
    high = np.array([key >> 32 for key in keys], np.uint32)
    total = Digest()
    for number, span in enumerate(spans):
        total.absorb(len(span), number)
        for chunk in range(0, len(span), 64 * 4096):
            digest = Digest()
            for start in range(chunk, min(len(span), chunk + 64 * 4096), 4096):
                block = np.frombuffer(span[start : start + 4096].ljust(4096, b"\0"), "<u4").reshape(
                    16, 2, 32
                )
                left, right = block[:, 0].reshape(-1), block[:, 1].reshape(-1)
                sums = [
                    int(
                        (
                            (left + low[k : k + 512]).astype(np.uint64)
                            * (right + high[k : k + 512])
                        ).sum(dtype=np.uint64)
                    )
                    for k in (0, 1)
                ]
                digest.absorb(*sums)
            total.absorb(digest.a, digest.b)
    words = scramble(total.a ^ total.b), scramble((total.b + 1) & WORD)
    return b"".join(word.to_bytes(8, "little") for word in words)


def cpp_hash(spans: list[bytes], offset: int = 0) -> bytes:
    buffers = [ctypes.create_string_buffer(b"?" * offset + span) for span in spans]
    starts = [ctypes.addressof(buffer) + offset for buffer in buffers]
    return cpp.hash_memory(starts, [len(span) for span in spans])


def portable_hash(spans: list[bytes], offset: int = 0) -> list[Any]:
    tensors = [
        torch.frombuffer(bytearray(b"?" * offset + span + b"?"), dtype=torch.uint8)
        for span in spans
    ]
    return [(len(span), hash_portable(x[offset:-1]).tolist()) for span, x in zip(spans, tensors)]


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("size", SIZES)
def test_cpp_hash_is_the_reference(size: int) -> None:
    span = np.random.default_rng(size).bytes(size)
    expected = reference([span])
    for offset in (0, 1, 6):
        assert cpp_hash([span], offset) == expected
    assert cpp_hash([b"", span, b"abc", span]) == reference([b"", span, b"abc", span])


@pytest.mark.parametrize("size", SIZES)
def test_portable_hash_is_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    span = np.random.default_rng(size).bytes(size)
    padded = span.ljust(-(-size // 8) * 8, b"\0")
    words = np.frombuffer(padded, "<u8") ^ np.arange(
        1, len(padded) // 8 + 1, dtype=np.uint64
    ) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
        (31, 0x9E3779B97F4A7C15),
    ):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    second = (words ^ (words >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    expected = [int(x.sum(dtype=np.uint64).astype(np.int64)) for x in (words, second)]
    for chunk_bytes, offset in itertools.product((hashing.CHUNK_BYTES, 1 << 12), (0, 1, 6)):
        monkeypatch.setattr(hashing, "CHUNK_BYTES", chunk_bytes)
        assert portable_hash([span], offset) == [(size, expected)]


HASHES = [
    pytest.param(
        cpp_hash, marks=pytest.mark.skipif(not cpp.is_available(), reason="no compiler"), id="cpp"
    ),
    pytest.param(portable_hash, id="portable"),
]


@pytest.mark.parametrize("function", HASHES)
def test_structured_changes_never_cancel(function: Callable[[list[bytes]], Any]) -> None:
    """Zeros, one repeated value, repeated rows: contents for which naive sums and xors collide."""
    generator = np.random.default_rng(0)
    row = generator.bytes(64)
    contents: list[bytes] = []
    for base in (bytes(8192), b"\x80\x3f" * 4096, row * 128, generator.bytes(8192)):
        contents.append(base)
        for at, bit in itertools.product((0, 1, 7, 63, 64, 4095, 4096, 8191), (0, 7)):  # one bit
            changed = bytearray(base)
            changed[at] ^= 1 << bit
            contents.append(bytes(changed))
        for step in (8, 64, 128, 256, 2048, 4096):
            # the same change in two places: signs, exponents
            for mask in (0x80, 0x01, 0xFF):
                changed = bytearray(base)
                changed[7] ^= mask
                changed[7 + step] ^= mask
                contents.append(bytes(changed))
    different = np.frombuffer(generator.bytes(8192), np.uint8).reshape(128, 64)
    for first, second in ((0, 1), (0, 64), (3, 127), (31, 32)):  # exchanged rows
        order = np.arange(128)
        order[[first, second]] = second, first
        contents.append(different[order].tobytes())
    contents += [
        different.tobytes(),
        (different ^ 0x80).tobytes(),
        different[::-1].tobytes(),
        different.T.tobytes(),
    ]
    contents += [bytes(n) for n in range(20)]
    distinct = sorted(set(contents))
    assert len({repr(function([content])) for content in distinct}) == len(distinct)
    assert function([b"ab", b"c"]) != function([b"a", b"bc"])
    assert function([row, row[::-1]]) != function([row[::-1], row])


def test_cpp_is_not_built_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes a minute, which the first call of a model on a GPU would spend for nothing."""
    monkeypatch.setattr(cpp, "is_available", lambda: pytest.fail("built"))
    monkeypatch.setattr(
        hashing, "_hash_on_device", lambda tensors: torch.zeros(len(tensors), 2, dtype=torch.int64)
    )
    assert hashing.hash_tensors([torch.empty(3, device="meta")]) == [None, [[0, 0]]]
