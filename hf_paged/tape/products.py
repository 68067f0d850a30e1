"""Half-precision products in forwards without a tape: few rows by `linear.cpp`, many rows in float32 if PyTorch has no
native products of the dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..compiled import is_compiled
from ..kernels import cpp
from ..kernels.cpp.build import batch_invariant, observer
from ..kernels.cpp.linear import HALVES, MIN_WIDENED_ROWS, is_native, linear, max_rows, widened

MANY = 1 << 60


class OwnProducts(TorchFunctionMode):
    """Replaces `F.linear` (and `Conv1D`'s `addmm`) of plain CPU tensors, without gradients, if our product is faster.
    Leaves everything to PyTorch while other code traces, transforms or observes its operations."""

    def __init__(self) -> None:
        super().__init__()
        self._max_rows = {dtype: max_rows(dtype) if is_native(dtype) else MANY for dtype in HALVES}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args if func is F.linear else _of_conv1d(*args) if func is torch.addmm and len(args) == 3 else ()
        if given and not kwargs and self._takes(*given):
            x, weight, *bias = given
            rows = x.reshape(-1, x.shape[-1])
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            is_wide = len(rows) >= MIN_WIDENED_ROWS and self._max_rows[x.dtype] == MANY
            return (widened if is_wide else linear)(rows, weight, *bias).view(*x.shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))

    def _takes(self, x: Any, weight: Any, bias: Any = None) -> bool:
        if torch.compiler.is_compiling():  # first, since Dynamo traces the code below
            return False
        tensors = (x, weight) if bias is None else (x, weight, bias)
        if any(type(y) not in (Tensor, nn.Parameter) or not y.is_cpu or y.dtype is not x.dtype for y in tensors):
            return False
        if any(y.layout is not torch.strided or y.is_neg() for y in tensors) or x.is_nested or not x.dim():
            return False
        if x.dtype not in HALVES or weight.dim() != 2 or not 0 < x.numel() <= self._max_rows[x.dtype] * x.shape[-1]:
            return False
        if not 1 < x.shape[-1] == weight.shape[1] or weight.shape[0] == 1:  # strides of size 1 are arbitrary
            return False
        if weight.stride(1) != 1 and (weight.stride(0) != 1 or self._max_rows[x.dtype] != MANY):
            return False
        if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _is_observed():
            return False
        return observer.get() is None and not batch_invariant.get()  # else a tape, or its kernels, compute it


def _of_conv1d(bias: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    """The arguments of `F.linear` for the `torch.addmm` of transformers' `Conv1D`; empty if they do not fit."""
    fits = all(type(y) in (Tensor, nn.Parameter) for y in (x, weight)) and x.dim() == weight.dim() == 2
    return (x, weight.t(), bias) if fits else ()


def _is_observed() -> bool:
    """Whether operations go through a mode, a transform of `torch.func`, forward derivatives, or a trace."""
    transforms: Any = torch._C._functorch.peek_interpreter_stack()
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    return has_modes or transforms is not None or forward_ad._current_level >= 0 or torch.jit.is_tracing()


def own_products(modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    """The context for a model's forwards; a null context if it is compiled, has no half-precision weights on the CPU,
    or the kernels are unavailable."""
    parts = list(modules)
    is_half = any(x.dtype in HALVES and x.is_cpu for part in parts for x in part._parameters.values() if x is not None)
    if not is_half or any(map(is_compiled, parts)) or not cpp.is_available():
        return contextlib.nullcontext()
    return OwnProducts()
