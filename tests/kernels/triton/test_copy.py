"""The Triton copy of blocks against the PyTorch one of `cache.storage`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.cache.storage import copy_portable
from hf_paged.kernels.triton import copy
from tests.support.kernels.device import DEVICE, available

pytestmark = available

# Shapes of a block of each layer: of several heads and dims, of less than a word, of a tile and
# more, of odd bytes.
ALIGNED = [(2, 8, 16), (4, 16, 9), (1, 8, 4), (3, 16, 80)]
UNALIGNED = [(1, 3, 5), (2, 8, 16), (1, 1, 1), (3, 7, 201)]


def blocks(
    num_blocks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, offset: int = 0
) -> list[torch.Tensor]:
    """NaN in every block with an even id, if the dtype has NaN, and distinct values in the
    others."""
    found = []
    for number, shape in enumerate(shapes):
        size = num_blocks * torch.Size(shape).numel()
        generator = torch.Generator().manual_seed(number)
        tensor = torch.randn(offset + size, generator=generator).mul(100).to(dtype)
        tensor = tensor[offset:].view(num_blocks, *shape)
        if dtype.is_floating_point:
            tensor[::2] = float("nan")
        found.append(tensor)
    return found


def copied(tensors: list[torch.Tensor], pairs: torch.Tensor) -> None:
    places = copy.locate_blocks(tensors)
    copy.copy_blocks(places, torch.tensor(places, device=DEVICE), pairs.to(DEVICE))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("shapes", [ALIGNED, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("offset", [0, 1], ids="offset{}".format)
def test_copies(shapes: list[tuple[int, ...]], dtype: torch.dtype, offset: int) -> None:
    """Sources in another order than targets, a source with two targets, blocks of NaN as sources
    and as targets."""
    pairs = torch.tensor([(5, 0), (1, 3), (2, 7), (5, 4), (8, 6)])
    expected = blocks(9, shapes, dtype, offset)
    tensors = [_moved(tensor) for tensor in blocks(9, shapes, dtype, offset)]
    copy_portable([tensor.view(torch.uint8) for tensor in expected], pairs)
    copied(tensors, pairs)
    for found, wanted in zip(tensors, expected):
        assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on `DEVICE`, at the same offset in its memory."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(DEVICE)
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize(
    "block_bytes", [1, 8, 8184, 8192, 8200, 3 * 8192 + 8, 8191], ids="bytes{}".format
)
def test_blocks_around_the_targets_stay(block_bytes: int) -> None:
    tensor = torch.randint(0, 255, (6, block_bytes), dtype=torch.uint8).to(DEVICE)
    before = tensor.clone()
    copied([tensor], torch.tensor([[5, 2], [0, 4]]))
    assert torch.equal(tensor, before[[0, 1, 5, 3, 0, 5]])
    copied([tensor], torch.zeros(0, 2, dtype=torch.int64))  # no pairs, and blocks without bytes
    copied([tensor[:, :0].clone()], torch.zeros(1, 2, dtype=torch.int64))
    assert torch.equal(tensor, before[[0, 1, 5, 3, 0, 5]])


@pytest.mark.gpu
def test_blocks_past_2_to_the_31_bytes() -> None:
    tensor = torch.zeros((1 << 16) + 3, 1 << 16, dtype=torch.uint8, device=DEVICE)
    tensor[-1] = torch.arange(1 << 16, device=DEVICE)
    copied([tensor], torch.tensor([[len(tensor) - 1, 1], [len(tensor) - 1, len(tensor) - 2]]))
    assert torch.equal(tensor[1], tensor[-1]) and torch.equal(tensor[-2], tensor[-1])
    assert not tensor[2:-2].any()
