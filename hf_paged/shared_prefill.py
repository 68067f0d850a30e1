"""One prefill for all rows of a prompt in transformers' own loop. In the engine, rows share a
prefill's blocks instead. This module is one of hf_paged's optional parts (`rooms.py`), and imports
none of the others."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from . import compat
from .cache.paged_cache import PagedCache
from .generation.call import Call, first_rows
from .generation.invocation import Invocation
from .model.own_loop import ROW_INPUTS, cache_parts, mismatched_rows, select_rows
from .model.structure import hook_reasons, row_reasons

# modules and packages, each with a dot at the end: the `reorder_cache` of their cache layer classes
# repeats everything that a layer holds
_REPEATABLE_MODULES = ("transformers.cache_utils.", "hf_paged.", "builtins.", "abc.")


def share_prefill(prefill: Invocation, call: Call) -> Any:
    """If the results are the same, runs the prefill for only one of the rows that were expanded
    from each prompt, and repeats that row's outputs and cache. Otherwise runs the original prefill.
    Returns the outputs for all rows."""
    arguments = prefill.bound.arguments
    first_rows_inputs = None
    # only the original method computes chunked prefills
    is_whole = arguments["generation_config"].prefill_chunk_size is None
    if call.caches and call.repeats > 1 and is_whole:
        first_rows_inputs = _first_rows_inputs(
            arguments["input_ids"], arguments["model_kwargs"], call.repeats
        )
    if first_rows_inputs is None or not _rows_are_independent(prefill.model):
        return prefill.run()
    ids, inputs = first_rows_inputs
    arguments["input_ids"] = ids
    arguments["model_kwargs"] = inputs
    # by `id` of a cache: the names of its attributes before the prefill
    attributes = {
        id(value): {*vars(value)} for value in inputs.values() if isinstance(value, Cache)
    }
    outputs = prefill.original(*prefill.bound.args, **prefill.bound.kwargs)
    # the model may have created a cache
    caches = [value for value in outputs.values() if isinstance(value, Cache)]
    if not caches:
        caches = [value for value in inputs.values() if isinstance(value, Cache)]
    num_prompts = len(ids)
    rows = torch.arange(num_prompts, device=ids.device).repeat_interleave(call.repeats)
    for cache in caches:
        # reordering rows can also repeat them
        cache.reorder_cache(rows)
        if id(cache) in attributes:  # the model's forward may have added tensors with rows
            for name in vars(cache).keys() - attributes[id(cache)]:
                setattr(cache, name, select_rows(name, getattr(cache, name), rows, num_prompts))
    for name, value in outputs.items():
        outputs[name] = select_rows(name, value, rows, num_prompts)
    call.route_fields["prefills_shared"] = True
    return outputs


def _first_rows_inputs(
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    repeats: int,
) -> tuple[torch.Tensor, dict[str, Any]] | None:
    """Returns the token ids and the inputs of the first of every `repeats` rows; `None` if the
    other rows are not copies of the first, if an input cannot be selected by row, or if a cache is
    not paged, not empty or cannot repeat its rows."""
    if mismatched_rows(model_kwargs, len(input_ids)) is not None:
        return None
    ids = first_rows(input_ids, repeats)
    inputs = dict(model_kwargs)
    for name, value in model_kwargs.items():
        if isinstance(value, Cache):
            for part in cache_parts(value):
                if not isinstance(part, PagedCache) or part.rows.sequences:
                    return None
                if not all(map(_can_repeat_rows, part.layers)):
                    return None
            continue
        is_scalar = isinstance(value, (bool, int, float, str))
        if value is not None and not is_scalar:
            if name not in ROW_INPUTS:
                return None
            if name.endswith("position_ids") and value.dim() != 2:
                return None
            inputs[name] = first_rows(value, repeats)
            if inputs[name] is None:
                return None
    return None if ids is None else (ids, inputs)


def _can_repeat_rows(layer: Any) -> bool:
    """Whether `reorder_cache` repeats everything that a cache layer holds. A model's own class may
    hold states that an inherited `reorder_cache` leaves out."""
    for base in type(layer).__mro__:
        is_repeatable = f"{base.__module__}.".startswith(_REPEATABLE_MODULES)
        if not is_repeatable and "reorder_cache" not in vars(base):
            return False
    return True


def _rows_are_independent(model: Any) -> bool:
    """Whether rows do not affect one another: there are no `hook_reasons` or `row_reasons`, such as
    dropout, and no module has a replaced forward, has a pre-hook that gets keyword arguments, or
    makes its own cache."""
    modules = list(model.modules())
    if any(hook_reasons(model, modules)) or any(row_reasons(model, modules, is_packed=True)):
        return False
    return not any(
        "forward" in vars(module)
        or module._forward_pre_hooks_with_kwargs  # by which PEFT passes one adapter per row
        or compat.attribute(module, "_setup_cache")
        for module in modules
    )
