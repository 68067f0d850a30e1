"""Chooses the layout of rectangles: which rows of a model or a call may share one."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..model.capability import Capability
from ..model.layout import Layout
from ..model.structure import KV_LAYERS
from .checks import join_check, positions_check, rows_check, side_by_side_check
from .layout import TOGETHER


def choose_layout(capability: Capability, reason: str) -> Layout:
    """Returns the best layout in which each sequence gets the results that it gets alone;
    `TOGETHER` if the checks find none. `reason`: why the model cannot be packed."""
    layout = capability.verdict(side_by_side_check, "side by side")
    if not isinstance(layout, Layout):
        layout = TOGETHER
    if layout is TOGETHER and not capability.model.config.is_encoder_decoder:
        layout = dataclasses.replace(layout, max_positions=max_positions(capability))
    return dataclasses.replace(layout, unsupported_reason=reason)


def reason_against_rows(capability: Capability, prompts: Any) -> str | None:
    """Why rows of these `Prompts` cannot leave their batch, or fork, in the layout `TOGETHER`;
    `None` if they can."""
    names = _input_names(prompts)
    kind = (
        tuple((name, str(type(prompts.model_kwargs[name]))) for name in names),
        len(prompts.paddings) > 1,
        any(prompts.paddings),
        prompts.length > 1,
        prompts.hides_tokens,
    )
    return capability.verdict(rows_check, "together", prompts, kind)


def max_positions(capability: Capability, prompts: Any = None) -> int | None:
    """Returns `Layout.max_positions` for the layout `TOGETHER`. `prompts`: `Prompts` with the
    encoder's outputs, for a model with an encoder."""
    kind = _input_names(prompts) if capability.model.config.is_encoder_decoder else ()
    count = capability.verdict(positions_check, "together", prompts, kind)
    return None if isinstance(count, str) else count


def join_requirements(capability: Capability, prompts: Any) -> tuple[bool, bool] | None:
    """Returns the result of `join_check` for these `Prompts`; for caches or inputs whose rows
    cannot be joined, `None` without a check."""
    cache = capability.cache
    if cache.cross is None:
        return None
    names = _input_names(prompts)
    layer_types = {type(layer) for layer in (*cache.layers, *cache.cross.layers)}
    unsupported = {"decoder_attention_mask", "decoder_position_ids"}
    if not layer_types <= KV_LAYERS or not unsupported.isdisjoint(names):
        return None
    kind = names, prompts.length > 1, prompts.num_encoder_tokens > 1
    verdict = capability.verdict(join_check, "together", prompts, kind)
    return None if isinstance(verdict, str) else verdict


def _input_names(prompts: Any) -> tuple[str, ...]:
    """The sorted names of the inputs of `Prompts`, without those that are `None`."""
    inputs = prompts.model_kwargs.items()
    return tuple(sorted(name for name, value in inputs if value is not None))
