"""Group specs: the tokens that layers keep of a sequence."""

from __future__ import annotations

import pytest

from hf_paged.cache.groups import UNBOUNDED, GroupSpec, StateSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.config import PagedConfig


def test_equal_specs_are_one_group() -> None:
    assert GroupSpec() == GroupSpec("self", None) != GroupSpec("cross")
    assert len({GroupSpec(), GroupSpec(window=8), GroupSpec("self", 8), StateSpec()}) == 3


@pytest.mark.parametrize(
    ("window", "first", "end", "chunk", "held", "expected"),
    [
        (None, 0, 17, 1, 0, 3),
        (None, 8, 17, 1, 1, 2),
        (9, 0, 100, 1, 0, 2),
        (10, 0, 100, 1, 0, 3),
        (8, 0, 100, 1, 2, 0),
        (8, 0, 100, 32, 0, 6),
    ],
)
def test_blocks_spanned(
    window: int | None, first: int, end: int, chunk: int, held: int, expected: int
) -> None:
    assert GroupSpec(window=window).num_spanned(first, end, chunk, held, 8) == expected


def test_a_state_is_one_slot() -> None:
    spec = StateSpec()
    size = PagedMemory(PagedConfig()).group(spec).block_size
    assert size == UNBOUNDED
    assert spec.num_spanned(0, 100_000, 1, 0, size) == 1 and spec.num_spanned(0, 0, 1, 0, size) == 0


def test_first_visible() -> None:
    assert [GroupSpec(window=4).first_visible(n) for n in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert GroupSpec().first_visible(9) == 0
