"""Reads everything in a model that its forward depends on. `state.py` compares such readings."""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import itertools
import marshal
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig

from ..compiled import replaced_forward
from ..model.values import (
    ABSENT,
    BOOKKEEPING,
    CONTAINERS,
    LIBRARIES,
    SCALARS,
    STANDARD,
    is_user_module,
    package_of,
)
from ..model.writes import notes_of
from .code import (
    MARSHAL_VERSION,
    Functions,
    attributes_read,
    code_hash,
    function_of,
    globals_module,
    globals_read,
    is_source_module,
    module_of,
    names_of,
    varies,
)
from .kinds import (
    ARRAY_TYPES,
    CONFIG_BOOKKEEPING,
    CONTAINER_TYPES,
    DATA_TYPES,
    DICT_TYPES,
    FUNCTION_TYPES,
    IGNORED,
    NAMED_TYPES,
    REPR_TYPES,
    SCALAR_TYPES,
    UNDESCRIBED_MODULES,
    UNDETECTABLE_TYPES,
    attributes_of,
    check_strided,
)

_MAX_DEPTH = 8  # maximum depth of nested containers and functions: some contain themselves
# maximum number of objects of user classes whose attributes are read, and of items of containers
# that are read in closures
_MAX_PLAIN_OBJECTS = 10_000
_MAX_ITEMS = 1000  # maximum number of items that are read of one object in a closure or global
_GLOBAL_HOOKS = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)


