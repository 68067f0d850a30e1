"""Detects changes of a model: cached keys and values and recorded graphs are valid while it has not
changed."""

from __future__ import annotations

import array
import ctypes
import datetime
import enum
import functools
import gc
import hashlib
import itertools
import logging
import marshal
import numbers
import operator
import pathlib
import random
import sys
import threading
import types
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import compat
from ..compiled import replaced_forward
from ..interrupts import is_interrupt
from ..kernels.hashing import hash_tensors
from ..topics import Topic
from .forwards import is_idle_hook

logger = logging.getLogger(__name__)

LINE = 64  # bytes of a cache line

SCALARS = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        types.NoneType,
    }
)
_NAMED = (type, types.ModuleType)
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
)
_TORCH_SCALARS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_MAX_DEPTH = 8  # of nested containers: some hold themselves
_MARSHAL_VERSION = 2  # its bytes depend on values alone; later versions look at reference counts
# Attributes that transformers sets on a model or its class as notes to itself.
NOTES = frozenset(
    {
        "_auto_class",
        "_can_set_attn_implementation_cached_value",
        "_can_set_experts_implementation_cached_value",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "warnings_issued",
    }
)
# Attributes that do not affect the forward: notes, where the model was loaded from, and what torch
# keeps in every module (parameters, buffers, modules and forward hooks are visited separately).
_IGNORED = {
    *vars(nn.Module()),
    "_compiled_call_impl",
    "name_or_path",
    compat.CACHED_MANAGER,
    *NOTES,
}
# Classes of these modules do loading, saving or generation; no forward depends on them.
_PLUMBING = (
    "abc",
    "builtins",
    "torch.nn.modules.module",
    "transformers.generation",
    "transformers.integrations",
    "transformers.modeling_utils",
    "transformers.utils",
)
# Objects of these packages, except modules, tensors and configs, do not affect a forward, and reach
# half the process.
_STANDARD = sys.stdlib_module_names - {"__main__", "types"}
_LIBRARIES = _STANDARD | {
    "accelerate",
    "hf_paged",
    "numpy",
    "peft",
    "torch",
    "transformers",
}
# Objects of the standard library that their text describes.
_SHOWN: tuple[type, ...] = (
    numbers.Number,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
    uuid.UUID,
    range,
    slice,
    ctypes._SimpleCData,
)
_CONTAINERS = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    deque,
    types.MappingProxyType,
)
# Values that differ between threads, and modules of the standard library whose functions give
# changing values.
_UNSEEN = (ContextVar, threading.local)
_REPRESENTED = (
    bool,
    int,
    float,
    str,
    np.generic,
    *_TORCH_SCALARS,
)
# What user classes and modules hold that is read, beside scalars.
_DATA: tuple[type, ...] = (
    *_CONTAINERS,
    types.SimpleNamespace,
    Tensor,
    np.ndarray,
    np.generic,
    bytearray,
    array.array,
    enum.Enum,
    *_TORCH_SCALARS,
    *_SHOWN,
    *_UNSEEN,
)
_CHANGING = {"contextvars", "random", "threading", "time"}
_ENVIRONMENT = {"environ", "getenv"}  # of `os`
# methods that no forward calls
_SETUP = {"__init__", "__init_subclass__", "__new__", "_init_weights"}
_MAX_PLAIN_OBJECTS = 1000  # most objects whose attributes are read
_MAX_ITEMS = 1000  # most items of a container that a closure or a Python module holds
_VERSION = operator.attrgetter("_version")

Modes = tuple[bool, ...]  # of a model's modules
_Values = tuple[tuple[Any, ...], bytes, list[bytes]]

ABSENT = object()  # stands for an attribute that is not there
# models whose failure to be read has been logged
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_unread: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, Modes], Any]]
_unread = weakref.WeakKeyDictionary()
"""Of modules: attributes that each forward writes and none reads, with the modes of the model's
modules in which this holds, and what a [`ModelState`] reads in their place."""
_carried: weakref.WeakKeyDictionary[nn.Module, dict[Modes, str]]
_carried = weakref.WeakKeyDictionary()
"""Of models: an attribute that forwards read and earlier ones wrote, by the modes of the
modules."""


