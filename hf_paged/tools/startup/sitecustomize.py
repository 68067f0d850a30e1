"""Imports `hf_paged` in processes that `python -m hf_paged run` starts, as soon as they have
imported the modules of transformers that `hf_paged` patches. Python runs this file at startup
(`site`), since the command puts this folder on PYTHONPATH. (`opentelemetry-instrument` and
`ddtrace-run` use a `sitecustomize` in the same way.)"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))
# modules of transformers after whose import `hf_paged` is imported, since it patches them
REQUIRED_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")
SERVER = "transformers.cli.serving.server"


class ImportHook(MetaPathFinder):
    """Finds the `hf_paged` to which this file belongs, and imports it after the modules of
    `REQUIRED_MODULES`."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "hf_paged":
            init = os.path.join(PACKAGE, "__init__.py")
            return spec_from_file_location(name, init, submodule_search_locations=[PACKAGE])
        if name not in (*REQUIRED_MODULES, SERVER):
            return None
        specs = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            original_exec_module = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                original_exec_module(module)
                self.after_import(name)

            loader.exec_module = exec_module
        return spec

    def after_import(self, name: str) -> None:
        """Imports `hf_paged` if `name` was the last of `REQUIRED_MODULES` to be imported. If `name`
        is the server's module, replaces parts of the server instead, provided that
        `HF_PAGED_INSTALL` names `continuous_batching`."""
        if name == SERVER and "continuous_batching" in os.environ.get("HF_PAGED_INSTALL", ""):
            importlib.import_module("hf_paged.tools.serving").install()
        elif name != SERVER and all(
            required == name or is_imported(required) for required in REQUIRED_MODULES
        ):
            importlib.import_module("hf_paged")


def is_imported(name: str) -> bool:
    """Whether a module's import has finished."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def import_hidden_sitecustomize() -> None:
    """Imports the `sitecustomize` that this file hides, such as the system's, if there is one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    this_module = sys.modules.pop("sitecustomize", None)
    try:
        if find_spec("sitecustomize") is not None:
            importlib.import_module("sitecustomize")
    finally:
        if this_module is not None:
            sys.modules.setdefault("sitecustomize", this_module)


sys.meta_path.insert(0, ImportHook())
import_hidden_sitecustomize()
