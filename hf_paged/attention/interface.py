"""The functions that transformers calls: attention over handles, and the mask that goes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..cache.handles import PagedTensor, Step, set_sdpa
from . import backends
from .latent import LatentTensor
from .masks import MaskPattern, PagedMask, mask_observer
from .metadata import AttentionMetadata
from .switch import NAME, eager_features, eager_function, native_function, native_implementation

# More queries than this in one row are a prefill chunk: gathering once and calling sdpa costs less than 3% more.
MAX_IN_PLACE_QUERIES = 16


def register() -> None:
    """Makes `attn_implementation="hf_paged"` known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)
    set_sdpa(sdpa_on_handles)


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
) -> torch.Tensor:
    """
    The mask interface for `"hf_paged"`: a [`PagedMask`] of shape `(batch_size, 1, q_length, kv_length)`, symbolic until
    something other than our attention function uses it. Arguments are those of `transformers.masking_utils.sdpa_mask`.
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
    mask = PagedMask(arguments, native_implementation(config))
    observe = mask_observer.get()
    if observe is not None:
        observe(mask)
    return mask


@torch.compiler.disable
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
        `(batch, query_len, heads, value_dim)` in the query's dtype, and attention weights where the own implementation
        gives them.
    """
    implementation = native_implementation(getattr(module, "config", None), module)
    output = None
    if isinstance(key, LatentTensor):
        absorbed = key.absorb(module, query)
        if absorbed is not None:
            absorbed_query, blocks, expand = absorbed
            output = _in_place(module, absorbed_query, key.step, blocks, blocks, attention_mask, implementation, kwargs)
            if output is not None:
                key.step.counters.latent += 1
                return expand(output), None
    elif isinstance(key, PagedTensor) and isinstance(value, PagedTensor) and key.fresh is None:
        output = _in_place(module, query, key.step, key.blocks, value.blocks, attention_mask, implementation, kwargs)
        if output is not None:
            return output, None
    key, value = (x.dense() if isinstance(x, (PagedTensor, LatentTensor)) else x for x in (key, value))
    if isinstance(attention_mask, PagedMask):
        attention_mask = attention_mask.resolve(implementation)
    return native_function(module, implementation)(module, query, key, value, attention_mask, **kwargs)


