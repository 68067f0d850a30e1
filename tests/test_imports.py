"""Imports between the packages of hf_paged point downward, and modules have no import cycles."""

from __future__ import annotations

import ast
import functools
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
PLACES = {
    "": "rooms",  # the package's door
    "__main__": "rooms",  # commands
    "inspect": "rooms",
    **dict.fromkeys(ROOMS, "rooms"),
    **dict.fromkeys(
        (
            "after_import",
            "compat",
            "compiled",
            "config",
            "forks",
            "interrupts",
            "plan",
            "rooms",
            "seams",
            "step",
            "switches",
            "threads",
            "timing",
            "topics",
            "weak_sets",
        ),
        "base",
    ),
}

NEIGHBOURS: dict[str, set[str]] = {
    "tape": {"rectangles"},
    "tools": {"grammar", "native"},
}
"""The rooms that a room may import beside the core."""

VIOLATIONS: dict[tuple[str, str], str] = {}
"""Imports from below to above that remain, with the reason of each."""


CIRCLES: dict[str, str] = {}
"""Modules that import themselves by way of others, with the reason of each."""


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
            names = [
                alias.name for alias in node.names if alias.name.partition(".")[0] == "hf_paged"
            ]
            found.update(name.partition(".")[2] for name in names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join(
                    [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
                )
            elif node.module is not None and node.module.partition(".")[0] == "hf_paged":
                base = node.module.partition(".")[2]
            else:
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


def test_every_import_is_found() -> None:
    found = all_imports()
    assert all(imported in MODULES for imports in found.values() for imported in imports)
    assert all(package_of(module) in PACKAGES for module in MODULES)
    assert found["cache.prefix_index"] == {"cache.block_pool"}
    assert "config" in found[""] and sum(map(len, found.values())) > 200


def test_imports_run_downward() -> None:
    rank = {name: place for place, name in enumerate(PACKAGES)}
    found = {
        (module, imported)
        for module, all_imported in all_imports().items()
        for imported in all_imported
        if rank[package_of(imported)] < rank[package_of(module)]
    }
    assert found == VIOLATIONS.keys()


def test_rooms_import_only_declared_rooms() -> None:
    found: dict[str, set[str]] = {}
    for module, all_imported in all_imports().items():
        name = module.partition(".")[0]
        others = {imported.partition(".")[0] for imported in all_imported} & set(ROOMS) - {name}
        if name in ROOMS and others:
            found.setdefault(name, set()).update(others)
    assert found == NEIGHBOURS


def test_no_circle() -> None:
    def reached(module: str) -> set[str]:
        seen, waiting = set[str](), set(all_imports()[module])
        while waiting:
            imported = waiting.pop()
            seen.add(imported)
            waiting |= all_imports()[imported] - seen
        return seen

    assert {module for module in MODULES if module in reached(module)} == CIRCLES.keys()
