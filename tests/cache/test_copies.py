"""Block copies in all layers: in one GPU launch (Triton's interpreter here), and in PyTorch."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from hf_paged import kernels
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.storage import BlockStorage
from tests.support.kernels.device import DEVICE, available


@pytest.fixture(params=["portable", pytest.param("triton", marks=available)])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Observes the kernel's launches; `None` if PyTorch makes the copies."""
    if request.param == "portable":
        monkeypatch.setattr("hf_paged.cache.storage.uses_triton", lambda tensor: False)
        return None
    from hf_paged.kernels.triton import copy

    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    counted = create_autospec(copy.copy_blocks, side_effect=copy.copy_blocks)
    monkeypatch.setattr(copy, "copy_blocks", counted)
    return counted


def storage_of(num_layers: int) -> BlockStorage:
    """Layers of unequal dims, the last of two tensors; block `b` of tensor `t` holds `10 * t +
    b`."""
    pool = BlockPool()
    storage = BlockStorage(4, pool)
    pool.grow(6)
    for index in range(num_layers):
        keys = torch.zeros(1, 2, 0, 3 + index, device=DEVICE)
        storage.make(
            index, keys, keys if index + 1 < num_layers else torch.zeros(1, 1, 0, 5, device=DEVICE)
        )
    fill(storage)
    return storage


def tensors_of(storage: BlockStorage) -> list[torch.Tensor]:
    return [tensor for layer in storage.layers.values() for tensor in layer.data]


def fill(storage: BlockStorage) -> None:
    for number, tensor in enumerate(tensors_of(storage)):
        for block in range(len(tensor)):
            tensor[block] = 10 * number + block


def content(storage: BlockStorage) -> list[list[int]]:
    """Content of each block of each tensor, whose elements are all equal."""
    found = []
    for number, tensor in enumerate(tensors_of(storage)):
        rows = tensor.flatten(1)
        assert (rows == rows[:, :1]).all()
        found.append((rows[:, 0] - 10 * number).tolist())
    return found


@pytest.mark.parametrize(
    ("copies", "expected", "num_launches"),
    [
        ([(1, 4), (1, 0), (5, 2)], [1, 1, 5, 3, 1, 5], 1),
        # programs that run in any order would read what others wrote
        ([(0, 1), (1, 2), (4, 5), (5, 4)], [0, 0, 1, 3, 5, 4], 0),
    ],
    ids=["all layers in one launch", "all are read before one is written"],
)
def test_copies(
    copies: list[tuple[int, int]],
    expected: list[int],
    num_launches: int,
    launches: Any,
) -> None:
    storage = storage_of(5)
    storage.copy_blocks(copies)
    assert content(storage) == [expected] * 6
    assert launches is None or launches.call_count == num_launches


def test_the_table_is_kept_until_tensors_are_others(launches: Any) -> None:
    storage = storage_of(2)
    for _ in range(2):
        storage.copy_blocks([(1, 0)])
    storage.grow(9, 9)
    fill(storage)
    storage.copy_blocks([(8, 0)])
    assert content(storage) == [[8, 1, 2, 3, 4, 5, 6, 7, 8]] * 3
    narrow = torch.zeros(1, 2, 0, 3, device=DEVICE)
    storage.promote(0, narrow.double(), narrow.double())  # replaces the layer's tensor
    fill(storage)
    storage.copy_blocks([(7, 1)])
    assert content(storage) == [[0, 7, 2, 3, 4, 5, 6, 7, 8]] * 3
    if launches is not None:
        tables = [call.args[1] for call in launches.call_args_list]
        assert len(tables) == 4 and tables[0] is tables[1]
        assert len({table.data_ptr() for table in tables}) == 3


def test_blocks_that_are_not_there(launches: Any) -> None:
    if launches is None and DEVICE.type == "cuda":
        pytest.skip("PyTorch's kernel ends the process's use of the device")
    storage = storage_of(1)
    with pytest.raises(IndexError):
        storage.copy_blocks([(0, 6)])
    assert content(storage) == [[0, 1, 2, 3, 4, 5]] * 2
