"""Records the operations of a forward, PyTorch's and calls of our kernels, with their tensors.
Refuses operations that cannot be replayed. `graphs.py` decides when a forward is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import masking_utils

from ..cache.handles import LazyTensor, written_tensors
from ..interrupts import end_modes, num_modes, restoring
from ..kernels.cpp.build import observer
from ..step import NotCapturable
from .length import RANGE_FUNCTIONS, with_ranges
from .unmasked import SIZE_FUNCTIONS, UnmaskedColumns, current_columns

aten = torch.ops.aten
_LAZY_VIEWS = frozenset({"aten::_conj", "aten::_neg_view"})
# functions whose results share the memory of a tensor, which may be written to later
_MEMORY_SHARING = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
# functions that read a tensor's content, and whose results do not share its memory
_CONTENT_READING = frozenset({Tensor.tolist, Tensor.__repr__})
_INDEXED_READS = frozenset({"aten::index.Tensor", "aten::index.Tensor_out"})
_INDEXED_WRITES = frozenset({"aten::index_put", "aten::index_put_"})
# operations that create constants
_CREATES_CONSTANTS = frozenset(
    "aten::lift_fresh aten::ones aten::ones_like aten::new_ones aten::full"
    " aten::arange aten::arange.start aten::arange.start_step".split()
)
# operations whose results are never constants, since our kernels may write to them unobserved
_CREATES_OUTPUTS = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros")
# functions that create tensors from Python numbers
_FROM_PYTHON = frozenset(
    {
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        Tensor.new_tensor,
    }
)

HostResults = list[tuple[Any, Any, Any]]
"""The operations that read on the host or copy between host and device, in order. For each: the
function; a copy of the source if that is on the host, otherwise `None`; a copy of the result, or
`None` if the operation must run again, since only the size of its result is constant."""


class ContentReadError(NotCapturable):
    """Python or an operation reads the content of a tensor in a step that is being recorded. The
    operations that follow may depend on that content, which differs in replays."""

    def __init__(self, reader: object) -> None:
        super().__init__(f"its forward reads the content of a tensor ({reader})")


def tensors_in(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


class CaptureGuard(TorchDispatchMode):
    """Raises [`NotCapturable`] before an operation that reads a tensor's content on the host (and
    so waits for the device), copies between host and device, or draws random numbers; in this
    thread only, unlike torch's sync debug mode. Allows reads and copies of constants: tensors that
    are computed only from Python numbers, and so are equal in every run. `host_results` stores the
    results of these reads and copies for [`HostResultReplay`]."""

    def __init__(self) -> None:
        super().__init__()
        self.host_results: HostResults = []
        # storages of constants, by the address of the storage object: the dict keeps the objects
        # alive, so no address is reused
        self._constants: dict[int, torch.UntypedStorage] = {}
        # the same for the constants whose memory the model's code shares
        self._shared: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        refuse_draws(func, args, kwargs)
        has_constant_result = self._has_constant_result(func, args, kwargs)
        reads_on_host = _reads_on_host(func, args)
        runs_again = not has_constant_result
        if reads_on_host and runs_again and not self._has_constant_masks(func, args):
            raise ContentReadError(func)
        source = _source_of_transfer(func, args, kwargs)
        if source is not None and not self.is_constant(source):
            raise NotCapturable(f"its forward copies between host and device ({func})")
        result = func(*args, **kwargs)
        if reads_on_host or source is not None:
            copied = result
            if func is aten.copy_.default:  # only the values, not the tensor that they are part of
                copied = args[1].to(args[0].device)
            host_source = None
            if source is not None and source.is_cpu:
                host_source = source.clone()
            host_result = tree_map_only(Tensor, torch.clone, copied)
            if reads_on_host and runs_again:
                host_result = None
            self.host_results.append((func, host_source, host_result))
        if not has_constant_result:
            self._remove_constants(func, written_tensors(func, args, kwargs))
        elif not func.name().startswith(_CREATES_OUTPUTS):
            for storage in storages_of(tensors_in(result)):
                self._constants[storage._cdata] = storage
        return result

    def _has_constant_result(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation creates a constant, or all of its inputs are constants."""
        name = func.name()
        if name in _CREATES_CONSTANTS:
            return True
        if name.startswith("aten::set_"):
            return False  # gives a tensor the memory of another
        inputs = tensors_in((args, kwargs))
        return bool(inputs) and all(map(self.is_constant, inputs))

    def _has_constant_masks(self, func: Any, args: Any) -> bool:
        """Whether an operation selects elements by masks that are constants on the host. Then it
        selects the same number in every run, and does not wait for a device."""
        if func.name() not in _INDEXED_READS | _INDEXED_WRITES:
            return False
        masks = [index for index in args[1] if _has_mask([index])]
        return all(mask.is_cpu and self.is_constant(mask) for mask in masks)

    def _remove_constants(self, func: Any, tensors: Iterable[Tensor]) -> None:
        """Removes `tensors`, to which `func` wrote, from the constants. Raises [`NotCapturable`] if
        the model's code shares the memory of one of them."""
        for storage in storages_of(tensors):
            self._constants.pop(storage._cdata, None)
            if storage._cdata in self._shared:
                raise NotCapturable(
                    f"its forward reads the content of a tensor that it writes to ({func})"
                )

    def is_constant(self, tensor: Tensor) -> bool:
        storage = next(storages_of([tensor]), None)
        return storage is not None and storage._cdata in self._constants

    def note_read(self, tensor: Tensor, shares_memory: bool) -> bool:
        """Called before Python reads the content of a tensor. Returns whether Python may read it:
        `True` if the tensor is a constant. `shares_memory`: whether the model's code will share the
        tensor's memory; if so, later operations that write to the constant are refused."""
        if not self.is_constant(tensor):
            return False
        if shares_memory:
            storage = tensor.untyped_storage()
            self._shared[storage._cdata] = storage
        return True


