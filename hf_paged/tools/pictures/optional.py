"""Libraries that only pictures and tables need."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str) -> Any:
    """The module. Raises `ImportError`, naming the extra that brings it, where its library is not installed."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:  # it is there, and lacks something itself
            raise
        raise ImportError(f'this needs {library}: pip install "hf_paged[viz]"', name=library) from error
