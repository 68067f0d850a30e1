"""Group specs: the tokens that layers keep of a sequence."""

from __future__ import annotations

import pytest

from hf_paged.cache.groups import GroupSpec


def test_equal_specs_are_one_group() -> None:
    assert GroupSpec() == GroupSpec("self", None) != GroupSpec("cross")
    assert len({GroupSpec(), GroupSpec(window=8), GroupSpec("self", 8)}) == 2


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


def test_first_visible() -> None:
    assert [GroupSpec(window=4).first_visible(n) for n in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert GroupSpec().first_visible(9) == 0
