"""Detects changes of a model: cached keys and values and recorded graphs are valid while it has not changed."""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import logging
import marshal
import operator
import random
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import compat
from ..compiled import replaced_forward
from ..kernels.hashing import hash_tensors
from .forwards import is_idle_hook

logger = logging.getLogger(__name__)

LINE = 64  # bytes of a cache line

_SCALARS = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_DEPTH = 8  # of nested containers: some hold themselves
_MARSHAL_VERSION = 2  # its bytes depend on values alone; later versions look at reference counts
# Attributes that transformers sets on a model or its class as notes to itself.
NOTES = frozenset(
    {
        *("_auto_class", "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value"),
        *("_is_hf_initialized", "_output_capturing_hooks_installed", "warnings_issued"),
    }
)
# Attributes that do not affect the forward: notes, where the model was loaded from, and what torch keeps in every
# module (parameters, buffers, modules and forward hooks are visited separately).
_IGNORED = {*vars(nn.Module()), "_compiled_call_impl", "name_or_path", compat.CACHED_MANAGER, *NOTES}
# Classes of these modules do loading, saving or generation; no forward depends on them.
_PLUMBING = (
    *("abc", "builtins", "torch.nn.modules.module", "transformers.generation", "transformers.integrations"),
    *("transformers.modeling_utils", "transformers.utils"),
)
# Objects of these packages, except modules, tensors and configs, do not affect a forward, and reach half the process.
_LIBRARIES = sys.stdlib_module_names - {"__main__", "types"}
_LIBRARIES |= {"accelerate", "hf_paged", "numpy", "peft", "torch", "transformers"}
_MAX_PLAIN_OBJECTS = 1000  # most objects whose attributes are read

_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose failure to be read has been logged


def read_state(model: nn.Module) -> ModelState | None:
    """The [`ModelState`] of `model`, without the content of its tensors; `None` if it cannot be read."""
    try:
        return ModelState(model)
    except Exception as error:  # must not fail a call
        logger.debug("the state of %s cannot be read: %s", type(model).__name__, error)
        return None


def fingerprint(model: nn.Module) -> bytes | None:
    """[`ModelState.fingerprint`] of the model as it is now; `None`, which is logged once, if it cannot be read."""
    try:
        return ModelState(model).fingerprint()
    except Exception as error:  # operation missing for a dtype or device, out of memory, user code
        if model not in _told:
            _told.add(model)
            message = "Prefix caching is off for this %s, since whether it changes cannot be read: %s"
            logger.warning(message, type(model).__name__, error)
        return None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: itself, or the parts named by its `__tensor_flatten__`."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


