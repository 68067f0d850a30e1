"""Records and undoes the writes of forwards into their model: to attributes, buffers and random
generators. Prefixes are not cached for a model whose forwards read what earlier forwards wrote."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interrupts import is_interrupt
from .values import ABSENT, BOOKKEEPING, CONTAINERS, SCALARS, SKIPPED, is_user_object, plain_tensors

MAX_COPIED_BYTES = 256 << 20
"""Maximum bytes of tensors that a [`Snapshot`] copies, the smallest first."""

# maximum number of containers and objects that are copied for one attribute: through references,
# an attribute may lead to half of the objects of the process
_MAX_CONTAINERS = 10_000


class Write(NamedTuple):
    """An attribute or buffer that a forward wrote."""

    module: nn.Module
    table: dict[str, Any]  # the module's attributes or buffers
    name: str
    before: Any
    after: Any  # a copy
    by_engine: bool  # whether one of the engine's forwards wrote it, not a plain forward
    is_in_place: bool  # whether the value is still the same tensor object, with other content


Modes = tuple[bool, ...]  # whether each of a model's modules is in training mode


class Notes:
    """Facts about the writes of a model's forwards into the model, for one value of its `Modes`."""

    def __init__(self) -> None:
        # an attribute, as "class.name", that forwards read and earlier forwards wrote; unless it is
        # `None`, prefix caching is off
        self.carried_attribute: str | None = None
        # by module, the attributes that each forward overwrites and none reads, so they are not
        # part of the model's state; `ModelState` reads the values in this dict instead
        self.write_only = weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]()
        # by module, the attributes whose tensor each forward overwrites in place and none reads:
        # the tensor is part of the model's state, but its content is not
        self.overwritten = weakref.WeakKeyDictionary[nn.Module, set[str]]()

    def overwritten_ids(self) -> set[int]:
        """The ids of the tensors that are now the values of the attributes in `overwritten`."""
        items = self.overwritten.items()
        return {id(getattr(module, name, None)) for module, names in items for name in names}


_NO_NOTES = Notes()
_notes = weakref.WeakKeyDictionary[nn.Module, dict[Modes, Notes]]()


def _modes(model: nn.Module) -> Modes:
    return tuple(module.training for module in model.modules())


def notes_of(model: nn.Module) -> Notes:
    """The notes on a model in the current modes of its modules. Callers must not change them."""
    notes_by_modes = _notes.get(model)
    return _NO_NOTES if notes_by_modes is None else notes_by_modes.get(_modes(model), _NO_NOTES)


def note_write(model: nn.Module, write: Write, is_read: bool) -> None:
    """Notes that each forward of `model` in its current modes makes this write. `is_read`: whether
    later forwards read the value."""
    notes = _notes.setdefault(model, {}).setdefault(_modes(model), Notes())
    if is_read:
        notes.carried_attribute = f"{type(write.module).__name__}.{write.name}"
        return
    if write.is_in_place:
        notes.overwritten.setdefault(write.module, set()).add(write.name)
        return
    stand_in = "written"
    if write.before is ABSENT or type(write.before) in SCALARS:
        stand_in = write.before  # from before the first forward, so equal in every process
    notes.write_only.setdefault(write.module, {}).setdefault(write.name, stand_in)


class Snapshot:
    """A copy of the values that modules hold, except parameters, submodules and hooks: attributes,
    the elements of containers, the attributes of user classes' objects, the content of tensors and
    the state of generators. It leaves out tensors that are not strided, the largest tensors if
    `MAX_COPIED_BYTES` or memory does not suffice, and containers beyond `_MAX_CONTAINERS`."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (module, table, dict(table))
            for module in model.modules()
            for table in (vars(module), module._buffers)
            # the tables of traced and scripted modules are not dicts, and their code sets no
            # attributes
            if isinstance(table, dict)
        ]
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        parts: list[Any] = []
        for _, _, before in self._tables:
            for name, value in before.items():
                if name not in SKIPPED:
                    parts += _leaves(value, self._containers)
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
        num_bytes_left = MAX_COPIED_BYTES
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.nbytes):
            num_bytes_left -= tensor.nbytes
            if num_bytes_left < 0 or not self._try_copy(tensor):
                num_bytes_left = 0
                if not tensor.is_inference():
                    self._uncopied.append((tensor, tensor._version))

    def _try_copy(self, tensor: Tensor) -> bool:
        try:
            self._copies.append((tensor, tensor.detach().clone()))
        except RuntimeError as error:  # out of memory
            if is_interrupt(error):
                raise
            return False
        return True

    @property
    def has_drawn(self) -> bool:
        """Whether a generator of a module has drawn numbers since the snapshot."""
        return not all(torch.equal(x.get_state(), state) for x, state in self._generators)

    @property
    def num_lost_bytes(self) -> int:
        """Bytes of the tensors that were written to, but that the snapshot has not copied: they
        cannot be restored. (Writes to inference tensors are not counted.)"""
        return sum(x.nbytes for x, version in self._uncopied if x._version != version)

    def restore(self, by_engine: bool, writes: list[Write]) -> None:
        """Adds what has changed since the snapshot to `writes`, then restores it, except for the
        attributes in `BOOKKEEPING`. `by_engine`: as in `Write`."""
        changed_tensors = [
            (x, saved) for x, saved in self._copies if not _parts_are_equal(x, saved)
        ]
        refilled_containers = [
            (value, elements)
            for value, elements in self._containers.values()
            if not _has_elements(value, elements)
        ]
        writes += self._writes(
            {id(x) for x, _ in (*changed_tensors, *refilled_containers)}, by_engine
        )
        for generator, state in self._generators:
            generator.set_state(state)
        for value, elements in refilled_containers:
            _refill(value, elements)
        for x, saved in changed_tensors:
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if x.shape == saved.shape:
                    x.copy_(saved)
                else:  # resized
                    x.set_(saved)
        for _, table, before in self._tables:
            kept_attributes = {name: x for name, x in table.items() if name in BOOKKEEPING}
            restore_attributes(table, {**before, **kept_attributes})

    def _writes(self, changed_ids: set[int], by_engine: bool) -> Iterator[Write]:
        """Yields a `Write` for each attribute and buffer that is new or has changed. `changed_ids`:
        the `id`s of tensors and containers whose content has changed."""
        for module, table, attributes in self._tables:
            for name, after in table.items():
                before = attributes.get(name, ABSENT)
                is_new = after is not before and not _are_equal_scalars(after, before)
                is_written = is_new
                if not is_written and changed_ids and type(after) not in SCALARS:
                    is_written = not changed_ids.isdisjoint(_reachable_ids(after))
                if is_written and name not in SKIPPED:
                    is_in_place = isinstance(after, Tensor) and not is_new
                    after_copy = copy_value(after)
                    yield Write(module, table, name, before, after_copy, by_engine, is_in_place)


def restore_attributes(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Restores the items of the dict `table` to those of `before`."""
    for name in table.keys() - before.keys():
        del table[name]
    table.update(before)


