"""Lazy tensors that stand for a layer's cached keys or values, and gather them only when code reads
them. `attention` implements the functions that read the blocks in place."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..interrupts import is_interrupt
from ..step import KeysReadError, NotPackable, StepMetadata
from .kv_blocks import KVBlocks
from .reading import gather, read_rows

READ_ONLY = (
    "keys and values of a paged cache cannot be written to in place, since other rows and prefixes"
    " may share their blocks: store changed copies (`cache.layers[i].keys.clone()`) in an empty"
    " cache with `update(keys, values, i)`, or pass a `DynamicCache`"
)


class LazyTensor(Tensor):
    """A tensor without memory: torch operations on it get the ordinary tensor that `read`
    returns."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dense(self) -> Tensor:
        """Returns the ordinary tensor that this one stands for."""
        raise TypeError(f"a {type(self).__name__} has no values to read")

    def read(self) -> Tensor:
        """Returns `dense()`, for code outside hf_paged."""
        return self.dense()

    def symbolic(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation if it does not depend on this tensor's values;
        otherwise `NotImplemented`."""
        return NotImplemented

    def refuse_write(self) -> None:
        """Raises an error if a write in place to this tensor would be lost; by default, never."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and func not in _CHANGE_NO_VALUES:
            for tensor in written_tensors(func, args, kwargs):
                if isinstance(tensor, LazyTensor):
                    tensor.refuse_write()
        if args and isinstance(args[0], LazyTensor):
            result = args[0].symbolic(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _call_on_dense(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class ReadOnlyTensor(LazyTensor):
    """Cached keys or values, or a view of them. Writes in place raise `RuntimeError`, since they
    would change only a copy."""

    has_read_only_views = True
    # replacements for torch functions called with these tensors; set by `hf_paged.attention`
    functions: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}

    def refuse_write(self) -> None:
        raise RuntimeError(READ_ONLY)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            # for inference tensors, torch skips this decomposition, which may yield views
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        base = args[0] if args else None
        if not isinstance(base, ReadOnlyTensor) or not base.has_read_only_views:
            return result
        dense = base.dense()

        def protect(tensor: Tensor) -> Tensor:
            return ViewTensor(tensor) if torch._C._is_alias_of(tensor, dense) else tensor

        with torch.inference_mode(base.is_inference()):
            # the mode in which `base` was made, since torch makes the result a view of `base`
            if isinstance(result, Tensor):  # faster than `tree_map_only`
                return protect(result)
            return tree_map_only(Tensor, protect, result)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in cls.functions:
            return cls.functions[func](*args, **kwargs)
        if func in _WRITERS and isinstance(args[0], ReadOnlyTensor):
            args[0].refuse_write()
        requires_grad = func in _GRADIENT_SETTERS and (*args[1:], *kwargs.values(), True)[0]
        if requires_grad:
            raise RuntimeError(
                "keys and values read from a paged cache are not leaves of an autograd graph: store"
                " clones that require gradients in an empty cache with `update(keys, values, i)`"
            )
        are_lazy = all(issubclass(tensor_type, LazyTensor) for tensor_type in types)
        if func in MEMORY_READERS or not are_lazy:
            # other subclasses (quantized weights) and functions that access memory get ordinary
            # tensors
            result = _call_on_dense(func, args, kwargs)
            if func in _RETURN_ARRAYS:
                result.setflags(write=False)
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()


class ViewTensor(ReadOnlyTensor):
    """A view of the keys or values of a layer."""

    view_of_dense: Tensor

    @staticmethod
    def __new__(cls, view: Tensor) -> ViewTensor:
        self = make_without_memory(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
        )
        self.view_of_dense = view
        return self

    def dense(self) -> Tensor:
        return self.view_of_dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.view_of_dense)

    def __format__(self, format_spec: str) -> str:
        return format(self.view_of_dense, format_spec)


class PagedTensor(ReadOnlyTensor):
    """A handle to a layer's keys or values in blocks, `(batch, heads, length, dim)`. Our attention
    function reads `blocks` through `step`. Any other operation gets the tensor of `dense` or, for
    packed rows `(1, heads, num_tokens, dim)`, raises [`NotPackable`]."""

    step: StepMetadata
    layer: KVBlocks
    blocks: Tensor
    is_value: bool
    fresh: Tensor | None
    reader: Any
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls,
        step: StepMetadata,
        layer: KVBlocks,
        is_value: bool,
        fresh: Tensor | None = None,
        reader: Any = None,
        has_read_only_views: bool = False,
    ) -> PagedTensor:
        """`fresh`: this step's new K or V, `(batch, heads, n, dim)`, if nothing was cached before
        or rows are packed. `reader.should_gather` becomes `True` when code other than our attention
        function reads this tensor. `has_read_only_views`: whether views are also read-only."""
        blocks = layer.values if is_value else layer.keys
        if fresh is not None:
            shape = fresh.shape
            strides = fresh.stride()
            dtype = fresh.dtype
        else:
            assert step.columns is not None
            heads = blocks.shape[1]
            length = len(step.columns)
            dim = blocks.shape[3]
            shape = torch.Size((step.num_rows, heads, length, dim))
            # torch computes views with these strides, so `dense()` must have the same strides
            strides = (heads * length * dim, length * dim, dim, 1)
            dtype = layer.dtypes[is_value]
        device = blocks.device
        self = make_without_memory(cls, shape, strides=strides, dtype=dtype, device=device)
        self.is_value = is_value
        self.bind(step, layer, fresh)
        self.reader = reader
        self.has_read_only_views = has_read_only_views
        self._dense = None
        return self

    def bind(self, step: Any, layer: Any, fresh: Tensor | None) -> None:
        """Makes this the handle of another step, whose K/V have an equal `store_signature`. Between
        packed steps, all arguments are `None`: handles are reused, but must keep no tensors alive
        that the storage may replace."""
        self.step, self.layer, self.fresh = step, layer, fresh
        self.blocks = layer and (layer.values if self.is_value else layer.keys)

    def dense(self) -> Tensor:
        """Returns an ordinary tensor: `fresh`, or K/V read from the blocks once. Raises
        [`NotPackable`] for packed rows, and `KeysReadError` if only the device knows the
        lengths."""
        if self._dense is None:
            if self.step.columns is None:
                raise NotPackable(
                    "the model's code reads packed keys or values, which only the attention"
                    " interface can read"
                )
            if self.fresh is not None:
                self._dense = self.fresh
            elif self.step.lengths is not None:
                raise KeysReadError(
                    "the model's code reads keys or values, whose lengths only the device knows"
                )
            else:
                # an inference tensor if this handle is one, since torch makes views of `_dense`
                # views of this handle
                with torch.inference_mode(self.is_inference()):
                    self._dense = read_rows(self.step, self.layer, self.is_value)
        return self._dense

    def materialize(self) -> None:
        """Gathers a copy before the blocks change, unless `dense` needs no blocks. Takes no
        lock."""
        is_gathered = self._dense is not None or self.fresh is not None
        if not is_gathered and self.step.columns is not None:
            # not in this thread's mode: garbage collection may have called this from any code
            with torch.inference_mode(False):
                self._dense = gather(self.step, self.layer, self.is_value)

    def read(self) -> Tensor:
        if self.reader is not None:
            self.reader.should_gather = True
        return self.dense()

    def refuse_write(self) -> None:
        if self.step.columns is None:
            self.dense()  # raises `NotPackable`
        super().refuse_write()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_STRIDES:
            _make_contiguous((args, kwargs))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:  # such as a view that requires a contiguous tensor
            if func._schema.is_mutable or is_interrupt(error):
                raise
            if not _make_contiguous((args, kwargs)):
                raise
            return super().__torch_dispatch__(func, types, args, kwargs)

    def make_contiguous(self) -> bool:
        """Makes this layer return contiguous tensors from now on, for model code that relies on
        strides. Returns `False`, with the layer unchanged, if this handle's tensor is already
        contiguous."""
        if self.read().is_contiguous():
            return False
        with torch.inference_mode(self.is_inference()):
            contiguous = self.dense().contiguous()
        assert self.layer.rows is not None
        self.layer.rows.disallow_views()
        self._dense = contiguous
        return True


