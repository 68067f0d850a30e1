"""Tests for a GPU are not lost where optional packages are missing, which no test module needs to
be imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collected import Collected, lost
from tests.support.tools import ROOT

# What a machine has that runs the package and its tests; `.ci/collect` installs no more.
REQUIRED = "accelerate hypothesis numpy psutil pytest safetensors torch transformers triton".split()
# required by these
REQUIRED += "_pytest filelock huggingface_hub packaging tokenizers tqdm".split()
REQUIRED += ["benchmarks", "hf_paged", "tests", *sys.stdlib_module_names]


def optional_imports(path: Path) -> Iterator[str]:
    """Packages imported at the top of a module before `pytest.importorskip` has found them."""
    present = set(REQUIRED)
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        else:
            names = []
            if "importorskip" in ast.unparse(statement):
                strings = (
                    node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)
                )
                present |= {value.partition(".")[0] for value in strings if isinstance(value, str)}
        yield from {name.partition(".")[0] for name in names} - present


@pytest.mark.slow
def test_modules_import_optional_packages_only_if_they_are_there() -> None:
    wrong = {path: [*optional_imports(path)] for path in (ROOT / "tests").rglob("*.py")}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_test_is_lost_unless_its_module_is_skipped() -> None:
    here = Collected(["tests/a.py::test_x[1]", "tests/a.py::test_y", "tests/b.py::test_z"], {})
    there = Collected(["tests/a.py::test_y"], {"tests/b.py": "could not import 'peft'"})
    assert lost(here, there) == ["tests/a.py::test_x[1]"] and lost(here, here) == []
