"""Runs tests without rooms: `python -m tests.support.alone [--without ROOM,ROOM] [--least
N] [options of pytest]`.

A copy of the project loses the rooms' folders and their tests' (default: all rooms), and pytest
runs there. A test that asks for a missing room is skipped, with the room's name. The last line
counts the tests; the exit code is pytest's, or 1 if fewer than N tests passed.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from hf_paged.rooms import ROOMS
from tests.support import tools
from tests.support.tools import ROOT

NEEDED_BY = {"fingerprints": ["tape", "tiers"]}  # rooms that do nothing without another one
FOLDERS = ("hf_paged", "tests", "examples", "docs", "benchmarks", ".ci", ".github")

# Read at every start of Python, before the `sitecustomize` that it hides. Without it an editable
# installation finds the missing rooms where the project stands.
NOT_INSTALLED = """
import importlib.machinery
import importlib.util
import os
import sys

sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
folder = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != folder]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])
"""


def take_away(root: Path, rooms: list[str]) -> None:
    """Deletes the rooms' modules and tests in the project at `root`."""
    for name in rooms:
        for folder in (root / "hf_paged", root / "tests"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / f"{name}.py").unlink(missing_ok=True)


def main() -> None:
    given = {"without": (",".join(ROOMS), "rooms, with commas")}
    parser = tools.parser(__doc__, **given, least=(0, "tests that must pass"))
    arguments, options = parser.parse_known_args()
    rooms = arguments.without.split(",")
    if unknown := set(rooms) - set(ROOMS):
        parser.error(f"no room has the name {', '.join(sorted(unknown))}: rooms are {ROOMS}")
    rooms += sorted({other for name in rooms for other in NEEDED_BY.get(name, ())} - {*rooms})
    with tempfile.TemporaryDirectory() as folder:
        for source in ROOT.iterdir():
            target = Path(folder) / source.name
            if source.name in FOLDERS:
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copy(source, target)
        take_away(Path(folder), rooms)
        (Path(folder) / "sitecustomize.py").write_text(NOT_INSTALLED)
        command = tools.module("pytest", "-p", "no:cacheprovider", "-rfEs", *options)
        variables = {**os.environ, "PYTHONPATH": folder}  # before the installed project
        code, found = tools.run_counted(command, cwd=folder, env=variables)
    found["failed"] += found["error"] + found["errors"]
    told = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
    print(f"without {', '.join(rooms)}: {told}")
    if not code and found["passed"] < arguments.least:
        print(f"at least {arguments.least} tests must pass", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
