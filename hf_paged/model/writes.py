"""Records and undoes what forwards write into their model: attributes, buffers, generators. The
prefix cache serves no model whose forwards read what earlier forwards wrote."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interrupts import restoring
from .values import ABSENT, CONTAINERS, NOTES, PLUMBING, SCALARS, is_users_object, plain_tensors

MAX_COPIED = 256 << 20
"""Bytes of tensors, the smallest first, that a [`Snapshot`] copies."""

_MAX_CONTAINERS = 10_000  # of one attribute, whose objects may reference half the process


class Write(NamedTuple):
    """An attribute or buffer that a forward wrote."""

    module: nn.Module
    table: dict[str, Any]  # the module's attributes or buffers
    name: str
    before: Any
    after: Any  # a copy
    by_engine: bool  # whether a forward of the engine wrote it, and not only a plain one


Modes = tuple[bool, ...]  # of a model's modules


class Notes:
    """The writes of a model's forwards into the model, with its modules in certain modes."""

    def __init__(self) -> None:
        # an attribute that forwards read and earlier forwards wrote: the prefix cache is then off
        self.carried: str | None = None
        # by module, attributes that each forward writes and none reads, which are no part of the
        # model's state; with the value that a `ModelState` reads in their place
        self.write_only: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]
        self.write_only = weakref.WeakKeyDictionary()


_NONE = Notes()
_notes: weakref.WeakKeyDictionary[nn.Module, dict[Modes, Notes]] = weakref.WeakKeyDictionary()


def _modes(model: nn.Module) -> Modes:
    return tuple(module.training for module in model.modules())


def notes_of(model: nn.Module) -> Notes:
    """The notes on a model in its modules' present modes. Read-only."""
    notes_by_modes = _notes.get(model)
    return _NONE if notes_by_modes is None else notes_by_modes.get(_modes(model), _NONE)


def note_write(model: nn.Module, write: Write, is_read: bool) -> None:
    """Notes that in the present modes each forward of `model` makes this write. `is_read`: whether
    a forward reads what another wrote."""
    notes = _notes.setdefault(model, {}).setdefault(_modes(model), Notes())
    if is_read:
        notes.carried = f"{type(write.module).__name__}.{write.name}"
        return
    stand_in = "written"
    if write.before is ABSENT or type(write.before) in SCALARS:
        stand_in = write.before  # the value before the first forward, equal in every process
    notes.write_only.setdefault(write.module, {}).setdefault(write.name, stand_in)


