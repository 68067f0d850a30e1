"""The cache's length in a recorded forward: what code may do with it, and the lengths for which the
result holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.step import NotCapturable
from hf_paged.tape.length import Length, LengthRange
from hf_paged.tape.record import recording


def length_of(value: int) -> Length:
    return Length(torch.tensor(value), value, LengthRange())


COMPARISONS = {
    "> 9": lambda x: x + 2 > 9,
    ">= 9": lambda x: 2 + x >= 9,
    "< 9": lambda x: x - 2 < 9,
    "<= 9": lambda x: x + 1 + 1 <= 9,
    "9 >": lambda x: 9 > x + 2,
    "== 0": lambda x: x == 0,
    "!= 7": lambda x: x != 7,
    "twice": lambda x: (x > 3, x + 1 > 12),
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("value", [0, 3, 6, 7, 8, 11, 15])
def test_comparisons_hold_for_all_lengths_of_the_range(name: str, value: int) -> None:
    compare = COMPARISONS[name]
    length = length_of(value)
    result = compare(length)
    assert result == compare(value)
    assert value in length.valid_lengths
    equal = [n for n in range(30) if compare(n) == result]
    covered = [n for n in range(30) if n in length.valid_lengths]
    assert set(covered) <= set(equal)
    if name not in ("== 0", "!= 7", "twice"):  # else the others are on both sides
        assert covered == equal


def test_positions_are_made_of_it() -> None:
    table = torch.arange(40).view(1, -1) * 10
    with recording() as operations:
        length = Length(torch.tensor(5), 5, LengthRange())
        columns = torch.arange(length, length + 2, dtype=torch.int32)
        rows = table[:, length : 2 + length]
        mask = torch.arange(8) <= length
    assert columns.tolist() == [5, 6] and columns.dtype is torch.int32
    assert rows.tolist() == [[50, 60]]
    assert mask.tolist() == [True] * 6 + [False] * 2
    assert all(type(x) is Tensor for x in (columns, rows, mask))
    assert operations


def test_a_sum_in_place_leaves_the_positions_of_the_step() -> None:
    positions = torch.tensor([5, 5])
    length = Length(positions[0], 5, LengthRange())
    length += 2
    length -= 1
    assert isinstance(length, Length) and length.offset == 1 and length.tensor.item() == 6
    assert positions.tolist() == [5, 5]


@pytest.mark.parametrize(
    "read",
    [
        *(int, bool, range, Tensor.item, torch.arange, lambda x: torch.zeros(40)[:x]),
        lambda x: torch.zeros(3, 40)[torch.tensor([0, 1]), x : x + 2],
    ],
)
def test_its_number_is_not_read(read) -> None:
    length = length_of(5)
    with recording(), pytest.raises(NotCapturable):
        read(length)
