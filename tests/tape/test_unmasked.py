"""A softmax over the columns of gathered keys, of which a recorded step has stored only the
first."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.tape.record import recording
from hf_paged.tape.unmasked import current_columns

N, HEADS, COLUMNS, DIM, LENGTH = 2, 4, 16, 16, 9  # as many columns as numbers of a head
QUERY = torch.randn(N, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
KEYS = torch.randn(N, HEADS, COLUMNS, DIM, generator=torch.Generator().manual_seed(2))


def in_batches(keys: Tensor) -> Tensor:
    scores = torch.bmm(QUERY.view(-1, 1, DIM), keys.reshape(N * HEADS, -1, DIM).transpose(1, 2))
    return F.softmax(scores / math.sqrt(DIM), dim=-1)


def of_keys_before_queries(keys: Tensor) -> Tensor:
    scores = torch.matmul(keys, QUERY.transpose(-1, -2))  # (n, heads, columns, 1)
    return scores.softmax(2, dtype=torch.float64).squeeze(-1)


def of_shared_heads(keys: Tensor) -> Tensor:
    keys = keys[:, :2, None].expand(N, 2, 2, keys.shape[2], DIM).reshape(N, HEADS, -1, DIM)
    scores = torch.einsum("nhqd,nhkd->nhqk", QUERY, keys).tanh().mul_(3.0)
    return scores.view(N, 2, 2, 1, -1).permute(0, 3, 1, 2, 4).softmax(-1)


def recorded(function: Callable[[Tensor], Tensor], keys: Tensor) -> Tensor:
    with torch.no_grad(), recording():
        keys = keys.clone()
        columns = current_columns.get()
        assert columns is not None
        columns.add(keys, torch.tensor(LENGTH))
        return function(keys)


@pytest.mark.parametrize("function", [in_batches, of_keys_before_queries, of_shared_heads])
def test_only_stored_columns_have_weights(function: Callable[[Tensor], Tensor]) -> None:
    weights = recorded(function, KEYS)
    expected = function(KEYS[:, :, : LENGTH + 1])
    torch.testing.assert_close(weights[..., : LENGTH + 1], expected)
    assert not weights[..., LENGTH + 1 :].any()


def scores_of(keys: Tensor) -> Tensor:
    return torch.matmul(QUERY, keys.transpose(-1, -2))


def written_to(scores: Tensor) -> Tensor:
    scores[..., :3].copy_(torch.zeros(3))
    return scores


UNCERTAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "another axis": lambda keys: scores_of(keys).softmax(1),
    "numbers of a head": lambda keys: keys.softmax(-1),
    "sums over columns": lambda keys: torch.matmul(keys.transpose(-1, -2), keys).softmax(-1),
    "a mask": lambda keys: (scores_of(keys) + torch.zeros(COLUMNS)).softmax(-1),
    "shifted columns": lambda keys: (
        F.pad(scores_of(keys), (1, 0)).view(N, HEADS, -1, 1)[:, :, 1:].softmax(2)
    ),
    "a part": lambda keys: scores_of(keys)[..., :8].softmax(-1),
    "another order": lambda keys: keys.view(N, HEADS, DIM, COLUMNS)[:, :, :4].softmax(-1),
    "written to": lambda keys: written_to(scores_of(keys)).softmax(-1),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_other_softmaxes_stay_as_they_are(name: str) -> None:
    assert torch.equal(recorded(UNCERTAIN[name], KEYS), UNCERTAIN[name](KEYS))
