"""The tests that a plain run leaves out are those that the files mark."""

from __future__ import annotations

import pytest

from tests.support import slow


@pytest.mark.parametrize(
    ("patterns", "but", "expected"),
    [
        (["*-beams", "t5-samples"], [], {"llama-beams", "t5-beams", "t5-samples"}),
        (["*-be"], [], set()),
        ([], ["llama-*"], {"t5-beams", "t5-samples", "cpu-[1, 2]"}),
        (["cpu-[1, 2]"], [], {"cpu-[1, 2]"}),
    ],
    ids=["patterns", "none", "but", "brackets"],
)
def test_cases_are_slow_by_patterns(
    patterns: list[str], but: list[str], expected: set[str]
) -> None:
    cases = ["llama-beams", "llama-samples", "t5-beams", "t5-samples", "cpu-[1, 2]"]
    assert {case for case in cases if slow.is_slow(case, patterns, but)} == expected


def test_an_eighth_of_slow_tests_is_kept() -> None:
    name = "tests/virtual/test_pages.py::test_cell"
    grid = [f"{name}[{row}-{column}]" for row in range(8) for column in range(4)]
    left = slow.left_to_full(grid)
    assert left < {*grid} and len(left) == 28
    # an order of the grid's own would leave columns out
    assert len({name[-2] for name in {*grid} - left}) > 1
    alone = [f"tests/test_load.py::test_{number}" for number in range(800)]
    assert 80 <= len({*alone} - slow.left_to_full(alone)) <= 120
