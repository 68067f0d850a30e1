"""Tensors that a recorded forward computes from indexer keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_paged.step import NotCapturable
from hf_paged.tape.columns import Columns, LiveColumns, StoredColumns, with_stored_columns

CAPACITY = 64


def scores_of(length: int, seed: int) -> Tensor:
    """Scores `(2, 1, CAPACITY)` of few values, hidden after the first `length + 1` columns."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (2, 1, CAPACITY), generator=generator).float()
    scores[..., length + 1 :] = float("-inf")
    return scores


@pytest.mark.parametrize("k", [1, 3, 8])
def test_equal_scores_are_chosen_as_among_the_stored_columns(k: int) -> None:
    for seed, length in enumerate(range(k - 1, CAPACITY)):
        scores = scores_of(length, seed)
        chosen = Columns(scores, torch.tensor(length), CAPACITY).topk(k, dim=-1)
        expected = scores[..., : length + 1].contiguous().topk(k, dim=-1)
        assert type(chosen.indices) is Tensor
        assert torch.equal(chosen.indices, expected.indices)
        assert torch.equal(chosen.values, expected.values)


def test_all_stored_columns_are_chosen_if_there_are_few() -> None:
    length = 2
    columns = Columns(scores_of(length, 0), torch.tensor(length), CAPACITY)
    indices = torch.topk(columns, 5).indices
    assert sorted(indices[1, 0].tolist()) == list(range(5))


def test_scores_computed_from_keys_are_columns_too() -> None:
    keys = Columns(torch.randn(2, CAPACITY, 4), torch.tensor(9))
    scores = torch.matmul(torch.ones(2, 1, 4), keys.transpose(-1, -2).float())
    scores = torch.nn.functional.relu(scores) + torch.zeros(CAPACITY)
    assert isinstance(scores, Columns)
    assert scores.shape[-1] == CAPACITY
    assert int(scores.topk(2).indices.max()) < 10


def test_the_new_column_is_appended_in_the_buffer_and_selected_as_the_last() -> None:
    buffer = torch.zeros(3, 2, CAPACITY, dtype=torch.long)
    positions = StoredColumns(buffer, torch.tensor(9), axis=2)
    new = torch.arange(6).view(3, 2, 1)
    appended = torch.cat([positions, new], dim=-1)
    assert type(appended) is Columns
    assert torch.equal(buffer[..., 9:10], new) and not buffer[..., 10:].any()
    angles = appended.float().transpose(1, 2)
    for selected in (angles[:, -1:], angles[:, -1:, :]):
        assert type(selected) is Tensor
        assert torch.equal(selected, new.float().transpose(1, 2))
    with pytest.raises(NotCapturable):
        torch.cat([positions, new, new], dim=-1)
    with pytest.raises(NotCapturable):
        torch.cat([positions, new.float()], dim=-1)


def test_live_modules_get_only_the_stored_columns() -> None:
    columns = Columns(torch.randn(2, CAPACITY, 4), torch.tensor(9))
    scores = columns.transpose(1, 2) * 2
    argument = {"keys": LiveColumns.of(columns), "scores": [LiveColumns.of(scores), 1]}
    expected = columns.tensor[:, :10]
    found = with_stored_columns(argument)
    assert torch.equal(found["keys"], expected) and found["scores"][1] == 1
    assert torch.equal(found["scores"][0], 2 * expected.transpose(1, 2))


def test_an_axis_of_other_numbers_may_have_as_many_elements() -> None:
    positions = torch.arange(3 * 2 * CAPACITY).view(3, 2, CAPACITY)
    columns = Columns(positions, torch.tensor(9), axis=2)
    angles = (columns.expand(3, -1, -1)[..., None].float() * torch.rand(CAPACITY)).cos()[1]
    wide = torch.cat([angles, angles], dim=-1)
    for tensor in (angles, wide):
        assert torch.equal(LiveColumns.of(tensor).stored_columns(), tensor.tensor[:, :10])
        assert torch.equal(tensor[:, -1:], tensor.tensor[:, 9:10])
    with pytest.raises(NotCapturable, match="axis"):
        LiveColumns.of(angles.transpose(1, 2))


@pytest.mark.parametrize(
    "use",
    [
        lambda columns: columns.sum(-1),
        lambda columns: torch.zeros(2, 1, CAPACITY).copy_(columns),
        lambda columns: torch.zeros(2, 1, CAPACITY).__setitem__(0, columns[0]),
        lambda columns: columns.topk(2, largest=False),
        lambda columns: columns.topk(1, dim=0),
        lambda columns: torch.cat([columns, columns], dim=-1),
        lambda columns: columns[..., -2:],
    ],
)
def test_other_uses_are_refused(use: Callable[[Tensor], object]) -> None:
    columns = Columns(scores_of(9, 0), torch.tensor(9), CAPACITY)
    with pytest.raises(NotCapturable):
        use(columns)
