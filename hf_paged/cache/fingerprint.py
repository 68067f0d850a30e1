"""
A fingerprint of all that decides what a model's forward computes: K/V of an earlier call may be served as long as it
stays the same.

`Tensor._version` and `data_ptr` prove a change but not its absence: fused optimizers, `p.data.copy_` and writes through
numpy move neither. So the bytes are read, which takes about as long as one decode step reads them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import marshal
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import native

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Bytes that the portable hash reads at once; it takes some four times as much for its intermediate results."""

_SCALARS = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
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


def read_state(model: nn.Module) -> ModelState | None:
    """Everything about `model` but the content of its tensors; `None` if some of it cannot be read."""
    try:
        return ModelState(model)
    except (_UnreadableError, RuntimeError) as error:
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
    32 bytes that are the same as long as the model is, or `None` if it cannot be read; nothing may be served then.

    Covered are names, types, shapes, dtypes and the content of all parameters, buffers and tensors that are plain
    attributes; all attributes of modules and configs that are Python scalars or nested containers of them (the active,
    disabled and merged adapters of PEFT among them); functions that replace `forward` or hook into it, with the scalars
    and tensors they close over. Train or eval mode is not, nor what other Python objects hold.

    Tensors that are tied are read once. Subclasses of `Tensor` (sharded or quantised weights), sparse tensors and those
    without content (meta) cannot be read. Comparable within one process only.

    Args:
        state ([`ModelState`], *optional*): What `read_state` returned just now.
    """
    try:
        if state is None:
            state = ModelState(model)
        with torch.no_grad():
            content = _hash_tensors([_dense(tensor) for tensor in state.tensors])
    except (_UnreadableError, RuntimeError) as error:  # torch's: no such operation for a dtype or a device, no memory
        logger.debug("the fingerprint of %s cannot be taken: %s", type(model).__name__, error)
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
        self._objects: list[Any] = []  # modules and configs, in the order met
        self._object_numbers: dict[int, int] = {}
        self.structure = self._read(model)

    def _read(self, model: nn.Module) -> list[Any]:
        self._number(model)
        found = []
        for item in self._objects:  # grows on the way
            found.append(self._module(item) if isinstance(item, nn.Module) else self._config(item))
        return found

    def _number(self, item: Any) -> int:
        number = self._object_numbers.setdefault(id(item), len(self._objects))
        if number == len(self._objects):
            self._objects.append(item)
        return number

    def _module(self, module: nn.Module) -> list[Any]:
        found: list[Any] = [type(module).__qualname__]
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
        if isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return kind.__qualname__, repr(value)  # enums and the like
        if isinstance(value, functools.partial):
            return "partial", [self._value(item, depth + 1) for item in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return "method", value.__func__.__qualname__, self._value(value.__self__, depth + 1)
        if isinstance(value, types.FunctionType):
            code = hashlib.sha256(marshal.dumps(value.__code__)).hexdigest()
            defaults = self._value((value.__defaults__, value.__kwdefaults__), depth + 1)
            return "function", value.__qualname__, code, defaults, [*map(self._cell, value.__closure__ or ())]
        return "object", kind.__qualname__

    def _cell(self, cell: types.CellType) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return "empty"
        # What a hook collects is none of ours.
        if type(value) in _SCALARS or isinstance(value, (Tensor, nn.Module)):
            return self._value(value)
        return type(value).__qualname__

    def _tensor(self, tensor: Tensor) -> Any:
        if type(tensor) not in (nn.Parameter, Tensor):
            raise _UnreadableError(f"a tensor of type {type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _UnreadableError(f"a tensor of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():  # views that are computed when they are read
            raise _UnreadableError("a lazily conjugated or negated tensor")
        form = (_name(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.get_device())
        number = self._tensor_numbers.setdefault((tensor.data_ptr(), form), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, form


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
    here = [tensor for tensor in tensors if tensor.is_cpu] if native.is_available() else []
    found: list[Any] = [
        native.hash_memory([tensor.data_ptr() for tensor in here], [tensor.nbytes for tensor in here]) if here else None
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
