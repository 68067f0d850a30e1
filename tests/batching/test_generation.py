"""`Generation`: rows whose logits are gathered before they advance, and rows that advance one by
one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_paged.batching.generation import Generation
from hf_paged.batching.request import Request, Sequence


def make(*open_rows: int) -> Generation:
    rows: Any = SimpleNamespace(open_rows=open_rows, num_rows=3)
    return Generation(rows, [(Request(i, [Sequence([1])], 9), 0) for i in range(3)])


def test_logits_wait_for_those_of_the_other_rows_in_copies() -> None:
    generation, logits = make(0, 1, 2), torch.arange(12.0).view(6, 2)
    first = logits.clone()
    assert generation.take_logits(first, {2: 0}) is None
    first.fill_(-1)  # the next forward writes to the same memory
    assert generation.take_logits(logits, {1: 4, 2: 5}) is None, "row 0 has none"
    stacked = generation.take_logits(logits, {0: 3})
    assert stacked is not None and torch.equal(stacked, logits[[3, 4, 0]]), "what a row got first"
    assert generation.take_logits(None, {}) is None, "handed out once"


def test_rows_go_on_one_by_one_all_at_once_for_who_looks_meanwhile() -> None:
    """The thread of a row's call may ask at any moment whether the row is done; the first row
    is."""
    generation = make(1, 2)

    class Looking:
        @property
        def is_done(self) -> bool:
            assert not generation.is_done
            return False

    parts = [SimpleNamespace(is_done=True), Looking(), Looking()]
    generation.decoding.split = lambda: parts  # type: ignore[method-assign]
    generation.split()
    assert [part.is_done for part in generation.parts] == [True, False, False]
