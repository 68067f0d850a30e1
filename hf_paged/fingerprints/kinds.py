"""The types of values that `reading.py` distinguishes, besides those in `model.values`, and the
attributes of an object."""

from __future__ import annotations

import array
import ctypes
import datetime
import enum
import functools
import numbers
import pathlib
import random
import threading
import types
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .. import compat
from ..model.values import CONTAINERS, SKIPPED

NAMED_TYPES = (type, types.ModuleType)
FUNCTION_TYPES = (types.FunctionType, types.MethodType, functools.partial)
CONTAINER_TYPES = (*CONTAINERS, tuple, frozenset, types.MappingProxyType)
DICT_TYPES = (dict, types.MappingProxyType)
ARRAY_TYPES = (np.ndarray, bytearray, array.array)
SCALAR_TYPES = (
    bool,
    int,
    float,
    str,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Types of the standard library whose `repr` describes an object completely.
REPR_TYPES: tuple[type, ...] = (
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
# Types whose values differ between threads, contexts or calls.
UNDETECTABLE_TYPES = (
    ContextVar,
    threading.local,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
# Besides `SCALARS`, the types of globals of user code whose values are read.
DATA_TYPES: tuple[type, ...] = (
    *CONTAINER_TYPES,
    types.SimpleNamespace,
    Tensor,
    *ARRAY_TYPES,
    enum.Enum,
    *SCALAR_TYPES,
    *REPR_TYPES,
    *UNDETECTABLE_TYPES,
    nn.Module,
    type,
    *FUNCTION_TYPES,
)
# Private attributes of every config, which are transformers' own bookkeeping.
CONFIG_BOOKKEEPING = frozenset(name for name in vars(PreTrainedConfig()) if name[:1] == "_")
# Attributes of a module that are not read. No forward depends on `name_or_path`, which says where
# the model was loaded from.
IGNORED = SKIPPED | {"_compiled_call_impl", "name_or_path", compat.CACHED_MANAGER}
# Names of modules and packages, with a dot after them, whose classes are not described: base
# classes that all models share, and classes that load, save or generate.
UNDESCRIBED_MODULES = (
    "abc.",
    "builtins.",
    "torch.nn.modules.module.",
    "transformers.generation.",
    "transformers.integrations.",
    "transformers.modeling_utils.",
    "transformers.utils.",
)


def check_strided(tensor: Tensor) -> None:
    """Raises `ValueError` for a plain tensor unless its memory contains its elements, with strides
    and without a lazy conjugation or negation."""
    is_strided = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not is_strided:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():  # views whose elements are computed when read
        raise ValueError("a lazily conjugated or negated tensor")


def attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values in an object's `__dict__` and slots."""
    yield from getattr(item, "__dict__", {}).items()
    for name in _slots(type(item)):  # type: ignore[arg-type]
        if hasattr(item, name):
            yield name, getattr(item, name)


@functools.cache
def _slots(object_type: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in object_type.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