class ModelState:
    """The state of a model that determines what its forward computes, read at construction. Use it within the same
    window, in which no user code runs.

    Covered: all parameters, buffers, tensors and arrays; attributes of modules and configs that are scalars, nested
    containers of scalars or objects of user classes; functions and scalars of modules' classes; functions that replace
    or hook `forward`, with their closures; train or eval mode where user code reads it. Not covered: globals of Python
    modules, files, attributes of library objects.
    Equal models have equal fingerprints in every process with the same library versions and kind of device. Tensor
    subclasses are read by `__tensor_flatten__`; those without it, sparse tensors and meta tensors raise `ValueError`;
    user code may raise other errors."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []  # the distinct ones, which `structure` names by number
        self.objects: list[Any] = []  # modules, configs and plain objects, in the order met
        self._all_tensors: list[Tensor] = []  # including several views of the same memory
        self._tensor_numbers: dict[Any, int] = {}
        self._object_numbers: dict[int, int] = {}
        self._num_plain = 0
        self._looks_at_mode: dict[type, bool] = {}  # of the classes met: whether their code reads `training`
        self._number(model)
        found = list(map(self._object, self.objects))  # `objects` grows meanwhile
        self.structure = marshal.dumps(found, _MARSHAL_VERSION)
        self._modules = [item for item in self.objects if isinstance(item, nn.Module)]

    def fingerprint(self) -> bytes:
        """32 bytes that change with the covered state or the content of any tensor."""
        with torch.no_grad():
            return self._digest(hash_tensors(self.tensors))

    def addresses(self) -> bytes:
        """As `fingerprint`, but with tensor addresses in place of content, and every module's mode."""
        return self._digest([[x.data_ptr() for x in self.tensors], [module.training for module in self._modules]])

    def _digest(self, content: list[Any]) -> bytes:
        return hashlib.blake2b(self.structure + marshal.dumps(content, _MARSHAL_VERSION), digest_size=32).digest()

    def hold(self) -> None:
        """Sets the reference for `is_in_place` to the model as it is now. Keeps the memory of the tensors alive."""
        tables = (x for module in self._modules for x in (module._modules, module._parameters, module._buffers))
        self._held = [held for held in tables if held]
        self._parts = [part for held in self._held for part in held.values()]  # kept, so that addresses are not reused
        self._places = [part.data_ptr() for part in self._parts if isinstance(part, Tensor)]

    def is_in_place(self) -> bool:
        """Whether the model has the same modules and tensors as at `hold`, at the same addresses."""
        parts = [part for held in self._held for part in held.values()]
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return False
        return [part.data_ptr() for part in parts if isinstance(part, Tensor)] == self._places

    def watch(self) -> None:
        """Sets the reference for `is_same` to the model as it is now. Keeps the memory of the tensors alive."""
        modules, chance = self._modules, random.Random(0)
        self.hold()
        adapters = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
        self._layers = [vars(x) for x in modules if any(name in vars(x) for name in adapters)]
        self._counted = [x for x in self._all_tensors if not x.is_inference()]
        self._lines = [_line(x, chance) for x in self.tensors if x.is_cpu and x.nbytes]
        self._content = self._read_content()

    def is_same(self) -> bool:
        """Whether a check of microseconds finds the model as it was at `watch`: its modules, tensor versions and
        addresses, on the CPU one cache line of each tensor at a random place, and the active adapters. Of writes that
        change neither version nor address it sees those to whole tensors, and may miss those to a few elements."""
        return self._read_content() == self._content

    def _read_content(self) -> tuple[Any, ...]:
        adapters = [
            (str(layer.get("_active_adapter")), layer.get("_disable_adapters"), str(layer.get("merged_adapters")))
            for layer in self._layers
        ]
        parts = [id(part) for held in self._held for part in held.values()]
        versions, places = [x._version for x in self._counted], list(map(Tensor.data_ptr, self._all_tensors))
        return parts, versions, places, adapters, b"".join(self._lines)

    def _object(self, item: Any) -> tuple[Any, Any]:
        kind = self._class(type(item))
        if isinstance(item, nn.Module):
            return kind, self._module(item)
        is_config = hasattr(item, "to_dict")  # a config's private attributes are notes of transformers
        return kind, [(n, self._value(value)) for n, value in _attributes(item) if not (is_config and n[:1] == "_")]

    def _number(self, item: Any) -> int:
        number = self._object_numbers.setdefault(id(item), len(self.objects))
        if number == len(self.objects):
            self.objects.append(item)
        return number

    def _class(self, kind: type) -> list[Any]:
        """The functions and scalars of a class and its bases, the first time it is met."""
        found: list[Any] = [kind.__qualname__]
        if kind in self._looks_at_mode:
            return found
        self._looks_at_mode[kind] = False
        for base in kind.__mro__:
            if base.__module__.startswith(_PLUMBING):
                continue
            is_own = base.__module__.partition(".")[0] not in _LIBRARIES
            for name, value in vars(base).items():
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                if isinstance(value, types.FunctionType):
                    self._looks_at_mode[kind] |= is_own and "training" in value.__code__.co_names
                    found.append((name, self._value(value)))
                elif type(value) in _SCALARS and name[:2] != "__" and name not in NOTES:
                    found.append((name, value))
        return found

    def _module(self, module: nn.Module) -> list[Any]:
        found: list[Any] = [module.training if self._looks_at_mode[type(module)] else None]
        for name, value in vars(module).items():
            if name == "forward":
                value = replaced_forward(module)
            if name in _IGNORED or (name == "forward" and value is None):
                continue
            if type(value) not in _SCALARS:
                value = self._number(value) if name == "config" and hasattr(value, "to_dict") else self._value(value)
            found.append((name, value))
        for held in (module._parameters, module._buffers, module._modules):
            found += [(name, self._value(value)) for name, value in held.items()]
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return [*found, *(("hook", self._value(hook)) for hook in hooks if not is_idle_hook(hook))]

    def _value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return "module", self._number(value)
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            if depth == _MAX_DEPTH:
                return kind.__qualname__, len(value)
            if isinstance(value, dict):
                value = value.items()
            items = [self._value(item, depth + 1) for item in value]
            return kind.__qualname__, sorted(items, key=repr) if issubclass(kind, (set, frozenset)) else items
        if isinstance(value, enum.Enum):
            return kind.__qualname__, value.name
        if isinstance(value, (bool, int, float, str, np.generic, *_TORCH_SCALARS)):
            return kind.__qualname__, repr(value)
        if isinstance(value, (np.ndarray, bytearray, array.array)):
            value = np.asarray(value)
            if value.dtype.hasobject:
                return "array", self._value(value.tolist())
            content = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
            return "array", str(value.dtype), value.shape, content
        if depth == _MAX_DEPTH:  # functions may hold one another
            return "object", kind.__qualname__
        if isinstance(value, functools.partial):
            return "partial", [self._value(item, depth + 1) for item in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return "method", self._value(value.__func__, depth + 1), self._value(value.__self__, depth + 1)
        if isinstance(value, types.FunctionType):
            defaults = self._value((value.__defaults__, value.__kwdefaults__), depth + 1)
            cells = [self._cell(cell, depth + 1) for cell in value.__closure__ or ()]
            return "function", value.__qualname__, _code_hash(value.__code__), defaults, cells
        if isinstance(value, (types.BuiltinFunctionType, type)):
            return "named", value.__module__, value.__qualname__
        is_read = kind.__module__.partition(".")[0] not in _LIBRARIES and self._num_plain < _MAX_PLAIN_OBJECTS
        if is_read or id(value) in self._object_numbers:
            self._num_plain += id(value) not in self._object_numbers
            return "object", self._number(value)
        return "object", self._called(value, depth)

    def _cell(self, cell: types.CellType, depth: int) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return "empty"
        # other objects may be what a hook collects; they do not affect the forward
        if type(value) in _SCALARS or isinstance(value, (Tensor, nn.Module, *_FUNCTIONS)):
            return self._value(value, depth)
        return self._called(value, depth)

    def _called(self, value: Any, depth: int) -> Any:
        """Describes a library object: autocast, a wrapper around a function (as accelerate's), or its type alone."""
        kind = type(value)
        if kind is torch.autocast:
            return kind.__qualname__, value.device, str(value.fast_dtype), value._enabled
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        return kind.__qualname__, None if wrapped is None else self._value(wrapped, depth + 1)

    def _tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind not in (nn.Parameter, Tensor):  # a subclass, described by its parts
            if not hasattr(tensor, "__tensor_flatten__"):
                raise ValueError(f"a tensor of type {kind.__qualname__}, which has no `__tensor_flatten__`")
            names, context = tensor.__tensor_flatten__()
            parts = [(name, self._value(getattr(tensor, name))) for name in names]
            return kind.__qualname__, str(tensor.dtype), tuple(tensor.shape), parts, self._value(context)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():  # views whose elements are computed on reading
            raise ValueError("a lazily conjugated or negated tensor")
        self._all_tensors.append(tensor)
        form = (str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.get_device())
        number = self._tensor_numbers.setdefault((tensor.data_ptr(), form), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, form


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's `__dict__` and slots."""
    yield from getattr(item, "__dict__", {}).items()
    for base in type(item).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                yield name, getattr(item, name)


@functools.lru_cache(maxsize=8192)
def _code_hash(code: types.CodeType) -> str:
    return hashlib.sha256(marshal.dumps(_code_parts(code), _MARSHAL_VERSION)).hexdigest()


def _code_parts(value: Any) -> Any:
    """A function's code as values that are equal in every process: without file names or hash order."""
    if isinstance(value, types.CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
        handlers = getattr(value, "co_exceptiontable", b"")  # from Python 3.11 on
        return value.co_code, handlers, names, counts, value.co_name, _code_parts(value.co_consts)
    if isinstance(value, (tuple, frozenset)):
        parts = [_code_parts(item) for item in value]
        return type(value).__name__, sorted(parts, key=repr) if isinstance(value, frozenset) else parts
    return value if type(value) in _SCALARS else repr(value)


def _line(tensor: Tensor, chance: random.Random) -> memoryview:
    """Up to `LINE` bytes of the tensor's memory, at a random place; the view keeps the storage alive."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    size = min(tensor.nbytes, storage.nbytes() - start)  # expanded tensors hold less than they have
    first = start + chance.randrange(max(1, size - LINE + 1))
    found = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, first, (min(LINE, start + size - first),))
    return memoryview(found.numpy())