class HostResultReplay(TorchDispatchMode):
    """While a forward runs again, returns the `host_results` of [`CaptureGuard`] instead of running
    operations that read on the host or copy between host and device. Raises [`NotCapturable`] if
    these operations, or the sources of copies from the host, differ from those of the first run."""

    def __init__(self, host_results: HostResults) -> None:
        super().__init__()
        self._expected = iter(host_results)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        source = _source_of_transfer(func, args, kwargs)
        if source is None and not _reads_on_host(func, args):
            return func(*args, **kwargs)
        expected_func, host_source, result = next(self._expected, (None, None, None))
        is_same_func = expected_func is func
        if not is_same_func or (host_source is not None and not _are_equal(host_source, source)):
            raise NotCapturable(f"its forward differs when it runs again ({func})")
        if result is None:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return func(args[0], result)
        # a copy, since the forward may write to it
        return tree_map_only(Tensor, torch.clone, result)


class HostCreation(TorchFunctionMode):
    """Creates tensors from Python numbers on the host, then copies them to the device. Dispatch
    modes see the copy, but would not see a creation on the device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_PYTHON:
            data = _data_of(func, args, kwargs)
            _refuse_tensor_lists(func, data)
            if not isinstance(data, Tensor):
                device = None
                if func is Tensor.new_tensor:
                    device = args[0].device
                device = kwargs.pop("device", device)
                if device is not None:
                    on_host = func(*args, device="cpu", **kwargs)
                    return on_host.to(device)
        return func(*args, **kwargs)


def _data_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the argument with the content of the new tensor, in a call of a function in
    `_FROM_PYTHON`; `None` if it is missing."""
    index = 1 if func is Tensor.new_tensor else 0
    if len(args) > index:
        return args[index]
    name = "obj" if func is torch.asarray else "data"
    return kwargs.get(name)


def _refuse_tensor_lists(func: Any, data: Any) -> None:
    """Raises [`ContentReadError`] if a tensor is created from a list with tensors, since their
    content is read without an operation that dispatch modes see."""
    if not isinstance(data, Tensor) and tensors_in(data):
        raise ContentReadError(func.__name__)


