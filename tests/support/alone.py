"""Runs tests without rooms: `python -m tests.support.alone [--without ROOM,ROOM] [options of
pytest]`.

A copy of the project loses the rooms' folders and their tests' (default: all rooms), and pytest
runs there. A test that asks for a missing room is skipped, with the room's name; the exit code is
pytest's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_paged.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("hf_paged", "tests", "examples", "docs", "benchmarks", "pyproject.toml", "README.md")

# Read at every start of Python. Without it an editable installation finds the missing rooms where
# the project stands.
NOT_INSTALLED = """
import sys

sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
"""


def take_away(root: Path, rooms: list[str]) -> None:
    """Deletes the rooms' modules and tests in the project at `root`."""
    for name in rooms:
        for folder in (root / "hf_paged", root / "tests"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / f"{name}.py").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without", default=",".join(ROOMS), help="rooms, with commas")
    arguments, options = parser.parse_known_args()
    rooms = arguments.without.split(",")
    if unknown := set(rooms) - set(ROOMS):
        parser.error(f"no room has the name {', '.join(sorted(unknown))}: rooms are {ROOMS}")
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)
        take_away(Path(folder), rooms)
        (Path(folder) / "sitecustomize.py").write_text(NOT_INSTALLED)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *options]
        variables = {**os.environ, "PYTHONPATH": folder}  # before the installed project
        sys.exit(subprocess.run(command, cwd=folder, env=variables).returncode)


if __name__ == "__main__":
    main()
