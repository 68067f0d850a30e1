"""Hashes the code of functions, with the same result in every process. Also lists the names of
globals and attributes that code reads, and tells which code is the user's."""

from __future__ import annotations

import dis
import functools
import hashlib
import marshal
import sys
import types
from collections import deque
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
# Methods that forwards do not call.
_SETUP_METHODS = {"__init__", "__init_subclass__", "__new__", "_init_weights"}
# Modules of the standard library whose functions may return a different value in each call.
_VARYING_MODULES = {"contextvars", "random", "threading", "time"}
# by Python module, attributes with such values
_VARYING_ATTRIBUTES = {"numpy": {"random"}, "os": {"environ", "getenv"}}
# instructions that load a global and an attribute, in all versions of Python
_GLOBAL_LOADS = {"LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}


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


class Functions:
    """Collects the functions of user code whose globals must be described. A method is among them
    only once other code contains its name."""

    def __init__(self) -> None:
        self.pending = deque[Any]()  # functions whose globals are still to be described
        # names in the code read so far, and those of methods that PyTorch calls
        self._names = {"__call__", "__getattr__", "forward"}
        self._methods = dict[str, list[Any]]()  # by name: user code's methods not yet named by code

    def add_method(self, name: str, function: Any) -> None:
        """Adds a method of a class; for a library's method, adds only the names in its code."""
        if name in _SETUP_METHODS:
            return
        if not is_user_module(globals_module(function)):
            # a library's code may call methods that user classes override
            self.add_names(names_of(function.__code__))
        elif name in self._names:
            self.pending.append(function)
        else:
            self._methods.setdefault(name, []).append(function)

    def add_names(self, names: frozenset[str]) -> None:
        """Adds names that code reads; methods with these names become pending."""
        for name in sorted(names & self._methods.keys()):
            self.pending += self._methods.pop(name)
        self._names |= names


def module_of(value: Any) -> str:
    """The name of a module, or of the module that defines a class, a function or the class of an
    object."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    owner = type(getattr(value, "__self__", None))  # of a method, such as `random.random`
    return str(getattr(value, "__module__", None) or owner.__module__)


def varies(value: Any, code: types.CodeType) -> bool:
    """Whether a global that `code` reads may have or return a different value each time."""
    module_name = module_of(value)
    reads_varying = not names_of(code).isdisjoint(_VARYING_ATTRIBUTES.get(module_name, ()))
    is_of_module = module_name in _VARYING_MODULES or module_name.startswith("numpy.random")
    is_varying = is_of_module or reads_varying
    return is_varying and (isinstance(value, types.ModuleType) or callable(value))


def attributes_read(
    code: types.CodeType, path: tuple[str, ...], module: types.ModuleType
) -> list[str]:
    """The sorted names of the globals of `module` that `code` may read. `path`: the names by which
    the code accesses the module, such as `("package", "module")`. If the code only loads attributes
    of the module, returns their names. Otherwise, for instance if it passes the module on, any name
    in the code except those of the path may be that of a global."""
    chains = [chain[len(path) :] for chain in _chains_of(code) if chain[: len(path)] == path]
    names = {chain[0] for chain in chains if chain}
    if not chains or not all(chains):
        names = {*names_of(code)} - {*path}
    return sorted(names & vars(module).keys())


@functools.lru_cache(maxsize=8192)
def _chains_of(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """The chains of names that `code` and the code that it contains load: a global, then an
    attribute of it, then one of that attribute, and so on. The chain of `utils.ops.scale(x)` is
    `("utils", "ops", "scale")`."""
    chains = set[tuple[str, ...]]()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        if chain and instruction.opname in _ATTRIBUTE_LOADS:
            chain = (*chain, instruction.argval)
            continue
        if chain:
            chains.add(chain)
        chain = (instruction.argval,) if instruction.opname in _GLOBAL_LOADS else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            chains |= _chains_of(constant)
    return frozenset(chains)


def globals_read(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The globals that a function may read, and the modules that it imports by absolute names: the
    namespace and the name of each."""
    code = function.__code__
    parts = (function.__globals__, names_of(code)), (sys.modules, _imports_of(code))
    return [(owner, name) for owner, names in parts for name in sorted(names & owner.keys())]


@functools.lru_cache(maxsize=8192)
def _imports_of(code: types.CodeType) -> frozenset[str]:
    """The names of the modules that `code` and the code that it contains import."""
    names = set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _imports_of(constant)
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
