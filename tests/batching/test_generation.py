"""`Generation`: rows whose logits are gathered before they advance, and rows that advance one by
one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_paged.batching.generation import Generation
from hf_paged.batching.request import Request, Sequence
from hf_paged.cache.sequence_blocks import SequenceBlocks

LOGITS = torch.arange(12.0).view(6, 2)  # row `i` holds 2 * i and 2 * i + 1


@dataclass
class Rows:
    """The part of a decoding that a generation uses."""

    open_rows: list[int]
    num_rows: int = 3
    can_split: bool = True
    is_done: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_done = not self.open_rows

    def split(self) -> list[Rows]:
        return [Rows([0] if row in self.open_rows else [], 1) for row in range(self.num_rows)]


def make(open_rows: list[int], num_requests: int = 3) -> Generation:
    requests = [
        Request(i, [Sequence([1])], 9, num_rows=3 // num_requests) for i in range(num_requests)
    ]
    per = 3 // num_requests
    return Generation(Rows(open_rows), [(requests[row // per], row % per) for row in range(3)])


def test_logits_that_come_together_are_handed_out_at_once() -> None:
    following = make([0, 1, 2]).take_logits(LOGITS, {0: 2, 1: 3, 2: 4})
    assert following is not None and following.data_ptr() == LOGITS[2].data_ptr(), (
        "a view needs no copy"
    )
    assert torch.equal(following, LOGITS[2:5])
    found = make([0, 2]).take_logits(LOGITS, {0: 5, 2: 1})
    assert found is not None and torch.equal(found, LOGITS[[5, 1]])


def test_logits_wait_for_those_of_the_other_rows_in_copies() -> None:
    generation, first = make([0, 1, 2]), LOGITS.clone()
    assert generation.take_logits(first, {2: 0}) is None
    first.fill_(-1)  # the next forward writes to the same memory
    assert generation.take_logits(None, {}) is None
    assert generation.take_logits(LOGITS, {1: 4, 2: 5}) is None, "row 0 has none"
    found = generation.take_logits(LOGITS, {0: 3})
    assert found is not None and torch.equal(found, LOGITS[[3, 4, 0]]), "those that a row got first"
    assert generation.take_logits(None, {}) is None, "handed out once"


def test_after_a_split_each_row_has_what_was_its_own() -> None:
    generation = make([0, 2])
    kept = (SequenceBlocks(), 7)
    generation.kept_blocks[1] = kept
    assert generation.take_logits(LOGITS, {2: 4}) is None
    assert generation.can_split and not generation.is_done
    generation.split()
    first, second, third = generation.parts
    assert not generation.can_split and not generation.kept_blocks
    assert [part.rows for part in generation.parts] == [[row] for row in generation.rows]
    assert second.kept_blocks == {0: kept} and second.is_closed and not first.is_closed
    assert first.take_logits(None, {}) is None and second.take_logits(None, {}) is None
    found = third.take_logits(None, {})
    assert found is not None and torch.equal(found, LOGITS[4:5])
    first.close()
    assert not generation.is_done
    third.close()
    assert generation.is_done


def test_rows_of_one_request_are_never_split() -> None:
    generation = make([0, 1, 2], num_requests=1)
    assert len(generation.requests) == 1 and not generation.can_split


def test_what_is_closed_hands_out_nothing() -> None:
    generation = make([0, 1, 2])
    assert generation.take_logits(LOGITS, {0: 1}) is None
    generation.close()
    assert generation.is_done and generation.take_logits(None, {}) is None


def test_rows_go_on_one_by_one_all_at_once_for_who_looks_meanwhile() -> None:
    """The thread of a row's call may ask at any moment whether the row is done; the first row
    is."""
    generation = make([1, 2])

    class Looking(Rows):
        def __init__(self) -> None:
            super().__init__([0], 1)

        def __getattribute__(self, name: str) -> object:
            if name == "is_done" and is_splitting:
                assert not generation.is_done
            return super().__getattribute__(name)

    is_splitting: list[bool] = []
    parts = [Rows([], 1), Looking(), Looking()]
    is_splitting.append(True)
    generation.decoding.split = lambda: parts
    generation.split()
    assert [part.is_done for part in generation.parts] == [True, False, False]
