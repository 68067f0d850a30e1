"""Modules that a replay calls as Python code ("live") instead of replaying their operations, since
their forwards read the content of tensors: a mixture of experts, for instance, loops over the
experts that its router has chosen. Decides which modules these are, and calls them while the other
operations of a step are recorded. `entries.ModuleCall` calls them in replays."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..cache.handles import LazyTensor, written_tensors
from ..cache.memory import autocast_dtype
from ..interrupts import num_modes, restoring
from ..kernels.cpp.build import observer
from ..model.values import SCALARS, is_user_module
from ..model.writes import Snapshot, Write
from ..step import NotCapturable
from .columns import Columns, LiveColumns, with_stored_columns
from .record import (
    ContentReadError,
    LiveCall,
    OperationRecorder,
    current_recorder,
    refuse_draws,
    storages_of,
    tensors_in,
)
from .step_cache import StepCache
from .torch_options import torch_options
from .unmasked import current_columns

_CONSTANTS = SCALARS | {torch.dtype, torch.device, torch.Size}
# other code may wrap the method, now or later
_CALL_CODE = getattr(nn.Module._call_impl, "__code__", None)


class LiveRefused(NotCapturable):
    """A module of this class must not be called live."""

    def __init__(self, module_class: type[nn.Module], action: str) -> None:
        super().__init__(f"its {module_class.__name__} {action}")
        self.module_class = module_class


class LiveValue:
    """Stands for a result of a live module that is not a tensor: it may differ in each step, so
    only other live modules get it. Raises [`ContentReadError`] where other code uses it during a
    recording."""

    __slots__ = ()

    def _refuse(self, *args: Any) -> Any:
        raise ContentReadError("a number that a module computed")

    def _get_class(self) -> Any:
        return LiveValue if current_recorder.get() is None else self._refuse()

    __class__: Any = property(_get_class)
    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = _refuse
    __contains__ = __index__ = __int__ = __float__ = __eq__ = __ne__ = __hash__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __str__ = __repr__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse


class LiveModules:
    """The classes of one model's modules that its recordings call live."""

    def __init__(self) -> None:
        self.classes = set[type[nn.Module]]()
        self._refused = set[type[nn.Module]]()

    def reason_against_adapters(self) -> str:
        """Returns why steps with adapters are not replayed. There must be `classes`."""
        names = ", ".join(sorted(module_class.__name__ for module_class in self.classes))
        return f"replays call {names} without the request's adapter"

    def clear(self) -> None:
        self.classes.clear()
        self._refused.clear()

    def learn(self, error: BaseException) -> bool:
        """Updates `classes` after a recording or replay has raised an error. Removes the class that
        a [`LiveRefused`] names. After a [`ContentReadError`], adds the class of the innermost
        module that was running and that may be called live. Returns whether another recording may
        therefore succeed."""
        if isinstance(error, LiveRefused):
            self.classes.discard(error.module_class)
            self._refused.add(error.module_class)
            return True
        if not isinstance(error, ContentReadError):
            return False
        excluded = self._refused | self.classes
        for module, arguments in reversed([*_calls_in(error.__traceback__)]):
            has_allowed_arguments = all(map(_is_allowed_argument, tree_leaves(arguments)))
            if (
                type(module) not in excluded
                and has_allowed_arguments
                and not _runs_user_code(module)
            ):
                self.classes.add(type(module))
                return True
        return False

    @restoring
    def calling(self) -> Iterator[None]:
        """A context in which this thread's recording calls the modules live."""
        classes = frozenset(self.classes)
        call, set_attribute = nn.Module._call_impl, nn.Module.__setattr__
        surroundings = _surroundings()
        thread = threading.get_ident()

        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorder = current_recorder.get()
            is_nested = recorder is not None and recorder.live_check is not None
            is_other_thread = threading.get_ident() != thread
            if type(module) not in classes or is_nested or is_other_thread:
                return call(module, *args, **kwargs)
            if recorder is None:  # the run before the recording
                args, kwargs = with_stored_columns(tree_map(_live_leaf, (args, kwargs)))
                return call(module, *args, **kwargs)
            if _surroundings(num_recorder_modes=1) != surroundings:
                raise LiveRefused(type(module), "runs in a context that replays do not enter")
            return _call_live(recorder, call, module, args, kwargs)

        def set_checked(module: nn.Module, name: str, value: Any) -> None:
            recorder = current_recorder.get()
            if recorder is not None and recorder.live_check is not None:
                recorder.live_check.refuse(f"sets the attribute `{name}`, which others may read")
            set_attribute(module, name, value)

        table: Any = nn.Module
        if not classes:
            yield
            return
        try:
            table._call_impl, table.__setattr__ = call_module, set_checked
            yield
        finally:
            table._call_impl, table.__setattr__ = call, set_attribute