class Snapshot:
    """A copy of what modules hold beside parameters: attributes, the elements of containers and the
    attributes of objects of user classes, the content of tensors and the state of generators. It
    leaves tensors beyond `MAX_COPIED` out."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (module, table, dict(table))
            for module in model.modules()
            for table in (vars(module), module._buffers)
            # the attributes of a traced or scripted module are not in dicts, and its code sets none
            if isinstance(table, dict)
        ]
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        parts: list[Any] = []
        for _, _, before in self._tables:
            for name, value in before.items():
                if name not in PLUMBING:
                    parts += self._reachable(value)
        generators = {part for part in parts if isinstance(part, torch.Generator)}
        self._generators = [(x, x.get_state()) for x in generators]
        tensors: dict[int, Tensor] = {}
        for part in parts:
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                for tensor in plain_tensors(part):
                    if tensor.layout is torch.strided and not tensor.is_meta:
                        tensors[id(tensor)] = tensor
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._uncopied: list[tuple[Tensor, int]] = []
        num_left = MAX_COPIED  # bytes
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.nbytes):
            num_left -= tensor.nbytes
            if num_left < 0 or not self._copy(tensor):
                num_left = 0
                if not tensor.is_inference():
                    self._uncopied.append((tensor, tensor._version))

    def _copy(self, tensor: Tensor) -> bool:
        try:
            self._copies.append((tensor, tensor.detach().clone()))
        except RuntimeError:  # out of memory
            return False
        return True

    def _reachable(self, value: Any) -> Iterator[Any]:
        """Yields a value, or the values in containers and in objects of user classes, whose
        elements it notes."""
        pending = [value]
        limit = len(self._containers) + _MAX_CONTAINERS
        while pending:
            value = pending.pop()
            if is_users_object(value):
                value = vars(value)
            if not isinstance(value, (*CONTAINERS, tuple)):
                yield value
            elif id(value) not in self._containers and len(self._containers) < limit:
                listed = _elements(value)
                self._containers[id(value)] = value, listed
                if not SCALARS.issuperset(map(type, listed)):  # a vocabulary may have millions
                    pending += listed

    @property
    def has_drawn(self) -> bool:
        """Whether a generator of a module has drawn numbers."""
        return not all(torch.equal(x.get_state(), state) for x, state in self._generators)

    @property
    def num_lost_bytes(self) -> int:
        """Bytes of the tensors that forwards wrote to and that were not copied."""
        return sum(x.nbytes for x, version in self._uncopied if x._version != version)

    def restore(self, by_engine: bool, writes: list[Write]) -> None:
        """Restores everything but transformers' own notes; adds the differences to `writes`."""
        changed = [(x, copy) for x, copy in self._copies if not _is_equal(x, copy)]
        refilled = [
            (value, listed)
            for value, listed in self._containers.values()
            if not _is_listed(value, listed)
        ]
        writes += self._writes({id(x) for x, _ in (*changed, *refilled)}, by_engine)
        for generator, state in self._generators:
            generator.set_state(state)
        for value, listed in refilled:
            _refill(value, listed)
        for x, copy in changed:
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if x.shape == copy.shape:
                    x.copy_(copy)
                else:  # resized
                    x.set_(copy)
        for _, now, before in self._tables:
            notes = {name: x for name, x in now.items() if name in NOTES}
            restore_attributes(now, {**before, **notes})

    def _writes(self, changed: set[int], by_engine: bool) -> Iterator[Write]:
        """The differences; `changed`: ids of tensors and containers with other content."""
        for module, now, attributes in self._tables:
            for name, after in now.items():
                before = attributes.get(name, ABSENT)
                is_other = after is not before and (type(after) not in SCALARS or after != before)
                is_written = is_other or id(after) in changed
                if not is_written and changed:
                    tensors = (part for part in _parts(after) if isinstance(part, Tensor))
                    parts = itertools.chain.from_iterable(map(plain_tensors, tensors))
                    is_written = not changed.isdisjoint(map(id, parts))
                if is_written and name not in PLUMBING:
                    yield Write(module, now, name, before, copied(after), by_engine)


def restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Restores a dict to its items before."""
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


@restoring
def undoing_writes(model: nn.Module) -> Iterator[None]:
    """A context that undoes all writes into the model within it."""
    snapshot = Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore(by_engine=True, writes=[])


def _parts(value: Any) -> Sequence[Any]:
    """The elements of a container, else the value itself."""
    if isinstance(value, CONTAINERS):
        return _elements(value)
    return (value,)


def _elements(value: Any) -> list[Any]:
    """The elements of a container; none of one that cannot be iterated."""
    try:
        if isinstance(value, dict):
            return [*value, *value.values()]
        return [*value]
    except Exception:  # user code
        return []


def _is_listed(value: Any, listed: list[Any]) -> bool:
    now = _elements(value)
    return len(now) == len(listed) and all(map(operator.is_, now, listed))


def _refill(value: Any, listed: list[Any]) -> None:
    value.clear()
    if isinstance(value, dict):
        half = len(listed) // 2
        value.update(zip(listed[:half], listed[half:]))
    elif isinstance(value, set):
        value.update(listed)
    else:
        value.extend(listed)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal; for containers, whether their elements are. NaN is equal to
    itself."""
    if isinstance(a, CONTAINERS) and type(a) is type(b):
        return len(a) == len(b) and all(map(_is_equal, _elements(a), _elements(b)))
    return _is_equal(a, b)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        return torch.equal(a, b) or bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
    kind = type(a)
    return kind is type(b) and kind in SCALARS and a == b


def copied(value: Any) -> Any:
    """A copy of a tensor, or of a container and the tensors in it; else the value itself."""

    def copied_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.detach().clone()
        return part

    return _mapped(copied_part, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies `function` to a value, or to the elements of a container."""
    if isinstance(value, dict):
        values = map(function, value.values())
        return dict(zip(value, values))
    if isinstance(value, CONTAINERS):
        kind = type(value)
        return kind(map(function, value))
    return function(value)


def changed(value: Any) -> Any:
    """Another value of the same type and shape, or the value itself."""
    return _mapped(_changed_part, value)


def _changed_part(part: Any) -> Any:
    if isinstance(part, Tensor):
        if part.dtype is torch.bool:
            return part.logical_not()
        return part + 1
    if isinstance(part, bool):
        return not part
    if isinstance(part, (int, float, complex)):
        return part + 1
    return part + " " if isinstance(part, str) else part
