"""The functions that transformers calls: attention over handles, and the mask that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..cache.handles import PagedTensor, implements
from ..cache.storage import KVBlocks
from ..step import NotPackable, StepMetadata
from . import backends
from .call import AttentionCall
from .latent import LatentTensor
from .masks import PagedMask, mask_observer
from .plan import in_table_coordinates, packed_step, rectangle_step
from .switch import (
    NAME,
    STOCK_FUNCTIONS,
    STOCK_MASKS,
    eager_features,
    model_attention,
    model_attention_function,
    model_mask_function,
    sdpa_attention_forward,
    stock_function,
)

# More queries than this in one row are a prefill chunk: gathering once and calling sdpa costs less than 3% more.
MAX_IN_PLACE_QUERIES = 16


def register() -> None:
    """Makes `attn_implementation="hf_paged"` known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)


@torch.compiler.disable
def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """
    The mask interface for `"hf_paged"`: a [`PagedMask`] of shape `(batch_size, 1, q_length, kv_length)`, symbolic until
    something other than our attention function uses it. Where the masks of the model's own implementation are not
    transformers', what it gets. Arguments are those of `transformers.masking_utils.sdpa_mask`.
    """
    arguments = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        config=config,
        device=device,
        **kwargs,
    )
    implementation = model_attention(config)
    make = model_mask_function(implementation)
    if make not in STOCK_MASKS:
        return None if make is None else make(**arguments)
    mask = PagedMask(arguments, implementation)
    observe = mask_observer.get()
    if observe is not None:
        observe(mask)
    return mask


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The attention interface for `"hf_paged"`.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(batch, heads, query_len, key_dim)`): Any float dtype.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, kv_len, dim)`): Handles of a [`PagedCache`], which are
            read in place where that gives what the model's own implementation would; ordinary tensors go to that
            implementation.
        attention_mask (`torch.Tensor`, *optional*): A [`PagedMask`], a dense mask in the format of the model's own
            implementation, or `None`.
        kwargs: What the model's own implementation takes (`scaling`, `dropout`, `softcap`, `s_aux`, `position_bias`,
            ...).

    Returns:
        `(batch, query_len, heads, value_dim)` in the query's dtype, under autocast in autocast's, and attention weights
        where the own implementation gives them.
    """
    if torch.compiler.is_dynamo_compiling():  # asked here, since the wrapper of `disable` costs every layer its time
        return _untraced(module, query, key, value, attention_mask, **kwargs)
    return _paged_attention(module, query, key, value, attention_mask, **kwargs)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if _is_packed(key) or _is_packed(value):
        return _packed(module, query, key, value, attention_mask, kwargs), None
    output = None
    if isinstance(key, LatentTensor):
        absorbed = key.absorb(module, query)
        if absorbed is not None:
            absorbed_query, blocks, expand = absorbed
            output = _in_place(module, absorbed_query, key.step, blocks, attention_mask, kwargs)
            if output is not None:
                key.step.counters.latent += 1
                return expand(output), None
    elif isinstance(key, PagedTensor) and isinstance(value, PagedTensor) and key.fresh is None:
        blocks = _pair(key.layer, key.blocks, value.blocks)
        output = _in_place(module, query, key.step, blocks, attention_mask, kwargs)
        if output is not None:
            return output, None
    key, value = (x.dense() if isinstance(x, (PagedTensor, LatentTensor)) else x for x in (key, value))
    implementation = _implementation(module)
    if isinstance(attention_mask, PagedMask):
        attention_mask = attention_mask.resolve(implementation)
    return model_attention_function(type(module), implementation)(module, query, key, value, attention_mask, **kwargs)


_untraced = torch.compiler.disable(_paged_attention)


def _is_packed(states: torch.Tensor) -> bool:
    return isinstance(states, PagedTensor) and states.step.columns is None


def _packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention of a packed step, which nothing else can compute: raises `NotPackable` where `_in_place` gives up."""
    if not (isinstance(key, PagedTensor) and isinstance(value, PagedTensor)):
        raise NotPackable("packed keys or values go with ordinary ones")
    step = key.step
    function = _stock_function(step, module)
    features = _features(module, function, kwargs)
    if features is None and function is sdpa_attention_forward:  # given a softcap, it raises or, until 5.17, ignores it
        features = None, None, kwargs.get("position_bias")
    if features is None or features[2] is not None or kwargs.get("dropout") or _needs_grad(query):
        raise NotPackable(f"{type(module).__name__} adds more to attention than softcap and sinks")
    if query.shape[0] != 1 or query.shape[2] != step.num_tokens:
        raise NotPackable(f"queries of shape {tuple(query.shape)} in a packed step of {step.num_tokens} tokens")
    softcap, sinks, _ = features
    scaling = kwargs.get("scaling")
    metadata = step.plan(packed_step, attention_mask)
    fresh = None
    if metadata.query_len != 1:
        assert key.fresh is not None and value.fresh is not None
        fresh = key.fresh[0].transpose(0, 1), value.fresh[0].transpose(0, 1)
    call = AttentionCall(
        query.squeeze(2) if step.num_tokens == 1 else query[0].transpose_(0, 1),  # the former is one view less
        _pair(key.layer, key.blocks, value.blocks),
        metadata,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
        sinks,
        None,
        fresh,
    )
    return backends.attend(call).unsqueeze_(0)