def _runs_user_code(module: nn.Module) -> bool:
    """Whether a call of the module may run users' code, which may store the numbers that it reads
    in a global, a config or an object, where recorded code would not see that they change."""
    return any(map(_has_user_code, module.modules()))


def _has_user_code(module: nn.Module) -> bool:
    """As `_runs_user_code`, for the module without its submodules."""
    forward = type(module).forward
    code_globals = getattr(inspect.unwrap(forward), "__globals__", {})
    names = {type(module).__module__, forward.__module__, code_globals.get("__name__", "")}
    has_hooks = module._forward_pre_hooks or module._forward_hooks
    return bool(has_hooks) or "forward" in vars(module) or any(map(is_user_module, names))


def _surroundings(num_recorder_modes: int = 0) -> tuple[Any, ...]:
    """Returns the state of torch in which a module runs: the numbers of function modes and of
    dispatch modes, the dtype of autocast, and the options, but not the gradient mode. Does not
    count the recorder's own modes: `num_recorder_modes` of each type."""
    modes = [count - num_recorder_modes for count in num_modes()]
    return modes, autocast_dtype(torch.device("cpu")), torch_options()


def _calls_in(traceback: TracebackType | None) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules that were running, the outermost first, and their arguments."""
    while traceback is not None:
        frame = traceback.tb_frame
        variables = frame.f_locals if frame.f_code is _CALL_CODE else {}
        if "self" in variables:
            yield variables["self"], (variables["args"], variables["kwargs"])
        traceback = traceback.tb_next


def _is_allowed_argument(leaf: Any) -> bool:
    """Whether a live module may take this argument: a plain tensor, a constant, a result of another
    live module, or an object that `_live_leaf` replaces. Other caches, and other objects with
    tensors, are not allowed."""
    kind = type(leaf)
    if _is_plain(leaf) or kind in _CONSTANTS:
        return True
    return kind in (LiveValue, Columns, StepCache) or issubclass(kind, LazyTensor)


def _live_leaf(leaf: Any) -> Any:
    """Returns the value that a live module gets in place of an argument of the recorded forward.
    Reads the argument's class with `type`, since a `LiveValue` refuses to give its `__class__`."""
    if issubclass(type(leaf), LazyTensor):
        return leaf.read()
    if type(leaf) is Columns:
        return LiveColumns.of(leaf)
    return leaf.live_cache() if type(leaf) is StepCache else leaf


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu"