def _leaves(value: Any, containers: dict[int, tuple[Any, list[Any]]]) -> Iterator[Any]:
    """Yields the value or, if it is a container or an object of a user class, the values in it, at
    any depth, but not the elements of containers that hold only scalars. Adds the containers and
    the objects' dicts, at most `_MAX_CONTAINERS`, to `containers`: by `id`, with their elements."""
    pending = [value]
    max_containers = len(containers) + _MAX_CONTAINERS
    while pending:
        value = pending.pop()
        if is_user_object(value):
            value = vars(value)
        if not isinstance(value, (*CONTAINERS, tuple)):
            yield value
        elif id(value) not in containers and len(containers) < max_containers:
            elements = _elements(value)
            containers[id(value)] = value, elements
            if not SCALARS.issuperset(map(type, elements)):  # a vocabulary may have millions
                pending += elements


def _reachable_ids(value: Any) -> set[int]:
    """Returns the `id`s of the containers and of the plain tensors in a value, at any depth."""
    containers: dict[int, tuple[Any, list[Any]]] = {}
    tensors = [leaf for leaf in _leaves(value, containers) if isinstance(leaf, Tensor)]
    return {*containers, *(id(part) for tensor in tensors for part in plain_tensors(tensor))}


def _elements(value: Any) -> list[Any]:
    """Returns the elements of a container; for a dict, its keys, then its values. Empty if
    iterating over the container raises an error."""
    try:
        if isinstance(value, dict):
            return [*value, *value.values()]
        return [*value]
    except Exception as error:  # user code
        if is_interrupt(error):
            raise
        return []


def _has_elements(value: Any, elements: list[Any]) -> bool:
    current = _elements(value)
    return len(current) == len(elements) and all(map(operator.is_, current, elements))


def _refill(value: Any, elements: list[Any]) -> None:
    value.clear()
    if isinstance(value, dict):
        half = len(elements) // 2
        value.update(zip(elements[:half], elements[half:]))
    elif isinstance(value, set):
        value.update(elements)
    else:
        value.extend(elements)


def values_are_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal. Two containers of the same type are compared element by
    element. Tensors of one shape, dtype and device and scalars of one type are compared by value
    (NaN equals NaN); other values, nested containers included, by identity."""
    if isinstance(a, CONTAINERS) and type(a) is type(b):
        return len(a) == len(b) and all(map(_parts_are_equal, _elements(a), _elements(b)))
    return _parts_are_equal(a, b)


def _parts_are_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        return torch.equal(a, b) or bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
    return _are_equal_scalars(a, b)


def _are_equal_scalars(a: Any, b: Any) -> bool:
    """Whether two values are scalars of one type and equal, or both NaN. Compares nothing else,
    since `==` on tensors or arrays returns no single bool."""
    if type(a) is not type(b) or type(a) not in SCALARS:
        return False
    return bool(a == b or (a != a and b != b))


def copy_value(value: Any) -> Any:
    """Copies a tensor, or a container and the tensors in it; returns any other value as it is."""
    return _map_elements(
        lambda part: part.detach().clone() if isinstance(part, Tensor) else part, value
    )


def _map_elements(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `function(value)`. For a container, returns a copy with `function` applied to its
    elements (for a dict, to its values). The copy has the same class, with a `defaultdict`'s
    factory and a deque's `maxlen`; if the container cannot be copied, it has the base class."""
    if not isinstance(value, CONTAINERS):
        return function(value)
    result: Any = value
    try:
        result = copy.copy(value)
    except Exception as error:  # user code
        if is_interrupt(error):
            raise
    base: Any = next(base for base in CONTAINERS if isinstance(value, base))
    if result is value or type(result) is not type(value):
        result = base(value)
    # calls methods of the base class, since those of a user's class may refuse changes
    if isinstance(value, dict):
        dict.update(result, zip(value, map(function, value.values())))
    else:
        elements = list(map(function, value))
        base.clear(result)
        fill = set.update if base is set else base.extend
        fill(result, elements)
    return result


def alter_value(value: Any) -> Any:
    """Returns a different value of the same type and shape, or an equal one if the value has no
    tensor, number or string to alter."""
    return _map_elements(_alter_part, value)


def _alter_part(part: Any) -> Any:
    if isinstance(part, Tensor):
        if part.dtype is torch.bool:
            return part.logical_not()
        return part + 1
    if isinstance(part, bool):
        return not part
    if isinstance(part, (int, float, complex)):
        return part + 1
    return part + " " if isinstance(part, str) else part
