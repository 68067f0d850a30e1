"""Hashes of bytes: those of the C++ kernel and of the PyTorch version are the same on every
machine."""

from __future__ import annotations

import ctypes
import hashlib
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
SPANS = [hashlib.shake_128(b"%d" % size).digest(size) for size in SIZES]


def scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


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


@pytest.mark.parametrize("offset", [0, 1, 6])
def test_hashes_stay(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of prefixes hold them. They were computed word by word."""
    if cpp.is_available():
        assert cpp_hash(SPANS, offset).hex() == "13c797e550497752c51bcef180287cfd"
    for chunk_bytes in (hashing.CHUNK_BYTES, 1 << 12):
        monkeypatch.setattr(hashing, "CHUNK_BYTES", chunk_bytes)
        words = torch.tensor([words for _, words in portable_hash(SPANS, offset)])
        found = hashlib.sha256(words.numpy().tobytes()).hexdigest()
        assert found.startswith("9fc306e5ae933da2bb982b1a3cf89949")


built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
HASHES = [pytest.param(cpp_hash, marks=built, id="cpp"), pytest.param(portable_hash, id="portable")]


@pytest.mark.parametrize("function", HASHES)
def test_structured_changes_never_cancel(function: Callable[[list[bytes]], Any]) -> None:
    """Zeros, one repeated value, repeated rows: contents for which naive sums and xors collide."""
    generator = np.random.default_rng(0)
    row = generator.bytes(64)
    # flipped bits at one place, and at two: signs, exponents
    flips = [{at: 1 << bit} for at in (0, 1, 63, 64, 4095, 4096, 8191) for bit in (0, 7)]
    steps = itertools.product((8, 64, 128, 256, 2048, 4096), (0x80, 0x01, 0xFF))
    flips += [{7: mask, 7 + step: mask} for step, mask in steps]
    contents: set[bytes] = {bytes(n) for n in range(20)}
    for base in (bytes(8192), b"\x80\x3f" * 4096, row * 128, generator.bytes(8192)):
        for flipped in ({}, *flips):
            changed = bytearray(base)
            for at, mask in flipped.items():
                changed[at] ^= mask
            contents.add(bytes(changed))
    rows = np.frombuffer(generator.bytes(8192), np.uint8).reshape(128, 64)
    for first, second in ((0, 1), (0, 64), (3, 127), (31, 32)):  # exchanged rows
        order = np.arange(128)
        order[[first, second]] = second, first
        contents.add(rows[order].tobytes())
    contents |= {x.tobytes() for x in (rows, rows ^ 0x80, rows[::-1], rows.T)}
    assert len({repr(function([content])) for content in contents}) == len(contents)
    assert function([b"ab", b"c"]) != function([b"a", b"bc"])
    assert function([row, row[::-1]]) != function([row[::-1], row])


def test_cpp_is_not_built_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes a minute, which the first call of a model on a GPU would spend for nothing."""
    monkeypatch.setattr(cpp, "is_available", lambda: pytest.fail("built"))
    monkeypatch.setattr(hashing, "_hash_on_device", lambda x: torch.zeros(len(x), 2).long())
    assert hashing.hash_tensors([torch.empty(3, device="meta")]) == [None, [[0, 0]]]