class Reading:
    """The parts of a model on which its forward depends: their description in `structure`, and the
    objects that hold them, so that they can be read again. Each private method named after a kind
    of value, such as `_module`, describes one such value by lists, tuples and scalars."""

    def __init__(self, model: nn.Module) -> None:
        # message about a value that user code reads and whose changes cannot be detected, if any
        self.undetectable: str | None = None
        self.tensors = list[Tensor]()  # distinct tensors; `structure` has their indices
        # also includes tensors with the memory, dtype, sizes and strides of another
        self._all_tensors = list[Tensor]()
        self.overwritten = list[Tensor]()  # tensors whose content no forward reads
        self._objects = list[Any]()  # modules, configs, user classes and plain objects
        self._tensor_numbers = dict[Any, int]()
        self._object_numbers = dict[int, int]()
        self._num_plain_objects = 0
        self._described = dict[int, Any]()  # by id: described containers, functions and objects
        self._too_deep = dict[int, Any]()  # by id: the same, but nested too deep to be described
        # Whether containers and objects in closures of user code are described. Hooks and functions
        # that users set on libraries' classes may collect results there.
        self._reads_closures = False
        # whether the value being described is in a closure, or in an object first found in one
        self._is_in_closure = False
        self._closure_objects = set[int]()  # ids of the objects first found in a closure
        self._num_closure_items = 0  # in all containers in closures, except those of scalars alone
        # descriptions of containers and their depths, by id and `_reads_closures`
        self._containers = dict[tuple[int, bool], tuple[int, Any]]()
        self._classes = set[type]()  # described so far
        self._packages = set[str]()  # names of packages of user code
        self._functions = Functions()
        self._followed = set[Any]()  # functions whose globals have been described
        self._reads_training = False  # whether user code reads `training`
        # scalars in containers and objects of closures that `_reads_closures` excludes
        self._closure_scalars = list[Any]()
        # modules' dicts of parameters, buffers and modules, unless empty
        self._tables = list[dict[str, Any]]()
        self._subclasses = list[Tensor]()  # tensors of subclasses, whose attributes hold the parts
        # dicts with entries that no forward reads, each with values to read instead, by name
        self._partly_read = list[tuple[dict[str, Any], dict[str, Any]]]()
        # modules, containers, hooks, functions of user code and cells, whose referents are compared
        self._owners = list[Any]()
        # dicts, whose keys are compared, and the values of mapping proxies
        self._iterated = list[Iterable[Any]]()
        self._globals = list[tuple[dict[str, Any], str]]()  # namespaces and the names read there
        self._arrays = list[Any]()
        self._notes = notes_of(model)
        self._overwritten_ids = self._notes.overwritten_ids()
        self._number_of(model)
        descriptions = [self._value(hooks) for hooks in _GLOBAL_HOOKS]
        num_described = 0
        while num_described < len(self._objects) or self._functions.pending:
            if num_described < len(self._objects):
                item = self._objects[num_described]
                num_described += 1
                descriptions.append(self._object(item))
            else:
                descriptions.append(self._follow(self._functions.pending.popleft()))
        if self._too_deep.keys() - self._described.keys():
            self.undetectable = f"it holds values nested more than {_MAX_DEPTH} levels deep"
        self._modules = [item for item in self._objects if isinstance(item, nn.Module)]
        self._modes = [module.training for module in self._modules]
        if self._reads_training:
            descriptions.append(self._modes)
        self.structure = marshal.dumps(descriptions, MARSHAL_VERSION)

    def _object(self, item: Any) -> tuple[Any, ...]:
        self._is_in_closure = id(item) in self._closure_objects
        if isinstance(item, type):
            return "class", self._class(item)
        kind = self._class(type(item))
        self._owners.append(item)  # refers to its class and the values of its slots
        if hasattr(item, "__dict__"):
            self._owners.append(vars(item))
        self._reads_closures = True
        if isinstance(item, nn.Module):
            return kind, self._module(item), self._hooks(item)
        skipped_names = CONFIG_BOOKKEEPING if isinstance(item, PreTrainedConfig) else ()
        attributes = []
        for name, value in attributes_of(item):
            if name not in skipped_names:
                attributes.append((name, self._value(value)))
        return kind, attributes

    def _number_of(self, item: Any) -> int:
        """Returns the item's index in `_objects`, after adding the item if it is new."""
        count = len(self._objects)
        number = self._object_numbers.setdefault(id(item), count)
        if number == count:
            self._objects.append(item)
        return number

    def _class(self, kind: type) -> list[Any]:
        """Describes a class and its bases: their functions and scalars and, in user classes, also
        other values. If the class has been described before, returns only its name."""
        descriptions: list[Any] = [kind.__qualname__]
        if kind in self._classes:
            return descriptions
        self._classes.add(kind)
        for base in kind.__mro__:
            if f"{base.__module__}.".startswith(UNDESCRIBED_MODULES):
                continue
            self._owners += gc.get_referents(vars(base))  # the dict behind the mapping proxy
            is_user_class = is_user_module(base.__module__)
            self._reads_closures = is_user_class
            if is_user_class:
                self._packages.add(package_of(base.__module__))
            for name, value in vars(base).items():
                value = function_of(value)
                if isinstance(value, types.FunctionType):
                    self._functions.add_method(name, value)
                    descriptions.append((name, self._function(value, 0)))
                elif name[:2] == "__" or name in BOOKKEEPING:
                    continue
                elif is_user_class or type(value) in SCALARS:
                    descriptions.append((name, self._value(value)))
        return descriptions

    def _module(self, module: nn.Module) -> list[Any]:
        write_only = self._notes.write_only.get(module, {})
        descriptions: list[Any] = []
        for name, value in vars(module).items():
            if name in IGNORED:
                continue
            value = write_only.get(name, value)
            if name == "forward":
                replacement = replaced_forward(module)
                value = ABSENT if replacement is None else replacement
            if type(value) in SCALARS:
                descriptions.append((name, value))
            elif name == "config" and hasattr(value, "to_dict"):
                descriptions.append((name, self._number_of(value)))
            elif value is not ABSENT:
                descriptions.append((name, self._value(value)))
        for table in (module._parameters, module._buffers, module._modules):
            if not table:
                self._owners.append(table)
            else:
                descriptions += self._table(table, write_only)
        return descriptions

    def _hooks(self, module: nn.Module) -> list[Any]:
        self._reads_closures = False
        descriptions = []
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self._owners.append(hooks)
            for hook in hooks.values():
                # transformers leaves such hooks after `output_hidden_states`; they do nothing then
                if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
                    descriptions.append(self._value(hook))
        return descriptions

    def _table(self, table: dict[str, Any], write_only: dict[str, Any]) -> list[tuple[str, Any]]:
        """Describes the parameters, buffers or submodules of a module."""
        if not isinstance(table, dict):  # the table of a traced module
            self._owners.append(table)
        elif write_only.keys().isdisjoint(table):
            self._tables.append(table)
        else:
            self._partly_read.append((table, write_only))
        descriptions = []
        for name, part in table.items():
            part = write_only.get(name, part)
            if part is not ABSENT:
                descriptions.append((name, self._value(part)))
        return descriptions

    def _value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return "module", self._number_of(value)
        if isinstance(value, CONTAINER_TYPES):
            return self._container(value, depth)
        if isinstance(value, enum.Enum):
            return kind.__qualname__, value.name
        if isinstance(value, SCALAR_TYPES):
            return kind.__qualname__, repr(value)
        if isinstance(value, ARRAY_TYPES):
            return self._array(value)
        if isinstance(value, (types.BuiltinFunctionType, *NAMED_TYPES)):
            return self._named(value)
        if self._note_depth(value, depth):
            return "object", kind.__qualname__
        if isinstance(value, FUNCTION_TYPES):
            return self._callable(value, depth)
        return self._instance(value, depth)

    def _note_depth(self, value: Any, depth: int) -> bool:
        """Notes that a value is nested this deep. Returns whether that is too deep; the caller then
        describes only its type. A value that contains itself was described before."""
        is_too_deep = depth >= _MAX_DEPTH
        values = self._too_deep if is_too_deep else self._described
        values[id(value)] = value
        return is_too_deep

    def _items(self, depth: int, *items: Any) -> list[Any]:
        """Describes the items of a value that is nested this deep."""
        return [self._value(item, depth + 1) for item in items]

    def _container(self, value: Any, depth: int) -> Any:
        key = id(value), self._reads_closures
        least_depth, description = self._containers.get(key, (depth + 1, None))
        if least_depth <= depth:
            return description
        self._watch_container(value)
        kind = type(value)
        is_dict = isinstance(value, DICT_TYPES)
        items = [*(itertools.chain.from_iterable(value.items()) if is_dict else value)]
        if not SCALARS.issuperset(map(type, items)):  # a vocabulary may have millions of scalars
            if self._note_depth(value, depth) or self._count_closure_items(value):
                return kind.__qualname__, len(items)
            items = self._items(depth, *items)
        if issubclass(kind, (set, frozenset)):
            items = sorted(items, key=repr)
        description = kind.__qualname__, items
        if isinstance(value, CONTAINERS):  # `_owners` keeps it alive
            self._containers[key] = depth, description
        return description

    def _count_closure_items(self, value: Any) -> bool:
        """Counts the items of a container if it is in a closure. Returns whether there are too many
        items to read, and if so sets `undetectable`."""
        if not self._is_in_closure:
            return False
        self._num_closure_items += len(value)
        is_large = len(value) > _MAX_ITEMS or self._num_closure_items > _MAX_PLAIN_OBJECTS
        if is_large:
            self.undetectable = f"closures of its code hold more than {_MAX_ITEMS:,} values"
        return is_large

    def _array(self, value: Any) -> Any:
        self._arrays.append(value)
        value = np.asarray(value)
        if value.dtype.hasobject:
            return "array", self._value(value.tolist())
        content = hashlib.blake2b(value.tobytes(), digest_size=16).digest()
        return "array", str(value.dtype), value.shape, content

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            return "partial", self._items(depth, value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return "method", self._items(depth, value.__func__, value.__self__)
        self._functions.pending.append(value)
        return self._function(value, depth)

    def _named(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "named", value.__name__
        if isinstance(value, type) and is_user_module(value.__module__):
            return "class", self._number_of(value)
        return "named", value.__module__, value.__qualname__

    def _instance(self, value: Any, depth: int) -> Any:
        """Describes an object that is neither data nor code."""
        kind = type(value)
        if isinstance(value, UNDETECTABLE_TYPES):
            self.undetectable = (
                f"its code reads a {kind.__qualname__}, which may change between steps"
            )
            return "object", kind.__qualname__
        if package_of(kind.__module__) in STANDARD:
            return "object", kind.__qualname__, self._standard(value, depth)
        is_numbered = id(value) in self._object_numbers
        if not is_numbered and not is_user_module(kind.__module__):
            return "object", self._library_object(value, depth)
        if not is_numbered:
            self._num_plain_objects += 1
            if self._is_in_closure:
                self._closure_objects.add(id(value))
        if self._num_plain_objects <= _MAX_PLAIN_OBJECTS:
            return "object", self._number_of(value)
        self.undetectable = f"it holds more than {_MAX_PLAIN_OBJECTS:,} objects of user classes"
        return "object", kind.__qualname__

    def _watch_container(self, value: Any) -> None:
        if isinstance(value, types.MappingProxyType):
            self._iterated.append(value.values())
        elif isinstance(value, CONTAINERS):
            self._owners.append(value)
            if isinstance(value, dict):
                self._iterated.append(value)

    def _standard(self, value: Any, depth: int) -> Any:
        """Describes an object of the standard library: by its `repr` if that is complete, by its
        attributes if these hold all of it, otherwise by its type and scalars."""
        if isinstance(value, REPR_TYPES):
            return repr(value)
        if type(value).__module__ in ("collections", "functools") and hasattr(value, "__dict__"):
            # `UserDict`, `ChainMap`, `partialmethod`
            return self._value(vars(value), depth + 1)
        return self._library_object(value, depth), self._scalars(value)

    def _scalars(self, value: Any) -> Any:
        """Describes up to `_MAX_ITEMS` items of a container or attributes of an object: scalars by
        their values, other items by their types."""
        container = value if isinstance(value, CONTAINER_TYPES) else getattr(value, "__dict__", {})
        self._watch_container(container)
        items: Iterable[Any]
        items = container.items() if isinstance(container, DICT_TYPES) else enumerate(container)
        scalars = []
        for key, item in itertools.islice(items, _MAX_ITEMS):
            if type(key) not in SCALARS:
                key = repr(type(key))
            if type(item) not in SCALARS:
                item = type(item).__qualname__
            scalars.append((key, item))
        return scalars

    def _function(self, function: Any, depth: int) -> Any:
        is_user_code = is_user_module(globals_module(function))
        attributes = None
        if is_user_code:
            self._owners.append(function)
            attributes = self._value(vars(function), depth + 1)
        defaults = self._items(depth, function.__defaults__, function.__kwdefaults__)
        cells = [self._cell(cell, depth + 1, is_user_code) for cell in function.__closure__ or ()]
        code = code_hash(function.__code__)
        return "function", function.__qualname__, code, defaults, cells, attributes

    def _follow(self, function: Any) -> Any:
        """Describes the globals that a function of user code reads by name. Returns `None` for
        other functions, and for a function that has been followed before."""
        module_name = globals_module(function)
        if function in self._followed or not is_user_module(module_name):
            return None
        self._followed.add(function)
        self._reads_closures = True
        self._is_in_closure = False
        self._packages.add(package_of(module_name))
        names = names_of(function.__code__)
        self._reads_training |= "training" in names
        self._functions.add_names(names)
        read = globals_read(function)
        return [(name, self._global(owner, name, function.__code__)) for owner, name in read]

    def _global(
        self,
        namespace: dict[str, Any],
        name: str,
        code: types.CodeType,
        path: tuple[str, ...] = (),
    ) -> Any:
        """Describes a global that user code reads. `path`: the names by which the code gets to the
        module with this namespace; empty for the code's own module."""
        value = namespace[name]
        kind = type(value)
        self._globals.append((namespace, name))
        module_name = module_of(value)
        if varies(value, code):
            self.undetectable = f"its code reads {name!r}, whose value may differ each time"
        is_followed = package_of(module_name) in self._packages or is_source_module(module_name)
        if isinstance(value, types.ModuleType):
            parts = []
            if is_followed and vars(value) is not namespace:
                path = (*path, name)
                for part in attributes_read(code, path, value):
                    parts.append((part, self._global(vars(value), part, code, path)))
            return "module", module_name, parts
        if kind is types.FunctionType and not is_followed:
            return "function", value.__qualname__, code_hash(value.__code__)
        is_data = kind in SCALARS or isinstance(value, DATA_TYPES)
        is_library_object = package_of(kind.__module__) in LIBRARIES
        is_described = is_data or callable(value) or is_followed or is_library_object
        is_large = isinstance(value, CONTAINER_TYPES) and len(value) > _MAX_ITEMS
        if not is_described or is_large:
            self.undetectable = (
                f"its code reads the global {name!r}, whose changes cannot be detected"
            )
        elif is_data or is_followed or not callable(value):
            return self._value(value)
        return kind.__qualname__

    def _cell(self, cell: types.CellType, depth: int, is_user_code: bool) -> Any:
        """Describes a value in the closure of a function."""
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return "empty"
        self._owners.append(cell)
        kind = type(value)
        read_types = (Tensor, nn.Module, *NAMED_TYPES, *FUNCTION_TYPES, *UNDETECTABLE_TYPES)
        is_read = kind in SCALARS or isinstance(value, read_types)
        if is_read or (is_user_code and self._reads_closures):
            was_in_closure = self._is_in_closure
            self._is_in_closure = True
            description = self._value(value, depth)
            self._is_in_closure = was_in_closure
            return description
        if package_of(kind.__module__) in STANDARD or is_user_module(kind.__module__):
            self._closure_scalars.append(self._scalars(value))
        return self._library_object(value, depth)

    def _library_object(self, value: Any, depth: int) -> Any:
        """Describes an object without reading its attributes: autocast by its options, a wrapper
        such as accelerate's by the function inside, others by their types alone."""
        name = type(value).__qualname__
        if type(value) is torch.autocast:
            return name, value.device, str(value.fast_dtype), value._enabled
        wrapped_function = getattr(value, "__dict__", {}).get("__wrapped__")
        return name, self._value(wrapped_function, depth + 1)

    def _tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        dtype = str(tensor.dtype)
        if kind not in (nn.Parameter, Tensor):
            # a subclass, such as a quantized weight, described by its parts
            if not hasattr(tensor, "__tensor_flatten__"):
                raise ValueError(
                    f"a tensor of type {kind.__qualname__}, which has no `__tensor_flatten__`"
                )
            self._subclasses.append(tensor)
            names, context = tensor.__tensor_flatten__()
            parts = [(name, self._value(getattr(tensor, name))) for name in names]
            shape = tuple(tensor.shape)
            return kind.__qualname__, dtype, shape, parts, self._value(context)
        check_strided(tensor)
        metadata = dtype, tuple(tensor.shape), tensor.stride(), tensor.get_device()
        if id(tensor) in self._overwritten_ids:
            self.overwritten.append(tensor)
            return "overwritten", metadata
        self._all_tensors.append(tensor)
        count = len(self.tensors)
        number = self._tensor_numbers.setdefault((tensor.data_ptr(), metadata), count)
        if number == count:
            self.tensors.append(tensor)
        return "tensor", number, metadata
