"""Attention by a model's own code in a packed step: the code's operations on keys and scores are
recorded symbolically until it multiplies the weights by the values. Then the backends compute the
result."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import backends
from ..attention.backends.reference import AttentionCall, paired_blocks
from ..cache.kv_blocks import KVBlocks
from ..kernels import quantized
from ..step import NotCapturable, NotPackable, StepMetadata, row_groups
from .rows import DeferredKV, DeferredTensor

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_HIDING_BIAS = -1e4  # a bias of at most this hides a key


def with_key_len(step: StepMetadata) -> StepMetadata:
    """Returns the packed step with the `key_len` that a model's own attention code sees: the length
    of the longest row or, if only the device knows the lengths, the capacity of the block tables.
    Raises `NotPackable` if the step has a window, and `NotCapturable` if a recorded step may have
    several queries per row."""
    if step.window is not None:
        raise NotPackable("the model's own attention code gets keys of a sliding window")
    if step.lengths is None:
        return dataclasses.replace(step, key_len=max(step.seq_lens))
    if step.query_len != 1:
        raise NotCapturable("the model's own attention code would get several queries of a row")
    return dataclasses.replace(step, key_len=step.block_tables.shape[1] * step.block_size)


def row_tensors(
    step: StepMetadata, blocks: KVBlocks, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """Returns a layer's keys and values as [`DeferredKV`], with these nominal dtypes. `step`: a
    step that `with_key_len` returned."""
    key_dtype, value_dtype = dtypes
    keys = DeferredKV(step, blocks, blocks.keys, key_dtype)
    return keys, DeferredKV(step, blocks, blocks.values, value_dtype)


def defer(*names: str) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function in place of the torch functions with these
    names, for calls with a `DeferredTensor`. In-place variants (`add_`, `__iadd__`) write the
    function's result to the scores on which they are called, or raise `NotPackable`."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def write(torch_function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, Scores):
                raise NotPackable(
                    f"`{torch_function.__name__}` writes to packed keys or values, or writes packed"
                    " scores to a plain tensor"
                )
            return x.write(function(torch_function, x, *args, **kwargs))

        for name in names:
            DeferredTensor.functions[name] = function
            DeferredTensor.functions[f"{name}_"] = write
            DeferredTensor.functions[f"__i{name}__"] = write
        return function

    return register


class Scores(DeferredTensor):
    """Symbolic scores `query @ key * scale + bias`, or their softmax over keys: `(1, heads, T,
    key_len)`, or without the first axis."""

    query: Tensor  # (heads, T, dim)
    key: DeferredKV
    # In-place operations change this dict, so scores that would share memory in PyTorch share it.
    # "scale": float; "bias": Tensor with three axes that broadcast to (heads, T, key_len), or None
    terms: dict[str, Any]
    is_softmax: bool

    @staticmethod
    def __new__(
        cls,
        query: Tensor,
        key: DeferredKV,
        dtype: torch.dtype,
        ndim: int,
        terms: dict[str, Any],
        is_softmax: bool = False,
    ) -> Any:
        shape = (1, *query.shape[:2], key.step.key_len)[4 - ndim :]
        return cls.make(
            shape,
            query.device,
            query=query,
            key=key,
            dtype=dtype,
            ndim=ndim,
            terms=terms,
            is_softmax=is_softmax,
        )

    def add_bias(self, bias: Tensor | None) -> Scores:
        if self.is_softmax:
            raise NotPackable("a tensor is added to attention weights")
        terms = self.terms.copy()
        if bias is not None and terms["bias"] is not None:
            bias = terms["bias"] + bias
        if bias is not None:
            terms["bias"] = bias
        return self.replace(terms=terms)

    def write(self, result: Any) -> Scores:
        """Writes the result of an in-place operation to these scores, and returns them. Raises
        [`NotPackable`] unless `result` is `Scores` that differ from these in their terms alone."""
        for name, argument in self.arguments.items():
            is_kept = isinstance(result, Scores) and result.arguments[name] is argument
            if name != "terms" and not is_kept:
                raise NotPackable(
                    "an operation in place changes more than scale and bias of packed scores"
                )
        self.terms.update(result.terms)
        return self


def as_tuple(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns sizes or axes that were passed one by one or as one sequence."""
    first = arguments[0]
    return tuple(first) if isinstance(first, (tuple, list)) else arguments