def _modes(model: nn.Module) -> Modes:
    return tuple(module.training for module in model.modules())


def note_write(
    model: nn.Module,
    module: nn.Module,
    name: str,
    before: Any,
    is_read: bool,
) -> None:
    """Notes that in the present modes each forward of `model` writes this attribute, which was
    `before`. If no forward reads what another wrote, the attribute is not part of the model's
    state; else no prefix of the model is cached."""
    modes = _modes(model)
    if is_read:
        _carried.setdefault(model, {})[modes] = f"{type(module).__name__}.{name}"
    else:  # a value from before the first forward is the same in every process
        is_told = before is ABSENT or type(before) in SCALARS
        told = before if is_told else "written"
        notes = _unread.setdefault(module, {})
        notes.setdefault((name, modes), told)


def unread_names(module: nn.Module) -> set[str]:
    """Attributes that each forward writes and none reads, in some modes."""
    if module not in _unread:
        return set()
    return {name for name, _ in _unread[module]}


def carries_state(model: nn.Module) -> bool:
    """Whether forwards read what earlier ones wrote, so that a prefix depends on what ran before;
    logged once."""
    if model not in _carried:
        return False
    name = _carried[model].get(_modes(model))
    if name is None:
        return False
    _tell(model, f"its forward reads `{name}`, which earlier forwards wrote")
    return True


def _tell(model: nn.Module, reason: object) -> None:
    if model not in _told:
        _told.add(model)
        message = Topic.PREFIX_CACHE(
            "prefix caching is off for this %s, since changes of it cannot be detected: %s"
        )
        logger.warning(message, type(model).__name__, reason)


def read_state(model: nn.Module) -> ModelState | None:
    """The [`ModelState`] of `model` with its reference for `is_in_place`; `None` if it cannot be
    read."""
    try:
        state = ModelState(model)
        state.hold()
        return state
    except Exception as error:  # must not fail a call
        if is_interrupt(error):
            raise
        logger.debug("the state of %s cannot be read: %s", type(model).__name__, error)
        return None


def fingerprint(
    model: nn.Module,
    state: ModelState | None = None,
) -> bytes | None:
    """[`ModelState.fingerprint`] of the model as it is now; `None`, which is logged once, if it
    cannot be read or carries state. `state` saves reading it, if it has just been read."""
    try:
        if carries_state(model):
            return None
        if state is None:
            state = ModelState(model)
        return state.fingerprint()
    except Exception as error:  # operation missing for a dtype or device, out of memory, user code
        if is_interrupt(error):
            raise
        _tell(model, error)
        return None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: itself, or the parts named by its
    `__tensor_flatten__`."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names = tensor.__tensor_flatten__()[0]
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