def refuse_draws(func: Any, args: Any, kwargs: Any) -> None:
    """Raises [`NotCapturable`] if an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
        raise NotCapturable(f"its forward draws random numbers ({func})")


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that can draw random numbers does: attention draws only with dropout."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            by_name = kwargs.get(argument.name, argument.default_value)
            dropout = args[index] if index < len(args) else by_name
            return bool(dropout)
    return True


def _reads_on_host(func: Any, args: Any) -> bool:
    """Whether the host needs the content of a tensor to run an operation, and so waits for the
    tensor's device."""
    name = func.name()
    if name in _INDEXED_READS:
        # the host reads a mask to count the selected elements, but does not read integer indices
        return _has_mask(args[1])
    if name in _INDEXED_WRITES:
        x, indices, values, *_ = args
        if not _has_mask(indices) or (values.is_cpu and values.numel() == 1):
            return False  # a single number on the host is written without counting elements
        return not (x.is_cpu and _are_broadcast(values, x, indices))
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def _source_of_transfer(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns the tensor that an operation copies between host and device; `None` if it copies
    none."""
    if func is aten.copy_.default:
        target, source = args[:2]
        device = target.device
    elif func is aten._to_copy.default:
        source = args[0]
        device = kwargs.get("device")
    else:
        return None
    if device is None or torch.device(device).type == source.device.type:
        return None
    return source


def _are_equal(a: Tensor, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of tensors; skips tensor subclasses without a storage."""
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            yield tensor.untyped_storage()


def _has_mask(indices: Any) -> bool:
    mask_dtypes = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in mask_dtypes for index in indices)


def _are_broadcast(values: Tensor, x: Tensor, indices: Any) -> bool:
    """Whether a write of `values` to `x` at `indices`, which contain a mask, writes the same values
    to every element that the mask selects, so that the number of selected elements does not
    matter."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if len(axes) > 1:
        return False
    num_inner_axes = x.dim() - axes[0] - indices[axes[0]].dim()
    return values.dim() <= num_inner_axes or values.shape[-1 - num_inner_axes] == 1


_METADATA_READING = (Tensor.device.__get__, Tensor.dtype.__get__)


class ReadGuard(TorchFunctionMode):
    """Raises [`NotCapturable`] before Python or NumPy reads the content of a tensor without an
    operation that dispatch modes see, since a replay would not run the code that uses the content.
    Allows reads of the constants of `guard`. Replaces ranges between two lengths
    (`length.with_ranges`)."""

    def __init__(self, guard: CaptureGuard | None = None) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if isinstance(self._guard, OperationRecorder) and self._guard.live_check is not None:
            return func(*args, **(kwargs or {}))
        shares_memory = func in _MEMORY_SHARING
        if shares_memory or func in _CONTENT_READING:
            if self._guard is None or not self._guard.note_read(args[0], shares_memory):
                raise ContentReadError(f"Tensor.{func.__name__}")
        if func in _FROM_PYTHON:
            _refuse_tensor_lists(func, _data_of(func, args, kwargs or {}))
        columns = current_columns.get()
        if columns is not None and func not in _METADATA_READING:
            if any(x.is_meta for x in tensors_in((args, kwargs))):
                raise NotCapturable("its decode steps read an input of its encoder")
            if func in SIZE_FUNCTIONS:
                return columns.sizes(func, args[0], args[1:], kwargs or {})
        if func in RANGE_FUNCTIONS:
            result = with_ranges(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a composite operation as the operations that it consists of, as autograd does. Returns
    `NotImplemented` for other operations."""
    name = func.name()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return NotImplemented
    return func.decompose(*args, **kwargs)


class Operation(NamedTuple):
    """An operation that PyTorch dispatched."""

    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class KernelCall(NamedTuple):
    """A call of one of our C++ kernels: its packed argument struct, and the tensors whose addresses
    the struct contains, by byte offset."""

    name: str
    packed: bytes
    reads: dict[int, Tensor]
    writes: dict[int, Tensor]


