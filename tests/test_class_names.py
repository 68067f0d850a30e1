"""A class name means one thing in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hf_paged"


def test_each_class_name_stands_for_one_class() -> None:
    sites = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                sites[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    shared = {name: classes for name, classes in sites.items() if len(classes) > 1}
    assert not shared
