"""The cache's length in a recorded forward: what code may do with it, and the lengths for which the
result holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.step import NotCapturable
from hf_paged.tape.length import KeyLength, Length, LengthRange
from hf_paged.tape.record import recording
from hf_paged.tape.unmasked import current_columns


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


def test_ranges_of_keys_end_with_the_stored_columns() -> None:
    table = torch.arange(160).view(2, 80)
    length = KeyLength(64, torch.tensor(9))
    with recording():
        last, around = table[:, length - 2 : length], table[:, length - 1 : length + 1, None]
        capacity, empty = table[:, :length], table[:, length - 0 : length]
    assert last.tolist() == [[8, 9], [88, 89]]
    assert around.tolist() == [[[9], [10]], [[89], [90]]]
    assert capacity.shape == (2, 64) and empty.shape == (2, 0)
    assert length - 1 == 63 and length + 0.5 == 64.5 and length - length == 0


def test_only_columns_have_a_length_of_keys() -> None:
    with recording():
        keys, other = torch.zeros(2, 4, 64, 8), torch.zeros(2, 4, 64, 8)
        columns = current_columns.get()
        assert columns is not None
        columns.add(keys, torch.tensor(9))
        lengths = keys.size(-2), keys.size(dim=2), keys.shape[2], keys.size()[2]
        assert all(isinstance(length, KeyLength) and length == 64 for length in lengths)
        assert type(keys.size(-1)) is type(other.size(2)) is int
        assert keys.size() == keys.shape == other.shape