def _call_live(
    recorder: OperationRecorder, call: Any, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Calls a module without recording its operations, and appends the call to the recorder's
    operations."""
    leaves = tree_leaves((args, kwargs))
    if not all(map(_is_allowed_argument, leaves)):
        raise LiveRefused(type(module), "gets arguments other than tensors and constants")
    caches = [leaf for leaf in leaves if type(leaf) is StepCache]
    states = [tensor for cache in caches for tensor in cache.live_tensors]
    args, kwargs = tree_map(_live_leaf, (args, kwargs))
    arguments = [leaf for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)]
    check = _Check(type(module), arguments, states)
    if _runs_user_code(module):
        check.refuse("runs users' code")
    if any(map(recorder.columns.has_unmasked, arguments)):
        check.refuse("gets keys without a mask that hides the columns that are not stored")
    with _disable_current_modes():
        leaves, spec = tree_flatten(with_stored_columns((args, kwargs)))
    values = [
        recorder.live_values[id(leaf)][1] if type(leaf) is LiveValue else leaf for leaf in leaves
    ]
    live_args, live_kwargs = tree_unflatten(values, spec)
    before, spec = tree_flatten((live_args, live_kwargs))
    with _disable_current_modes():
        snapshot = Snapshot(module)
    observer_token = observer.set(check.refuse_kernel)
    columns_token = current_columns.set(None)
    recorder.live_check = check
    try:
        result = call(module, *live_args, **live_kwargs)
    finally:
        recorder.live_check = None
        current_columns.reset(columns_token)
        observer.reset(observer_token)
    writes = list[Write]()
    with _disable_current_modes():
        snapshot.restore(by_engine=True, writes=writes)
    after, spec_after = tree_flatten((live_args, live_kwargs))
    is_same = spec_after == spec and all(map(operator.is_, before, after))
    if writes or not is_same:
        check.refuse("changes its attributes or its arguments")
    result = _as_results(recorder, check, result)
    reads = [*check.reads.values()]
    recorder.operations.append(LiveCall(module, args, kwargs, result, reads, states))
    return result


def _as_results(recorder: OperationRecorder, check: _Check, result: Any) -> Any:
    """Returns a module's result with [`LiveValue`]s in place of values other than tensors and
    `None`. Adds the storages that the module has not returned to the recorder's `unreturned`."""
    items = [*result] if type(result) in (tuple, list) else [result]
    returned = set[int]()
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            returned.add(check.checked_address(item))
        elif item is not None:
            if not all(type(leaf) in SCALARS for leaf in tree_leaves(item)):
                check.refuse("returns values other than tensors and numbers")
            items[index] = LiveValue()
            recorder.live_values[id(items[index])] = items[index], item
    for address, storage in check.computed.items():
        if address not in returned:
            recorder.unreturned[address] = storage, check
    return type(result)(items) if type(result) in (tuple, list) else items[0]


class _Check:
    """Runs the operations of a live module (`record.LiveCheck`). The module may read its arguments,
    its own results, and tensors that outlive the recording (`Lowering` checks that they do). It may
    write only to its own results and to the states of the step's cache."""

    def __init__(
        self, module_class: type[nn.Module], arguments: list[Tensor], states: list[Tensor]
    ) -> None:
        """`states`: those of the step's cache."""
        self._module_class = module_class
        # by address of the storage object, as are the dicts below
        self._states = {storage._cdata: storage for storage in storages_of(states)}
        self._arguments = {storage._cdata: storage for storage in storages_of(arguments)}
        self._arguments |= self._states
        self.computed = dict[int, torch.UntypedStorage]()
        self.reads = dict[int, Tensor]()

    def refuse(self, action: str) -> NoReturn:
        raise LiveRefused(self._module_class, action)

    def refuse_kernel(self, *call: Any) -> None:
        self.refuse("calls a kernel of hf_paged, whose inputs a replay might not fill")

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        refuse_draws(func, args, kwargs)
        inputs = tensors_in((args, kwargs))
        if not all(map(_is_plain, inputs)):
            self.refuse("uses a tensor that is not a plain CPU tensor")
        is_new = func.name() == "aten::lift_fresh"  # a new tensor of Python numbers
        for tensor in inputs:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if is_new:
                self.computed[address] = storage
            elif address not in self.computed and address not in self._arguments:
                self.reads.setdefault(address, tensor)
        for tensor in written_tensors(func, args, kwargs):
            address = tensor.untyped_storage()._cdata
            if address not in self.computed and address not in self._states:
                self.refuse("writes to a tensor that it has not computed")
        result = func(*args, **kwargs)
        for storage in storages_of(tensors_in(result)):
            if storage._cdata not in self._arguments and storage._cdata not in self.reads:
                self.computed[storage._cdata] = storage
        return result

    def checked_address(self, tensor: Tensor) -> int:
        """Returns the address of a result's storage object; refuses a result that a replay cannot
        copy to the tape's memory."""
        is_lazy = not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg()
        if is_lazy or tensor.layout is not torch.strided:
            self.refuse("returns a tensor that is not a plain CPU tensor")
        address = tensor.untyped_storage()._cdata
        if address not in self.computed:
            self.refuse("returns a tensor that it has not computed")
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
            self.refuse("returns a tensor whose elements share memory")
        return address