class LatentTensor(LazyTensor):
    """Keys or values that attention may compute from latents (`hf_paged.latent`)."""

    step: StepMetadata

    absorb: Callable[[Tensor, Tensor], Any]
    """Takes queries and values. Returns an equivalent attention over latents: its queries, its
    blocks, and the function that maps its output; `None` if there is none."""

    attend_packed: Callable[..., Tensor]
    """Takes queries `(1, heads, T, key_dim)`, values, a packed step, and a tuple of scale, softcap
    and sinks. Returns the attention over these keys, `(T, heads, value_dim)`. Raises `NotPackable`
    if the values come from other latents, and `NotCapturable` if a recorded step must compute keys
    from latents."""


class Handles:
    """Weak references to the live handles of a cache. The memory also holds this object: if only a
    garbage cycle with the cache held it, Python would clear the references before calling the
    cache's finalizer."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[PagedTensor]] = []

    def add(self, handle: PagedTensor) -> PagedTensor:
        """Returns `handle`, after adding it."""
        if len(self._refs) > 64:
            live_refs = [ref for ref in self._refs if ref() is not None]
            self._refs[:] = live_refs
        self._refs.append(weakref.ref(handle))
        return handle

    def gather(self) -> None:
        """Gathers a copy for each live handle and forgets all handles. Continues after an error,
        unless it is an interrupt; raises the first error at the end."""
        first_error: Exception | None = None
        for ref in self._refs:
            try:
                handle = ref()
                if handle is not None:
                    handle.materialize()
            except Exception as error:  # out of memory
                if is_interrupt(error):
                    raise
                first_error = first_error or error
        self._refs.clear()
        if first_error is not None:
            raise first_error

    def clear(self) -> None:
        self._refs.clear()


# Operations whose stride arguments assume a contiguous tensor.
_READS_STRIDES = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten._reshape_alias.default,
}

# Functions that torch does not dispatch, since they access a tensor's memory, which handles lack.
MEMORY_READERS = {
    Tensor.__array__,
    Tensor.__cuda_array_interface__.__get__,
    Tensor.__dlpack__,
    Tensor.apply_,
    Tensor.data_ptr,
    Tensor.map_,
    Tensor.numpy,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.tolist,
    Tensor.untyped_storage,
}

_RETURN_ARRAYS = {Tensor.__array__, Tensor.numpy}

_GRADIENT_SETTERS = {Tensor.requires_grad_, Tensor.requires_grad.__set__}

# Functions that write, but that torch does not dispatch, or dispatches as several operations.
_WRITERS = {
    Tensor.__setitem__,
    Tensor.apply_,
    Tensor.map_,
    Tensor.data.__set__,
}

# Operations with a mutable argument that change no values.
_CHANGE_NO_VALUES = {
    torch.ops.aten.detach_.default,
    torch.ops.aten.record_stream.default,
}


def make_without_memory(cls: type[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Returns a tensor of a subclass, without memory. Native code that asks for its address
    (`torch.utils.dlpack.to_dlpack`, extensions) gets an error instead of the address 0."""
    tensor = Tensor._make_wrapper_subclass(cls, *args, **kwargs)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yields the tensors that an operation writes to, according to its schema."""
    for index, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        if index < len(args):
            value = args[index]
        else:
            value = kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _call_on_dense(func: Any, args: Any, kwargs: Any) -> Any:
    dense_kwargs = {name: _to_dense(value) for name, value in kwargs.items()}
    return func(*map(_to_dense, args), **dense_kwargs)


def _to_dense(value: Any) -> Any:
    """Returns an argument of a function, with each lazy tensor in it replaced by its content."""
    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, (tuple, list, dict)):
        return tree_map_only(LazyTensor, operator.methodcaller("read"), value)
    return value


def _make_contiguous(arguments: Any) -> int:
    """Calls `PagedTensor.make_contiguous` on the handles in a function's arguments, except handles
    of layers without mapped rows (`KVBlocks.rows`). Returns how many were not contiguous."""
    handles = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, PagedTensor))
    return sum(handle.make_contiguous() for handle in handles if handle.layer.rows is not None)
