"""Runs code after an optional library has been imported, but never imports the library itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

Action = Callable[[ModuleType], None]


class _AfterImport(NamedTuple):
    """A finder for the import system that runs an action after one module has been imported."""

    module_name: str
    action: Action

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module_name:
            return None
        finders = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                run(module)
                self.action(module)

            loader.exec_module = exec_module
        return spec


def after_import(name: str, action: Action) -> None:
    """Runs `action` on the module `name`: now if it has been imported, and whenever it is imported
    or reloaded later. If several actions are registered for one module, later imports run only the
    one that was registered last. Registering the same action again has no effect on them."""
    if name in sys.modules:
        action(import_module(name))  # waits if another thread is importing it
    finder = _AfterImport(name, action)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


def forget_import(name: str, action: Action) -> None:
    """Undoes `after_import` for later imports."""
    finder = _AfterImport(name, action)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