class ModelState:
    """The state of a model that determines what its forward computes, read at construction. There
    are two questions to it: which content the tensors have (`fingerprint`), and, once other code
    could run, whether the model is still what it was when the references were taken (`is_same`).

    Covered: all parameters, buffers, tensors and arrays; attributes of modules and configs that are
    scalars, nested containers of scalars, objects of user classes or values of the standard
    library; functions and scalars of modules' classes; functions that replace or hook `forward`,
    with their closures; what user code reads by name: helper functions, globals of its modules,
    train or eval mode. Not covered: files, attributes of library objects, what each forward writes
    and none reads (`note_write`), and what `unseen` names. Equal models have equal fingerprints in
    every process with the same library versions and kind of device. Tensor subclasses are read by
    `__tensor_flatten__`; those without it, sparse tensors and meta tensors raise `ValueError`; user
    code may raise other errors."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []  # the distinct ones, which `structure` names by number
        self.objects: list[Any] = []  # modules, configs and plain objects, in the order met
        self._all_tensors: list[Tensor] = []  # including several views of the same memory
        self.unseen: str | None = None  # what user code reads whose changes cannot be seen
        self._tensor_numbers: dict[Any, int] = {}
        self._object_numbers: dict[int, int] = {}
        self._num_plain = 0
        self._kinds: set[type] = set()  # the classes met
        self._packages: set[str] = set()  # of user code
        # that code names
        self._names: set[str] = {"__call__", "__getattr__", "forward"}
        # of user classes, whose names no code has named yet
        self._methods: dict[str, list[Any]] = {}
        self._functions: list[Any] = []  # to be followed
        self._followed: set[Any] = set()
        self._reads_mode = False  # whether user code reads `training`
        self._closed: list[Any] = []  # what closures hold, which a hook may collect
        # What `is_same` reads again: modules' parameters, buffers and modules, where they have some
        self._tables: list[dict[str, Any]] = []
        self._num_parts = 0  # in `_tables`, and the places of those that no forward reads
        self._unread_places: list[int] = []
        # modules, dicts, lists, functions of user code, cells: what they refer to
        self._owners: list[Any] = []
        self._iterated: list[Iterable[Any]] = []  # dicts whose keys count, values behind proxies
        # with the names at the same places of `_global_names`
        self._globals: list[dict[str, Any]] = []
        self._global_names: list[str] = []
        self._arrays: list[Any] = []
        # references of `is_same`
        self._values: _Values | None = None
        self._content: tuple[Any, ...] | None = None
        self._training: Modes = ()
        if _unread:
            self._training = _modes(model)
        self._number(model)
        found: list[Any] = [self._value(hooks) for hooks in _GLOBAL_HOOKS]
        count = 0
        while count < len(self.objects) or self._functions:
            while count < len(self.objects):
                item = self.objects[count]
                found.append(self._object(item))
                count += 1
            if self._functions:
                function = self._functions.pop(0)
                found.append(self._follow(function))
        self._modules = [item for item in self.objects if isinstance(item, nn.Module)]
        self._modes = [module.training for module in self._modules]
        if self._reads_mode:
            found.append(self._modes)
        self.structure = marshal.dumps(found, _MARSHAL_VERSION)

    def fingerprint(self) -> bytes:
        """32 bytes that change with the covered state or the content of any tensor. Raises
        `ValueError` if something is `unseen`."""
        if self.unseen is not None:
            raise ValueError(self.unseen)
        with torch.no_grad():
            hashes = hash_tensors(self.tensors)
            return self._digest(hashes)

    def addresses(self) -> bytes:
        """As `fingerprint`, but with tensor addresses in place of content, every module's mode and
        the scalars that closures hold in containers and objects."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        return self._digest([addresses, self._modes, self._closed])

    def is_like(self, other: ModelState) -> bool:
        """Whether both states are of equal models: by `addresses`, and if both are watched also by
        what `watch` sees."""
        if self.addresses() != other.addresses():
            return False
        if self._content is None or other._content is None:
            return True
        if self._content != other._content:
            return False
        return _pointers(self._parts) == _pointers(other._parts)

    def hold(self) -> None:
        """Takes the reference of `is_in_place`. Keeps the tensors alive."""
        self._parts = self._read_parts()
        self._places = list(map(Tensor.data_ptr, self._all_tensors))
        self._is_doubted, self._is_in_place = False, True

    def keep_memory(self) -> None:
        """Keeps the tensors' memory, for recorded steps that do not ask `is_in_place` each time."""
        self._memory = [x.untyped_storage() for x in self._all_tensors]

    def doubt(self) -> None:
        """Notes that code has run that may have changed the model: its own, or other's."""
        self._is_doubted = True

    def is_in_place(self) -> bool:
        """Whether the model has the same modules and tensors as at `hold`, at the same addresses.
        Looks once after each `doubt`."""
        if self._is_doubted:
            self._is_doubted = False
            places = list(map(Tensor.data_ptr, self._all_tensors))
            parts = self._read_parts()
            has_parts = len(parts) == len(self._parts)
            has_parts = has_parts and _pointers(parts) == _pointers(self._parts)
            self._is_in_place = has_parts and places == self._places
        return self._is_in_place

    def accept(self) -> None:
        """Takes the reference of `is_same` for all but modules and tensors: before other code can
        run, and again after each forward, since what the model writes by itself is no change."""
        self._attributes = list(map(vars, self._modules))
        backwards = map(reversed, self._attributes)
        self._last_names = list(map(next, backwards))
        self._values = self._read_values()

    def watch(self) -> None:
        """Takes the reference of `is_same` for writes to tensors."""
        chance = random.Random(0)
        self._counted = [x for x in self._all_tensors if not x.is_inference()]
        on_cpu = [x for x in self.tensors if x.is_cpu and x.nbytes]
        self._lines = [_line(x, chance) for x in on_cpu]
        self._content = self._read_content()

    def is_same(self) -> bool:
        """Whether a check of microseconds finds the model as it was at `hold`, `accept` and, if it
        is watched, `watch`: the same modules and tensors at the same addresses; attributes, hooks,
        functions, closures and globals that are the same objects; tensors of the same versions, on
        the CPU with the same content in one cache line of each at a random place. Of writes that
        change neither version nor address it sees those to whole tensors, and may miss those to a
        few elements. If it finds a difference, the model may still be equal (`is_like`)."""
        self.doubt()
        if self._values is None or not self.is_in_place():
            return False
        # an attribute that was renamed is the last one
        has_names = map(operator.contains, self._attributes, self._last_names)
        if not all(has_names):
            return False
        values = self._read_values()
        if values is None or values[1:] != self._values[1:]:
            return False
        return self._content is None or self._read_content() == self._content

    def _read_parts(self) -> tuple[Any, ...]:
        if not self._unread_places:
            return tuple(gc.get_referents(*self._tables))
        tables = map(dict.values, self._tables)
        parts = list(itertools.chain.from_iterable(tables))
        for place in self._unread_places:
            parts[place : place + 1] = [None]
        return tuple(parts)

    def _read_values(self) -> _Values | None:
        """The values, their addresses and the content of arrays; `None` if that fails, since
        another thread changes them."""
        try:
            values = (
                *gc.get_referents(*self._owners),
                *itertools.chain.from_iterable(self._iterated),
                *map(operator.getitem, self._globals, self._global_names),
            )
            arrays = list(map(_content_of, self._arrays))
            return values, _pointers(values), arrays
        except Exception:
            return None

    def _read_content(self) -> tuple[list[int], bytes]:
        versions = list(map(_VERSION, self._counted))
        return versions, b"".join(self._lines)

    def _digest(self, content: list[Any]) -> bytes:
        state = self.structure + marshal.dumps(content, _MARSHAL_VERSION)
        return hashlib.blake2b(state, digest_size=32).digest()

    def _object(self, item: Any) -> tuple[Any, Any]:
        if isinstance(item, type):
            return "class", self._class(item)
        kind = self._class(type(item))
        self._owners.append(item)  # its class and slots
        if hasattr(item, "__dict__"):
            self._owners.append(vars(item))
        if isinstance(item, nn.Module):
            return kind, self._module(item)
        # a config's private attributes are notes of transformers
        is_config = hasattr(item, "to_dict")
        attributes = []
        for name, value in _attributes(item):
            is_note = is_config and name[:1] == "_"
            if not is_note:
                attributes.append((name, self._value(value)))
        return kind, attributes

    def _number(self, item: Any) -> int:
        count = len(self.objects)
        number = self._object_numbers.setdefault(id(item), count)
        if number == count:
            self.objects.append(item)
        return number

    def _class(self, kind: type) -> list[Any]:
        """The functions and scalars of a class and its bases, the first time it is met; also what
        user classes hold."""
        found: list[Any] = [kind.__qualname__]
        if kind in self._kinds:
            return found
        self._kinds.add(kind)
        for base in kind.__mro__:
            if base.__module__.startswith(_PLUMBING):
                continue
            self._owners += gc.get_referents(vars(base))  # the dict behind the proxy
            is_own = _is_users(base.__module__)
            if is_own:
                self._packages.add(_package(base.__module__))
            for name, value in vars(base).items():
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                if isinstance(value, types.FunctionType):
                    self._method(name, value)
                    found.append((name, self._function(value, 0)))
                elif name[:2] == "__" or name in NOTES:
                    continue
                elif type(value) in SCALARS or (is_own and isinstance(value, _DATA)):
                    found.append((name, self._value(value)))
        return found

    def _module(self, module: nn.Module) -> list[Any]:
        unread = self._unread_of(module)
        found: list[Any] = []
        for name, value in vars(module).items():
            if name in _IGNORED:
                continue
            value = unread.get(name, value)
            if name == "forward":
                replaced = replaced_forward(module)
                value = ABSENT if replaced is None else replaced
            if type(value) in SCALARS:
                found.append((name, value))
            elif name == "config" and hasattr(value, "to_dict"):
                found.append((name, self._number(value)))
            elif value is not ABSENT:
                found.append((name, self._value(value)))
        for held in (module._parameters, module._buffers, module._modules):
            if not held:
                self._owners.append(held)
            else:
                found += self._table(held, unread)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self._owners.append(hooks)
            for hook in hooks.values():
                if not is_idle_hook(hook):
                    found.append(("hook", self._value(hook)))
        return found

    def _table(
        self,
        held: dict[str, Any],
        unread: dict[str, Any],
    ) -> list[tuple[str, Any]]:
        """The parameters, buffers or modules that a module has."""
        is_dict = isinstance(held, dict)  # not in traced modules
        watched = self._tables if is_dict else self._owners
        watched.append(held)
        found = []
        for name, part in held.items():
            if name in unread:
                self._unread_places.append(self._num_parts)
                part = unread[name]
            self._num_parts += is_dict
            if part is not ABSENT:
                found.append((name, self._value(part)))
        return found

    def _unread_of(self, module: nn.Module) -> dict[str, Any]:
        if not self._training:
            return {}
        notes = _unread.get(module, {})
        return {name: value for (name, modes), value in notes.items() if modes == self._training}

    def _value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return "module", self._number(value)
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        if isinstance(value, enum.Enum):
            return kind.__qualname__, value.name
        if isinstance(value, _REPRESENTED):
            return kind.__qualname__, repr(value)
        if isinstance(value, (np.ndarray, bytearray, array.array)):
            return self._array(value)
        if depth == _MAX_DEPTH:  # functions may hold one another
            return "object", kind.__qualname__
        if isinstance(value, _FUNCTIONS):
            return self._callable(value, depth)
        if isinstance(value, (types.BuiltinFunctionType, *_NAMED)):
            return self._named(value)
        return self._other(value, depth)

    def _container(self, value: Any, depth: int) -> Any:
        self._watch_container(value)
        kind = type(value)
        if depth == _MAX_DEPTH:
            return kind.__qualname__, len(value)
        if isinstance(value, (dict, types.MappingProxyType)):
            value = [*itertools.chain.from_iterable(value.items())]
        items = [*value]  # a vocabulary may have millions
        if not SCALARS.issuperset(map(type, items)):
            items = [self._value(item, depth + 1) for item in items]
        if issubclass(kind, (set, frozenset)):
            items = sorted(items, key=repr)
        return kind.__qualname__, items

    def _array(self, value: Any) -> Any:
        self._arrays.append(value)
        value = np.asarray(value)
        if value.dtype.hasobject:
            return "array", self._value(value.tolist())
        data = np.ascontiguousarray(value).tobytes()
        content = hashlib.blake2b(data, digest_size=16).digest()
        return "array", str(value.dtype), value.shape, content

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            items = [value.func, value.args, value.keywords]
            parts = [self._value(item, depth + 1) for item in items]
            return "partial", parts
        if isinstance(value, types.MethodType):
            function = self._value(value.__func__, depth + 1)
            owner = self._value(value.__self__, depth + 1)
            return "method", function, owner
        self._functions.append(value)
        return self._function(value, depth)

    def _named(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "named", value.__name__
        if isinstance(value, type) and _is_users(value.__module__):
            return "class", self._number(value)
        return "named", value.__module__, value.__qualname__

    def _other(self, value: Any, depth: int) -> Any:
        """An object that is neither data nor code."""
        kind = type(value)
        if isinstance(value, _UNSEEN):
            self.unseen = f"its code reads a {kind.__qualname__}, which may change between steps"
            return "object", kind.__qualname__
        is_numbered = id(value) in self._object_numbers
        if _package(kind.__module__) in _STANDARD and not is_numbered:
            return "object", kind.__qualname__, self._standard(value, depth)
        is_users = _is_users(kind.__module__)
        is_read = is_users and self._num_plain < _MAX_PLAIN_OBJECTS
        if is_read or is_numbered:
            self._num_plain += not is_numbered
            return "object", self._number(value)
        return "object", self._called(value, depth)

    def _watch_container(self, value: Any) -> None:
        if isinstance(value, types.MappingProxyType):
            self._iterated.append(value.values())
        elif isinstance(value, (dict, list, set, deque)):
            self._owners.append(value)
            if isinstance(value, dict):
                self._iterated.append(value)

    def _standard(self, value: Any, depth: int) -> Any:
        """Describes an object of the standard library: by its text if that says all, else by its
        scalars."""
        if isinstance(value, _SHOWN):
            return repr(value)
        home = type(value).__module__
        if home == "collections" and hasattr(value, "__dict__"):
            # `UserDict`, `ChainMap`
            return self._value(vars(value), depth + 1)
        return self._called(value, depth), self._scalars(value)

    def _scalars(self, value: Any) -> Any:
        """The scalars in a container, or among an object's attributes; of other values the type."""
        held = value
        if not isinstance(value, _CONTAINERS):
            held = getattr(value, "__dict__", {})
        self._watch_container(held)
        items: Iterable[Any]
        if isinstance(held, (dict, types.MappingProxyType)):
            items = held.items()
        else:
            items = enumerate(held)
        scalars = []
        for key, item in itertools.islice(items, _MAX_ITEMS):
            if type(key) not in SCALARS:
                key = repr(type(key))
            if type(item) not in SCALARS:
                item = type(item).__qualname__
            scalars.append((key, item))
        return scalars

    def _function(self, function: Any, depth: int) -> Any:
        attributes = None
        if _is_users(_home(function)):
            self._owners.append(function)
            attributes = self._value(vars(function), depth + 1)
        defaults = (function.__defaults__, function.__kwdefaults__)
        defaults = self._value(defaults, depth + 1)
        closure = function.__closure__ or ()
        cells = [self._cell(cell, depth + 1) for cell in closure]
        return (
            "function",
            function.__qualname__,
            _code_hash(function.__code__),
            defaults,
            cells,
            attributes,
        )

    def _method(self, name: str, function: Any) -> None:
        """Notes a function of a class, to be followed once code names it."""
        if name in _SETUP:
            return
        if not _is_users(_home(function)):
            # library code calls what user classes override
            self._name(_names_of(function.__code__))
        elif name in self._names:
            self._functions.append(function)
        else:
            self._methods.setdefault(name, []).append(function)

    def _name(self, names: frozenset[str]) -> None:
        for name in sorted(names & self._methods.keys()):
            self._functions += self._methods.pop(name)
        self._names |= names

    def _follow(self, function: Any) -> Any:
        """Describes what a function of user code reads by name from its Python module."""
        if function in self._followed or not _is_users(_home(function)):
            return None
        self._followed.add(function)
        self._packages.add(_package(_home(function)))
        names = _names_of(function.__code__)
        space = function.__globals__
        self._reads_mode |= "training" in names
        self._name(names)
        read = sorted(names & space.keys())
        values = []
        for name in read:
            value = self._global(space, name, names)
            values.append((name, value))
        return values

    def _global(
        self,
        space: dict[str, Any],
        name: str,
        names: frozenset[str],
    ) -> Any:
        """Describes a global of user code; `names`: what the function that reads it names."""
        value = space[name]
        kind = type(space[name])
        is_module = isinstance(value, types.ModuleType)
        self._globals.append(space)
        self._global_names.append(name)
        owner = type(getattr(value, "__self__", None))  # of a method, as `random.random`
        if is_module:
            home = value.__name__
        else:
            home = getattr(value, "__module__", None) or owner.__module__
        reads_environment = home == "os" and bool(names & _ENVIRONMENT)
        is_changing = home in _CHANGING or reads_environment
        if is_changing and (is_module or callable(value)):
            self.unseen = f"its code reads {name!r}, whose values change"
        is_followed = _package(home) in self._packages
        if is_module:
            read: list[str] = []
            if is_followed and vars(value) is not space:
                read = sorted(names & vars(value).keys())
            parts = []
            for part in read:
                held = self._global(vars(value), part, names - {part})
                parts.append((part, held))
            return "module", home, parts
        if isinstance(value, type):
            if is_followed:
                return self._class(value)
            return self._value(value)
        if kind is types.FunctionType and not is_followed:
            return "function", value.__qualname__, _code_hash(value.__code__)
        is_data = (
            kind in SCALARS
            or isinstance(value, _DATA)
            or isinstance(value, (nn.Module, *_FUNCTIONS))
        )
        is_described = (
            is_data or callable(value) or is_followed or _package(kind.__module__) in _LIBRARIES
        )
        if is_described:
            is_large = isinstance(value, _CONTAINERS) and len(value) > _MAX_ITEMS
            if not is_large:
                if is_data or is_followed or not callable(value):
                    return self._value(value)
                return kind.__qualname__
        self.unseen = f"its code reads the global {name!r}, changes of which cannot be seen"
        return kind.__qualname__

    def _cell(self, cell: types.CellType, depth: int) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return "empty"
        self._owners.append(cell)
        kind = type(value)
        if kind in SCALARS:
            return self._value(value, depth)
        if isinstance(value, (Tensor, nn.Module, *_NAMED, *_FUNCTIONS, *_UNSEEN)):
            return self._value(value, depth)
        # other objects may be what a hook collects; these do not change what is cached
        if _package(kind.__module__) in _STANDARD or _is_users(kind.__module__):
            self._closed.append(self._scalars(value))
        return self._called(value, depth)

    def _called(self, value: Any, depth: int) -> Any:
        """Describes a library object: autocast, a wrapper around a function (as accelerate's), or
        its type alone."""
        kind = type(value)
        if kind is torch.autocast:
            return (
                kind.__qualname__,
                value.device,
                str(value.fast_dtype),
                value._enabled,
            )
        attributes = getattr(value, "__dict__", {})
        wrapped = attributes.get("__wrapped__")
        if wrapped is not None:
            wrapped = self._value(wrapped, depth + 1)
        return kind.__qualname__, wrapped

    def _tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind not in (nn.Parameter, Tensor):
            # a subclass, described by its parts
            if not hasattr(tensor, "__tensor_flatten__"):
                raise ValueError(
                    f"a tensor of type {kind.__qualname__}, which has no `__tensor_flatten__`"
                )
            names, context = tensor.__tensor_flatten__()
            parts = []
            for name in names:
                part = getattr(tensor, name)
                parts.append((name, self._value(part)))
            return (
                kind.__qualname__,
                str(tensor.dtype),
                tuple(tensor.shape),
                parts,
                self._value(context),
            )
        is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        if not is_plain:
            raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():  # views whose elements are computed on reading
            raise ValueError("a lazily conjugated or negated tensor")
        self._all_tensors.append(tensor)
        form = (
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.get_device(),
        )
        memory = (tensor.data_ptr(), form)
        number = self._tensor_numbers.setdefault(memory, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, form


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's `__dict__` and slots."""
    yield from getattr(item, "__dict__", {}).items()
    for name in _slots(type(item)):  # type: ignore[arg-type]
        if hasattr(item, name):
            yield name, getattr(item, name)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        if isinstance(slots, str):
            slots = (slots,)
        names += slots
    special = ("__dict__", "__weakref__")
    return tuple(name for name in names if name not in special)


_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)


def _pointers(values: tuple[Any, ...]) -> bytes:
    """The addresses of a tuple's items, as the tuple holds them: to compare identities at the speed
    of memory."""
    start = id(values) + tuple.__basicsize__
    items = (ctypes.c_void_p * len(values)).from_address(start)
    return bytes(items)


def _content_of(array: Any) -> bytes:
    return np.asarray(array).tobytes()


@functools.cache
def _package(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def _is_users(name: str) -> bool:
    """Whether a Python module of this name holds user code."""
    return _package(name) not in _LIBRARIES


def is_users_object(value: Any) -> bool:
    """Whether a value is an object of a user class, other than a module, tensor or class, with
    attributes."""
    if not _is_users(type(value).__module__):
        return False
    if isinstance(value, (nn.Module, Tensor, type, *_CONTAINERS)):
        return False
    return hasattr(value, "__dict__")


def _home(function: Any) -> str:
    """The name of the Python module whose globals a function reads; `__module__` may be that of a
    wrapped one."""
    return str(function.__globals__.get("__name__"))


@functools.lru_cache(maxsize=8192)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in code, and in functions, comprehensions and generators
    within it; also its short texts, which may name attributes."""
    texts: set[str] = set()
    inner: list[frozenset[str]] = []
    for constant in code.co_consts:
        if type(constant) is str and constant.isidentifier():
            texts.add(constant)
        elif isinstance(constant, types.CodeType):
            inner.append(_names_of(constant))
    return frozenset(texts.union(code.co_names, *inner))


@functools.lru_cache(maxsize=8192)
def _code_hash(code: types.CodeType) -> str:
    parts = _code_parts(code)
    encoded = marshal.dumps(parts, _MARSHAL_VERSION)
    return hashlib.sha256(encoded).hexdigest()


def _code_parts(value: Any) -> Any:
    """A function's code as values that are equal in every process: without file names or hash
    order."""
    if isinstance(value, types.CodeType):
        names = (
            value.co_names,
            value.co_varnames,
            value.co_freevars,
            value.co_cellvars,
        )
        counts = (
            value.co_argcount,
            value.co_posonlyargcount,
            value.co_kwonlyargcount,
            value.co_flags,
        )
        # from Python 3.11 on
        handlers = getattr(value, "co_exceptiontable", b"")
        return (
            value.co_code,
            handlers,
            names,
            counts,
            value.co_name,
            _code_parts(value.co_consts),
        )
    if isinstance(value, (tuple, frozenset)):
        parts = [_code_parts(item) for item in value]
        if isinstance(value, frozenset):
            parts = sorted(parts, key=repr)
        return type(value).__name__, parts
    if type(value) in SCALARS:
        return value
    return repr(value)


def _line(tensor: Tensor, chance: random.Random) -> memoryview:
    """Up to `LINE` bytes of the tensor's memory, at a random place; the view keeps the storage
    alive."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    # expanded tensors hold less than they have
    size = min(tensor.nbytes, storage.nbytes() - start)
    num_starts = max(1, size - LINE + 1)
    first = start + chance.randrange(num_starts)
    length = min(LINE, start + size - first)
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    line = empty.set_(storage, first, (length,))
    return memoryview(line.numpy())
