"""Modules that replays call live, since their forwards read the content of tensors and so differ
from step to step, as those of experts that loop over the experts chosen. Decides which modules
these are, and calls them while the other operations of a step are recorded. `entries.ModuleCall`
calls them in replays."""

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
from .columns import Columns, LiveColumns, with_stored
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
from .unmasked import running

_CONSTANTS = SCALARS | {torch.dtype, torch.device, torch.Size}
# other code may wrap the method, now or later
_CALL_CODE = getattr(nn.Module._call_impl, "__code__", None)


class LiveRefused(NotCapturable):
    """A module of this class must not be live."""

    def __init__(self, kind: type[nn.Module], action: str) -> None:
        super().__init__(f"its {kind.__name__} {action}")
        self.kind = kind


class LiveValue:
    """Stands for a value other than a tensor that a live module returned: the value may differ in
    each step, so only other live modules get it. Raises [`ContentReadError`] where other code
    uses it during a recording."""

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
        """Returns why no step with a context for adapters is replayed, if there are `classes`."""
        names = ", ".join(sorted(kind.__name__ for kind in self.classes))
        return f"replays call {names}, without adapters"

    def clear(self) -> None:
        self.classes.clear()
        self._refused.clear()

    def learn(self, error: BaseException) -> bool:
        """Takes the error of a recording or of a replay. Returns whether another recording may
        succeed since it would call modules of other classes live: no longer a class that was
        `LiveRefused`, or also the innermost module that reads content and can be called again with
        other tensors."""
        if isinstance(error, LiveRefused):
            self.classes.discard(error.kind)
            self._refused.add(error.kind)
            return True
        if not isinstance(error, ContentReadError):
            return False
        excluded = self._refused | self.classes
        for module, arguments in reversed([*_calls_in(error.__traceback__)]):
            is_callable = all(map(_is_argument, tree_leaves(arguments)))
            if type(module) not in excluded and is_callable and not _runs_user_code(module):
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
                args, kwargs = with_stored(tree_map(_live_leaf, (args, kwargs)))
                return call(module, *args, **kwargs)
            if _surroundings(num_recorder_modes=1) != surroundings:
                raise LiveRefused(type(module), "runs in a context, which replays do not enter")
            return _call_live(recorder, call, module, args, kwargs)

        def set_checked(module: nn.Module, name: str, value: Any) -> None:
            recorder = current_recorder.get()
            if recorder is not None and recorder.live_check is not None:
                recorder.live_check.refuse(f"sets the attribute `{name}`, which code may read")
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
    """Whether a call of the module may run code from outside of the libraries: code that may store
    the numbers that it reads in a global, a config or an object, where recorded code would not see
    that they change."""
    return any(map(_has_user_code, module.modules()))


def _has_user_code(module: nn.Module) -> bool:
    """As `_runs_user_code`, without its submodules."""
    kind = type(module)
    code_globals = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    names = {kind.__module__, kind.forward.__module__, code_globals.get("__name__", "")}
    has_hooks = module._forward_pre_hooks or module._forward_hooks
    return bool(has_hooks) or "forward" in vars(module) or any(map(is_user_module, names))


def _surroundings(num_recorder_modes: int = 0) -> tuple[Any, ...]:
    """The state of torch in which a module runs, other than its gradient mode, without the
    recorder's function modes and dispatch modes, equally many of each."""
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


def _is_argument(leaf: Any) -> bool:
    """Whether a live module may get an argument: one that is a plain tensor, a constant or what
    another live module returned, or that `_live_leaf` replaces, and no other cache or object with
    tensors."""
    kind = type(leaf)
    if _is_plain(leaf) or kind in _CONSTANTS:
        return True
    return kind in (LiveValue, Columns, StepCache) or issubclass(kind, LazyTensor)


def _live_leaf(leaf: Any) -> Any:
    """Returns what a live module gets in place of an argument of the recorded forward. `leaf` may
    be a `LiveValue`, whose class must not be read."""
    if issubclass(type(leaf), LazyTensor):
        return leaf.read()
    if type(leaf) is Columns:
        return LiveColumns.of(leaf)
    return leaf.live() if type(leaf) is StepCache else leaf


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu"


def _call_live(
    recorder: OperationRecorder, call: Any, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Calls a module without recording its operations, and appends the call to the recorder's."""
    leaves = tree_leaves((args, kwargs))
    if not all(map(_is_argument, leaves)):
        raise LiveRefused(type(module), "gets arguments other than tensors and constants")
    caches = [leaf for leaf in leaves if type(leaf) is StepCache]
    states = [tensor for cache in caches for tensor in cache.live_tensors]
    args, kwargs = tree_map(_live_leaf, (args, kwargs))
    arguments = [leaf for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)]
    check = _Check(type(module), arguments, states)
    if _runs_user_code(module):
        check.refuse("runs code from outside of the libraries")
    if any(map(recorder.columns.has_unmasked, arguments)):
        check.refuse("gets keys without a mask of those that are stored")
    with _disable_current_modes():
        leaves, spec = tree_flatten(with_stored((args, kwargs)))
    values = [
        recorder.live_values[id(leaf)][1] if type(leaf) is LiveValue else leaf for leaf in leaves
    ]
    live_args, live_kwargs = tree_unflatten(values, spec)
    before, spec = tree_flatten((live_args, live_kwargs))
    with _disable_current_modes():
        snapshot = Snapshot(module)
    observer_token = observer.set(check.refuse_kernel)
    columns_token = running.set(None)
    recorder.live_check = check
    try:
        result = call(module, *live_args, **live_kwargs)
    finally:
        recorder.live_check = None
        running.reset(columns_token)
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
    """Returns a module's result with [`LiveValue`]s for values other than tensors and `None`."""
    items = [*result] if type(result) in (tuple, list) else [result]
    returned = set[int]()
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            returned.add(check.storage_of_result(item))
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
    """Runs the operations of a live module (`record.LiveCheck`), which may read its arguments, what
    it computes and, as the lowering checks, tensors that outlive the recording, and write only to
    what it computes."""

    def __init__(
        self, kind: type[nn.Module], arguments: list[Tensor], states: list[Tensor]
    ) -> None:
        """`states`: those of the step's cache, which it may write to."""
        self.kind = kind
        self._states = {storage._cdata: storage for storage in storages_of(states)}
        # by address of the storage object, as the other dicts
        self._arguments = {storage._cdata: storage for storage in storages_of(arguments)}
        self._arguments |= self._states
        self.computed = dict[int, torch.UntypedStorage]()
        self.reads = dict[int, Tensor]()

    def refuse(self, action: str) -> NoReturn:
        raise LiveRefused(self.kind, action)

    def refuse_kernel(self, *call: Any) -> None:
        self.refuse("calls a kernel of ours, whose inputs a replay may not fill")

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        refuse_draws(func, args, kwargs)
        inputs = tensors_in((args, kwargs))
        if not all(map(_is_plain, inputs)):
            self.refuse("uses a tensor that is not a plain one on the CPU")
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

    def storage_of_result(self, tensor: Tensor) -> int:
        """Returns the address of a result's storage object; refuses a result that a replay cannot
        copy to memory of its own."""
        is_lazy = not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg()
        if is_lazy or tensor.layout is not torch.strided:
            self.refuse("returns a tensor that is not a plain one on the CPU")
        address = tensor.untyped_storage()._cdata
        if address not in self.computed:
            self.refuse("returns a tensor that it has not computed")
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
            self.refuse("returns a tensor whose elements share memory")
        return address
