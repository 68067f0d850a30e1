"""Classifies the values that a model's modules hold, and finds the tensors in them, for the code
that reads or watches a model (`fingerprints.reading`, `writes`, `positions`)."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = frozenset({bool, int, float, complex, str, bytes, types.NoneType})
CONTAINERS = (dict, list, deque, set)
"""Containers that code can change in place."""
# Attributes that transformers sets on a model or its class for its own bookkeeping.
BOOKKEEPING = frozenset(
    {
        "_auto_class",
        "_can_set_attn_implementation_cached_value",
        "_can_set_experts_implementation_cached_value",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "warnings_issued",
    }
)
SKIPPED = BOOKKEEPING.union(vars(nn.Module()))
"""Attributes to skip when the other attributes of a module are visited: bookkeeping, and attributes
that torch sets on every module. (`fingerprints` and `writes` visit parameters, buffers, submodules,
forward hooks and modes separately if they need them.)"""
# The standard library, except `types`: user code keeps data in `types.SimpleNamespace`.
STANDARD = sys.stdlib_module_names - {"__main__", "types"}
# Packages that are not user code. The attributes of their objects (except modules, tensors and
# configs) are mostly not read: forwards rarely depend on them, and half of the objects of the
# process may be reachable through them.
LIBRARIES = STANDARD | {"accelerate", "hf_paged", "numpy", "peft", "torch", "transformers"}

ABSENT = object()  # stands for a missing attribute


@functools.cache
def package_of(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def is_user_module(name: str) -> bool:
    """Whether the Python module of this name is user code."""
    return package_of(name) not in LIBRARIES


def is_user_object(value: Any) -> bool:
    """Whether a value has a `__dict__` and a class from user code, and is not a module, tensor,
    container, tuple, frozenset or class."""
    if not is_user_module(type(value).__module__):
        return False
    if isinstance(value, (nn.Module, Tensor, type, tuple, frozenset, *CONTAINERS)):
        return False
    return hasattr(value, "__dict__")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors that make up a tensor: the tensor itself or, if it has a
    `__tensor_flatten__`, the plain tensors in the parts that this method names."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names = tensor.__tensor_flatten__()[0]
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the tensors' storages. Only strided tensors, and strided parts of
    tensor subclasses (`plain_tensors`), have one."""
    parts = itertools.chain.from_iterable(map(plain_tensors, tensors))
    return {part.untyped_storage().data_ptr() for part in parts if part.layout is torch.strided}
