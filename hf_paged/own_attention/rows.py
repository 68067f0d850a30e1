"""The tensors that a model's own attention code gets in a packed step: keys and values that record
operations until attention runs. `scores` defines the operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cache.handles import MEMORY_READERS, LazyTensor, make_without_memory
from ..cache.kv_blocks import KVBlocks
from ..step import NotPackable, StepMetadata

NOT_READABLE = "the model's code reads packed keys, values or scores, which only attention can read"


class DeferredTensor(LazyTensor):
    """A tensor of a packed step, whose values only our attention can read. `functions` maps names
    of torch functions to the functions that handle their calls, most by deferring them until
    attention runs. Any other read of the values raises [`NotPackable`]."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    # shape and dtype, for our own code: reading torch's attributes is slower
    sizes: tuple[int, ...]
    nominal_dtype: torch.dtype
    arguments: dict[str, Any]  # of the constructor

    @classmethod
    def make(cls, sizes: tuple[int, ...], device: torch.device, **arguments: Any) -> Any:
        """Makes a tensor with the constructor's `arguments`, `dtype` among them, as attributes."""
        nominal_dtype = arguments["dtype"]
        tensor = make_without_memory(cls, sizes, dtype=nominal_dtype, device=device)
        vars(tensor).update(
            arguments, sizes=sizes, nominal_dtype=nominal_dtype, arguments=arguments
        )
        return tensor

    def replace(self, **changes: Any) -> Any:
        """Returns a tensor with the same constructor arguments except `changes`."""
        return type(self)(**{**self.arguments, **changes})

    def dense(self) -> Tensor:
        raise NotPackable(NOT_READABLE)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.__name__
        if name != "__get__":  # `__get__` reads shape, dtype and other attributes
            functions = cls.functions
            function = functions.get(name) or functions.get(name.strip("_"))
            if function is not None:
                kwargs = kwargs or {}
                try:
                    return function(func, *args, **kwargs)
                except TypeError as error:
                    if _accepts(function, func, *args, **kwargs):
                        # not as a `TypeError`, which torch's `@` would turn into `NotImplemented`
                        raise RuntimeError(f"`{name}` failed: {error}") from error
                    raise NotPackable(
                        f"the arguments of `{name}` on packed keys, values or scores are not"
                        " supported"
                    ) from error
            if func in MEMORY_READERS:
                raise NotPackable(NOT_READABLE)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the function's parameters allow these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class DeferredKV(DeferredTensor):
    """Keys or values of a packed step, in the shape that a model's own attention code expects:
    `(1, heads, key_len, dim)`, possibly without the first axis or with the last two transposed.
    Each query sees the keys and values of its own row."""

    step: StepMetadata
    layer: KVBlocks
    blocks: Tensor
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        step: StepMetadata,
        layer: KVBlocks,
        blocks: Tensor,
        dtype: torch.dtype,
        ndim: int = 4,
        is_transposed: bool = False,
    ) -> Any:
        _, heads, _, dim = blocks.shape
        axes = (dim, step.key_len) if is_transposed else (step.key_len, dim)
        shape = (1, heads, *axes)[4 - ndim :]
        return cls.make(
            shape,
            blocks.device,
            step=step,
            layer=layer,
            blocks=blocks,
            dtype=dtype,
            ndim=ndim,
            is_transposed=is_transposed,
        )
