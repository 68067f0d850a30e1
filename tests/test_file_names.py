"""Files that code and tests name exist: one that only a GPU's tests run would be missed there
alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.triton import test_gpu_memcheck
from tests.support.rooms import needs_all_rooms

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "hf_paged", "tests")
PATH = rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/.-]*\w\.(?:py|md|txt|json|cpp|ipynb)(?![\w.*])"
NAMES = re.compile(rf"{PATH}|\btest_\w+\.py\b")
NO_FILES = {
    "benchmarks/peers/NAME.txt",  # a pattern
    "tests/generation/test_continuous_batching.py",  # transformers' own
    # of tests that make it up
    *("tests/a.py", "tests/b.py", "tests/virtual/test_pages.py", "test_other.py", "test_some.py"),
}


@needs_all_rooms
@pytest.mark.parametrize("folder", FOLDERS)
def test_files_that_python_code_names_exist(folder: str) -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in NAMES.findall(path.read_text())
        if not ((ROOT / name).exists() or name in tests or name in NO_FILES)
    ]
    assert not missing


def test_files_that_the_memory_checks_run_exist() -> None:
    assert test_gpu_memcheck.FILES and all(path.exists() for path in test_gpu_memcheck.FILES)
