"""Hashes the code of functions, equally in every process, and lists the names that it reads."""

from __future__ import annotations

import functools
import hashlib
import marshal
import types
from typing import Any

from .values import SCALARS

# Attributes of a code object, without file names and lines; Python has the table of exceptions from
# 3.11 on.
_PARTS = (
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
    """The name of the Python module whose globals a function reads; `__module__` may name that of a
    wrapped function."""
    return str(function.__globals__.get("__name__"))


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in code, and in the functions, comprehensions and
    generators inside it; also its strings that are identifiers, which may name attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is str and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=8192)
def code_hash(code: types.CodeType) -> str:
    # version 2 of the format does not depend on reference counts
    return hashlib.sha256(marshal.dumps(_described(code), 2)).hexdigest()


def _described(value: Any) -> Any:
    """Code, or a constant of it, as values that are equal in every process: sets have no hash
    order."""
    if isinstance(value, types.CodeType):
        return [_described(getattr(value, name, b"")) for name in _PARTS]
    if isinstance(value, (tuple, frozenset)):
        parts = [_described(item) for item in value]
        if isinstance(value, frozenset):
            parts = sorted(parts, key=repr)
        return type(value).__name__, parts
    if type(value) in SCALARS:
        return value
    return repr(value)