class LiveCall(NamedTuple):
    """A call of a module whose operations are not recorded: each replay calls the module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # a tensor, or a tuple or list of tensors, `None` and `LiveValue`s
    # tensors that the module read but did not compute, other than its arguments and `states`
    reads: list[Tensor]
    states: list[Tensor]  # tensors of the step's cache, which the module may have written to


Recorded = Operation | KernelCall | LiveCall


class LiveCheck(Protocol):
    """Runs the operations of a live module (`live.py`), and refuses those that a replay must not
    repeat."""

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def refuse(self, action: str) -> NoReturn:
        """Raises `live.LiveRefused`. `action`: what the module does that a live module must not."""


class OperationRecorder(CaptureGuard):
    """A [`CaptureGuard`] that also appends this thread's operations to `operations`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Recorded] = []
        self.columns = UnmaskedColumns()
        self.live_check: LiveCheck | None = None  # of the live module that is running
        # by `id` of the `LiveValue`: the `LiveValue`, and the value that a live module returned
        self.live_values: dict[int, tuple[Any, Any]] = {}
        # by address of the storage object: storages that live modules have computed but not
        # returned, which no other code may read
        self.unreturned: dict[int, tuple[torch.UntypedStorage, LiveCheck]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.live_check is not None:
            with self:
                result = decompose(func, args, kwargs)
            return self.live_check(func, args, kwargs) if result is NotImplemented else result
        if any(isinstance(leaf, LazyTensor) for leaf in tree_leaves((args, kwargs))):
            if args and isinstance(args[0], LazyTensor):
                result = args[0].symbolic(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            with self:  # also records the reads
                args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
        with self:
            result = decompose(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if func is aten._softmax.default:
            with self:
                args = self.columns.hide(*args)
        self._refuse_unreturned(tensors_in((args, kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.columns.follow(func, args, kwargs, result)
        if func.name() in _LAZY_VIEWS:
            raise NotCapturable(f"its forward conjugates or negates lazily ({func})")
        if tensors_in(result):  # otherwise, it may be a number read from a constant
            # aliases keep their shapes when later operations change the tensors' shapes in place
            aliases = tree_map_only(Tensor, aten.alias.default, (args, kwargs, result))
            self.operations.append(Operation(func, *aliases))
        elif func._schema.is_mutable:
            raise NotCapturable(f"its forward calls an operation that returns no tensor ({func})")
        return result

    def _refuse_unreturned(self, tensors: Iterable[Tensor]) -> None:
        for storage in storages_of(tensors if self.unreturned else ()):
            if storage._cdata in self.unreturned:
                self.unreturned[storage._cdata][1].refuse("keeps a tensor that other code reads")


current_recorder: ContextVar[OperationRecorder | None] = ContextVar("recorder", default=None)
"""The recorder of this thread's recording."""


@restoring
def recording() -> Iterator[list[Recorded]]:
    """A context that records this thread's operations in the list that it yields. Raises
    [`NotCapturable`] at an operation that cannot be replayed."""
    recorder = OperationRecorder()
    operations = recorder.operations
    recorder_token = current_recorder.set(recorder)
    token = observer.set(lambda *call: operations.append(KernelCall(*call)))
    columns_token = current_columns.set(recorder.columns)
    num_before = num_modes()
    is_tracing = masking_utils.is_tracing
    try:
        # While tracing, transformers creates each mask, without first reading whether it would hide
        # anything. Other threads are unaffected, and only one records at a time.
        masking_utils.is_tracing = lambda x: observer.get() is not None or is_tracing(x)
        with ReadGuard(recorder), recorder:
            yield operations
    finally:
        masking_utils.is_tracing = is_tracing
        current_columns.reset(columns_token)
        observer.reset(token)
        current_recorder.reset(recorder_token)
        end_modes(num_before)  # a mode that an interrupt left active would refuse later operations
