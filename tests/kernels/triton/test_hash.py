"""The Triton hash against the PyTorch one of `kernels.hashing`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hf_paged import kernels
from hf_paged.kernels import cpp, hashing
from hf_paged.kernels.hashing import hash_portable, hash_tensors
from hf_paged.kernels.triton import hash as module
from tests.support.kernels.device import DEVICE, available
from tests.support.operations import Operations

pytestmark = available

TILE_BYTES = 8 * 1024
SIZES = [
    *(0, 1, 7, 8, 9, 0, 0, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1),
    *(3 * TILE_BYTES + 5, 3, 10 * TILE_BYTES, 0),
]


def placed(content: bytes, offset: int = 0) -> torch.Tensor:
    """The bytes on `DEVICE`, `offset` past a multiple of 64, with other bytes around them."""
    memory = np.frombuffer(b"?" * (64 + offset) + content + b"?" * 9, np.uint8).copy()
    return torch.from_numpy(memory).to(DEVICE)[64 + offset : 64 + offset + len(content)]


def contents() -> list[bytes]:
    return [np.random.default_rng(number).bytes(size) for number, size in enumerate(SIZES)]


@pytest.mark.slow_cases("programs5")
@pytest.mark.parametrize("programs", [1, 2, 5, 16, 1000], ids="programs{}".format)
def test_hashes_what_the_plain_one_hashes(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hash many tensors, a part of one, or parts of two; tensors at every
    alignment."""
    monkeypatch.setattr(module, "PROGRAMS_PER_SM", 1)
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: programs)
    for offset in (0, 1, 4, 8) if programs == 5 else (0,):
        tensors = [placed(content, offset) for content in contents()]
        expected = [hash_portable(tensor).tolist() for tensor in tensors]
        assert module.hash_all(tensors).tolist() == expected
        assert module.hash_all(tensors[::-1]).tolist() == expected[::-1]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.int8, torch.complex64, torch.bool, torch.float64], ids=str
)
def test_tensors_of_any_dtype_and_shape(dtype: torch.dtype) -> None:
    shapes = ((), (3,), (7, 11, 13), (0, 4))
    tensors = [torch.randint(0, 2, shape, device=DEVICE).to(dtype) for shape in shapes]
    assert module.hash_all(tensors).tolist() == [
        hash_portable(tensor).tolist() for tensor in tensors
    ]


@pytest.mark.slow
def test_any_number_of_tensors_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    launches, hash_all, counts = [], module.hash_all, []
    monkeypatch.setattr(module, "hash_all", lambda x: (launches.append(x), hash_all(x))[1])
    for number in (3, 300):
        tensors = [torch.full((5,), i, device=DEVICE) for i in range(number)]
        with Operations() as operations:
            found = hash_tensors(tensors)
        counts.append(operations.counts.total())
        assert found == [None, [hash_portable(tensor).tolist() for tensor in tensors]]
        with Operations() as operations:
            torch.stack([hash_portable(tensor) for tensor in tensors])
        assert operations.counts.total() > 20 * number, "which is what it replaces"
    # most are the interpreter's, whatever the number of tensors
    assert len(launches) == 2 and counts[0] == counts[1] < 20
    monkeypatch.setattr(hashing, "uses_triton", lambda tensor: False)
    assert hash_tensors(tensors) == found and len(launches) == 2


@pytest.mark.gpu
def test_the_weights_of_a_large_model() -> None:
    """More than 2^32 bytes, in tensors of unequal sizes."""
    tensors = [
        torch.randn(size, device=DEVICE).to(torch.bfloat16)
        for size in (5, 1 << 28, 4097, (1 << 31) + 9, 1)
    ]
    assert module.hash_all(tensors).tolist() == [
        hash_portable(tensor).tolist() for tensor in tensors
    ]