def _pair(layer: KVBlocks, keys: torch.Tensor, values: torch.Tensor) -> KVBlocks:
    """The blocks of a layer, or `keys` and `values` where a model mixes those of several layers."""
    return layer if keys is layer.keys and values is layer.values else KVBlocks((keys, values), keys, values)


def _in_place(
    module: nn.Module,
    query: torch.Tensor,
    step: StepMetadata,
    blocks: KVBlocks,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention through the block tables, or `None` where only gathering gives the numbers of the model's own."""
    if query.shape[2] > MAX_IN_PLACE_QUERIES or kwargs.get("dropout") or _needs_grad(query):
        return None
    features = _features(module, _stock_function(step, module), kwargs)
    if features is None:
        return None
    softcap, sinks, position_bias = features
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    plan = step.plan(rectangle_step, query.shape[2], attention_mask, bool(is_causal), query.device)
    if plan is None:
        return None
    metadata, bias = plan
    if position_bias is not None:
        if step.has_padding or step.columns is None:
            return None
        position_bias = in_table_coordinates(position_bias[..., -len(step.columns) :], step)
        bias = position_bias if bias is None else bias + position_bias
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _attend_rectangle(query, blocks, metadata, scale, softcap, sinks, bias)
    step.counters.in_place += 1
    return output


def _attend_rectangle(query: torch.Tensor, blocks: KVBlocks, step: StepMetadata, *features: Any) -> torch.Tensor:
    """`(batch, query_len, heads, value_dim)` for queries `(batch, heads, query_len, head_dim)`."""
    output = backends.attend(AttentionCall(query.transpose(1, 2).flatten(0, 1), blocks, step, *features))
    return output.unflatten(0, (query.shape[0], query.shape[2]))


def _needs_grad(query: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and query.requires_grad


def _implementation(module: nn.Module) -> str:
    return model_attention(getattr(module, "config", None), type(module))


def _stock_function(step: StepMetadata, module: nn.Module) -> Callable[..., Any] | None:
    """`switch.stock_function`, asked once a step for all layers of a class with one config."""
    known, key = step.plan(_no_functions), (type(module), id(getattr(module, "config", None)))
    if key not in known:
        known[key] = stock_function(type(module), _implementation(module))
    return known[key]


def _no_functions(step: StepMetadata) -> dict[tuple[type, int], Callable[..., Any] | None]:
    return {}


def _features(
    module: nn.Module, function: Callable[..., Any] | None, kwargs: dict[str, Any]
) -> tuple[float | None, torch.Tensor | None, torch.Tensor | None] | None:
    """
    Softcap, sinks and position bias as `function`, one of transformers', would apply them; `None` if it does something
    else, or is none of those.
    """
    if function is None:
        return None
    softcap, sinks, bias = kwargs.get("softcap"), kwargs.get("s_aux"), kwargs.get("position_bias")
    if function is sdpa_attention_forward:  # takes a bias, refuses a softcap, knows no sinks
        return None if softcap is not None else (None, None, bias)
    if function not in STOCK_FUNCTIONS:  # a file's eager one
        does = eager_features(function)
        if does is None:
            return None
        return (
            softcap if "softcap" in does else None,
            getattr(module, "sinks", None) if "sinks" in does else None,
            bias if "position_bias" in does else None,
        )
    return softcap, sinks, bias


# -- scaled_dot_product_attention called on handles ------------------------------------------------------------------


@implements(nn.functional.scaled_dot_product_attention)
def sdpa_on_handles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """
    `torch.nn.functional.scaled_dot_product_attention` where keys or values are handles: what a model calls whose config
    was not switched, such as `model(**inputs, past_key_values=PagedCache(...))`. Shapes are torch's.
    """
    both = isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
    if both and not (is_causal or dropout_p or _needs_grad(query)) and query.dim() == 4:
        assert isinstance(key, PagedTensor) and isinstance(value, PagedTensor)
        few = query.shape[2] <= MAX_IN_PLACE_QUERIES and key.fresh is None
        plan = key.step.plan(rectangle_step, query.shape[2], attn_mask, False, query.device) if few else None
        if plan is not None:
            metadata, bias = plan
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            blocks = _pair(key.layer, key.blocks, value.blocks)
            output = _attend_rectangle(query, blocks, metadata, scale, None, None, bias)
            key.step.counters.in_place += 1
            return output.transpose(1, 2)
    dense = [x.dense() if isinstance(x, (PagedTensor, PagedMask)) else x for x in (query, key, value, attn_mask)]
    return nn.functional.scaled_dot_product_attention(
        *dense, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