# Operations on keys, values and scores


@defer("contiguous")
def _contiguous(function: Any, x: Any) -> Any:
    return x


@defer("type_as", "float", "to", "type")
def _convert(
    function: Callable[..., Any],
    x: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Changes only the nominal dtype: the backends choose the dtype of their sums."""
    if kwargs and not isinstance(x, DeferredTensor):
        raise NotPackable(f"`{function.__name__}` gets options besides a packed tensor's dtype")
    # `type_as` takes a tensor, possibly a deferred one
    args = tuple(_empty(other) if isinstance(other, DeferredTensor) else other for other in args)
    if not isinstance(x, DeferredTensor):
        return x.to(*args)
    empty = _empty(x)
    converted_tensor = function(empty, *args, **kwargs)
    if not isinstance(converted_tensor, Tensor) or converted_tensor.device != x.device:
        raise NotPackable(
            f"`{function.__name__}` moves packed keys, values or scores to another device, or"
            " returns no tensor"
        )
    dtype = converted_tensor.dtype
    if not dtype.is_floating_point:
        raise NotPackable(f"packed keys, values or scores are converted to {dtype}")
    if converted_tensor is empty:
        return x
    if isinstance(x, Scores):
        return x.replace(dtype=dtype, terms=x.terms.copy())
    return x.replace(dtype=dtype)


def _empty(x: DeferredTensor) -> Tensor:
    return torch.empty(0, dtype=x.nominal_dtype, device=x.device)


@defer("dropout")
def _dropout(
    function: Any,
    x: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if p and training:
        raise NotPackable("dropout is applied to attention weights")
    return x


@defer("transpose", "permute")
def _transpose(function: Any, x: Any, *dims: Any) -> Any:
    """Swaps the last two axes of keys or values."""
    ndim = len(x.sizes)
    axes = list(range(ndim))
    if function.__name__ == "transpose":
        first, second = dims
        axes[first], axes[second] = axes[second], axes[first]
    else:
        axes = [axis % ndim for axis in as_tuple(dims)]
    swapped_axes = [*range(ndim - 2), ndim - 1, ndim - 2]
    if not isinstance(x, DeferredKV) or axes != swapped_axes:
        raise NotPackable(f"packed keys, values or scores are permuted to axes {axes}")
    return x.replace(is_transposed=not x.is_transposed)


@defer("view", "reshape")
def _view(function: Any, x: Any, *shape: Any) -> Any:
    """Adds or removes the first axis, of length 1."""
    requested_shape = as_tuple(shape)
    ndim = len(requested_shape)
    sizes = (1, *x.sizes)[-ndim:]
    # one size may be -1
    is_same = all(size in (-1, length) for size, length in zip(requested_shape, sizes))
    if not is_same or ndim not in (3, 4) or len(sizes) != ndim or requested_shape.count(-1) > 1:
        raise NotPackable(
            f"packed keys, values or scores of shape {x.sizes} are viewed as {requested_shape}"
        )
    if ndim == len(x.sizes):
        return x
    return x.replace(ndim=ndim)


@defer("matmul", "bmm")
def _matmul(function: Any, left: Any, right: Any) -> Any:
    """Multiplies queries by keys, or attention weights by values."""
    sizes = left.sizes if isinstance(left, DeferredTensor) else tuple(left.shape)
    ndim = len(sizes)
    if not isinstance(right, DeferredKV) or ndim != len(right.sizes):
        raise NotPackable(
            "packed keys, values or scores are multiplied by another tensor, or the numbers of axes"
            " differ"
        )
    if isinstance(left, Scores):
        return _attend(left, right)
    has_all_tokens = sizes[-2] == right.step.num_tokens
    has_groups = sizes[-3] % right.blocks.shape[1] == 0
    if not right.is_transposed or not has_all_tokens or not has_groups:
        raise NotPackable(
            f"a tensor of shape {sizes} is multiplied by packed keys or values of shape"
            f" {right.sizes}"
        )
    query = left.view(sizes[-3:])
    return Scores(query, right, left.dtype, ndim, {"scale": 1.0, "bias": None})


@defer("baddbmm")
def _baddbmm(
    function: Any,
    x: Tensor,
    batch1: Any,
    batch2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    scores = _matmul(torch.bmm, batch1, batch2)
    if not isinstance(scores, Scores):
        raise NotPackable("a tensor is added to attention's output")
    scores.terms["scale"] = float(alpha)
    if beta == 0:  # torch ignores `x`, which may be uninitialised
        return scores
    if beta != 1:
        x = x * beta
    return scores.add_bias(_bias(scores.key.step, x))


@defer("mul", "rmul", "div", "truediv")
def _scale(function: Any, scores: Any, factor: Any) -> Any:
    is_division = "div" in function.__name__
    if not isinstance(scores, Scores):
        if is_division:
            raise NotPackable(
                "packed keys or values are divided, or a tensor is divided by packed scores"
            )
        scores, factor = factor, scores
    is_number = isinstance(factor, (int, float))
    if isinstance(factor, Tensor):
        is_number = factor.numel() == 1
    is_scores = isinstance(scores, Scores) and not scores.is_softmax
    if not is_scores or not is_number or not factor > 0:
        raise NotPackable(
            "packed keys, values or attention weights are scaled, or packed scores are scaled by"
            " something other than one positive number"
        )
    factor = float(factor)
    if is_division:
        factor = 1 / factor
    bias = scores.terms["bias"]
    if bias is not None:
        bias = bias * factor
    return scores.replace(terms={"scale": scores.terms["scale"] * factor, "bias": bias})


@defer("add", "radd")
def _add(function: Any, scores: Any, other: Any) -> Any:
    if not isinstance(scores, Scores):
        scores, other = other, scores
    is_dense = isinstance(other, Tensor) and not isinstance(other, DeferredTensor)
    if not isinstance(scores, Scores) or not is_dense:
        raise NotPackable(
            "something is added to packed keys or values, or something other than a plain tensor is"
            " added to packed scores"
        )
    return scores.add_bias(scores.key.step.plan(_bias, other))


@defer("masked_fill")
def _masked_fill(
    function: Any,
    scores: Any,
    mask: Tensor,
    value: float,
) -> Any:
    if not isinstance(scores, Scores) or not value <= MAX_HIDING_BIAS:
        raise NotPackable(f"packed keys, values or scores are filled with {value}")
    return scores.add_bias(scores.key.step.plan(_bias_where, mask, True))


@defer("max", "maximum", "clamp_min")
def _clamp_min(function: Any, scores: Any, minimum: Any) -> Any:
    """Ignores a lower bound of at most `MAX_HIDING_BIAS`, with which models replace `-inf`."""
    is_scores = isinstance(scores, Scores) and not scores.is_softmax
    if not is_scores or not minimum <= MAX_HIDING_BIAS:
        raise NotPackable(
            f"`{function.__name__}` with {minimum} is called on packed keys, values or scores"
        )
    return scores.replace(terms=scores.terms.copy())


@defer("softmax")
def _softmax(
    function: Any,
    scores: Any,
    dim: int | None = None,
    *args: Any,
    dtype: torch.dtype | None = None,
    _stacklevel: int = 3,
) -> Any:
    is_scores = isinstance(scores, Scores) and not scores.is_softmax
    if not is_scores or dim not in (-1, len(scores.sizes) - 1):
        raise NotPackable(
            "a softmax is taken of packed keys, values or attention weights, or along an axis other"
            " than the last"
        )
    # `torch.softmax` also takes the dtype by position
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
    return scores.replace(
        is_softmax=True, dtype=dtype or scores.nominal_dtype, terms=scores.terms.copy()
    )


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
        raise NotPackable("attention is called without a mask, or with `is_causal`")
    scores = _matmul(torch.matmul, query, key.replace(is_transposed=True))
    if attn_mask.dtype == torch.bool:
        bias = key.step.plan(_bias_where, attn_mask, False)
    else:
        bias = key.step.plan(_bias, attn_mask)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores.terms.update(scale=scale, bias=bias)
    weights = scores.replace(is_softmax=True)
    return _attend(_dropout(F.dropout, weights, dropout_p), value)


# Biases, computed once per step for all layers that get the same tensor


def _bias(step: StepMetadata, added_tensor: Tensor) -> Tensor | None:
    """Returns `added_tensor`, which the model adds to scores, with three axes; `None` if it is just
    a causal mask, which the backends apply themselves."""
    ndim = added_tensor.dim()
    if ndim > 4 or (ndim == 4 and added_tensor.shape[0] != 1):
        raise NotPackable(
            f"a tensor of shape {tuple(added_tensor.shape)} is added to packed scores"
        )
    if ndim < 4:
        added_tensor = added_tensor.view((1,) * (3 - ndim) + added_tensor.shape)
    else:
        added_tensor = added_tensor[0]
    num_tokens = step.num_tokens
    is_whole = num_tokens > 0 and added_tensor.shape[1:] == (num_tokens, step.key_len)
    if is_whole and step.lengths is None:  # a recorded step must not read the mask
        matches_causal = torch.where(
            step.plan(_past_keys_mask), added_tensor == 0, added_tensor <= MAX_HIDING_BIAS
        )
        if bool(matches_causal.all()):
            return None
    return added_tensor


def _bias_where(step: StepMetadata, mask: Tensor, hidden_value: bool) -> Tensor | None:
    """Returns the `_bias` of a boolean mask that hides the keys where it equals `hidden_value`."""
    is_hidden = mask if hidden_value else ~mask
    added_tensor = torch.zeros(mask.shape, device=mask.device)
    return _bias(step, added_tensor.masked_fill_(is_hidden, -math.inf))


def _past_keys_mask(step: StepMetadata) -> Tensor:
    """Returns a bool mask `(T, key_len)` of the keys at or before each token's position."""
    positions: list[int] = []
    for seq_len, (start, end) in zip(step.seq_lens, itertools.pairwise(step.query_start)):
        positions.extend(range(seq_len - (end - start), seq_len))
    device = step.block_tables.device
    key_positions = torch.arange(step.key_len or 0, device=device)
    return key_positions <= torch.tensor(positions, device=device)[:, None]


# Attention


def _attend(weights: Scores, value: DeferredKV) -> Tensor:
    """Computes the attention of `weights`, a softmax of scores, over the values. Returns `(heads,
    T, value_dim)`, or `(1, heads, T, value_dim)` for values with four axes, in the nominal dtype of
    the values."""
    key = weights.key
    step = key.step
    is_value = isinstance(value, DeferredKV) and not value.is_transposed
    if not weights.is_softmax or not is_value or value.step is not step:
        raise NotPackable(
            "packed values are transposed, or multiplied by something other than attention weights"
            " of the same step"
        )
    dtype = value.nominal_dtype if quantized.is_quantized(value.blocks) else value.blocks.dtype
    query = weights.query.transpose(0, 1).to(dtype)
    bias = weights.terms["bias"]
    call = AttentionCall(query, paired_blocks(key, value), step, weights.terms["scale"])
    if bias is None:
        output = backends.attend(call)
    elif bias.shape[1] == 1:
        output = backends.attend(call._replace(bias=bias[None]))
    else:
        outputs = []
        for tokens, rows in step.plan(row_groups):
            rows_bias = bias[:, tokens].unflatten(1, (rows.num_rows, -1)).transpose(0, 1)
            rows_call = call._replace(query=query[tokens], step=rows, bias=rows_bias)
            outputs.append(backends.attend(rows_call))
        output = torch.cat(outputs)
    output = output.transpose(0, 1).to(value.nominal_dtype)
    if len(value.sizes) == 4:
        return output[None]
    return output
