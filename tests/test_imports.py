"""Imports between the packages of hf_paged point downward, modules have no import cycles, and a
class name means one thing."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hf_paged.rooms import ROOMS
from tests.support.rooms import needs_all_rooms

pytestmark = needs_all_rooms
PACKAGE = Path(__file__).parents[1] / "hf_paged"

PACKAGES = ("rooms", "generation", "batching", "model", "attention", "cache", "kernels", "base")
"""From the top down: a module imports from its own package and from those after it. Rooms stand
above the core, which imports none of them."""

# What is not in a folder of its package's name. The first that fits a module's name counts.
BASE = (
    "after_import compat compiled config forks interrupts plan rooms seams step switches threads"
    " timing topics weak_sets"
)
PLACES = {
    **dict.fromkeys(("", "__main__", "inspect", *ROOMS), "rooms"),
    **dict.fromkeys(BASE.split(), "base"),
}

NEIGHBOURS = {"tape": {"rectangles"}, "tools": {"grammar", "native"}}
"""The rooms that a room may import beside the core."""


def module_name(path: Path) -> str:
    """`""` for the package itself, `"cache.memory"` for `hf_paged/cache/memory.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    for place, name in PLACES.items():
        if module == place or (place and module.startswith(f"{place}.")):
            return name
    return module.partition(".")[0]


def imports(module: str) -> set[str]:
    """Our modules that the module imports when it runs, at its top or inside a function."""
    path = MODULES[module]
    parts = module.split(".") if module else []
    package = parts if path.name == "__init__.py" else parts[:-1]
    found: set[str] = set()
    for node in _running_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".") for alias in node.names]
            found.update(name for root, _, name in names if root == "hf_paged")
        elif isinstance(node, ast.ImportFrom):
            root, _, base = (node.module or "").partition(".")
            if node.level:
                above = package[: len(package) + 1 - node.level]
                base = ".".join([*above, *filter(None, [node.module])])
            elif root != "hf_paged":
                continue
            for alias in node.names:
                # a module of a package, or something that the module `base` defines
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in MODULES else base)
    return found


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _running_nodes(node)


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {module: imports(module) for module in MODULES}


@functools.cache
def pairs() -> set[tuple[str, str]]:
    return {(module, name) for module, names in all_imports().items() for name in names}


def test_every_import_is_found() -> None:
    assert {imported for _, imported in pairs()} <= set(MODULES)
    assert {package_of(module) for module in MODULES} <= set(PACKAGES)
    assert all_imports()["cache.prefix_index"] == {"cache.block_pool"}
    assert "config" in all_imports()[""] and len(pairs()) > 200


def test_imports_run_downward() -> None:
    rank = PACKAGES.index
    upward = [pair for pair in pairs() if rank(package_of(pair[1])) < rank(package_of(pair[0]))]
    assert not upward


def test_rooms_import_only_declared_rooms() -> None:
    found: dict[str, set[str]] = {}
    for pair in pairs():
        room, other = (module.partition(".")[0] for module in pair)
        if {room, other} <= set(ROOMS) and room != other:
            found.setdefault(room, set()).add(other)
    assert found == NEIGHBOURS


def test_no_circle() -> None:
    def reached(module: str) -> set[str]:
        seen, waiting = set[str](), set(all_imports()[module])
        while waiting:
            imported = waiting.pop()
            seen.add(imported)
            waiting |= all_imports()[imported] - seen
        return seen

    assert not [module for module in MODULES if module in reached(module)]


def test_each_class_name_stands_for_one_class() -> None:
    sites = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                sites[node.name].append(f"{module}:{node.lineno}")
    assert not {name: classes for name, classes in sites.items() if len(classes) > 1}
