"""Products of linear layers in forwards without a tape: `linear.cpp` multiplies few half-precision
rows, and many rows are multiplied in float32 if PyTorch has no native kernels for their dtype.
`lower.py` lowers products in tapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..compiled import is_compiled
from ..kernels import cpp
from ..kernels.cpp.build import batch_invariant, observer
from ..kernels.cpp.linear import (
    HALVES,
    MIN_FLOAT32_ROWS,
    is_native,
    linear,
    linear_float32,
    max_rows,
)

UNLIMITED_ROWS = 1 << 60


class RowProducts(TorchFunctionMode):
    """Runs `F.linear` (and `Conv1D`'s `addmm`) of plain tensors as a product of two matrices.
    Otherwise, PyTorch would add the bias before or after rounding, depending on the input's
    strides."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        linear_args = ()
        if func is F.linear:
            linear_args = args
        elif func is torch.addmm and len(args) == 3:
            linear_args = _linear_args_of_conv1d(*args)
        multiply = None
        if linear_args and not kwargs:
            multiply = self._choose(*linear_args)
        if multiply is None:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = linear_args
        depth = x.shape[-1]
        width = weight.shape[0]
        rows = x.reshape(-1, depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = multiply(rows, weight, *bias)
        return out.view(*x.shape[:-1], width)

    def _choose(self, x: Any, weight: Any, bias: Any = None) -> Callable[..., Tensor] | None:
        """Returns the function that multiplies the rows; `None` to run the original call."""
        plain_types = (Tensor, nn.Parameter, type(None))
        return _torch_product if all(type(y) in plain_types for y in (x, weight, bias)) else None


class KernelProducts(RowProducts):
    """Runs products of CPU tensors with our kernels where these are faster and no gradients are
    needed. PyTorch runs all products while other code traces, transforms or observes operations."""

    def __init__(self) -> None:
        super().__init__()
        self._max_rows = {
            dtype: max_rows(dtype) if is_native(dtype) else UNLIMITED_ROWS for dtype in HALVES
        }

    def _choose(self, x: Any, weight: Any, bias: Any = None) -> Callable[..., Tensor] | None:
        if torch.compiler.is_compiling():  # first, so that Dynamo does not trace the code below
            return None
        for y in (x, weight) if bias is None else (x, weight, bias):
            is_plain = type(y) in (Tensor, nn.Parameter) and y.is_cpu and y.dtype is x.dtype
            if not is_plain or y.layout is not torch.strided or y.is_neg():
                return None
        if x.is_nested or not x.dim() or x.dtype not in HALVES or weight.dim() != 2:
            return None
        row_limit = self._max_rows[x.dtype]
        depth = x.shape[-1]
        width = weight.shape[0]
        if not 0 < x.numel() <= row_limit * depth:
            return None
        if not 1 < depth == weight.shape[1] or width == 1:
            return None  # the strides of axes of size 1 are arbitrary
        is_transposed = weight.stride(1) != 1
        if is_transposed and (weight.stride(0) != 1 or row_limit != UNLIMITED_ROWS):
            return None
        if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
            return None
        if not _is_plain_call():
            return None
        has_many_rows = x.numel() >= MIN_FLOAT32_ROWS * depth
        return linear_float32 if has_many_rows and row_limit == UNLIMITED_ROWS else linear


def _torch_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return rows.mm(weight.t())
    return torch.addmm(bias, rows, weight.t())


def _linear_args_of_conv1d(bias: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    """Converts the arguments of the `torch.addmm` in transformers' `Conv1D` to those of `F.linear`.
    Returns `()` for tensors that are not plain matrices."""
    are_plain = all(type(y) in (Tensor, nn.Parameter) for y in (x, weight))
    if not are_plain or not x.dim() == weight.dim() == 2:
        return ()
    return x, weight.t(), bias


def _is_plain_call() -> bool:
    """Whether operations run without gradients, autocast, dispatch modes, transforms of
    `torch.func`, forward-mode derivatives, tracing, recording and batch invariance."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or observer.get() is not None
        or batch_invariant.get()
    )


def kernel_products(modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that speeds up products in a model's forwards; a null context if any module
    is compiled, if no parameters on the CPU are in half precision, or if the kernels are
    unavailable. `modules`: all modules of the model."""
    all_modules = list(modules)
    has_half_weights = any(
        x.dtype in HALVES and x.is_cpu
        for module in all_modules
        for x in module._parameters.values()
        if x is not None
    )
    if not has_half_weights or any(map(is_compiled, all_modules)) or not cpp.is_available():
        return contextlib.nullcontext()
    return KernelProducts()