def _in_place(
    module: nn.Module,
    query: torch.Tensor,
    step: Step,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    attention_mask: torch.Tensor | None,
    implementation: str,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention through the block tables, or `None` where only gathering gives the numbers of `implementation`."""
    if query.shape[2] > MAX_IN_PLACE_QUERIES or kwargs.get("dropout") or _needs_grad(query):
        return None
    features = _features(module, implementation, kwargs)
    if features is None:
        return None
    softcap, sinks, position_bias = features
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    plan = plan_attention(step, query.shape[2], attention_mask, bool(is_causal), query.device)
    if plan is None:
        return None
    metadata, bias = plan
    if position_bias is not None:
        shift = metadata_shift(step)
        if shift is None:
            return None
        position_bias = _in_table_coordinates(position_bias[..., -(step.length - step.first) :], shift)
        bias = position_bias if bias is None else bias + position_bias
    scaling = kwargs.get("scaling")
    output = backends.paged_attention(
        query,
        key_blocks,
        value_blocks,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=sinks,
        bias=bias,
    )
    step.counters.in_place += 1
    return output


def _needs_grad(query: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and query.requires_grad


def _features(
    module: nn.Module, implementation: str, kwargs: dict[str, Any]
) -> tuple[float | None, torch.Tensor | None, torch.Tensor | None] | None:
    """Softcap, sinks and position bias as `implementation` would apply them; `None` if it does something else."""
    softcap, sinks, bias = kwargs.get("softcap"), kwargs.get("s_aux"), kwargs.get("position_bias")
    if implementation == "sdpa":  # takes a bias, refuses a softcap, knows no sinks
        return None if softcap is not None else (None, None, bias)
    if implementation == "eager":
        does = eager_features(eager_function(module))
        if does is None:
            return None
        return (
            softcap if "softcap" in does else None,
            getattr(module, "sinks", None) if "sinks" in does else None,
            bias if "position_bias" in does else None,
        )
    return softcap, sinks, bias


# -- what each row sees -------------------------------------------------------------------------------------------


def plan_attention(
    step: Step, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[AttentionMetadata, torch.Tensor | None] | None:
    """
    Metadata and additive bias (in table coordinates) that say the same as `attention_mask`, or `None` if nothing short
    of a dense mask does. Worked out once per step and mask, for all layers.
    """
    memo_key = (id(attention_mask), query_len, is_causal, device)
    found = step.memo.get(memo_key)
    if found is None or found[0] is not attention_mask:
        found = (attention_mask, _plan(step, query_len, attention_mask, is_causal, device))
        step.memo[memo_key] = found
    return found[1]


def _plan(
    step: Step, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[AttentionMetadata, torch.Tensor | None] | None:
    if attention_mask is None:
        # without a mask, implementations attend to everything unless several queries are causal among themselves
        if (is_causal and query_len > 1) or any(step.paddings):
            return None
        return build_metadata(step, query_len, MaskPattern(causal=False), None, device), None
    if not isinstance(attention_mask, PagedMask):
        return _plan_dense(step, query_len, attention_mask, device)
    arguments, pattern = attention_mask.arguments, attention_mask.pattern
    sizes = (arguments["q_length"], arguments["kv_length"], arguments.get("kv_offset", 0))
    if pattern is None or sizes != (query_len, step.length - step.first, step.first):
        return None
    if pattern.causal and arguments.get("q_offset", 0) != step.length - query_len:
        return None
    columns = attention_mask.visible_columns()
    if columns is None or (pattern.chunk is not None and query_len > 1):
        return None
    if pattern.causal and any(end < step.length for end in columns[1]):
        return None
    metadata = build_metadata(step, query_len, pattern, columns, device)
    return None if metadata is None else (metadata, None)


def _plan_dense(
    step: Step, query_len: int, mask: torch.Tensor, device: torch.device
) -> tuple[AttentionMetadata, torch.Tensor | None] | None:
    shift = metadata_shift(step)
    if shift is None or mask.dim() != 4 or mask.shape[-1] != step.length - step.first:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    metadata = build_metadata(step, query_len, MaskPattern(causal=False), None, device)
    return None if metadata is None else (metadata, _in_table_coordinates(mask.float(), shift))


def metadata_shift(step: Step) -> int | None:
    """Columns to add in front of a dense mask to make it count in table coordinates; `None` if rows differ."""
    if any(step.paddings) or len(set(step.dropped)) != 1:
        return None
    return step.first - step.dropped[0]


def _in_table_coordinates(bias: torch.Tensor, shift: int) -> torch.Tensor:
    return nn.functional.pad(bias, (shift, 0), value=float("-inf")) if shift else bias


def build_metadata(
    step: Step,
    query_len: int,
    pattern: MaskPattern,
    columns: tuple[tuple[int, ...], tuple[int, ...]] | None,
    device: torch.device,
) -> AttentionMetadata:
    """
    The metadata of one step and pattern.

    Args:
        columns: First and end of the key positions that each row's padding mask leaves visible, in the padded batch.

    Raises:
        ValueError: if the mask shows positions that were padding when they were cached and so were not stored.
    """
    rows = len(step.host_tables)
    firsts, ends = columns if columns is not None else ((step.first,) * rows, (step.length,) * rows)
    if len(firsts) != rows:
        firsts, ends = firsts * rows, ends * rows
    seq_lens, starts = [], []
    for padding, dropped, first, end in zip(step.paddings, step.dropped, firsts, ends):
        if first < padding and end > first:
            raise ValueError(
                f"the attention mask shows position {first}, but the first {padding} positions of that row were "
                "padding when they were cached and are not stored: pass a mask that hides them, as before"
            )
        if pattern.chunk is not None:
            # chunks count from the row's first real token
            first += max(0, step.length - 1 - first) // pattern.chunk * pattern.chunk
        first, behind = max(first, step.first), padding + dropped
        seq_lens.append(max(0, end - behind))
        starts.append(max(0, first - behind))
    return AttentionMetadata(
        block_tables=step.block_tables(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_host=tuple(seq_lens),
        starts_host=tuple(starts),
        query_len=query_len,
        block_size=step.block_size,
        causal=pattern.causal,
        window=pattern.window,
    )


# -- scaled_dot_product_attention called on handles ------------------------------------------------------------------


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
        plan = plan_attention(key.step, query.shape[2], attn_mask, False, query.device) if few else None
        if plan is not None:
            metadata, bias = plan
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            output = backends.paged_attention(query, key.blocks, value.blocks, metadata, scale=scale, bias=bias)
            key.step.counters.in_place += 1
            return output.transpose(1, 2)
    dense = [x.dense() if isinstance(x, (PagedTensor, PagedMask)) else x for x in (query, key, value, attn_mask)]
    return nn.functional.scaled_dot_product_attention(
        *dense, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
