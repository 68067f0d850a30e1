"""The check by mutants: what it changes, and that a changed line is the one that tests reach."""

from __future__ import annotations

import ast

import pytest

from tests.support import mutants
from tests.support.house import ROOT

PATH = ROOT / "hf_paged" / "cache" / "block_pool.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", "a <= b"),
        ("a is None", "a is not None"),
        ("a + 1", "a - 1"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("3", "4"),
        ("a if b else c", "c if b else a"),
    ],
)
def test_what_a_mutant_changes(source: str, expected: str) -> None:
    made = mutants.changed(ast.parse(source, mode="eval").body)
    assert made is not None and ast.unparse(made) == expected


@pytest.mark.parametrize("source", ["True", "a", "f(x)", "'text'", "-a"])
def test_what_stays(source: str) -> None:
    assert mutants.changed(ast.parse(source, mode="eval").body) is None


def test_each_site_is_one_change_of_a_line_that_a_test_reaches() -> None:
    number = next(n for n, line in enumerate(PATH.read_text().splitlines(), 1) if " == " in line)
    found = list(mutants.sites({str(PATH): {number: ["tests/a.py::test_a|run"], number + 1: [""]}}))
    assert found and {(path, node.lineno) for path, node in found} == {(PATH, number)}
    for path, node in found:
        old, new = path.read_text().splitlines(), mutants.replaced(path, node).splitlines()
        ast.parse("\n".join(new))
        differing = [n for n, lines in enumerate(zip(old, new), 1) if lines[0] != lines[1]]
        assert differing == [number] and len(old) == len(new)
