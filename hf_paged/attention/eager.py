"""Attention by a model's own code in a packed step: scores stay symbolic until they are multiplied by the values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.handles import DeferredTensor, RowTensor
from ..cache.storage import KVBlocks
from ..kernels import quantized
from ..step import NotCapturable, NotPackable, StepMetadata, row_groups
from . import backends
from .backends.reference import AttentionCall

Function = TypeVar("Function", bound=Callable[..., Any])
HIDDEN = -1e4  # a bias of this or less hides a key


def showing_rows(step: StepMetadata) -> StepMetadata:
    """A packed step for a model with its own attention code. Raises `NotCapturable` if lengths are only on the device,
    `NotPackable` if layers have a window."""
    if step.lengths is not None:
        raise NotCapturable("its own attention code is shown as many keys as the longest row has")
    if step.window is not None:
        raise NotPackable("its own attention code is shown keys through a window")
    return dataclasses.replace(step, key_len=max(step.seq_lens))


def defer(*names: str) -> Callable[[Function], Function]:
    """Decorates the replacement of torch functions with these names, called if an argument is a `DeferredTensor`."""

    def register(function: Function) -> Function:
        DeferredTensor.functions.update(dict.fromkeys(names, function))
        return function

    return register


class Scores(DeferredTensor):
    """`query @ key * scale + bias`, or its softmax over keys, `(1, heads, T, key_len)` or without the first axis."""

    query: Tensor  # (heads, T, dim)
    key: RowTensor
    scale: float
    bias: Tensor | None  # three axes, broadcasts to (heads, T, key_len)
    is_softmax: bool

    @staticmethod
    def __new__(cls, query: Tensor, key: RowTensor, sizes: tuple[int, ...], kind: torch.dtype) -> Scores:
        scores = Tensor._make_wrapper_subclass(cls, sizes, dtype=kind, device=query.device)
        scores.query, scores.key, scores.sizes, scores.kind = query, key, sizes, kind
        scores.scale, scores.bias, scores.is_softmax = 1.0, None, False
        return scores

    def but(self, ndim: int | None = None, dtype: torch.dtype | None = None, **state: Any) -> Scores:
        """A copy with some attributes changed."""
        sizes = self.sizes if ndim is None else (1, *self.sizes)[-ndim:]
        scores = Scores(self.query, self.key, sizes, dtype or self.kind)
        scores.scale, scores.bias, scores.is_softmax = self.scale, self.bias, self.is_softmax
        for name, value in state.items():
            setattr(scores, name, value)
        return scores

    def plus(self, bias: Tensor | None) -> Scores:
        if self.is_softmax:
            raise NotPackable("something is added to attention weights")
        if bias is None or self.bias is None:
            return self.but(bias=self.bias if bias is None else bias)
        return self.but(bias=self.bias + bias)


# -- operations on keys, values and scores --------------------------------------------------------------------------


@defer("contiguous")
def _contiguous(function: Any, x: Any) -> Any:
    return x


@defer("type_as", "float", "to", "type")
def _convert(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Converts the nominal dtype; the computation is in float32 regardless."""
    args = tuple(other.kind if isinstance(other, DeferredTensor) else other for other in args)  # for `type_as`
    if not isinstance(x, DeferredTensor):
        return x.to(*args)
    if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
        dtype = args[0]
    else:
        like = function(torch.empty(0, dtype=x.kind, device=x.device), *args, **kwargs)
        if not isinstance(like, Tensor) or like.device != x.device:
            raise NotPackable(f"{function.__name__} of packed keys, values or scores")
        dtype = like.dtype
    if not dtype.is_floating_point:
        raise NotPackable(f"packed keys, values or scores as {dtype}")
    return x if dtype is x.kind else x.but(dtype=dtype)


