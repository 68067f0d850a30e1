"""The functions that transformers calls: the attention and mask interfaces of `"hf_paged"`. The
backends compute attention; `attention.masks` interprets masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from .. import compat
from ..cache.handles import LatentTensor, LazyTensor, PagedTensor, ReadOnlyTensor
from ..cache.kv_blocks import KVBlocks
from ..compiled import untraced
from ..step import NotPackable, StepMetadata
from . import backends, switch
from .backends.reference import AttentionCall, paired_blocks
from .masks import (
    PagedMask,
    attention_observer,
    in_table_coordinates,
    mask_observer,
    packed_step,
    parse_mask,
    rectangle_step,
)

# Maximum queries per row for which attention outside packed steps reads blocks in place. Rows with
# more queries are prefill chunks: gathering their keys and values once and calling sdpa takes less
# than 3% longer than reading in place.
MAX_IN_PLACE_QUERIES = 16

Features = tuple[float, float | None, Tensor | None, Tensor | None]
"""Scale, softcap, sinks and position bias."""


def register() -> None:
    """Registers `attn_implementation="hf_paged"` with transformers."""
    switch.unregister_when_unused(None)
    _register()


def unregister() -> None:
    """Undoes `register`. Calls in progress continue to use our functions."""
    switch.unregister_when_unused(_register)


def _register() -> None:
    AttentionInterface.register(switch.NAME, paged_attention)
    AttentionMaskInterface.register(switch.NAME, paged_mask)


@torch.compiler.disable
def paged_mask(**arguments: Any) -> Tensor | None:
    """The mask interface for `"hf_paged"`, with the arguments of
    `transformers.masking_utils.sdpa_mask` by name. Returns a [`PagedMask`] if transformers' own
    functions build the mask and its pattern is supported, otherwise the mask of the model's own
    implementation (`None` if that has none). That mask is built at once: building it may use
    `torch.vmap`, which cannot run inside the operation that first reads a symbolic mask."""
    implementation = switch.model_attention(arguments.get("config"))
    make_mask = compat.mask_function(implementation)
    pattern = None
    if make_mask in switch.STOCK_MASKS:
        mask_function = arguments.get("mask_function", causal_mask_function)
        pattern = parse_mask(mask_function)
    if pattern is None:
        if make_mask is None:
            return None
        return make_mask(**arguments)
    mask = PagedMask(arguments, implementation, pattern)
    observe = mask_observer.get()
    if observe:
        observe(mask)
    return mask


@untraced
def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention interface for `"hf_paged"`. Maps queries `(batch, heads, query_len, key_dim)`
    to `(batch, query_len, heads, value_dim)`, in the queries' dtype or, under autocast and unless
    the queries are float64, in autocast's dtype. In a packed step, keys and values are handles of a
    [`PagedCache`] and are read in place. In other steps, handles are read in place if tokens were
    cached before, rows have few queries, and the model's implementation would give the same result.
    Otherwise that implementation is called with ordinary tensors, and its attention weights, if
    any, are also returned. `attention_mask`: a [`PagedMask`], or a mask for the model's
    implementation, which also defines the `kwargs` (`scaling`, `dropout`, `softcap`, `s_aux`,
    `position_bias`, ...). Raises `NotPackable` if the backends cannot compute a packed step,
    `NotCapturable` if a recorded step needs the host, and `ValueError` if the mask shows padding
    that was not stored.
    """
    mask = attention_mask
    # queries, blocks and a function to apply to the output (or `None`), if the call can run in
    # place; otherwise `None`
    in_place: Any = None
    is_pair = isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
    is_latent = isinstance(key, LatentTensor)
    if (is_pair or is_latent) and key.step.columns is None:
        return _attend_packed_step(module, query, key, value, mask, kwargs), None
    if is_latent:
        # with more queries, `_attend_in_place` would not use the absorbed queries
        if query.shape[2] <= MAX_IN_PLACE_QUERIES:
            in_place = key.absorb(query, value)
    elif is_pair and key.fresh is None:
        in_place = query, paired_blocks(key, value), None
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    observe = attention_observer.get()
    if observe is not None:
        sizes = (query.shape[0], query.shape[2], key.shape[2])
        observe(sizes, mask, bool(is_causal))
    if in_place is not None:
        in_place_query, blocks, expand = in_place
        features = _features(module, query, key.step, kwargs)
        output = _attend_in_place(in_place_query, key.step, blocks, mask, bool(is_causal), features)
        if output is not None:
            if expand is not None:
                output = expand(output)
            return output, None
    key, value = map(_dense, (key, value))
    config = getattr(module, "config", None)
    implementation = switch.model_attention(config, type(module))
    if isinstance(mask, PagedMask):
        mask = mask.resolve(implementation)
    function = switch.model_attention_function(type(module), implementation)
    return function(module, query, key, value, mask, **kwargs)


def _dense(x: Any) -> Any:
    return x.dense() if isinstance(x, LazyTensor) else x


