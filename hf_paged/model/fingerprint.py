"""
A fingerprint of all that decides what a model's forward computes: K/V of an earlier call may be served as long as it
stays the same.

`Tensor._version` and `data_ptr` prove a change but not its absence: fused optimizers, `p.data.copy_` and writes through
numpy move neither. So the bytes are read, which takes about as long as one decode step reads them.
"""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import logging
import marshal
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels import cpp

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Bytes that the portable hash reads at once; it takes some four times as much for its intermediate results."""

_SCALARS = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
_TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_DEPTH = 8  # of nested containers: some hold themselves
_MARSHAL_VERSION = 2  # bytes that depend on the values alone; later versions look at reference counts
# Not part of what the forward computes: what torch keeps in every module (parameters, buffers, modules and forward
# hooks are visited by themselves), and notes that transformers leaves on a model the first time it does something.
_IGNORED = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_is_hf_initialized",
    "_output_capturing_hooks_installed",
    "warnings_issued",
}
_OBSERVERS = frozenset({"transformers.utils.output_capturing"})  # modules whose hooks only look
# Classes of these modules hold what no forward computes: loading, saving, generation.
_PLUMBING = (
    *("abc", "builtins", "torch.nn.modules.module", "transformers.generation", "transformers.integrations"),
    *("transformers.modeling_utils", "transformers.utils"),
)
# Objects of these packages that are no modules, tensors or configs say nothing of a forward, and hold half the process.
_LIBRARIES = sys.stdlib_module_names - {"__main__", "types"} | {"accelerate", "numpy", "peft", "torch", "transformers"}
_MAX_PLAIN_OBJECTS = 1000  # of which the attributes are read

_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that cannot be read, once that is said


def read_state(model: nn.Module) -> ModelState | None:
    """Everything about `model` but the content of its tensors; `None` if some of it cannot be read."""
    try:
        return ModelState(model)
    except Exception as error:  # reading a model's state fails no call
        logger.debug("the state of %s cannot be read: %s", type(model).__name__, error)
        return None


def addresses(model: nn.Module, state: ModelState) -> bytes:
    """
    32 bytes that are the same as long as every tensor of `model` is where it is, and all else that `fingerprint`
    covers, and train or eval mode, is what it is. The content of the tensors may be another.
    """
    found = state.structure, [x.data_ptr() for x in state.tensors], [module.training for module in model.modules()]
    return hashlib.blake2b(marshal.dumps(found, _MARSHAL_VERSION), digest_size=32).digest()


def fingerprint(model: nn.Module, state: ModelState | None = None) -> bytes | None:
    """
    32 bytes that are the same as long as the model is, or `None` if it cannot be read, which is said once for each
    model; nothing may be served then.

    Covered are names, shapes, dtypes and the content of all parameters, buffers, tensors and arrays that are plain
    attributes; all attributes of modules and configs that are Python scalars, nested containers of them (the active,
    disabled and merged adapters of PEFT among them) or objects of the user's own classes; the functions and scalars of
    modules' classes; functions that replace `forward` or hook into it, with the scalars, tensors and functions they
    close over; train or eval mode where code of the user's own classes looks at it. Not covered is what such code
    reads elsewhere: globals of Python modules, files, attributes of objects that libraries made.

    Tensors that are tied are read once. Subclasses of `Tensor` (quantised or sharded weights) are read by
    `__tensor_flatten__`; those without it, sparse tensors and those without content (meta) cannot be read. Comparable
    within one process only.

    Args:
        state ([`ModelState`], *optional*): What `read_state` returned just now.
    """
    try:
        if state is None:
            state = ModelState(model)
        with torch.no_grad():
            content = _hash_tensors([_dense(tensor) for tensor in state.tensors])
    except Exception as error:  # no such operation for a dtype or a device, no memory, code of the user's
        if model not in _told:
            _told.add(model)
            logger.warning(
                "Prefix caching is off for this %s, since whether it changes cannot be read: %s",
                type(model).__name__,
                error,
            )
        return None
    return hashlib.blake2b(marshal.dumps((state.structure, content), _MARSHAL_VERSION), digest_size=32).digest()


class _UnreadableError(Exception):
    """Something in the model has content that cannot be read."""


class ModelState:
    """
    What a walk over a model finds.

    Attributes:
        structure (`list`): Everything but the content of tensors, as plain nested lists.
        tensors (`list[torch.Tensor]`): The distinct tensors that `structure` names by number.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self._tensor_numbers: dict[Any, int] = {}
        self._objects: list[Any] = []  # modules, configs and plain objects, in the order met
        self._object_numbers: dict[int, int] = {}
        self._num_plain = 0
        self._looks_at_mode: dict[type, bool] = {}  # of the classes met: whether their code reads `training`
        self.structure = self._read(model)

    def _read(self, model: nn.Module) -> list[Any]:
        self._number(model)
        found = []
        for item in self._objects:  # grows on the way
            found.append(self._class(type(item)))
            if isinstance(item, nn.Module):
                found.append(self._module(item))
            else:
                found.append(self._config(item) if hasattr(item, "to_dict") else self._plain(item))
        return found

    def _number(self, item: Any) -> int:
        number = self._object_numbers.setdefault(id(item), len(self._objects))
        if number == len(self._objects):
            self._objects.append(item)
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

    def _plain(self, item: Any) -> list[Any]:
        return [(name, self._value(value)) for name, value in _attributes(item)]

    def _module(self, module: nn.Module) -> list[Any]:
        found: list[Any] = [module.training if self._looks_at_mode[type(module)] else None]
        for name, value in vars(module).items():
            if name in _IGNORED:
                continue
            if type(value) not in _SCALARS:
                value = self._number(value) if name == "config" and hasattr(value, "to_dict") else self._value(value)
            found.append((name, value))
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                found.append((name, None if tensor is None else self._tensor(tensor)))
        for name, child in module._modules.items():
            found.append((name, None if child is None else self._number(child)))
        for hooks in filter(None, (module._forward_pre_hooks, module._forward_hooks)):
            for hook in hooks.values():
                if getattr(hook, "__module__", None) not in _OBSERVERS:
                    found.append(("hook", self._value(hook)))
        return found

    def _config(self, config: Any) -> list[Any]:
        # private ones are transformers' own notes: which attention runs, where the config came from
        return [(name, self._value(value)) for name, value in vars(config).items() if name[:1] != "_"]

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
            return self._array(np.asarray(value))
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
            before = len(self._objects)
            number = self._number(value)
            self._num_plain += len(self._objects) - before
            return "object", number
        return "object", kind.__qualname__

    def _cell(self, cell: types.CellType, depth: int) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return "empty"
        # What a hook collects is none of ours.
        if type(value) in _SCALARS or isinstance(value, (Tensor, nn.Module, types.FunctionType)):
            return self._value(value, depth)
        return type(value).__qualname__

    def _array(self, value: np.ndarray) -> Any:
        if value.dtype.hasobject:
            return "array", self._value(value.tolist())
        content = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
        return "array", str(value.dtype), value.shape, content

    def _tensor(self, tensor: Tensor) -> Any:
        if type(tensor) not in (nn.Parameter, Tensor):
            return self._flattened(tensor)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _UnreadableError(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():  # views that are computed when they are read
            raise _UnreadableError("a lazily conjugated or negated tensor")
        form = (_name(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.get_device())
        number = self._tensor_numbers.setdefault((tensor.data_ptr(), form), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, form

    def _flattened(self, tensor: Tensor) -> Any:
        """A subclass by the tensors that it says it consists of."""
        kind = type(tensor)
        if not hasattr(tensor, "__tensor_flatten__"):
            raise _UnreadableError(f"a tensor of type {kind.__qualname__}, which has no `__tensor_flatten__`")
        names, context = tensor.__tensor_flatten__()
        parts = [(name, self._value(getattr(tensor, name))) for name in names]
        return kind.__qualname__, _name(tensor.dtype), tuple(tensor.shape), parts, self._value(context)


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
    return hashlib.sha256(marshal.dumps(code)).hexdigest()


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)


def _dense(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the elements of `tensor`, each once: `tensor` itself, a view of it or else a copy."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous()


def _hash_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    """Hashes of the bytes of contiguous tensors: one of all that the C++ kernel can read, one of each other."""
    here = [tensor for tensor in tensors if tensor.is_cpu] if cpp.is_available() else []
    found: list[Any] = [
        cpp.hash_memory([tensor.data_ptr() for tensor in here], [tensor.nbytes for tensor in here]) if here else None
    ]
    others: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not (here and tensor.is_cpu):
            others.setdefault(tensor.device, []).append(hash_portable(tensor))
    found += [torch.stack(hashes).tolist() for hashes in others.values()]  # waits once per device
    return found


_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# The odd constants of SplitMix64 (Steele et al., OOPSLA 2014), as torch's int64 holds them.
_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def hash_portable(tensor: Tensor) -> Tensor:
    """
    The hash of a contiguous tensor's bytes, in integer arithmetic: exact on any device, in whatever order it sums.

    Each 8 bytes are scrambled together with their position by a bijection, and the results are summed modulo 2^64: one
    changed word always changes the first sum, and any two different contents agree in both with a chance of about
    2^-128.

    Returns (`torch.Tensor` of shape `(2,)`, int64, on the tensor's device).
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            padded = chunk.new_zeros(-(-chunk.numel() // 8) * 8)
            padded[: chunk.numel()] = chunk
            chunk = padded
        words = chunk.view(torch.int64)
        position = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device)
        mixed = position.mul_(_STEP).bitwise_xor_(words)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, _STEP)):
            mixed = mixed.bitwise_xor_(_shift(mixed, shift)).mul_(factor)
        total[0] += mixed.sum()
        total[1] += mixed.bitwise_xor_(_shift(mixed, 32)).mul_(_FIRST).sum()
    return total


def _shift(words: Tensor, bits: int) -> Tensor:
    """`words >> bits` as unsigned numbers."""
    return (words >> bits).bitwise_and_(_WORD >> bits)
