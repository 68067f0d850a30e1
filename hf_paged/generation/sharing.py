"""One prefill per prompt: rows that `generate` expands from one prompt are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..cache.paged_cache import PagedCache
from .call import cache_parts

# Inputs whose rows are their first dimension in every model.
_ROW_INPUTS = {"attention_mask", "encoder_outputs", "inputs_embeds", "position_ids", "token_type_ids"}
_ROW_INPUTS |= {"decoder_attention_mask", "decoder_input_ids", "decoder_position_ids"}


def prefill_once(
    prefill: Callable[..., ModelOutput],
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    repeats: int,
) -> ModelOutput | None:
    """
    Runs `prefill(input_ids, model_kwargs)` on every `repeats`-th row and gives each of its rows to `repeats` rows:
    blocks by reference, outputs by repetition. `None`, with nothing run, where that could give anything but what all
    rows give.

    Args:
        input_ids (`torch.Tensor` of shape `(batch * repeats, length)`): Each prompt `repeats` times in a row.
    """
    if repeats == 1 or not _rows_are_independent(model):
        return None
    ids, sliced, caches = first_rows(input_ids, repeats), dict(model_kwargs), []
    for name, value in model_kwargs.items():
        if isinstance(value, Cache):
            if not all(isinstance(part, PagedCache) and part.is_empty for part in cache_parts(value)):
                return None
            caches.append(value)
        elif value is not None and not isinstance(value, (bool, int, float, str)):  # which have no rows
            if name not in _ROW_INPUTS or (name.endswith("position_ids") and value.dim() != 2):
                return None
            sliced[name] = first_rows(value, repeats)
            if sliced[name] is None:
                return None
    if ids is None:
        return None
    outputs = prefill(ids, sliced)
    for cache in caches:  # every layer must know how to reorder its rows; to select one several times is the same
        cache.reorder_cache(torch.arange(len(ids), device=input_ids.device).repeat_interleave(repeats))
    for name, value in outputs.items():
        if not isinstance(value, Cache):
            outputs[name] = _repeat(value, len(ids), repeats)
    return outputs


def first_rows(value: Any, repeats: int) -> Any:
    """Every `repeats`-th row of a tensor, or of all in a `ModelOutput`; `None` unless the rows between are like it."""
    if isinstance(value, ModelOutput):
        parts = {name: first_rows(part, repeats) for name, part in value.items()}
        return None if any(part is None for part in parts.values()) else type(value)(**parts)
    if not isinstance(value, torch.Tensor) or value.shape[0] % repeats:
        return None
    groups = value.unflatten(0, (-1, repeats))
    return groups[:, 0].contiguous() if bool((groups == groups[:, :1]).all()) else None


def _rows_are_independent(model: PreTrainedModel) -> bool:
    """
    Whether a row's result is its own and outside the cache nothing remembers it: no dropout, no code watching the
    forward, no expert capacity for a whole batch, no module that sets up a state of its own for a number of rows.
    """
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity") or getattr(config, "output_router_logits", False):
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_setup_cache")
        for module in model.modules()
    )


def _repeat(value: Any, rows: int, repeats: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows:
        return value.repeat_interleave(repeats, dim=0)
    return tuple(_repeat(part, rows, repeats) for part in value) if isinstance(value, tuple) else value