def _attend_packed_step(
    module: nn.Module,
    query: Tensor,
    key: PagedTensor | LatentTensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes the attention of a packed step, `(1, T, heads, value_dim)`. Raises `NotPackable` if
    the backends cannot compute it, since the model's own implementation cannot either."""
    step = key.step
    features = _features(module, query, step, kwargs)
    if features is None or features[3] is not None:
        raise NotPackable(
            "packed steps compute transformers' own attention, with softcap and sinks but without"
            f" gradients, and {type(module).__name__} needs something else, such as dropout, a"
            " position bias or another attention function"
        )
    if query.shape[0] != 1 or query.shape[2] != step.num_tokens:
        raise NotPackable(
            f"the queries have shape {tuple(query.shape)}, but the packed step has"
            f" {step.num_tokens} tokens"
        )
    masked_step = step.plan(packed_step, mask)
    if isinstance(key, LatentTensor):
        return key.attend_packed(query, value, masked_step, features[:3]).unsqueeze_(0)
    assert isinstance(value, PagedTensor)
    fresh = None
    if masked_step.query_len != 1:
        assert key.fresh is not None and value.fresh is not None
        fresh = key.fresh[0].transpose(0, 1), value.fresh[0].transpose(0, 1)
    # for a single token, `squeeze` saves an operation
    if step.num_tokens == 1:
        query = query.squeeze(2)
    else:
        query = query[0].transpose_(0, 1)
    call = AttentionCall(query, paired_blocks(key, value), masked_step, *features, fresh)
    return backends.attend(call).unsqueeze_(0)


def _attend_in_place(
    query: Tensor,
    step: StepMetadata,
    blocks: KVBlocks,
    mask: Tensor | None,
    is_causal: bool,
    features: Features | None,
) -> Tensor | None:
    """Computes attention that reads blocks through the block tables, `(batch, query_len, heads,
    value_dim)`. Returns `None` if rows have more than `MAX_IN_PLACE_QUERIES` queries, if the batch
    size is not the number of the step's rows, or if the call needs a dense mask, a gradient or
    unsupported features."""
    batch, _, query_len, _ = query.shape
    if features is None or query_len > MAX_IN_PLACE_QUERIES or batch != step.num_rows:
        return None
    step_and_bias = step.plan(rectangle_step, query_len, mask, is_causal, query.device)
    if step_and_bias is None:
        return None
    masked_step, bias = step_and_bias
    scale, softcap, sinks, position_bias = features
    if position_bias is not None:
        if step.has_padding or step.columns is None:
            return None
        position_bias = position_bias[..., -len(step.columns) :]
        position_bias = in_table_coordinates(position_bias, step)
        bias = position_bias if bias is None else bias + position_bias
    packed_query = query.transpose(1, 2).flatten(0, 1)
    call = AttentionCall(packed_query, blocks, masked_step, scale, softcap, sinks, bias)
    output = backends.attend(call).unflatten(0, (batch, query_len))
    step.counters.in_place += 1
    return output


def _features(
    module: nn.Module,
    query: Tensor,
    step: StepMetadata,
    kwargs: dict[str, Any],
) -> Features | None:
    """Returns the features that the model's own implementation would apply. Returns `None` if it
    may compute anything else, applies dropout or rejects the softcap, or if the queries require a
    gradient."""
    if kwargs.get("dropout") or (query.requires_grad and torch.is_grad_enabled()):
        return None
    # cached per step for all layers of one class and config, since reading the config takes a
    # microsecond
    config = getattr(module, "config", None)
    functions = step.plan(_make_function_cache)
    cls = type(module)
    key = (cls, id(config))
    if key not in functions:
        functions[key] = switch.stock_function(cls, switch.model_attention(config, cls))
    function = functions[key]
    if function is None:
        return None
    softcap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    bias = kwargs.get("position_bias")
    if function is switch.sdpa_attention_forward:  # adds a bias, rejects a softcap, ignores sinks
        if softcap is not None:
            return None
        sinks = None
    elif function not in switch.STOCK_FUNCTIONS:  # the eager function of a model's file
        eager_features = switch.eager_features(function)
        if eager_features is None:
            return None
        if "softcap" not in eager_features:
            softcap = None
        sinks = getattr(module, "sinks", None) if "sinks" in eager_features else None
        if "position_bias" not in eager_features:
            bias = None
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return scaling, softcap, sinks, bias


def _make_function_cache(step: StepMetadata) -> dict[tuple[type, int], Callable[..., Any] | None]:
    return {}


def sdpa_on_handles(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` of handles, for models whose config is not switched, for
    instance in a user's own decoding loop."""
    needs_grad = query.requires_grad and torch.is_grad_enabled()
    is_supported = not (is_causal or dropout_p or needs_grad) and query.dim() == 4
    is_pair = isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
    if is_supported and is_pair and key.fresh is None:
        scale = options.get("scale")
        if scale is None:
            scale = query.shape[-1] ** -0.5
        features = (scale, None, None, None)
        blocks = paired_blocks(key, value)
        output = _attend_in_place(query, key.step, blocks, attn_mask, False, features)
        if output is not None:
            return output.transpose(1, 2)
    query, key, value, mask = map(_dense, (query, key, value, attn_mask))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
        **options,
    )


ReadOnlyTensor.functions[F.scaled_dot_product_attention] = sdpa_on_handles
