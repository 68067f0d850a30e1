"""Whether a model is what it was: as long as it is, keys and values that are cached and recorded graphs may be used."""

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
from ..kernels.hashing import hash_tensors
from .forwards import is_idle_hook

logger = logging.getLogger(__name__)

LINE = 64  # bytes of a cache line

_SCALARS = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_DEPTH = 8  # of nested containers: some hold themselves
_MARSHAL_VERSION = 2  # bytes that depend on the values alone; later versions look at reference counts
# Notes that transformers leaves on a model the first time it does something.
NOTES = frozenset({"_is_hf_initialized", "_output_capturing_hooks_installed", "warnings_issued"})
# Not part of what the forward computes: these, and what torch keeps in every module (parameters, buffers, modules and
# forward hooks are visited by themselves).
# Nor is where the model was loaded from.
_IGNORED = {*vars(nn.Module()), "_compiled_call_impl", "name_or_path", compat.CACHED_MANAGER, *NOTES}
# Classes of these modules hold what no forward computes: loading, saving, generation.
_PLUMBING = (
    *("abc", "builtins", "torch.nn.modules.module", "transformers.generation", "transformers.integrations"),
    *("transformers.modeling_utils", "transformers.utils"),
)
# Objects of these packages that are no modules, tensors or configs say nothing of a forward, and hold half the process.
_LIBRARIES = sys.stdlib_module_names - {"__main__", "types"}
_LIBRARIES |= {"accelerate", "hf_paged", "numpy", "peft", "torch", "transformers"}
_MAX_PLAIN_OBJECTS = 1000  # of which the attributes are read

_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that cannot be read, once that is said


def read_state(model: nn.Module) -> ModelState | None:
    """Everything about `model` but the content of its tensors; `None` if some of it cannot be read."""
    try:
        return ModelState(model)
    except Exception as error:  # reading a model's state fails no call
        logger.debug("the state of %s cannot be read: %s", type(model).__name__, error)
        return None


def fingerprint(model: nn.Module) -> bytes | None:
    """[`ModelState.fingerprint`] of the model as it is now; `None`, which is logged once, if it cannot be read."""
    try:
        return ModelState(model).fingerprint()
    except Exception as error:  # no such operation for a dtype or a device, no memory, code of the user's
        if model not in _told:
            _told.add(model)
            message = "Prefix caching is off for this %s, since whether it changes cannot be read: %s"
            logger.warning(message, type(model).__name__, error)
        return None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Those that a tensor consists of: itself, unless it is of a subclass that tells others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


