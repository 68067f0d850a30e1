"""Detects changes to a model. Cached keys and values, and recorded steps, are valid until the model
changes."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import marshal
import operator
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..interrupts import is_interrupt
from ..kernels.hashing import hash_tensors
from ..model.state import warn_uncached
from .code import MARSHAL_VERSION
from .reading import Reading

LINE = 64  # bytes of a tensor that `is_same` compares
_version_of = operator.attrgetter("_version")
_dtype_of = operator.attrgetter("dtype")

_StateValues = tuple[tuple[Any, ...], bytes, list[bytes]]


def read_state(model: nn.Module) -> StateReading:
    """Returns the state of `model`, after calling its `hold`. Raises the errors of
    `StateReading`."""
    state = StateReading(model)
    state.hold()
    return state


def fingerprint(model: nn.Module, state: StateReading | None) -> bytes | None:
    """Returns the current fingerprint of the model. If reading the model raises an error, returns
    `None` and warns once per model and reason. `state`: the model's state if it has just been
    read."""
    try:
        return (state or StateReading(model)).fingerprint()
    except Exception as error:  # operation missing for a dtype or device, out of memory, user code
        if is_interrupt(error):
            raise
        warn_uncached(model, f"changes to it cannot be detected ({error})")
        return None


class StateReading(Reading):
    """The state of a model that determines the results of its forward, read at construction
    (`model.state.ModelState`). It identifies the state (`fingerprint`) and tells, after other code
    may have run, whether the model is unchanged since the references were taken (`is_same`).

    Covered: all parameters, buffers, tensors and arrays; attributes of modules, configs and user
    classes that are scalars, nested containers of scalars, objects of user classes or values of the
    standard library; functions and scalars of modules' classes; functions that replace or hook
    `forward`, with their closures; everything that user code names: helper functions, globals of
    its modules, train or eval mode. Not covered: files, attributes of library objects, modules in
    `site-packages` without code of the model, containers and objects in closures of hooks and of
    functions that users set on libraries' classes, attributes that each forward writes and none
    reads (`writes.note_write`), and the value that `undetectable` names.
    Equal models have equal fingerprints in every process with the same library versions and kind of
    device. Tensor subclasses are read by `__tensor_flatten__`. Subclasses without it, and tensors
    that are sparse, quantized, on the meta device or lazily conjugated or negated, raise
    `ValueError`; user code that is called may raise other errors."""

    _values: _StateValues | None = None  # the reference that `accept` takes
    _content: tuple[Any, ...] | None = None  # the reference that `watch` takes

    def fingerprint(self) -> bytes:
        """Returns 32 bytes that change with anything covered, the content of tensors included.
        Raises `ValueError` if something is `undetectable`."""
        if self.undetectable is not None:
            raise ValueError(self.undetectable)
        with torch.no_grad():
            hashes = hash_tensors(self.tensors)
            return self._digest(hashes)

    def addresses(self) -> tuple[bytes, list[int]]:
        """Returns a digest, and the addresses of `tensors` and then of `overwritten`. The digest is
        32 bytes as in `fingerprint`, but does not depend on the tensors' content. It also covers
        every module's mode, and the scalars in containers and objects that any closure holds."""
        pointers = [tensor.data_ptr() for tensor in (*self.tensors, *self.overwritten)]
        return self._digest([self._modes, self._closure_scalars]), pointers

    def is_like(self, other: Any) -> bool:
        """Whether both states describe equal models. Compares their `addresses` and, if `watch` was
        called on both, the references that `hold` and `watch` took."""
        if self.addresses() != other.addresses():
            return False
        if self._content is None or other._content is None:
            return True
        if self._content != other._content:
            return False
        return _pointers(self._parts) == _pointers(other._parts)

    def hold(self) -> None:
        """Takes the reference of `is_in_place`. The reference keeps the tensors alive."""
        self._parts = self._read_parts()
        self._layouts = self._read_layouts()
        self._is_unchecked, self._is_in_place = False, True

    def keep_memory(self) -> None:
        """Keeps the tensors' memory alive for recorded steps, since until the next
        `mark_unchecked`, `is_in_place` returns its last result without reading the tensors."""
        self._memory = [x.untyped_storage() for x in (*self._all_tensors, *self.overwritten)]

    def mark_unchecked(self) -> None:
        """Called after code has run that may have changed the model."""
        self._is_unchecked = True

    def is_in_place(self) -> bool:
        """Whether the model has the same modules, tensors and parts of tensors as at `hold`, with
        the tensors at the same addresses, in the same dtypes, sizes and strides. Reads them once
        after each `mark_unchecked`."""
        if self._is_unchecked:
            self._is_unchecked = False
            parts = self._read_parts()
            has_parts = _pointers(parts) == _pointers(self._parts)
            self._is_in_place = has_parts and self._read_layouts() == self._layouts
        return self._is_in_place

    def accept(self) -> None:
        """Takes the reference of `is_same` for everything but modules and tensors. Must be called
        before other code can run, and again after each forward, whose own writes do not count as
        changes."""
        self._attributes = list(map(vars, self._modules))
        backwards = map(reversed, self._attributes)
        self._last_names = list(map(next, backwards))
        self._values = self.read_values()

    def watch(self) -> None:
        """Takes the reference of `is_same` for writes to tensors."""
        rng = random.Random(0)
        self._versioned = [x for x in self._all_tensors if not x.is_inference()]
        on_cpu = [x for x in self.tensors if x.is_cpu and x.nbytes]
        self._lines = [_line(x, rng) for x in on_cpu]
        self._content = self._read_content()

    def is_same(self) -> bool:
        """Whether the model is as it was at `hold`, `accept` and, if it was called, `watch`. This
        check takes microseconds. It compares the identities of modules, tensors, attributes, hooks,
        functions, closures and globals, the content of arrays, and the tensors' layouts in memory.
        After `watch`, it also compares the tensors' versions and, on the CPU, `LINE` bytes of each
        tensor, at an address that `watch` has drawn. So a write that changes neither a version nor
        an address is detected only on the CPU, and only if it changes those bytes. After `False`,
        the model may still be equal (`is_like`)."""
        self.mark_unchecked()
        if self._values is None or not self.is_in_place():
            return False
        # renaming an attribute makes it the last one
        are_present = map(operator.contains, self._attributes, self._last_names)
        if not all(are_present):
            return False
        values = self.read_values()
        if values is None or values[1:] != self._values[1:]:
            return False
        return self._content is None or self._read_content() == self._content

    def _read_parts(self) -> tuple[Any, ...]:
        """Returns the modules' parameters, buffers and submodules, and the attributes of tensor
        subclasses, which hold their parts."""
        parts = gc.get_referents(*self._tables, *map(vars, self._subclasses))
        for table, write_only in self._partly_read:
            parts += [part for name, part in table.items() if name not in write_only]
        return tuple(parts)

    def _read_layouts(self) -> list[Any]:
        """The tensors' addresses, dtypes, sizes and strides."""
        tensors = [*self._all_tensors, *self.overwritten]
        return [
            *map(Tensor.data_ptr, tensors),
            *map(_dtype_of, tensors),
            *map(Tensor.size, tensors),
            *map(Tensor.stride, tensors),
        ]

    def read_values(self) -> _StateValues | None:
        """Returns the values that are not tensors, their addresses, and the content of arrays;
        `None` if they cannot be read, for instance because another thread changes a container
        meanwhile."""
        try:
            values = (
                *gc.get_referents(*self._owners),
                *itertools.chain.from_iterable(self._iterated),
                *itertools.starmap(operator.getitem, self._globals),
            )
            plain = map(np.asarray, self._arrays)
            arrays = list(map(operator.methodcaller("tobytes"), plain))
            return values, _pointers(values), arrays
        except Exception as error:
            if is_interrupt(error):
                raise
            return None

    def _read_content(self) -> tuple[list[int], bytes]:
        versions = list(map(_version_of, self._versioned))
        return versions, b"".join(self._lines)

    def _digest(self, content: list[Any]) -> bytes:
        state = self.structure + marshal.dumps(content, MARSHAL_VERSION)
        return hashlib.blake2b(state, digest_size=32).digest()


def _pointers(values: tuple[Any, ...]) -> bytes:
    """The addresses of a tuple's items, copied from the tuple's memory, so that the identities of
    the items can be compared without a loop in Python."""
    start = id(values) + tuple.__basicsize__
    items = (ctypes.c_void_p * len(values)).from_address(start)
    return bytes(items)


def _line(tensor: Tensor, rng: random.Random) -> memoryview:
    """A view of up to `LINE` bytes of the tensor's memory, from a random address on. The view keeps
    the storage alive."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    # expanded tensors have more elements than their storage
    size = min(tensor.nbytes, storage.nbytes() - start)
    first = start + rng.randrange(max(1, size - LINE + 1))
    line = torch.empty(0, dtype=torch.uint8, device="cpu")
    line.set_(storage, first, (min(LINE, size),))
    return memoryview(line.numpy())
