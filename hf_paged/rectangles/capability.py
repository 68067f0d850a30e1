"""Decides which rows may share a rectangle, for a model, for a `generate` call and for an engine
request that has inputs. `checks` runs the forwards that decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..batching.execution.prompts import Prompts
from ..batching.generation import RequestState
from ..generation.candidate import Candidate, applicable_reasons
from ..model.capability import Capability
from ..model.layout import Layout
from ..model.structure import KV_LAYERS
from ..topics import Topic
from .checks import TOGETHER, join_check, positions_check, rows_check, side_by_side_check
from .rectangle import with_join_keys
from .states import state_layers


def choose_layout(capability: Capability, reason: str) -> Layout:
    """Returns the layout for a model that cannot be packed because of `reason`: the result of
    `side_by_side_check`, or `TOGETHER` if the check cannot run or fails with an error."""
    layout = capability.verdict(side_by_side_check, "side by side")
    if not isinstance(layout, Layout):
        layout = TOGETHER
    if layout is TOGETHER and not capability.model.config.is_encoder_decoder:
        layout = dataclasses.replace(layout, max_positions=max_positions(capability))
    return dataclasses.replace(layout, unsupported_reason=reason)


def check_rows(capability: Capability, prompts: Prompts) -> tuple[Prompts, str | None]:
    """Checks whether the rows of `Prompts` can leave their batch and fork in the layout `TOGETHER`.
    If they can, returns the prompts with their `encoder_use`, and `None`; otherwise the unchanged
    prompts, and the reason."""
    names = _input_names(prompts)
    call_kind = (
        tuple((name, str(type(prompts.model_kwargs[name]))) for name in names),
        len(prompts.paddings) > 1,
        any(prompts.paddings),
        prompts.length > 1,
        prompts.num_encoder_tokens > 1,  # the check compares lengths to find the `encoder_use`
        prompts.hides_tokens,
    )
    verdict = capability.verdict(rows_check, "together", prompts, call_kind)
    if isinstance(verdict, str):
        return prompts, verdict
    return dataclasses.replace(prompts, encoder_use=verdict), None


def max_positions(capability: Capability, prompts: Any = None) -> int | None:
    """Returns `Layout.max_positions` for the layout `TOGETHER`. `prompts`: `Prompts` with the
    encoder's outputs, for a model with an encoder."""
    call_kind = _input_names(prompts) if capability.model.config.is_encoder_decoder else ()
    count = capability.verdict(positions_check, "together", prompts, call_kind)
    return None if isinstance(count, str) else count


def join_requirements(capability: Capability, prompts: Any) -> tuple[bool, bool] | None:
    """Returns the result of `join_check` for these `Prompts`. Returns `None` without a check if
    the cache or the inputs rule out joining rows."""
    cache = capability.cache
    if cache.cross is None:
        return None
    names = _input_names(prompts)
    layer_types = {type(layer) for layer in (*cache.layers, *cache.cross.layers)}
    unsupported_inputs = {"decoder_attention_mask", "decoder_position_ids"}
    if not layer_types <= KV_LAYERS or not unsupported_inputs.isdisjoint(names):
        return None
    call_kind = names, prompts.length > 1, prompts.num_encoder_tokens > 1
    verdict = capability.verdict(join_check, "together", prompts, call_kind)
    return None if isinstance(verdict, str) else verdict


def _input_names(prompts: Any) -> tuple[str, ...]:
    """The sorted names of the inputs of `Prompts` that are not `None`."""
    inputs = prompts.model_kwargs.items()
    return tuple(sorted(name for name, value in inputs if value is not None))


def reasons_against_call(candidate: Candidate, reason: str) -> Iterator[str]:
    """Yields the reasons why the engine cannot run the rows of a call; `reason` says why they
    cannot be packed. If the rows cannot run side by side with other calls' rows, they stay together
    in their original batch. The generator then sets the candidate's prompts, layout and paddings,
    once all reasons have been taken from it."""
    layout = candidate.layout
    is_side_by_side = layout.unsupported_reason is not None and layout.is_side_by_side
    if is_side_by_side and not (layout.layers or state_layers(candidate.cache)):
        # the engine would save no memory, and its steps take longer than those of a lone call
        yield f"{reason}, and {Topic.CACHE('its forwards store nothing in the cache')}"
        return
    returns_cache = candidate.config.return_dict_in_generate
    if reason == layout.unsupported_reason and is_side_by_side and not returns_cache:
        if layout.can_mix_lengths or not any(candidate.paddings):
            return
        reason = Topic.PADDING(f"padding changes the rows' results, and {reason}")
    repeats = candidate.call.repeats
    prompts = candidate.prompts or candidate.find_prompts()
    if prompts is None:
        yield Topic.MODEL_CODE(f"{reason}, and the model overrides how rows are repeated")
        return
    positions = prompts.position_ids
    num_repeated = len(prompts.input_ids) * repeats
    yield from applicable_reasons(
        {
            Topic.OPTIONS(
                f"the cache is returned (`return_dict_in_generate`), and {reason}"
            ): returns_cache,
            Topic.INPUTS(f"{reason}, and it is unknown which rows belong to which prompt"): repeats
            > 1
            and num_repeated != len(candidate.inputs.input_ids),
            Topic.INPUTS(f"{reason}, and there is not one position id per token"): (
                positions is not None and positions.shape[-1] != prompts.length
            ),
        }
    )
    capability = candidate.capability
    prompts, rows_reason = check_rows(capability, prompts)
    if rows_reason and any(prompts.paddings):  # the model may attend to padding
        prompts = dataclasses.replace(prompts, paddings=[0] * len(prompts.paddings))
        prompts, rows_reason = check_rows(capability, prompts)
    if rows_reason:
        yield rows_reason if rows_reason in reason else f"{reason}, and {rows_reason}"
    layout = dataclasses.replace(
        TOGETHER,
        unsupported_reason=reason,
        max_positions=max_positions(capability, prompts),
    )
    prompts = with_join_keys(prompts, join_requirements(capability, prompts))
    candidate.serve_together(prompts, layout)


def prepare(
    capability: Capability, layout: Layout, state: RequestState, prompts: Prompts
) -> tuple[Layout, str | None]:
    """Prepares an engine's request whose prompt has inputs besides token ids. Returns the layout
    for the request's loop, and the reason why the request cannot run (`None` if it can). Raises
    `IndexError` if the prompt takes more positions than the model's table has, and the errors of
    the model's encoders of images and videos."""
    model = capability.model
    if not model.config.is_encoder_decoder:
        state.encode_media(model)
    prompts, reason = check_rows(capability, prompts)
    if reason is not None:
        return layout, reason
    prompts = with_join_keys(prompts, join_requirements(capability, prompts))
    shift = prompts.position_shift(0)
    state.request.limit_positions(max_positions(capability, prompts), shift)
    state.request.set_inputs(prompts, 0, None)
    # rows that can join run side by side, even if the layout, chosen for the model, rules that out
    if prompts.join_key is not None:
        layout = dataclasses.replace(layout, is_side_by_side=True)
    return layout, None
