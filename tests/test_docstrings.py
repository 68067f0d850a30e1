"""Every item of a docstring's section begins a line, and its other lines are indented: the
reference lists lines, not sentences."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADS = {"Args:", "Attributes:", "Raises:", "Returns:"}
BEGINS = re.compile(r"[\w.]+(, [\w.]+)*( \(.+\))?:( |$)|`.+`: ")
"""A line that begins an item: names, mostly with a type; of `Returns:` a type alone."""
TYPED = re.compile(r"\w+\s+\(\[?`[^()]*(\([^()]*\)[^()]*)*\):\s|[\w.]*Error:\s")
"""A name with its type, or an error, wherever it stands."""


def sections(docstring: str) -> Iterator[list[str]]:
    """The lines of each section, without the section's indentation."""
    lines = inspect.cleandoc(docstring).splitlines()
    for number, line in enumerate(lines):
        if line not in HEADS:
            continue
        section = []
        for item in lines[number + 1 :]:
            if item and not item.startswith(" "):
                break
            section.append(item.removeprefix("    "))
        yield section


def misplaced(docstring: str) -> list[str]:
    """Items that do not begin a line, and lines that begin none and are not indented."""
    found = []
    for section in sections(docstring):
        lines = [line for line in section if line and not line.startswith("    ")]
        found += [line for line in lines if not BEGINS.match(line)]
        text = "\n".join(section)
        for item in TYPED.finditer(text):
            before = text[text.rfind("\n", 0, item.start()) + 1 : item.start()]
            if not re.fullmatch(r"([\w.]+, )*", before):
                found.append(before + item[0])
    return found


def test_items_of_sections_begin_a_line() -> None:
    found = []
    for path in sorted((ROOT / "hf_paged").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                for line in misplaced(ast.get_docstring(node) or ""):
                    found.append(f"{path.relative_to(ROOT)}: {node.name}: {line}")
    assert not found


@pytest.mark.parametrize(
    "items",
    [
        "first (`int`): One. second (`int`): Two.",
        "first (`int`): One. second\n        (`dict[str, int]`, *optional*): Two.",
        "first (`int`): One and\n    more.",
        "first: One. second: `(n,)`\n    int64.",
    ],
)
def test_a_joined_item_is_found(items: str) -> None:
    apart = (
        "first (`int`): One.\n    second, third (`tuple[int, ...]`, *optional*): Two\n        (2)."
    )
    assert not misplaced(f"Text.\n\nArgs:\n    {apart}\n")
    assert misplaced(f"Text.\n\nArgs:\n    {items}\n")