@defer("dropout")
def _dropout(function: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p and training:
        raise NotPackable("attention weights are dropped at random")
    return x


@defer("transpose", "permute")
def _transpose(function: Any, x: Any, *dims: Any) -> Any:
    """Swaps the last two axes of keys."""
    ndim = len(x.sizes)
    axes = list(range(ndim))
    if function.__name__ == "transpose":
        first, second = dims
        axes[first], axes[second] = axes[second], axes[first]
    else:
        axes = [axis % ndim for axis in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    if not isinstance(x, RowTensor) or axes != [*range(ndim - 2), ndim - 1, ndim - 2]:
        raise NotPackable(f"axes of packed keys, values or scores in the order {axes}")
    return x.but(is_transposed=not x.is_transposed)


@defer("view", "reshape")
def _view(function: Any, x: Any, *shape: Any) -> Any:
    """Adds or removes the first axis, of length 1."""
    wanted = tuple(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
    own = x.sizes if len(wanted) == len(x.sizes) else (1, *x.sizes)[-len(wanted) :]
    # one length may be -1
    is_same = len(own) == len(wanted) and all(size in (-1, mine) for size, mine in zip(wanted, own))
    if not is_same or len(wanted) not in (3, 4) or wanted.count(-1) > 1:
        raise NotPackable(f"packed keys, values or scores of shape {x.sizes} as {wanted}")
    return x if own is x.sizes else x.but(ndim=len(wanted))


@defer("matmul", "bmm", "__matmul__")
def _matmul(function: Any, left: Any, right: Any) -> Any:
    """Multiplies queries by keys, or attention weights by values."""
    sizes = left.sizes if isinstance(left, DeferredTensor) else tuple(left.shape)
    if not isinstance(right, RowTensor) or len(sizes) != len(right.sizes):
        raise NotPackable("packed keys, values or scores are multiplied by something else")
    if isinstance(left, Scores):
        return _attend(left, right)
    if not right.is_transposed or sizes[-2] != right.step.num_tokens or sizes[-3] % right.blocks.shape[1]:
        raise NotPackable(f"queries of shape {sizes} by keys of shape {right.sizes}")
    query = left if len(sizes) == 3 else left.view(sizes[1:])
    return Scores(query, right, (*sizes[:-1], right.sizes[-1]), left.dtype)


@defer("baddbmm")
def _baddbmm(function: Any, x: Tensor, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    scores = _matmul(torch.bmm, batch1, batch2)
    if not isinstance(scores, Scores):
        raise NotPackable("something is added to attention's output")
    return scores.but(scale=float(alpha)).plus(_bias(scores.key.step, x if beta == 1 else x * beta))


@defer("mul", "rmul", "imul", "div", "truediv", "itruediv")
def _scale(function: Any, scores: Any, factor: Any) -> Any:
    if not isinstance(scores, Scores):
        scores, factor = factor, scores
    is_number = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1)
    if not isinstance(scores, Scores) or scores.is_softmax or not is_number or not factor > 0:
        raise NotPackable("packed keys, values or attention weights are scaled")
    factor = 1 / float(factor) if "div" in function.__name__ else float(factor)
    return scores.but(scale=scores.scale * factor, bias=None if scores.bias is None else scores.bias * factor)


@defer("add", "radd", "iadd")
def _add(function: Any, scores: Any, other: Any) -> Any:
    if not isinstance(scores, Scores):
        scores, other = other, scores
    if not isinstance(scores, Scores) or not isinstance(other, Tensor) or isinstance(other, DeferredTensor):
        raise NotPackable("something is added to packed keys or values")
    return scores.plus(scores.key.step.plan(_bias, other))


@defer("masked_fill")
def _masked_fill(function: Any, scores: Any, mask: Tensor, value: float) -> Any:
    if not isinstance(scores, Scores) or not value <= HIDDEN:
        raise NotPackable("packed keys, values or scores are filled")
    return scores.plus(scores.key.step.plan(_bias_where, mask, True))


@defer("max", "maximum", "clamp_min")
def _at_least(function: Any, scores: Any, least: Any) -> Any:
    """A lower bound of at most `HIDDEN`, which replaces `-inf`, has no effect."""
    if not isinstance(scores, Scores) or scores.is_softmax or not least <= HIDDEN:
        raise NotPackable("packed keys, values or scores are bounded")
    return scores


@defer("softmax")
def _softmax(function: Any, scores: Any, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(scores, Scores) or scores.is_softmax or dim not in (-1, len(scores.sizes) - 1):
        raise NotPackable("a softmax of packed keys or values")
    return scores.but(is_softmax=True, dtype=kwargs.get("dtype"))


@defer("scaled_dot_product_attention")
def _sdpa(
    function: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    if attn_mask is None or is_causal:
        raise NotPackable("attention without a mask, or a mask of its own")
    scores = _matmul(torch.matmul, query, key.but(is_transposed=True))
    hides = attn_mask.dtype == torch.bool
    bias = key.step.plan(_bias_where, attn_mask, False) if hides else key.step.plan(_bias, attn_mask)
    scores = scores.plus(bias).but(scale=query.shape[-1] ** -0.5 if scale is None else scale, is_softmax=True)
    return _attend(_dropout(F.dropout, scores, dropout_p), value)


# -- biases, once a step for all layers that are given the same tensor ----------------------------------------------


def _bias(step: StepMetadata, added: Tensor) -> Tensor | None:
    """The bias with three axes; `None` if it is just a causal mask."""
    if added.dim() > 4 or (added.dim() == 4 and added.shape[0] != 1):
        raise NotPackable(f"a tensor of shape {tuple(added.shape)} is added to packed scores")
    added = added.view((1,) * (3 - added.dim()) + added.shape) if added.dim() < 4 else added[0]
    if added.shape[1:] == (step.num_tokens, step.key_len) and step.num_tokens > 0:
        past = step.plan(_past)
        if bool((torch.where(past, added == 0, added <= HIDDEN)).all()):
            return None
    return added


def _bias_where(step: StepMetadata, mask: Tensor, hides: bool) -> Tensor | None:
    """`_bias` of a boolean mask."""
    visible = ~mask if hides else mask
    return _bias(step, torch.zeros(mask.shape, device=mask.device).masked_fill_(~visible, -math.inf))


def _past(step: StepMetadata) -> Tensor:
    """`(T, key_len)`: whether a position is the token's or before it."""
    positions = torch.tensor(
        [
            seq_len - (end - start) + i
            for seq_len, start, end in zip(step.seq_lens, step.query_start, step.query_start[1:])
            for i in range(end - start)
        ],
        device=step.block_tables.device,
    )
    return torch.arange(step.key_len or 0, device=positions.device) <= positions[:, None]


# -- the attention --------------------------------------------------------------------------------------------------


def _attend(weights: Scores, value: RowTensor) -> Tensor:
    """The weights' product with the values, `([1,] heads, T, value_dim)`."""
    key, step = weights.key, weights.key.step
    if not weights.is_softmax or not isinstance(value, RowTensor) or value.is_transposed or value.step is not step:
        raise NotPackable("packed values are multiplied by something else than attention weights")
    dtype = value.kind if quantized.is_quantized(value.blocks) else value.blocks.dtype
    query, bias = weights.query.transpose(0, 1).to(dtype), weights.bias
    if key.layer.keys is key.blocks and key.layer.values is value.blocks:
        blocks = key.layer
    else:
        blocks = KVBlocks((key.blocks, value.blocks), key.blocks, value.blocks)
    if bias is None or bias.shape[1] == 1:
        call = AttentionCall(query, blocks, step, weights.scale, bias=None if bias is None else bias[None])
        output = backends.attend(call)
    else:
        parts = []
        for at, rows in step.plan(row_groups):
            own = bias[:, at].unflatten(1, (rows.num_rows, -1)).transpose(0, 1)
            parts.append(backends.attend(AttentionCall(query[at], blocks, rows, weights.scale, bias=own)))
        output = torch.cat(parts) if len(parts) > 1 else parts[0]
    output = output.transpose(0, 1).to(value.kind)
    return output[None] if len(value.sizes) == 4 else output