class ModelState:
    """What of a model decides what its forward computes, read now; it is asked within the same window, in which no code
    of the user's runs. Covered are all parameters, buffers, tensors and arrays; attributes of modules and configs that
    are scalars, nested containers of them or objects of the user's own classes; functions and scalars of modules'
    classes; functions that replace `forward` or hook into it, with what they close over; train or eval mode where code
    of the user's own looks at it. Not covered: globals of Python modules, files, attributes of libraries' objects.
    The fingerprint of the same model is the same in every process with these versions of the libraries, on the same
    kind of device. Subclasses of `Tensor` are read by `__tensor_flatten__`; those without it, sparse
    tensors and those without content (meta) raise `ValueError`, and code of the user's may raise others."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []  # the distinct ones, which `structure` names by number
        self.objects: list[Any] = []  # modules, configs and plain objects, in the order met
        self._all_tensors: list[Tensor] = []  # those that are views of the same memory among them
        self._tensor_numbers: dict[Any, int] = {}
        self._object_numbers: dict[int, int] = {}
        self._num_plain = 0
        self._looks_at_mode: dict[type, bool] = {}  # of the classes met: whether their code reads `training`
        self._number(model)
        found = list(map(self._object, self.objects))  # which grow on the way
        self.structure = marshal.dumps(found, _MARSHAL_VERSION)
        self._modules = [item for item in self.objects if isinstance(item, nn.Module)]

    def fingerprint(self) -> bytes:
        """32 bytes that are the same as long as all that is covered and the content of all tensors is."""
        with torch.no_grad():
            return self._digest(hash_tensors(self.tensors))

    def addresses(self) -> bytes:
        """As `fingerprint`, of the addresses of tensors in place of their content, and every module's mode."""
        return self._digest([[x.data_ptr() for x in self.tensors], [module.training for module in self._modules]])

    def _digest(self, content: list[Any]) -> bytes:
        return hashlib.blake2b(self.structure + marshal.dumps(content, _MARSHAL_VERSION), digest_size=32).digest()

    def hold(self) -> None:
        """`is_in_place` compares with the model as it is now. Holds the memory of the tensors."""
        tables = (x for module in self._modules for x in (module._modules, module._parameters, module._buffers))
        self._held = [held for held in tables if held]
        self._parts = [part for held in self._held for part in held.values()]  # so that no others get their addresses
        self._places = [part.data_ptr() for part in self._parts if isinstance(part, Tensor)]

    def is_in_place(self) -> bool:
        """Whether the model has the modules and tensors that it had at `hold`, and these are where they were."""
        parts = [part for held in self._held for part in held.values()]
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return False
        return [part.data_ptr() for part in parts if isinstance(part, Tensor)] == self._places

    def watch(self) -> None:
        """`is_same` compares with the model as it is now. Holds the memory of the tensors."""
        modules, chance = self._modules, random.Random(0)
        self.hold()
        adapters = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
        self._layers = [vars(x) for x in modules if any(name in vars(x) for name in adapters)]
        self._counted = [x for x in self._all_tensors if not x.is_inference()]
        self._lines = [_line(x, chance) for x in self.tensors if x.is_cpu and x.nbytes]
        self._content = self._read_content()

    def is_same(self) -> bool:
        """Whether a look of microseconds finds the model as it was at `watch`: its modules, the versions and addresses
        of its tensors, on the CPU one cache line of each at a random place, and the active adapters. Of writes that
        move neither version nor address it sees those to whole tensors, and may miss those to a few elements."""
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
        is_config = hasattr(item, "to_dict")  # whose private attributes are transformers' own notes
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
                elif type(value) in _SCALARS and name[:2] != "__":
                    found.append((name, value))
        return found

    def _module(self, module: nn.Module) -> list[Any]:
        found: list[Any] = [module.training if self._looks_at_mode[type(module)] else None]
        for name, value in vars(module).items():
            if name in _IGNORED:
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
        # other objects may be what a hook collects, which says nothing of the forward
        if type(value) in _SCALARS or isinstance(value, (Tensor, nn.Module, *_FUNCTIONS)):
            return self._value(value, depth)
        return self._called(value, depth)

    def _called(self, value: Any, depth: int) -> Any:
        """An object of a library's, which may be a wrapper around a function, as accelerate's are, or autocast."""
        kind = type(value)
        if kind is torch.autocast:
            return kind.__qualname__, value.device, str(value.fast_dtype), value._enabled
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        return kind.__qualname__, None if wrapped is None else self._value(wrapped, depth + 1)

    def _tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind not in (nn.Parameter, Tensor):  # a subclass, by the tensors that it says it consists of
            if not hasattr(tensor, "__tensor_flatten__"):
                raise ValueError(f"a tensor of type {kind.__qualname__}, which has no `__tensor_flatten__`")
            names, context = tensor.__tensor_flatten__()
            parts = [(name, self._value(getattr(tensor, name))) for name in names]
            return kind.__qualname__, str(tensor.dtype), tuple(tensor.shape), parts, self._value(context)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():  # views that are computed when they are read
            raise ValueError("a lazily conjugated or negated tensor")
        self._all_tensors.append(tensor)
        form = (str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.get_device())
        number = self._tensor_numbers.setdefault((tensor.data_ptr(), form), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, form


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Of a plain object: those in its `__dict__` and its slots."""
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
    """What a function's code does, as values that any process finds: not where its file is, in no order of hashes."""
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
    """Up to `LINE` bytes of the tensor's memory, which stays where it is as long as they are held."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    size = min(tensor.nbytes, storage.nbytes() - start)  # expanded tensors hold less than they have
    first = start + chance.randrange(max(1, size - LINE + 1))
    found = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, first, (min(LINE, start + size - first),))
    return memoryview(found.numpy())
