"""Hashes the code of functions, with the same result in every process, lists the names of globals
and attributes in the code, and tells whose code it is."""

from __future__ import annotations

import functools
import hashlib
import marshal
import sys
import types
from typing import Any

from ..model.values import SCALARS, is_user_module

MARSHAL_VERSION = 2  # the bytes of later versions also depend on reference counts
# Attributes of a code object, without its file name and line numbers. `co_exceptiontable` exists
# from Python 3.11 on.
_HASHED_ATTRIBUTES = (
    "co_code",
    "co_exceptiontable",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_name",
    "co_consts",
)


def globals_module(function: Any) -> str:
    """The name of the Python module whose globals a function reads. (The `__module__` of a wrapper
    may instead name the module of the wrapped function.)"""
    return str(function.__globals__.get("__name__"))


def is_source_module(name: str) -> bool:
    """Whether the Python module of this name is user code that is not installed in `site-packages`,
    such as a script, a notebook or another file beside it."""
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return is_user_module(name) and not any(
        folder in path for folder in ("site-packages", "dist-packages")
    )


def function_of(value: Any) -> Any:
    """The function of a method or property in a class; other values unchanged."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in `code` and in the functions, comprehensions and
    generators that it contains, and string constants that are identifiers, since code may read
    attributes of these names with `getattr`."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is str and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=8192)
def code_hash(code: types.CodeType) -> str:
    return hashlib.sha256(marshal.dumps(_describe(code), MARSHAL_VERSION)).hexdigest()


def _describe(value: Any) -> Any:
    """Converts code, or one of its constants, to values that are equal in every process. Sorts
    sets, since their order depends on hashes that differ between processes."""
    if isinstance(value, types.CodeType):
        return [_describe(getattr(value, name, b"")) for name in _HASHED_ATTRIBUTES]
    if isinstance(value, (tuple, frozenset)):
        parts = [_describe(item) for item in value]
        if isinstance(value, frozenset):
            parts = sorted(parts, key=repr)
        return type(value).__name__, parts
    if type(value) in SCALARS:
        return value
    return repr(value)
